"""The planner's step times and memory against every training run that was measured (plan_rows.toml)."""

import itertools
from dataclasses import replace

import pytest

from nanomegatron.config.check import resolve
from nanomegatron.config.cli import parse
from nanomegatron.plan.cluster import CLUSTERS, LinkRate, load_cluster
from nanomegatron.plan.fast import ring_buffers
from nanomegatron.plan.flops import flops_per_iteration, parameter_count
from nanomegatron.plan.layer import Machine, Sizes
from nanomegatron.plan.memory import memory_of_ranks
from nanomegatron.plan.room import Planned
from nanomegatron.plan.step_time import CONTENTION, STEP_PARTS, padded_vocab, step_time
from tests.plan_rows import Row, rows
from tools import planner_page

TIME, MEMORY = 0.10, 0.03  # relative
PRECISION_AWARE = "--use-precision-aware-optimizer"


def ids(row: Row) -> str:
    return f"{row.half}: {row.name}"


@pytest.mark.parametrize("row", [row for row in rows() if row.step_s], ids=ids)
def test_time_of_a_step(row):
    run = Planned(row.config, row.vocab, Machine(), row.world)
    ratio = step_time(run, load_cluster(row.gpu)).total / row.step_s
    assert ratio == pytest.approx(1.0, rel=TIME)


@pytest.mark.parametrize("row", [row for row in rows() if row.peak_bytes], ids=ids)
def test_peak_of_memory(row):
    """But for a ring's slots: torch's allocator does not count memory that GPUs share."""
    shared = ring_buffers(Sizes(row.config, Machine()))
    ranks = [sum(parts.values()) - shared for parts in memory_of_ranks(row.config, row.vocab, Machine())]
    ratio = (max(ranks) if row.peak_of == "fullest" else ranks[0]) / row.peak_bytes
    assert ratio == pytest.approx(1.0, rel=MEMORY)


def test_parts_add_up_and_rates_are_megatrons():
    row = next(row for row in rows() if row.world > 1 and row.step_s)
    step = step_time(Planned(row.config, row.vocab, Machine(), row.world), load_cluster(row.gpu))
    assert tuple(step.parts) == STEP_PARTS and min(step.parts.values()) >= 0
    assert step.total == pytest.approx(sum(step.parts.values()))
    assert step.tokens_per_s == pytest.approx(row.tokens / step.total)
    assert step.mfu == pytest.approx(step.tflops_per_gpu / 989.5)
    data, vocab = row.config.data, padded_vocab(step.run)
    flops = flops_per_iteration(row.config.model, vocab, data.seq_length, data.global_batch_size)
    assert step.tflops_per_gpu == pytest.approx(flops / row.world / step.total / 1e12)


@pytest.mark.parametrize("overlap", [False, True])
def test_optim_grads_reduces_in_every_microbatch(overlap):
    """What is exposed grows with the microbatches, or what runs beside their kernels does."""
    h100, found = load_cluster("h100"), {}
    flags = "--config llama3-8b --vocab-size 128256 --micro-batch-size 1 --data-parallel-sharding-strategy"
    for strategy, m in itertools.product(("optim", "optim_grads"), (1, 2, 8)):
        words = f"{flags} {strategy} --global-batch-size {8 * m}" + " --overlap-grad-reduce" * overlap
        run = Planned(resolve(parse(words.split()).config, 8), 128256, Machine(), 8)
        found[strategy, m] = step_time(run, h100).parts["dp communication"]
    n = parameter_count(run.config.model, 128256)
    writes = h100.move(4 * n) + h100.move(12 * n / 8)  # zeros; and what is reduced, added to the shard
    reduction = h100.collective(4 * n, 8) + h100.move(4 * n)
    assert found["optim", 1] == found["optim", 8]
    assert found["optim_grads", 1] - found["optim", 1] == pytest.approx(writes)
    exposed = found["optim_grads", 8] - found["optim_grads", 1]
    assert exposed / 7 == pytest.approx(found["optim_grads", 2] - found["optim_grads", 1])
    beside = reduction if overlap else 0.0  # all of it: a backward of 8 B parameters takes longer
    assert exposed == pytest.approx(7 * (writes + reduction - beside * (1 - CONTENTION)))


def seconds_of(flags: str, part: str, world: int) -> float:
    """Seconds of a part of Llama-3-8B's step on H100s."""
    words = f"--config llama3-8b --vocab-size 128256 --micro-batch-size 1 --global-batch-size 8 {flags}"
    run = Planned(resolve(parse(words.split()).config, world), 128256, Machine(), world)
    return step_time(run, load_cluster("h100")).parts[part]


def test_sums_in_shards_are_fp32_whatever_gradients_are():
    """AdamW reads them twice; without optim_grads they have the type of the gradients, 2 bytes less."""
    seconds = {
        (strategy, grads): seconds_of(
            f"--data-parallel-sharding-strategy {strategy} --main-grads-dtype {grads} {PRECISION_AWARE}",
            "optimizer",
            8,
        )
        for strategy in ("optim", "optim_grads")
        for grads in ("fp32", "bf16")
    }
    assert seconds["optim_grads", "bf16"] == seconds["optim_grads", "fp32"] == seconds["optim", "fp32"]
    less = load_cluster("h100").move(2 * 2 * 8030261248 / 8)
    assert seconds["optim", "fp32"] - seconds["optim", "bf16"] == pytest.approx(less)


def test_fp8_layers_gather_bytes():
    """Under sequence parallelism; of two gathers that are not hidden and two reduce-scatters, in 64 pairs."""
    h100, tp = load_cluster("h100"), "--tp 8 --sequence-parallel"
    bf16, fp8 = (
        seconds_of(f"{tp} {more}", "tp communication", 8)
        for more in ("", "--fp8-format hybrid --fp8-recipe delayed")
    )
    values = 8192 * 4096
    saved = 2 * (h100.collective(2 * values, 8) - h100.collective(values, 8))
    assert bf16 - fp8 == pytest.approx(8 * 64 * saved)
    plain = "--tp 8 --fp8-format hybrid --fp8-recipe delayed"
    assert seconds_of(plain, "tp communication", 8) == pytest.approx(
        seconds_of("--tp 8", "tp communication", 8)
    )


@pytest.mark.parametrize("name, gpu", [("H100", "H100"), ("h200", "H200"), ("NVIDIA H100 80GB HBM3", "H100")])
def test_clusters_by_name(name, gpu):
    assert load_cluster(name).gpu == gpu


def test_rings_in_a_node_and_over_nodes():
    """A rank sends (n - 1) / n of the bytes in n - 1 turns; those of a ring in a node share its links."""
    rates = dict(gpus_per_node=8, nvlink=LinkRate(300e9, 1e-6), network=LinkRate(50e9, 5e-6))
    cluster = replace(load_cluster("h100"), **rates)
    assert cluster.collective(8e9, 8) == pytest.approx(7e9 / 300e9 + 7e-6)
    assert cluster.collective(16e9, 16, 8) == pytest.approx(15e9 / 50e9 + 15 * 5e-6)
    assert cluster.collective(16e9, 16, 2) == pytest.approx(15e9 / (4 * 50e9) + 15 * 5e-6)


def test_a_recipe_without_a_rate_is_as_fast_as_tensorwise():
    h100 = load_cluster("h100")
    assert h100.matmul(8192, 4096, 4096, "pow2") == h100.matmul(8192, 4096, 4096, "tensorwise")
    assert h100.matmul(8192, 4096, 4096, "pow2") < h100.matmul(8192, 4096, 4096)


def test_what_is_no_cluster(tmp_path):
    with pytest.raises(ValueError, match="cluster abacus: must be a TOML file or one of .*h100"):
        load_cluster("abacus")
    path = tmp_path / "mine.toml"
    path.write_text("gpu = 'H100'\n")
    with pytest.raises(ValueError, match=r"mine.toml: gpus_per_node is missing; .*; nvlink is missing"):
        load_cluster(str(path))


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("bandwidth = 3000", "bandwidth = -3", "bandwidth = -3: must be a number above 0"),
        ("gpus_per_node = 8", "gpus_per_node = 0", "gpus_per_node = 0: must be a number above 0"),
        ("launch = 25", "launch = 'fast'", "launch = 'fast': must be a number above 0"),
        ("64 = [600, 335]", "64 = [600, 0]", r"attention.64 = \[600, 0\]: must be a number above 0"),
        ("grouped = 625", "", "matmul.grouped is missing"),
        ("[network]", "[net]", "network is missing"),
        ('gpu = "H100"', 'gpu = "H900"', "'peak' is missing"),
    ],
)
def test_a_cluster_file_has_every_rate(old, new, said, tmp_path):
    text, path = (CLUSTERS / "h100.toml").read_text(), tmp_path / "mine.toml"
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=f"mine.toml: .*{said}.*; see "):
        load_cluster(str(path))


@pytest.mark.parametrize("card", ["H100 PCIe", "NVIDIA H100 NVL", "H200 NVL", "GH200 480GB", "GB200"])
def test_other_cards_have_no_rates_of_their_namesakes(card):
    with pytest.raises(ValueError, match=f"cluster {card}: must be a TOML file or one of"):
        load_cluster(card)


def test_mfu_is_the_share_of_the_peak_of_the_type():
    """As in training: the peak of TF32 in fp32."""
    steps = [
        step_time(Planned(resolve(parse(words.split()).config, 1), 50257, Machine(), 1), load_cluster("h100"))
        for words in ("--config gpt2-124m --bf16", "--config gpt2-124m --no-bf16")
    ]
    peaks = [step.tflops_per_gpu / step.mfu for step in steps]
    assert peaks == pytest.approx([989.5, 494.5])


def test_the_page_is_current():
    assert planner_page.main([]) == 0, "python tools/planner_page.py --write"


def test_published_rates_are_converted():
    """A row with a time and a rate: both mean the same FLOP/s, by the count that the row names."""
    page = planner_page.PAGE.read_text(encoding="utf-8")
    assert "| bridge llama3 8b fp8 | 8 H100 | 744 |" in page and "| bridge qwen3 8b | 16 H100 | 528 |" in page
