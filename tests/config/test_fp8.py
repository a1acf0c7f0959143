"""Settings of FP8: Megatron's defaults, wrong ones named with a way out, sizes and GPUs that do not fit."""

import dataclasses
import random
import re

import pytest

from nanomegatron.config.check import resolve, run_notes, validate
from nanomegatron.config.cli import from_toml, parse, to_toml
from nanomegatron.config.help import help_text
from nanomegatron.config.run_folder import resume_conflicts
from nanomegatron.config.settings import Config, PrecisionConfig
from nanomegatron.fp8 import RECIPES
from tests.config.test_reuse import full_name

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
GOOD = f"{SHAPE} --mock-data --vocab-size 100 --train-iters 10"
FP8 = f"{GOOD} --bf16 --fp8-format hybrid"
LARGE = "--hidden-size 512 --seq-length 128"  # blocks of 128 fit it
EXPERTS = "--num-experts 4"


def config_of(flags: str) -> Config:
    parsed = parse(flags.split())
    assert parsed.errors == ()
    return parsed.config


def errors_of(flags: str, world: int = 1, **where) -> list[str]:
    parsed = parse(flags.split())
    return [*parsed.errors, *validate(parsed.config, world, **where)]


def test_defaults_are_megatrons():
    precision = config_of(f"{GOOD} --bf16").precision
    assert precision == PrecisionConfig(bf16=True) and precision.fp8_format is None
    assert (precision.fp8_recipe, precision.fp8_margin, precision.fp8_wgrad) == ("delayed", 0, True)
    assert (precision.fp8_amax_history_len, precision.fp8_amax_compute_algo) == (1, "most_recent")
    assert not precision.fp8_param_gather and not precision.first_last_layers_bf16
    assert (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) == (1, 1)
    assert config_of(GOOD).run.log_fp8_stats == 0


def test_defaults_are_those_of_its_code():
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import TransformerConfig as Theirs

    renamed = {"fp8_format": "fp8", "fp8_param_gather": "fp8_param"}
    theirs = {field.name: field.default for field in dataclasses.fields(Theirs)}
    ours = [f for f in dataclasses.fields(PrecisionConfig) if "fp8" in f.name or f.name.endswith("_bf16")]
    ours = [field for field in ours if field.name != "fp8_output_proj"]  # newer than the package
    assert len(ours) == 10
    for field in ours:
        assert field.default == theirs[renamed.get(field.name, field.name)], field.name


# flags behind GOOD | processes | what the message must hold: the flag, the value, the way out
WRONG = """
--fp8-format e5m2 --bf16 | 1 | --fp8-format e5m2: must be one of e4m3, hybrid
--fp8-format | 1 | --fp8-format: takes one value
--fp8-format e4m3 --no-bf16 | 1 | --fp8-format e4m3: needs --bf16, the type of all else
--fp8-format hybrid --fp16 | 1 | --fp8-format hybrid: needs --bf16, the type of all else
--bf16 --fp8-recipe tensorwise | 1 | --fp8-recipe tensorwise: needs --fp8-format
--bf16 --fp8-margin 1 --no-fp8-wgrad | 1 | --fp8-margin 1, --no-fp8-wgrad: need --fp8-format
--bf16 --fp8-amax-history-len 9 --fp8-amax-compute-algo max | 1 | -len 9, --fp8-amax-compute-algo max: need
--fp8-param-gather --use-distributed-optimizer | 1 | --fp8-param-gather: needs --fp8-format
--first-last-layers-bf16 | 1 | --first-last-layers-bf16: needs --fp8-format
--log-fp8-stats 5 | 1 | --log-fp8-stats 5: needs --fp8-format
--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 | 1 | --fp8-recipe mxfp8: | Blackwell GPU; use blockwise
--bf16 --fp8-format e4m3 --fp8-recipe custom | 1 | --fp8-recipe custom: there are no recipes from outside
--bf16 --fp8-format e4m3 --fp8-recipe delay | 1 | --fp8-recipe delay: must be one of | mean delayed?
--bf16 --fp8-quantizer-factory x.y | 1 | --fp8-quantizer-factory: | not here; --fp8-recipe, or a class
--bf16 --fp8-output-proj | 1 | --fp8-output-proj: needs --fp8-format
"""
# the same behind GOOD --bf16 --fp8-format hybrid
WRONG_FP8 = """
--fp8-amax-compute-algo mean | 1 | --fp8-amax-compute-algo mean: must be one of max, most_recent
--fp8-amax-history-len 0 | 1 | --fp8-amax-history-len 0: must be greater than 0 and
--fp8-amax-history-len 1025 | 1 | --fp8-amax-history-len 1025: must be | at most 1024
--fp8-amax-history-len 16 --fp8-recipe rowwise | 1 | -len 16: needs --fp8-recipe delayed
--fp8-amax-compute-algo max --fp8-recipe tensorwise | 1 | max: needs --fp8-recipe delayed
--fp8-margin -1 | 1 | --fp8-margin -1: must be at least 0
--log-fp8-stats -1 | 1 | --log-fp8-stats -1: must be at least 0
--fp8-param-gather | 2 | --fp8-param-gather: needs --use-distributed-optimizer
--use-distributed-optimizer --fp8-param-gather --fp8-recipe rowwise | 1 | not with --fp8-recipe | rows
--use-distributed-optimizer --fp8-param-gather --fp8-recipe blockwise {LARGE} | 1 | blocks shards | delayed or
--first-last-layers-bf16 | 1 | --first-last-layers-bf16: needs --fp8-recipe tensorwise or rowwise or
--num-layers-at-start-in-bf16 2 | 1 | --num-layers-at-start-in-bf16 2: needs --first-last-layers-bf16
--num-layers-at-end-in-bf16 0 | 1 | --num-layers-at-end-in-bf16 0: needs --first-last-layers-bf16
--first-last-layers-bf16 --num-layers-at-end-in-bf16 -1 --fp8-recipe rowwise | 1 | -1: must be at least 0
--first-last-layers-bf16 --num-layers-at-start-in-bf16 3 --fp8-recipe rowwise | 1 | none of | at most 3
--hidden-size 72 | 1 | --hidden-size 72: must be a multiple of 16 for FP8; nearest --hidden-size 64 or 80
--hidden-size 72 --kv-channels 16 | 1 | --hidden-size 72: | multiple of 16 for FP8; nearest --hidden-size 64
--hidden-size 80 --tp 2 | 2 | head size 20 x 2 query heads of a tp rank = 40: | nearest --hidden-size 64 or 96
--kv-channels 18 | 1 | head size 18 x 4 query heads = 72: | multiple of 16 | nearest --kv-channels 16 or 20
--num-query-groups 2 --kv-channels 12 --tp 2 | 2 | 2 query heads of a tp rank = 24: | --kv-channels 8 or 16
--num-attention-heads 8 --num-query-groups 1 --kv-channels 4 | 1 | 2 x 1 key/value heads = 40: | -channels 8
--ffn-hidden-size 100 | 1 | --ffn-hidden-size 100 = 100: | multiple of 16 | --ffn-hidden-size 96 or 112
--ffn-hidden-size 80 --tp 2 | 2 | --ffn-hidden-size 80 / tp 2 = 40: must be a multiple of 16 | 64 or 96
--seq-length 40 | 1 | --seq-length 40 x --micro-batch-size 1 = 40: | multiple of 16 | --seq-length 32 or 48
--seq-length 20 --micro-batch-size 2 | 1 | --seq-length 20 x --micro-batch-size 2 = 40: | 16 or 24
--seq-length 48 --tp 2 --sp | 2 | --seq-length 48 x --micro-batch-size 1 / tp 2 = 24: | --seq-length 32 or 64
--fp8-recipe blockwise --seq-length 128 | 1 | --hidden-size 64: | multiple of 128 for | --hidden-size 128
ROWWISE {EXPERTS} --moe-ffn-hidden-size 40 | 1 | --moe-ffn-hidden-size 40 = 40: | multiple of 16 | 32 or 48
ROWWISE {EXPERTS} --ffn-hidden-size 40 | 1 | --ffn-hidden-size 40 = 40: must be a multiple of 16 | 32 or 48
ROWWISE {EXPERTS} --moe-ffn-hidden-size 48 --tp 2 --sp | 2 | 48 / expert tp 2 = 24: | 32 or 64
ROWWISE {EXPERTS} --moe-ffn-hidden-size 48 --moe-layer-freq 2 --ffn-hidden-size 40 | 1 | -size 40 =
{EXPERTS} --moe-shared-expert-intermediate-size 24 | 1 | -size 24 = 24: must be a multiple of 16 | 16 or 32
"""
LINES = WRONG.strip().splitlines()
LINES += [f"--bf16 --fp8-format hybrid {line}" for line in WRONG_FP8.strip().splitlines()]
LINES = [
    line.format(LARGE=LARGE, EXPERTS=EXPERTS).replace("ROWWISE", "--fp8-recipe rowwise") for line in LINES
]
CASES = [[cell.strip() for cell in line.split(" | ")] for line in LINES]


@pytest.mark.parametrize("case", CASES, ids=[" ".join(case[:1]) for case in CASES])
def test_each_error_has_value_rule_and_fix(case):
    flags, world, *parts = case
    messages = errors_of(f"{GOOD} {flags}", int(world))
    assert any(all(part in message for part in parts) for message in messages), messages
    assert len(messages) == 1, messages


def test_all_errors_come_together():
    flags = (
        "--no-bf16 --fp8-format e4m3 --fp8-amax-history-len 2000 --fp8-param-gather --first-last-layers-bf16"
    )
    sizes = "--hidden-size 72 --ffn-hidden-size 100 --seq-length 40 --kv-channels 18"
    messages = errors_of(f"{GOOD} {flags} {sizes}", 1, device_type="cuda", gpu=(8, 0))
    beginnings = ["--fp8-amax-history-len 2000", "--fp8-format e4m3: needs --bf16", "--fp8-param-gather"]
    beginnings += ["--first-last-layers-bf16", "--hidden-size 72", "head size 18", "--ffn-hidden-size 100"]
    beginnings += ["--seq-length 40", "--fp8-format e4m3: needs a GPU"]
    assert len(messages) == len(beginnings)
    assert all(map(str.startswith, messages, beginnings))


def test_a_shape_that_is_missing_is_all_that_is_told(tmp_path):
    (tmp_path / "part.toml").write_text("num-layers = 2\n")
    part = f"--config {tmp_path}/part.toml"
    messages = errors_of(f"{part} --bf16 --fp8-format hybrid --mock-data --vocab-size 9")
    assert [m.split(":")[0] for m in messages] == ["--hidden-size", "--num-attention-heads"]
    assert len(errors_of(f"{FP8} --tp 0")) == len(errors_of(f"{GOOD} --tp 0"))
    messages = errors_of(f"{FP8} --tp 2 --ffn-hidden-size 65", 2)
    assert (
        len(messages) == 2 and "--ffn-hidden-size 65 / tp 2 = 32.5: must be a multiple of 16" in messages[1]
    )


RIGHT = """
--fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-margin 2
--fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3
--fp8-recipe rowwise --no-fp8-wgrad --log-fp8-stats 10
--fp8-recipe blockwise --hidden-size 512 --seq-length 128
--use-distributed-optimizer --fp8-param-gather
--data-parallel-sharding-strategy optim_grads --fp8-param-gather --fp8-format e4m3
--num-query-groups 1 --kv-channels 16
--seq-length 8 --micro-batch-size 2
--fp8-recipe rowwise --num-experts 4 --moe-ffn-hidden-size 48 --ffn-hidden-size 40
--num-experts 4 --moe-ffn-hidden-size 40 --moe-shared-expert-intermediate-size 48
"""


@pytest.mark.parametrize("flags", RIGHT.strip().splitlines())
@pytest.mark.parametrize("where", [{}, {"device_type": "cuda", "gpu": (9, 0)}], ids=["cpu", "hopper"])
def test_what_is_right_passes_and_can_be_read_again(flags, where):
    assert errors_of(f"{FP8} {flags}", 2, **where) == []
    config = resolve(config_of(f"{FP8} {flags}"), 2)
    assert from_toml(to_toml(config)) == config and validate(config, 2, **where) == []


@pytest.mark.parametrize(
    "flags, gpu, message",
    [
        ("", (8, 0), "--fp8-format hybrid: needs a GPU of compute capability 8.9 or more | here it is 8.0"),
        ("", (8, 9), ""),
        ("", (12, 0), ""),
        (f"--fp8-recipe blockwise {LARGE}", (9, 0), ""),
        (f"--fp8-recipe blockwise {LARGE}", (8, 9), "--fp8-recipe blockwise: needs | 8.9; use tensorwise"),
        (f"--fp8-recipe blockwise {LARGE}", (10, 0), "--fp8-recipe blockwise: needs | 9.0 (Hopper) | 10.0;"),
        (f"--fp8-recipe blockwise {LARGE}", (7, 5), "--fp8-format hybrid: needs | here it is 7.5"),
        (f"--fp8-recipe rowwise {EXPERTS}", (9, 0), ""),
        (
            f"--fp8-recipe rowwise {EXPERTS}",
            (10, 0),
            "rowwise: of experts needs | 10.0; | --no-moe-grouped-gemm",
        ),
        (f"--fp8-recipe rowwise {EXPERTS} --no-moe-grouped-gemm", (10, 0), ""),
        (f"--fp8-recipe tensorwise {EXPERTS} --moe-ffn-hidden-size 40", (8, 9), ""),
    ],
)
def test_gpus_that_have_none(flags, gpu, message):
    messages = errors_of(f"{FP8} {flags}", 1, device_type="cuda", gpu=gpu)
    assert len(messages) == bool(message)
    assert all(part in messages[0] for part in message.split(" | ") if message)
    assert errors_of(f"{GOOD} --bf16", 1, device_type="cuda", gpu=gpu) == []


def test_megatrons_other_spellings():
    parsed = parse(f"{FP8} --fp8-interval 2 --disable-fp8-wgrad".split())
    assert parsed.errors == () and parsed.notes[0] == "--fp8-interval: not needed here"
    assert parsed.config == config_of(f"{FP8} --no-fp8-wgrad")
    text = " ".join(help_text().split())
    assert "--fp8-format " in text
    assert f"[{', '.join(RECIPES)}]; default delayed" in text


def test_the_flags_of_megatrons_example():
    """Its Llama-3-8B on Hopper."""
    flags = (
        "--config llama3-8b --mock-data --vocab-size 128256 --tp 1 --bf16 --fp8-format hybrid "
        "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max "
        "--fp8-param-gather --use-distributed-optimizer"
    )
    assert errors_of(flags, 8, device_type="cuda", gpu=(9, 0)) == []


def test_what_multiplies_experts_is_said():
    """Those of rows alone are in FP8."""
    (note,) = run_notes(config_of(f"{FP8} {EXPERTS}"))
    assert note.startswith("--fp8-recipe delayed: experts multiply in bf16, the rest in FP8")
    assert run_notes(config_of(f"{FP8} {EXPERTS} --fp8-recipe rowwise")) == run_notes(config_of(FP8)) == []


def test_layers_in_fp8():
    assert PrecisionConfig().fp8_layers(8) == range(0)
    assert PrecisionConfig(fp8_format="e4m3", num_layers_at_end_in_bf16=3).fp8_layers(8) == range(8)
    ends = PrecisionConfig(fp8_format="e4m3", first_last_layers_bf16=True, num_layers_at_end_in_bf16=3)
    assert ends.fp8_layers(8) == range(1, 5) and not ends.fp8_layers(4)


def test_the_nearest_values_fit(full):
    """Every message names the flag that mends it, and the values next to the wrong one that do."""
    rng, seen = random.Random(7), set()
    for _ in range(300 if full else 80):
        tp, cp = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3))
        values = {
            "num-attention-heads": 4 * rng.choice((1, 2, 3, 5)),
            "num-query-groups": rng.choice((1, 4)),
            "ffn-hidden-size": 4 * rng.randint(1, 300),
            "seq-length": 4 * cp * rng.randint(1, 300),
            "micro-batch-size": rng.choice((1, 2, 3)),
            "fp8-recipe": rng.choice(("delayed", "blockwise")),
            "tp": tp,
            "cp": cp,
        }
        values["hidden-size"] = values["num-attention-heads"] * rng.randint(1, 100)
        if rng.random() < 0.5:
            values["kv-channels"] = rng.randint(1, 100)
        sp = rng.choice(("", "--sp"))

        def messages(values, sp=sp, world=tp * cp):
            flags = " ".join(f"--{name} {value}" for name, value in values.items())
            return errors_of(f"{FP8} {flags} {sp}", world)

        found = [re.search(r"nearest --(\S+) (\d+)(?: or (\d+))?$", text) for text in messages(values)]
        assert all(found)
        flags = [match[1] for match in found]
        assert len(set(flags)) == len(flags)
        seen.update(flags)
        for near in (2, 3):
            mended = {match[1]: int(match[near] or match[2]) for match in found}
            assert messages(values | mended) == []
        for match in found:  # and no value between is one
            between = (values[match[1]] + (int(match[3] or match[2]) + int(match[2])) // 2) // 2
            if between not in map(int, filter(None, match.groups()[1:])):
                assert messages(values | {match[1]: between})
    assert seen == {"hidden-size", "kv-channels", "ffn-hidden-size", "seq-length"}


def test_a_run_goes_on_with_fp8_and_is_named_by_its_own():
    one, two = (resolve(config_of(flags), 1) for flags in (f"{GOOD} --bf16", FP8))
    assert resume_conflicts(one, two) == [] and full_name(one) != full_name(two)
    logged = resolve(config_of(f"{FP8} --log-fp8-stats 5"), 1)
    assert full_name(two) == full_name(logged)
