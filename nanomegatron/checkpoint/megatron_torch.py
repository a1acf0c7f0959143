"""Reads Megatron-LM's legacy format, --ckpt-format torch, as global tensors: nothing is unpickled.

    iter_0000120/
        mp_rank_00_000/model_optim_rng.pt    of tp rank 0, pp stage 0 (_000 only if pp > 1, then expert rank)
        mp_rank_01_000/model_optim_rng.pt    what torch.save writes: a zip file of a pickle and of elements

Each file has a model of its own: its layers begin at 0, its experts too, and its tensors are parts, cut by
rows or columns; gate and up of SwiGLU are cut each. The pickle is read by config/pickles.py, which calls
nothing, and the elements are mapped into memory. So are the optimizer's states, which have numbers there: its
groups have the parameters in the model's order. Those in distrib_optim.pt are not read.
"""

import mmap
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.blocks import open_file
from nanomegatron.checkpoint.files import DTYPES
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
from nanomegatron.checkpoint.torch_dist import check_archive, elements_at
from nanomegatron.config.megatron_args import LEGACY, PICKLE_BYTES, args_of_state, pickled_state
from nanomegatron.config.pickles import Record

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
# What a file that has another content than Megatron's may lead to.
ERRORS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class RankFile:
    """What one rank has saved; `chunks`: its model, or one for each of its virtual stages."""

    tp: int
    pp: int
    ep: int
    chunks: list[dict[str, torch.Tensor]]
    optimizer: Any  # of the pickle
    storages: dict[str, torch.Tensor]  # bytes


def read_legacy(folder: Path) -> Manifest:
    """Make a manifest of Megatron's global tensors, with numbered layers. Raises CheckpointError."""
    paths = sorted(folder.glob(LEGACY))
    args, ranks = {}, []
    for path in paths:
        try:
            state = pickled_state(path)
            args = args or args_of_state(state)
            ranks.append(_rank_file(path, state, args))
        except ERRORS as error:
            raise CheckpointError(f"{path}: cannot be read ({error!s:.200})") from None
    tp, etp = args.get("tensor_model_parallel_size"), args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and etp not in (None, tp):
        raise CheckpointError(f"{folder}: not read with expert tensor parallel size {etp}, others {tp}")
    states, notes = _all_states(folder, ranks, args)
    parts: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
    first = _first_layers(ranks)
    for number, rank in enumerate(ranks):
        for virtual, chunk in enumerate(rank.chunks):
            for name, tensor in chunk.items():
                if name == "output_layer.weight" and not args.get("untie_embeddings_and_output_weights"):
                    continue  # the last stage's copy of the embedding
                key = _global_name(name, first[virtual, rank.pp], rank, chunk)
                for before, x in {"": tensor, **states[number].get((virtual, name), {})}.items():
                    # Of copies, on other expert ranks or stages, the first.
                    parts.setdefault(before + key, {}).setdefault(rank.tp, (number, x))
    files = {number: SavedFile(path.stat().st_size, "") for number, path in enumerate(paths)}
    entries: dict[str, torch.Tensor] = {}
    try:
        found = {key: _assemble(key, parts[key], bool(args.get("swiglu")), entries) for key in parts}
        check_manifest(found, files)
    except (*ERRORS, CheckpointError) as error:
        raise CheckpointError(f"{folder}: {error}; are all mp_rank_* there?") from None
    format = {"name": "megatron-legacy", "foreign": True, "entries": entries, "notes": notes}
    return Manifest(0, {}, "", found, files, format)


def _rank_file(path: Path, state: dict[str, Any], args: dict[str, Any]) -> RankFile:
    tp, *rest = map(int, path.parent.name.split("_")[2:])
    if args.get("pipeline_model_parallel_size", 1) == 1:
        rest.insert(0, 0)
    pp, ep, *_ = [*rest, 0, 0]
    storages = _mapped_storages(path)
    models = [state[key] for key in state if re.fullmatch(r"model\d*", key)]
    if not models:
        raise ValueError("it has no model")
    chunks = [dict(_tensors(model, storages)) for model in models]
    return RankFile(tp, pp, ep, chunks, state.get("optimizer"), storages)


def _mapped_storages(path: Path) -> dict[str, torch.Tensor]:
    """The bytes of each member of a file of torch.save, by its number: read only when accessed."""
    with open_file(path) as file:
        check_archive(file, PICKLE_BYTES)
        members = [info for info in zipfile.ZipFile(file).infolist() if info.file_size]
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    found = {}
    for info in members:
        begin = elements_at(mapped, info)
        data = mapped[begin : begin + info.file_size]
        found[info.filename.rpartition("/")[2]] = torch.frombuffer(data, dtype=torch.uint8)
    return found


def _all_states(folder: Path, ranks: list[RankFile], args: dict[str, Any]) -> tuple[list[dict], list[str]]:
    """Return the states of each rank by (virtual stage, parameter), none if one's are not read; and notes."""
    try:
        return [dict(_states(rank, args)) for rank in ranks], []
    except ERRORS as error:
        distributed = any(folder.glob("mp_rank_*/distrib_optim.pt"))
        why = "they are in distrib_optim.pt; save as torch_dist" if distributed else repr(error)[:200]
        return [{} for _ in ranks], [f"{folder}: its weights only, no optimizer states: {why}"]


def _states(rank: RankFile, args: dict[str, Any]) -> Iterator[tuple[tuple[int, str], dict]]:
    """Yield a parameter's states by what is before its name. Raises ERRORS if they differ."""
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
            mains = iter(main[index] if main else ())
            marks = bool(group["wd_mult"]), bool(group.get("is_expert_parallel"))
            for (place, x), number in zip(params[marks], group["params"], strict=True):
                states = {
                    f"optimizer.state.{k}.": inner["state"][number][k] for k in ("exp_avg", "exp_avg_sq")
                }
                if main and x.dtype != torch.float32:
                    states["optimizer.state.fp32_param."] = next(mains, None)
                found = {before: _tensor(state, rank.storages) for before, state in states.items()}
                if {state.shape for state in found.values()} != {x.shape}:
                    raise ValueError(
                        f"the states of parameter {number} are not of the shape of {place[1][:80]}"
                    )
                yield place, found


def _tensors(model: Any, storages: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state dict, by names without those of wrappers; no extra states."""
    model = model.items if isinstance(model, Record) else model
    for name, value in model.items():
        name = GROUPED.sub(r"\1.local_experts.\3.\2.weight", name.removeprefix("module."))
        tensor = _tensor(value, storages)
        if tensor is not None and "_extra_state" not in name:
            yield name, tensor


def _tensor(value: Any, storages: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The tensor that a value of the pickle is, or None. Raises RuntimeError if it leaves its storage."""
    match value:
        case Record("torch._tensor._rebuild_from_type_v2", (function, _, args, *_)):  # it has attributes
            return _tensor(Record(function.name, args), storages)
        case Record("torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state", args):
            return _tensor(args[0], storages)
        case Record("torch._utils._rebuild_tensor_v2", (Record("storage", (pid,)), begin, shape, stride, *_)):
            _, kind, member, *_ = pid
            if kind.name in STORAGES:
                whole = storages[member].view(STORAGES[kind.name])
                return torch.atleast_1d(whole.as_strided(shape, stride, begin))
    return None


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


def _global_name(name: str, layer: int, rank: RankFile, chunk: dict[str, torch.Tensor]) -> str:
    if match := LOCAL_EXPERT.fullmatch(name):
        alike = {found[2] for other in chunk if (found := LOCAL_EXPERT.fullmatch(other))}
        name = f"{match[1]}{int(match[2]) + rank.ep * len(alike)}{match[3]}"
    if match := LOCAL_LAYER.fullmatch(name):
        name = f"{match[1]}{int(match[2]) + layer}{match[3]}"
    return name


def _assemble(key: str, parts: dict, gated: bool, entries: dict[str, torch.Tensor]) -> SavedTensor:
    """Return the global tensor of its parts by tp rank, each (file, tensor), and note each box's elements."""
    ordered = [parts[tp] for tp in sorted(parts)]
    if not (BY_ROWS.fullmatch(key) or BY_COLUMNS.fullmatch(key)):
        ordered = ordered[:1]  # all are the same
    dim = 1 if BY_COLUMNS.fullmatch(key) else 0
    halves = 2 if gated and BY_ROWS.fullmatch(key) and ".linear_fc1." in key else 1
    tensor = ordered[0][1]
    shape = list(tensor.shape)
    shape[dim] *= len(ordered)
    boxes = {}
    for at, (number, part) in enumerate(ordered):
        for half, elements in enumerate(part.chunk(halves, dim)):
            corner = [0] * len(shape)
            corner[dim] = (half * len(ordered) + at) * elements.shape[dim]
            box = Rectangle(tuple(corner), tuple(elements.shape))
            boxes[box] = [Range(0, elements.numel(), number)]
            entries[entry_name(key, box)] = elements
    return SavedTensor(DTYPES[tensor.dtype], tuple(shape), boxes)


@contextmanager
def legacy_reader(folder: Path, manifest: Manifest, number: int) -> Iterator[Callable]:
    """A `Reader` of files.py, of Megatron's tensors, which are mapped already."""
    yield lambda key, r, dtype: manifest.format["entries"][entry_name(key, r)]
