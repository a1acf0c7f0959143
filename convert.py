"""Convert checkpoints to and from Hugging Face folders, equal to the bit, and Megatron-LM's.

    python convert.py --source hf --target nanomegatron --input-path Llama-3.1-8B --output-path llama
    python train.py --load llama --finetune --config llama/hf ...
    python convert.py --source nanomegatron --target hf --input-path runs/NAME/ckpt --output-path exported
    python convert.py --source megatron-core --target hf --input-path THEIRS --output-path exported
    python convert.py --source nanomegatron --target megatron-core --input-path runs/NAME/ckpt --output-path M

`nanomegatron` is a checkpoint of this program. `megatron-core`, or `megatron`, is one of Megatron-LM (written
as torch_dist). If one says nothing of its model, flags or --config do (`--num-layers 32 ...`).

    Llama-3.1-8B/                              llama/
        model-00001-of-00004.safetensors           iter_0000000/    the weights under our names, types kept
        model.safetensors.index.json               hf/              every other file of the folder, and the
        config.json, tokenizer.json, ...                            headers of the weight files

With hf/ the conversion back gives the same files, byte for byte. A model trained here has no such folder: its
config.json is generated, and its weights are written to one model.safetensors. Tensors are read and written
one at a time, and the output gets its name only when it is complete. (`train.py --load` takes a folder of
either as it is.) Exit codes: 0 done, 2 wrong arguments or input.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

LAYOUT_FLAGS = [
    f"--{end}{kind}-parallel-size" for end in ("target-", "") for kind in ("tensor", "pipeline", "expert")
]
LAYOUT_FLAGS += [f"--{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert")]
SPELLINGS = {"megatron": "megatron-core", "torch_dist": "megatron-core"}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, `model`: flags of one. argparse exits with code 2; raises ValueError too."""
    p = argparse.ArgumentParser(prog="convert.py", description=__doc__.splitlines()[0])
    kinds = ("hf", "nanomegatron", "megatron-core", "megatron")
    p.add_argument("--source", required=True, choices=kinds, help="what --input-path holds")
    p.add_argument("--target", required=True, choices=(*kinds, "torch_dist"), help="what is to be written")
    p.add_argument("--input-path", "--load-dir", required=True, help="folder to read")
    p.add_argument("--output-path", "--save-dir", required=True, help="folder to make")
    p.add_argument("--ckpt-step", type=int, help="iteration to read; the newest")
    for flag in LAYOUT_FLAGS:
        p.add_argument(flag, type=int, dest="layout", help=argparse.SUPPRESS)
    args, args.model = p.parse_known_args(argv)
    args.source, args.target = (SPELLINGS.get(kind, kind) for kind in (args.source, args.target))
    if args.model and args.source != "megatron-core":
        p.error(f"unrecognized arguments: {' '.join(args.model)}")
    target = Path(args.output_path)
    if args.source == args.target:
        raise ValueError(f"--source {args.source} --target {args.target}: nothing to convert")
    if not Path(args.input_path).is_dir():
        raise ValueError(f"--input-path {args.input_path}: no such folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--output-path {target}: exists; give a new folder")
    return args


def refused(error: Exception) -> int:
    """Print an error; returns its exit code."""
    print(f"convert.py: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":  # wrong arguments are reported before torch is imported
    try:
        arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(refused(error))

import torch

from nanomegatron.checkpoint.blocks import sync
from nanomegatron.checkpoint.checkpoint import CheckpointError, Loaded, SaveError, load, save
from nanomegatron.checkpoint.files import DTYPES, TORCH_DTYPES, Piece, fill, raw_bytes, write_shard
from nanomegatron.checkpoint.folder import make_folder, publish_folder
from nanomegatron.checkpoint.formats import open_checkpoint, reader
from nanomegatron.checkpoint.hf import (
    HEADER,
    TOKENIZER_FILES,
    WEIGHTS,
    Folder,
    folder_tokenizer,
    model_parts,
    places,
)
from nanomegatron.checkpoint.manifest import Manifest
from nanomegatron.checkpoint.megatron import open_megatron
from nanomegatron.checkpoint.megatron_write import write_megatron
from nanomegatron.config.cli import build_config, from_toml, parse, to_toml
from nanomegatron.config.hf import settings_of, to_hf
from nanomegatron.config.megatron_args import megatron_folder
from nanomegatron.config.settings import ParallelConfig, PrecisionConfig
from nanomegatron.data.tokenizer import build_tokenizer, tokenizer_from_spec
from nanomegatron.mesh import Mesh, World

WEIGHTS_ONLY = dict.fromkeys(("iteration", "consumed_samples", "skipped_samples"), 0)
WEIGHTS_ONLY |= {"optimizer": {}, "circumstances": {}}
ALONE = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))


def main(argv: list[str] | None = None) -> int:
    """Convert, and print notes on what was left out; returns the exit code."""
    try:
        args = arguments(argv)
    except ValueError as error:
        return refused(error)
    source, target = Path(args.input_path), Path(args.output_path).absolute()
    temporary = target.with_name(f"{target.name}.tmp{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        notes = list(convert(args, source, temporary, target))
        for path in filter(Path.is_file, temporary.rglob("*")):
            with open(path, "rb+") as file:
                sync(file)
        os.replace(temporary, target)
    except (ValueError, OSError, CheckpointError, SaveError) as error:
        return refused(error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if args.target == "megatron-core":
        notes.append(
            "torch_dist, which Megatron-LM loads; --target nanomegatron writes a checkpoint for here"
        )
    if args.layout:
        notes.append("the flags of a layout are needless: any layout loads what is written")
    print("\n".join([f"{target} is written", *notes]))
    return 0


def convert(args: argparse.Namespace, source: Path, temporary: Path, target: Path) -> Iterator[str]:
    """Write the target to `temporary`, which becomes `target`; yields notes."""
    if args.source == "hf" and args.target == "nanomegatron":
        yield from to_ours(source, temporary, target)
        return
    if args.source == "hf":  # by way of a checkpoint of ours
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.tmp") as between:
            yield from to_ours(source, Path(between), target)
            to_megatron(Source.ours(Path(between), None), temporary)
        return
    here = args.source == "nanomegatron"
    found = Source.ours(source, args.ckpt_step) if here else Source.megatron(args, source)
    yield from found.loaded.notes
    match args.target:
        case "hf":
            yield from to_hf_folder(found, temporary)
        case "megatron-core":
            to_megatron(found, temporary)
        case _:
            from_megatron(found, temporary)


@dataclass(frozen=True)
class Source:
    """A checkpoint that is read: of this program, or one of Megatron-LM by our names of tensors."""

    root: Path
    folder: Path
    manifest: Manifest
    loaded: Loaded

    @staticmethod
    def ours(root: Path, step: int | None) -> "Source":
        """Verify and open one of this program. Raises CheckpointError."""
        if megatron_folder(root, step):
            raise CheckpointError(f"--input-path {root}: is of Megatron-LM; give --source megatron-core")
        loaded = load(root, [], ALONE, step)
        if loaded is None:
            raise CheckpointError(f"--input-path {root}: no checkpoint there")
        folder = root / f"iter_{loaded.iteration:07d}"
        folder = folder if folder.exists() else folder.with_suffix(".old")
        return Source(root, folder, open_checkpoint(folder), loaded)

    @staticmethod
    def megatron(args: argparse.Namespace, root: Path) -> "Source":
        """Open one of Megatron-LM; its args, or flags, say what the model is. Raises ValueError."""
        folder = megatron_folder(root, args.ckpt_step)
        if folder is None:
            ours = any(root.glob("iter_*/manifest.json"))
            fix = (
                "it is of nanomegatron; give --source nanomegatron" if ours else "no metadata.json, mp_rank_*"
            )
            raise CheckpointError(f"--input-path {root}: no checkpoint of Megatron-LM there: {fix}")
        parsed = parse(["--load", str(folder), *args.model])
        config = parsed.config
        errors = list(parsed.errors)
        if not errors and not config.data.vocab_size:
            errors = [f"{folder}: it does not say how large the vocabulary is; give --vocab-size"]
        if errors:
            raise ValueError("\n  ".join(errors))
        length = config.model.max_position_embeddings or config.data.seq_length
        config = replace(config, model=replace(config.model, max_position_embeddings=length))
        manifest = open_megatron(folder, config.model, config.data.vocab_size)
        config = replace(config, checkpoint=replace(config.checkpoint, load=None))
        notes = [f"{folder} has no hash that says whether it is damaged"]
        return Source(root, folder, manifest, Loaded(manifest.iteration, {}, to_toml(config), notes))

    @property
    def vocab_size(self) -> int:
        return self.manifest.tensors["model/embedding.word_embeddings.weight"].shape[0]

    def fill(self, keys: Iterable[str]) -> list[Piece]:
        """Read whole tensors. Raises CheckpointError if one is missing."""
        pieces = []
        for key in keys:
            if (saved := self.manifest.tensors.get(key)) is None:
                raise CheckpointError(f"{self.folder}: {key} is missing")
            data = torch.empty(saved.shape, dtype=TORCH_DTYPES[saved.dtype])
            pieces.append(Piece(key, saved.shape, (0,) * len(saved.shape), data))
        fill(self.folder, self.manifest, pieces, reader(self.manifest))
        return pieces


def to_megatron(source: Source, temporary: Path) -> None:
    """Write the weights as torch_dist of Megatron-LM, a layer at a time."""
    config, iteration = from_toml(source.loaded.config_toml), source.loaded.iteration

    def whole(name: str) -> torch.Tensor:
        return source.fill([f"model/{name}"])[0].data

    write_megatron(temporary, config, source.vocab_size, iteration, whole)


def from_megatron(source: Source, temporary: Path) -> None:
    """Write the weights of a Megatron-LM checkpoint as one of ours, a file for each layer."""
    layers: dict[str, list[str]] = {}
    for key in source.manifest.tensors:
        if key.startswith("model/"):
            found = re.match(r"model/decoder\.layers\.\d+\.", key)
            layers.setdefault(found[0] if found else "", []).append(key)
    folder = temporary / "iter_0000000.tmp"
    make_folder(folder, 0)
    for rank, keys in enumerate(layers.values()):
        write_shard(folder, rank, source.fill(keys))
    config = from_toml(source.loaded.config_toml)
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.data.vocab_size)
    about = {"tokenizer": tokenizer.spec, "tokenizer_fingerprint": tokenizer.fingerprint}
    publish_folder(folder, len(layers), 0, WEIGHTS_ONLY | about | {"hf": {}}, source.loaded.config_toml)


def to_ours(source: Path, temporary: Path, target: Path) -> Iterator[str]:
    """Convert a Hugging Face folder to a checkpoint in `temporary`, renamed `target` later; yields notes."""
    there = Folder(source)
    config = build_config(there.settings)
    vocab_size = config.data.vocab_size
    parts = model_parts(config.model, vocab_size)
    found = there.match(parts)
    ours = {f"model/{p.name}": found[p.name].ours(there.tensors[found[p.name].name]) for p in parts}
    rest = there.tensors.keys() - {place.name for place in found.values()}
    kept = {f"hf/{name}": there.tensors[name] for name in sorted(rest)}
    pieces = [Piece(key, tuple(data.shape), (0,) * data.dim(), data) for key, data in (ours | kept).items()]
    dtype = pieces[0].data.dtype
    precision = PrecisionConfig(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    state = dict(WEIGHTS_ONLY)
    try:
        state |= find_tokenizer(source, target / "hf", vocab_size)
    except ValueError as error:
        yield f"without a tokenizer: {error}"
    state["hf"] = keep_files(there, temporary / "hf")
    save(temporary, 0, pieces, state, to_toml(replace(config, precision=precision)), ALONE)
    if left := {path.name for path in source.iterdir()} - set(state["hf"]) - set(there.files):
        yield f"left out: {', '.join(sorted(left))}"


def find_tokenizer(folder: Path, moved: Path, vocab_size: int) -> dict:
    """Return a checkpoint's entries for the folder's tokenizer, whose files will be in `moved`.

    Without one it is a NullTokenizer: text is ids as decimal numbers. Raises ValueError.
    """
    found = folder_tokenizer(folder, vocab_size)
    found.spec |= {
        key: str(moved / name) for key, name in TOKENIZER_FILES.get(found.spec["type"], {}).items()
    }
    return {"tokenizer": found.spec, "tokenizer_fingerprint": found.fingerprint}


def keep_files(there: Folder, folder: Path) -> dict[str, str]:
    """Copy all files but weights, and the headers of weight files -> {name: SHA-256} of the copies."""
    folder.mkdir()
    for path in there.path.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS:
            shutil.copyfile(path, folder / path.name)
    for name in there.files:
        with open(there.path / name, "rb") as file:
            size = file.read(8)
            (folder / f"{name}{HEADER}").write_bytes(size + file.read(int.from_bytes(size, "little")))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def to_hf_folder(source: Source, temporary: Path) -> Iterator[str]:
    """Convert a checkpoint to a Hugging Face folder in `temporary`; yields notes."""
    kept = kept_files(source.root / "hf", source.loaded.state.get("hf", {}))
    files, notes = (kept, []) if kept else new_files(source)
    theirs = [key for name, data in files.items() if name.endswith(HEADER) for key in json.loads(data[8:])]
    weights = Weights(source, json.loads(files["config.json"])["model_type"], theirs)
    files = kept or files | {f"model.safetensors{HEADER}": weights.header()}
    for name, data in files.items():
        if name.endswith(HEADER):
            weights.write(temporary / name.removesuffix(HEADER), data)
        else:
            (temporary / name).write_bytes(data)
    yield from notes


def kept_files(folder: Path, hashes: dict[str, str]) -> dict[str, bytes]:
    """Read the files that `keep_files` has copied. Raises CheckpointError if one has changed."""
    paths = [folder / Path(name).name for name in hashes]
    files = {path.name: path.read_bytes() if path.is_file() else b"" for path in paths}
    for path, expected in zip(paths, hashes.values(), strict=True):
        if hashlib.sha256(files[path.name]).hexdigest() != expected:
            raise CheckpointError(f"{path}: not as the checkpoint has kept it")
    return files


def new_files(source: Source) -> tuple[dict[str, bytes], list[str]]:
    """Return config.json, the tokenizer's files and other kept files of the source model; and notes."""
    config, files = from_toml(source.loaded.config_toml), {}
    notes, eod = [], None
    try:
        tokenizer = tokenizer_from_spec(source.loaded.state.get("tokenizer", {}), beside=source.root)
        eod, names = tokenizer.eod, TOKENIZER_FILES.get(tokenizer.spec["type"], {})
        files = {name: Path(tokenizer.spec[key]) for key, name in names.items()}
        for path in [path.with_name("tokenizer_config.json") for path in files.values()]:
            files |= {path.name: path} if path.is_file() else {}
        notes = [] if files else [f"without a tokenizer: a {tokenizer.spec['type']} has no file for it"]
    except ValueError as error:
        notes = [f"without a tokenizer: {error}"]
    table = to_hf(replace(config, data=replace(config.data, vocab_size=source.vocab_size)), eod)
    kept = {path.name: path for path in (source.root / "hf").glob("*") if path.suffix != HEADER}
    if theirs := kept.pop("config.json", None):
        table = same_model(json.loads(theirs.read_text()), table)
    data = {name: path.read_bytes() for name, path in (files | kept).items()}
    return data | {"config.json": (json.dumps(table, indent=2) + "\n").encode()}, notes


def same_model(theirs: dict, ours: dict) -> dict:
    """Return the config.json that training began with, with the present dtype; ours if the model changed."""
    before, now = (settings_of(table) | dict.fromkeys(("bf16", "fp16")) for table in (theirs, ours))
    if before != now:
        return ours | {key: value for key, value in theirs.items() if key.endswith("_token_id")}
    return theirs | {"dtype" if "dtype" in theirs else "torch_dtype": ours["torch_dtype"]}


class Weights:
    """A checkpoint's tensors under their Hugging Face names, to be written. theirs: names in kept headers."""

    def __init__(self, source: Source, family: str, theirs: Iterable[str]) -> None:
        self.source, self.parts, self.saved = source, {}, source.manifest.tensors
        tensors = source.manifest.tensors.items()
        ours = {key.removeprefix("model/"): saved.shape for key, saved in tensors if key.startswith("model/")}
        for name, place in places(ours, family, theirs).items():
            self.parts.setdefault(place.name, []).append((place, f"model/{name}"))

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of this Hugging Face name."""
        if name not in self.parts:
            return self.source.fill([f"hf/{name}"])[0].data
        parts = sorted(self.parts[name], key=lambda part: part[0].index)
        return parts[0][0].theirs([piece.data for piece in self.source.fill(key for _, key in parts)])

    def write(self, path: Path, header: bytes) -> None:
        """Write a safetensors file with this header: the bytes before its first tensor."""
        entries = {name: entry for name, entry in json.loads(header[8:]).items() if name != "__metadata__"}
        with open(path, "xb") as file:
            file.write(header)
            for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
                tensor = self.tensor(name)
                if (DTYPES[tensor.dtype], list(tensor.shape)) != (entry["dtype"], entry["shape"]):
                    raise CheckpointError(
                        f"{self.source.folder}: {name} is not {entry['dtype']} {entry['shape']}"
                    )
                file.write(raw_bytes(Piece(name, (), (), tensor)))

    def header(self) -> bytes:
        """Return the header of a new safetensors file with all tensors."""
        entries, end = {}, 0
        for name, ((place, key), *_) in self.parts.items():
            saved = self.saved[key]
            shape = place.shape(saved.shape)
            begin, end = end, end + math.prod(shape) * TORCH_DTYPES[saved.dtype].itemsize
            entries[name] = {"dtype": saved.dtype, "shape": shape, "data_offsets": (begin, end)}
        text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
