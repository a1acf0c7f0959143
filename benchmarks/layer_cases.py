"""Cases of Llama-3-8B's linear layers, tensor parallel and in FP8.

tp: [gather +] matmul [+ reduce-scatter] over all ranks, one sequence of 8192, sequence parallel. ours: pieces
by symmetric memory; collectives: the same pieces by asynchronous ones; nccl: before or after the matmul;
torch fused: its symmetric-memory operation; matmul: without communication.

fp8: two sequences of 8192 on one GPU, each recipe beside bf16. matmul: of tensors that have been cast, y
accumulated fast, as in training; layer: forward and backward of a microbatch, between casts of the weight.
Values are random: of zeros a GPU is faster.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed._symmetric_memory

from benchmarks.session import Case, Run, Session
from nanomegatron.comm import all_gather, reduce_scatter
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.tp_overlap import gather_matmul, matmul_scatter, overlapped_linear
from nanomegatron.fp8 import RECIPES, Fp8LayerState, Recipe, Scales
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_matmul import fp8_matmul
from nanomegatron.param import Init
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
        fwd, both = tp_forms(session, peers, kind, (rows, i, o))
        for passes, forms, flops in (("fwd", fwd, 2.0), ("fwd+bwd", both, 6.0)):
            expected = lambda f=forms: f["nccl"]().call()  # noqa: E731
            yield Case(f"{name} {passes}", forms, flops=flops * rows * i * o, expected=expected)


def tp_forms(session: Session, peers: PeerAccess, kind: str, sizes: tuple) -> tuple[dict, dict]:
    """Forms of the forward, and of both passes; tensors are made when the first is built."""
    (rows, i, o), tp, gathers = sizes, session.mesh.tp, kind == "gather"

    @functools.cache
    def tensors() -> list[torch.Tensor]:
        """x and the gradient as this rank has them, the weight, and x of all ranks."""
        some = rows // tp.size
        shapes = (some, i) if gathers else (rows, i), (rows, o) if gathers else (some, o), (o, i), (rows, i)
        make = bind(torch.randn, device=session.device, dtype=session.dtype)
        x, grad, w, whole = map(make, shapes)
        return [x.requires_grad_(), grad, w.requires_grad_(), whole]

    def forward(function: Callable) -> Run:
        x, _, w, _ = tensors()
        return Run(lambda: (function(x.detach(), w.detach().t()),))

    def both(linear: Callable) -> Run:
        x, grad, w, _ = tensors()
        return Run(lambda: torch.autograd.grad(linear(x, w, tp, kind), (x, w), grad))

    def matmul(backward: bool) -> Run:
        x, w = tensors()[3], tensors()[2].detach()
        return Run(lambda: (y := x @ w.t(), *((y.t() @ x, y @ w) if backward else ())), alone=True)

    def nccl(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_gather(x, tp) @ w if gathers else reduce_scatter(x @ w, tp)

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ops, group = torch.ops.symm_mem, tp.group.group_name
        if gathers:
            return ops.fused_all_gather_matmul(x, [w], 0, group)[1][0]
        return ops.fused_matmul_reduce_scatter(x, w, "sum", 0, group)

    def ours(x: torch.Tensor, w: torch.Tensor, *given: PeerAccess) -> torch.Tensor:
        if gathers:
            return gather_matmul(x, w, tp, *given)[0]
        return matmul_scatter(x, w, tp, *given).wait()

    return {
        "ours": bind(forward, lambda x, w: ours(x, w, peers)),
        "collectives": bind(forward, ours),
        "nccl": bind(forward, nccl),
        "torch fused": bind(forward, fused),
        "matmul": bind(matmul, False),
    }, {
        "ours": bind(both, functools.partial(overlapped_linear, peers)),
        "collectives": bind(both, functools.partial(overlapped_linear, None)),
        "nccl": bind(both, LinearFunction.apply),
        "matmul": bind(matmul, True),
    }


class Linear:
    """A layer and its rows: x `[t, i]`, W `[o, i]`, g `[t, o]`, bf16."""

    def __init__(self, session: Session, name: str) -> None:
        shrink, self.t = (32, 128) if session.args.small else (1, 16384)
        i, o, self.kind = LAYERS[name]
        self.i, self.o = i // shrink, o // shrink
        self.mesh, self.device = session.mesh, session.device
        self.flops = 2.0 * self.t * self.i * self.o  # of one of its three matmuls

    @functools.cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """x, w and g, made at their first use."""
        shapes = {"x": (self.t, self.i, 1.0), "w": (self.o, self.i, 0.02), "g": (self.t, self.o, 1e-3)}
        make = bind(torch.randn, dtype=torch.bfloat16, device=self.device)
        return {role: make(m, n) * scale for role, (m, n, scale) in shapes.items()}

    def matmul(self, product: str, recipe: str) -> Callable:
        """y = x W^T, dx = g W or dW = g^T x; dW in fp32, as main_grad is, but bf16's."""
        x, w, g = self.values.values()
        if recipe == "bf16":
            return {"y": lambda: x @ w.t(), "dx": lambda: g @ w, "dW": lambda: g.t() @ x}[product]
        recipe = Recipe(RECIPES[recipe])
        fp8 = Fp8LayerState("layer", recipe)
        Scales(recipe, [fp8], self.device)
        x, w, g = (getattr(fp8, role).quantize(value) for role, value in self.values.items())
        if product == "dW":
            return bind(fp8_matmul, g.columnwise, x.columnwise, torch.float32)
        a, b = (x.rowwise, w.rowwise) if product == "y" else (g.rowwise, w.columnwise)
        return bind(fp8_matmul, a, b, torch.bfloat16, product == "y")

    def both(self, recipe: str) -> Callable:
        """Forward and backward of one of a step's many microbatches: the input gradient."""
        x, g = self.values["x"][:, None].requires_grad_(), self.values["g"][:, None]  # [s, b, h]
        init = Init(dtype=torch.bfloat16, device=self.device, name="layer")
        linear = self.kind(self.i, self.o, Axis.single("tp"), init, bias=False)
        ParamAndGradBuckets(linear, ParallelConfig(), self.mesh).zero_grad_buffer(10**9)
        run = lambda: torch.autograd.grad(linear(x), x, g)[0]  # noqa: E731
        if recipe != "bf16":
            recipe = Recipe(RECIPES[recipe])
            scales = Scales(recipe, [use_fp8(linear, recipe)], self.device)
            run()
            scales.end_step()  # delayed: the next step's scales are of such tensors
        return run


def fp8_cases(session: Session) -> Iterator[Case]:
    """Of each layer."""
    for name in LAYERS:
        layer = Linear(session, name)
        for product in ("y", "dx", "dW"):
            recipes = "bf16", "tensorwise", "rowwise", "blockwise"
            forms = {recipe: bind(layer.matmul, product, recipe) for recipe in recipes}
            yield Case(f"{name} matmul {product}", forms, flops=layer.flops)
        forms = {recipe: bind(layer.both, recipe) for recipe in ("bf16", *RECIPES)}
        yield Case(f"{name} layer", forms, flops=3 * layer.flops)
