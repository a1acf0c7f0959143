"""Settings taken from another run: from its config.toml, and from a checkpoint that --load names."""

import json
from pathlib import Path

import pytest

from nanomegatron.config.cli import build_config, parse, to_toml

MODEL = dict(num_layers=3, hidden_size=48, num_attention_heads=6, sequence_parallel=True)
RUN = dict(
    nproc=4, run_name="old", seed=7, train_iters=55, eval_iters=3, log_interval=1, metrics_jsonl="all.jsonl"
)
PARALLEL = dict(tensor_model_parallel_size=2, data_parallel_size=2)
TRAINING = dict(lr=2e-3, optimizer_cpu_offload=True, data_path=("old_text",), micro_batch_size=4, bf16=True)
OLD = build_config(
    MODEL | RUN | PARALLEL | TRAINING | dict(save="runs/old/ckpt", tokenizer_type="ByteTokenizer")
)


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """The folder of a run with a checkpoint, without its weights."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/old")
    (folder / "ckpt/iter_0000055").mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(OLD))
    (folder / "ckpt/latest_checkpointed_iteration.txt").write_text("55\n")
    (folder / "ckpt/iter_0000055/manifest.json").write_text(json.dumps({"config": to_toml(OLD)}))
    return folder


@pytest.mark.parametrize("in_a_run", (True, False))
def test_a_config_of_a_run_leaves_that_run_alone(old, in_a_run):
    """Without status.json the same file is the user's own, who may name the run in it."""
    if in_a_run:
        (old / "status.json").write_text("{}")
    parsed = parse(["--config", str(old / "config.toml"), "--lr", "1e-3"])
    config = parsed.config
    assert parsed.errors == () and config.optimizer.lr == 1e-3
    assert (config.model, config.parallel.tensor_model_parallel_size) == (OLD.model, 2)
    own = (config.run.run_name, config.checkpoint.save, config.run.nproc, config.run.metrics_jsonl)
    assert own == ((None, None, 1, None) if in_a_run else ("old", "runs/old/ckpt", 4, "all.jsonl"))
    assert ("taken without run-name, save, nproc" in "".join(parsed.notes)) == in_a_run


def test_a_checkpoint_knows_its_model_and_data(old):
    """Not its layout, its records, or what only made it faster; flags are set above it."""
    parsed = parse(["--load", str(old / "ckpt"), "--lr", "1e-3"])
    config = parsed.config
    assert parsed.errors == () and parsed.preset == "old" and config.optimizer.lr == 1e-3
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (3, 48, 6)
    assert config.data.data_path == ("old_text",) and config.data.tokenizer_type == "ByteTokenizer"
    assert (config.run.seed, config.run.train_iters, config.run.eval_iters) == (7, 55, 3)
    assert config.precision.bf16 and not config.optimizer.optimizer_cpu_offload
    assert not config.model.sequence_parallel and config.parallel.tensor_model_parallel_size == 1
    assert (config.run.nproc, config.run.run_name, config.run.log_interval) == (1, None, 10)
    assert any(f"are those of --load {old}/ckpt" in note for note in parsed.notes)


def test_a_model_on_the_command_line_comes_first(old):
    config = parse(f"--load {old}/ckpt --num-layers 2 --hidden-size 8 --num-attention-heads 2".split()).config
    assert (config.model.num_layers, config.data.data_path, config.run.seed) == (2, (), 1234)


def test_a_folder_without_a_checkpoint_gives_the_default(old):
    (old / "ckpt/iter_0000055/manifest.json").write_text("{}")
    assert parse(["--load", str(old / "ckpt")]).preset == "tiny-cpu"
