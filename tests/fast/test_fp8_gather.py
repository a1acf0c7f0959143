"""FP8 weights cast by the optimizer and gathered as bytes: the run, to the bit, that casts at first use."""

from dataclasses import replace

import pytest
import torch

import train
from nanomegatron import optim
from nanomegatron.batch import Batch
from nanomegatron.build import quantize_layers
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig, PrecisionConfig
from nanomegatron.dp import GatheredParams, ParamAndGradBuckets
from nanomegatron.fast import fp8_gather
from nanomegatron.fast.fp8_gather import CastUpdates, WeightCasts, casts_weights
from nanomegatron.fp8 import RECIPES, Recipe, Rowwise, Scales, recipe_of
from nanomegatron.mesh import World
from nanomegatron.model import GPTModel
from nanomegatron.ops import adamw as ops_adamw
from nanomegatron.optim import Optimizer, ShardUpdates
from nanomegatron.param import Init
from nanomegatron.pick_fast_paths import paths_for
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory, memory_of_ranks
from tests import cuda_on_cpu
from tests.checkpoints import ALONE
from tests.layouts import flags_of, fp8
from tests.plan.test_memory import LLAMA3_8B
from tests.plan.test_memory import config as planned
from tests.spmd import run_spmd
from tests.toy import CONFIG
from tests.training import alike, arguments, numbers_of, save_checkpoint, set_up, weights_of

GATHER, SHORT = "--fp8-param-gather", "--fast-paths --global-batch-size 4"


def steps(run, until: int, bad: int = 0) -> list[dict]:
    """Numbers of each step; the optimizer gets NaN as the loss of number `bad`."""
    read, update = [], run.optimizer.step
    while run.progress.iteration < until:
        skips = run.progress.iteration + 1 == bad
        run.optimizer.step = lambda loss, *more, nan=skips: update(loss * (torch.nan if nan else 1), *more)
        read.append(numbers_of(train.train_step(run)))
        run.progress.iteration += 1
    run.optimizer.step = update
    return [{name: step.get(name) for name in ("lm_loss", "grad_norm", "good", "fp8")} for step in read]


def cast_by_optimizer(buckets: ParamAndGradBuckets) -> list:
    return [bucket for bucket in buckets.all if isinstance(bucket.gathered, WeightCasts)]


def trained(world: World, argv: list[str], folder: str, ours: bool, first: bool = False) -> dict:
    """Four steps, the second skipped. ours: casts by the optimizer; first: before the first step too."""
    if not ours:
        train.paths_for = lambda config, mesh: replace(paths_for(config, mesh), gathered=None)
    run = set_up(world, argv, folder)
    if first:
        run.optimizer.cast_weights()
    found = steps(run, 4, bad=2)
    sent = run.mesh.observer.counts["dp_cp", "all_gather", "bytes"]
    sharded = run.buckets.all[0].shard_axis.size > 1
    casting = cast_by_optimizer(run.buckets)
    assert bool(casting) == ours
    assert sent == sharded * sum(b.size * (1 if b in casting else 2) for b in run.buckets.all)
    for bucket in casting:  # nothing is there to be read unnoticed
        assert bucket.gathered.param_data is None and all(param.isnan().all() for param in bucket.params)
    assert [step["good"] for step in found] == [1, 0, 1, 1]
    run.buckets.wait_params()
    scales = run.model.scales
    return {
        "steps": found,
        "weights": weights_of(run),
        "scale": scales.scale[1::3] if scales.recipe.quantizer_class.keeps_history else None,
        "alike": alike(run),
    }


def same(ours: list[dict], theirs: list[dict]) -> None:
    """To the bit, on every rank."""
    for a, b in zip(ours, theirs, strict=True):
        assert a["steps"] == b["steps"] and a["alike"] and b["alike"]
        for x, y in zip(a["weights"], b["weights"], strict=True):
            assert x[:4] == y[:4] and torch.equal(x[4], y[4]), x[0]
        assert a["scale"] is None or torch.equal(a["scale"], b["scale"])


UNSHARDED = [("delayed", layout, "") for layout in ("", "dp2bk", "tp2rc", "pp2zbv", "co", "tp2dp2sp")]
SHARDED = [("dp2z1", ""), ("dp4z1ovbk", ""), ("dp2z2bk", ""), ("tp2dp2z1sp", ""), ("tp2dp2z2ovbk", "")]
SHARDED += [("pp2v2dp2z1ovbk", ""), ("dp2z1bkco", ""), ("dp2z1", "--first")]
EVERY = UNSHARDED + [
    (recipe, layout, f"{GATHER} {more}".strip())
    for recipe in ("delayed", "tensorwise")
    for layout, more in SHARDED
]
FAST = UNSHARDED[1:5:3] + [
    ("delayed", "dp2z1", f"{GATHER} --first"),
    ("delayed", "tp2dp2z2ovbk", GATHER),
    ("delayed", "dp2z1bkco", GATHER),
    ("tensorwise", "dp2z2bk", GATHER),
    ("tensorwise", "pp2v2dp2z1ovbk", GATHER),
]


@pytest.mark.parametrize(
    "recipe, layout, more", [c if c in FAST else pytest.param(*c, marks=pytest.mark.full) for c in EVERY]
)
def test_it_is_the_run_that_casts_at_first_use(recipe, layout, more, sources, tmp_path):
    size, flags = flags_of(layout or "tp1")
    first, more = "--first" in more, more.replace("--first", "")
    argv = arguments(sources, "llama", flags, fp8(recipe), more, SHORT, "--train-iters 6"), str(tmp_path)
    same(*(run_spmd(trained, size, *argv, ours, first and ours, timeout=120) for ours in (True, False)))


def saved(world: World, argv: list[str], folder: str, save: str, until: int) -> dict:
    """A run up to `until` that resumes, counts what casts lose, evaluates and is saved."""
    run = set_up(world, [*argv, "--save", save], folder)
    if "--fp8-param-gather" in argv:
        run.optimizer.cast_weights()
    found = steps(run, until)
    train.evaluate(run, lambda: False, "train")
    save_checkpoint(run)
    run.buckets.wait_params()  # the step that a save repeats frees them
    return {"steps": found, "weights": weights_of(run), "scale": None, "alike": alike(run)}


@pytest.mark.parametrize(
    "recipe, first, second",
    [
        ("delayed", "dp2z1bk", "dp2"),
        ("tensorwise", "dp2", "dp2z1ovbk"),
        pytest.param("delayed", "dp2", "dp2z1ovbk", marks=pytest.mark.full),
        pytest.param("delayed", "dp2z1", "dp2z1ov", marks=pytest.mark.full),
        pytest.param("tensorwise", "dp2z1bk", "dp2", marks=pytest.mark.full),
        pytest.param("tensorwise", "dp2z1", "dp2z1ov", marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_to_the_bit_under_another_sharding(recipe, first, second, sources, tmp_path):
    def run(layout: str, save: str, until: int) -> list[dict]:
        size, flags = flags_of(layout)
        more = f"{GATHER * ('z' in layout)} {SHORT} --train-iters 6 --eval-iters 2 --log-fp8-stats 2"
        (folder := tmp_path / f"{save} {until}").mkdir()
        argv = arguments(sources, "llama", flags, fp8(recipe), more), str(folder), str(tmp_path / save)
        return run_spmd(saved, size, *argv, until, timeout=120)

    straight, before, after = run("dp2", "straight", 4), run(first, "cut", 2), run(second, "cut", 4)
    for a, b, whole in zip(before, after, straight, strict=True):
        assert whole["steps"][1]["fp8"] and not whole["steps"][2]["fp8"]
        b["steps"] = a["steps"] + b["steps"]
    same(after, straight)


# One process, where the kernels can be run by the emulator.

MODEL = TransformerConfig(2, 32, 2, swiglu=True, normalization="RMSNorm", disable_bias_linear=True)
RATES = [[0.01 / (n + 1) for n in range(9)]] * 3


def built(recipe: str, ours: bool = True):
    """ours: casts by the optimizer, which are not sharded here, but tensorwise ones too are made as if."""
    model = GPTModel(MODEL, vocab_size=29, max_sequence_length=16, init=Init(dtype=torch.bfloat16))
    recipe = Recipe(RECIPES[recipe])
    scales = Scales(recipe, [*quantize_layers(model, recipe, range(2))], torch.device("cpu"))
    kinds = {True: WeightCasts if ours else GatheredParams, False: GatheredParams}
    gathered = lambda param, shards: kinds[hasattr(param, "fp8")]  # noqa: E731
    buckets = ParamAndGradBuckets(model, ParallelConfig(ddp_bucket_size=5000), ALONE, gathered=gathered)
    updates = CastUpdates(fp8_gather.cast_state) if ours else ShardUpdates()
    return model, scales, buckets, Optimizer(buckets, CONFIG, PrecisionConfig(bf16=True), RATES, updates)


def step_of(model, buckets, batch) -> None:
    buckets.zero_grad_buffer()
    model(Batch(batch[:, :-1], torch.arange(16)), batch[:, 1:]).mean().backward()
    buckets.finish_grad_sync()


def alone(recipe: str, ours: bool) -> list[torch.Tensor]:
    """Weights and norms of four steps, the third of which is skipped."""
    model, scales, buckets, optimizer = built(recipe, ours)
    norms = []
    for i, batch in enumerate(torch.randint(29, (4, 4, 17), generator=torch.Generator().manual_seed(1))):
        step_of(model, buckets, batch)
        scales.end_step()
        norms.append(optimizer.step(torch.tensor(torch.nan if i == 2 else 1.0)).grad_norm)
    buckets.wait_params()
    return [*norms, *(param.detach().float() for param in model.parameters())]


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_the_kernel_casts_as_torch_does(recipe, kernel, monkeypatch):
    if kernel and cuda_on_cpu.cuda_home() is None:
        pytest.skip("no CUDA headers here")
    if kernel:
        cuda_on_cpu.run_here(monkeypatch, ("adamw",), ops_adamw, optim)
    runs = alone(recipe, True), alone(recipe, False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_whoever_comes_too_early_or_too_late_is_told():
    """Old weights are read as NaN, and never written; what was cast for a step ends with the next."""
    model, scales, buckets, optimizer = built("delayed")
    batch = torch.randint(29, (4, 17))
    for _ in range(2):
        step_of(model, buckets, batch)
        scales.end_step()
        optimizer.step(torch.tensor(1.0))
    weight = model.layers[0].mlp.linear_fc1.weight
    assert weight.isnan().all() and weight.shape == (128, 32)
    with pytest.raises(RuntimeError):
        weight.detach().copy_(torch.ones(128, 32))
    buckets.wait_params()
    casting = cast_by_optimizer(buckets)
    main = torch.cat([shard.main for shard in optimizer.shards if shard.bucket in casting]).bfloat16()
    weights = [bucket.gathered.param_data for bucket in reversed(casting)]
    assert torch.equal(torch.cat(weights), main) and weight.isfinite().all()
    step_of(model, buckets, batch)
    assert weight.isnan().all()
    optimizer.step(torch.tensor(1.0))
    scales.end_step()  # in the wrong order
    with pytest.raises(RuntimeError, match="linear_qkv.weight: the optimizer's cast was discarded"):
        step_of(model, buckets, batch)


def test_buckets_become_full_and_are_gathered_in_order():
    """What is read first, the embeddings and with them the norms, is full last and gathered first."""
    _, _, buckets, _ = built("delayed")
    assert [b in cast_by_optimizer(buckets) for b in buckets.all] == [True] * 4 + [False] * 3
    names = [param.spec.name for bucket in reversed(buckets.all) for param in reversed(bucket.params)]
    first = names.index("decoder.layers.0.self_attention.linear_qkv.weight")
    assert all(name.startswith("embedding") for name in names[:2]) and len(names) - first == 8
    assert sorted(names[first:], key=lambda name: name.split(".")[2]) == names[first:]


def test_a_rehearsal_leaves_no_trace():
    model, scales, buckets, optimizer = built("delayed")
    batch = torch.randint(29, (4, 17), generator=torch.Generator().manual_seed(1))
    step_of(model, buckets, batch)
    scales.clear_step()
    assert not scales.amax_history.any()
    optimizer.cast_weights()
    optimizer.cast_weights()
    assert scales.amax_history[0, 1::3].all() and all(
        layer.optimizer_cast for layer in scales.layers.values()
    )
    with pytest.raises(ValueError, match="gather=True"):
        Recipe(Rowwise, gather=True)


@pytest.mark.parametrize(
    "sharding, gather, recipe, kept",
    [
        ("no_shard", False, "delayed", 0),
        ("no_shard", False, "rowwise", 2),
        ("optim", False, "delayed", 2),
        ("optim", True, "delayed", 0),
        ("optim_grads", True, "tensorwise", 0),
    ],
)
def test_fp8_weights_are_two_casts_and_perhaps_16_bits(sharding, gather, recipe, kept):
    run, where = planned(LLAMA3_8B, 8192, 1), (128256, Machine())
    bf16, matrices = memory(run, *where), 32 * (2 * 4096 * 5120 + 3 * 4096 * 14336)
    precision = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe=recipe, fp8_param_gather=gather)
    parallel = ParallelConfig(data_parallel_sharding_strategy=sharding, data_parallel_size=4)
    fp8 = memory(replace(run, precision=precision, parallel=parallel), *where)
    assert bf16["FP8 weights"] == 0 and fp8["FP8 weights"] == 2 * matrices
    assert bf16["weights"] - fp8["weights"] == (2 - kept) * matrices
    sharded = sharding != "no_shard"
    assert casts_weights(recipe_of(precision), sharded) == precision.optimizer_casts(sharded) == (kept == 0)
    part = replace(precision, fp8_recipe="rowwise", fp8_param_gather=False, first_last_layers_bf16=True)
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    ranks = memory_of_ranks(replace(run, precision=part, parallel=parallel), *where)
    assert [rank["FP8 weights"] for rank in ranks] == [2 * matrices * 15 // 32] * 2
