"""Bad steps: non-finite numbers end a run before they reach a checkpoint, spikes are warned of or skipped.

    step                                   the device           the host, one step later
    loss, norm, states finite, no spike    updates              -
    not finite                             changes nothing      names tensor, rank, samples; nothing is saved
                                                                then; after --max-skipped-steps in a row,
                                                                restarts included: exit code 16
    weights or moments not finite          changes nothing      the same at once: no later step can be good
    spike, --on-spike warn                 updates              a warning
    spike, --on-spike skip                 changes nothing      a warning; its samples count as skipped
    spike, --on-spike rollback             changes nothing      returns to the last save (faults/recovery.py)

A spike is a loss or a gradient norm that exceeds the median of the last --spike-window steps by more than
--spike-deviations robust deviations: 1.4826 times the median distance from the median (for normal numbers the
standard deviation). It is also at least LEAST_SPIKE times the median: gradient norms are skewed, in a calm
run the largest of some hundred is two or three times it. Up to half of the window may be spikes: that does
not move a median far. The limits of a step follow from the steps up to LAG before it, whose numbers the host
has when it launches the step; so they do not depend on when the host waits, and a resumed run has the same.
"""

import math
import socket
import statistics
from collections.abc import Iterable, Iterator, Sequence

import torch

from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.optimizer_state import optimizer_states
from nanomegatron.comm import all_gather_text
from nanomegatron.faults.streak import Streak
from nanomegatron.optim import FLOAT_MAX, StepLimits
from nanomegatron.report.steps import StepNumbers, StepReport
from nanomegatron.report.writers import too_large
from nanomegatron.step import Observer, Training, due

LAG = 2
FEWEST = 32  # steps before which nothing is a spike
NOT_SAVED = "Neither it nor a step after it was saved"
FIX = "give a lower --lr, or --iterations-to-skip for bad samples"
AGAIN = "the same command resumes from the last save, or starts again"
LEAST_SPIKE = {"loss": 1.2, "gradient norm": 4.0}  # of the median; below that nothing is a spike


class BadSteps(Exception):
    """Raised on all ranks: the run cannot go on, or its state must not be saved."""


class MachineFault(Exception):
    """Raised on all ranks: a machine is faulty, not the program, the settings or the data. Nothing is saved.

    A rank has computed or holds other bits than it should.
    """


class Health(Observer):
    """Judges the numbers of each step on the host; makes the limits by which the device judges a step."""

    def __init__(self, run: Training, streak: Streak | None = None) -> None:
        """streak: the bad steps before this start of the run; None: none, and none are kept."""
        self.run = run
        self.config = run.config.faults
        self.streak = streak or Streak()
        self.window: list[tuple[int, float, float]] = []  # iteration, loss, gradient norm of finite steps
        self.spike: int | None = None  # the iteration of the last spike that is not dealt with

    def after_step(self, step: StepReport) -> None:
        self.judge(step.judged())
        if self.spike and self.config.on_spike == "skip":
            self.run.progress.skipped_samples += step.batch.size
            self.spike = None

    def step_limits(self, iteration: int) -> StepLimits:
        """Return what the device judges an iteration by that is launched next; the host does not wait."""
        limits = StepLimits(finite_states=due(self.config.check_states_interval, iteration))
        if self.config.on_spike == "warn" and self.config.rerun_mode == "disabled":
            return limits
        device = self.run.mesh.device
        host = torch.tensor(self.limits(iteration), dtype=torch.float64, pin_memory=device.type == "cuda")
        return limits._replace(loss_and_norm=host.to(device, non_blocking=True))

    def limits(self, iteration: int) -> tuple[float, float]:
        """The largest loss and gradient norm of an iteration that is no spike."""
        before = [values for i, *values in self.window if i <= iteration - LAG]
        if len(before) < min(FEWEST, self.config.spike_window):
            return FLOAT_MAX, FLOAT_MAX
        columns = zip(*before[-self.config.spike_window :], strict=True)
        return tuple(self._limit(x, least) for x, least in zip(columns, LEAST_SPIKE.values(), strict=True))

    def _limit(self, values: Sequence[float], multiple: float) -> float:
        middle = statistics.median(values)
        distance = statistics.median(abs(x - middle) for x in values)
        return max(middle + self.config.spike_deviations * 1.4826 * distance, multiple * middle)

    def suspicious(self, step: StepNumbers) -> bool:
        """Whether a step is not finite or a spike."""
        return not step.finite or bool(self._spike(step))

    def _spike(self, step: StepNumbers) -> str:
        pairs = zip(LEAST_SPIKE, (step.loss, step.grad_norm), self.limits(step.batch.iteration), strict=True)
        return " and ".join(f"{name} {x:.6g} is above {top:.6g}" for name, x, top in pairs if x > top)

    def judge(self, step: StepNumbers) -> None:
        """Record and log a step; sets `spike`. Raises BadSteps. Gathers texts over world after a bad step."""
        batch = step.batch
        which = f"step {batch.iteration} (samples {batch.first} to {batch.end - 1})"
        if not step.finite:
            self._not_finite(step, which)
            return
        self.streak.end(batch.iteration)
        spike = self._spike(step)
        if spike and self.run.mesh.rank == 0:
            done = "the update was done" if step.good else "the update was skipped"
            self.run.log.warn(
                f"{which}: a spike: {spike}, the limit after the last {self.config.spike_window} steps "
                f"(--spike-deviations); {done}"
            )
        if spike and not step.good:
            self.spike = batch.iteration
        self.window.append((batch.iteration, step.loss, step.grad_norm))
        del self.window[: -self.config.spike_window - LAG]

    def _not_finite(self, step: StepNumbers, which: str) -> None:
        # A dynamic loss scale is meant to overflow until it fits.
        scaler = self.run.optimizer.scaler
        searching = math.isfinite(step.loss) and scaler.dynamic and step.loss_scale > scaler.minimum
        culprit, in_states = self.first_not_finite(step)
        text = f"{which}: loss {step.loss}, gradient norm {step.grad_norm}; {culprit}"
        if self.run.mesh.rank == 0:
            said = f"{text}; its update was skipped"
            if searching and not in_states:
                said = f"{which}: {too_large(step.loss_scale)}"
            self.run.log.warn(said)
        if not searching or in_states:
            self.streak.add(step.batch.iteration, text)
        if in_states:
            raise BadSteps(
                "weights or Adam moments are not finite, so no later step can be good. The first was "
                f"{self.streak.text}. {NOT_SAVED}: {AGAIN}"
            )
        if self.streak.now and self.streak.count >= self.config.max_skipped_steps:
            raise BadSteps(f"{self.bad_steps()} (--max-skipped-steps). {self.advice()}")

    def bad_steps(self) -> str:
        """Say how many steps in a row were bad."""
        count, earlier = self.streak.count, self.streak.earlier
        before = f", {earlier} of them before this start of the run" * (earlier > 0)
        return f"{count} step{'s' * (count > 1)} in a row {'were' if count > 1 else 'was'} not finite{before}"

    def advice(self) -> str:
        """Say which bad step was the first, and what to do."""
        return f"The first was {self.streak.text}. {NOT_SAVED}: {FIX}"

    def first_not_finite(self, step: StepNumbers) -> tuple[str, bool]:
        """Name the first non-finite tensor of all ranks, and whether it is a weight or a moment.

        Weights and moments come before gradients, which follow from them. Gathers a text over world.
        """
        states = next(self._bad_states(), "")
        norms = zip(self.run.optimizer.part_names, step.part_norms.tolist(), strict=True)
        gradient = next((name for name, x in norms if not math.isfinite(x)), "")
        mine = f"1 {states}" if states else f"2 gradient of {gradient}" if gradient else ""
        here = f" on {self.run.mesh.label} ({socket.gethostname()})"
        texts = all_gather_text(mine and mine + here, self.run.mesh.world, self.run.mesh.device)
        found = sorted((text for text in texts if text), key=lambda text: text[0])
        if not found:
            return "no tensor is: only the loss", False
        more = f", and on {len(found) - 1} more" if len(found) > 1 else ""
        return f"not finite: {found[0][2:]}{more}", found[0][0] == "1"

    def _bad_states(self) -> Iterator[str]:
        """Yield the names of non-finite weights and moments of this rank. Waits for gathers."""
        self.run.optimizer.buckets.wait_params()
        for kind, slices in optimizer_states(self.run.optimizer).items():
            for piece, flat in slices:
                if not flat.isfinite().all():
                    yield f"{kind} of {piece.part.name}"
        for param in self.run.optimizer.params:
            if param.is_floating_point() and not param.detach().float().isfinite().all():
                yield f"weight {param.spec.name}"

    def finite(self, pieces: Iterable[Piece]) -> tuple[list[str], torch.Tensor]:
        """Look whether a checkpoint's pieces are finite; the host does not wait -> keys, bool `[keys]`"""
        float_types = (torch.float32, torch.bfloat16, torch.float16)
        own = [p for p in pieces if p.data.dtype in float_types and p.data.numel()]
        largest = torch._foreach_norm([p.data.detach() for p in own], math.inf)  # NaN if there is one
        return [p.key for p in own], torch.stack(
            [x.float().to(self.run.mesh.device) for x in largest]
        ).isfinite()

    def check_pieces(self, keys: list[str], finite: torch.Tensor, iteration: int) -> None:
        """Raise BadSteps, on all ranks, if a piece is not finite. Arguments: the result of `finite`.

        Gathers a text over world.
        """
        bad = next((key for key, fine in zip(keys, finite.tolist(), strict=True) if not fine), "")
        text = bad and f"{bad} on {self.run.mesh.label} ({socket.gethostname()})"
        if found := list(filter(None, all_gather_text(text, self.run.mesh.world, self.run.mesh.device))):
            raise BadSteps(f"step {iteration} was not saved: {found[0]} is not finite; {AGAIN}")

    @property
    def last_good(self) -> int:
        """The last iteration that was finite, of those that count for spikes; 0: none."""
        return self.window[-1][0] if self.window else 0

    def state(self) -> list:
        """What a checkpoint keeps."""
        return [list(values) for values in self.window]

    def load(self, saved: list) -> None:
        """Restore `state()`."""
        self.window = [(int(i), float(loss), float(norm)) for i, loss, norm in saved]
        self.spike = None
