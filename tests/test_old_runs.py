"""What version 0.1 has written still works: its configuration file, and a run of it that resumes.

goldens/run_0.1 was written by 0.1: `python train.py --config old.toml --run-name old --exit-interval 4`. Its
checkpoint, settings, status and metrics are kept; its manifest was written again in today's format, which
alone is read. (Other checkpoints: checkpoint/test_manifest.py.)
"""

import json
import shutil
from pathlib import Path

import pytest

import train
from nanomegatron.config.cli import parse

RUN = Path(__file__).parent / "goldens" / "run_0.1"
NEXT = {5: (3.238372802734375, 0.8860118389129639), 6: (3.208245038986206, 0.8419179916381836)}  # by 0.1


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A copy of it, where we are."""
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs/old"


def test_a_run_goes_on_as_it_would_have(folder, capsys):
    assert train.main("--config old.toml --run-name old".split()) == 0, capsys.readouterr()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps[4:]:
        loss, norm = NEXT[step["iteration"]]
        assert step["lm_loss"] == pytest.approx(loss, rel=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert "resumed" in capsys.readouterr().out


def test_the_settings_that_it_left_are_a_configuration(folder):
    parsed = parse(["--config", str(folder / "config.toml")])
    assert not parsed.errors and parsed.config.model.hidden_size == 8
    assert parsed.config.optimizer.lr == 1e-2
    assert parsed.config.run.run_name is None  # the name of the old run is not taken
