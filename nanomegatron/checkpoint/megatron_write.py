"""Writes a torch_dist checkpoint that megatron-core loads, from any of ours: a layer at a time.

    exported/
        latest_checkpointed_iteration.txt
        release/                            iter_0000120/ if it has an iteration
            __0_0.distcp, __1_0.distcp ...  a file for each layer, and one for the rest; as many for each
                                            kind of the optimizer's states (megatron_states.py)
            .metadata                       the table of contents, for torch.distributed.checkpoint
            metadata.json                   says that this is torch_dist
            common.pt                       args: the model's settings; the optimizer's groups and schedule

`_extra_state` of a linear layer is what Transformer Engine keeps of FP8: None, as without it.
"""

import argparse
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import index_path
from nanomegatron.checkpoint.megatron import LAYER, Spot, our_tensors, spots
from nanomegatron.checkpoint.megatron_states import PREFIXES, common_states, lacking
from nanomegatron.checkpoint.torch_dist import write_distcp, write_metadata
from nanomegatron.config.megatron_args import TRACKER, args_of_settings
from nanomegatron.config.settings import Config

LINEAR = re.compile(r"(.*\.linear_(?:qkv|proj|fc1|fc2))\.weight")
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
FORMAT |= {"common_backend": "torch", "common_backend_version": 1}
Targets = dict[tuple[str, tuple[int, ...]], list[tuple[str, Spot]]]


def write_megatron(
    root: Path,
    config: Config,
    vocab_size: int,
    iteration: int,
    whole: Callable[[str], torch.Tensor],
    states: Iterable[str] = (),
    state: dict[str, Any] | None = None,
) -> list[str]:
    """Write the folder of a model; nothing is synced. Returns notes for the user.

    whole: returns one of our tensors by its key, as "model/NAME"; states: the keys of the optimizer's that it
    has; state: what a checkpoint of ours says besides tensors.
    """
    folder = root / (f"iter_{iteration:07d}" if iteration else "release")
    folder.mkdir(parents=True)
    layers, states, state = our_layers(config, vocab_size), set(states), state or {}
    sizes = first_dims(layers)
    why = lacking(config, state, {key.partition("/")[0] for key in states})

    def read(kind: str, name: str) -> torch.Tensor:
        key = f"{kind}/{name}"
        return whole(key) if kind == "model" else whole(key if key in states else f"model/{name}").float()

    files = list(itertools.product(["model"] if why else PREFIXES, layers))
    for rank, (kind, targets) in enumerate(files):
        there = [item for item in targets.items() if kind == "model" or f"exp_avg/{item[1][0][0]}" in states]
        write_distcp(folder, rank, [piece(kind, *item, sizes, read) for item in there])
    objects = extra_states(sizes)
    buffer = io.BytesIO()
    torch.save([None], buffer)
    name = f"__{len(files)}_0.distcp"
    (folder / name).write_bytes(buffer.getbuffer())
    spot = (name, 0, len(buffer.getbuffer()))
    write_metadata(folder, len(files), "megatron", dict.fromkeys(objects, spot))
    for rank in range(len(files)):
        index_path(folder, rank).unlink()
    (folder / "metadata.json").write_text(json.dumps(FORMAT))
    args = args_of_settings(config, vocab_size) | {"no_save_rng": True, "no_save_optim": bool(why)}
    args |= {f"{word}_train_samples": state.get(f"{word}_samples", 0) for word in ("consumed", "skipped")}
    common: dict[str, Any] = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0}
    common |= {"iteration": iteration} | ({} if why else common_states(config, state))
    torch.save(common, folder / "common.pt")
    (root / TRACKER).write_text(str(iteration) if iteration else "release")
    return [f"weights only: {why}"] if why else []


def our_layers(config: Config, vocab_size: int) -> list[Targets]:
    """Return Megatron's tensors by layer, those of no layer first, each with the parts of it that are ours.

    Layers are stacked unless only some have experts; then they are numbered, as Megatron does it.
    """
    model, found = config.model, {}
    stacked = len(set(model.moe_layers)) == 1
    for name, shape in our_tensors(model, vocab_size).items():
        match = LAYER.fullmatch(name)
        fit = [p for p in spots(name, shape, model) if bool(LAYER.match(p.key)) != stacked or not match]
        copies = 2 if "pre_mlp_layernorm" in name and model.num_experts else 1  # named by either layer spec
        for spot in fit[:copies]:
            targets = found.setdefault(int(match[1]) if match else -1, {})
            targets.setdefault((spot.key, spot.index), []).append((name, spot))
    return [found[layer] for layer in sorted(found)]


def first_dims(layers: list[Targets]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the first dims of each of Megatron's tensors: layers, experts."""
    sizes: dict[str, tuple[int, ...]] = {}
    for key, index in (target for targets in layers for target in targets):
        last = sizes.get(key, (0,) * len(index))
        sizes[key] = tuple(max(n, i + 1) for n, i in zip(last, index, strict=True))
    return sizes


def piece(
    kind: str,
    target: tuple[str, tuple[int, ...]],
    parts: list[tuple[str, Spot]],
    sizes: dict[str, tuple[int, ...]],
    read: Callable[[str, str], torch.Tensor],
) -> Piece:
    """Assemble one layer, or expert, of one of Megatron's tensors."""
    key, index = target
    shape = parts[0][1].shape
    data = None
    for name, spot in parts:
        ours = read(kind, name).t() if spot.transposed else read(kind, name)
        data = ours.new_empty(shape) if data is None else data
        for rows in spot.rows:
            data[rows.theirs : rows.theirs + rows.count] = ours[rows.ours : rows.ours + rows.count]
    data = data.view((1,) * len(index) + shape)
    return Piece(PREFIXES[kind] + key, (*sizes[key], *shape), (*index, *(0 for _ in shape)), data)


def extra_states(sizes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the keys of the extra states that a load may look for, one for each layer or expert."""
    for key, first in sizes.items():
        if not (match := LINEAR.fullmatch(key)):
            continue
        names = [match[1]] + [match[1].replace("linear_qkv", "core_attention")] * key.endswith("qkv.weight")
        first = first or (1,)
        for index in torch.cartesian_prod(*map(torch.arange, first)).view(-1, len(first)).tolist():
            shard = f"{'.'.join(map(str, index))}_{'.'.join(map(str, first))}"
            yield from (f"{name}._extra_state/shard_{shard}" for name in names)
