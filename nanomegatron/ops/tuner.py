"""Choose cuBLASLt's algorithm for each matmul by its time under load on this GPU (`--gemm-autotune`).

The library's heuristic sorts algorithms by an estimate. A GPU at its power limit lowers its clock, so that
the algorithm that takes the least energy is the fastest, which single calls on a cool GPU do not show:

    first call of a problem   [candidate 0 for 0.3 s][0 settles][0 timed][1 settles][1 timed] ...  [result]
    further rounds            [0 settles][0 timed] and those that are nearly as fast as the best
    later calls               [result]

A run takes 20 ms, so that clock and power are those of the candidate; operands rotate, over more than the L2
holds. Times are kept in a JSON file, by GPU, version of the library and problem. Algorithms differ in the
order of their sums, so results differ in their last bits from one choice to another.
"""

import copy
import itertools
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.config.user_files import read_json
from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops.fp8_cast import FORMATS
from nanomegatron.ops.kernels import kernels_unavailable, usable
from nanomegatron.ops.matmul import A_TRANSPOSED, ADD, B_TRANSPOSED, Problem, candidates, matmul, missing

HALVES = torch.bfloat16, torch.float16
RUN, WARM_UP, ROUNDS = 20.0, 300.0, 3  # ms, ms
CLOSE = 1.1  # times the best: slower candidates are timed in one round only
GAIN = 0.01  # a candidate must be faster than the first by this share to be chosen
ADDRESS_BYTES, SCALE_BYTES = 256, 16  # what addresses are divisible by
ROTATED, MOST_SETS = 128 << 20, 16  # bytes of operands that are used in rotation, and the most copies of them


@dataclass
class Tuned:
    """A problem's algorithm: its place in the library's list; milliseconds of the first one, and its own."""

    choice: int
    candidates: int
    first: float
    time: float


class Tuner:
    """The chosen algorithms of one GPU. Every rank has its own, and reads the same file.

    owner: names the GPU and the library. writes: whether this rank keeps its times in the file. time: what
    measures candidates, as `time_under_load`.
    """

    def __init__(
        self, path: Path, owner: str, writes: bool, time: Callable[..., list[float]] | None = None
    ) -> None:
        self.path, self.owner, self.writes = path, owner, writes
        self.time, self.tunes = time or time_under_load, True
        entries, self.damage = read_times(path)
        self.saved = entries.get(owner, {})
        self.problems: dict[Problem, Tuned] = {}
        self.calls: dict[Problem, int] = {}
        self.fresh = self.unsaid = False  # since the last step; since the last table
        self.known = copy.copy(self)  # for evaluation, generation and what is recomputed: it times nothing
        self.known.tunes, self.known.calls = False, {}

    @classmethod
    def build(cls, parallel: ParallelConfig, device: torch.device, writes: bool) -> "Tuner | None":
        """Return the tuner of a rank, or None if it is not asked for, or there can be none here."""
        if not parallel.gemm_autotune or tuner_unavailable(device):
            return None
        owner = f"{torch.cuda.get_device_name(device)}, cuBLASLt {ops_kernels._kernels.matmul_version()}"
        path = parallel.gemm_autotune_file or Path.home() / ".cache/nanomegatron/gemm.json"
        return cls(Path(path), owner, writes)

    def describe(self) -> str:
        """For the banner: the file, and what was in it."""
        known = self.damage or f"{len(self.saved)} known"
        return f"matmuls' algorithms by time: {known}, in {self.path}"

    def when(self, training: bool) -> "Tuner":
        """Return this tuner for a forward with gradients; for others one that uses only what is known."""
        return self if training else self.known

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a b. a `[..., k]`, b `[k, n]` -> `[..., n]`; by torch what it has no algorithm for"""
        flags = 0 if b.is_contiguous() else B_TRANSPOSED
        in_order = a.is_contiguous() and (b.t() if flags else b).is_contiguous()
        if in_order and a.dtype == b.dtype and a.dtype in HALVES and a.numel():
            k, n = b.shape
            out = a.new_empty(*a.shape[:-1], n)
            if self.run(Problem(a.numel() // k, n, k, a.dtype, b.dtype, a.dtype, flags), out, a, b):
                return out
        return a @ b

    def add_product(
        self, target: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, overwrite: bool = False
    ) -> bool:
        """`param.add_product`, or False. target `[o, i]`, fp32 or as x, grad `[t, o]`, x `[t, i]`"""
        types = grad.dtype == x.dtype in HALVES and target.dtype in (torch.float32, x.dtype)
        if not types or not all(matrix.is_contiguous() for matrix in (target, grad, x)):
            return False
        kinds = grad.dtype, x.dtype, target.dtype
        problem = Problem(*target.shape, len(x), *kinds, A_TRANSPOSED | (0 if overwrite else ADD))
        return self.run(problem, target, grad, x)

    def run(self, problem: Problem, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *inverses) -> bool:
        """Launch `matmul` with the chosen algorithm; False, and nothing, if there is none.

        out `[m, n]`, a `[m, k]` or `[k, m]`, b `[k, n]` or `[n, k]`
        """
        tensors = out, a, b, *inverses
        if (out.data_ptr() | a.data_ptr() | b.data_ptr()) % ADDRESS_BYTES or not a.numel() or not b.numel():
            return False
        if any(x.data_ptr() % SCALE_BYTES for x in inverses) or not usable(a, "matmul", (*HALVES, *FORMATS)):
            return False
        tuned = self.problems.get(problem)
        if tuned is None:
            if not self.tunes or torch.cuda.is_current_stream_capturing():
                return False
            tuned = self.problems[problem] = self._tune(problem, tensors)
            self.fresh = True
        self.calls[problem] = self.calls.get(problem, 0) + 1
        matmul(problem, tuned.choice, *tensors)
        return True

    def _tune(self, problem: Problem, tensors: tuple[torch.Tensor, ...]) -> Tuned:
        """Choose by the file, else by time. Waits for the GPU."""
        count, known = candidates(problem, *tensors), self.saved.get(str(problem))
        if known is not None and known.candidates == count:
            return known
        try:
            times = self.time(self._rotating(problem, *tensors), count)
        except torch.OutOfMemoryError:
            warnings.warn(f"no memory to time {problem}: the library's first algorithm is used", stacklevel=2)
            return Tuned(0, count, 0.0, 0.0)
        best = min(range(count), key=times.__getitem__)
        best = best if times[best] < (1 - GAIN) * times[0] else 0
        found = Tuned(best, count, times[0], times[best])
        if self.writes:
            self._write(problem, found)
        return found

    def _rotating(self, problem: Problem, out, a, b, *inverses) -> Callable[[int], None]:
        """A function that calls a candidate with the next operands; what it adds to is not `out`."""
        size = sum(x.nbytes for x in (out, a, b))
        copies = min(MOST_SETS, math.ceil(ROTATED / size)) - 1
        results = [torch.zeros_like(out) if problem.flags & ADD else out]
        results += [torch.zeros_like(out) for _ in range(copies)]
        operands = [(a, b), *((a.clone(), b.clone()) for _ in range(copies))]
        turns = itertools.cycle(zip(results, operands))

        def call(choice: int) -> None:
            result, pair = next(turns)
            matmul(problem, choice, result, *pair, *inverses)

        return call

    def _write(self, problem: Problem, found: Tuned) -> None:
        """Add to the file. If two processes write at once, times may be lost: they are measured again."""
        entries, _ = read_times(self.path)
        entries.setdefault(self.owner, {})[str(problem)] = found
        text = {owner: {key: asdict(one) for key, one in own.items()} for owner, own in entries.items()}
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(text, indent=1))
            temporary.replace(self.path)
        except OSError as error:
            self.writes = False
            warnings.warn(f"{self.path}: times of matmuls are not kept: {error}", stacklevel=2)

    def table(self, step: float) -> list[str]:
        """Return lines for the log after the first step without new problems, else none.

        step: milliseconds of a whole step. Call it once after the launch of each.
        """
        calls, self.calls = self.calls, {}
        fresh, self.fresh = self.fresh, False
        if fresh or not self.unsaid:
            self.unsaid |= fresh
            return []
        self.unsaid, lines = False, []
        before = after = 0.0
        for problem, tuned in self.problems.items():
            n = calls.get(problem, 0)
            before, after = before + n * tuned.first, after + n * tuned.time
            times = f"{tuned.first:.4f} -> {tuned.time:.4f} ms" if tuned.time else "not timed"
            lines.append(f"{problem}: {times}, algorithm {tuned.choice + 1} of {tuned.candidates}, {n} calls")
        gain = f"{100 * (before - after) / step:.2f} % of {step:.1f} ms"
        return [*lines, f"all: {before:.2f} -> {after:.2f} ms a step, a gain of {gain}"]


def tuner_unavailable(device: torch.device) -> str:
    """The reason why there can be no tuner on a device; "" if there can."""
    return kernels_unavailable(device) or missing()


def time_under_load(run: Callable[[int], None], count: int) -> list[float]:
    """Milliseconds of a call `run(candidate)`, for each of `count` candidates, each at its own clock."""

    def timed(choice: int, calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run(choice)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    timed(0, 2)
    calls = math.ceil(RUN / timed(0, 4))
    for _ in range(math.ceil(WARM_UP / RUN)):
        timed(0, calls)
    times: list[list[float]] = [[] for _ in range(count)]
    left = list(range(count))
    for _ in range(ROUNDS):
        for choice in left:
            timed(choice, calls)  # until the clock has settled
            times[choice].append(timed(choice, calls))
        medians = [statistics.median(each) for each in times]
        best = min(medians[choice] for choice in left)
        left = [choice for choice in left if choice == 0 or medians[choice] < CLOSE * best]
    return medians


def read_times(path: Path) -> tuple[dict[str, dict[str, Tuned]], str]:
    """Return what a file holds, by owner and problem, and "", or nothing and what is wrong with the file."""
    try:
        entries = {
            str(owner): {str(problem): _checked(Tuned(**one)) for problem, one in own.items()}
            for owner, own in read_json(path).items()
        }
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return {}, f"the file is damaged and ignored: {error}"
    return entries, ""


def _checked(tuned: Tuned) -> Tuned:
    """Raises ValueError if it cannot be."""
    numbers = type(tuned.choice) is type(tuned.candidates) is int
    if not numbers or not 0 <= tuned.choice < tuned.candidates or not 0 < tuned.time <= tuned.first:
        raise ValueError(f"{tuned}")
    return tuned
