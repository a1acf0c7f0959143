"""benchmarks/decode.py, with a tiny model on a CPU."""

import json
from importlib.util import find_spec

import pytest

from benchmarks import decode


@pytest.mark.parametrize(
    "forms",
    ["graphs,plain", pytest.param("transformers", marks=pytest.mark.full)],
)
def test_forms(forms, tmp_path, capsys):
    if "transformers" in forms and not find_spec("transformers"):
        pytest.skip("needs transformers")
    out = tmp_path / "decode.json"
    argv = f"--small --forms {forms} --batches 1,3 --prompt 5 --new 6 --repetitions 1 --out {out}"
    assert decode.main(argv.split()) == 0
    assert decode.main([*argv.split(), "--batches", "2", "--forms", forms.split(",")[0]]) == 0
    found = json.loads(out.read_text())
    for form in forms.split(",")[1:]:
        assert [name for name in found[form] if name.isdigit()] == ["1", "3"]
    row = found[forms.split(",")[0]]["2"]
    vocab, ffn = (128, 128) if forms != "transformers" else (96, 128)  # ours is padded
    layer = (64 + 2 * 32 + 64) * 64 + 3 * 64 * ffn + 2 * 64
    assert row["weight_bytes"] == 4 * (2 * layer + 64 + (2 * vocab - 96) * 64)  # without an embedding of 96
    assert row["cache_bytes"] == 2 * (5 + 3) * 2 * 2 * 32 * 4
    assert row["decode_tokens_per_s"] == pytest.approx(2e3 / row["decode_ms"])
    assert row["prefill_tokens_per_s"] == pytest.approx(10e3 / row["prefill_ms"])
