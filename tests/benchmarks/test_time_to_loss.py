"""The benchmark of the time to a loss, tiny: both sides train the same, and the result is what it says."""

import json

import numpy as np
import pytest
import torch

from benchmarks import peers, time_to_loss


@pytest.fixture
def files(tmp_path):
    """Words, of which each decides half of the next; held-out ones beside them."""
    draws = np.random.default_rng(0)
    paths = []
    for name, count in (("train.bin", 4000), ("val.bin", 400)):
        ids = np.zeros(count, np.uint16)
        for i in range(1, count):
            ids[i] = draws.integers(96) if draws.random() < 0.5 else (ids[i - 1] * 5 + 1) % 96
        ids.tofile(tmp_path / name)
        paths += [f"--{'valid' if name == 'val.bin' else 'data'}", str(tmp_path / name)]
    return paths


SMALL = "--small --batch 4 --held 8 --warm 4 --lr-warmup 4 --seed 1 --peer compile".split()


def test_both_sides_train_the_same(files, tmp_path, monkeypatch):
    """Losses of iterations and of evaluations in fp32, with microbatches of their own."""
    monkeypatch.setattr(peers, "compiled", lambda what, *_, **__: what)
    out, again = tmp_path / "1.json", tmp_path / "all.json"
    words = "--iterations 40 --evaluations 4 --micro 2".split()
    code = time_to_loss.main([*SMALL, *files, *words, "--out", str(out), "--flags", "--lr 1e-2"])
    torch.set_deterministic_debug_mode("default")
    case = json.loads(out.read_text())["cases"][0]
    assert code == bool(case["problems"])
    assert case["ours_first_losses"] == pytest.approx(case["peer_first_losses"], abs=1e-5)
    pairs = list(zip(case["peer_curve"], case["ours_curve"]))
    assert [theirs[1] for theirs, _ in pairs] == [14, 24, 34, 40]
    for theirs, mine in pairs:
        assert mine[1] == theirs[1] and mine[2] == pytest.approx(theirs[2], abs=1e-3)
    assert case["peer_curve"][-1][2] < case["peer_curve"][0][2] - 0.1  # the schedule and the update matter
    assert time_to_loss.main(["--join", str(out), "--out", str(again)]) == code
    assert json.loads(again.read_text())["cases"] == [case]


def test_rows_share_a_token(tmp_path):
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "x.bin")
    rows = time_to_loss.Rows(tmp_path / "x.bin", 6)
    assert len(rows) == 3 and rows[1].tolist() == [6, 7, 8, 9, 10, 11, 12]
    with pytest.raises(SystemExit, match="3 rows of 6 tokens; at least 4"):
        time_to_loss.Rows(tmp_path / "x.bin", 6, 4)


def test_the_crossing_is_interpolated():
    curve = [[10.0, 1, 4.0], [20.0, 2, 3.0], [30.0, 3, 3.5], [40.0, 4, 2.0]]
    assert time_to_loss.crossing(curve, 3.25) == (17.5, 20.0)
    assert time_to_loss.crossing(curve, 2.75) == (35.0, 40.0)
    assert time_to_loss.crossing(curve, 4.5) == (10.0, 10.0)
    assert time_to_loss.crossing(curve, 1.9) is None
