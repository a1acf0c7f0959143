"""Settings of what a run does about bad steps: non-finite numbers, spikes, faults of a machine."""

import functools
from dataclasses import dataclass

from nanomegatron.config.rules import setting

fault = functools.partial(setting, names_run=False)


@dataclass(frozen=True)
class FaultConfig:
    """Bad steps: how they are recognized, and what follows."""

    max_skipped_steps: int = fault(10, "exit code 16 after N non-finite steps in a row, restarts included")
    check_states_interval: int = fault(
        10, "check weights and Adam moments every N steps; 0: only before a save", at_least=0
    )
    on_spike: str = setting(
        "warn",
        "loss or gradient norm far above the last ones: warn, skip the update, or return to the last save",
        choices="warn skip rollback",
        needs={
            "rollback": "--save-interval or --non-persistent-save-interval, for a checkpoint to return to"
        },
    )
    spike_deviations: float = fault(
        10.0,
        "robust standard deviations above the median that make a spike, if a loss is also a fifth above the "
        "median and a gradient norm four times as large",
    )
    spike_window: int = fault(128, "steps before a step that it is compared with", at_least=16, at_most=10000)
    rerun_mode: str = fault(
        "disabled",
        "repeat a non-finite step or a spike: another result is a fault of the machine (exit code 17)",
        choices="disabled validate_results",
        refused={"report_stats": "statistics of repeated steps are not kept; use validate_results"},
    )
