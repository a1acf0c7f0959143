"""The first tensor that differs between two runs, and where in it.

Runs are compared in the order in which a step computes: initial weights, batch, forward, backward, reduced
gradients, updated weights; then the next step. What is computed first and differs names the module:

    output of M           M: its inputs agree, and so do the modules inside it
    input of M            what M's parent does before M; between two layers, the pipeline: "decoder"
    input gradient of M   M's backward; output gradient: what its parent does after M
    weight gradient       the module that has the weight; if most differ "dp": the sum over replicas
    gradient norm         "optimizer"; an updated weight likewise: its gradient agrees

Each tensor has its own noise: the largest change of a row in runs of the reference whose weights were moved
by rounding. A row differs if it is further off than FACTOR times that.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from nanomegatron.debug.gather import Copy, Key, Order, Whole, Wholes

FACTOR = 20.0  # times the noise of a tensor
INITIAL, UPDATED = "initial weight", "updated weight"
UNREDUCED, REDUCED, NORM = "weight gradient", "reduced gradient", "gradient norm"
PHASES = {INITIAL: 0, UNREDUCED: 2, REDUCED: 3, NORM: 4, UPDATED: 5}  # 1: forward, 2: backward


class Difference(NamedTuple):
    """A tensor that differs. rows: bool `[rows]`, or `[samples, tokens]` of activations."""

    key: Key
    module: str
    rows: torch.Tensor
    ranks: list[int]
    error: float  # largest of a row, relative to the largest norm of a row
    noise: float  # of the same kind
    note: str = ""  # sizes that differ, or how the run ended

    def facts(self) -> dict[str, Any]:
        """What --json writes."""
        step, kind, name = self.key
        return {
            "module": self.module,
            "step": step + 1,
            "kind": kind,
            "tensor": name,
            "ranks": self.ranks,
            "error": self.error,
            "noise": self.noise,
            "note": self.note,
        }

    def describe(self) -> list[str]:
        """Lines for the reader: what differs first, where, by how much."""
        step, kind, name = self.key
        where = f"ranks {spans(self.ranks)}"
        if self.rows.dim() == 2:
            samples, tokens = (spans(nonzero(self.rows.any(dim))) for dim in (1, 0))
            where += f"; samples {samples}; tokens {tokens}"
        elif len(self.rows) > 1:
            where += f"; rows {spans(nonzero(self.rows))}"
        return [
            f"first difference: {self.module}",
            f"  what     step {step + 1}, {kind} of {name}",
            f"  where    {where}",
            f"  size     {self.error:.1e} of the largest row; rounding explains {self.noise:.1e}",
            *(f"  note     {line}" for line in self.note.splitlines()),
        ]


def nonzero(x: torch.Tensor) -> list[int]:
    """The indices at which x `[n]` is true."""
    return x.nonzero()[:, 0].tolist()


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers as text, `0-3 8`."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return " ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in found)


def first_copy(copies: dict[Copy, Whole]) -> torch.Tensor:
    """The copy that others are compared with: that of the first ranks -> `[..., f]` in rows"""
    return copies[min(copies)].data


def noise_levels(reference: Wholes, perturbed: Iterable[Wholes]) -> dict[Key, float]:
    """The largest norm of a row's change in the perturbed runs, of each tensor."""
    levels = dict.fromkeys(reference, 0.0)
    for run in perturbed:
        for key in reference.keys() & run.keys():
            change = first_copy(run[key]) - first_copy(reference[key])
            levels[key] = max(levels[key], float(change.norm(dim=-1).max()))
    return levels


class Comparison:
    """Compares a run with a reference.

    order: of the forward; eps: of the run's dtype; ended_early: it has failed, and rows may be missing.
    """

    def __init__(
        self,
        reference: Wholes,
        found: Wholes,
        levels: dict[Key, float],
        order: Order,
        eps: float,
        ended_early: bool = False,
    ) -> None:
        self.reference, self.found, self.levels = reference, found, levels
        self.eps, self.ended_early = eps, ended_early
        self.events = [key for key, _ in sorted(order.items(), key=lambda item: item[1])]  # (kind, name)
        self.at = {event: i for i, event in enumerate(self.events)}
        self.modules = {name for _, name in self.events}
        self.keys = sorted(reference.keys() & found.keys(), key=self._time)
        self.compared = {(step, kind, self.owner(name)) for step, kind, name in self.keys}

    def first(self) -> Difference | None:
        """The first difference in the order of computation; None: there is none."""
        for key in self.keys:
            copies = {copy: rows for copy in sorted(self.found[key]) if (rows := self._rows(key, copy)).any()}
            if copies:
                return self._difference(key, copies)
        return None

    def owner(self, name: str) -> str:
        """The module that has a parameter, or of whose tensor this is a part: the longest prefix recorded."""
        while name not in self.modules and "." in name:
            name = name.rpartition(".")[0]
        return name

    def _time(self, key: Key) -> tuple:
        """When a tensor is computed: step, phase, place in the forward or backward."""
        step, kind, name = key
        base = kind.removesuffix(" gradient")
        at = self.at.get((base, self.owner(name)), self.at.get(("input", self.owner(name)), 0))
        phase = PHASES.get(kind, 1 if base == kind else 2)
        return step, phase, -at if phase == 2 else at, kind == UNREDUCED, name

    def _pair(self, key: Key, copy: Copy) -> tuple[torch.Tensor, Whole]:
        """What the reference has, and what was found; of a run that ended early as far as it came."""
        want = first_copy(self.reference[key])
        got = self.found[key][copy]
        if self.ended_early:
            want = want[tuple(map(slice, got.data.shape))]
        return want, got

    def _rows(self, key: Key, copy: Copy) -> torch.Tensor:
        """The rows in which a copy differs -> bool `[samples, tokens]` or `[rows]`"""
        want, got = self._pair(key, copy)
        if want.shape != got.data.shape:
            return torch.ones(1, dtype=torch.bool)
        largest = float(first_copy(self.reference[key]).norm(dim=-1).max())
        limit = max(FACTOR * self.levels.get(key, 0.0), self.eps * largest)
        rows = ~((got.data - want).norm(dim=-1) <= limit)  # so that NaN differs
        return rows & (got.ranks >= 0).all(-1) if self.ended_early else rows

    def _difference(self, key: Key, copies: dict[Copy, torch.Tensor]) -> Difference:
        module = self._module(key)
        copy, rows = next(iter(copies.items()))
        want, (got, _) = self._pair(key, copy)
        if got.shape != want.shape:
            how = f"its size is {list(got.shape)}, that of the reference {list(want.shape)}"
            return Difference(key, module, rows, [], 1.0, 0.0, how)
        ranks = {r for c, bad in copies.items() for r in self.found[key][c].ranks[bad].flatten().tolist()}
        largest = float(want.norm(dim=-1).max()) or 1.0
        sizes = float((got - want).norm(dim=-1).max()) / largest, self.levels.get(key, 0.0) / largest
        return Difference(key, module, rows, sorted(ranks - {-1}), *sizes)

    def _module(self, key: Key) -> str:
        """The module to blame for the first difference: as the table above."""
        step, kind, name = key
        owner, base = self.owner(name), kind.removesuffix(" gradient")
        if kind == UPDATED and (step, REDUCED, name) in self.reference:  # not a router's bias
            return "optimizer"
        if kind in (UNREDUCED, REDUCED) and self._most_differ(step, kind):
            return "dp"
        forward = base == kind
        if kind in PHASES or owner == "batch" or base.startswith("output" if forward else "input"):
            return owner
        # It arrives from elsewhere: from a module that is not compared, or from the parent's own code.
        at = self.at.get((base, owner), 0)
        for end, other in self.events[:at][::-1] if forward else self.events[at + 1 :]:
            if (step, end if forward else f"{end} gradient", other) in self.compared:
                break
            if end.startswith("output" if forward else "input"):
                return other
        parent = owner.rpartition(".")[0].removesuffix(".layers")
        return parent or ("model" if forward else "loss")

    def _most_differ(self, step: int, kind: str) -> bool:
        """Whether most parameters differ in this way, though no gradient of an activation does."""

        def differ(kinds: tuple[str, ...]) -> list[bool]:
            keys = [key for key in self.keys if key[0] == step and key[1].endswith(kinds)]
            return [any(self._rows(key, copy).any() for copy in self.found[key]) for key in keys]

        here = differ((kind,))
        return 2 * sum(here) > len(here) and not any(differ(("input gradient", "output gradient")))
