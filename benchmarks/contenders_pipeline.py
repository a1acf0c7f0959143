"""Who is measured by bench_pipeline.py: our schedules, and torch's for the same stages.

1f1b, 1f1b flops                even layers a rank; with `flops` the output layer counts in the split,
interleaved 2, 4; zb-h1; zb-v   as it does in all others
torch ...                       peers_pipeline.py; blocks and loss under torch.compile, unless torch
                                refuses that (where a backward is split) or the name says eager
"""

from dataclasses import dataclass

import torch

from benchmarks.contenders import COMMON, SMALL, Contender
from benchmarks.peers_pipeline import PipelinePeer
from nanomegatron.batch import Batch
from nanomegatron.build import build, build_optimizer, install, paths_for
from nanomegatron.comm import all_reduce_
from nanomegatron.config.batch import samples_before
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, parse
from nanomegatron.config.settings import Config, ParallelConfig, padded_vocab_size
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Mesh, World
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pp import NoTracer, execute, warm_up

FLOPS = "--pipeline-split flops"
OURS = {
    "1f1b": "",
    "1f1b flops": FLOPS,
    "interleaved 2": f"--vpp 2 {FLOPS}",
    "interleaved 4": f"--vpp 4 {FLOPS}",
    "zb-h1": f"--pipeline-schedule zb-h1 {FLOPS}",
    "zb-v": f"--pipeline-schedule zb-v {FLOPS}",
}
TORCH = {  # flags for the split, torch's schedule, whether blocks and loss are compiled
    "torch 1f1b": (OURS["1f1b flops"], "1f1b", True),
    "torch interleaved 4": (OURS["interleaved 4"], "interleaved", True),
    "torch interleaved 4, eager": (OURS["interleaved 4"], "interleaved", False),
    "torch interleaved zero bubble 4": (OURS["interleaved 4"], "interleaved zero bubble", False),
    "torch zb-v": (OURS["zb-v"], "zb-v", False),
}


class Ours:
    """The library as train.py uses it, in a pipeline over all ranks."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        vocab, self.data, self.mesh = config.data.vocab_size, config.data, mesh
        padded = padded_vocab_size(vocab, config.data.make_vocab_size_divisible_by, mesh.tp.size)
        init = Init(config.run.seed, getattr(torch, config.dtype_name), mesh.device)
        paths = paths_for(config, mesh)
        self.model = install(build(config, mesh, vocab, padded, init), paths)
        values = step_values(config, samples_before(config, mesh.dp.size))
        self.buckets, self.optimizer = build_optimizer(self.model, config, mesh, values, paths)
        self.positions = torch.arange(config.data.seq_length, device=mesh.device)
        self.tracer: NoTracer | None = None
        self.warm = False

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """batches: tokens and one more, `[b, s + 1]` each. Returns the mean loss on every rank, 0-d."""
        device = self.mesh.device
        size, length = self.data.micro_batch_size, self.data.seq_length
        weights = torch.full((size, length), 1 / (len(batches) * size * length), device=device)
        samples, total = torch.arange(size, device=device), torch.zeros((), device=device)

        def forward(chunk: GPTModel, i: int) -> torch.Tensor:
            tokens = Batch(batches[i][:, :-1], self.positions, samples, loss_weights=weights)
            y = chunk(tokens, batches[i][:, 1:])
            if not chunk.post_process:
                return y
            loss = (y * weights).sum()
            total.add_(loss.detach())
            return loss

        shape = self.model.shape(length, size)
        if not self.warm:
            self.buckets.zero()
            warm_up(self.model, forward, shape)
            self.warm = True
            total.zero_()
        self.buckets.zero(len(batches))
        execute(self.model, forward, len(batches), shape, tracer=self.tracer)
        self.buckets.grad_sync()
        total = all_reduce_(total, self.mesh.pp)
        self.optimizer.step(total)
        return total


@dataclass(frozen=True)
class Pipelined(Contender):
    """One whose model all ranks share."""


def config_of(flags: str, ranks: int, device: torch.device, small: bool, layers: int) -> Config:
    """The run that a contender's flags mean, of Llama-3-8B's shape; peers know of no warm-up."""
    shape = f"{COMMON} --lr-warmup-fraction 0 {SMALL if small else ''} --num-layers {layers}"
    parsed = parse(f"{shape} --pp {ranks} --global-batch-size 16 {flags}".split())
    if errors := [*parsed.errors, *validate(parsed.config, ranks, device.type)]:
        raise ConfigError(errors)
    return resolve(parsed.config, ranks)


def pipeline_mesh(world: World, device: torch.device) -> Mesh:
    """All ranks one pipeline, with the links of interleaving, which are those of every schedule."""
    parallel = ParallelConfig(
        pipeline_model_parallel_size=world.size,
        num_virtual_stages_per_pipeline_rank=2,
        distributed_timeout_minutes=3,
    )
    return Mesh.build(parallel, world, device)


def contenders(mesh: Mesh, small: bool, layers: int) -> dict[str, Contender]:
    """All that share the pipeline, by name."""
    known, backend = {}, "aot_eager" if small else "inductor"

    def add(name: str, flags: str, **builds: object) -> None:
        config = config_of(flags, mesh.pp.size, mesh.device, small, layers)
        ways = {how: lambda make=make: make(config) for how, make in builds.items()}
        known[name] = Pipelined(name, flags, config, 0, ways)

    for name, flags in OURS.items():
        add(name, flags, ours=lambda config: Ours(config, mesh))
    for name, (flags, kind, fast) in TORCH.items():

        def peer(config: Config, kind: str = kind, backend: str | None = None) -> PipelinePeer:
            return PipelinePeer(config, mesh, kind, backend)

        compiled = {"compiled": lambda config, peer=peer: peer(config, backend=backend)} if fast else {}
        add(name, flags, **compiled, eager=peer)
    return known
