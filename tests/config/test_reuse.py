"""Settings taken from another run: from its config.toml, and from a checkpoint that --load names."""

import json
from pathlib import Path

import pytest

from nanomegatron.config.check import resolve
from nanomegatron.config.cli import build_config, parse, to_toml
from nanomegatron.config.rules import values_of
from nanomegatron.config.run_folder import changed_settings, default_run_name, with_run_name
from nanomegatron.config.settings import Config

MODEL = dict(num_layers=3, hidden_size=48, num_attention_heads=6, sequence_parallel=True)
RUN = dict(
    nproc=4, run_name="old", seed=7, train_iters=55, eval_iters=3, log_interval=1, metrics_jsonl="all.jsonl"
)
PARALLEL = dict(tensor_model_parallel_size=2, data_parallel_size=2)
TRAINING = dict(lr=2e-3, optimizer_cpu_offload=True, data_path=("old_text",), micro_batch_size=4, bf16=True)
OLD = build_config(
    MODEL | RUN | PARALLEL | TRAINING | dict(save="runs/old/ckpt", tokenizer_type="ByteTokenizer")
)


def full_name(config: Config) -> str:
    """The default run name as if every setting had been given."""
    return default_run_name(config, None, values_of(config))


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
    assert own == ((None, None, None, None) if in_a_run else ("old", "runs/old/ckpt", 4, "all.jsonl"))
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
    assert (config.run.nproc, config.run.run_name, config.run.log_interval) == (None, None, 10)
    assert any(f"are those of --load {old}/ckpt" in note for note in parsed.notes)


def test_a_model_on_the_command_line_comes_first(old):
    config = parse(f"--load {old}/ckpt --num-layers 2 --hidden-size 8 --num-attention-heads 2".split()).config
    assert (config.model.num_layers, config.data.data_path, config.run.seed) == (2, (), 1234)


def test_a_part_of_a_shape_lies_over_the_checkpoints(old):
    config = parse(f"--load {old}/ckpt --num-layers 2".split()).config
    assert (config.model.num_layers, config.model.hidden_size, config.run.seed) == (2, 48, 7)
    assert config.data.data_path == ("old_text",)


def test_a_folder_without_a_checkpoint_gives_the_default(old):
    (old / "ckpt/iter_0000055/manifest.json").write_text("{}")
    assert parse(["--load", str(old / "ckpt")]).preset == "tiny-cpu"


@pytest.mark.parametrize(
    "flags, world, name",
    [
        ("", 1, "tiny-cpu"),
        ("--tp 2 --lr 4e-3", 2, "tiny-cpu-tp2-lr4e-3"),
        ("--dtype-is-no-flag", 4, "tiny-cpu-dp4"),
        ("--log-interval 1 --save there --nproc 1", 1, "tiny-cpu"),
        (
            "--train-iters 20 --no-swiglu --adam-beta2 0.95",
            1,
            "tiny-cpu-no-swiglu-adam-beta20.95-train-iters20",
        ),
        ("--config tiny-moe-cpu --ep 2 --pp 2", 4, "tiny-moe-cpu-pp2-ep2-dp2"),
    ],
)
def test_a_run_is_named_by_its_layout_and_flags(flags, world, name):
    parsed = parse(flags.split())
    assert default_run_name(resolve(parsed.config, world), parsed.preset, parsed.given) == name


def test_a_name_that_cannot_say_all_ends_in_a_hash():
    """Paths of one end, and more flags than fit: names of different runs differ."""

    def name(flags: str) -> str:
        parsed = parse(flags.split())
        return default_run_name(resolve(parsed.config, 1), parsed.preset, parsed.given)

    many = "--lr-warmup-iters 20 --lr-decay-style linear --weight-decay 0.1 --clip-grad 0.5 --seed"
    one, two = name("--data-path a/text_document"), name("--data-path b/text_document")
    assert one != two and one.startswith("tiny-cpu-data-pathtext_document")
    assert name(f"{many} 1") != name(f"{many} 2") and name(f"{many} 1") == name(f"{many} 1")
    assert all(len(each) < 120 and "/" not in each for each in (one, two, name(f"{many} 1")))


def run_name(flags: str) -> str:
    parsed = parse(flags.split())
    return with_run_name(resolve(parsed.config, 1), parsed).run.run_name


def test_a_name_says_what_a_run_starts_from(old, tmp_path):
    """A run of its own for what is fine-tuned or starts from another's weights; evaluation needs none."""
    load = "--load runs/old/ckpt --mock-data --vocab-size 9 --micro-batch-size 1"
    folder = run_name(load)
    assert folder == "old-mock-data-micro-batch-size1-vocab-size9"
    assert run_name(f"{load} --eval-only") == run_name(f"{load} --eval-only --ckpt-step 5") == folder
    others = [run_name(f"{load} {more}") for more in ("--finetune", "--ckpt-step 5", "--finetune --seed 5")]
    (tmp_path / "runs/old").rename(tmp_path / "elsewhere")
    moved = load.replace("runs/old", "elsewhere")
    others += [
        run_name(moved),
        run_name(f"{moved} --finetune"),
        run_name("--load elsewhere/ckpt --config tiny-cpu"),
    ]
    assert len({folder, *others}) == 7
    assert run_name("--config tiny-cpu --save x --load x") == "tiny-cpu"


def test_the_same_name_is_not_given_to_another_file(tmp_path):
    """Presets of the package never change under their names, files of users do."""
    mine, names = tmp_path / "mine.toml", []
    for rate in ("1e-3", "2e-3", "1e-3"):
        mine.write_text(f"extends = 'tiny-cpu'\nlr = {rate}\n")
        names.append(run_name(f"--config {mine} --seed 3"))
    assert names[0] == names[2] != names[1] and names[0].startswith("mine-seed3-")
    assert run_name("--megatron-defaults") != run_name("") == "tiny-cpu"
    assert run_name("--lr 1e-5") == "tiny-cpu-lr1e-5"  # with a --min-lr that follows from it


def test_changed_settings_are_listed():
    before = resolve(parse(["--lr", "1e-3"]).config, 1)
    after = resolve(parse("--lr 5e-4 --tp 2 --save-interval 7".split()).config, 2)
    changes = changed_settings(before, after)
    assert "--lr 0.001 -> 0.0005" in changes and "--save-interval 100 -> 7" in changes
    assert "--tensor-model-parallel-size 1 -> 2" in changes
    assert changed_settings(before, before) == []
