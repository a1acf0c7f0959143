"""Reads Megatron-LM's legacy format, --ckpt-format torch, as global tensors: nothing is unpickled.

    iter_0000120/
        mp_rank_00_000/model_optim_rng.pt    of tp rank 0, pp stage 0 (_000 only if pp > 1, then expert rank)
        mp_rank_01_000/model_optim_rng.pt    what torch.save writes: a zip file of a pickle and of elements

Each file has a model of its own: its layers begin at 0, its experts too, and its tensors are parts, cut by
rows or columns; gate and up of SwiGLU are cut each. The pickle is read by config/pickles.py, which calls
nothing, and the elements are mapped into memory. So are the optimizer's states, which have numbers there: its
groups have the parameters in the model's order. Those in distrib_optim.pt are not read.
"""

import math
import mmap
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.blocks import open_file
from nanomegatron.checkpoint.files import DTYPES, TORCH_DTYPES
from nanomegatron.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Range,
    Rectangle,
    SavedFile,
    SavedTensor,
    check_manifest,
    entry_name,
)
from nanomegatron.config.megatron_args import LEGACY, args_of_state, pickled_state
from nanomegatron.config.pickles import Name, Record

RANKS = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
BY_ROWS = re.compile(r"(.*\.)?(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)")
BY_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)")
LOCAL_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
LOCAL_EXPERT = re.compile(r"(.*\.mlp\.experts\.local_experts\.)(\d+)(\..*)")
STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}


@dataclass(frozen=True)
class Strided:
    """A tensor of a file: its elements begin at `begin` of the storage `member` of the zip file."""

    member: str
    dtype: torch.dtype
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class RankFile:
    """What one rank has saved; `chunks`: its model, or one for each of its virtual stages."""

    path: Path
    tp: int
    pp: int
    ep: int
    chunks: list[dict[str, Strided]]
    optimizer: Any  # of the pickle


def read_legacy(folder: Path) -> Manifest:
    """Make a manifest of Megatron's global tensors, with numbered layers. Raises CheckpointError."""
    paths = sorted(folder.glob(LEGACY))
    args, ranks = {}, []
    for path in paths:
        try:
            state = pickled_state(path)
            args = args or args_of_state(state)
            ranks.append(_rank_file(path, state, args))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
    tp, etp = args.get("tensor_model_parallel_size"), args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and etp not in (None, tp):
        raise CheckpointError(f"{folder}: not read with expert tensor parallel size {etp}, others {tp}")
    states, notes = _all_states(folder, ranks, args)
    tensors: dict[str, list] = {}
    first = _first_layers(ranks)
    for number, rank in enumerate(ranks):
        for virtual, chunk in enumerate(rank.chunks):
            for name, tensor in chunk.items():
                if name == "output_layer.weight" and not args.get("untie_embeddings_and_output_weights"):
                    continue  # the last stage's copy of the embedding
                key = _global_name(name, first[virtual, rank.pp], rank, chunk)
                for before, x in [("", tensor), *states[number].get((virtual, name), {}).items()]:
                    tensors.setdefault(before + key, []).append((rank, number, x))
    found, entries = {}, {}
    for key, parts in tensors.items():
        found[key] = _assemble(key, parts, bool(args.get("swiglu")), entries)
    files = {number: SavedFile(rank.path.stat().st_size, "") for number, rank in enumerate(ranks)}
    try:
        check_manifest(found, files)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}; are all mp_rank_* there?") from None
    format = {"name": "megatron-legacy", "foreign": True, "entries": entries, "paths": paths, "notes": notes}
    return Manifest(0, {}, "", found, files, format)


def _rank_file(path: Path, state: dict[str, Any], args: dict[str, Any]) -> RankFile:
    tp, *rest = (int(n) for n in RANKS.fullmatch(path.parent.name).groups() if n is not None)
    pipelined = args.get("pipeline_model_parallel_size", 1) > 1
    pp = rest.pop(0) if pipelined and rest else 0
    ep = rest.pop(0) if rest else 0
    names = [key for key in ("model", *(f"model{i}" for i in range(64))) if key in state]
    if not names:
        raise ValueError("it has no model")
    return RankFile(path, tp, pp, ep, [dict(_tensors(state[name])) for name in names], state.get("optimizer"))


def _all_states(folder: Path, ranks: list[RankFile], args: dict[str, Any]) -> tuple[list[dict], list[str]]:
    """Return the states of each rank by (virtual stage, parameter), none if one's are not read; and notes."""
    try:
        return [dict(_states(rank, args)) for rank in ranks], []
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        distributed = any(folder.glob("mp_rank_*/distrib_optim.pt"))
        why = "they are in distrib_optim.pt; save as torch_dist" if distributed else repr(error)[:200]
        return [{} for _ in ranks], [f"{folder}: its weights only, no optimizer states: {why}"]


def _states(rank: RankFile, args: dict[str, Any]) -> Iterator[tuple[tuple[int, str], dict[str, Strided]]]:
    """Yield a parameter's states by what is before its name. Raises ValueError and others if they differ."""
    apart = args.get("expert_model_parallel_size", 1) > 1  # an optimizer of their own for experts
    params: dict[tuple[bool, bool], list] = {}
    for i, chunk in enumerate(rank.chunks):
        for name, x in chunk.items():
            marks = len(x.shape) > 1 and not name.endswith(".bias"), apart and ".experts." in name
            if not name.endswith("expert_bias"):
                params.setdefault(marks, []).append(((i, name), x))
    saved = rank.optimizer if isinstance(rank.optimizer, list) else [rank.optimizer]
    for one in saved if rank.optimizer else ():
        inner, main = one.get("optimizer", one), one.get("fp32_from_fp16_params")
        for index, group in enumerate(inner["param_groups"]):
            mains = _tensors({str(i): x for i, x in enumerate(main[index] if main else ())})
            marks = bool(group["wd_mult"]), bool(group.get("is_expert_parallel"))
            for (place, x), number in zip(params[marks], group["params"], strict=True):
                states = dict(_tensors(inner["state"][number]))
                found = {f"optimizer.state.{kind}.": states[kind] for kind in ("exp_avg", "exp_avg_sq")}
                if main and x.dtype != torch.float32:
                    found["optimizer.state.fp32_param."] = next(mains, ("", None))[1]
                if {state.shape for state in found.values()} != {x.shape}:
                    raise ValueError(
                        f"the states of parameter {number} are not of the shape of {place[1][:80]}"
                    )
                yield place, found


def _tensors(model: Any) -> Iterator[tuple[str, Strided]]:
    """Yield the tensors of a state dict, by names without those of wrappers."""
    model = model.contents if isinstance(model, Record) else model
    for name, value in model.items():
        if isinstance(value, Record) and value.name == "torch._tensor._rebuild_from_type_v2":
            value = Record(value.args[0].text, value.args[2])  # it has attributes
        if isinstance(value, Record) and value.name.startswith("torch._utils._rebuild_parameter"):
            value = value.args[0]
        if not isinstance(value, Record) or value.name != "torch._utils._rebuild_tensor_v2":
            continue  # extra states: None, or bytes
        storage, begin, shape, stride = value.args[:4]
        (_, kind, member, *_) = storage.args[0]
        name = GROUPED.sub(r"\1.local_experts.\3.\2.weight", name.removeprefix("module."))
        if "_extra_state" in name or not isinstance(kind, Name) or kind.text not in STORAGES:
            continue
        if not all(type(n) is int and 0 <= n < 2**62 for n in (begin, *shape, *stride)):
            raise ValueError(f"{name[:80]}: its sizes are no numbers")
        yield name, Strided(str(member), STORAGES[kind.text], begin, tuple(shape), tuple(stride))


def _first_layers(ranks: list[RankFile]) -> dict[tuple[int, int], int]:
    """The number of the first layer of each (virtual stage, stage), in which order layers follow."""
    counts = {}
    for rank in ranks:
        for virtual, chunk in enumerate(rank.chunks):
            layers = [int(match[2]) + 1 for name in chunk if (match := LOCAL_LAYER.fullmatch(name))]
            counts[virtual, rank.pp] = max(layers, default=0)
    first, total = {}, 0
    for stage in sorted(counts):
        first[stage], total = total, total + counts[stage]
    return first


def _global_name(name: str, layer: int, rank: RankFile, chunk: dict[str, Strided]) -> str:
    if match := LOCAL_EXPERT.fullmatch(name):
        alike = {found[2] for other in chunk if (found := LOCAL_EXPERT.fullmatch(other))}
        name = f"{match[1]}{int(match[2]) + rank.ep * len(alike)}{match[3]}"
    if match := LOCAL_LAYER.fullmatch(name):
        name = f"{match[1]}{int(match[2]) + layer}{match[3]}"
    return name


def _assemble(key: str, parts: list, gated: bool, entries: dict) -> SavedTensor:
    """Return the global tensor of its parts, those of tp ranks in order, and note where each part is."""
    by_rank = {}
    for rank, *rest in parts:  # of copies, on other expert ranks or stages, the first
        by_rank.setdefault(rank.tp, rest)
    dim = 0 if BY_ROWS.fullmatch(key) else 1 if BY_COLUMNS.fullmatch(key) else None
    ordered = [by_rank[tp] for tp in sorted(by_rank)][: None if dim is not None else 1]
    tensor = ordered[0][-1]
    shape = list(tensor.shape)
    if dim is not None:
        shape[dim] *= len(ordered)
    halves = 2 if gated and ".linear_fc1." in key else 1
    boxes = {}
    for at, (number, part) in enumerate(ordered):
        for half in range(halves):
            extent, corner, begin = list(part.shape), [0] * len(shape), 0
            if dim is not None:
                extent[dim] //= halves
                corner[dim] = (half * len(ordered) + at) * extent[dim]
                begin = half * extent[dim]
            box = Rectangle(tuple(corner), tuple(extent))
            boxes[box] = [Range(0, math.prod(extent), number)]
            entries[entry_name(key, box)] = part, begin
    return SavedTensor(DTYPES[tensor.dtype], tuple(shape), boxes)


@contextmanager
def legacy_reader(folder: Path, manifest: Manifest, number: int) -> Iterator[Callable]:
    """Open a rank's file, mapped into memory: a `Reader` of files.py, of Megatron's tensors."""
    path = manifest.format["paths"][number]
    with open_file(path) as file:
        members = {info.filename: info for info in zipfile.ZipFile(file).infolist()}
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (root,) = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")]

    def entry(key: str, r: Rectangle, dtype: str) -> torch.Tensor:
        part, begin = manifest.format["entries"][entry_name(key, r)]
        try:
            info = members[f"{root}data/{part.member}"]
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("compressed")
            names = struct.unpack_from("<HH", mapped, info.header_offset + 26)
            start = info.header_offset + 30 + sum(names)
            elements = mapped[start : start + info.file_size]
            flat = torch.frombuffer(elements, dtype=torch.uint8).view(part.dtype)
            whole = flat.as_strided(part.shape, part.stride, part.begin)
            if (whole.dtype, len(r.shape)) != (TORCH_DTYPES[dtype], whole.dim()):
                raise ValueError("another type")
        except (LookupError, ValueError, TypeError, RuntimeError, struct.error) as error:
            raise CheckpointError(f"{path}: {key}: {str(error).partition(chr(10))[0][:200]}") from None
        return whole[begin : begin + r.shape[0]]

    yield entry
