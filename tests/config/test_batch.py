"""Batch sizes along a run: the ramp against megatron-core's calculator, the steps against its numbers."""

import itertools
from dataclasses import replace

import pytest

from nanomegatron.config.batch import samples_before, stages
from nanomegatron.config.settings import Config, DataConfig, RunConfig


def config(batch=None, ramp=(), schedule=None, iters=None, samples=None, seq_length=32) -> Config:
    data = DataConfig(
        global_batch_size=batch,
        rampup_batch_size=ramp,
        step_batch_size_schedule=schedule,
        seq_length=seq_length,
        micro_batch_size=2,
    )
    return Config(data=data, run=RunConfig(train_iters=iters, train_samples=samples))


def sizes(*args, dp: int = 1, **settings) -> list[int]:
    """Batch size of each iteration."""
    table = samples_before(config(*args, **settings), dp)
    assert table[0] == 0
    return [after - before for before, after in itertools.pairwise(table)]


def test_constant():
    assert sizes(8, iters=3) == [8, 8, 8]
    assert sizes(8, samples=31) == [8, 8, 8]  # the part of a batch at the end is left out
    assert sizes(iters=2, dp=4) == [8, 8] and len(sizes(8)) == 1000


RAMPS = [
    (16, 4, 4, 48),
    (16, 4, 4, 50),
    (100, 1, 9, 1000),
    (12, 4, 8, 1),
    (1024, 16, 8, 30000),
    (7, 1, 1, 97),
]


@pytest.mark.parametrize("last, start, increment, samples", RAMPS)
def test_ramp_is_megatrons(last, start, increment, samples):
    """Batch by batch over the consumed samples, until some way behind the ramp."""
    module = pytest.importorskip("megatron.core.num_microbatches_calculator")
    theirs = module.RampupBatchsizeNumMicroBatchesCalculator(last, 1, 1, False, 1, start, increment, samples)
    ours = sizes(last, (start, increment, samples), iters=2 * samples // start // 3 + 10)
    consumed = 0
    for size in ours:
        theirs.update(consumed, False)
        assert theirs.get_current_global_batch_size() == size
        consumed += size
    assert ours[-1] == last and len(set(ours)) >= 2
    assert set(ours) <= {size for _, size in stages(config(last, (start, increment, samples)).data, 1)}


@pytest.mark.parametrize(
    "schedule, seq_length, expected",
    [
        ("0:4 1K:8 2.5k:16", 32, [4] * 8 + [8] * 6 + [16]),
        ("0:2,320:6", 32, [2] * 5 + [6] * 7),
        ("96:3 0:1 200:7", 10, [1] * 9 + [3] * 4 + [7] * 3),
        ("0:0.5K 1M:1K", 1000, [500, 500, 1000, 1000]),
        ("0.001M:8 0:4", 100, [4, 4, 4, 8, 8, 8]),
        ("5:4", 32, [4, 4]),
    ],
)
def test_steps_are_megatrons(schedule, seq_length, expected):
    """Printed by StepBatchsizeNumMicroBatchesCalculator of megatron-core 0.19.2."""
    assert sizes(schedule=schedule, seq_length=seq_length, iters=len(expected)) == expected


def test_step_thresholds_are_megatrons():
    schedule = "0:768 250B:1536 500B:3072 750B:6144"
    assert stages(config(schedule=schedule, seq_length=8192).data, 1) == [
        (0, 768),
        (30517578, 1536),
        (61035156, 3072),
        (91552734, 6144),
    ]


def test_sample_counts_end_where_megatrons_do():
    """Its loop in update_train_iters: growing batches go beyond the samples, full ones stay below."""
    ramp = dict(batch=16, ramp=(4, 4, 48))
    assert sizes(**ramp, samples=97) == [4] * 4 + [8] * 2 + [12] * 2 + [16] * 2  # 88: another 16 would be 104
    assert sizes(**ramp, samples=104) == [4] * 4 + [8] * 2 + [12] * 2 + [16] * 3
    assert sizes(**ramp, samples=17) == [4] * 4 + [8]  # 24
    assert sizes(schedule="0:4 320:8", samples=25) == [4, 4, 4, 8, 8]  # 28
    assert sizes(schedule="0:4 320:8", samples=28) == [4, 4, 4, 8, 8]


def test_a_longer_run_begins_like_a_shorter_one():
    """What a resumed run rests on: the table depends on the samples, not on the length or the replicas."""
    for settings in (dict(batch=16, ramp=(4, 4, 48)), dict(schedule="0:4 320:8")):
        short = samples_before(config(**settings, iters=8), 1)
        assert samples_before(config(**settings, iters=20), 4)[:9] == short
        resolved = config(**settings, samples=100)
        table = samples_before(resolved, 1)
        both = replace(resolved, run=replace(resolved.run, train_iters=len(table) - 1))
        assert samples_before(both, 1) == table


@pytest.mark.parametrize(
    "schedule, rule",
    [
        ("", "must begin at 0"),
        ("500B:8", "must begin at 0"),
        ("0:4 8", '"8" must be TOKENS:BATCH'),
        ("0:4 8:x", '"8:x" must be TOKENS:BATCH'),
        ("0:4 inf:8", '"inf:8" must be TOKENS:BATCH'),
        ("0:0", "at least 1 sequence"),
        ("0:4 31:8", "two entries begin at the same sample"),
        ("0:4 0:8", "two entries begin"),
    ],
)
def test_wrong_steps(schedule, rule):
    with pytest.raises(ValueError, match=rule):
        stages(config(schedule=schedule).data, 1)
