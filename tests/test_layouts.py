"""Every layout trains the model that one process trains: the guard of all parallel code.

A layout is a word, `tp2dp2z1sp`: `layouts.py` explains it. One process and the layout take a few
AdamW steps from the same seed (`training.py`); some results are also those of before (`golden.py`).
"""

import re
from pathlib import Path

import numpy as np
import pytest

from nanomegatron import fast
from nanomegatron.mesh import World
from tests import golden
from tests.layouts import DRAWN, ENTERED, FIVE, FIVE_STEPS, NAMED, UNCUT, flags_of
from tests.spmd import run_spmd
from tests.training import (
    arguments,
    check_entered,
    compare,
    set_up,
    train_on_a_rank,
    weights_of,
    without_gradient,
)

KINDS = ("gradients", "weights", "last weights")
LAYOUTS = [(*case, False) for case in NAMED] + [(*case, True) for case in FIVE]


@pytest.mark.parametrize(
    "layout, model, five",
    [pytest.param(*case, id=f"{case[0]}-{case[1]}" + "-five" * case[2]) for case in LAYOUTS]
    + [pytest.param(*case, False, id=f"{case[0]}-{case[1]}", marks=pytest.mark.full) for case in DRAWN],
)
def test_layout_trains_like_one_process(layout, model, five, alone, sources, full, tmp_path):
    """fp32: only the order of additions differs. With five steps the model must have learnt, too."""
    size, flags = flags_of(layout)
    more = [FIVE_STEPS] if five else []
    expected = alone(model, *more)
    argv = arguments(sources, model, flags, *more)
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5)):
        ours, theirs = ([step[key] for step in run["steps"]] for run in (ranks[0], expected))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    if five or full:
        assert expected["steps"][-1]["lm_loss"] < expected["steps"][0]["lm_loss"] - 0.1
    assert all(rank["alike"] for rank in ranks)
    nothing = without_gradient([piece for rank in ranks for piece in rank["gradients"]])
    for kind in KINDS:
        compare([piece for rank in ranks for piece in rank[kind]], expected[kind], 1e-5, nothing)
    if not nothing:  # rounding may be zero, or not
        assert ranks[0]["steps"][0]["num_zeros"] == expected["steps"][0]["num_zeros"]
    if not five and not full:
        golden.check(layout, model, "", ranks)
        check_entered(layout, model, "", ranks)


def test_documents_count_these_layouts():
    fast_tier, full_tier = len(set(NAMED)), len({*NAMED, *DRAWN})
    pages = [Path(__file__).parents[1] / name for name in ("README.md", "docs/testing.md")]
    readme, testing = (" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    assert f"`make test` trains {fast_tier} layouts" in readme
    assert f"`make test-full` {full_tier}." in readme
    assert f"with each of {fast_tier} layouts" in testing
    assert f"takes five with {full_tier}, every one" in testing
    assert re.findall(r"\d+ layouts", readme) == [f"{fast_tier} layouts"]


BF16 = [
    ("tp2spov", "llama"),
    ("pp2zbvdp2z1ovbk", "llama"),
    ("tp2dp2z1ovbkcofp", "llama"),
    ("dp2z1cofp", "gpt"),
    ("pp2cofp", "llama"),
    ("cp2dp2z1mx", "window"),
    *(
        pytest.param(layout, model, marks=pytest.mark.full)
        for layout, model in (
            ("tp2dp2z1spovce", "gpt"),
            ("dp2z2rc", "qwen"),
            ("dp4z1bk", "gpt"),
            ("tp2pp2v2spovco", "gpt"),
            ("cp4", "documents"),
            ("tp2cp2a2aspov", "llama"),
        )
    ),
]


@pytest.mark.parametrize("layout, model", BF16)
def test_bf16_stays_near_one_process(layout, model, alone, sources, tmp_path):
    """bf16 rounds what is sent, 8 bits at a time: losses to 0.3 %, norms to 2 %, gradients to 5 %."""
    size, flags = flags_of(layout)
    expected = alone(model, "--bf16")
    argv = arguments(sources, model, flags, "--bf16")
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    for key, tolerance in (("lm_loss", 3e-3), ("grad_norm", 2e-2)):
        ours, theirs = ([step[key] for step in run["steps"]] for run in (ranks[0], expected))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    assert all(rank["alike"] for rank in ranks)
    check_entered(layout, model, "bf16", ranks)
    gradients = [piece for rank in ranks for piece in rank["gradients"]]
    keys = {name for name, *_ in gradients if name.endswith("linear_qkv.k.bias")}
    compare(gradients, expected["gradients"], 5e-2, keys)


def test_fp16_overflows_like_one_process(alone, sources, tmp_path):
    """At this scale a weight's gradient is above what fp16 can hold; main_grad is fp32."""
    fp16 = f"--train-iters 3 --fp16 --hysteresis 1 --initial-loss-scale {2**20}"
    expected = alone("llama", fp16)
    size, flags = flags_of("pp2cp2")
    argv = arguments(sources, "llama", flags, fp16)
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    for key, tolerance in (("lm_loss", 1e-4), ("grad_norm", 1e-2)):
        ours, theirs = ([step[key] for step in run["steps"]] for run in (ranks[0], expected))
        assert np.isfinite(theirs).all()
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)


def initial_weights(world: World, argv: list[str], folder: str) -> list[tuple]:
    return weights_of(set_up(world, argv, folder))


# Each layout and each model at least once in the fast tier.
STARTS = [("tp2", "gpt"), ("tp4sp", "llama"), ("tp2dp2z1", "qwen"), ("dp4z2", "gpt"), ("pp2v2", "llama")]
STARTS += [("tp2pp2zbv", "qwen")]
MORE_STARTS = [(layout, model) for layout, _ in STARTS for model in UNCUT if (layout, model) not in STARTS]


@pytest.mark.parametrize(
    "layout, model", STARTS + [pytest.param(*case, marks=pytest.mark.full) for case in MORE_STARTS]
)
def test_initial_weights_of_any_layout_are_one_processs(layout, model, sources, tmp_path):
    """To the bit; and what must differ does: slices of different ranks, layers, and parts."""
    size, flags = flags_of(layout)
    whole = run_spmd(initial_weights, 1, arguments(sources, model), str(tmp_path))[0]
    ranks = run_spmd(initial_weights, size, arguments(sources, model, flags), str(tmp_path))
    compare([piece for rank in ranks for piece in rank], whole, 0.0)
    drawn = {}
    for name, offset, _, _, values in (piece for rank in ranks for piece in rank):
        if values.numel() and values.std() > 0:
            same_place = drawn.setdefault(values.sum().item(), (name, offset))
            assert same_place == (name, offset), f"{name} {offset} has the values of {same_place}"
    assert len({name for name, _ in drawn.values()}) == sum(v.std() > 0 for *_, v in whole)


def test_fast_files_are_entered_by_several():
    """Three layouts each in the fast tier; those that need GPUs by tests that imitate one."""
    files = {path.stem for path in Path(fast.__file__).parent.glob("*.py")} - {"__init__"}
    graphs = {"cuda_graphs", "layer_graphs", "decode"}  # fast/test_cuda_graphs.py, fast/test_decode.py
    memory = {"peer_memory", "dp_peer"}  # test_order.py; fast/test_ring.py, _tp_overlap.py, _dp_peer.py
    assert files - graphs - memory == ENTERED.keys()
    assert min(len(set(cases)) for cases in ENTERED.values()) >= 3
    assert sum(layout.endswith("fp") for layout, _ in NAMED) >= 40
    named = {(layout, model) for cases in ENTERED.values() for layout, model, kind in cases if not kind}
    assert named <= set(NAMED)


def test_goldens_are_of_layouts_that_are_run():
    assert {(layout, model) for layout, model, recipe in golden.LAYOUTS if not recipe} <= set(NAMED)
    assert len(golden.LAYOUTS) == 24
