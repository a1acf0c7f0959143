"""Who is measured by bench_parallel.py: our model under several settings, and the peers.

    part   what is in memory at once, phase after phase                                  layers   microbatches
    tp     one gpu | tp, tp overlap, tp fused loss, dtensor, dtensor async | one gpu       16       2
    dp     one gpu | dp overlap | dp | fsdp | dp overlap | dp | one gpu                    32       1, then 4
    one    kernels, no kernels | kernels, compile                                         8       1, then 4
    fp8    bf16, fp8 delayed | fp8 tensorwise, fp8 delayed | fp8 blockwise, fp8 rowwise   8       1, then 4
           | fp8 delayed, torchao tensorwise | torchao rowwise

`one gpu` is our model with eight layers on every GPU by itself: what there is to reach. Parts `one` and `fp8`
are of a single GPU, with two sequences in a microbatch; there is memory for two of ours at once. There are
more than are usually run, such as `tp fp8`, `dp fp8`, `dp fp8 gather` and `fsdp torchao`: --only names them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import peers_fp8
from benchmarks.peers import fully_sharded, on_one_gpu, tensor_parallel
from nanomegatron.batch import Batch
from nanomegatron.build import build_optimizer, install, paths_for, quantize_layers
from nanomegatron.comm import all_reduce_
from nanomegatron.config.batch import samples_before
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, parse
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.flops import flops_per_iteration, mfu
from nanomegatron.fp8 import RECIPES, Recipe, Scales
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Mesh, World
from nanomegatron.model import GPTModel
from nanomegatron.ops.kernels import without_kernels
from nanomegatron.param import Init
from nanomegatron.pp import Stages

COMMON = "--config llama3-8b --mock-data --tokenizer-type NullTokenizer --train-iters 1000"
COMMON += " --lr 1e-4 --lr-decay-style constant --lr-warmup-iters 0"
SMALL = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 8 --num-query-groups 4"
SMALL += " --vocab-size 96 --seq-length 16 --make-vocab-size-divisible-by 8"
LARGER = {"tp": " --seq-length 32", "fp8": " --hidden-size 128 --ffn-hidden-size 128 --seq-length 64"}
DP = "--use-distributed-optimizer"
FP8 = "--fp8-format hybrid --fp8-recipe"
PAIRS = {
    "one": [["kernels", "no kernels"], ["kernels", "compile"]],
    "fp8": [
        ["bf16", "fp8 delayed"],
        ["fp8 tensorwise", "fp8 delayed"],
        ["fp8 blockwise", "fp8 rowwise"],
        ["fp8 delayed", "torchao tensorwise"],
        ["torchao rowwise"],
    ],
}


class Ours:
    """The library as train.py uses it."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        vocab, tp = config.data.vocab_size, mesh.tp
        self.mesh = mesh
        self.model = GPTModel(
            config.model,
            vocab_size=vocab,
            max_sequence_length=config.model.max_position_embeddings,
            padded_vocab_size=padded_vocab_size(vocab, config.data.make_vocab_size_divisible_by, tp.size),
            tp=tp,
            init=Init(config.run.seed, getattr(torch, config.dtype_name), mesh.device),
        )
        self.scales = None
        if fp8 := config.precision.fp8_layers(config.model.num_layers):
            self.scales = Scales(Recipe.from_config(config.precision), mesh.device, (mesh.tp, mesh.dp_cp))
            quantize_layers(self.model, self.scales, fp8)
        paths = paths_for(config, mesh)
        install(Stages([self.model]), paths)
        values = step_values(config, samples_before(config, mesh.dp.size))
        self.buckets, self.optimizer = build_optimizer(self.model, config, mesh, values, paths)
        self.optimizer.cast_weights()
        self.positions = torch.arange(config.data.seq_length, device=mesh.device)

    @property
    def shared_bytes(self) -> int:
        """Memory that torch's allocator does not count."""
        return self.buckets.shared_bytes

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """batches: tokens and one more, `[b, s + 1]` each. Returns the mean loss of all ranks, 0-d."""
        mesh, device = self.mesh, self.mesh.device
        mask = torch.ones(batches[0].shape[0], batches[0].shape[1] - 1, device=device)
        tokens = all_reduce_(len(batches) * mask.sum(), mesh.dp_cp)
        self.buckets.zero(len(batches))
        total = torch.zeros((), device=device)
        for batch in batches:
            weights = mask * (self.buckets.grad_scale / tokens)
            samples = torch.arange(len(batch), device=device)
            read = Batch(batch[:, :-1], self.positions, samples, loss_weights=weights)
            loss = self.model(read, batch[:, 1:])
            (loss * weights).sum().backward()
            total += (loss.detach() * mask).sum() / tokens
        self.buckets.grad_sync()
        total = all_reduce_(total, mesh.dp_cp)
        if self.scales is not None:
            self.scales.end_step()
        self.optimizer.step(total)
        return total


class Plain(Ours):
    """The same by torch's own operations."""

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        with without_kernels():
            return super().step(batches)


@dataclass(frozen=True)
class Contender:
    """What is measured: ways to build it, by name, of which the first that works is taken."""

    name: str
    flags: str
    config: Config
    replica: int  # which samples it gets
    builds: dict[str, Callable]

    def numbers(self, microbatches: int, milliseconds: float, peak: float | None) -> dict:
        """Speed of a step by its time."""
        data, parallel = self.config.data, self.config.parallel
        gpus = parallel.ranks_per_replica * parallel.data_parallel_size
        samples = data.micro_batch_size * microbatches * parallel.data_parallel_size
        flops = flops_per_iteration(self.config.model, data.vocab_size, data.seq_length, samples)
        seconds = milliseconds / 1e3
        return {
            "tokens_per_s": samples * data.seq_length / seconds,
            "tokens_per_s_per_gpu": samples * data.seq_length / seconds / gpus,
            "mfu": mfu(flops, seconds, gpus, peak),
        }


@dataclass(frozen=True)
class Phase:
    """Contenders that are in memory together, the microbatches of their steps, and rounds of each."""

    names: list[str]
    microbatches: tuple[int, ...]
    warm: int
    timed: int


def contenders(part: str, world: World, device: torch.device, small: bool) -> dict[str, Contender]:
    """All that a part knows, by name."""
    meshes: dict[tuple, Mesh] = {}
    backend, n = ("aot_eager" if small else "inductor"), world.size
    layers = {"tp": 16, "dp": 32, "one": 8, "fp8": 8}[part]
    tiny = SMALL + LARGER.get(part, "") if small else ""

    def config_of(flags: str, size: int, depth: int) -> Config:
        parsed = parse(f"{COMMON} --fast-paths --num-layers {depth} {tiny} {flags}".split())
        if errors := [*parsed.errors, *validate(parsed.config, size, device.type)]:
            raise ConfigError(errors)
        return resolve(parsed.config, size)

    def mesh_of(config: Config) -> Mesh:
        key = (config.parallel, config.model.num_kv_heads)
        if key not in meshes:
            meshes[key] = Mesh.build(config.parallel, world, device, config.model.num_kv_heads)
        return meshes[key]

    def ours(name: str, flags: str) -> Contender:
        config = config_of(flags, n, layers)
        replica = world.rank // config.parallel.tensor_model_parallel_size
        return Contender(name, flags, config, replica, {"ours": lambda: Ours(config, mesh_of(config))})

    def peer(name: str, flags: str, make: Callable, **options: bool | str) -> Contender:
        config = config_of(flags, n, layers)
        replica = world.rank // config.parallel.tensor_model_parallel_size
        whole = dict(options, backend=backend)
        builds = {"loss compiled": lambda: make(config, device, **whole)}
        builds["loss eager"] = lambda: make(config, device, **whole, compile_loss=False)
        return Contender(name, flags, config, replica, builds)

    def alone(name: str = "one gpu", flags: str = "", runner: type[Ours] = Ours) -> Contender:
        config = config_of(flags, 1, 8)
        mesh = Mesh(world.rank, device)
        how = "ours" if runner is Ours else "plain"  # of which plan/memory.py knows nothing here
        return Contender(name, flags, config, 0, {how: lambda: runner(config, mesh)})

    tp = f"--tp {n} --sp"
    overlap = f"{DP} --overlap-grad-reduce --overlap-param-gather"
    two = "--micro-batch-size 2 --global-batch-size 2"
    known = [alone()]
    if part == "fp8":
        known = [alone("bf16", two)]
        known += [alone(f"fp8 {recipe}", f"{two} {FP8} {recipe}") for recipe in RECIPES]
        for recipe in ("tensorwise", "rowwise"):
            known.append(peer(f"torchao {recipe}", two, peers_fp8.on_one_gpu, recipe=recipe))
    elif part == "one":
        known = [
            alone("kernels", two),
            alone("kernels, fused loss", f"{two} --cross-entropy-loss-fusion"),
            alone("no kernels", two, Plain),
            peer("compile", two, on_one_gpu),
        ]
    elif part == "tp":
        known += [
            ours("tp", tp),
            ours("tp overlap", f"{tp} --tp-comm-overlap"),
            ours("tp fused loss", f"{tp} --cross-entropy-loss-fusion"),
            ours("tp overlap, fused loss", f"{tp} --tp-comm-overlap --cross-entropy-loss-fusion"),
            ours("tp fp8", f"{tp} {FP8} delayed"),
            peer("dtensor", tp, tensor_parallel, async_tp=False),
            peer("dtensor async", tp, tensor_parallel, async_tp=True),
        ]
    else:
        known += [
            ours("dp overlap", overlap),
            ours("dp overlap, fused loss", f"{overlap} --cross-entropy-loss-fusion"),
            ours("dp fp8", f"{overlap} {FP8} delayed"),
            ours("dp fp8 gather", f"{overlap} {FP8} delayed --fp8-param-gather"),
            ours("dp", DP),
            peer("fsdp", DP, fully_sharded, keep=False),
            peer("fsdp kept", DP, fully_sharded, keep=True),
            peer("fsdp torchao", DP, peers_fp8.fully_sharded, keep=False),
        ]
    return {contender.name: contender for contender in known}


def phases(part: str, small: bool, only: list[str]) -> list[Phase]:
    """What is run in which order; with `only` those names in place of the usual ones."""
    one = Phase(["one gpu"], (2,), *((1, 2) if small else (3, 10)))
    if part in PAIRS:
        pairs = [only] if only else PAIRS[part]
        return [Phase(names, (1, 4), *((1, 2) if small else (2, 8))) for names in pairs]
    if part == "tp":
        names = only or ["tp", "tp overlap", "tp fused loss", "dtensor", "dtensor async"]
        return [one, Phase(names, (2,), *((1, 2) if small else (5, 20))), one]
    rounds = (1, 2) if small else (2, 6)
    names = only or ["dp overlap", "dp", "fsdp", "dp overlap", "dp"]
    return [one, *(Phase([name], (1, 4), *rounds) for name in names), one]
