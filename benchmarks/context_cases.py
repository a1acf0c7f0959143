"""Cases of attention over N ranks, context parallel: one causal row, Llama-3-8B's heads.

    p2p, a2a, allgather    ours (cp.py) with the ring of fast/ring.py, and from 4 ranks on a2a+p2p, with pairs
                           of neighbours that exchange heads
    equal slices           the ring of cp.py, where rank r has the r-th of N equal slices (arXiv 2310.01889):
                           the last one has the most to do
    torch HOW              torch.distributed.tensor.experimental's context_parallel, both rotations, by cuDNN;
                           on GPUs only
    one gpu                without communication, as many FLOPs as each of the N: a causal row of s / sqrt(N)
                           tokens; of several documents, all of the row

FLOPs are 4 s^2 / 2 of a causal row and feature forward, 2.5 times that backward, for all forms. Results of
the shortest row are compared with those of one GPU. torch's attention stays patched until the run ends.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.session import Case, Run, Session
from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.cp import AttentionBlock, RingFunction, SequenceShard
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.ring import Ring
from nanomegatron.ops.attention import Block, Mask, choose_backend, core_attention
from nanomegatron.ops.merge import ALL
from nanomegatron.pick_variants import attention_over_cp
from nanomegatron.variants.cp_documents import DocumentShard, EmptyBlock


class Row(NamedTuple):
    """s tokens, one document or several."""

    s: int
    bounds: tuple[int, ...] = ()  # where documents begin, and s; none: one document
    heads: int = 32
    groups: int = 8
    head: int = 128

    def flops(self) -> float:
        """Forward."""
        lengths = np.diff(self.bounds or (0, self.s)).astype(float)
        return 2.0 * float((lengths**2).sum()) * self.heads * self.head

    def mask(self, device: torch.device) -> Mask:
        if not self.bounds:
            return Mask()
        bounds = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        return Mask(cu_seqlens=bounds, max_seqlen=int(np.diff(self.bounds).max()))


def document_bounds(s: int, mean: int, seed: int = 1) -> tuple[int, ...]:
    """Documents of `mean` tokens on average, from very short to a few times as long, that fill a row."""
    cuts = np.random.RandomState(seed).permutation(np.arange(1, s))[: max(s // mean, 1) - 1]
    return (0, *sorted(cuts.tolist()), s)


def parallel(n: int) -> ParallelConfig:
    """All ranks share the row; pairs of neighbours are made where there are several pairs."""
    levels = (2, n // 2) if n > 2 and n % 2 == 0 else ()
    return ParallelConfig(context_parallel_size=n, hierarchical_context_parallel_sizes=levels)


def cases(session: Session) -> Iterator[Case]:
    """Rows of --lengths thousand tokens, and the first of them with documents."""
    unit, shape = (64, dict(heads=8, groups=2, head=16)) if session.args.small else (1024, {})
    lengths, ring = session.args.lengths, Ring(PeerAccess.build(session.mesh, ParallelConfig()))
    bounds = document_bounds(lengths[0] * unit, 4 * unit)
    rows = {f"{k}k": Row(k * unit, **shape) for k in lengths}
    rows[f"{lengths[0]}k, documents"] = Row(lengths[0] * unit, bounds, **shape)
    for name, row in rows.items():
        builds = ways(session, row, ring)
        for word, factor in (("fwd", 1.0), ("fwd+bwd", 3.5)):
            forms = {form: functools.partial(build, word == "fwd+bwd") for form, build in builds.items()}
            whole = functools.partial(one_gpu, session, row, row.s, word == "fwd+bwd")
            flops = factor * row.flops() / session.world.size
            expected = (lambda w=whole: w().call()) if row.s == min(lengths) * unit else None
            yield Case(f"{name} {word}", forms, flops=flops, expected=expected)


def run_of(session: Session, row: Row, places: np.ndarray, attention: Callable, backward: bool) -> Run:
    """The forward, or that and the backward, of these tokens of the row, which is the same on all ranks."""
    device, at = session.device, torch.from_numpy(places).to(session.device)
    how = dict(generator=torch.Generator(device).manual_seed(1), device=device, dtype=session.dtype)
    counts = row.heads, row.groups, row.groups, row.heads
    *inputs, grad = (torch.randn(row.s, 1, n, row.head, **how)[at].requires_grad_() for n in counts)

    def call() -> tuple[torch.Tensor, ...]:
        out = attention(*inputs).view(grad.shape)
        return (out.detach(), *torch.autograd.grad(out, inputs, grad)) if backward else (out.detach(),)

    return Run(call, part=lambda whole: whole[at])


def one_gpu(session: Session, row: Row, s: int, backward: bool) -> Run:
    """The first s tokens, by the fastest kernel there is, without the others."""
    backend, mask = choose_backend("auto", session.device, session.dtype), row.mask(session.device)
    attention = lambda q, k, v: core_attention(q, k, v, backend, mask)[0]  # noqa: E731
    return replace(run_of(session, row, np.arange(s), attention, backward), alone=True)


def ways(session: Session, row: Row, ring: Ring) -> dict[str, Callable[[bool], Run]]:
    """By name what builds a form; given whether it has a backward."""
    axis, device, mask = session.mesh.cp, session.device, row.mask(session.device)
    backend = choose_backend("auto", device, session.dtype)

    def ours(kind: str, backward: bool) -> Run:
        if row.bounds:
            shard = DocumentShard.of_documents(axis, row.s, (kind,), device, np.array(row.bounds))
        else:
            shard = SequenceShard.of_row(axis, row.s, (kind,), device)
        attention = attention_over_cp(ring, mask, axis)
        call = lambda q, k, v: attention(q, k, v, shard, 0, mask, backend)  # noqa: E731
        return run_of(session, row, shard.positions, call, backward)

    def equal_slices(backward: bool) -> Run:
        seen = [AttentionBlock(ALL, ALL, Block(i == 0)) for i in range(axis.rank + 1)]
        blocks = seen + [EmptyBlock(slice(0, 0), slice(0, 0), Block())] * (axis.size - len(seen))
        call = lambda q, k, v: RingFunction.apply(q, k, v, axis, blocks, backend)  # noqa: E731
        return run_of(session, row, np.arange(row.s).reshape(axis.size, -1)[axis.rank], call, backward)

    def by_torch(rotate: str, backward: bool) -> Run:  # chunks r and 2N - 1 - r, as it balances by default
        chunks = np.arange(row.s).reshape(2 * axis.size, -1)
        places = np.concatenate((chunks[axis.rank], chunks[-1 - axis.rank]))
        enter_torch(device.type, axis.size)
        return run_of(session, row, places, functools.partial(torch_attention, rotate), backward)

    alone = row.s if row.bounds else round(row.s / math.sqrt(axis.size))
    kinds = [kind for kind in ("p2p", "a2a", "allgather", "a2a+p2p") if kind != "a2a+p2p" or axis.levels]
    found = {kind: functools.partial(ours, kind) for kind in kinds}
    if not row.bounds:
        found["equal slices"] = equal_slices
        for how in ("allgather", "alltoall") if session.cuda else ():
            found[f"torch {how}"] = functools.partial(by_torch, how)
    return found | {"one gpu": functools.partial(one_gpu, session, row, alone)}


@functools.cache
def enter_torch(device: str, size: int) -> AbstractContextManager:
    """torch's context parallelism over all ranks, which ends when nothing refers to it any more."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh, wanted = init_device_mesh(device, (size,)), [torch.arange(2 * size, device=device)]
    context = context_parallel(mesh, buffers=wanted, buffer_seq_dims=[0])  # it wants to cut something
    context.__enter__()
    return context


def torch_attention(rotate: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's patched attention, by cuDNN."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3)
