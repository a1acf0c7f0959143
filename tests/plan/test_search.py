"""The search for a layout: the best of all, flags that stay, reasons that add up, a command that works."""

import cProfile
import itertools
import pstats
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nanomegatron.commands import plan
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import build_config, parse
from nanomegatron.config.rules import values_of
from nanomegatron.plan import memory
from nanomegatron.plan.cluster import load_cluster
from nanomegatron.plan.layer import Machine, Sizes, sizes_of
from nanomegatron.plan.layer_time import LayerTimes, layer_times
from nanomegatron.plan.memory import OpOrder, StageChunk, chunk_memory, memory_of_ranks, pipeline_order
from nanomegatron.plan.room import Planned
from nanomegatron.plan.search import (
    AXIS_SIZES,
    FILLED,
    FULL,
    SELECTIVE,
    SHARDED_GRADS,
    SHARDED_STATES,
    SIMULATED,
    TENSOR_PARALLEL,
    Search,
    disadvantage,
    usual_batch,
)
from nanomegatron.plan.step_time import least_time, simulated_ops, step_time
from tools import calibrate, layouts_page

H100 = load_cluster("h100")
EIGHT_B = "--config llama3-8b --global-batch-size 64 --vocab-size 128256"
SEVENTY_B = "--config llama3-70b --global-batch-size 512 --vocab-size 128256"
THIRTY_B = "--config qwen3-30b-a3b --vocab-size 151936 --global-batch-size"


def searched(flags: str, world: int, cluster=H100):
    return Search(parse(flags.split()), 128256, world, cluster).run()


def test_nothing_that_fits_is_faster():
    """Every tp, pp and micro batch of eight GPUs, nothing recomputed, tried one by one."""
    parsed, best = parse(EIGHT_B.split()), searched(EIGHT_B, 8)[0][0]
    for tp, pp, micro in [
        (tp, pp, micro) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for micro in (1, 2, 4, 8)
    ]:
        if tp * pp > 8 or 64 % (8 // (tp * pp) * micro):
            continue
        changes = {
            AXIS_SIZES["tp"]: tp,
            AXIS_SIZES["pp"]: pp,
            "micro_batch_size": micro,
            "pipeline_split": "flops",
        }
        changes |= (TENSOR_PARALLEL if tp > 1 else {}) | (SHARDED_STATES if tp * pp < 8 else {})
        config = build_config(values_of(parsed.config) | changes)
        if not validate(config, 8, "cuda"):
            run = Planned(resolve(config, 8), 128256, Machine(), 8)
            if run.need <= FILLED * 80 * 2**30:
                assert best.rank <= step_time(run, H100).total * (1 + 0.005 * ((tp > 1) + (pp > 1))) + 1e-9


def test_flags_that_are_given_stay():
    flags = (
        f"{SEVENTY_B} --tp 8 --micro-batch-size 2 --recompute-granularity full --recompute-method uniform "
    )
    flags += "--recompute-num-layers 1"
    fits, others = searched(flags, 64)
    for found in fits + others:
        config = found.run.config
        assert config.parallel.tensor_model_parallel_size == 8 and config.data.micro_batch_size == 2
        assert config.model.recompute_granularity == "full"
        assert AXIS_SIZES["tp"] not in found.changes and "micro_batch_size" not in found.changes
    assert len({found.run.config.parallel.pipeline_model_parallel_size for found in fits}) > 2


def test_what_fits_and_why_others_lost():
    fits, others = searched(SEVENTY_B, 64)
    room = FILLED * 80
    assert all(found.need <= room * 2**30 for found in fits) and all(c.need > room * 2**30 for c in others)
    assert [c.need for c in others] == sorted(c.need for c in others)
    lost, best = others[0], fits[0]
    part, size = max(lost.memory.items(), key=lambda item: item[1])
    said = f"does not fit: {lost.need / 2**30:.1f} of {room:.1f} GiB, {part} {size / 2**30:.1f}"
    assert disadvantage(lost, best, room * 2**30) == said
    slower = fits[3]
    parts = {name: s - best.step.parts[name] for name, s in slower.step.parts.items()}
    worst = max(parts, key=parts.get)
    text = disadvantage(slower, best, room * 2**30)
    by, most = (x / best.step.total for x in (slower.step.total - best.step.total, parts[worst]))
    assert text.startswith(f"slower by {by:.1%}: {worst} +{most:.1%}")


def test_room_is_made_in_the_fastest_way():
    """Of sharded gradients and recomputed layers; of host memory with either; what is given stays."""
    flags = "--config llama3-70b --bf16 --vocab-size 128256 --global-batch-size 512"
    fits, _ = searched(flags, 32)
    grads, host = "data_parallel_sharding_strategy", "optimizer_cpu_offload"
    assert any(grads in c.changes for c in fits) and any(host in c.changes for c in fits)
    search = Search(parse(flags.split()), 128256, 32, H100)
    for found in [c for c in fits if grads in c.changes and "recompute_method" not in c.changes][:3]:
        own = {name: value for name, value in found.changes.items() if name not in SHARDED_GRADS | SELECTIVE}
        other = search.timed(search.candidate(own | FULL))
        assert other.need > search.room or other.step.total >= found.step.total
        assert search.candidate(own | SELECTIVE).need > search.room
    fits, _ = searched(f"{flags} --use-distributed-optimizer", 32)
    assert fits and not any(grads in c.changes for c in fits)


def test_experts_are_cut_over_tp_if_they_are_wide():
    for model, sizes in (("mixtral-8x7b", {1, 2, 4}), ("qwen3-30b-a3b", {1})):
        fits, others = searched(f"--config {model} --vocab-size 32000 --global-batch-size 256", 32)
        found = {c.run.config.parallel.expert_tensor_parallel_size or 1 for c in fits + others}
        assert found == sizes, model


def test_tensor_parallelism_stays_inside_a_node():
    fits, others = searched(SEVENTY_B, 64, replace(H100, gpus_per_node=4))
    assert {c.run.config.parallel.tensor_model_parallel_size for c in fits + others} <= {1, 2, 4}


@pytest.mark.parametrize(
    "flags, world", [(EIGHT_B, 8), (SEVENTY_B, 64), ("--config mixtral-8x7b --vocab-size 32000", 32)]
)
def test_the_command_that_is_printed_is_the_plan(flags, world, capsys):
    """And it has data, of which a note says how to give others."""
    assert plan.main([*flags.split(), "--gpus", str(world), "--gpu", "h100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = lines[next(i for i, line in enumerate(lines) if "ms a step" in line) + 1]
    words = shlex.split(next(line for line in lines if line.startswith("run ")))
    assert words[1] == ("python" if world <= 8 else "torchrun")
    parsed = parse(words[words.index("train.py") + 1 :])
    assert parsed.config.run.nproc == (world if world <= 8 else None)
    assert parsed.errors == () and not validate(parsed.config, world, "cuda")
    assert parsed.config.data.mock_data and any("--data-path PREFIX" in line for line in lines)
    run = Planned(resolve(parsed.config, world), parsed.config.data.vocab_size, Machine(), world)
    assert f"{step_time(run, H100).total * 1e3:,.1f}" in row and f"{run.need / 2**30:.1f}" in row


@pytest.mark.parametrize(
    "model, layouts, millions",
    [
        ("mixtral-8x7b", 900, 4.7),  # 4.4; 0.8 seconds on a quick machine
        pytest.param("qwen3-30b-a3b", 1500, 5.4, marks=pytest.mark.full),  # 5.1; 1.6
        ("llama3-70b", 100, 3.4),  # 3.1; 0.5
    ],
)
def test_a_thousand_gpus_take_few_calls(model, layouts, millions):
    """Seconds; calls are counted, since machines differ by more than a change does."""
    profile = cProfile.Profile()
    fits, _ = profile.runcall(
        searched, f"--config {model} --global-batch-size 1024 --vocab-size 128256", 1024
    )
    assert len(fits) > layouts and pstats.Stats(profile).total_calls < 1e6 * millions


def test_a_gpu_without_rates_gets_no_search_and_is_told_why(capsys):
    """And which names have rates; data that were given are the command's."""
    for gpu, why in (["--gpu", "RTX 4090"], "the rates of RTX 4090 are not known"), ([], "no --gpu is given"):
        plan.main([*EIGHT_B.split(), "--gpus", "8", *gpu])
        first, second, *_ = capsys.readouterr().out.splitlines()
        assert f"note    {why}" in first and "no layouts are searched" in first
        assert "--gpu B200, H200, H100, A100, or a --cluster FILE" in second
    plan.main([*EIGHT_B.split(), "--gpus", "8", "--gpu", "A100", "--tokenizer-type", "ByteTokenizer"])
    assert "--mock-data" not in capsys.readouterr().out


def test_no_layout_fits(capsys):
    flags = "--config llama3-70b --vocab-size 128256 --gpus 2 --gpu h100".split()
    assert plan.main(flags) == 1
    out = capsys.readouterr().out
    assert "0 layouts fit" in out and "alone take 197 GiB of each GPU" in out and "train.py" not in out
    assert (
        plan.main(
            [*SEVENTY_B.split(), "--gpus", "4", "--gpu", "h100", "--recompute-granularity", "selective"]
        )
        == 1
    )
    assert "does not fit" in capsys.readouterr().out


def test_a_batch_where_none_is_given():
    for config, tokens in (("gpt2-124m", 2**20), ("llama3-70b", 2**22)):
        parsed = parse(["--config", config])
        length = parsed.config.data.seq_length
        assert usual_batch(parsed, 50257, 8) == tokens // length
        assert usual_batch(parsed, 50257, 4096) % 4096 == 0


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "gpipe", "interleaved"])
def test_the_memory_of_long_schedules_is_that_of_all_their_ops(name, monkeypatch):
    more = " --vpp 2" * (name == "interleaved")
    flags = f"--config llama3-8b --pp 4 --pipeline-schedule {name}{more} --global-batch-size 52"
    config = resolve(parse(flags.split()).config, 4)
    assert (pipeline_order(config, 4) != pipeline_order(config)) == (name != "gpipe")
    short = memory_of_ranks(config, 128256, Machine())
    monkeypatch.setattr(memory, "SETTLED", None)
    assert short == memory_of_ranks(config, 128256, Machine())


@pytest.mark.parametrize(
    "name, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
)
def test_no_pipeline_is_faster_than_the_least_time(name, v):
    rng = random.Random(0)
    for pp, number in itertools.product((2, 4, 8), (1, 3, 8, 20)):
        order = OpOrder(name, pp, number, v, None)
        for message in (0.0, 0.2):
            costs = tuple(tuple(rng.uniform(0.2, 2) for _ in "FBW") for _ in range(pp * v))
            total = simulated_ops(order, costs, message).total
            assert least_time(order, costs, message) <= total * (1 + 1e-12)
        if name in ("gpipe", "1f1b"):
            even = ((1.0, 1.0, 1.0),) * pp
            assert least_time(order, even, 0) == pytest.approx(simulated_ops(order, even, 0).total)


@pytest.mark.parametrize("flags, world", [(SEVENTY_B, 64), (f"{THIRTY_B} 256 --seq-length 16384", 64)])
def test_what_candidates_share_is_what_each_has(flags, world):
    """The best are simulated to the end, no other may be better; parts that are made once fit everyone."""
    fits, _ = searched(flags, world)
    values = values_of(parse(flags.split()).config)
    assert len(fits) > 4 * SIMULATED
    for i, found in enumerate(fits):
        run = found.run
        assert run.config == resolve(build_config(values | found.changes), world)
        whole = replace(found, step=step_time(run, H100))
        if i < SIMULATED:
            assert found.step == whole.step
        else:
            assert whole.rank >= max(found.rank, fits[SIMULATED - 1].rank) * (1 - 1e-12)
        own, shared = Sizes(run.config, Machine()), sizes_of(run.config, Machine())
        assert all(
            vars(shared)[name] == x for name, x in vars(own).items() if name not in ("config", "parallel")
        )
        if i % 8 == 0:
            assert LayerTimes(own, H100).layer(0) == layer_times(shared, H100).layer(0)
            assert chunk_memory(own, StageChunk(3), 1000) == chunk_memory(shared, StageChunk(3), 1000)


def test_layouts_behind_the_best_are_in_the_order_of_their_times():
    search = Search(parse(EIGHT_B.split()), 128256, 8, H100)
    fits = search.run()[0][:5]
    best, *others = search.valid(fits[::-1], 5)
    times = [candidate.step.total for candidate in others]
    assert best is fits[4] and len(times) == 4 and times == sorted(times)


def test_activations_are_also_those_that_weight_gradients_wait_for():
    """The rank of zb-v that needs most has done every B then: all it holds of microbatches is for W."""
    flags = "--config llama3-70b --global-batch-size 512"
    settings = dict(
        tensor_model_parallel_size=8,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        pipeline_schedule="zb-v",
        use_distributed_optimizer=True,
        micro_batch_size=1,
    )
    candidate = Search(parse(flags.split()), 4096, 64, H100).candidate(settings)
    held = candidate.memory["deferred weight gradients"] / 2**30
    assert candidate.memory["activations"] == 0 and held > 20


def test_simulated_gpus_say_their_time(capsys):
    flags = f"{EIGHT_B} --tp 2 --use-distributed-optimizer --simulate 8 --gpu h100"
    assert plan.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert "tp2 pp1 dp4" in out and " MFU" in out and "matmuls" in out and "fits" in out
    assert plan.main(f"{flags} --pp 2 --global-batch-size 32".split()) == 0
    out = capsys.readouterr().out
    busy = re.search(r"ranks   busy for (\S+) (\S+) ms; 4 of 16 microbatches:", out).groups()
    step = re.search(r"step    (\S+) ms", out)[1]
    assert all(0 < float(ms.replace(",", "")) < float(step.replace(",", "")) for ms in busy)
    assert "\nrank 0  F0 " in out and "\nrank 1  .   F0 " in out and out.count("BW3") == 2


def test_no_torch_is_needed_to_search():
    flags = [*EIGHT_B.split(), "--gpus", "8", "--gpu", "h100"]
    code = f"import sys; from nanomegatron.commands.plan import main; main({flags})"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_machine_is_measured_for_the_planner(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert calibrate.main([str(path)]) == 0
    mine, rough = load_cluster(str(path)), load_cluster("cpu")
    assert mine.matmuls["fp32"] != rough.matmuls["fp32"] > 0 and mine.bandwidth != rough.bandwidth > 0
    assert all(rate > 0 for rates in mine.attention.values() for rate in rates)
    assert f"# Measured on cpu with torch {torch.__version__}" in capsys.readouterr().out
    flags = f"--config gpt2-124m --global-batch-size 8 --vocab-size 50257 --gpus 2 --cluster {path}"
    assert plan.main(flags.split()) == 0
    assert calibrate.main([str(path)]) == 2  # it is there
    assert "must be a new file" in capsys.readouterr().err


def test_given_replicas_stay():
    fits, others = searched(f"{EIGHT_B} --dp 2", 8)
    assert fits and {c.run.config.parallel.data_parallel_size for c in fits + others} == {2}


def test_the_memory_is_that_of_the_options(capsys):
    for options, size in (("--gpu 'A100 40GB'", 40), ("--gpu h100 --gpu-memory 60", 60), ("--gpu h100", 80)):
        assert plan.main(shlex.split(f"{EIGHT_B} --gpus 8 {options}")) == 0
        lines = capsys.readouterr().out.splitlines()
        search, together = (next(x for x in lines if word in x) for word in ("search ", "  together "))
        assert f"of {size} GiB" in search and max(map(float, together.split()[1:])) <= FILLED * size


@pytest.mark.parametrize(
    "options, said",
    [
        ("--gpus 12", "--gpus 12: must be whole machines of 8 GPUs"),
        ("--gpus 8 --tp 3", "--num-attention-heads 32"),
        ("--gpus 8 --simulate 8", "give one of them"),
        (
            "--gpus 8 --num-attention-heads 33 --num-query-groups 3",
            "--hidden-size 4096: must be a multiple of --num-att",
        ),
        ("--gpus 8 --data-path /no/text", "no file /no/text.bin"),
    ],
)
def test_what_cannot_be_is_an_error(options, said, capsys):
    assert plan.main(shlex.split(f"{EIGHT_B} --gpu h100 {options}")) == 2
    assert said in capsys.readouterr().err


def test_a_missing_setting_is_the_default_presets(capsys):
    assert plan.main("--num-layers 4 --hidden-size 512 --gpus 8 --gpu h100".split()) == 0
    assert "no --num-attention-heads: what no flag says is the preset tiny-cpu's" in capsys.readouterr().out


def test_a_batch_of_whole_microbatches(capsys):
    assert plan.main("--config llama3-8b --gpus 8 --gpu h100 --micro-batch-size 5".split()) == 0
    assert "batch   160 x 8192 tokens" in capsys.readouterr().out


def test_a_simpler_layout_wins_though_another_is_a_little_faster():
    fits, _ = searched("--config llama3-8b --global-batch-size 7 --vocab-size 128256", 8)
    best, other = fits[0], min(fits, key=lambda c: c.step.total)
    gain = f"{1 - other.step.total / best.step.total:.1%}"
    assert other.step.total < best.step.total and best.rank < other.rank
    assert fits == sorted(fits, key=lambda c: c.rank)
    again = replace(best, changes=best.changes | SELECTIVE)  # recomputation counts like a dimension
    assert again.rank - best.rank == pytest.approx(0.005 * best.step.total)
    assert disadvantage(other, best, 1) == f"faster by {gain}, less than its further dimensions have to gain"


@pytest.mark.full
def test_the_guide_is_current():
    assert layouts_page.main([]) == 0, "python tools/layouts_page.py --write"
