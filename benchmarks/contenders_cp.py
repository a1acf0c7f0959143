"""Who computes attention over N ranks in bench_cp.py, and on which tokens of the row.

    p2p, a2a, allgather,           ours (nanomegatron/cp.py) with the ring of fast/ring.py; the last, from 4
    a2a+p2p                        ranks on, with neighbours in pairs, which exchange heads
    plain ring                     p2p by the ring of cp.py
    equal slices                   the same, but rank r has the r-th of N equal slices: the last one has the
                                   most to do, and the others wait for it
    torch allgather, alltoall      torch.distributed.tensor.experimental's context_parallel, its two rotations
    one gpu                        one GPU by itself, without communication: with as many FLOPs as each of the
                                   N, a causal row of s / sqrt(N) tokens; where documents are told, all of it

Queries, keys and values are as a model has them, `[s, 1, heads, d]` in memory, and key/value heads are not
repeated for torch unless it refuses grouped ones. torch's attention is patched for the whole sitting, as in
training it is for a whole step; ours does not pass there.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanomegatron.config.parallel import CP_TYPES, ParallelConfig
from nanomegatron.cp import RingFunction, Shard, Step, context_attention
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.ring import Ring
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.ops.attention import Block, Mask, choose_backend, core_attention
from nanomegatron.ops.merge import ALL

aten = torch.ops.aten
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A causal row of s tokens, one document or several."""

    name: str
    s: int
    heads: int = 32
    groups: int = 8
    head: int = 128
    bounds: tuple[int, ...] = ()  # where documents begin, and s; none: one document

    def flops(self, tokens: int | None = None) -> tuple[float, float]:
        """Forward; forward and backward. Scores above the diagonal count for nothing: 4 s^2 / 2 a feature.

        The backward is 2.5 times the forward. tokens: of a shorter row without documents.
        """
        lengths = np.diff(self.bounds) if self.bounds else np.array([tokens or self.s])
        forward = 2.0 * float((lengths.astype(float) ** 2).sum()) * self.heads * self.head
        return forward, 3.5 * forward

    def mask(self, device: torch.device) -> Mask:
        """Of the whole row."""
        if not self.bounds:
            return Mask()
        told = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        return Mask(cu_seqlens=told, max_seqlen=int(np.diff(self.bounds).max()))


@dataclass(frozen=True)
class Way:
    """Attention, and where in the row the tokens are that this rank has. alone: nobody else takes part."""

    places: np.ndarray
    run: Attention  # q, k, v of these tokens -> `[tokens, 1, n, d]` or `[tokens, 1, n * d]`
    alone: bool = False


def document_bounds(s: int, mean: int, seed: int = 1) -> tuple[int, ...]:
    """Documents of `mean` tokens on average, from very short to a few times as long, that fill a row."""
    cuts = np.random.RandomState(seed).permutation(np.arange(1, s))[: max(s // mean, 1) - 1]
    return (0, *sorted(cuts.tolist()), s)


def cases(small: bool, lengths: list[int], documents: list[int]) -> list[Case]:
    """Llama-3-8B's heads, rows of so many thousand tokens; documents: the same with some of mean 4k."""
    unit = 64 if small else 1024
    shape = dict(heads=8, groups=2, head=16) if small else {}
    found = [Case(f"{k}k", k * unit, **shape) for k in lengths]
    for k in documents:
        bounds = document_bounds(k * unit, 4 * unit)
        found.append(Case(f"{k}k, documents", k * unit, **shape, bounds=bounds))
    return found


def attention_mesh(world: World, device: torch.device) -> Mesh:
    """All ranks share the row; pairs of neighbours are made where there are several pairs."""
    levels = (2, world.size // 2) if world.size > 2 and world.size % 2 == 0 else ()
    return Mesh.build(
        ParallelConfig(
            context_parallel_size=world.size,
            hierarchical_context_parallel_sizes=levels,
            distributed_timeout_minutes=2,
        ),
        world,
        device,
    )


def fast_ring(mesh: Mesh) -> Ring:
    """The fast ring of all contenders. Every rank calls it."""
    return Ring(PeerAccess.build(mesh, ParallelConfig()))


def contenders(
    case: Case, mesh: Mesh, torchs: "TorchRing", ring: Ring
) -> dict[str, dict[str, Callable[[], Way]]]:
    """By name the ways to build each; the first whose first run works is taken."""
    device, axis = mesh.device, mesh.cp
    backend = choose_backend("auto", device, dtype_of(device))
    alone = case.s if case.bounds else round(case.s / math.sqrt(axis.size))
    found: dict[str, dict] = {"one gpu": {"ours": lambda: one_gpu(case, alone, device)}}
    for kind in CP_TYPES:
        if kind != "a2a+p2p" or axis.levels:
            found[kind] = {"ours": lambda kind=kind: ours(case, kind, mesh, backend, ring)}
    found["plain ring"] = {"ours": lambda: ours(case, "p2p", mesh, backend, context_attention)}
    if case.bounds:
        return found
    found["equal slices"] = {"ours": lambda: equal_slices(case, axis, backend)}
    for rotate in ("allgather", "alltoall"):
        found[f"torch {rotate}"] = {
            how: lambda rotate=rotate, attend=attend: torchs.way(case, rotate, attend)
            for how, attend in torchs.attentions().items()
        }
    return found


def dtype_of(device: torch.device) -> torch.dtype:
    """What is measured in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def one_gpu(case: Case, s: int, device: torch.device) -> Way:
    """The first s tokens, by the fastest kernel there is, without the others."""
    backend, mask = choose_backend("auto", device, dtype_of(device)), case.mask(device)
    return Way(np.arange(s), lambda q, k, v: core_attention(q, k, v, backend, mask)[0], alone=True)


def ours(case: Case, kind: str, mesh: Mesh, backend: str, attention: Callable) -> Way:
    """As a layer of the model calls it; attention: its `context`."""
    shard = Shard(mesh.cp, case.s, (kind,), np.array(case.bounds) if case.bounds else None)
    mask = case.mask(mesh.device)
    return Way(shard.places, lambda q, k, v: attention(q, k, v, shard, 0, mask, backend))


def equal_slices(case: Case, axis: Axis, backend: str) -> Way:
    """Ring attention as it was first described (arXiv 2310.01889), with our blocks and our overlap."""
    slices = np.arange(case.s).reshape(axis.size, -1)
    steps = [None if i > axis.rank else Step(ALL, ALL, Block(i == 0)) for i in range(axis.size)]
    return Way(slices[axis.rank], lambda q, k, v: RingFunction.apply(q, k, v, axis, steps, backend))


class TorchRing:
    """torch's context parallelism over all ranks, entered at its first use, left by `close`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.stack, self.devices = mesh, contextlib.ExitStack(), None

    def way(self, case: Case, rotate: str, attend: Attention) -> Way:
        """With chunks r and 2N - 1 - r, as torch balances the work by default."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        axis, device = self.mesh.cp, self.mesh.device
        if self.devices is None:
            self.devices = init_device_mesh(device.type, (axis.size,))
            told = [torch.arange(2 * axis.size, device=device)]  # it wants to cut something
            self.stack.enter_context(context_parallel(self.devices, buffers=told, buffer_seq_dims=[0]))

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            set_rotate_method(rotate)
            return attend(*(x.permute(1, 2, 0, 3) for x in (q, k, v))).permute(2, 0, 1, 3)

        chunks = np.arange(case.s).reshape(2 * axis.size, -1)
        return Way(np.concatenate((chunks[axis.rank], chunks[-1 - axis.rank])), run)

    def attentions(self) -> dict[str, Attention]:
        """By cuDNN, else by torch's flash kernel; a CPU has neither, and there the ring itself is called."""
        if self.mesh.device.type == "cuda":
            return dict(self._on_gpu())

        def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return RingOnCpu.apply(q, *repeated(q, k, v), self.devices.get_group())

        return {"its ring": ring}

    def _on_gpu(self) -> Iterator[tuple[str, Attention]]:
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            for grouped in (True, False):

                def attend(q, k, v, backend=backend, grouped=grouped):
                    k, v = (k, v) if grouped else repeated(q, k, v)
                    with sdpa_kernel(backend):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

                yield name if grouped else f"{name}, key heads repeated", attend

    def close(self) -> None:
        """Give torch's attention back."""
        self.stack.close()


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """A key and a value head for each query head, `[1, n, s, d]`."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)]


class RingOnCpu(torch.autograd.Function):
    """torch's ring with its CPU kernel, which its patched attention does not know."""

    @staticmethod
    def forward(ctx, q, k, v, group) -> torch.Tensor:
        from torch.distributed.tensor.experimental._attention import _templated_ring_attention

        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = _templated_ring_attention(group, 2, kernel, query=q, key=k, value=v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        q, k, v, out, lse = ctx.saved_tensors
        known = dict(query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=True, dropout_p=0.0)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = _attention._templated_ring_attention_backward(ctx.group, 2, kernel, grad, "grad_out", **known)
        return *found[:3], None
