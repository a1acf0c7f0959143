"""Context parallelism: attention over a row whose tokens are spread over the ranks of an axis.

Everything but attention works on each token by itself. There each rank has queries, keys and values of its
own tokens (`cp_shard.py`), `[s/cp, b, heads, d]`, and there are four ways to let all queries see all keys:

    p2p         the keys and values of two ranks at a time, while attention to those that are here is
                computed; results are merged                             sends g heads, to cp - 1 ranks
    allgather   keys and values of all ranks first, then attention                the same, at once
    a2a         all tokens of some of the heads in place of some tokens of all    n + 2g heads, and n back
    a2a+p2p     a2a among neighbours, the ring between groups of them             of a hierarchy of networks

    p2p, cp 4, rank 1     compute    q1 k1 | q1 k0  q1 k3 | q1 k2 |          the next keys come in meanwhile,
                          receive   k0  k3 |           k2 |       |          those of nearer ranks first
    backward              find         dk1 |   dk0    dk3 |   dk2 |          and send them to ranks 0, 3 and 2
                          receive          |              | dk1 dk1 | dk1     what ranks 2, 3 and 0 have found

Attention to a part of the keys is o_i with log-sum-exp l_i of its scores; over all keys it is

    l = log sum_i exp(l_i)        o = sum_i exp(l_i - l) o_i                   in fp32

and the backward of a part needs o and l of all keys alone: the probabilities are exp(scores - l). So every
part is the kernel's own forward or backward, called directly. Windows see few keys and not of every rank;
under p2p these are gathered. (Ring: arXiv 2310.01889; all-to-all: DeepSpeed-Ulysses, 2309.14509;
all-gather: Llama 3, 2407.21783, section 3.3.2; two levels: LoongTrain, 2406.18485)
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from nanomegatron.comm import Pending, all_to_all, start_all_gather, start_reduce_scatter, start_shift
from nanomegatron.cp_shard import Round, Selection, Shard, Step
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Mask, core_attention
from nanomegatron.ops.attention_blocks import attend, attend_backward
from nanomegatron.ops.merge import ALL, MOST, Part, merge_rows


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
    """p2p: context `[s/cp, b, n, d]`. Keys and values for the next round are sent while one is computed.

    In the backward they are sent again, and after each round the gradients that it has found, to whose keys
    they are of. Behind the last round only the sum for the queries hides that.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, rounds: list[Round], backend: str) -> torch.Tensor:
        found = Sum(q, sum(len(turn.steps) for turn in rounds))
        for turn, keys in travelling(k, v, axis, rounds):
            for step in turn.steps:
                seen = (x[step.keys] for x in keys)
                found.add(step.rows, *attend(q[step.queries], *seen, step.block, backend))
        ctx.save_for_backward(q, k, v, found.rows, found.lse)
        ctx.how = axis, rounds, backend
        return found.rows

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        q, k, v, *known = ctx.saved_tensors
        axis, rounds, backend = ctx.how
        dq = Sum(q, sum(len(turn.steps) for turn in rounds))
        sums = [Sum(x, 1 + sum(len(turn.rows) for turn in rounds)) for x in (k, v)]
        shift = ring_of(axis, k, "gradients of keys", kept=len(rounds) - 1)
        under_way: list[tuple[Round, Pending]] = []

        def receive() -> None:
            turn, coming = under_way.pop()
            for total, come in zip(sums, coming.wait(), strict=True):
                for rows, (_, size, (begin, _)) in zip(turn.rows, turn.back.coming, strict=True):
                    total.add(rows, come[begin : begin + size])

        for turn, keys in travelling(k, v, axis, rounds):
            found = [gradients(step, keys, (grad, q, *known), backend) for step in turn.steps]
            if turn is rounds[0]:
                for total, own in zip(sums, found[0][1:], strict=True):
                    total.add(ALL, own)
            else:
                if under_way:
                    receive()
                under_way.append((turn, shift([*pieces(turn, found)], (k, v), turn.back)))
            for step, (more, *_) in zip(turn.steps, found, strict=True):
                dq.add(step.rows, more)
        if under_way:
            receive()
        return dq.rows, *(total.rows for total in sums), None, None, None


class GatherFunction(torch.autograd.Function):
    """allgather: context `[s/cp, b, n, d]`; keys and values are gathered again for the backward."""

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, steps: list[Step], order: tuple, backend: str) -> torch.Tensor:
        found, kv = Sum(q, len(steps)), gathered(k, v, axis, order[0])
        for step in steps:
            found.add(step.rows, *attend(q[step.queries], *kv[:, step.keys], step.block, backend))
        ctx.save_for_backward(q, k, v, found.rows, found.lse)
        ctx.how = axis, steps, order, backend
        return found.rows

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, steps, order, backend = ctx.how
        dq, kv = Sum(q, len(steps)), gathered(k, v, axis, order[0])
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for step in steps:
            more, *found = gradients(step, kv, (grad, q, out, lse), backend)
            dq.add(step.rows, more)
            for total, part in zip(dkv, found):
                if isinstance(step.keys, slice):
                    merge_rows([Part(total), Part(part, step.keys)], total)
                else:
                    total.index_add_(0, step.keys, part.float())
        by_rank = dkv.transpose(0, 1).index_select(0, order[1])
        dk, dv = start_reduce_scatter(by_rank, axis).wait().to(k.dtype).unbind(1)
        return dq.rows, dk, dv, None, None, None, None


class Sum:
    """What several parts give for the tokens of `like`, joined: `rows` like it, fp32 in between.

    With log-sum-exps of scores, `lse` `[b, n, s]`, averages over all keys so far. Parts wait until there are
    as many as can be joined at once: what lies in a ring's memory does so no longer than it may.
    """

    def __init__(self, like: torch.Tensor, parts: int) -> None:
        """parts: how many will come."""
        self.like, self.left, self.rows, self.lse = like, parts, None, None
        self.waiting: list[Part] = []

    def add(self, at: Selection, part: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Rows `[count, b, n, d]` for some of the tokens, and the log-sum-exps `[b, n, count]`."""
        self.left -= 1
        self.waiting.append(Part(part, at, lse))
        if self.left and len(self.waiting) < MOST:
            return
        if len(self.waiting) == 1 and isinstance(at, slice) and len(part) == len(self.like):
            self.rows, self.lse = part, lse
            return
        if self.rows is None or not self.left:
            dtype = torch.float32 if self.left else self.like.dtype
            self.rows = self.like.new_empty(self.like.shape, dtype=dtype)
        self.lse = merge_rows(self.waiting, self.rows)
        self.waiting = [Part(self.rows, ALL, self.lse)]


def travelling(
    k: torch.Tensor, v: torch.Tensor, axis: Axis, rounds: list[Round]
) -> Iterator[tuple[Round, Sequence[torch.Tensor]]]:
    """Each round, its keys and values `[tokens, b, g, d]`; those of the next are on their way meanwhile."""
    own = keys = k.contiguous(), v.contiguous()
    shift = ring_of(axis, k, "keys", kept=1)
    for turn, following in zip(rounds, [*rounds[1:], None], strict=True):
        if following is not None:
            parts = [[x[chosen] for x in own] for chosen in following.keys]
            coming = shift(parts, own, following.there)
        yield turn, keys
        if following is not None:
            keys = coming.wait()


def ring_of(axis: Axis, k: torch.Tensor, name: str, kept: int) -> Callable[..., Pending]:
    """How keys or their gradients, and those of values, are sent in a round."""
    return partial(start_shift, axis=axis)


def pieces(turn: Round, found: list[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """What goes back of the gradients that the steps of a round have found, to each whose keys had come."""
    for _, size, (begin, _) in turn.there.coming:
        for step, (_, *grads) in zip(turn.steps, found, strict=True):
            if step.keys.start <= begin < step.keys.stop:
                yield [x[begin - step.keys.start :][:size] for x in grads]


def gathered(k: torch.Tensor, v: torch.Tensor, axis: Axis, order: torch.Tensor) -> torch.Tensor:
    """Keys and values of all ranks in the order of the row, `[2, s, b, g, d]`."""
    return start_all_gather(torch.stack((k, v), 1), axis).wait()[order].transpose(0, 1)


def gradients(
    step: Step, keys: Sequence[torch.Tensor], known: tuple[torch.Tensor, ...], backend: str
) -> tuple[torch.Tensor, ...]:
    """What a step adds to the gradients of its queries, keys and values.

    known: the gradient of the output, and q, the output and the log-sum-exp of all keys.
    """
    (grad, q, out), lse = (x[step.queries] for x in known[:3]), known[3][..., step.queries]
    return attend_backward(grad, q, *(x[step.keys] for x in keys), out, lse, step.block, backend)


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
