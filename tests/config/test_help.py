"""What a command line is answered with before a run: help by topic, suggestions, the resolved settings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanomegatron.config.check import resolve
from nanomegatron.config.cli import PRESETS, from_toml, parse
from nanomegatron.config.early import early_answer, early_errors
from nanomegatron.config.help import OTHER_NAMES, TABLES, TOPICS, help_text
from nanomegatron.config.megatron import megatron_flags
from nanomegatron.config.rules import declared, flag
from nanomegatron.config.settings import Config

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {s.name: s.metadata for _, s, _ in declared(Config())}
ALL = {flag(name) for name in SETTINGS}


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def entries(text: str) -> list[str]:
    """The full names of the flags that have an entry, in order."""
    names = re.findall(r"^  (--\S+?),?(?: |$)(?:(--\S+))?", text, re.MULTILINE)
    return [next(name for name in pair if name in ALL) for pair in names if ALL & {*pair}]


def errors_of(flags: str) -> list[str]:
    """What a user sees on stderr, a line for each error."""
    return early_errors(parse(flags.split()))


# Help.


def test_help_names_presets_and_the_flags_of_every_dimension(monkeypatch):
    text = help_text()
    assert len(text.splitlines()) - 1.5 * len([*PRESETS.glob("*.toml")]) <= 112
    monkeypatch.delenv("COLUMNS")  # as in a pipe
    assert len(help_text().splitlines()) <= 120
    wanted = (
        "--tp --pp --vpp --cp --ep --etp --dp --sp --num-experts --moe-router-topk --recompute-granularity"
    )
    wanted += " --fp8-format --use-distributed-optimizer --nproc --config --print-config"
    assert [name for name in wanted.split() if not re.search(rf"^  {name}[ ,]", text, re.MULTILINE)] == []
    for path in PRESETS.glob("*.toml"):
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        assert re.search(rf"^  {re.escape(path.stem)} +{re.escape(first[:12])}", text, re.MULTILINE), (
            path.stem
        )


@pytest.mark.parametrize("columns", (60, 80, 120, 400))
def test_help_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for topic in ("", "all", *TOPICS):
        longest = max(help_text(topic).splitlines(), key=len)
        assert len(longest) <= min(columns, 120), (topic, longest)


def test_help_all_has_every_flag_once_under_its_topic():
    text = help_text("all")
    found = entries(text)
    assert sorted(found) == sorted(ALL)
    titles = re.findall(r"^([a-z][\w-]*): (?!nano)", text, re.MULTILINE)
    assert titles == ["presets", *TOPICS]
    for setting in SETTINGS.values():
        first = setting["help"].split("; default")[0].split()[:3]
        assert re.search(r"\s+".join(map(re.escape, first)), text)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_one_screen_of_its_flags(topic):
    text = help_text(topic)
    assert 1 <= len(set(entries(text))) == len(entries(text)) and len(text.splitlines()) <= 120


@pytest.mark.parametrize(
    "topic, inside, outside",
    [
        (
            "moe",
            "num-experts moe-router-topk expert-model-parallel-size moe-use-upcycling",
            "lr tp-comm-overlap",
        ),
        ("parallel", "tensor-model-parallel-size expert-model-parallel-size sequence-parallel", "lr"),
        ("pipeline", "pipeline-model-parallel-size pipeline-schedule", "lr"),
        ("fp8", "fp8-format fp8-recipe first-last-layers-bf16 log-fp8-stats", "fp16"),
        ("precision", "bf16 fp16 loss-scale", "fp8-margin"),
        ("recompute", "recompute-granularity recompute-modules", "lr"),
        ("optimizer", "lr weight-decay adam-beta1", "bf16"),
        ("data", "data-path seq-length tokenizer-type", "lr"),
        ("checkpoint", "save load finetune", "lr"),
        ("logging", "log-interval tensorboard-dir wandb-project", "lr"),
        ("profiling", "profile trace-dir record-memory-history", "lr"),
        ("run", "nproc seed train-iters", "lr"),
        ("model", "num-layers hidden-size swiglu", "num-experts"),
    ],
)
def test_what_a_topic_has(topic, inside, outside):
    found = entries(help_text(topic))
    assert {f"--{name}" for name in inside.split()} <= {*found}
    assert not {f"--{name}" for name in outside.split()} & {*found}


@pytest.mark.parametrize(
    "words, first, others",
    [
        ("lr", "--lr", "--min-lr --lr-decay-style"),
        ("tp", "--tensor-model-parallel-size", "--tp-comm-overlap"),
        ("seq_length", "--seq-length", ""),
        ("SwiGLU", "--swiglu", ""),
        ("wandb", "--wandb-project", "--wandb-exp-name"),
        ("learning-rate", "--lr", ""),
    ],
)
def test_help_of_a_flag_or_a_word(words, first, others, capsys):
    assert early_answer(["--help", *words.split()]) == 0
    found = entries(capsys.readouterr().out)
    assert found[0] == first and {*others.split()} <= {*found} and len(found) < 30


def test_an_unknown_topic_lists_the_topics(capsys):
    assert early_answer(["--help", "mo3"]) == 2
    out, err = capsys.readouterr()
    assert not out and "--help mo3: " in err and "did you mean moe" in err
    assert all(topic in err for topic in TOPICS)
    assert early_answer(["--help", "lr(["]) == 2


def test_help_in_a_tiny_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "5")
    assert "  --num-layers N        number of transformer\n" in help_text("model")


# Suggestions.


@pytest.mark.parametrize(
    "given, meant",
    [
        ("--learning-rate 1", "--lr"),
        ("--lr-rate 1", "--lr"),
        ("--dtype bf16", "--bf16"),
        ("--tp-size 2", "--tensor-model-parallel-size (--tp)"),
        ("--batch-size 2", "--global-batch-size"),
        ("--untie-embeddings", "--untie-embeddings-and-output-weights"),
        ("--max-steps 3", "--train-iters"),
        ("--steps 3", "--train-iters"),
        ("--epochs 3", "--train-iters"),
        ("--num-heads 3", "--num-attention-heads"),
        ("--n_layer 3", "--num-layers"),
        ("--d-model 3", "--hidden-size"),
        ("--hidden-dim 3", "--hidden-size"),
        ("--block-size 3", "--seq-length"),
        ("--max_seq_len 3", "--seq-length"),
        ("--fp8", "--fp8-format hybrid"),
        ("--output-dir x", "--save"),
        ("--resume", "--load"),
        ("--warmup-iters 3", "--lr-warmup-iters"),
        ("--beta1 0.9", "--adam-beta1"),
        ("--recompute", "--recompute-granularity, "),
        ("--wandb", "--wandb-project"),
        ("--HIDDEN-SIZE 3", "--hidden-size"),
        ("--no-flash-attn", "--attention-backend"),
        ("--schedul x", "--pipeline-schedule"),
        ("--tp_siz 2", "--tensor-model-parallel-size (--tp)"),
    ],
)
def test_suggestions(given, meant):
    (error,) = parse(f"--config tiny-cpu {given}".split()).errors
    assert error.startswith(f"{given.split()[0]}: unknown flag; did you mean {meant}"), error


def test_a_key_of_a_file_gets_the_same_suggestions(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "tiny-cpu"\nlearning-rate = 1e-3\n')
    (error,) = errors_of(f"--config {tmp_path}/mine.toml")
    assert error.endswith("unknown key learning-rate; did you mean --lr?")


def test_names_of_other_projects_are_of_no_flag_here():
    """Else the suggestion would never be made."""
    table, known = TABLES["other-names"], megatron_flags()
    theirs = [name for names in table.values() for name in names.split()]
    assert len(theirs) == len(set(theirs)) == len(OTHER_NAMES) > 80
    own = {name.replace("_", "-") for name in SETTINGS}
    own |= {alias for rules in SETTINGS.values() for alias in rules["aliases"]}
    own |= {"config", "help", "print-config"}
    classes = ("always_on", "not_needed", "unsupported", "spellings")
    assert not {*theirs} & own.union(*(known[kind] for kind in classes))
    own |= {f"no-{name}" for name in own}
    for meant in table:
        name, *value = meant.removeprefix("--").split()
        errors = parse(["--config", "tiny-cpu", f"--{name}", *value]).errors if value else ()
        assert name in own and not errors, meant


# Files.


@pytest.mark.parametrize("text", [None, "num-layers = ", 'extends = "gone"', "\udcff"])
def test_a_file_that_cannot_be_read_is_the_only_error(text, tmp_path):
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    assert len(errors_of(f"--config {path} --min-lr 1 --tp 2 --mock-data")) == 1
    assert len(errors_of(f"--config {path} --lr -1 --hiden-size 3")) == 3  # and those of the flags themselves


def test_a_value_that_cannot_be_read_is_one_error(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "tiny-cpu"\nhidden-size = "wide"\nnum-layer = 3\n')
    assert len(errors_of(f"--config {tmp_path}/mine.toml")) == 2
    (error,) = errors_of("--num-layers two --hidden-size 64 --num-attention-heads 4")
    assert error.startswith("--num-layers two: must be a whole number")
    assert len(errors_of("--num-layers two --hidden-size 64 --num-attention-heads 4 --min-lr -1")) == 2


@pytest.mark.parametrize(
    "given, meant",
    [
        ("llama3-8", "llama3-8b"),
        ("tiny_cpu", "tiny-cpu"),
        ("Mixtral", "mixtral-8x7b"),
        ("runs/tiny-cpu", "tiny-cpu"),
    ],
)
def test_an_unknown_preset_gets_the_nearest(given, meant):
    (error,) = errors_of(f"--config {given}")
    assert error.startswith(f"--config {given}: no such file or preset; did you mean {meant}?")
    assert "presets are demo-gpu, " in error


def test_presets_and_own_files_are_reached_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('extends = "tiny-cpu"\nhidden-size = 64\n')
    Path("sub").mkdir()
    Path("sub/deep.toml").write_text('extends = "near"\nlr = 0.5\n')
    Path("sub/near.toml").write_text('extends = "../mine"\nnum-layers = 3\n')
    parsed = parse("--config mine".split())
    assert not parsed.errors and parsed.preset == "mine"
    assert (parsed.config.model.hidden_size, parsed.config.model.num_layers) == (64, 4)
    parsed = parse("--config sub/deep".split())
    model = parsed.config.model
    assert not parsed.errors and (model.hidden_size, model.num_layers, parsed.config.optimizer.lr) == (
        64,
        3,
        0.5,
    )
    Path("tiny-cpu.toml").write_text('extends = "tiny-cpu"\nhidden-size = 32\n')  # one's own, of the preset
    model = parse("--config tiny-cpu".split()).config.model
    assert (model.hidden_size, model.num_layers) == (32, 4)


def test_a_base_that_is_not_there_is_said_of_the_file_that_names_it(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "tiny-cup"\n')
    (error,) = errors_of(f"--config {tmp_path}/mine.toml")
    assert "mine.toml: extends tiny-cup: no such file or preset; did you mean tiny-cpu?" in error


# The resolved settings, without torch and without data.


def program(*words: str, **keywords) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train.py"), *words]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, **keywords)


def test_print_config_prepares_nothing(tmp_path):
    watch = "import runpy, sys; sys.argv[1:] = sys.argv[2:] + ['--print-config']\n"
    watch += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    watch += "except SystemExit as end: sys.exit(end.code or ('torch' in sys.modules) * 9)"
    watch = watch.replace("sys.argv[1:] = sys.argv[2:]", "sys.argv = sys.argv[1:]")
    command = [sys.executable, "-c", watch, str(ROOT / "train.py"), *"--tp 2 --nproc 4".split()]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    config = from_toml(done.stdout)
    assert config == resolve(parse("--tp 2 --nproc 4".split()).config, 4)
    assert config.parallel.data_parallel_size == 2 and not list(tmp_path.iterdir())


def test_print_config_reports_errors(capsys):
    assert early_answer("--print-config --tp 3 --nproc 2".split()) == 2
    out, err = capsys.readouterr()
    assert not out and "--tensor-model-parallel-size 3" in err


def test_print_config_under_torchrun(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert early_answer("--print-config --tp 2".split()) == 0
    assert from_toml(capsys.readouterr().out).parallel.data_parallel_size == 4
    monkeypatch.setenv("RANK", "1")
    assert early_answer("--print-config --tp 2".split()) == 0 and not capsys.readouterr().out


@pytest.mark.parametrize("words", ["--print-config", "--help", "--help all"])
def test_a_reader_may_close_the_pipe(words):
    read, write = os.pipe()
    os.close(read)
    with program(*words.split(), stdout=write) as process:
        os.close(write)
        assert process.stderr.read() == "" and process.wait() == 0


@pytest.mark.parametrize("name", ["preprocess.py", "convert.py"])
def test_help_of_the_other_programs_fits_the_terminal(name):
    done = subprocess.run([sys.executable, ROOT / name, "--help"], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80
