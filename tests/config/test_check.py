"""Settings that cannot be are named with their value and a way out; what is right is let through."""

import dataclasses

import pytest

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import from_toml, parse, to_toml
from nanomegatron.config.run_folder import default_run_name, resume_conflicts

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
GOOD = f"{SHAPE} --mock-data --vocab-size 100 --train-iters 10"


def errors_of(flags: str, world: int = 1) -> list[str]:
    parsed = parse(flags.split())
    return [*parsed.errors, *validate(parsed.config, world)]


# flags behind GOOD | processes | what the message must hold: the flag, the value, the way out
WRONG = """
--position-embedding-type rope --rotary-percent 1.5 | 1 | 1.5: must be greater than 0 and at most 1
--position-embedding-type rope --rotary-percent 0.2 | 1 | head size 16 x --rotary-percent 0.2 = 3: must
--position-embedding-type rope --rotary-percent 0.01 | 1 | --rotary-percent 0.01 = 0: must be even
--use-rope-scaling | 1 | --use-rope-scaling: needs --position-embedding-type rope
--rotary-seq-len-interpolation-factor 4 | 1 | -factor 4.0: needs --position-embedding-type rope
--position-embedding-type yarn --rotary-seq-len-interpolation-factor 2 | 1 | 2.0: needs --position-em | rope
--rotary-seq-len-interpolation-factor 0 --use-rotary-position-embeddings | 1 | 0.0: must be greater than 0
--rotary-scaling-factor -1 | 1 | --rotary-scaling-factor -1.0: must be greater than 0
--rope-scaling-factor 0 | 1 | --rope-scaling-factor 0.0: must be greater than 0
--yarn-beta-slow 64 | 1 | --yarn-beta-fast 32.0: must be greater than --yarn-beta-slow 64.0
--swiglu --squared-relu | 1 | --swiglu: not with --squared-relu; leave one out
--window-size 7 | 1 | --window-size 7: takes 2 values
--window-size 7 7 | 1 | --window-size 7 7: must end in 0 | 4095 0
--window-size -2 0 | 1 | --window-size -2 0: each must be at least -1
--window-attn-skip-freq 2 | 1 | --window-attn-skip-freq 2: needs --window-size
--window-size 7 0 --window-attn-skip-freq [1,0] | 1 | --window-attn-skip-freq [1,0]: must be | list of 4
--decoupled-lr 0 | 1 | --decoupled-lr 0.0: must be greater than 0
--decoupled-min-lr 1e-5 | 1 | --decoupled-min-lr 1e-05: needs --decoupled-lr
--decoupled-lr 1e-3 --decoupled-min-lr 0.1 | 1 | 0.1: must be at least 0 and at most --decoupled-lr 0.001
--decoupled-lr 1e-5 --min-lr 1e-4 | 1 | --decoupled-lr 1e-05: must be at least --min-lr 0.0001
--start-weight-decay 0.1 | 1 | --start-weight-decay 0.1: needs --weight-decay-incr-style linear or cosine
--weight-decay-incr-style linear | 1 | linear: needs --start-weight-decay and --end-weight-decay
--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0 | 1 | 0.0: must be at least
--num-workers -1 | 1 | --num-workers -1: must be at least 0
--timing-log-level 3 | 1 | --timing-log-level 3: must be one of 0, 1, 2
--iterations-to-skip 3 0 | 1 | --iterations-to-skip 3 0: each must be greater than 0
--eval-only --eval-iters 0 | 1 | --eval-only: needs --eval-iters
--rampup-batch-size 1 2 | 1 | --rampup-batch-size | takes 3 values
--rampup-batch-size 1 2 3 | 1 | --rampup-batch-size 1 2 3: must reach --global-batch-size 1 from 1
--global-batch-size 8 --rampup-batch-size 2 4 9 | 1 | --rampup-batch-size 2 4 9: must reach --global
--global-batch-size 8 --rampup-batch-size 2 2 0 | 1 | --rampup-batch-size 2 2 0: each must be greater than 0
--global-batch-size 8 --rampup-batch-size 2 2 9 | 4 | --rampup-batch-size 2: must be a multiple of | nearest 4
--global-batch-size 8 --rampup-batch-size 4 2 9 | 4 | --rampup-batch-size 6: must be a multiple of
--step-batch-size-schedule 0:4 --global-batch-size 8 | 1 | every batch size; leave --global-batch-size out
--step-batch-size-schedule 5:4x | 1 | --step-batch-size-schedule 5:4x: "5:4x" must be TOKENS:BATCH
--step-batch-size-schedule 0:4,1K:6 | 4 | --step-batch-size-schedule 6: must be a multiple of | nearest 4 or 8
--data-args-path nowhere | 1 | --data-args-path nowhere: no such file
--lr-warmup-iters 10 | 1 | --lr-warmup-iters 10: must be less than the decay's 10
--profile --profile-ranks 0 2 | 2 | --profile-ranks 2: must be of the processes 0 to 1
--keep-last-k 1 | 1 | --keep-last-k 1: must be at least 2
--data-path 1 x 2 y | 1 | --data-path x: no file x.bin and x.idx
--data-path 1 x y z | 1 | --data-path 1 x y z: give a weight above 0 before every prefix
--data-path 1 x 0 y | 1 | --data-path 1 x 0 y: give a weight above 0
--data-path x y z | 1 | --data-path z: no file z.bin and z.idx
"""
CASES = [[cell.strip() for cell in line.split("|")] for line in WRONG.strip().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_error_has_value_rule_and_fix(case):
    flags, world, *parts = case
    messages = errors_of(f"{GOOD} {flags}", int(world))
    assert any(all(part in message for part in parts) for message in messages), messages
    assert len(messages) <= 4  # what is wrong, and not a page of what follows from it


@pytest.mark.parametrize(
    "flags",
    [
        "--tp-comm-overlap --sequence-parallel --tp 2",
        "--overlap-moe-expert-parallel-comm --num-experts 4 --moe-token-dispatcher-type alltoall",
        "--moe-shared-expert-overlap --num-experts 4 --moe-token-dispatcher-type alltoall "
        "--moe-shared-expert-intermediate-size 32",
        "--cross-entropy-loss-fusion",
        "--fp8-param-gather --fp8-format e4m3 --bf16 --use-distributed-optimizer",
        "--optimizer-cpu-offload --bf16",
    ],
)
def test_no_fast_paths_with_a_flag_that_asks_for_one(flags):
    flags = f"--micro-batch-size 16 {flags}"
    assert errors_of(f"{GOOD} {flags} --fast-paths", 2) == errors_of(f"{GOOD} {flags}", 2) == []
    (message,) = errors_of(f"{GOOD} {flags} --no-fast-paths", 2)
    asks = next(word for word in flags.split()[2:] if word.startswith("--"))
    assert message == f"{asks}: not with --no-fast-paths, being a fast path; leave one out"


RIGHT = """
--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved --use-rope-scaling
--position-embedding-type rope --rotary-seq-len-interpolation-factor 4 --use-rope-scaling
--rotary-seq-len-interpolation-factor 1
--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8
--window-size 7 0 --window-attn-skip-freq ([1]*3+[0])
--window-size (7,0) --window-attn-skip-freq 2
--squared-relu --apply-layernorm-1p --num-workers 0
--decoupled-lr 1e-3 --decoupled-min-lr 1e-5 --iterations-to-skip 5 6
--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1
--global-batch-size 8 --rampup-batch-size 2 2 30
--step-batch-size-schedule 0:4,1K:8
--timing-log-level 2 --timing-log-option all --log-params-norm --log-num-zeros-in-grad
--fast-paths
--no-fast-paths
"""


@pytest.mark.parametrize("flags", RIGHT.strip().splitlines())
def test_what_is_right_passes_and_can_be_read_again(flags):
    """A resolved run is a file; read back it is the same run, and valid."""
    assert errors_of(f"{GOOD} {flags}", 2) == []
    config = resolve(parse(f"{GOOD} {flags}".split()).config, 2)
    assert from_toml(to_toml(config)) == config and validate(config, 2) == []
    assert resolve(config, 2) == config


@pytest.mark.parametrize(
    "flags, iters, batch",
    [
        ("--global-batch-size 16 --rampup-batch-size 4 4 48", 11, 16),
        ("--step-batch-size-schedule 0:4,320:8", 15, 8),
        ("--global-batch-size 8", 13, 8),
    ],
)
def test_samples_become_iterations(flags, iters, batch):
    config = parse(f"{SHAPE} --mock-data --vocab-size 9 --train-samples 104 {flags}".split()).config
    assert validate(config, 1) == []
    resolved = resolve(config, 1)
    assert (resolved.run.train_iters, resolved.data.global_batch_size) == (iters, batch)
    assert validate(resolved, 1) == []
    both = dataclasses.replace(resolved, run=dataclasses.replace(resolved.run, train_iters=99))
    assert any("--train-iters 99 --train-samples 104: give one" in message for message in validate(both, 1))


def test_data_from_a_file_of_arguments(tmp_path):
    for end in ("a.bin", "a.idx"):
        (tmp_path / end).touch()
    (tmp_path / "args").write_text(f"0.5 {tmp_path}/a\n0.5 {tmp_path}/b\n")
    (tmp_path / "empty").touch()
    flags = f"{SHAPE} --train-iters 1 --data-args-path {tmp_path}"
    (message,) = errors_of(f"{flags}/args")
    assert message.startswith(f"--data-args-path {tmp_path}/args: {tmp_path}/b: no file {tmp_path}/b.bin and")
    (message,) = errors_of(f"{flags}/empty")
    assert "has no data path in it" in message
    found = errors_of(f"{flags}/args --mock-data --vocab-size 9")
    assert "--mock-data: not with --data-args-path; leave one out" in found


def test_what_may_change_when_a_run_goes_on():
    def config(flags: str):
        return resolve(parse(f"{GOOD} {flags}".split()).config, 1)

    def name(flags: str) -> str:
        return default_run_name(config(flags), "x", parse(flags.split()).given)

    free = "--num-workers 0 --eval-only --log-params-norm --timing-log-level 2 --log-num-zeros-in-grad"
    assert name(free) == name("")
    for flags in ("--fast-paths", "--no-fast-paths"):
        assert name(flags) == name("")
        assert resume_conflicts(config(""), config(flags)) == []
    assert resume_conflicts(config(""), config(f"{free} --iterations-to-skip 3 --micro-batch-size 1")) == []
    for flags in ("--global-batch-size 4 --rampup-batch-size 1 1 9", "--step-batch-size-schedule 0:4,1K:8"):
        assert any("the run in this folder has" in m for m in resume_conflicts(config(""), config(flags)))
        assert name(flags) != name("")


# flags behind SHAPE | global batches in an evaluation
EVALUATED = """
--train-iters 20 | 2
--train-iters 4 | 1
--train-iters 600 | 60
--train-iters 5000 | 100
--train-samples 64 --global-batch-size 2 | 3
 | 100
--train-iters 20 --eval-iters 100 | 100
--train-iters 20 --eval-iters 0 | 0
--train-iters 20 --megatron-defaults | 100
--train-iters 20 --eval-only --load x | 2
--eval-only --load x | 100
--train-iters 20 --eval-only --load x --eval-iters 7 | 7
"""


@pytest.mark.parametrize("row", EVALUATED.strip("\n").splitlines())
def test_an_evaluation_is_in_proportion_to_the_run(row):
    """Unless a flag says how long: then Megatron's meaning. A batch costs a third of a step: no backward."""
    flags, batches = row.split("|")
    parsed = parse(f"{SHAPE} --mock-data --vocab-size 100 {flags}".split())
    assert not [*parsed.errors, *validate(parsed.config, 1)]
    assert resolve(parsed.config, 1).run.eval_iters == int(batches)


def test_the_evaluations_of_a_demo_are_shorter_than_its_training():
    """Of the default preset, however short: one at the end on each of two data sets, and those in between."""
    for iters in (5, 20, 600):
        run = resolve(parse(["--train-iters", str(iters)]).config, 1).run
        times = 2 + (iters - 1) // run.eval_interval
        assert times * run.eval_iters / 3 < iters / 5
