"""The cases of benchmarks/kernels.py, tiny and on a CPU: torch's ways give what is expected."""

import pytest
import torch

from benchmarks import kernels_table
from benchmarks.kernels import error
from benchmarks.kernels_cases import Sizes, cases

TINY = Sizes(
    tokens=128,
    hidden=128,
    ffn=256,
    heads=4,
    groups=2,
    head=16,
    vocab=96,
    scores=((2, 32), (1, 64)),
    experts=4,
    elements=1000,
    device="cpu",
)
NAMES = [case.name for case in cases(TINY)]


def found(name: str):
    return next(case for case in cases(TINY) if case.name == name)


def test_names_differ():
    assert len(set(NAMES)) == len(NAMES)
    for name in [*kernels_table.SHARES, *kernels_table.FACTORS]:
        assert any(case.startswith(name) for case in NAMES), name


@pytest.mark.parametrize("name", NAMES)
def test_peers_do_the_same(name):
    """Also when they run again; what has no kernel here is the reference."""
    case = found(name)
    expected, exact = case.expected(), name.startswith("fp8")
    for way in ("kernel", "torch", "torch bf16", "megatron"):
        if way in case.ways:
            run = case.ways[way]()
            off = error(case, way, run, expected)
            assert off <= (0 if exact else 1 / 4 if "to fp8" in name else 0.03), (way, off)
            for _ in range(40):
                results = run()
            assert all(t.float().isfinite().all() for t in results)


def test_table_and_gates():
    ways = {"kernel": (10.0, 0.8), "compile": (15.0, 0.5), "liger": (30.0, 0.3)}
    row = dict(case="rms norm bwd", floor_bytes=1)
    row["ways"] = {n: dict(us=us, gb_per_s=1.0, share=s, error=0.0) for n, (us, s) in ways.items()}
    row["ways"]["torch"] = dict(failed="ImportError")
    result = dict(device="x", torch="y", copy_bytes_per_s=1e12, rows=[row])
    assert "| rms norm bwd | kernel | 10.0 | 1 | 80.0 % | 0.0e+00 | 1.50 (compile) |" in kernels_table.table(
        result
    )
    (line,) = kernels_table.gates(result["rows"])
    assert "gate 75 met | goal 85 MISSED | 1.50 x compile, 2.0 MISSED | 1.50 x the best other" in line


@pytest.mark.parametrize("floor, count", [(1, 16), (200 * 2**20, 3), (2**30, 1)])
def test_copies_take_turns(floor, count):
    from benchmarks.kernels_common import in_turns

    seen = []
    run = in_turns(floor, lambda x: lambda: (seen.append(x.data_ptr()), x)[1:], lambda: (torch.ones(9),))
    for _ in range(2 * count):
        run()
    assert len(set(seen)) == count and seen[:count] == seen[count:]
