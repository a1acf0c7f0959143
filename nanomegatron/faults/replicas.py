"""Compares what several ranks must hold with the same bits: the parameters, every --check-replicas steps.

    replicas of a part      dense: dp x cp      experts: edp
                            norms, biases, routers, shared heads: also tp
                            a tied embedding: also the first and the last stage

A part of a parameter is hashed on its device to two integers, and the ranks of each axis gather theirs. In a
group with a majority the other ranks are wrong, else all of it are suspected. A norm is in groups over tp and
over dp; the rank that is suspected in most groups is named, so that one of 2 x 2 is found.

Sums of gradients have the same bits on all ranks, hence so have parameters after each update. With sharded
optimizer states a rank's copy is gathered again in every step: a flipped bit is found only in the step in
which it flips, and one in main weights or moments spreads to all ranks and is not found.
"""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nanomegatron.comm import all_gather, all_gather_text, read
from nanomegatron.dp import reduction_axis
from nanomegatron.faults.health import MachineFault
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.param import Part

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDTH = 4096
SHOWN = 3  # names in a message


def check_replicas(params: Iterable[nn.Parameter], mesh: Mesh, iteration: int) -> None:
    """Compare all replicas. Raises MachineFault on every rank, which names the ranks that differ.

    Gathers two integers for each part over each of its axes, and a text over world; the host waits.
    """
    by_axis: dict[Axis, list[tuple[Part, torch.Tensor]]] = {}
    for param in params:
        for part in param.spec.parts:
            found = fingerprint(part.local_view(param.detach()))
            for axis in axes_of_replicas(part, reduction_axis(param, mesh)):
                by_axis.setdefault(axis, []).append((part, found))
    votes: Counter[str] = Counter()  # by name, groups in which this rank is suspected
    others: set[int] = set()
    for axis, rows in sorted(by_axis.items(), key=lambda item: item[0].name):
        mine = torch.stack([found for _, found in rows])
        table = read(all_gather(mine[None], axis).transpose(0, 1), axis)
        for (part, _), column in zip(rows, table, strict=True):
            if axis.rank in differing([*map(tuple, column)]):
                votes[part.name] += 1
                others |= {r for r, value in zip(axis.ranks, column) if value != column[axis.rank]}
    text = suspicion(votes, others, mesh) if votes else ""
    said = [text.split(" ", 1) for text in all_gather_text(text, mesh.world, mesh.device) if text]
    if said:
        most = max(int(n) for n, _ in said)
        texts = "; ".join(text for n, text in said if int(n) == most)
        raise MachineFault(
            f"replicas differ after step {iteration}: {texts}; nothing was saved: look at that machine, then "
            "the same command resumes from the last checkpoint"
        )


def suspicion(votes: Counter[str], others: set[int], mesh: Mesh) -> str:
    """Return 'GROUPS rank 3 ... on HOST holds other bits than ranks 1 5 in NAME, NAME and 4 more'."""
    most = max(votes.values())
    names = list(votes)
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    ranks = " ".join(map(str, sorted(others)))
    what = f"holds other bits than rank{'s' * (len(others) > 1)} {ranks} in {', '.join(names[:SHOWN])}{more}"
    return f"{most} {mesh.label} on {socket.gethostname()} {what}"


def axes_of_replicas(part: Part, replicas: Axis) -> Iterator[Axis]:
    """Yield the axes whose ranks all hold this part; replicas: those that sum its gradient."""
    whole = part.axis if part.replicas == part.axis.size else None
    yield from dict.fromkeys(a for a in (replicas, part.partial or whole) if a is not None and a.size > 1)


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bit patterns of x `[...]`, and one weighted by row and column -> int64 `[2]`"""
    bits = x.contiguous().flatten().view(INTEGERS[x.element_size()])
    end = len(bits) // WIDTH * WIDTH
    table, rest = bits[:end].view(-1, WIDTH), bits[end:].long()
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    weighted = [sums * torch.arange(1, len(sums) + 1, device=x.device) for sums in (rows, columns, rest)]
    return torch.stack((rows.sum() + rest.sum(), sum(w.sum() * (2 * i + 1) for i, w in enumerate(weighted))))


def differing(values: list[tuple[int, ...]]) -> list[int]:
    """Return the indices that are not in the majority; all of them if there is none."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count > len(values):
        return [i for i, other in enumerate(values) if other != value]
    return list(range(len(values)))
