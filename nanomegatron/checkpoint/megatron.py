"""Reads and writes Megatron-LM's own checkpoints: where each of our tensors is among Megatron's.

    ours                                           Megatron's, of 2 layers               shape
    decoder.layers.1.input_layernorm.weight        decoder.layers.                       [L, h]
                                                     self_attention.linear_qkv.layer_norm_weight
    decoder.layers.1.self_attention.linear_qkv.q   decoder.layers.self_attention.linear_qkv
                                .k  .v              [L, rows, h], rows of each group: its q heads, k, v
    decoder.layers.1.mlp.linear_fc1.gate  .up      decoder.layers.mlp.linear_fc1          [L, gate | up, h]
    decoder.layers.1.mlp.experts.3.linear_fc1...   decoder.layers.mlp.experts.experts.linear_fc1   [L, E, ...]

The layers are stacked, or numbered as ours (`decoder.layers.1.`), experts too; norms may have our names. So
are the optimizer's states: `optimizer.state.exp_avg.` before the name. A checkpoint is read as a manifest of
our tensors, each of whose boxes is a part of one saved chunk: any layout copies just the slices it needs.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from nanomegatron.checkpoint.hf import HINTS, model_parts
from nanomegatron.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Range,
    Rectangle,
    SavedTensor,
    entry_name,
)
from nanomegatron.checkpoint.megatron_torch import legacy_reader, read_legacy
from nanomegatron.checkpoint.strictness import some
from nanomegatron.checkpoint.torch_dist import distcp_reader, read_foreign
from nanomegatron.config.megatron_args import LEGACY
from nanomegatron.config.model import TransformerConfig

EMBEDDING = "embedding.word_embeddings.weight"
STATE_NAMES = {  # before Megatron's name of the parameter -> kind of our tensor
    "": "model",
    "optimizer.state.fp32_param.": "main",
    "optimizer.state.param.": "main",  # of the distributed optimizer
    "optimizer.state.exp_avg.": "exp_avg",
    "optimizer.state.exp_avg_sq.": "exp_avg_sq",
}
NORMS = {  # norms that Transformer Engine, and sharded checkpoints, have inside the layer behind them
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.*)")
PART = re.compile(r"\.(linear_qkv\.[qkv]|linear_fc1\.gate|linear_fc1\.up)\.")
VOCAB = (EMBEDDING, "output_layer.weight")


@dataclass(frozen=True)
class RowRun:
    """`count` rows of one of Megatron's tensors, from `theirs` on, that are rows of ours from `ours` on."""

    ours: int
    theirs: int
    count: int


@dataclass(frozen=True)
class Spot:
    """Where our tensor is: inside Megatron's tensor `key`, at `index` of its first dims."""

    key: str
    index: tuple[int, ...]
    first: tuple[int, ...]  # the sizes of these dims
    rows: tuple[RowRun, ...]
    shape: tuple[int, ...]  # of theirs without the first dims
    transposed: bool = False


def spots(name: str, shape: Sequence[int], model: TransformerConfig) -> Iterator[Spot]:
    """Yield the places that our tensor of this global shape may have in Megatron's checkpoints."""
    transposed = name.endswith("weight_t")
    size, *rest = shape[::-1] if transposed else shape
    stem = PART.sub(lambda match: f".{match[1].split('.')[0]}.", name.removesuffix("_t"))
    forms = [("", *_rows(name, size, model))]
    if half := re.search(r"linear_fc1\.(gate|up)\.", name):  # each with a name of its own
        forms.append(({"gate": "_w", "up": "_v"}[half[1]], (RowRun(0, 0, size),), size))
    sizes = (model.num_layers, model.num_experts)
    for suffix, rows, total in forms:
        for key, index in _keys(stem):
            first = sizes[1:] if LAYER.match(key) else sizes
            yield Spot(key + suffix, index, first[: len(index)], rows, (total, *rest), transposed)


def _rows(name: str, size: int, model: TransformerConfig) -> tuple[tuple[RowRun, ...], int]:
    """Where the rows of ours are among those of theirs, and how many those are."""
    match = PART.search(name)
    if match is None:
        return (RowRun(0, 0, size),), size
    groups = model.num_kv_heads
    width, heads = model.head_dim, model.num_attention_heads // groups
    if match[1].startswith("linear_fc1"):
        return (RowRun(0, size * match[1].endswith("up"), size),), 2 * size
    begin, count = {"q": (0, heads), "k": (heads, 1), "v": (heads + 1, 1)}[match[1][-1]]
    found = tuple(
        RowRun(group * count * width, (group * (heads + 2) + begin) * width, count * width)
        for group in range(groups)
    )
    return found, groups * (heads + 2) * width


def _keys(stem: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Megatron's names for one of ours, q, k, v or gate and up being one, and the place in its first dims."""
    if not (match := LAYER.fullmatch(stem)):
        yield stem, ()
        return
    layer, rest = int(match[1]), match[2]
    if not (match := EXPERT.fullmatch(rest)):
        inside = [rest.replace(ours, theirs) for ours, theirs in NORMS.items() if rest.startswith(ours)]
        for name in (*inside, rest):
            yield f"decoder.layers.{name}", (layer,)
            yield f"decoder.layers.{layer}.{name}", ()
        return
    expert, rest = int(match[1]), match[2]
    yield f"decoder.layers.mlp.experts.experts.{rest}", (layer, expert)
    yield f"decoder.layers.{layer}.mlp.experts.experts.{rest}", (expert,)
    for name in ("experts", "local_experts"):
        yield f"decoder.layers.{layer}.mlp.experts.{name}.{expert}.{rest}", ()


def our_tensors(model: TransformerConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the global shapes of a model's weights and of its routers' biases, by our names."""
    shapes = {part.name: tuple(part.shape) for part in model_parts(model, vocab_size)}
    if model.num_experts and model.moe_router_enable_expert_bias:
        routers = [name for name in shapes if name.endswith(".mlp.router.weight")]
        shapes |= {name.replace(".weight", ".expert_bias"): (model.num_experts,) for name in routers}
    return shapes


# Reading.


def open_megatron(folder: Path, model: TransformerConfig, vocab_size: int) -> Manifest:
    """Return a manifest of our tensors in the folder of one of Megatron's checkpoints.

    Raises CheckpointError that lists all tensors which are missing, misshapen or left over.
    """
    source = read_legacy(folder) if any(folder.glob(LEGACY)) else read_foreign(folder)
    theirs = {re.sub(r"^chained_\d+\.", "", key): key for key in source.tensors if "._extra_state" not in key}
    tensors = {key: source.tensors[name] for key, name in theirs.items()}
    prefix = min((key.removesuffix(EMBEDDING) for key in tensors if key.endswith(EMBEDDING)), default="")
    found, moves = {}, {}
    used, errors = set(), []
    for name, shape in our_tensors(model, vocab_size).items():
        candidates = list(spots(name, shape, model))
        spot = next((spot for spot in candidates if prefix + spot.key in tensors), None)
        if spot is None:
            keys = dict.fromkeys(spot.key for spot in candidates[:2])
            errors.append(f"{name}: missing, {' or '.join(keys)}")
            continue
        used |= {before + prefix + other.key for before in STATE_NAMES for other in candidates}
        for before, kind in STATE_NAMES.items():
            key = before + prefix + spot.key
            if key not in tensors:
                continue
            if wrong := _misshapen(key, spot, tensors[key]):
                errors += wrong  # once: its states have the same shape
                break
            boxes = dict(_boxes(f"{kind}/{name}", theirs[key], spot, tensors[key], moves))
            found[f"{kind}/{name}"] = SavedTensor(tensors[key].dtype, shape, boxes)
    left = [key for key in tensors if key not in used and not key.startswith("optimizer.")]
    errors += [f"{key} {list(tensors[key].shape)}: this model has nothing like it" for key in left]
    if errors:
        lines = some(list(dict.fromkeys(errors)))
        raise CheckpointError("\n  ".join([f"{folder} does not fit this model:", *lines]))
    format = {"name": "megatron", "foreign": True, "moves": moves, "source": source}
    notes = list(source.notes)
    if any(key.startswith("optimizer.distributed.") for key in tensors):
        why = "a distributed optimizer's without --dist-ckpt-optim-fully-reshardable"
        notes.append(f"{folder}: its weights only, no optimizer states: they are {why}")
    return Manifest(0, {}, "", found, source.files, format, notes)


def _misshapen(key: str, spot: Spot, saved: SavedTensor) -> list[str]:
    """What is wrong with the shape of Megatron's tensor; a vocabulary may be padded."""
    wanted, shape = (*spot.first, *spot.shape), tuple(saved.shape)
    padded = spot.key in VOCAB and shape[1:] == wanted[1:] and shape[0] >= wanted[0]
    if shape == wanted or padded:
        return []
    hint = next((f", {flags}" for word, flags in HINTS.items() if word in key), "")
    return [f"{key}: is {list(shape)}, wanted {list(wanted)}; see --num-layers, --hidden-size{hint}"]


def _boxes(
    ours: str, theirs: str, spot: Spot, saved: SavedTensor, moves: dict
) -> Iterator[tuple[Rectangle, list[Range]]]:
    """Yield our tensor's boxes, one for each overlap with a saved chunk; `moves` gets how each is read."""
    dims = len(spot.index)
    for chunk, ranges in saved.boxes.items():
        at = [i - o for i, o in zip(spot.index, chunk.offset, strict=False)]
        if not all(0 <= i < n for i, n in zip(at, chunk.shape, strict=False)):
            continue
        (first, *offset), (size, *extent) = chunk.offset[dims:], chunk.shape[dims:]
        for run in spot.rows:
            low, high = max(run.theirs, first), min(run.theirs + run.count, first + size)
            if low < high:
                box = Rectangle((run.ours + low - run.theirs, *offset), (high - low, *extent))
                if spot.transposed:
                    box = Rectangle(box.offset[::-1], box.shape[::-1])
                slices = (*at, slice(low - first, high - first))
                moves[entry_name(ours, box)] = theirs, chunk, slices, spot.transposed
                yield box, [Range(0, math.prod(box.shape), ranges[0].rank)]


@contextmanager
def megatron_reader(folder: Path, manifest: Manifest, number: int) -> Iterator[Callable]:
    """Open one of Megatron's files: a `Reader` of files.py, of our tensors."""
    source, moves = manifest.format["source"], manifest.format["moves"]
    open_source = legacy_reader if source.format["name"] == "megatron-legacy" else distcp_reader
    last: tuple = (None, None)
    with open_source(folder, source, number) as their_entry:

        def entry(key: str, r: Rectangle, dtype: str) -> torch.Tensor:
            nonlocal last
            theirs, box, slices, transposed = moves[entry_name(key, r)]
            if last[0] != (theirs, box):  # neighbours are often of one chunk
                last = (theirs, box), their_entry(theirs, box, dtype)
            found = last[1][slices]
            return found.t() if transposed else found

        yield entry
