"""What looks on at a training of train.py: the observers of `step.Training`, in their order."""

from collections.abc import Iterable

from nanomegatron.checkpoint.resume import Checkpoints
from nanomegatron.faults.garbage import EmptyCache
from nanomegatron.faults.health import Health
from nanomegatron.faults.signals import Signals, Stops
from nanomegatron.faults.stragglers import Stragglers
from nanomegatron.faults.streak import Streak
from nanomegatron.report.counters import ExpertLoad, Fp8Stats
from nanomegatron.report.profiler import Profile
from nanomegatron.report.steps import Reporter
from nanomegatron.step import Observer, Training


def add_observers(
    run: Training, profile: Profile, signals: Signals, further: Iterable[type[Observer]] = ()
) -> None:
    """Add all observers to a training with an optimizer; further: classes of others, made of the training.

    Those that add numbers to the log come before the `Reporter`, which logs them, those that judge a step or
    end the run behind it: its line is written first.
    """
    config = run.config.run
    reporter = Reporter(run)
    health = Health(run, Streak(run.config, run.mesh, run.log))
    run.observers += [observer(run) for observer in further]
    if config.log_fp8_stats:
        run.observers.append(Fp8Stats(run))
    if run.config.model.num_experts:
        run.observers.append(ExpertLoad(run))
    run.observers += [profile, EmptyCache(config.empty_unused_memory_level), reporter]
    if config.log_straggler:
        run.observers.append(Stragglers(run.mesh, run.log, config.log_interval))
    run.observers += [Stops(run, signals), Checkpoints(run, reporter, health, signals), health]
