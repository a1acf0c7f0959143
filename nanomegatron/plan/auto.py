"""The layout that --auto-layout chooses."""

from dataclasses import replace

from nanomegatron.config.cli import ConfigError, Parsed, build_config
from nanomegatron.config.rules import values_of
from nanomegatron.plan.cluster import Cluster, load_cluster
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.search import Search, disadvantage, usual_batch

CPU_ROWS = 4  # of a step for each rank without a GPU, where no batch is given


def with_best_layout(
    parsed: Parsed, vocab: int, world: int, gpu: str, machine: Machine, room: float
) -> Parsed:
    """Return the settings with the fastest layout that fits, and a note on it; flags that are given stay.

    gpu: the device's name, or "cpu". room: bytes of a rank. Raises ConfigError if none fits.
    """
    cluster = cluster_of(gpu)
    if not parsed.config.data.global_batch_size:
        rows = usual_batch(parsed, vocab, world) if machine.gpu else CPU_ROWS * world
        data = replace(parsed.config.data, global_batch_size=rows)
        parsed = replace(parsed, config=replace(parsed.config, data=data))
    search = Search(parsed, vocab, world, cluster, machine, room)
    fits, others = search.run()
    if not (best := search.valid(fits, 2)):
        least = f": {others[0].word} {disadvantage(others[0], others[0], room)}" if others else ""
        raise ConfigError([f"--auto-layout: no layout of {world} ranks fits{least}; start more of them"])
    chosen = best[0]
    config = build_config(values_of(parsed.config) | chosen.changes)
    flags = f"--global-batch-size {config.data.global_batch_size} {chosen.flags()}".strip()
    step = f"{chosen.step.total * 1e3:,.0f} ms a step and {chosen.need / 2**30:.1f} GiB are planned"
    second = f"; next {best[1].word}: {disadvantage(best[1], chosen, room)}" if len(best) > 1 else ""
    note = f"--auto-layout chose {chosen.word}: {flags} ({step} at the rates of {cluster.name}{second})"
    return replace(parsed, config=config, notes=[*parsed.notes, note])


def cluster_of(gpu: str) -> Cluster:
    """Return the cluster of a device's name; one whose rates are not known counts as an H100."""
    try:
        return load_cluster(gpu)
    except ValueError:
        return load_cluster("h100")
