"""Cases of mixtures of experts, layers of Mixtral 8x7B and Qwen3-30B-A3B. Tokens are random.

    moe           a layer over all ranks, forward and backward, overlapped; in halves of the tokens; its
                  experts with as many rows each, its router, and dispatch and combine by themselves
    experts       forward and weight gradient of both linear layers of a rank's experts, for ep 1, 2 and 4:
                  in a loop, grouped, and grouped in FP8 without the casts
    transformers  a layer on one GPU, ours and transformers', grouped and in a loop, with the same weights

Weight gradients are included: ours go into fp32 buckets, transformers' are bf16. FLOPs are of the experts'
matmuls.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from operator import attrgetter

import torch

from benchmarks import peers_moe
from benchmarks.session import Case, Run, Session
from nanomegatron.batch import Batch
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, parse
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.fp8_experts import accumulate_fp8_outer, fp8_parts, grouped_fp8_mm
from nanomegatron.fast.moe_dispatch import OverlappedMoe
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.split_gate import SplitGateFunction
from nanomegatron.fp8 import E4M3, Fp8LayerState, Recipe, Rowwise, Scales
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.moe import GroupedExperts, MoELayer, accumulate_outer
from nanomegatron.ops.grouped_mm import Groups, grouped_mm
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init
from nanomegatron.router import RouterOutput

MODELS = {
    "mixtral": "--config mixtral-8x7b --seq-length 4096 --micro-batch-size 2",
    "qwen": "--config qwen3-30b-a3b --seq-length 4096 --micro-batch-size 4",
}
SMALL = "--num-layers 2 --hidden-size 64 --moe-ffn-hidden-size 32 --num-attention-heads 4 --vocab-size 96"
SMALL += " --num-query-groups 2 --kv-channels 16 --num-experts 8 --seq-length 32"


def configs(session: Session) -> Iterator[tuple[str, Config]]:
    """Both models, their experts over all ranks. Raises ConfigError."""
    for name, flags in MODELS.items():
        n, flags = session.world.size, f"{flags} {SMALL if session.args.small else '--num-layers 4'}"
        flags += " --mock-data --tokenizer-type NullTokenizer --bf16 --run-name none --train-iters 1"
        parsed = parse(f"{flags} --ep {n} {session.args.flags}".split())
        if errors := [*parsed.errors, *validate(parsed.config, n, session.device.type)]:
            raise ConfigError(errors)
        yield name, resolve(parsed.config, n)


class Layer:
    """One of our layers with experts on its own buckets, and the tokens of a microbatch."""

    def __init__(self, session: Session, config: Config, halves: bool = False, **changes) -> None:
        """halves: of the tokens alternate. changes: of the model's settings."""
        device, model, data = session.device, replace(config.model, **changes), config.data
        dtype, self.config = getattr(torch, config.dtype_name), config
        self.mesh = Mesh.build(config.parallel, session.world, device, config.model.num_kv_heads)
        self.layer = MoELayer(model, 0, self.mesh, Init(7, dtype, device, name="mlp"), activation(model))
        OverlappedMoe(PeerAccess.build(self.mesh, config.parallel), halves).install(self.layer)
        self.layer.router.gate = SplitGateFunction.apply
        self.buckets = ParamAndGradBuckets(self.layer, config.parallel, self.mesh)
        b, s = data.micro_batch_size, data.seq_length
        places, tokens = torch.arange(s, device=device), torch.zeros(b, s, dtype=torch.int64, device=device)
        scale = torch.full((), 1 / (b * s), device=device)
        self.batch = Batch(tokens, places, places[:b], aux_scale=scale)
        generator = torch.Generator(device).manual_seed(1 + session.world.rank)
        how = dict(generator=generator, device=device, dtype=dtype)
        self.x, self.grad = (torch.randn(s, b, model.hidden_size, **how) for _ in range(2))
        self.x.requires_grad_()

    def prepare(self) -> None:
        self.buckets.zero_grad_buffer(1)
        self.x.grad = None

    def both(self) -> torch.Tensor:
        """The layer, forward and backward."""
        y = self.layer(self.x, self.batch)
        y.backward(self.grad)
        return y.detach()

    def router(self) -> None:
        probs, _ = self.layer.router(self.x.flatten(0, 1), self.batch)
        probs.backward(probs.detach())

    def dispatch(self) -> Callable:
        """The layer, whose router's choice is given from now on, and whose experts return their rows."""
        router = self.layer.router
        with torch.no_grad():
            probs, ids = router(self.x.flatten(0, 1), self.batch)
        probs.requires_grad_()
        router.forward = lambda *_: (probs, ids)
        router.choose, router.balance = (
            lambda *_: RouterOutput(probs, ids, ids, probs, None),
            lambda *_: probs,
        )
        self.layer.experts.forward = lambda rows, *_: rows
        return self.both

    def experts(self) -> Callable:
        """Its experts with as many rows as if the router were even."""
        offsets = even_offsets(self.config, self.mesh.ep.size, self.x.device)
        rows = self.x.detach().new_empty(int(offsets[-1]), self.x.shape[2]).normal_().requires_grad_()
        ends = offsets.tolist() if self.mesh.ep.size > 1 else None
        return lambda: self.layer.experts(rows, offsets, ends).backward(rows.detach())


def flops_of(config: Config) -> float:
    """Of the experts' matmuls of a microbatch, forward and backward."""
    model, tokens = config.model, config.data.micro_batch_size * config.data.seq_length
    return 6.0 * 3 * model.moe_ffn_size * model.hidden_size * tokens * model.moe_router_topk


def layer_cases(session: Session) -> Iterator[Case]:
    """A layer, and pieces of it."""
    for name, config in configs(session):

        def run(piece: Callable, dispatcher: str = "alltoall", config=config, **how) -> Run:
            layer = Layer(session, config, moe_token_dispatcher_type=dispatcher, **how)
            return Run(piece(layer), layer.prepare)

        whole, router = attrgetter("both"), attrgetter("router")  # what is called, of a layer
        forms = {
            "alltoall": partial(run, whole),
            "halves": partial(run, whole, halves=True),
            "allgather": partial(run, whole, "allgather"),
            "experts": partial(run, Layer.experts),
        }
        yield Case(f"{name} layer", forms, flops=flops_of(config))
        forms = {"router": partial(run, router), "dispatch": partial(run, Layer.dispatch)}
        forms["dispatch, allgather"] = partial(run, Layer.dispatch, "allgather")
        yield Case(f"{name} pieces", forms)


def even_offsets(config: Config, ep: int, device: torch.device) -> torch.Tensor:
    """Of the rows of a rank's experts, where every expert has as many."""
    count = config.model.num_experts // ep
    each = config.data.micro_batch_size * config.data.seq_length * config.model.moe_router_topk // count
    return torch.arange(count + 1, dtype=torch.int32, device=device) * each


def peer_cases(session: Session) -> Iterator[Case]:
    """Our layer and transformers'; their difference is relative to the norm, since few choices may differ."""
    settings = dict(moe_router_load_balancing_type=("none",), moe_aux_loss_coeff=(0.0,))
    settings["moe_router_dtype"] = None
    for name, config in configs(session):
        layer = cache(partial(Layer, session, config, **settings))

        def theirs(experts: str, layer=layer, config=config) -> Run:
            ours = layer()
            block = peers_moe.block(config, session.device, experts, ours.layer)
            x = ours.x.detach().transpose(0, 1).contiguous().requires_grad_()
            grad = ours.grad.transpose(0, 1).contiguous()

            def prepare() -> None:
                x.grad = None
                block.zero_grad()

            def call() -> torch.Tensor:
                y = block(x)
                y.backward(grad)
                return y.detach()

            ours.prepare()
            expected = ours.both().float()
            gap = (call().transpose(0, 1).float() - expected).norm() / expected.norm()
            return Run(call, prepare, facts={"difference": gap.item()})

        forms = {
            "ours": lambda layer=layer: Run(layer().both, layer().prepare),
            "transformers, grouped": partial(theirs, "grouped_mm"),
            "transformers, loop": partial(theirs, "eager"),
        }
        yield Case(name, forms, flops=flops_of(config))


class ExpertLinear:
    """A linear layer of the experts that a rank has under ep, each with as many rows."""

    def __init__(self, session: Session, config: Config, ep: int, name: str) -> None:
        device, self.dtype = session.device, getattr(torch, config.dtype_name)
        init, act = Init(7, self.dtype, device, name="mlp.experts"), activation(config.model)
        experts = GroupedExperts(config.model, Mesh(ep=Axis("ep", ep, 0, tuple(range(ep)))), init, act)
        self.buckets = ParamAndGradBuckets(experts, ParallelConfig(), session.mesh)
        self.weight, self.transposed = getattr(experts, name), name == "weight2"
        self.offsets = even_offsets(config, ep, device)
        self.w = self.weight.detach().view(len(self.offsets) - 1, -1, self.weight.shape[1])
        widths, rows = self.w.shape[1:] if self.transposed else self.w.shape[:0:-1], int(self.offsets[-1])
        self.x, self.grad = (torch.randn(rows, n, device=device, dtype=self.dtype) for n in widths)

    def run(self, what: str, how: str) -> Run:
        """In a loop the host knows the offsets; grouped only the device, so that all is; fp8: of casts."""
        groups = Groups(self.offsets, self.offsets.tolist() if how == "loop" else None, how != "loop")
        x, grad, w = self.x, self.grad, self.w if self.transposed else self.w.mT
        matmul, add = partial(grouped_mm, x, w, groups), accumulate_outer
        if how == "fp8":
            recipe = Recipe(Rowwise, E4M3)
            layer = Fp8LayerState("layer", recipe)
            Scales(recipe, [layer], x.device)
            casts = layer.x.quantize(x)
            x, grad = casts.columnwise, layer.g.quantize(grad).columnwise
            w, add = fp8_parts(layer, self.weight, groups, self.transposed), accumulate_fp8_outer
            matmul = partial(grouped_fp8_mm, casts.rowwise, w, groups, self.dtype, fast=True)
        pair = (x, grad) if self.transposed else (grad, x)
        calls = {"y": matmul, "dW": lambda: add(self.weight, *pair, groups)}
        return Run(calls[what], partial(self.buckets.zero_grad_buffer, 1))


def matmul_cases(session: Session) -> Iterator[Case]:
    """The matmuls of one rank's experts, as if there were more ranks."""
    for name, config in configs(session):
        for ep, weight in product((1, 2, 4), ("weight1", "weight2")):
            linear = cache(partial(ExpertLinear, session, config, ep, weight))
            flops = flops_of(config) / 9 * (2 if weight == "weight1" else 1)  # of SwiGLU
            for what in ("y", "dW"):
                run = lambda how, linear=linear, what=what: linear().run(what, how)  # noqa: E731
                forms = {how: partial(run, how) for how in ("loop", "grouped", "fp8")}
                yield Case(f"{name} ep {ep} fc{weight[-1]} {what}", forms, flops=flops)
