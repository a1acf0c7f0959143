"""The tries of attention, tiny: what runs on a CPU computes attention, and what fails is a line."""

import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks import attention_tries


def test_expected_is_attention():
    p = attention_tries.Problem(torch.device("cpu"), torch.float32, True)
    given = [x.permute(1, 2, 0, 3).clone().requires_grad_() for x in p.packed]
    out = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, given, p.dout.permute(1, 2, 0, 3))
    expected = p.expected
    for x, y in zip((out, *grads), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(x.detach().permute(2, 0, 1, 3), y)


@pytest.mark.full
def test_every_group_ends_with_a_result(tmp_path, capfd):
    out = tmp_path / "tries.json"
    assert attention_tries.main(["layouts", "gluon", "fa", "--small", "--out", str(out)]) == 0
    groups = json.loads(out.read_text())["groups"]
    forms = groups["layouts"]["cases"]["heads repeated, backward"]["forms"]
    assert [*forms] == ["ours", "heads repeated"] and max(row["error"] for row in forms.values()) < 1e-5
    assert "failed" in groups["gluon"]["cases"]["gluon turns, forward"]["forms"]["gluon turns"]
    assert not any(group["ended"] for group in groups.values())
    assert "FA3, backward, FA3:" in capfd.readouterr().out
