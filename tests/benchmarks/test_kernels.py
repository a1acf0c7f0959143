"""The benchmark of kernels, tiny and on a CPU: its forms compute the same, and it runs to its end."""

import json
import math

import pytest
import torch

from benchmarks import layers
from benchmarks.forms import alternating
from benchmarks.session import Run, Session, arguments, error, line
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import World

SESSION = Session(arguments("kernels", ["kernels", "--small"], ["kernels"]), World(), ParallelConfig())
CASES = {case.name: case for case in layers.kernels(SESSION)}
FORMS = "ours", "torch", "torch bf16", "megatron"  # those that need no GPU


def test_names_differ():
    names = [case.name for case in layers.kernels(SESSION)]
    assert len(names) == len(CASES) > 30


def test_ours_is_first():
    """Other forms' factors are of it."""
    assert all(next(iter(case.forms)) == "ours" and case.bytes > 0 for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_forms_compute_the_same(name):
    """Also when they run again; what has no kernel here is the reference."""
    case, expected = CASES[name], CASES[name].expected()
    for form in set(FORMS) & case.forms.keys():
        run = case.forms[form]()
        off = error(run, run.once(), expected)
        assert off <= (0 if name.startswith("fp8") else 1 / 4 if "to fp8" in name else 0.03), (form, off)
        for _ in range(40):
            results = run.once()
        assert all(t.float().isfinite().all() for t in results)


def test_errors_are_seen():
    """Of shapes, of a result too few, and NaN."""
    expected, run = (torch.tensor([1.0, -4.0]),), Run(lambda: None)
    assert error(run, torch.tensor([1.0, -3.0]), expected) == 0.25
    assert math.isnan(error(run, torch.tensor([torch.nan, -4.0]), expected))
    doubled = Run(lambda: None, finish=lambda x: (2 * x,), part=lambda x: x[1:])
    assert error(doubled, torch.tensor([-2.0]), expected) == 0
    for wrong in (torch.ones(3), (torch.ones(2), torch.ones(2))):
        with pytest.raises(ValueError):
            error(run, wrong, expected)


@pytest.mark.parametrize("floor, count", [(1, 16), (200 * 2**20, 3), (2**30, 1)])
def test_copies_alternate(floor, count):
    seen = []
    run = alternating(floor, lambda x: lambda: (seen.append(x.data_ptr()), x)[1:], lambda: (torch.ones(9),))
    for _ in range(2 * count):
        run()
    assert len(set(seen)) == count and seen[:count] == seen[count:]


def test_program(tmp_path, capsys):
    """Lines on the console, a JSON file that says the same; what fails is left out."""
    out = tmp_path / "kernels.json"
    flags = "--small --form ours --form torch --form liger --samples 3 --out"
    layers.main(["kernels", "rms norm", "moe permute", *flags.split(), str(out)])
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert list(result["cases"]) == ["rms norm fwd", "rms norm bwd", "moe permute"]
    assert result["device"] == "cpu" and result["ranks"] == 1
    for name, case in result["cases"].items():
        assert case["forms"].keys() - {"liger"} == {"ours", "torch"}
        for form in ("ours", "torch"):
            row = case["forms"][form]
            assert 0 < row["min_ms"] <= row["ms"] <= row["max_ms"] and row["error"] < 0.03
            assert row["gb_per_s"] == pytest.approx(CASES[name].bytes / row["ms"] / 1e6)
        assert printed.count(f"{name}, ours: error ") == 1
    assert "No module named 'liger_kernel'" in result["cases"]["rms norm fwd"]["forms"]["liger"]["failed"]
    assert "rms norm fwd, liger: ModuleNotFoundError" in printed


def test_no_such_case():
    with pytest.raises(SystemExit, match="no case begins with norm; there are rms norm fwd, "):
        layers.main(["kernels", "--small", "norm"])


def test_line():
    """What failed says why."""
    ours = dict(ms=10.0, share=0.81, sent_bytes={"send": 4})
    assert line("rms norm bwd", "ours", ours) == "rms norm bwd, ours: ms 10, share 0.81"
    assert line("rms norm bwd", "torch", dict(failed="ImportError")) == "rms norm bwd, torch: ImportError"
