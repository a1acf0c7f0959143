"""What bench_moe.py measures beside training: a layer with experts and its pieces, their matmuls, the peer's.

    part      a case for           who takes turns
    layer     each model           alltoall, halves, allgather, and the core's forms, plain: the layer by
                                   itself; router: alone; dispatch: alone, with experts that return their
                                   rows; experts: alone, each with the same number of rows
    experts   each model, for ep   forward, input and weight gradient of both linear layers of a rank's
              1, 2 and 4           experts: in a loop, grouped, and grouped in FP8 without the casts
    peers     each model           ours, with all experts on the GPU; transformers', grouped and in a loop

A turn of `layer` and `peers` is a forward and its backward, weight gradients included: ours go into fp32
buckets, transformers' are bf16. FLOPs are those of the experts' matmuls.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace

import torch

from benchmarks import peers_moe
from benchmarks.bench_cp_training import config_of
from nanomegatron.batch import Batch
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.dp import Buckets
from nanomegatron.fast.fp8_experts import fp8_parts, fp8_weight_grad, grouped_fp8_mm
from nanomegatron.fast.moe_dispatch import OverlappedMoe
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fp8 import E4M3, Recipe, Scales
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.moe import GroupedExperts, MoELayer, weight_grad
from nanomegatron.ops.grouped_mm import Groups, grouped_mm
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init
from nanomegatron.router import Choice


@dataclass(frozen=True)
class Shape:
    """A model, the slice of it that is trained, and the sequences of a microbatch."""

    flags: str
    slice: str
    micro_batch: int


AGAIN = "--recompute-granularity selective --recompute-modules moe_act layernorm"
MODELS = {
    "mixtral": Shape("--config mixtral-8x7b", "--num-layers 4 --seq-length 4096", 2),
    "qwen": Shape(f"--config qwen3-30b-a3b {AGAIN}", "--num-layers 12 --seq-length 4096", 4),
}
SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --moe-ffn-hidden-size 32 --num-attention-heads 4 "
)
SMALL += "--num-query-groups 2 --kv-channels 16 --num-experts 8 --vocab-size 96 --seq-length 32"


def nothing() -> None:
    """Before a turn that needs no preparation."""


@dataclass
class Turn:
    """What is timed: `run`, after `prepare`; its floating point operations, and what else the JSON says."""

    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    flops: float = 0.0
    told: dict = field(default_factory=dict)


def cases(sitting) -> dict[str, dict[str, Callable[[], Turn]]]:
    """By name of a case its contenders, which are built when they are called."""
    part = {"layer": layer_case, "peers": peer_case, "experts": matmul_case}[sitting.args.part]
    found: dict[str, dict[str, Callable[[], Turn]]] = {}
    for name, shape in MODELS.items():
        words = f"{shape.flags} {SMALL if sitting.args.small else shape.slice} --mock-data --bf16 "
        words += f"--tokenizer-type NullTokenizer --train-iters 1 --micro-batch-size {shape.micro_batch} "
        words += f"--ep {sitting.world.size} --run-name none"
        found |= part(sitting, name, config_of(words.split(), sitting))
    return found


class Layer:
    """One of our layers with experts on its own buckets, and the tokens of a microbatch."""

    def __init__(self, sitting, config: Config, form: str = "overlapped", **changes) -> None:
        """form: or "plain", or "halves" of the tokens, which take turns. changes: of the model's settings."""
        self.config, data, device = config, config.data, sitting.device
        mesh = Mesh.build(config.parallel, sitting.world, device, config.model.num_kv_heads)
        self.mesh, model = mesh, replace(config.model, **changes)
        dtype = getattr(torch, config.dtype_name)
        self.layer = MoELayer(model, 0, self.mesh, Init(7, dtype, device, name="mlp"), activation(model))
        if form != "plain":
            peers = PeerAccess.build(mesh, config.parallel)
            OverlappedMoe(peers, halves=form == "halves").install(self.layer)
        self.buckets = Buckets(self.layer, config.parallel, mesh)
        b, s = data.micro_batch_size, data.seq_length
        places = torch.arange(s, device=device)
        scale = torch.full((), 1 / (b * s), device=device)
        tokens = torch.zeros(b, s, dtype=torch.int64, device=device)
        self.batch = Batch(tokens, places, places[:b], aux_scale=scale)
        generator = torch.Generator(device).manual_seed(1 + sitting.world.rank)
        shape, how = (s, b, model.hidden_size), dict(generator=generator, device=device, dtype=dtype)
        self.x, self.grad = (torch.randn(shape, **how) for _ in range(2))
        self.x.requires_grad_()

    @property
    def flops(self) -> float:
        """Of the experts' matmuls, forward and backward, of a rank."""
        model = self.config.model
        widths = (3 if model.swiglu else 2) * model.moe_ffn_size * model.hidden_size
        return 6.0 * widths * self.x.shape[:2].numel() * model.moe_router_topk

    def prepare(self) -> None:
        self.buckets.zero(1)
        self.x.grad = None

    def both(self) -> torch.Tensor:
        """The layer, forward and backward."""
        y = self.layer(self.x, self.batch)
        y.backward(self.grad)
        return y.detach()

    def router(self) -> None:
        probs, _ = self.layer.router(self.x.flatten(0, 1), self.batch)
        probs.backward(probs.detach())

    def exchange(self, probs: torch.Tensor, ids: torch.Tensor) -> None:
        layer, experts = self.layer, Same(self.layer.experts)
        parts = dict(router=Chosen(probs, ids), experts=experts, shared_experts=None)
        layer.run(SimpleNamespace(dispatch_class=layer.dispatch_class, **parts), self.x, self.batch).backward(
            self.grad
        )


class Chosen:
    """A router whose choice is given."""

    def __init__(self, probs: torch.Tensor, ids: torch.Tensor) -> None:
        self.probs, self.ids = probs, ids

    def __call__(self, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.probs, self.ids

    def choose(self, x: torch.Tensor, batch: Batch) -> Choice:
        return Choice(self.probs, self.ids, self.ids, self.probs, None)

    def balance(self, choice: Choice, batch: Batch) -> torch.Tensor:
        return self.probs


class Same:
    """Experts that return their rows."""

    def __init__(self, experts: GroupedExperts) -> None:
        self.config, self.mesh, self.multiple = experts.config, experts.mesh, experts.multiple
        self.weight1 = experts.weight1

    def __call__(self, rows: torch.Tensor, *where) -> torch.Tensor:
        return rows


def layer_case(sitting, name: str, config: Config) -> dict[str, dict[str, Callable[[], Turn]]]:
    """A layer and its pieces."""

    def whole(**changes) -> Turn:
        layer = Layer(sitting, config, **changes)
        return Turn(layer.both, layer.prepare, layer.flops)

    def router() -> Turn:
        layer = Layer(sitting, config)
        return Turn(layer.router, layer.prepare)

    def exchange(**changes) -> Turn:
        layer = Layer(sitting, config, **changes)
        with torch.no_grad():
            probs, ids = layer.layer.router(layer.x.flatten(0, 1), layer.batch)
        probs.requires_grad_()
        return Turn(partial(layer.exchange, probs, ids), layer.prepare)

    def experts() -> Turn:
        layer = Layer(sitting, config)
        experts, h = layer.layer.experts, config.model.hidden_size
        local = config.model.num_experts // layer.mesh.ep.size
        each = layer.x.shape[:2].numel() * config.model.moe_router_topk // local
        offsets = torch.arange(local + 1, dtype=torch.int32, device=sitting.device) * each
        rows = torch.randn(local * each, h, device=sitting.device, dtype=layer.x.dtype).requires_grad_()
        ends = offsets.tolist() if layer.mesh.ep.size > 1 else None

        def run() -> None:
            y = experts(rows, offsets, ends)
            y.backward(rows.detach())

        return Turn(run, layer.prepare, layer.flops)

    gather = dict(moe_token_dispatcher_type="allgather")
    return {
        name: {
            "alltoall": whole,
            "alltoall, plain": partial(whole, form="plain"),
            "halves": partial(whole, form="halves"),
            "allgather": partial(whole, **gather),
            "allgather, plain": partial(whole, form="plain", **gather),
            "router": router,
            "dispatch": exchange,
            "dispatch, allgather": partial(exchange, **gather),
            "experts": experts,
        }
    }


def peer_case(sitting, name: str, config: Config) -> dict[str, dict[str, Callable[[], Turn]]]:
    """Our layer and transformers' with the same weights and tokens; scores in bf16, no losses, in both."""
    layers: list[Layer] = []

    def ours() -> Turn:
        plain = dict(
            moe_router_load_balancing_type=("none",), moe_aux_loss_coeff=(0.0,), moe_router_dtype=None
        )
        layers.append(Layer(sitting, config, **plain))
        return Turn(layers[0].both, layers[0].prepare, layers[0].flops)

    def theirs(experts: str) -> Turn:
        layer = layers[0]
        block = peers_moe.block(config, sitting.device, experts, layer.layer)
        x = layer.x.detach().transpose(0, 1).contiguous().requires_grad_()
        grad = layer.grad.transpose(0, 1).contiguous()

        def prepare() -> None:
            x.grad = None
            block.zero_grad()

        def run() -> torch.Tensor:
            y = block(x)
            y.backward(grad)
            return y.detach()

        layer.prepare()
        expected, found = layer.both(), run().transpose(0, 1)
        gap = (found.float() - expected.float()).norm() / expected.float().norm()
        return Turn(run, prepare, layer.flops, {"error": gap.item()})

    return {
        name: {
            "ours": ours,
            "transformers, grouped": partial(theirs, "grouped_mm"),
            "transformers, loop": partial(theirs, "eager"),
        }
    }


class Linear:
    """A linear layer of the experts that a rank has under ep, each with as many rows."""

    def __init__(self, sitting, config: Config, ep: int, name: str) -> None:
        device, model = sitting.device, config.model
        self.dtype = getattr(torch, config.dtype_name)
        axes = Mesh(ep=Axis("ep", ep, 0, tuple(range(ep))))
        self.experts = GroupedExperts(
            model, axes, Init(7, self.dtype, device, name="mlp.experts"), activation(model)
        )
        self.buckets = Buckets(self.experts, ParallelConfig(), Mesh.build(ParallelConfig(), World(), device))
        self.weight, self.transposed = getattr(self.experts, name), name == "weight2"
        count = model.num_experts // ep
        copies = config.data.micro_batch_size * config.data.seq_length * model.moe_router_topk
        self.offsets = torch.arange(count + 1, dtype=torch.int32, device=device) * (copies // count)
        self.w = self.weight.detach().view(count, -1, self.weight.shape[1])
        inner, outer = self.w.shape[1:] if self.transposed else self.w.shape[:0:-1]
        self.x, self.grad = (
            torch.randn(copies // count * count, n, device=device, dtype=self.dtype) for n in (inner, outer)
        )
        self.flops = 2.0 * len(self.x) * inner * outer

    def groups(self, grouped: bool) -> Groups:
        """In a loop the host knows the offsets; grouped only the device, so that all is."""
        return Groups(self.offsets, None if grouped else self.offsets.tolist(), grouped)

    def turn(self, kind: str, grouped: bool) -> Turn:
        groups, w = self.groups(grouped), self.w if self.transposed else self.w.mT
        runs = {
            "y": lambda: grouped_mm(self.x, w, groups),
            "dx": lambda: grouped_mm(self.grad, w.mT, groups),
            "dW": lambda: weight_grad(
                self.weight, *((self.x, self.grad) if self.transposed else (self.grad, self.x)), groups
            ),
        }
        return Turn(runs[kind], partial(self.buckets.zero, 1), self.flops)

    def fp8(self, kind: str) -> Turn:
        """By casts that are there."""
        layer = Scales(Recipe("rowwise", E4M3), self.x.device).add_layer("layer")
        groups, x, grad = self.groups(True), layer.cast(self.x, "x"), layer.cast(self.grad, "g")
        w = [fp8_parts(layer, self.weight, groups, flip) for flip in (self.transposed, not self.transposed)]
        pair = (x.columnwise, grad.columnwise) if self.transposed else (grad.columnwise, x.columnwise)
        runs = {
            "y": lambda: grouped_fp8_mm(x.rowwise, w[0], groups, self.dtype, fast=True),
            "dx": lambda: grouped_fp8_mm(grad.rowwise, w[1], groups, self.dtype),
            "dW": lambda: fp8_weight_grad(self.weight, *pair, groups),
        }
        return Turn(runs[kind], partial(self.buckets.zero, 1), self.flops)


def matmul_case(sitting, name: str, config: Config) -> dict[str, dict[str, Callable[[], Turn]]]:
    """The matmuls of one rank's experts, as if there were more ranks."""
    found: dict[str, dict[str, Callable[[], Turn]]] = {}
    for ep in (1, 2, 4):
        for number, weight in enumerate(("weight1", "weight2"), 1):
            layer = cache(partial(Linear, sitting, config, ep, weight))
            found[f"{name} ep {ep} fc{number}"] = turns = {}
            for kind in ("y", "dx", "dW"):
                for how, grouped in (("loop", False), ("grouped", True)):
                    turns[f"{kind}, {how}"] = lambda layer=layer, k=kind, g=grouped: layer().turn(k, g)
                turns[f"{kind}, fp8"] = lambda layer=layer, k=kind: layer().fp8(k)
    return found
