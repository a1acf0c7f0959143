"""Cases of Llama-3-8B's linear layers, tensor parallel and in FP8, and of making process groups.

tp: [gather +] matmul [+ reduce-scatter] over all ranks, one sequence of 8192, sequence parallel. ours: pieces
by symmetric memory; collectives: the same pieces by asynchronous ones; nccl: before or after the matmul;
torch fused: its symmetric-memory operation; matmul: without communication.

fp8: two sequences of 8192 on one GPU. matmul: of tensors that have been cast; sum: of a weight gradient into
main_grad, of the first microbatch and of later ones; layer: forward and backward between casts of its weight;
kept: what a transformer layer keeps for its backward. Values are random: of zeros a GPU is faster.

groups: `Mesh.build` for --flags "--tp 2 --pp 32", each rank a process of this machine (gloo); slow: every
group takes its ranks 0.1 s more, as NCCL would to connect them.
"""

import functools
import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory

from benchmarks.session import Case, Run, Session
from nanomegatron.batch import Batch
from nanomegatron.build import quantize_early
from nanomegatron.comm import all_gather, reduce_scatter
from nanomegatron.config.cli import parse
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.tp_overlap import OverlappedLinear, gather_matmul, matmul_scatter
from nanomegatron.fp8 import RECIPES, Fp8Linear, Recipe, Scales
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import TransformerLayer
from nanomegatron.ops.fp8_cast import Fp8Matrix
from nanomegatron.ops.fp8_matmul import add_fp8_product_, fp8_matmul
from nanomegatron.ops.merge import add_
from nanomegatron.ops.rope import rope_angles
from nanomegatron.param import Init, add_product
from nanomegatron.tp import ColumnParallelLinear, LinearFunction, RowParallelLinear

bind = functools.partial
LAYERS = {  # input and output features of all ranks together, and how the layer is cut over tp
    "qkv": (4096, 6144, ColumnParallelLinear),
    "proj": (4096, 4096, RowParallelLinear),
    "fc1": (4096, 28672, ColumnParallelLinear),
    "fc2": (14336, 4096, RowParallelLinear),
}


def tp_cases(session: Session) -> Iterator[Case]:
    """Forward, and forward with backward, of each layer; FLOPs are a rank's."""
    n, rows, shrink = session.world.size, *((64, 32) if session.args.small else (8192, 1))
    peers = PeerAccess.build(session.mesh, ParallelConfig(tensor_model_parallel_size=n))
    session.result["path"] = peers.describe(session.mesh.tp)
    for name, (i, o, cut) in LAYERS.items():
        kind = "gather" if cut is ColumnParallelLinear else "scatter"
        i, o = (i // shrink, o // shrink // n) if kind == "gather" else (i // shrink // n, o // shrink)
        forward, both = tp_forms(session, peers, kind, (rows, i, o))
        yield Case(
            f"{name} fwd", forward, flops=2.0 * rows * i * o, expected=lambda f=forward: (f["nccl"]()(),)
        )
        yield Case(f"{name} fwd+bwd", both, flops=6.0 * rows * i * o, expected=lambda f=both: f["nccl"]()())


def tp_forms(
    session: Session, peers: PeerAccess, kind: str, sizes: tuple[int, int, int]
) -> tuple[dict, dict]:
    """Forms of the forward, and of both passes; tensors are made when the first is built."""
    (rows, i, o), tp, gathers = sizes, session.mesh.tp, kind == "gather"

    @functools.cache
    def tensors() -> list[torch.Tensor]:
        """x and the gradient as this rank has them, the weight, and x of all ranks."""
        some = rows // tp.size
        shapes = (some, i) if gathers else (rows, i), (rows, o) if gathers else (some, o), (o, i), (rows, i)
        dtype = torch.bfloat16 if session.cuda else torch.float32
        x, grad, w, whole = (torch.randn(shape, device=session.device, dtype=dtype) for shape in shapes)
        return [x.requires_grad_(), grad, w.requires_grad_(), whole]

    def forward(function: Callable) -> Callable:
        x, _, w, _ = tensors()
        return lambda: function(x.detach(), w.detach().t())

    def both(linear: Callable) -> Callable:
        x, grad, w, _ = tensors()
        return lambda: torch.autograd.grad(linear(x, w, tp, kind), (x, w), grad)

    def nccl(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_gather(x, tp) @ w if gathers else reduce_scatter(x @ w, tp)

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ops, group = torch.ops.symm_mem, tp.group.group_name
        if gathers:
            return ops.fused_all_gather_matmul(x, [w], 0, group)[1][0]
        return ops.fused_matmul_reduce_scatter(x, w, "sum", 0, group)

    def matmul(backward: bool) -> Run:
        x, w = tensors()[3], tensors()[2].detach()
        return Run(lambda: (y := x @ w.t(), *((y.t() @ x, y @ w) if backward else ())), alone=True)

    def ours(x: torch.Tensor, w: torch.Tensor, *given: PeerAccess) -> torch.Tensor:
        return gather_matmul(x, w, tp, *given)[0] if gathers else matmul_scatter(x, w, tp, *given)

    return {
        "ours": bind(forward, lambda x, w: ours(x, w, peers)),
        "collectives": bind(forward, ours),
        "nccl": bind(forward, nccl),
        "torch fused": bind(forward, fused),
        "matmul": bind(matmul, False),
    }, {
        "ours": bind(both, OverlappedLinear(peers)),
        "collectives": bind(both, OverlappedLinear(None)),
        "nccl": bind(both, LinearFunction.apply),
        "matmul": bind(matmul, True),
    }


class Linear:
    """A linear layer in FP8 and its rows: x `[t, i]`, W `[o, i]`, g `[t, o]`, made at their first use."""

    def __init__(self, session: Session, name: str) -> None:
        shrink, self.t = (32, 128) if session.args.small else (1, 16384)
        i, o, self.kind = LAYERS[name]
        self.i, self.o = i // shrink, o // shrink
        self.name, self.device = name, session.device
        self.casts = functools.cache(self._casts)
        self.flops = 2.0 * self.t * self.i * self.o  # of one of its three matmuls

    @functools.cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """x, w and g, random, bf16."""
        shapes = {"x": (self.t, self.i, 1.0), "w": (self.o, self.i, 0.02), "g": (self.t, self.o, 1e-3)}
        make = bind(torch.randn, dtype=torch.bfloat16, device=self.device)
        return {role: make(m, n) * scale for role, (m, n, scale) in shapes.items()}

    @functools.cached_property
    def main_grad(self) -> torch.Tensor:
        """Where the weight gradient is summed, fp32."""
        return torch.zeros(self.o, self.i, device=self.device)

    def fp8(self, recipe: str) -> Fp8Linear:
        """Its FP8 state. Delayed scaling as in later steps, but its scales are 1."""
        scales = Scales(Recipe(recipe), self.device)
        scales.no_history_yet = False
        return scales.add_layer(self.name)

    def _casts(self, recipe: str) -> list:
        return [self.fp8(recipe).cast(value, role) for role, value in self.values.items()]

    def operands(self, recipe: str, product: str) -> tuple[Fp8Matrix, Fp8Matrix]:
        """What y = x W^T, dx = g W or dW = g^T x is a product of."""
        x, w, g = self.casts(recipe)
        if product == "dW":
            return g.columnwise, x.columnwise
        return (x.rowwise, w.rowwise) if product == "y" else (g.rowwise, w.columnwise)

    def bf16(self, product: str) -> Callable:
        x, w, g = self.values.values()
        return {"y": lambda: x @ w.t(), "dx": lambda: g @ w, "dW": lambda: g.t() @ x}[product]

    def matmul(self, product: str, recipe: str, fast: bool) -> Callable:
        """dW in fp32, as main_grad is."""
        dtype = torch.float32 if product == "dW" else torch.bfloat16
        return bind(fp8_matmul, *self.operands(recipe, product), dtype, fast)

    def first_sum(self) -> Callable:
        """Written into main_grad by the matmul."""
        (a, b), out = self.operands("tensorwise", "dW"), self.main_grad
        return lambda: torch._scaled_mm(
            a.data, b.data.t(), a.inverse, b.inverse, out_dtype=out.dtype, out=out
        )

    def added(self, recipe: str, dtype: torch.dtype) -> Callable:
        """By a pass over what the matmul wrote."""
        a, b = self.operands(recipe, "dW")
        return lambda: self.main_grad.add_(fp8_matmul(a, b, dtype))

    def added_in_matmul(self) -> Callable:
        return bind(add_fp8_product_, self.main_grad, *self.operands("tensorwise", "dW"))

    def added_in_bf16(self) -> Callable:
        return bind(add_product, self.main_grad, self.values["g"], self.values["x"])

    def both(self, recipe: str) -> Callable:
        """Forward and backward of a microbatch that is not the step's first: the input gradient."""
        x, g = self.values["x"][:, None].requires_grad_(), self.values["g"][:, None]  # [s, b, h]
        init = Init(dtype=torch.bfloat16, device=self.device, name=self.name)
        linear = self.kind(self.i, self.o, Axis.single("tp"), init, bias=False)
        linear.weight.bucket, linear.weight.main_grad = Bucket(), self.main_grad
        run = lambda: torch.autograd.grad(linear(x), x, g)[0]  # noqa: E731
        if recipe != "bf16":
            use_fp8(linear, self.fp8(recipe))
        if recipe == "delayed":  # a step, so that its scales are those of such tensors
            run()
            linear.fp8.scales.end_step()
        return run


class Bucket:
    """As much of one as a layer needs to add to `main_grad`."""

    def alloc_grads(self) -> None:
        """The memory is there."""

    def add(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        add_(param.main_grad, grad)

    def ready(self, param: torch.Tensor) -> None:
        """No rank waits for it."""


def fp8_cases(session: Session) -> Iterator[Case]:
    """Of each layer; last what a transformer layer keeps. The first form is bf16's."""
    for name in LAYERS:
        layer = Linear(session, name)
        for product in ("y", "dx", "dW"):
            forms = {
                "bf16": bind(layer.bf16, product),
                "tensor, fast": bind(layer.matmul, product, "tensorwise", True),
                "tensor, exact": bind(layer.matmul, product, "tensorwise", False),
                "row, fast": bind(layer.matmul, product, "rowwise", True),
                "row, exact": bind(layer.matmul, product, "rowwise", False),
                "block": bind(layer.matmul, product, "blockwise", False),
            }
            yield Case(f"{name} matmul {product}", forms, flops=layer.flops)
        forms = {
            "bf16": layer.added_in_bf16,
            "first": layer.first_sum,
            "add fp32": bind(layer.added, "tensorwise", torch.float32),
            "add bf16": bind(layer.added, "tensorwise", torch.bfloat16),
            "block, add fp32": bind(layer.added, "blockwise", torch.float32),
            "add in the matmul": layer.added_in_matmul,
        }
        yield Case(f"{name} sum", forms, flops=layer.flops)
        forms = {recipe: bind(layer.both, recipe) for recipe in ("bf16", *RECIPES)}
        yield Case(f"{name} layer", forms, flops=3 * layer.flops)
    yield Case("kept", {recipe: bind(kept, session, recipe) for recipe in ("bf16", *RECIPES)})


def kept(session: Session, recipe: str) -> Run:
    """The forward of a transformer layer; bytes a token that it keeps, its casts of weights not counted."""
    flags = "--config llama3-8b --mock-data --tokenizer-type NullTokenizer --num-layers 1 --bf16"
    if session.args.small:
        flags += " --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2"
    config, tokens = parse(flags.split()).config.model, 256 if session.args.small else 8192
    how = dict(dtype=torch.bfloat16, device=session.device)
    x = torch.randn(tokens, 1, config.hidden_size, **how).requires_grad_()
    positions = torch.arange(tokens, device=session.device)
    batch, rotary = Batch(torch.zeros_like(positions)[None], positions), rope_angles(positions, config)
    layer = TransformerLayer(config, 0, Axis.single("tp"), Init(name="layer", **how))
    if recipe != "bf16":
        scales = Scales(Recipe(recipe), session.device)
        for linear in layer.modules():
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                use_fp8(linear, scales.add_layer(linear.weight.spec.name))
        quantize_early(layer)
    layer(x, batch, rotary).sum().backward()
    if recipe != "bf16":
        scales.end_step()
    with torch.no_grad():
        layer(x, batch, rotary)  # casts the weights
    gc.collect()
    allocated = torch.cuda.memory_allocated if session.cuda else lambda: 0
    before, y = allocated(), layer(x, batch, rotary)
    found = (allocated() - before - 2 * y.numel()) / tokens if session.cuda else 0
    return Run(lambda: layer(x, batch, rotary), facts={"kept_bytes_a_token": found})


def group_cases(session: Session) -> Iterator[Case]:
    """All groups of a mesh."""
    parallel, new_group = parse(session.args.flags.split()).config.parallel, dist.new_group

    def build(seconds: float) -> None:
        def connected(ranks: tuple[int, ...], **options):
            time.sleep(seconds * (session.world.rank in ranks))
            return new_group(ranks, **options)

        dist.new_group = connected
        Mesh.build(parallel, session.world, session.device)
        dist.new_group = new_group

    forms = {
        "gloo": lambda: Run(bind(build, 0.0), single=True),
        "slow": lambda: Run(bind(build, 0.1), single=True),
    }
    yield Case("groups", forms)
