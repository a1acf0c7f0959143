"""Writes what `convert.py` makes, slice by slice: a Hugging Face folder, or a checkpoint of this program.

A Hugging Face folder has its weights in files of at most --max-shard-size bytes, and its config.json, without
which nothing loads it, is written last.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanomegatron.checkpoint.convert_source import SourceModel
from nanomegatron.checkpoint.files import host_bytes
from nanomegatron.checkpoint.folder import make_folder, publish_folder
from nanomegatron.checkpoint.hf import (
    HEADER,
    TOKENIZER_FILES,
    Folder,
    folder_tokenizer,
    keep_source_files,
    places,
)
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.checkpoint.megatron import our_tensors
from nanomegatron.checkpoint.megatron_write import write_megatron
from nanomegatron.checkpoint.streams import (
    Stream,
    joined,
    safetensors_header,
    write_safetensors,
    write_streams,
)
from nanomegatron.config.cli import build_config, to_toml
from nanomegatron.config.hf import effective, settings_of, to_hf
from nanomegatron.config.megatron import only_here
from nanomegatron.config.rules import spelled
from nanomegatron.config.user_files import read_json
from nanomegatron.data.tokenizer import build_tokenizer, tokenizer_from_spec

WEIGHTS_ONLY = dict(iteration=0, consumed_samples=0, skipped_samples=0, optimizer={}, circumstances={})
# Of a tokenizer's description, what `generate` takes as settings.
SPEC_SETTINGS = {"type": "tokenizer_type", "model": "tokenizer_model", "vocab_size": "vocab_size"}


def write_theirs(source: SourceModel, folder: Path) -> Iterator[str]:
    """Write weights and optimizer states as torch_dist of Megatron-LM; yields notes. Raises ValueError."""
    if lacking := only_here(source.config):
        raise ValueError(f"Megatron-LM has no model of {', '.join(lacking)}; give another --target")
    if missing := sorted(our_tensors(source.config.model, source.vocab_size).keys() - source.tensors.keys()):
        raise ValueError(f"{source.root} lacks {missing[0]}, which its model has")
    yield from write_megatron(folder, source.config, source.vocab_size, source.streams, source.state)


def write_ours(source: SourceModel, folder: Path, target: Path, keep: bool) -> Iterator[str]:
    """Write a checkpoint of ours, a file for each layer, to `folder`, renamed `target` later; yields notes.

    keep: the weight files of a Hugging Face folder may be written again to the byte.
    """
    there, state = source.folder, dict(source.state) or WEIGHTS_ONLY | {"hf": {}}
    vocab_size = source.vocab_size
    state["tokenizer"] = build_tokenizer("NullTokenizer", vocab_size=vocab_size).spec
    if there:
        try:
            state |= find_tokenizer(there.path, target / "hf", vocab_size)
        except ValueError as error:
            yield f"without a tokenizer: {error}"
        hashes = keep_files(there, folder / "hf", keep)
        state["hf"] = hashes if keep else {}
        left = {path.name for path in there.path.iterdir()} - {*hashes, *there.files, folder.name}
        yield from [f"left out: {', '.join(sorted(left))}"] if left else []
    layers: dict[str, dict[str, Stream]] = {}
    for name in source.tensors:
        found = re.match(r"decoder\.layers\.\d+\.", name)
        layer = layers.setdefault(found[0] if found else "", {})
        keys = [f"{kind}/{name}" for kind in ("model", "main", "exp_avg", "exp_avg_sq")]
        layer |= {key: source.streams[key] for key in keys if key in source.streams}
    if keep and source.of_kind("hf"):
        layers["kept"] = {f"hf/{name}": stream for name, stream in source.of_kind("hf").items()}
    temporary = folder / f"iter_{state['iteration']:07d}.tmp"
    make_folder(temporary, 0)
    for rank, streams in enumerate(layers.values()):
        write_streams(temporary, rank, streams)
    publish_folder(temporary, len(layers), state["iteration"], state, to_toml(source.config))


def find_tokenizer(folder: Path, moved: Path, vocab_size: int) -> dict:
    """Return a checkpoint's entries for the folder's tokenizer, whose files will be in `moved`.

    Without one it is a NullTokenizer: text is ids as decimal numbers. Raises ValueError.
    """
    found = folder_tokenizer(folder, vocab_size)
    found.spec |= {
        key: str(moved / name) for key, name in TOKENIZER_FILES.get(found.spec["type"], {}).items()
    }
    return {"tokenizer": found.spec, "tokenizer_fingerprint": found.fingerprint}


def keep_files(there: Folder, folder: Path, headers: bool) -> dict[str, str]:
    """Copy all files but weights, and the headers of weight files -> {name: SHA-256} of the copies."""
    keep_source_files(there.path, folder)
    for name in there.files if headers else ():
        with open(there.path / name, "rb") as file:
            size = file.read(8)
            (folder / f"{name}{HEADER}").write_bytes(size + file.read(int.from_bytes(size, "little")))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def write_hf(source: SourceModel, folder: Path, shard_size: int, keep: bool) -> Iterator[str]:
    """Write a Hugging Face folder; yields notes. keep: with the headers that the source has kept, if any."""
    kept = kept_files(source.root / "hf", source.state.get("hf", {})) if keep else {}
    files, notes = (kept, []) if kept else new_files(source)
    headers = {name.removesuffix(HEADER): data for name, data in kept.items() if name.endswith(HEADER)}
    family = json.loads(files["config.json"])["model_type"]
    theirs = [key for data in headers.values() for key in json.loads(data[8:])]
    tensors = by_their_names(source, family, theirs)
    if not kept:
        headers, index = shards(tensors, shard_size)
        files |= {"model.safetensors.index.json": index} if len(headers) > 1 else {}
    for name, header in headers.items():
        write_safetensors(folder / name, tensors | source.of_kind("hf"), header)
    for name, data in sorted(files.items(), key=lambda item: item[0] == "config.json"):
        if not name.endswith(HEADER):
            (folder / name).write_bytes(data)
    yield from notes


def by_their_names(source: SourceModel, family: str, theirs: Iterable[str]) -> dict[str, Stream]:
    """Return the weights under their Hugging Face names. theirs: the names in kept headers."""
    ours = source.tensors
    shapes = {name: stream.shape for name, stream in ours.items()}
    parts = defaultdict(list)
    for name, place in places(shapes, family, theirs).items():
        parts[place.name].append((place, ours[name]))
    found = {}
    for name, group in parts.items():
        ordered = [stream for _, stream in sorted(group, key=lambda part: part[0].index)]
        found[name] = joined(ordered, group[0][0].transposed)
    return found


def shards(tensors: Mapping[str, Stream], limit: int) -> tuple[dict[str, bytes], bytes]:
    """Share the tensors out to files of at most `limit` bytes, or of one tensor -> headers, and the index."""
    groups: list[dict[str, Stream]] = [{}]
    for name, stream in tensors.items():
        if groups[-1] and sum(x.nbytes for x in groups[-1].values()) + stream.nbytes > limit:
            groups.append({})
        groups[-1][name] = stream
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    where = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": where}
    headers = {name: safetensors_header(group) for name, group in zip(names, groups, strict=True)}
    return headers, (json.dumps(index, indent=2) + "\n").encode()


def kept_files(folder: Path, hashes: dict[str, str]) -> dict[str, bytes]:
    """Read the files that `keep_files` has copied. Raises CheckpointError if one has changed."""
    paths = [folder / Path(name).name for name in hashes]
    files = {path.name: path.read_bytes() if path.is_file() else b"" for path in paths}
    for path, expected in zip(paths, hashes.values(), strict=True):
        if hashlib.sha256(files[path.name]).hexdigest() != expected:
            raise CheckpointError(f"{path}: not as the checkpoint has kept it")
    return files


def new_files(source: SourceModel) -> tuple[dict[str, bytes], list[str]]:
    """Return config.json, the tokenizer's files and other kept files of the source model; and notes."""
    config, files = source.config, {}
    notes, eod = [], None
    try:
        if "tokenizer" not in source.state:
            raise ValueError(f"{source.root} has none")
        tokenizer = tokenizer_from_spec(source.state["tokenizer"], beside=source.root)
        eod, spec = tokenizer.eod, tokenizer.spec
        files = {name: Path(spec[key]) for key, name in TOKENIZER_FILES.get(spec["type"], {}).items()}
        beside = [path.with_name("tokenizer_config.json") for path in files.values()]
        files |= {path.name: path for path in beside if path.is_file()}
        flags = " ".join(spelled(name, spec[key]) for key, name in SPEC_SETTINGS.items() if key in spec)
        notes = (
            [] if files else [f"without a tokenizer: a {spec['type']} has no file; generate takes {flags}"]
        )
    except ValueError as error:
        notes = [f"without a tokenizer: {error}"]
    table = to_hf(replace(config, data=replace(config.data, vocab_size=source.vocab_size)), eod)
    before = (source.root / "hf").glob("*")
    kept = {p.name: p for p in before if not p.name.endswith((HEADER, ".index.json"))}
    if theirs := kept.pop("config.json", None):
        table = same_model(read_json(theirs), table)
    data = {name: path.read_bytes() for name, path in (files | kept).items()}
    return data | {"config.json": (json.dumps(table, indent=2) + "\n").encode()}, notes


def same_model(theirs: dict, ours: dict) -> dict:
    """Return the config.json that training began with, with the present dtype; ours if the model changed."""
    before, now = (build_config(settings_of(table)) for table in (theirs, ours))
    if effective(before.model) != effective(now.model) or before.data.vocab_size != now.data.vocab_size:
        return ours | {key: value for key, value in theirs.items() if key.endswith("_token_id")}
    return theirs | {"dtype" if "dtype" in theirs else "torch_dtype": ours["torch_dtype"]}


# Checking.


def compare(source: SourceModel, written: SourceModel) -> None:
    """Read both, slice by slice. Raises CheckpointError that names the first tensor with another bit."""
    if missing := source.tensors.keys() ^ written.tensors.keys():
        raise CheckpointError(f"{written.root}: {min(missing)} is in only one of the two")
    keys = [key for key in source.streams if key in written.streams and not key.startswith("hf/")]
    for key in keys:
        name = key.removeprefix("model/")
        stream = source.streams[key]
        other = written.streams[key]
        if (stream.shape, stream.dtype) != (other.shape, other.dtype):
            raise CheckpointError(
                f"{written.root}: {name} is {other.dtype} {list(other.shape)}, not {stream.dtype}"
            )
        whole = stream.whole or other.whole
        for one, two in zip(*(replace(x, whole=whole).slices() for x in (stream, other)), strict=True):
            if not np.array_equal(host_bytes(one), host_bytes(two)):
                raise CheckpointError(f"{written.root}: {name} is not what was read from {source.root}")
