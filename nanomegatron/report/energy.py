"""The energy that a run's GPUs take, from the counters in the GPUs themselves.

    step         1    2    3 ... 10 | 11 ... 20 | evaluation | 21   22 ... 30
    read              ^          ^         ^    ^                   ^       ^
    counted           [ 2 to 10  ] [ 11 to 20 ]                     [ 22 to 30 ]

NVML, a part of the driver, counts a GPU's millijoules since the driver was loaded, of the whole board, with a
new value about every 100 ms; the package nvidia-ml-py reads it. Rank 0 reads them when it logs, without a
wait of the GPU or of a rank, from the end of one step to that of another: evaluations and saves are left out,
with the step after each. It reads the GPUs of all ranks of its machine, and takes those of other machines to
be alike.
"""

import importlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

LEAST = 2.0  # seconds of a figure: both its ends may be 0.1 s late
ENERGY_KEYS = ("energy_j_per_token", "power_w_per_gpu")  # in metrics.jsonl
ENERGY_TAGS = ("iter-energy/gpu", "power/gpu", "energy/token")  # Megatron-LM's, and ours


class Meter:
    """The energy counters of some GPUs."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """uuids: as torch gives them, without GPU- before them.

        Raises ImportError without nvidia-ml-py, NVMLError if there are no counters.
        """
        self.nvml = importlib.import_module("pynvml")
        self.nvml.nvmlInit()
        self.gpus = [self.nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        self.millijoules()

    def millijoules(self) -> list[int]:
        """Read the counter of each GPU. Raises NVMLError if one cannot be read."""
        return [self.nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self.gpus]


def open_meter(uuids: Sequence[str]) -> Meter | None:
    """Return the counters of these GPUs; None without GPUs or NVML, and if one of them has no counter."""
    try:
        return Meter(uuids) if uuids else None
    except Exception:  # of nvidia-ml-py, or of a driver older than the counters
        return None


class Energy:
    """Counts the energy of a run's steps; does nothing without a meter, as on all ranks but the first."""

    def __init__(self, meter: Meter | None, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """ranks: of the run, one a GPU; clock: seconds."""
        self.meter, self.ranks, self.clock = meter, ranks, clock
        self.begun: tuple[list[int], float] | None = None  # counters and time at the end of a step
        # Joules of the GPUs that are read, seconds, tokens of the run, steps: since `begun`, since the last
        # figure, and of the run in this process.
        self.since, self.unsaid, self.total = Counter(), Counter(), Counter()

    def step(self, tokens: int, log: bool) -> dict[str, float]:
        """Count a step that has just ended; if `log`, return the figures of ENERGY_KEYS since the last ones.

        Those of less than LEAST seconds stay for the next; {} without any.
        """
        if self.meter is None:
            return {}
        if self.begun is None:
            self.begun = self._read()
            return {}
        self.since.update(steps=1, tokens=tokens)
        if log:
            self._close()
        if not log or self.unsaid["seconds"] < LEAST:
            return {}
        said, self.unsaid = self.unsaid, Counter()
        return dict(zip(ENERGY_KEYS, self._figures(said), strict=True))

    def pause(self) -> None:
        """Leave out what follows, up to the end of the next step."""
        if self.since:
            self._close()
        self.begun = None

    def summary(self) -> str:
        """The figures of all steps so far, in words; "" if they are of less than LEAST seconds."""
        if self.total["seconds"] < LEAST:
            return ""
        per_token, power = self._figures(self.total)
        amount = f"{per_token:.3g} J" if per_token >= 1 else f"{1e3 * per_token:.3g} mJ"
        gpus = len(self.meter.gpus)
        share = f", measured on {gpus} of {self.ranks} GPUs" if gpus < self.ranks else ""
        return f"{amount}/token, {power:.0f} W a GPU over {self.total['steps']} steps{share}"

    def _read(self) -> tuple[list[int], float] | None:
        try:
            return self.meter.millijoules(), self.clock()
        except self.meter.nvml.NVMLError:
            return None

    def _close(self) -> None:
        """Count the steps since `begun`, and begin again; a counter that fails or is set back drops them."""
        (before, start), now = self.begun, self._read()
        if now is not None:
            spent = [new - old for new, old in zip(now[0], before, strict=True)]
            if min(spent) >= 0:
                self.since.update(joules=sum(spent) / 1e3, seconds=now[1] - start)
                self.unsaid.update(self.since)
                self.total.update(self.since)
        self.begun = now
        self.since = Counter()

    def _figures(self, spent: Counter) -> tuple[float, float]:
        """Joules per token over all GPUs of the run, and watts per GPU."""
        per_gpu = spent["joules"] / len(self.meter.gpus)
        return per_gpu * self.ranks / spent["tokens"], per_gpu / spent["seconds"]


def energy_scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return joules of a GPU and iteration, its watts, and joules per token, by ENERGY_TAGS; {} without."""
    if ENERGY_KEYS[0] not in record:
        return {}
    per_token, power = (record[key] for key in ENERGY_KEYS)
    return dict(zip(ENERGY_TAGS, (power * record["step_time_ms"] / 1e3, power, per_token), strict=True))


def megatron_parts(mean: dict[str, Any]) -> list[str]:
    """The parts of Megatron-LM's log line with --log-energy; [] where the interval has no figures."""
    names = "energy per GPU (J/iter/GPU)", "power per GPU (W/GPU)"
    return [f"{name}: {value:.1f}" for name, value in zip(names, energy_scalars(mean).values(), strict=False)]
