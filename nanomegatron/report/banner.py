"""The first lines of a run's log: model, machine, layout, memory, and which implementations are used."""

import contextlib
import math
import os
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nanomegatron import __version__
from nanomegatron.config.batch import stages
from nanomegatron.config.check_layout import graph_conflict
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.layer_graphs import GraphedLayers
from nanomegatron.mesh import Mesh
from nanomegatron.ops.attention import choose_backend
from nanomegatron.ops.kernels import kernels_unavailable
from nanomegatron.ops.paths import describe_kernels
from nanomegatron.pick_fast_paths import Paths
from nanomegatron.plan.flops import parameter_count, stage_layers
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import chunks_kept, describe_memory, memory_of_ranks
from nanomegatron.plan.room import Planned, check_room
from nanomegatron.schedules import placement
from nanomegatron.variants.packing import Ranks

WHOLE_PROCESS = "; the column mem GiB is the whole process, with Python and torch, some 0.3 GiB more"


def banner(
    config: Config, mesh: Mesh, vocab_size: int, padded: int, paths: str, notes: list[str]
) -> Iterator[str]:
    """Yield what is known before the model is built; config: resolved.

    padded: vocab_size rounded up for tp. paths: the fast paths in use, "" if none.
    """
    version = f"nanomegatron {__version__.removesuffix('.0')}"
    yield f"{version} | commit {commit()} | {machine_text(config, mesh)}"
    yield from (f"note    {note}" for note in notes)
    yield f"model   {model_text(config, vocab_size, padded)}"
    predicted = describe_memory(*memory_of_ranks(config, vocab_size, machine_of(mesh.device)))
    yield from textwrap.wrap(
        f"memory  {predicted}" + WHOLE_PROCESS * (mesh.device.type == "cpu"), 120, subsequent_indent=" " * 8
    )
    if mesh.pp.size > 1:
        layers, parallel = stage_layers(config, padded), config.parallel
        placed = placement(parallel.schedule, mesh.pp.size, parallel.chunks)
        ranks = (" + ".join(str(len(layers[stage])) for stage in stages) for stages in placed)
        kept = " | ".join(map(str, chunks_kept(config)))
        yield f"pp      {parallel.schedule}: layers {' | '.join(ranks)}, microbatches of a piece kept {kept}"
    if mesh.cp.size > 1:
        yield f"cp      {cp_text(config)}"
    if paths:
        yield f"paths   {paths}"
    yield from kernel_lines(config, mesh.device)


def paths_text(paths: Paths, config: Config, mesh: Mesh) -> str:
    """How the fast paths communicate over tp, cp and ep, and why; "" for nothing to say."""
    if config.parallel.fast_paths is False:
        return "plain (--no-fast-paths)"
    model = config.model
    parallel = config.parallel
    parts = []
    if paths.linear and mesh.tp.size > 1:
        parts.append(f"tp matmuls in pieces, sent by {paths.peers.describe(mesh.tp)}")
    kinds = zip(parallel.cp_types(model.num_layers), model.windows, strict=True)
    if (
        paths.context_attention
        and mesh.cp.size > 1
        and any("p2p" in kind and not window for kind, window in kinds)
    ):
        parts.append(f"cp rings by {paths.peers.describe(mesh.cp, 'messages')}")
    if paths.moe and mesh.etp_ep.size > 1:
        parts.append(f"ep {paths.moe.describe(mesh.etp_ep, model.moe_token_dispatcher_type)}")
    if paths.graphs:
        parts.append(f"CUDA graphs of each {'layer' if paths.graphs is GraphedLayers else 'microbatch'}")
    elif mesh.device.type == "cuda" and parallel.cuda_graph_impl != "none":
        parts.append(f"no CUDA graphs: {graph_conflict(config, mesh.world.size, 'local')}")
    return " | ".join(parts)


def check_memory(config: Config, mesh: Mesh, vocab_size: int) -> list[str]:
    """Return a note if the run needs more memory than available. Raises ValueError if more than twice."""
    room, shared = memory_room(mesh.device, mesh.world.size)
    note = check_room(Planned(config, vocab_size, machine_of(mesh.device), mesh.world.size, shared), room)
    return [note] if note else []


def memory_room(device: torch.device, ranks: int) -> tuple[float, int]:
    """Bytes of the GPU, or of this machine's memory, and how many of all `ranks` share them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, 1
    return host_memory(), local_ranks(ranks)


def local_ranks(ranks: int) -> int:
    """The number of ranks on this machine, of `ranks` in all: torchrun's, or all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def host_memory() -> float:
    """Bytes of memory available to this machine's processes, at most a container's limit; inf if unknown."""
    limits = [math.inf]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def machine_of(device: torch.device) -> Machine:
    """The planner's description of a rank's machine."""
    fused = choose_backend("auto", device, torch.bfloat16) == "fused"
    return Machine(device.type == "cuda", not kernels_unavailable(device), fused)


def buckets_text(buckets: ParamAndGradBuckets) -> str:
    """How gradients and optimizer states are sharded, reduced and gathered; "" for one fp32 all-reduce."""
    text = []
    if buckets.strategy != "no_shard":
        sizes = {bucket.params[0].spec.expert: bucket.shard_axis.size for bucket in buckets.all}
        experts = f" (of experts {sizes[True]})" if True in sizes else ""
        what = "optimizer states" + " and gradients" * (not buckets.bucket_class.keeps_grads)
        text.append(f"{what} cut over {sizes[False]} ranks{experts}")
    if len(buckets.all) > 1:
        text.append(f"{len(buckets.all)} buckets of up to {max(b.size for b in buckets.all):,} elements")
    if buckets.grad_dtype != torch.float32:
        text.append(f"gradients in {str(buckets.grad_dtype).removeprefix('torch.')}")
    text += ["gradients reduced during the backward"] * buckets.overlap_reduce
    text += ["parameters gathered during the forward"] * buckets.overlap_gather
    if buckets.overlap_reduce or buckets.overlap_gather:
        text += [f"by {comm.description}" for comm in buckets.comms if comm.shard_axis.size > 1][:1]
    text += dict.fromkeys(bucket.gathered.note for bucket in buckets.all if bucket.gathered.note)
    return ", ".join(text + ["averaged by the collective"] * (buckets.op == "avg"))


def data_lines(config: Config, datasets: tuple, samples: int, folder: Path) -> Iterator[str]:
    """Yield lines on the data and batches of a run of `samples` samples, and the folder of its files."""
    run, dp = config.run, config.parallel.data_parallel_size
    parts = zip(("train", "valid", "test"), datasets, strict=True)
    sizes = [f"{len(d)} {n}{epochs_text(d)}" for n, d in parts if d]
    what = f"{run.eval_iters} batches evaluated" if run.eval_only else f"{run.train_iters} iterations"
    yield f"data    {', '.join(sizes)} {batch_text(config)} | {what} | seed {run.seed}"
    grows = [f"{size} from sample {start}" for start, size in stages(config.data, dp)]
    if len(grows) > 1:
        shown = [*grows[:3], "...", *grows[-2:]] if len(grows) > 6 else grows
        yield f"batch   {', '.join(shown)} | {samples} samples in all"
    saves = " | Ctrl-C saves and stops, the same command resumes from there"
    yield f"files   {folder}/" + saves * (not run.eval_only)


def epochs_text(dataset: Any) -> str:
    """Say how often the samples of a dataset go through its text, if more than once and known."""
    epochs = getattr(dataset, "epochs", 1)  # not known of blends and packs
    return f" ({epochs} epochs)" * (epochs != 1)


def commit() -> str:
    """The checkout's commit, ending in "-dirty" with uncommitted changes; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def machine_text(config: Config, mesh: Mesh) -> str:
    """Version of torch, device, ranks and layout in one line."""
    cuda, size = mesh.device.type == "cuda", mesh.world.size
    device = torch.cuda.get_device_name(mesh.device) if cuda else "cpu"
    backend = "no communication"
    if size > 1:
        backend = config.parallel.distributed_backend or ("nccl" if cuda else "gloo")
    layout = " ".join(f"{axis.name}{axis.size}" for axis in (mesh.tp, mesh.pp, mesh.dp, mesh.cp, mesh.ep))
    ranks = f"{size} rank{'s' * (size > 1)}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} | {device} ({backend}) | {ranks} | {layout}"


def model_text(config: Config, vocab_size: int, padded_vocab_size: int) -> str:
    """Shape, parameters and type of the model, and its expected first loss."""
    model, precision = config.model, config.precision
    fp8 = f", FP8 {precision.fp8_format} {precision.fp8_recipe}" if precision.fp8_format else ""
    return (
        f"{model.num_layers} layers, hidden {model.hidden_size}, vocab {vocab_size} -> {padded_vocab_size} | "
        f"{parameter_count(model, vocab_size) / 1e6:.2f} M params, {config.dtype_name}{fp8} | "
        f"expected first loss {expected_first_loss(model, vocab_size):.2f}, ln({vocab_size}) = "
        f"{math.log(vocab_size):.2f} for equal odds"
    )


def expected_first_loss(model: TransformerConfig, vocab_size: int) -> float:
    """Return the loss of initial weights: logits of a unit-variance state are normal with variance h * std^2.

    log E[exp(normal)] adds half of that variance to the ln(vocab_size) of equal odds. Tied weights initially
    favour the token just read: text with many repetitions (bytes: runs of spaces) starts lower.
    """
    return math.log(vocab_size) + model.hidden_size * model.init_method_std**2 / 2


def cp_text(config: Config) -> str:
    """How rows are sharded over cp, and the communication of attention with its number of layers."""
    model, parallel, total = config.model, config.parallel, config.model.num_layers
    types = parallel.cp_types(total)
    sizes = " x ".join(map(str, parallel.hierarchical_context_parallel_sizes))
    how = {"p2p": "ring", "a2a": "heads", "allgather": "all keys", "a2a+p2p": f"heads, ring: {sizes}"}
    parts = [
        f"{name} ({how[name]})" + f" in {n} of {total} layers" * (n < total)
        for name, n in Counter(types).items()
    ]
    gathered = sum("p2p" in name and w is not None for name, w in zip(types, model.windows, strict=True))
    rest = f" | {gathered} of {total} layers with a window: keys gathered, no ring" * (gathered > 0)
    return f"zigzag over {parallel.context_parallel_size} ranks by {', '.join(parts)}{rest}"


def kernel_lines(config: Config, device: torch.device) -> Iterator[str]:
    """Yield lines on the ops that have kernels here, and the attention backend."""
    model, data = config.model, config.data
    dtype = getattr(torch, config.dtype_name)
    core = choose_backend(model.backend, device, dtype, model.attention_dropout)
    documents = data.reset_attention_mask or data.variable_seq_lengths
    if core == "fused" and (documents or any(w is not None for w in model.windows)):
        core += ", flash for windows and documents"
    yield f"kernels {describe_kernels(device, model)} | attention {core}"
    if model.attention_dropout and core != "unfused":
        yield "note    the fused kernel's attention dropout depends on the layout; unfused does not"


def batch_text(config: Config) -> str:
    """The composition of a global batch, in words."""
    data, dp = config.data, config.parallel.data_parallel_size
    micro, batch = data.micro_batch_size, data.global_batch_size
    if not data.variable_seq_lengths:
        return (
            f"samples of {data.seq_length} tokens | "
            f"batch {batch} = {micro} x {batch // micro // dp} microbatches x dp {dp}"
        )
    ranks = Ranks.from_config(config)
    groups = " or ".join(map(str, ranks.sizes))
    return (
        f"documents of up to {data.seq_length} tokens | batch {batch} in packs of up to {ranks.room(1)} "
        f"tokens a rank, each on {groups} of dp {dp} x cp {ranks.cp}"
    )
