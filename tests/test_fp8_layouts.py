"""FP8 under every layout: to the bit where the order of additions is one process's, near it elsewhere."""

import numpy as np
import pytest

from nanomegatron.fp8 import RECIPES
from tests.spmd import run_spmd
from tests.test_layouts import alone, arguments, compare, flags_of, sources, train_on_a_rank
from tests.test_layouts_resume import resumed

__all__ = ["alone", "sources"]  # fixtures
DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max"


def fp8(recipe: str) -> str:
    """The flags; blocks of 128 need sizes that the other models do not have."""
    flags = "--bf16 --fp8-format hybrid " + (DELAYED if recipe == "delayed" else f"--fp8-recipe {recipe}")
    if recipe == "blockwise":
        flags += " --hidden-size 128 --ffn-hidden-size 256 --num-query-groups 4 --seq-length 128"
    return flags


def losses(run: dict, key: str = "lm_loss") -> list[float]:
    return [step[key] for step in run["steps"]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_bf16_does(recipe, alone):
    """Five steps: every loss within 2 % of bf16's."""
    sizes = fp8(recipe).partition("blockwise")[2]
    found, expected = alone("llama", fp8(recipe)), alone("llama", "--bf16" + sizes)
    np.testing.assert_allclose(losses(found), losses(expected), rtol=2e-2)
    assert losses(found) != losses(expected), "it is not bf16"
    assert losses(found)[-1] < losses(found)[0] - 0.1


@pytest.mark.parametrize("layout", ["pp2zb", "pp2zbv", "pp2v2", "rc", "rs"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_schedules_and_recomputation_change_no_bit(recipe, layout, alone, sources, tmp_path):
    size, flags = flags_of(layout)
    argv = arguments(sources, "llama", flags, fp8(recipe))
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    assert losses(ranks[0]) == losses(alone("llama", fp8(recipe)))


@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "dp2z1", "tp2dp2z2spce", "cp2", "tp2cp2mx"])
@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_layouts_stay_near_one_process(recipe, layout, alone, sources, tmp_path):
    """What is added in another order rounds to other numbers of 3 bits: losses to 1 %, gradients to 15 %."""
    size, flags = flags_of(layout)
    argv = arguments(sources, "llama", flags, fp8(recipe))
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    expected = alone("llama", fp8(recipe))
    np.testing.assert_allclose(losses(ranks[0]), losses(expected), rtol=1e-2)
    assert all(rank["alike"] for rank in ranks)
    compare([piece for rank in ranks for piece in rank["gradients"]], expected["gradients"], 0.15)


BF16_WGRAD = "--no-fp8-wgrad"
EXACT = [  # biases, LayerNorm, dropout and tied embeddings; bf16 parts; stages without a layer in FP8
    ("gpt", "delayed", "pp2zbvrs", ""),
    ("gpt", "tensorwise", "pp2zbrs", BF16_WGRAD),
    ("gpt", "rowwise", "rs", BF16_WGRAD),
    ("qwen", "delayed", "pp2v2rc", BF16_WGRAD),
    ("qwen", "blockwise", "pp2zbvrs", ""),
    ("qwen", "tensorwise", "pp4", "--first-last-layers-bf16"),
]


@pytest.mark.parametrize("model, recipe, layout, more", EXACT)
def test_other_models_to_the_bit(model, recipe, layout, more, alone, sources, tmp_path):
    size, flags = flags_of(layout)
    settings = f"{fp8(recipe)} {more}"
    argv = arguments(sources, model, flags, settings)
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    assert losses(ranks[0]) == losses(alone(model, settings))


@pytest.mark.parametrize(
    "recipe, more", [("delayed", ""), ("tensorwise", BF16_WGRAD), ("rowwise", BF16_WGRAD)]
)
def test_other_models_stay_near_one_process(recipe, more, alone, sources, tmp_path):
    size, flags = flags_of("tp2pp2zbsprs")
    settings = f"{fp8(recipe)} {more}"
    argv = arguments(sources, "gpt", flags, settings)
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    expected = alone("gpt", settings)
    np.testing.assert_allclose(losses(ranks[0]), losses(expected), rtol=1e-2)
    assert all(rank["alike"] for rank in ranks)
    gradients = [piece for rank in ranks for piece in rank["gradients"]]
    keys = {name for name, *_ in gradients if name.endswith("linear_qkv.k.bias")}  # rounding
    compare(gradients, expected["gradients"], 0.15, keys)


@pytest.mark.parametrize("first, second", [("one", "one"), ("pp2zbv", "one"), ("one", "pp2")])
def test_delayed_scales_are_saved_and_taken_up_by_another_pipeline(first, second, sources, tmp_path):
    def run(layout: str, save: str, iterations: int) -> list[dict]:
        size, flags = (1, "") if layout == "one" else flags_of(layout)
        argv = arguments(sources, "llama", flags, "--eval-iters 2", fp8("delayed"))
        folder = tmp_path / f"{save} {iterations}"
        folder.mkdir()
        return run_spmd(resumed, size, argv, str(folder), str(tmp_path / save), iterations, timeout=120)[0]

    straight = run("one", "straight", 5)
    assert [*run(first, "cut", 3)[:-1], *run(second, "cut", 5)[:-1]] == straight[:-1]
