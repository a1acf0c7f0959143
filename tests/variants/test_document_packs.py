"""Plans of packs: what each must keep to whatever the documents, and that layouts train alike on them."""

import json
from pathlib import Path

import numpy as np
import pytest

import train
from benchmarks.long_tail import draw_lengths
from nanomegatron.config.model import TransformerConfig
from nanomegatron.launch import ending
from nanomegatron.mesh import World
from nanomegatron.report import plots
from nanomegatron.variants.packing import Pack, Ranks, cost, plan
from tests.megatron_data import write
from tests.spmd import run_spmd
from tests.training import Task, invented_text, set_up

MODEL = TransformerConfig(num_layers=8, hidden_size=512, num_attention_heads=8)


def costs_of(lengths) -> list[float]:
    return [cost(MODEL, 1024, int(length)) for length in lengths]


def shares(packs: list[Pack], costs: list[float], ranks: Ranks) -> np.ndarray:
    """What each rank has to do, `[dp * cp]`, where n ranks have an n-th of a document each."""
    busy = np.zeros(ranks.dp * ranks.cp)
    for pack in packs:
        busy[pack.first : pack.first + pack.size] += sum(costs[i] for i in pack.documents) / pack.size
    return busy


def random_case(seed: int) -> tuple[np.ndarray, Ranks]:
    random = np.random.default_rng(seed)
    dp, cp = int(random.integers(1, 4)), int(random.choice([1, 2, 3, 4, 6, 8]))
    ranks = Ranks(
        dp, cp, int(random.integers(1, 200)), int(random.choice([1, 2, 16])), bool(random.random() < 0.7)
    )
    longest = ranks.room(cp)
    lengths = np.exp(random.normal(3, 1.5, random.integers(1, 60))).astype(int).clip(1, longest)
    if random.random() < 0.3:
        lengths[0] = longest
    return lengths, ranks


@pytest.mark.parametrize("seed", range(200))
def test_what_every_plan_keeps_to(seed):
    lengths, ranks = random_case(seed)
    packs, world = plan(lengths, costs_of(lengths), ranks), ranks.dp * ranks.cp
    assert sorted(i for pack in packs for i in pack.documents) == list(range(len(lengths)))
    for pack in packs:
        tokens = int(lengths[list(pack.documents)].sum())
        padded = ranks.tokens(pack.size, tokens)
        assert tokens <= padded <= ranks.room(pack.size) < pack.size * (ranks.limit + ranks.align)
        assert padded % (pack.size * ranks.align) == 0 and padded - tokens <= pack.size * ranks.align
        assert pack.size in ranks.sizes and ranks.cp % pack.size == 0 and pack.first % pack.size == 0
        assert pack.first // ranks.cp == (pack.first + pack.size - 1) // ranks.cp  # of one replica
    counts = [sum(pack.has(rank) for pack in packs) for rank in range(world)]
    assert min(counts) >= 1
    if not ranks.dynamic:
        assert len(set(counts)) == 1 and {pack.size for pack in packs} == {ranks.cp}
    assert runs_through(packs, world)
    again = plan(lengths.tolist(), costs_of(lengths), ranks)
    assert again == packs


def runs_through(packs: list[Pack], world: int) -> bool:
    """Whether ranks that wait for each other in each of their packs come to the end, and only there wait."""
    lists = [[pack for pack in packs if pack.has(rank)] for rank in range(world)]
    while any(lists):
        heads = [mine[0] if mine else None for mine in lists]
        ready = [
            p for p in packs if all(heads[r] is p for r in range(p.first, p.first + p.size)) and p in heads
        ]
        if not ready or any(head is not None and head not in ready for head in heads):
            return False
        for pack in ready:
            for rank in range(pack.first, pack.first + pack.size):
                lists[rank].pop(0)
    return True


def test_runs_through_sees_a_deadlock():
    ab, bc, ca = Pack((0,), 0, 2), Pack((1,), 1, 2), Pack((2,), 0, 3)
    assert runs_through([ca, ab], 3) and not runs_through([ab, bc], 3)


def test_golden_plan():
    """One document needs all four ranks, two a pair each, the rest fills up."""
    lengths = [5, 90, 40, 6, 35, 7, 8, 4]  # a share is 48.75
    packs = plan(lengths, lengths, Ranks(1, 4, 25, 1, dynamic=True))
    assert packs == [
        Pack((1, 7), 0, 4),  # 22.5 each, and in the end 1: on rank 3 alone it would be 51
        Pack((2,), 0, 2),  # 42.5
        Pack((4,), 2, 2),  # 40
        Pack((3,), 0, 1),  # 48.5
        Pack((0,), 1, 1),  # 47.5
        Pack((6,), 2, 1),  # 48
        Pack((5,), 3, 1),  # 47
    ]
    fixed = plan([50] * 3, [50] * 3, Ranks(2, 2, 25, 1))
    assert fixed == [Pack((0,), 0, 2), Pack((2,), 0, 2), Pack((1,), 2, 2), Pack((), 2, 2)]


def test_few_documents_are_promoted():
    """Three equal ones on four ranks: each alone would leave a rank idle, on more none is."""
    ranks = Ranks(1, 4, 100, 1, dynamic=True)
    load = shares(plan([90] * 3, [90] * 3, ranks), [90] * 3, ranks)
    assert load == pytest.approx(67.5, rel=0.02)
    assert {pack.size for pack in plan([90] * 4, [90] * 4, ranks)} == {1}
    assert {pack.size for pack in plan([90], [90], ranks)} == {4}


def test_none_is_promoted_where_others_end_later_anyway():
    """Three documents need a whole replica each; beside the one that has two there is time enough."""
    lengths = [100, 100, 100, 30, 30]
    packs = plan(lengths, lengths, Ranks(2, 2, 50, 1, dynamic=True))
    assert packs[-2:] == [Pack((3,), 2, 1), Pack((4,), 3, 1)]


@pytest.mark.parametrize("dp, cp", [(1, 4), (1, 8), (2, 4)])
def test_long_tails_are_balanced(dp, cp):
    """The busiest rank has little more than the mean, or than what a single document makes it do."""
    worst = []
    lengths = draw_lengths(64 * 50, 131072)
    for batch in np.split(lengths, 50):
        ranks, costs = Ranks(dp, cp, 131072 // cp, 2, dynamic=True), costs_of(batch)
        load = shares(plan(batch, costs, ranks), costs, ranks)
        assert load.sum() == pytest.approx(sum(costs))
        worst.append(load.max() / max(load.mean(), max(costs) / cp))
    assert np.mean(worst) < 1.02 and max(worst) < 1.1, (np.mean(worst), max(worst))


def test_too_long_a_document():
    with pytest.raises(ValueError, match="a document of 33 tokens is too long .* 4 x .*-rank 8"):
        plan([3, 33], [3, 33], Ranks(1, 4, 8, 2, dynamic=True))


# Layouts, end to end


COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 --lr 2e-3 --min-lr 1e-3 "
    "--eval-iters 1 --device cpu --run-name test --split 8,1 "
    "--make-vocab-size-divisible-by 4 --tokenizer-type ByteTokenizer --adam-eps 1e-6 --hidden-dropout 0.1 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --num-query-groups 2 "
    "--variable-seq-lengths"
)
DYNAMIC = "--dynamic-context-parallel"
FIVE, THREE = "--global-batch-size 11 --train-iters 5", "--global-batch-size 7 --train-iters 3"
LAYOUTS = {
    "dp2": (2, ""),
    "cp2": (2, "--cp 2"),
    "cp4": (4, "--cp 4"),
    "cp2 dynamic": (2, f"--cp 2 {DYNAMIC}"),
    "cp4 dynamic": (4, f"--cp 4 {DYNAMIC}"),
    "cp4 dynamic, more room": (4, f"--cp 4 {DYNAMIC} --max-seqlen-per-dp-cp-rank 40"),
    "cp4 dynamic allgather, more room": (
        4,
        f"--cp 4 {DYNAMIC} --cp-comm-type allgather --max-seqlen-per-dp-cp-rank 40",
    ),
    "cp2 dynamic a2a": (2, f"--cp 2 {DYNAMIC} --cp-comm-type a2a"),
    "cp2 dp2 z2": (4, "--cp 2 --dp 2 --data-parallel-sharding-strategy optim_grads --ddp-bucket-size 4000"),
    "cp2 dp2 dynamic": (4, f"--cp 2 --dp 2 {DYNAMIC}"),
    "cp2 dp2 dynamic z1 ov": (
        4,
        f"--cp 2 --dp 2 {DYNAMIC} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 4000",
    ),
    "tp2 cp2 sp dynamic": (4, f"--tp 2 --sequence-parallel --cp 2 {DYNAMIC}"),
}


FAST = ("cp4 dynamic allgather, more room", "cp2 dynamic a2a", "cp2 dp2 z2", "cp2 dp2 dynamic z1 ov")
FAST += ("tp2 cp2 sp dynamic",)


@pytest.fixture(scope="module")
def documents(tmp_path_factory, full) -> Task:
    """Lines, and some lines as one: documents of 0 to some hundred bytes."""
    prefix = str(tmp_path_factory.mktemp("data") / "documents")
    texts = [invented_text(6000, seed).split(b"\n") for seed in range(8)]
    pieces = [piece for text in texts for piece in (*text[:30], *map(b" ".join, zip(*[iter(text)] * 5)), b"")]
    write(prefix, [np.append(np.frombuffer(piece, np.uint8), 256).astype(np.uint16) for piece in pieces])
    return Task(prefix, FIVE if full else THREE)


def arguments(documents: Task, *flags: str) -> list[str]:
    return " ".join((COMMON, documents.steps, "--data-path", documents.prefix, *flags)).split()


def train_on_a_rank(world: World, argv: list[str], folder: str, sample: bool = False) -> dict:
    """All steps: loss, norm and speed of each, held-out loss, and the sizes of the groups; no picture."""
    plots.plot_loss = lambda *_: None
    ending.show_sample = ending.show_sample if sample else lambda *_: None
    run = set_up(world, argv, folder)
    batch, steps = run.config.data.global_batch_size, run.config.run.train_iters
    sizes = {pack.size for i in range(steps) for pack in run.data.loaders[0].plan(batch * i, batch)}
    code = train.train(run)
    for loader in run.data.loaders[:2]:
        loader.close()
    run.log.close()
    return {"code": code, "sizes": sorted(sizes)}


def outcome(folder: Path) -> tuple[list[dict], list[dict]]:
    """What a run has logged of its steps and evaluations."""
    return tuple(
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "evals.jsonl")
    )


@pytest.fixture(scope="module")
def alone(documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert run_spmd(train_on_a_rank, 1, arguments(documents), str(folder))[0] == {"code": 0, "sizes": [1]}
    return outcome(folder)


@pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_every_layout_trains_alike_on_documents(layout, alone, documents, full, tmp_path):
    world, flags = LAYOUTS[layout]
    ranks = run_spmd(train_on_a_rank, world, arguments(documents, flags), str(tmp_path), timeout=150)
    (steps, evals), (expected, expected_evals) = outcome(tmp_path), alone
    for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5)):
        ours, theirs = ([step[key] for step in side] for side in (steps, expected))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    assert not full or expected[-1]["lm_loss"] < expected[0]["lm_loss"] - 0.1
    for ours, theirs in zip(evals, expected_evals, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
    for ours, theirs in zip(steps, expected, strict=True):  # tokens are those of the documents
        tokens = [side["tokens_per_s"] * side["step_time_ms"] for side in (ours, theirs)]
        assert tokens[0] == pytest.approx(tokens[1]) and ours["tokens_per_s"] > 0
    cp = int(flags.split("--cp ")[1].split()[0]) if "--cp" in flags else 1
    few = [1, 2, 4][: cp.bit_length()]
    assert ranks[0]["sizes"] == (few if DYNAMIC in flags else [cp])


def test_attention_dropout_is_of_documents_not_of_packs(documents, tmp_path):
    """Two replicas pack the same documents in another way: losses are alike nevertheless."""
    dropout = "--attention-dropout 0.3 --attention-backend unfused --train-iters 2"
    found = []
    for dp in (1, 2):
        folder = tmp_path / str(dp)
        folder.mkdir()
        argv = arguments(documents, dropout, f"--dp {dp}")
        run_spmd(train_on_a_rank, dp, argv, str(folder), timeout=150)
        found.append([step["lm_loss"] for step in outcome(folder)[0]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_goes_on_in_another_layout(alone, documents, tmp_path):
    """Two steps dynamic on four ranks, the others on two replicas: nothing twice, nothing lost."""
    for world, flags in ((4, f"--cp 4 {DYNAMIC} --exit-interval 2"), (2, "--dp 2")):
        run_spmd(train_on_a_rank, world, arguments(documents, flags), str(tmp_path), True, timeout=150)
    (steps, evals), (expected, expected_evals) = outcome(tmp_path), alone
    samples = [step["consumed_samples"] for step in steps]
    assert samples == [step["consumed_samples"] for step in expected] and len(samples) >= 3
    ours, theirs = ([step["lm_loss"] for step in side] for side in (steps, expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert evals[-1]["lm_loss"] == pytest.approx(expected_evals[-1]["lm_loss"], rel=1e-6)
