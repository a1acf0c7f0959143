"""Writes a torch_dist checkpoint that megatron-core loads, from any of ours: in slices of 64 MiB.

    exported/
        latest_checkpointed_iteration.txt
        release/                            iter_0000120/ if it has an iteration
            __0_0.distcp, __1_0.distcp ...  a file for each layer, and one for the rest; as many for each
                                            kind of the optimizer's states
            .metadata                       the table of contents, for torch.distributed.checkpoint
            metadata.json                   says that this is torch_dist
            common.pt                       args: the model's settings
                                            optimizer: groups of parameters with rate, betas and step
                                            opt_param_scheduler: the schedule, and the samples it has seen

States are named as Megatron's distributed optimizer loads them, of the parameter's shape, at any layout:
optimizer.state.param.NAME (fp32 main parameters), exp_avg and exp_avg_sq. `content_metadata` is that of
--dist-ckpt-optim-fully-reshardable.

`_extra_state` of a linear layer is what Transformer Engine keeps of FP8: None, as without it.
"""

import argparse
import copy
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import index_path
from nanomegatron.checkpoint.megatron import LAYER, Spot, our_tensors, spots
from nanomegatron.checkpoint.streams import Stream, joined
from nanomegatron.checkpoint.torch_dist import write_distcp, write_metadata
from nanomegatron.config.batch import samples_before
from nanomegatron.config.megatron_args import TRACKER, args_of_settings
from nanomegatron.config.settings import Config
from nanomegatron.pick_variants import build_schedule, pick_schedules

LINEAR = re.compile(r"(.*\.linear_(?:qkv|proj|fc1|fc2))\.weight")
PREFIXES = {
    "model": "",
    "main": "optimizer.state.param.",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
}
FORM = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
}
# What groups have besides: Megatron's marks, and settings of torch's AdamW that Transformer Engine ignores.
MARKS = {
    "bias_correction": True,
    "lr_mult": 1.0,
    "is_decoupled_lr": False,
    "default_config": True,
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "foreach": None,
    "fused": None,
    "decoupled_weight_decay": True,
}
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
Parts = list[tuple[str, Spot]]
Targets = dict[tuple[str, tuple[int, ...]], Parts]


def write_megatron(
    root: Path,
    config: Config,
    vocab_size: int,
    streams: Mapping[str, Stream],
    state: dict[str, Any],
) -> list[str]:
    """Write the folder of a model; nothing is synced. Returns notes for the user.

    streams: our tensors by key, "model/NAME" and those of the optimizer that there are; state: what a
    checkpoint of ours says besides tensors.
    """
    iteration = state.get("iteration", 0)
    folder = root / (f"iter_{iteration:07d}" if iteration else "release")
    folder.mkdir(parents=True)
    layers = our_layers(config, vocab_size)
    why = lacking(config, state, {key.partition("/")[0] for key in streams})
    files = list(itertools.product(["model"] if why else PREFIXES, layers))
    for rank, (kind, targets) in enumerate(files):
        write_slices(folder, rank, kind, targets, streams)
    sizes = {key: parts[0][1].first for targets in layers for (key, _), parts in targets.items()}
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
    args = args_of_settings(config, vocab_size) | {
        "no_save_rng": True,
        "no_save_optim": bool(why),
        "consumed_train_samples": state.get("consumed_samples", 0),
        "skipped_train_samples": state.get("skipped_samples", 0),
    }
    common = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    torch.save(common | ({} if why else common_states(config, state)), folder / "common.pt")
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


def write_slices(folder: Path, rank: int, kind: str, targets: Targets, streams: Mapping[str, Stream]) -> None:
    """Write a file of Megatron's tensors of a layer, of one kind: "model", or states of the optimizer."""
    pieces, reads = [], {}
    for (key, index), parts in targets.items():
        if kind != "model" and f"exp_avg/{parts[0][0]}" not in streams:
            continue  # it is not trained
        stream = their_stream(kind, parts, streams)
        whole, rest = (*parts[0][1].first, *stream.shape), stream.shape[1:]
        for begin, end in stream.spans():
            shape = (*(1 for _ in index), end - begin, *rest)
            data = torch.empty(shape, dtype=stream.dtype, device="meta")
            piece = Piece(PREFIXES[kind] + key, whole, (*index, begin, *(0 for _ in rest)), data)
            pieces.append(piece)
            reads[piece.entry] = partial(stream.rows, begin, end)

    def copied(piece: Piece) -> torch.Tensor:
        rows = reads[piece.entry]().view(piece.data.shape)
        return rows.clone(memory_format=torch.contiguous_format)

    write_distcp(folder, rank, pieces, copied)


def their_stream(kind: str, parts: Parts, streams: Mapping[str, Stream]) -> Stream:
    """Return Megatron's tensor of parts that are ours; main parameters that are not saved are the weights."""
    runs = []
    for name, spot in parts:
        ours = streams.get(f"{kind}/{name}", streams[f"model/{name}"])
        if kind != "model":
            ours = ours.map(torch.Tensor.float, torch.float32)
        rows = joined([ours], spot.transposed)
        runs += [(run.theirs, rows.part(run.ours, run.count)) for run in spot.rows]
    return joined([rows for _, rows in sorted(runs, key=itemgetter(0))])


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


# The optimizer in common.pt.


def lacking(config: Config, state: dict[str, Any], kinds: set[str]) -> str:
    """Return why states of these kinds cannot be written, or "". state: what a checkpoint of ours says."""
    if not {"exp_avg", "exp_avg_sq"} <= kinds or not state.get("optimizer"):
        return "the source has no optimizer states of a run of nanomegatron"
    if (config.precision.bf16 or config.precision.fp16) and "main" not in kinds:
        return "the source has no fp32 main parameters"
    if config.optimizer.decoupled_lr is not None:
        return "versions of Megatron tell the groups of --decoupled-lr apart by different marks"
    return ""


def common_states(config: Config, state: dict[str, Any]) -> dict[str, Any]:
    """Return what common.pt has of an optimizer. state: what a checkpoint of ours says."""
    optimizer = config.optimizer
    table = samples_before(config, 1)
    schedule = build_schedule(config, table)
    rate_at, _, decay_at = pick_schedules(config, table)
    steps = state["optimizer"]["good_steps"]
    samples = table[min(steps, len(table) - 1)]
    rates = {"max_lr": schedule.lr, "min_lr": schedule.min_lr}
    decay = decay_at(samples)
    adam = {
        "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "eps": optimizer.adam_eps,
        "step": steps,
        "lr": rate_at(samples),
    }
    alike = MARKS | rates | adam
    groups = [
        alike | {"wd_mult": share, "weight_decay": share * decay, "is_expert_parallel": expert}
        for expert in (False, True)
        for share in (1.0, 0.0)
    ]
    form = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    if config.precision.fp16 and config.precision.loss_scale is None:
        scale, good, left = state["optimizer"]["loss_scaler"]
        form["grad_scaler"] = {
            "scale": torch.tensor([scale]),
            "growth_tracker": int(good),
            "hysteresis_tracker": int(left),
        }
    # With expert ranks Megatron has a second optimizer, for experts.
    apart = config.model.num_experts and config.parallel.expert_model_parallel_size > 1
    constant = optimizer.weight_decay_incr_style == "constant"
    scheduler = rates | {
        "lr_warmup_steps": schedule.warmup,
        "num_steps": samples,
        "lr_decay_style": schedule.style,
        "lr_decay_steps": schedule.decay,
        "start_wd": optimizer.weight_decay if constant else optimizer.start_weight_decay,
        "end_wd": optimizer.weight_decay if constant else optimizer.end_weight_decay,
        "wd_incr_style": optimizer.weight_decay_incr_style,
        "wd_incr_steps": config.run.train_samples or table[-1],
    }
    form = {0: form, 1: copy.deepcopy(form)} if apart else form
    return {"optimizer": form, "opt_param_scheduler": scheduler, "content_metadata": FORM}
