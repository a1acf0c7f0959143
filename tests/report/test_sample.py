"""The sample at the end of a run, and the prompt of the command that continues it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from nanomegatron.config.sampling import DEFAULT
from nanomegatron.data.tokenizer import ByteTokenizer
from nanomegatron.report import generate as run_sample


def test_a_run_ends_in_three_lines_of_text(monkeypatch):
    """From a whole line of held-out text: a sample of a data set begins amid one."""
    text = b"f of a line\n\ndef whole(line):\n    return"
    said, asked, chosen = [], [], []
    log = SimpleNamespace(line=said.append, attempt=lambda *_, **__: nullcontext())
    mesh = SimpleNamespace(world=None, device=None, tp=Size(1), pp=Size(1), etp_ep=Size(1))
    monkeypatch.setattr(run_sample.comm, "any_rank", lambda flag, *_: flag)

    def thirty_lines(model, prompts, _, sampling):
        chosen.append(sampling)
        asked.extend(bytes(ids).decode() for ids in prompts)
        return [[*prompts[0], *b"\n\n    a\n    b\n" * 15]]

    monkeypatch.setattr(run_sample, "generate", thirty_lines)
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=64))
    prompt = run_sample.show_sample(model, ByteTokenizer(), [np.frombuffer(text, np.uint8)] * 3, mesh, log)
    assert prompt == "def whole(" and asked == [prompt]
    assert said == ["sample  def whole(\n            a\n            b"]
    assert chosen == [DEFAULT._replace(stops=frozenset([ByteTokenizer().eod]))]


@pytest.mark.parametrize(
    "text, prompt",
    [
        ("x = 1\n\n    class Node(Base):\n        def f(self):\n", "class Node("),
        ("of a line\nOne two three four five six seven eight\nnine", "One two three four five six"),
        ("class struggle was\nnever over", "never over"),
        ("1 22 333", "1 22 333"),
        ("", ""),
    ],
)
def test_a_prompt_is_how_the_data_begin(text, prompt):
    """A function or class of Python wherever there is one, of the samples that are looked at."""
    samples = [np.frombuffer(piece.encode(), np.uint8) for piece in (text, text)]
    assert run_sample.prompts_of(ByteTokenizer(), samples, 99) == [prompt] * bool(prompt)
    code = np.frombuffer(b"def later(x):\n    pass", np.uint8)
    expected = prompt if prompt.startswith("class") else "def later("
    assert run_sample.prompts_of(ByteTokenizer(), [samples[0], code], 99) == [expected]


class Size(NamedTuple):
    """An axis of a mesh, of which only the size counts."""

    size: int
