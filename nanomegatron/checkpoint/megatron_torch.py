"""Reads Megatron-LM's legacy format, --ckpt-format torch, as global tensors: nothing is unpickled.

    iter_0000120/
        mp_rank_00_000/model_optim_rng.pt    of tp rank 0, pp stage 0 (_000 only if pp > 1, then expert rank)
        mp_rank_01_000/model_optim_rng.pt    what torch.save writes: a zip file of a pickle and of elements

Each file has a model of its own: its layers begin at 0, its experts too, and its tensors are parts, cut by
rows or columns; gate and up of SwiGLU are cut each. The files are read by archive.py, which calls nothing
and maps the elements into memory. So are the optimizer's states, which have numbers there: its
groups have the parameters in the model's order. Those in distrib_optim.pt are not read.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.archive import Archive, open_archive
from nanomegatron.checkpoint.files import DTYPES
from nanomegatron.checkpoint.manifest import (
    UNHASHED,
    CheckpointError,
    Manifest,
    Range,
    Rectangle,
    SavedFile,
    SavedTensor,
    check_manifest,
    entry_name,
)
from nanomegatron.config.megatron_args import LEGACY, PICKLE_BYTES, args_of_state
from nanomegatron.config.pickles import Record

BY_ROWS = re.compile(r"(.*\.)?(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)")
BY_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)")
LOCAL_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
LOCAL_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)(?=\.)")


@dataclass(frozen=True)
class RankFile:
    """What one rank has saved; `chunks`: its model, or one for each of its virtual stages."""

    tp: int
    pp: int
    ep: int
    chunks: list[dict[str, torch.Tensor]]
    archive: Archive


def read_legacy(folder: Path) -> Manifest:
    """Make a manifest of Megatron's global tensors, with numbered layers. Raises CheckpointError."""
    paths = sorted(folder.glob(LEGACY))
    args, ranks = {}, []
    for path in paths:
        try:
            archive = open_archive(path, PICKLE_BYTES)
            args = args or args_of_state(archive.value)
            ranks.append(_rank_file(path, archive, args))
        except Exception as error:  # of any kind: the file may be anything
            raise CheckpointError(f"{path}: cannot be read ({error!s:.200})") from None
    tp, etp = args.get("tensor_model_parallel_size"), args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and etp not in (None, tp):
        raise CheckpointError(f"{folder}: not read with expert tensor parallel size {etp}, others {tp}")
    states, notes = _all_states(folder, ranks, args)
    parts: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
    first = _first_layers(ranks)
    for number, rank in enumerate(ranks):
        for virtual, chunk in enumerate(rank.chunks):
            experts = len({match[2] for name in chunk if (match := LOCAL_EXPERT.search(name))})
            for name, tensor in chunk.items():
                if name == "output_layer.weight" and not args.get("untie_embeddings_and_output_weights"):
                    continue  # the last stage's copy of the embedding
                key = _moved(name, LOCAL_LAYER, first[virtual, rank.pp])
                key = _moved(key, LOCAL_EXPERT, rank.ep * experts)
                for before, x in {"": tensor, **states[number].get((virtual, name), {})}.items():
                    # Of copies, on other expert ranks or stages, the first.
                    parts.setdefault(before + key, {}).setdefault(rank.tp, (number, x))
    files = {number: SavedFile(path.stat().st_size, "") for number, path in enumerate(paths)}
    entries: dict[str, torch.Tensor] = {}
    try:
        found = {key: _assemble(key, parts[key], bool(args.get("swiglu")), entries) for key in parts}
        check_manifest(found, files)
    except Exception as error:
        raise CheckpointError(f"{folder}: {error}; are all mp_rank_* there?") from None
    format = {"name": "megatron-legacy", "foreign": True, "entries": entries}
    return Manifest(0, {}, "", found, files, format, [f"{folder}: {UNHASHED}", *notes])


def _rank_file(path: Path, archive: Archive, args: dict[str, Any]) -> RankFile:
    tp, *rest = map(int, path.parent.name.split("_")[2:])
    if args.get("pipeline_model_parallel_size", 1) == 1:
        rest.insert(0, 0)
    pp, ep, *_ = [*rest, 0, 0]
    models = [model for key, model in archive.value.items() if re.fullmatch(r"model\d*", key)]
    if not models:
        raise ValueError("it has no model")
    return RankFile(tp, pp, ep, [dict(_tensors(archive, model)) for model in models], archive)


def _all_states(folder: Path, ranks: list[RankFile], args: dict[str, Any]) -> tuple[list[dict], list[str]]:
    """Return the states of each rank by (virtual stage, parameter), none if one's are not read; and notes."""
    try:
        return [dict(_states(rank, args)) for rank in ranks], []
    except Exception as error:
        distributed = any(folder.glob("mp_rank_*/distrib_optim.pt"))
        why = "they are in distrib_optim.pt; save as torch_dist" if distributed else repr(error)[:200]
        return [{} for _ in ranks], [f"{folder}: its weights only, no optimizer states: {why}"]


def _states(rank: RankFile, args: dict[str, Any]) -> Iterator[tuple[tuple[int, str], dict]]:
    """Yield a parameter's states by what is before its name. Raises errors of any kind if they differ."""
    apart = args.get("expert_model_parallel_size", 1) > 1  # an optimizer of their own for experts
    params: dict[tuple[bool, bool], list] = {}
    for i, chunk in enumerate(rank.chunks):
        for name, x in chunk.items():
            marks = len(x.shape) > 1 and not name.endswith(".bias"), apart and ".experts." in name
            if not name.endswith("expert_bias"):
                params.setdefault(marks, []).append(((i, name), x))
    saved = rank.archive.value.get("optimizer") or []
    for one in saved if isinstance(saved, list) else [saved]:
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
                found = {before: rank.archive.tensor(state) for before, state in states.items()}
                if {state.shape for state in found.values()} != {x.shape}:
                    raise ValueError(
                        f"the states of parameter {number} are not of the shape of {place[1][:80]}"
                    )
                yield place, found


def _tensors(archive: Archive, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state dict, by names without those of wrappers; no extra states."""
    model = model.items if isinstance(model, Record) else model
    for name, value in model.items():
        name = GROUPED.sub(r"\1.local_experts.\3.\2.weight", name.removeprefix("module."))
        tensor = archive.tensor(value)
        if tensor is not None and tensor.is_floating_point() and "_extra_state" not in name:
            yield name, torch.atleast_1d(tensor)


def _first_layers(ranks: list[RankFile]) -> dict[tuple[int, int], int]:
    """The number of the first layer of each (virtual stage, stage), in which order layers follow."""
    counts = {}
    for rank in ranks:
        for virtual, chunk in enumerate(rank.chunks):
            layers = [int(match[2]) + 1 for name in chunk if (match := LOCAL_LAYER.match(name))]
            counts[virtual, rank.pp] = max(layers, default=0)
    first, total = {}, 0
    for stage in sorted(counts):
        first[stage] = total
        total += counts[stage]
    return first


def _moved(name: str, number: re.Pattern, by: int) -> str:
    """Return a name with a number in it that is larger by so much, if it has one."""
    return number.sub(lambda match: f"{match[1]}{int(match[2]) + by}", name)


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
