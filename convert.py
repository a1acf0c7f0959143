"""Convert checkpoints to and from Hugging Face folders, equal to the bit.

    python convert.py --source hf --target megatron --input-path Llama-3.1-8B --output-path llama
    python train.py --load llama --finetune --config llama/hf ...
    python convert.py --source megatron --target hf --input-path runs/NAME/ckpt --output-path exported

    Llama-3.1-8B/                              llama/
        model-00001-of-00004.safetensors           iter_0000000/    the weights under our names, types kept
        model.safetensors.index.json               hf/              every other file of the folder, and the
        config.json, tokenizer.json, ...                            headers of the weight files

With hf/ the conversion back gives the same files, byte for byte. A model trained here has no such folder: its
config.json is generated, and its weights are written to one model.safetensors. Tensors are read and written
one at a time, and the output gets its name only when it is complete. (`train.py --load` takes a Hugging Face
folder as it is.) Exit codes: 0 done, 2 wrong arguments or input.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

LAYOUT_FLAGS = [
    f"--{end}{kind}-parallel-size" for end in ("target-", "") for kind in ("tensor", "pipeline", "expert")
]
LAYOUT_FLAGS += [f"--{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert")]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; argparse exits with code 2. Raises ValueError for paths that do not fit."""
    p = argparse.ArgumentParser(prog="convert.py", description=__doc__.splitlines()[0])
    p.add_argument("--source", required=True, choices=("hf", "megatron"), help="what --input-path holds")
    p.add_argument("--target", required=True, choices=("hf", "megatron"), help="what is to be written")
    p.add_argument("--input-path", "--load-dir", required=True, help="folder to read")
    p.add_argument("--output-path", "--save-dir", required=True, help="folder to make")
    p.add_argument("--ckpt-step", type=int, help="iteration to read; the newest")
    for flag in LAYOUT_FLAGS:
        p.add_argument(flag, type=int, dest="layout", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
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
from nanomegatron.checkpoint.files import DTYPES, TORCH_DTYPES, Piece, fill, raw_bytes
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
from nanomegatron.config.cli import build_config, from_toml, to_toml
from nanomegatron.config.hf import settings_of, to_hf
from nanomegatron.config.settings import ParallelConfig, PrecisionConfig
from nanomegatron.data.tokenizer import tokenizer_from_spec
from nanomegatron.mesh import Mesh, World

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
        to_ours = args.source == "hf"
        notes = list((to_megatron if to_ours else to_hf_folder)(source, temporary, target, args.ckpt_step))
        for path in filter(Path.is_file, temporary.rglob("*")):
            with open(path, "rb+") as file:
                sync(file)
        os.replace(temporary, target)
    except (ValueError, OSError, CheckpointError, SaveError) as error:
        return refused(error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if args.layout:
        notes.append("the flags of a layout are needless: any layout loads what is written")
    print("\n".join([f"{target} is written", *notes]))
    return 0


def to_megatron(source: Path, temporary: Path, target: Path, _: int | None) -> Iterator[str]:
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
    state = {
        "iteration": 0,
        "consumed_samples": 0,
        "skipped_samples": 0,
        "optimizer": {},
        "circumstances": {},
    }
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


def to_hf_folder(source: Path, temporary: Path, _: Path, step: int | None) -> Iterator[str]:
    """Convert a checkpoint to a Hugging Face folder in `temporary`; yields notes."""
    loaded = load(source, [], ALONE, step)
    if loaded is None:
        raise CheckpointError(f"--input-path {source}: no checkpoint there")
    folder = source / f"iter_{loaded.iteration:07d}"
    folder = folder if folder.exists() else folder.with_suffix(".old")
    manifest = open_checkpoint(folder)
    kept = kept_files(source / "hf", loaded.state.get("hf", {}))
    files, notes = (kept, []) if kept else new_files(source, loaded, manifest)
    theirs = [key for name, data in files.items() if name.endswith(HEADER) for key in json.loads(data[8:])]
    weights = Weights(folder, manifest, json.loads(files["config.json"])["model_type"], theirs)
    files = kept or files | {f"model.safetensors{HEADER}": weights.header()}
    for name, data in files.items():
        if name.endswith(HEADER):
            weights.write(temporary / name.removesuffix(HEADER), data)
        else:
            (temporary / name).write_bytes(data)
    yield from loaded.notes + notes


def kept_files(folder: Path, hashes: dict[str, str]) -> dict[str, bytes]:
    """Read the files that `keep_files` has copied. Raises CheckpointError if one has changed."""
    paths = [folder / Path(name).name for name in hashes]
    files = {path.name: path.read_bytes() if path.is_file() else b"" for path in paths}
    for path, expected in zip(paths, hashes.values(), strict=True):
        if hashlib.sha256(files[path.name]).hexdigest() != expected:
            raise CheckpointError(f"{path}: not as the checkpoint has kept it")
    return files


def new_files(source: Path, loaded: Loaded, manifest: Manifest) -> tuple[dict[str, bytes], list[str]]:
    """Return config.json, the tokenizer's files and other kept files of the source model; and notes."""
    config, files = from_toml(loaded.config_toml), {}
    notes, eod = [], None
    vocab_size, _ = manifest.tensors["model/embedding.word_embeddings.weight"].shape
    try:
        tokenizer = tokenizer_from_spec(loaded.state.get("tokenizer", {}), beside=source)
        eod, names = tokenizer.eod, TOKENIZER_FILES.get(tokenizer.spec["type"], {})
        files = {name: Path(tokenizer.spec[key]) for key, name in names.items()}
        for path in [path.with_name("tokenizer_config.json") for path in files.values()]:
            files |= {path.name: path} if path.is_file() else {}
        notes = [] if files else [f"without a tokenizer: a {tokenizer.spec['type']} has no file for it"]
    except ValueError as error:
        notes = [f"without a tokenizer: {error}"]
    table = to_hf(replace(config, data=replace(config.data, vocab_size=vocab_size)), eod)
    kept = {path.name: path for path in (source / "hf").glob("*") if path.suffix != HEADER}
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

    def __init__(self, folder: Path, manifest: Manifest, family: str, theirs: Iterable[str]) -> None:
        self.folder, self.manifest, self.parts = folder, manifest, {}
        ours = [key.removeprefix("model/") for key in manifest.tensors if key.startswith("model/")]
        for name, place in places(ours, family, theirs).items():
            self.parts.setdefault(place.name, []).append((place, f"model/{name}"))

    def whole(self, key: str) -> torch.Tensor:
        """Read a whole tensor of the checkpoint. Raises CheckpointError if it is missing."""
        if (saved := self.manifest.tensors.get(key)) is None:
            raise CheckpointError(f"{self.folder}: {key} is missing")
        data = torch.empty(saved.shape, dtype=TORCH_DTYPES[saved.dtype])
        piece = Piece(key, saved.shape, (0,) * len(saved.shape), data)
        fill(self.folder, self.manifest, [piece], reader(self.manifest))
        return data

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of this Hugging Face name."""
        if name not in self.parts:
            return self.whole(f"hf/{name}")
        parts = sorted(self.parts[name], key=lambda part: part[0].index)
        return parts[0][0].theirs([self.whole(key) for _, key in parts])

    def write(self, path: Path, header: bytes) -> None:
        """Write a safetensors file with this header: the bytes before its first tensor."""
        entries = {name: entry for name, entry in json.loads(header[8:]).items() if name != "__metadata__"}
        with open(path, "xb") as file:
            file.write(header)
            for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
                tensor = self.tensor(name)
                if (DTYPES[tensor.dtype], list(tensor.shape)) != (entry["dtype"], entry["shape"]):
                    raise CheckpointError(f"{self.folder}: {name} is not {entry['dtype']} {entry['shape']}")
                file.write(raw_bytes(Piece(name, (), (), tensor)))

    def header(self) -> bytes:
        """Return the header of a new safetensors file with all tensors."""
        entries, end = {}, 0
        for name, ((place, key), *_) in self.parts.items():
            saved = self.manifest.tensors[key]
            shape = place.shape(saved.shape)
            begin, end = end, end + math.prod(shape) * TORCH_DTYPES[saved.dtype].itemsize
            entries[name] = {"dtype": saved.dtype, "shape": shape, "data_offsets": (begin, end)}
        text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
