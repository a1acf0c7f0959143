"""Mixture of experts: many small MLPs in place of one; a router picks k of them for each token.

Tests: tests/test_moe_dispatch.py. Page: docs/moe.md.

    x [t, h] --+-- route       Router: probs, ids [t, k]
               |-- dispatch    tokens to the ranks of their experts, copies in order of experts    rows [r, h]
               |   experts     GroupedExperts: an MLP for each group of rows                       rows [r, h]
               |   combine     back, each token's sum weighted by probs                            [t, h]
               +-- shared      an MLP for every token, added                                       [t, h]

In training ranks have distinct tokens (tp > 1 needs sequence parallelism). Experts have their own grid of
ranks, etp x ep (`mesh.py`): expert i of E is on ep rank i // (E / ep), sharded over etp. The two dispatchers:

    allgather     x, probs and ids are all-gathered over etp x ep. Each rank takes the copies for its experts;
                  the ranks' partial sums are reduce-scattered.
    alltoall      a token, with its probs and ids, is sent once to each ep rank that has any of its experts,
                  and from there to all etp ranks; its partial sums return the same way.

    alltoall over ep 2, E 4, k 2    rank 0                          rank 1
    tokens                          0     1     2     3             4     5
    ids                             1 0   3 2   2 0   1 3           1 2   0 1
    tokens in order of ranks        0 2 3 | 1 2 3                   4 5 | 4           sizes 3 | 3 and 2 | 1
    after the exchange              0 2 3 | 4 5                     1 2 3 | 4
    copies in order of experts      0 2 5 | 0 3 4 5                 1 2 4 | 1 3

    allgather
    tokens after the gather         0 1 2 3 4 5                     0 1 2 3 4 5
    copies in order of experts      0 2 5 | 0 3 4 5                 1 2 4 | 1 3

Only the GPU knows how many rows arrive, and the host needs the number for messages and memory: it
synchronizes (with alltoall several times a layer), unless etp x ep is 1 and the experts are one grouped
matmul. Combine multiplies by probs: a rank adds its copies of a token in fp32, in their order, and rounds the
partial sum to the type of x; then the ranks' partial sums are added.

On GPUs `MoELayer.run` and the dispatcher are those of `fast/moe_dispatch.py`, unless --no-fast-paths: they
overlap the communication with the router, the shared experts and weight gradients.
(Switch, arXiv 2101.03961; GShard 2006.16668; MegaBlocks 2211.15841; a token sent once to a rank: DeepSeek-V3
2412.19437; separate grid for experts: MoE Parallel Folding 2504.14960)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from nanomegatron.batch import Batch
from nanomegatron.comm import all_gather, all_to_all, gather_seq, read, scatter_seq
from nanomegatron.config.model import TransformerConfig
from nanomegatron.mesh import Mesh
from nanomegatron.ops.grouped_mm import AddBiasFunction, Groups, add_grouped_, grouped_mm, grouped_outer
from nanomegatron.ops.permute import Routing, permute, route, unpermute
from nanomegatron.param import (
    Init,
    ParamSpec,
    accumulate,
    add_product,
    is_deferred,
    new_parameter,
    replica,
    replicated,
    scaled_std,
    shard,
    slot,
    stacked,
)
from nanomegatron.recompute import recomputed
from nanomegatron.router import Router, expert_capacity

Activation = Callable[[torch.Tensor], torch.Tensor]  # `[r, 2f]` for gated units, or `[r, f]` -> `[r, f]`


def route_and_combine(layer: "MoELayer", x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Route, dispatch, apply the experts, combine; add the shared experts. x `[s, b, h]` -> `[s, b, h]`"""
    tokens = x.flatten(0, 1)
    probs, ids = layer.router(tokens, batch)
    rows, dispatched = layer.dispatcher.dispatch(tokens, probs, ids)
    rows = layer.experts(rows, dispatched.routing.offsets, dispatched.ends)
    y = layer.dispatcher.combine(rows, dispatched).view_as(x)
    return y if layer.shared_experts is None else y + layer.apply_shared_experts(x)


class MoELayer(nn.Module):
    """Router, experts and shared experts. x `[s, b, h]` -> `[s, b, h]` (sequence parallelism: s is s/tp)."""

    run: Callable[["MoELayer", torch.Tensor, Batch], torch.Tensor] = slot(route_and_combine)

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        mesh: Mesh,
        init: Init,
        activation: Activation,
        shared: nn.Module | None = None,
    ) -> None:
        """activation: that of the experts; shared: an MLP applied to every token, added to their result."""
        super().__init__()
        self.router = Router(config, layer, mesh, init.at("router"))
        self.experts = GroupedExperts(config, mesh, init.at("experts"), activation)
        self.shared_experts = shared
        self.gate_weight = None
        if shared is not None and config.moe_shared_expert_gate:
            self.gate_weight = replicated(
                init.at("shared_experts.gate_weight"),
                (1, config.hidden_size),
                mesh.tp,
                partial_grad=config.sequence_parallel,
            )
        alltoall = config.moe_token_dispatcher_type == "alltoall" and mesh.etp_ep.size > 1
        self.dispatcher = AllToAllDispatch(self.experts) if alltoall else AllGatherDispatch(self.experts)
        self.recompute = config.recomputes("moe")
        self.recompute_shared = config.recomputes("shared_experts")

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return recomputed(partial(self.run, self, batch=batch), x, when=self.recompute)

    def apply_shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the shared experts to every token. x `[s, b, h]` -> `[s, b, h]`"""
        return recomputed(self._gated_shared_experts, x, when=self.recompute_shared)

    def _gated_shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared_experts(x)
        if self.gate_weight is None:
            return y
        return y * torch.sigmoid(x @ self.gate_weight.t())


@dataclass(frozen=True)
class Dispatched:
    """Which row of the experts is which token's, for the experts and for `combine` (allgather: all of it)."""

    routing: Routing  # of the n tokens that arrived to the rows of this rank's experts
    ends: list[int] | None  # the experts' offsets on the host; None: it has not asked for them
    probs: torch.Tensor  # of the tokens that arrived, fp32 [n, k]


class ExchangeSizes(NamedTuple):
    """Numbers of rows that this rank sends to each rank of an axis, and receives from each."""

    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class Exchanged(Dispatched):
    """alltoall: also how the tokens were sent, over ep, then over etp; `combine` sends their sums back."""

    to_ranks: Routing  # of this rank's tokens to the rows that it sent over ep
    over_ep: ExchangeSizes
    over_etp: ExchangeSizes  # sent to each: all that were received over ep


class TokenDispatch:
    """Sends this rank's tokens to their experts and back.

    dispatch    x `[t, h]`, probs fp32 `[t, k]`, ids int32 `[t, k]`, -1 for a dropped copy -> rows `[r, h]`
                for this rank's e experts, and a `Dispatched`
    combine     rows `[r, h]`, partial sums over etp, and the `Dispatched` -> weighted sums `[t, h]`
    """

    def __init__(self, experts: "GroupedExperts") -> None:
        self.config = experts.config
        self.mesh = experts.mesh
        self.experts = experts
        self.local_experts = self.config.num_experts // self.mesh.ep.size
        self.first_expert = self.mesh.ep.rank * self.local_experts
        self.permute = partial(permute, fused=self.config.moe_permute_fusion)
        self.unpermute = partial(unpermute, fused=self.config.moe_permute_fusion)

    def capacity(self, tokens: int) -> int | None:
        """Return how many rows each expert gets from each rank with `tokens` tokens; None: the ids decide."""
        return expert_capacity(tokens, self.config) if self.config.moe_pad_expert_input_to_capacity else None

    def route_to_experts(self, ids: torch.Tensor, capacity: int | None) -> Routing:
        """Sort the copies of all tokens that arrived by expert of this rank. ids `[n, k]`"""
        fixed_rows = None if capacity is None else capacity * self.mesh.etp_ep.size
        return route(ids - self.first_expert, self.local_experts, self.experts.multiple, fixed_rows)


class AllGatherDispatch(TokenDispatch):
    """All-gather and reduce-scatter over etp x ep; all ranks must have the same number of tokens."""

    def dispatch(
        self, x: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatched]:
        """All-gather all; gradients of x and probs are reduce-scattered.

        x `[t, h]`, probs, ids `[t, k]` -> rows `[r, h]` and where they are
        """
        axis = self.mesh.etp_ep
        x = gather_seq(x, axis)
        probs = gather_seq(probs, axis)
        routing = self.route_to_experts(all_gather(ids, axis), self.capacity(len(ids)))
        ends = None
        if axis.size > 1:
            routing, ends = routing.cut_to_size()
        return self.permute(x, routing), Dispatched(routing, ends, probs)

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Reduce-scatter each token's partial sums. rows `[r, h]` -> `[t, h]`"""
        return scatter_seq(self.unpermute(rows, dispatched.routing, dispatched.probs), self.mesh.etp_ep)


def pack_choices(probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Join probs and the bits of ids + 1, for one exchange; a row of zeros, as in padding, has no expert.

    probs, ids `[t, k]` -> `[t, 2*k]`, fp32
    """
    bits = (ids + 1).view(torch.float32)
    return torch.cat((probs, bits), dim=1)


def unpack_choices(choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `pack_choices`. choices `[n, 2*k]` -> probs fp32 `[n, k]`, ids int32 `[n, k]`"""
    probs, bits = choices.chunk(2, dim=1)
    return probs.contiguous(), bits.detach().contiguous().view(torch.int32) - 1


class AllToAllDispatch(TokenDispatch):
    """All-to-all over ep, then over etp. Without a capacity ranks may have different numbers of tokens."""

    def dispatch(
        self, x: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, Exchanged]:
        """Exchange sizes, then all over ep and etp (backward: gradients).

        x `[t, h]`, probs, ids `[t, k]` -> rows `[r, h]` and where they are
        """
        capacity = self.capacity(len(ids))
        to_ranks, rank_ends = self.route_to_ranks(ids, capacity).cut_to_size()
        over_ep, over_etp = self.exchange_sizes(to_ranks, rank_ends)

        # tokens and their choices
        x = self.send(self.permute(x, to_ranks), over_ep, over_etp)
        choices = self.send(self.permute(pack_choices(probs, ids), to_ranks), over_ep, over_etp)
        received_probs, received_ids = unpack_choices(choices)

        # copies in order of experts
        routing, ends = self.route_to_experts(received_ids, capacity).cut_to_size()
        return self.permute(x, routing), Exchanged(routing, ends, received_probs, to_ranks, over_ep, over_etp)

    def route_to_ranks(self, ids: torch.Tensor, capacity: int | None) -> Routing:
        """Sort this rank's tokens by ep rank, once for each rank with any of its experts. ids `[t, k]`

        capacity: rows per expert; each rank then gets a fixed number of rows, padded. None: the ids decide.
        """
        owner = ids.div(self.local_experts, rounding_mode="floor")
        same_rank = owner[:, :, None] == owner[:, None, :]
        repeated = same_rank.tril(-1).any(2)  # an earlier choice of the token is on the same rank
        fixed_rows = None if capacity is None else min(capacity * self.local_experts, len(ids))
        return route(owner.masked_fill(repeated, -1), self.mesh.ep.size, 1, fixed_rows)

    def exchange_sizes(self, to_ranks: Routing, rank_ends: list[int]) -> tuple[ExchangeSizes, ExchangeSizes]:
        """Tell other ranks how many rows they get: over ep, and over etp; the host waits for the numbers.

        rank_ends: where the rows for each ep rank begin, and where the last ones end.
        """
        etp = self.mesh.etp
        sent = [end - begin for begin, end in pairwise(rank_ends)]
        received = all_to_all(to_ranks.offsets.diff(), self.mesh.ep)
        arrived = read(all_gather(received.sum()[None], etp), etp)  # over ep, at each etp rank
        over_ep = ExchangeSizes(sent, read(received, self.mesh.ep))
        over_etp = ExchangeSizes(sent=[arrived[etp.rank]] * etp.size, received=arrived)
        return over_ep, over_etp

    def send(self, rows: torch.Tensor, over_ep: ExchangeSizes, over_etp: ExchangeSizes) -> torch.Tensor:
        """Send to ep ranks, then to all etp ranks there. rows `[r, w]` -> `[n, w]`"""
        rows = all_to_all(rows, self.mesh.ep, over_ep.sent, over_ep.received)
        return self.gather_over_etp(rows, over_etp)

    def combine(self, rows: torch.Tensor, dispatched: Exchanged) -> torch.Tensor:
        """Add partial sums over etp, then send them back over ep and add them. rows `[r, h]` -> `[t, h]`"""
        over_ep = dispatched.over_ep
        y = self.unpermute(rows, dispatched.routing, dispatched.probs)
        y = self.scatter_over_etp(y, dispatched.over_etp)
        y = all_to_all(y, self.mesh.ep, over_ep.received, over_ep.sent)
        return self.unpermute(y, dispatched.to_ranks)

    def gather_over_etp(self, rows: torch.Tensor, sizes: ExchangeSizes) -> torch.Tensor:
        """All-gather over etp, whose ranks share the experts: to each all rows `[r, w]` -> `[n, w]`"""
        if self.mesh.etp.size == 1:
            return rows
        return all_to_all(rows.repeat(self.mesh.etp.size, 1), self.mesh.etp, sizes.sent, sizes.received)

    def scatter_over_etp(self, y: torch.Tensor, sizes: ExchangeSizes) -> torch.Tensor:
        """Reduce-scatter over etp: each gets its own rows of all, and adds them. y `[n, h]` -> `[r, h]`"""
        if self.mesh.etp.size == 1:
            return y
        y = all_to_all(y, self.mesh.etp, sizes.received, sizes.sent)
        return y.view(self.mesh.etp.size, sizes.sent[0], y.shape[1]).sum(0)


def grouped_linear(
    x: torch.Tensor, weight: nn.Parameter, groups: Groups, transposed: bool = False
) -> torch.Tensor:
    """Apply each expert's linear layer to its rows.

    x `[r, i]`, weight `[e*o, i]` or `[e*i, o]` (transposed) -> `[r, o]`
    """
    return GroupedLinearFunction.apply(x, weight, groups, transposed)


class GroupedLinearFunction(torch.autograd.Function):
    """`grouped_linear`. x `[r, i]`, weight `[e*o, i]` or `[e*i, o]` (transposed) -> `[r, o]`"""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: nn.Parameter, groups: Groups, transposed: bool) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.groups = groups
        ctx.transposed = transposed
        return grouped_mm(x, matrices(weight, groups, transposed), groups)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        groups = ctx.groups
        grad = grad.contiguous()
        dx = grouped_mm(grad, matrices(ctx.weight, groups, ctx.transposed).mT, groups)
        a, b = (x, grad) if ctx.transposed else (grad, x)
        return dx, accumulate_outer(ctx.weight, a, b, groups), None, None


def matrices(weight: torch.Tensor, groups: Groups, transposed: bool) -> torch.Tensor:
    """Each expert's W^T, which x multiplies. weight `[e*o, i]`, or `[e*i, o]` (transposed) -> `[e, i, o]`"""
    stored = weight.view(groups.experts, -1, weight.shape[1])
    return stored if transposed else stored.mT


def activate_and_project(experts: "GroupedExperts", x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Activation and second linear layer. x `[r, 2*f/etp]` (gated) or `[r, f/etp]` -> `[r, h]`"""
    return experts.linear(experts.act(x), experts.weight2, groups, transposed=True)


class GroupedExperts(nn.Module):
    """Applies this rank's experts to rows sorted by expert. rows `[r, h]` -> `[r, h]`, a partial sum over etp

    rows [r, h]          offsets [e + 1]: expert i has the rows offsets[i] ... offsets[i + 1]

    0  +----------+
       | expert 0 |   y = x W1[0]^T,  z = silu(gate) * up of y = [gate, up],  z W2[0]^T
    3  +----------+
       | expert 1 |   y = x W1[1]^T,  ...
    7  +----------+

    Each etp rank has f/etp of every expert's inner features. Weights are stacked along dim 0:

    weight1  [e * 2f/etp, h]    gate of expert 0, up of expert 0, gate of expert 1, ...
    weight2  [e * f/etp, h]     expert 0, expert 1, ..., each transposed
    """

    multiple = 1  # each expert's rows are zero-padded to a multiple of it; above 1 no expert has none
    linear: Callable[..., torch.Tensor] = slot(grouped_linear)
    project: Callable[..., torch.Tensor] = slot(activate_and_project)

    def __init__(self, config: TransformerConfig, mesh: Mesh, init: Init, activation: Activation) -> None:
        super().__init__()
        ep = mesh.ep
        etp = mesh.etp
        h = config.hidden_size
        f = config.moe_ffn_size
        if config.num_experts % ep.size or f % etp.size:
            raise ValueError(
                f"{config.num_experts} experts of {f} features must be multiples of "
                f"ep {ep.size}, etp {etp.size}"
            )
        self.config = config
        self.mesh = mesh
        self.name = init.name
        self.act = activation
        local = config.num_experts // ep.size
        experts = [init.at(f"{ep.rank * local + i}").name for i in range(local)]
        fc1_parts = ("linear_fc1.gate", "linear_fc1.up") if config.gated else ("linear_fc1",)
        fc1 = [f"{expert}.{layer}" for expert in experts for layer in fc1_parts]
        fc2 = [f"{expert}.linear_fc2" for expert in experts]

        def spec(layers: list[str], kind: str, *rest: int) -> ParamSpec:
            return stacked([shard(f"{layer}.{kind}", (f, *rest), 0, etp) for layer in layers], expert=True)

        fc2_init = replace(init, std=scaled_std(config.init_method_std, config.num_layers))
        self.weight1 = new_parameter(spec(fc1, "weight", h), init)
        self.weight2 = new_parameter(spec(fc2, "weight_t", h), fc2_init)
        self.bias1 = self.bias2 = None
        if not config.disable_bias_linear:
            self.bias1 = new_parameter(spec(fc1, "bias"), init, fill=0.0)
            whole = [replica(f"{layer}.bias", (h,), etp, partial_grad=True) for layer in fc2]
            self.bias2 = new_parameter(stacked(whole, expert=True), init, fill=0.0)

    def forward(
        self, rows: torch.Tensor, offsets: torch.Tensor, ends: list[int] | None = None
    ) -> torch.Tensor:
        """offsets: int32 `[e + 1]`, ascending from 0; rows past the last offset belong to no expert.

        ends: the offsets on the host; None: a loop over experts waits for them, a grouped matmul does not.
        """
        if not len(rows):
            ends = [0] * len(offsets)
        groups = Groups(offsets, ends, self.config.moe_grouped_gemm)
        x = self.linear(rows, self.weight1, groups)
        if self.bias1 is not None:
            x = AddBiasFunction.apply(x, self.bias1, offsets)
        y = self.project(self, x, groups)
        if self.bias2 is None:
            return y
        return AddBiasFunction.apply(y, self.bias2 * (self.mesh.etp.rank == 0), offsets)


def accumulate_outer(
    weight: nn.Parameter, a: torch.Tensor, b: torch.Tensor, groups: Groups
) -> torch.Tensor | None:
    """Accumulate a^T b of each expert's rows, a `[r, m]`, b `[r, n]` -> None, without a bucket `[e*m, n]`"""
    if groups.one_kernel(a, a.shape[1], b.shape[1]):
        return accumulate_grouped(weight, lambda: grouped_outer(a, b, groups))

    def add_expert(out: torch.Tensor, begin: int, end: int) -> None:
        add_product(out, a[begin:end], b[begin:end])

    return accumulate_each(weight, groups, add_expert)


def accumulate_each(
    weight: nn.Parameter, groups: Groups, add_expert: Callable[[torch.Tensor, int, int], None]
) -> torch.Tensor | None:
    """Accumulate one expert's gradient after the other -> None, without a bucket `[e*m, n]`

    add_expert(out `[m, n]`, begin, end) adds that of the expert with these rows.
    """

    def write(out: torch.Tensor, beta: int) -> None:
        if beta == 0:
            out.zero_()  # the experts without rows
        grads = out.view(groups.experts, -1, out.shape[1])
        for i, begin, end in groups.spans:
            add_expert(grads[i], begin, end)

    return accumulate(weight, write)


def accumulate_grouped(weight: nn.Parameter, multiply: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Accumulate multiply() `[e, m, n]`, one grouped matmul -> None, without a bucket `[e*m, n]`

    A pipeline's queue defers matmul and addition. That of the experts' exchange defers the addition: beside
    NCCL's kernels the matmul would wait for them, since its thread blocks need all multiprocessors at once.
    """
    if is_deferred(weight) and weight.wgrad_store.grouped_matmuls:
        return accumulate(weight, lambda out, beta: add_grouped_(out, multiply(), beta))
    grad = multiply()
    return accumulate(weight, lambda out, beta: add_grouped_(out, grad, beta))
