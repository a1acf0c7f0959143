"""Context parallelism: attention over a row whose tokens are spread over the ranks of an axis.

Everything but attention works on each token by itself. There each rank has queries, keys and values of its
own tokens (`cp_shard.py`), `[s/cp, b, heads, d]`, and there are four ways to let all queries see all keys:

    p2p         keys and values go round in a ring, one rank further a step, while attention to those that are
                here is computed; results are merged as they come                 sends g heads, cp - 1 times
    allgather   keys and values of all ranks first, then attention                the same, at once
    a2a         all tokens of some of the heads in place of some tokens of all    n + 2g heads, and n back
    a2a+p2p     a2a among neighbours, the ring between groups of them             of a hierarchy of networks

    p2p, cp 4, rank 1     compute   q1 k1 | q1 k0 | q1 k3 | q1 k2 |        the next keys come in meanwhile;
                          receive      k0 |    k3 |    k2 |       |        backward: dk, dv go round as well

Attention to a part of the keys is o_i with log-sum-exp l_i of its scores; over all keys it is

    l = log sum_i exp(l_i)        o = sum_i exp(l_i - l) o_i                   in fp32

and the backward of a part needs o and l of all keys alone: the probabilities are exp(scores - l). So every
part is the kernel's own forward or backward, called directly. Windows see few keys and not of every rank;
under p2p these are gathered. (Ring: arXiv 2310.01889; all-to-all: DeepSpeed-Ulysses, 2309.14509;
all-gather: Llama 3, 2407.21783, section 3.3.2; two levels: LoongTrain, 2406.18485)
"""

from collections.abc import Callable, Iterator

import torch

from nanomegatron.attention import Mask, core_attention
from nanomegatron.attention_blocks import attend, attend_backward
from nanomegatron.comm import Pending, all_to_all, start_all_gather, start_reduce_scatter
from nanomegatron.comm_symmetric import ring_shift
from nanomegatron.cp_shard import Shard, Step
from nanomegatron.mesh import Axis
from nanomegatron.ops_merge import merge_rows

Steps = list[Step | None]


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: Shard,
    layer: int,
    mask: Mask,
    backend: str,
    fused_softmax: bool = True,
) -> torch.Tensor:
    """Causal attention of this rank's queries `[s/cp, b, n, d]` to all keys; k, v `[s/cp, b, g, d]`.

    mask: of the whole row; fused_softmax: as for `core_attention`, which a2a calls. Returns `[s/cp, b, n*d]`.
    Communicates over the axis of the shard, in the way that it names for the layer. Raises ValueError where
    heads do not divide.
    """
    axis, device, kind = shard.axis, q.device, shard.types[layer]
    inner, outer = {"a2a": (axis, None), "a2a+p2p": axis.levels}.get(kind, (None, axis))
    group = inner.size if inner else 1

    def across(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if outer is None:
            return core_attention(q, k, v, backend, mask, fused_softmax=fused_softmax)[0]
        if kind == "allgather" or mask.window is not None:
            order = shard.order(group, outer.size, device)
            steps = shard.gathered(group, mask.window, device)
            return GatherFunction.apply(q, k, v, outer, steps, order, backend).flatten(2)
        return RingFunction.apply(q, k, v, outer, shard.ring(group, device), backend).flatten(2)

    if inner is None:
        return across(q, k, v)
    return by_heads(q, k, v, inner, shard.order(1, group, device), across)


class RingFunction(torch.autograd.Function):
    """p2p: context `[s/cp, b, n, d]`. The keys and values for the next step are sent while one is computed.

    In the backward they go round once more, and their gradients, in fp32, a step behind them; in a last step,
    which nothing hides, these come home as they are wanted.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, steps: Steps, backend: str) -> torch.Tensor:
        found = Sum(q, steps)
        for step, kv in travelling(k, v, axis, steps):
            if step is not None:
                found.add(step, *attend(q[step.queries], *kv[:, step.keys], step.block, backend))
        ctx.save_for_backward(q, k, v, found.rows, found.lse)
        ctx.how = axis, steps, backend
        return found.rows

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, steps, backend = ctx.how
        dq, coming, shift = Sum(q, steps), None, ring_shift(axis, q.device, "gradients of keys")
        for i, (step, kv) in enumerate(travelling(k, v, axis, steps)):
            found = gradients(dq, step, kv, (grad, q, out, lse), backend)
            dkv = torch.zeros_like(kv, dtype=torch.float32) if coming is None else coming.wait()
            add(found, dkv, step)
            coming = shift(dkv if i + 1 < axis.size else dkv.to(k.dtype))
        return dq.rows, *coming.wait().clone(), None, None, None


class GatherFunction(torch.autograd.Function):
    """allgather: context `[s/cp, b, n, d]`; keys and values are gathered again for the backward."""

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, steps: Steps, order: tuple, backend: str) -> torch.Tensor:
        found, kv = Sum(q, steps), gathered(k, v, axis, order[0])
        for step in steps:
            found.add(step, *attend(q[step.queries], *kv[:, step.keys], step.block, backend))
        ctx.save_for_backward(q, k, v, found.rows, found.lse)
        ctx.how = axis, steps, order, backend
        return found.rows

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, steps, order, backend = ctx.how
        dq, kv = Sum(q, steps), gathered(k, v, axis, order[0])
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for step in steps:
            add(gradients(dq, step, kv, (grad, q, out, lse), backend), dkv, step)
        by_rank = dkv.transpose(0, 1).index_select(0, order[1])
        dk, dv = start_reduce_scatter(by_rank, axis).wait().to(k.dtype).unbind(1)
        return dq.rows, dk, dv, None, None, None, None


class Sum:
    """What steps give for their queries, added up: `rows` `[s, b, n, d]`, fp32 between first and last.

    With log-sum-exps of scores, `lse` `[b, n, s]`, averages over all keys so far.
    """

    def __init__(self, q: torch.Tensor, steps: Steps) -> None:
        self.q, self.left, self.rows, self.lse = q, sum(step is not None for step in steps), None, None

    def add(self, step: Step, part: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """What a step gives, `[queries, b, n, d]`, and the log-sum-exps `[b, n, queries]`."""
        self.left -= 1
        s, b, n, _ = self.q.shape
        if self.rows is None:
            if part.shape[0] == s:
                self.rows, self.lse = part, lse
                return
            self.rows = torch.zeros_like(self.q, dtype=torch.float32)
            self.lse = None if lse is None else lse.new_full((b, n, s), -torch.inf)
        dtype, lses = torch.float32 if self.left else self.q.dtype, None if lse is None else (self.lse, lse)
        self.rows, self.lse = merge_rows(self.rows, part, step.rows, lses, dtype)


def travelling(
    k: torch.Tensor, v: torch.Tensor, axis: Axis, steps: Steps
) -> Iterator[tuple[Step | None, torch.Tensor]]:
    """Each step with its keys and values `[2, s/cp, b, g, d]`; the next ones are on their way meanwhile."""
    coming, shift = Pending(torch.stack((k, v))), ring_shift(axis, k.device, "keys")
    for i, step in enumerate(steps):
        kv = coming.wait()
        if i + 1 < len(steps):
            coming = shift(kv)
        yield step, kv


def gathered(k: torch.Tensor, v: torch.Tensor, axis: Axis, order: torch.Tensor) -> torch.Tensor:
    """Keys and values of all ranks in the order of the row, `[2, s, b, g, d]`."""
    return start_all_gather(torch.stack((k, v), 1), axis).wait()[order].transpose(0, 1)


def gradients(
    dq: Sum, step: Step | None, kv: torch.Tensor, known: tuple[torch.Tensor, ...], backend: str
) -> list[torch.Tensor]:
    """What a step adds to the gradients of its keys and values; that of its queries is added to dq.

    known: the gradient of the output, and q, the output and the log-sum-exp of all keys.
    """
    if step is None:
        return []
    (grad, q, out), lse = (x[step.queries] for x in known[:3]), known[3][..., step.queries]
    more, *found = attend_backward(grad, q, *kv[:, step.keys], out, lse, step.block, backend)
    dq.add(step, more)
    return found


def add(found: list[torch.Tensor], dkv: torch.Tensor, step: Step | None) -> None:
    """Add them to dkv `[2, s, b, g, d]`, fp32."""
    for total, more in zip(dkv, found):
        if isinstance(step.keys, slice):
            merge_rows(total, more, step.keys, None, torch.float32)
        else:
            total.index_add_(0, step.keys, more.float())


def by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: Axis,
    order: tuple[torch.Tensor, torch.Tensor],
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """a2a: attend(q, k, v) with all tokens of the axis, in the row's order, and this rank's share of heads.

    Where there are fewer key/value heads than ranks, those that share one are each sent a copy.
    """
    (s, b, n, d), g, ranks = q.shape, k.shape[2], axis.size
    if n % ranks or (g % ranks and ranks % g):
        raise ValueError(f"{n} query, {g} key/value heads cannot be shared out to {ranks} ranks (a2a)")
    k, v = (x.repeat_interleave(max(ranks // g, 1), dim=2) for x in (k, v))
    blocks = torch.cat([x.unflatten(2, (ranks, -1)) for x in (q, k, v)], dim=3)  # [s, b, ranks, heads, d]
    mine = all_to_all(blocks.permute(2, 0, 1, 3, 4).flatten(0, 1), axis)
    mine = Reorder.apply(mine, *order)
    q, k, v = mine.split([x.shape[2] // ranks for x in (q, k, v)], dim=2)
    context = Reorder.apply(attend(q, k, v), *order[::-1])  # [ranks * s, b, n/ranks * d]
    return all_to_all(context, axis).unflatten(0, (ranks, s)).permute(1, 2, 0, 3).reshape(s, b, n * d)


class Reorder(torch.autograd.Function):
    """x[order]; the backward needs no sums, as index_select's would: it is the inverse permutation."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None
