"""Files that a user names are regular, of a sane size and right, or one line says why not; none hangs."""

import json
import os

import pytest

from nanomegatron.commands.compare import main as compare
from nanomegatron.commands.runs import main as runs
from nanomegatron.config.check import validate
from nanomegatron.config.cli import parse
from nanomegatron.config.early import early_answer
from nanomegatron.config.hf import read_folder
from nanomegatron.config.user_files import escaped, read_json, read_text
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.faults.lock import settings_in
from nanomegatron.plan.cluster import load_cluster
from nanomegatron.report.log import read_status
from nanomegatron.report.writers import read_jsonl

SHAPE = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --mock-data --vocab-size 9 --seq-length 8"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
    (tmp_path / "large").touch()
    os.truncate("large", 2**40)
    (tmp_path / "bytes").write_bytes(b"a = 1\n\xff")
    return tmp_path


WRONG = {
    "/dev/zero": "a device, pipe or socket",
    "pipe": "a device, pipe or socket",
    "folder": "is a folder",
    "large": "has 1099511627776 bytes; must have at most",
    "bytes": "not UTF-8 (byte 6)",
    "bytes/x": "Not a directory",
}


@pytest.mark.parametrize("path", WRONG)
def test_what_is_no_plain_file_is_named_at_once(path, here):
    why = WRONG[path]
    (here / "mine.toml").write_text(f'extends = "{path}"\nlr = 1.0\n')
    for flags in (f"--config {path}", "--config mine.toml"):
        (error, *_) = parse(flags.split()).errors
        assert path in error and why in error and "\n" not in error
    errors = validate(parse(f"{SHAPE} --no-mock-data --data-args-path {path}".split()).config, 1)
    assert any(f"--data-args-path {path}: " in error and why in error for error in errors), errors
    for kind, flag in (("Llama3Tokenizer", "model"), ("TikTokenizer", "model")):
        with pytest.raises(ValueError) as caught:
            build_tokenizer(kind, **{flag: path})
        assert path in str(caught.value)
    with pytest.raises(ValueError, match="^" + path):
        read_text(path)


NESTED = {
    "lists.json": "[" * 100_000,
    "objects.json": '{"a": ' * 100_000,
    "table.toml": "a = " + "[" * 100_000,
    "twice.json": '{"model_type": 1, "model_type": 2}',
    "list.json": "[]",
    "cut.json": '{"a',
    "number.json": '{"a": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("name", NESTED)
def test_every_reader_says_what_is_wrong(name, here):
    """Of settings, records, clusters: a ValueError or a warning of one line."""
    path, said = here / name, []
    path.write_text(NESTED[name])
    if name.endswith(".json"):
        (here / "folder/config.json").write_text(NESTED[name])
        for call in (lambda: read_json(path), lambda: read_folder("folder")):
            with pytest.raises(ValueError, match=r"\.json: ") as caught:
                call()
            assert "\n" not in str(caught.value)
        assert read_status(path, said.append) == {} and "damaged" in said[0]
        assert read_jsonl(path, said.append) == []
    (here / "folder/config.toml").write_text(NESTED[name])
    with pytest.raises(ValueError, match="config.toml: damaged"):
        settings_in(here / "folder")
    path = path.rename(path.with_suffix(".toml"))
    with pytest.raises(ValueError, match=f"cluster {path}: "):
        load_cluster(str(path))
    assert any(str(path) in error for error in parse(["--config", str(path)]).errors)


def test_records_of_the_wrong_types(here, capsys):
    """`runs` and `compare` name the run, and show the others."""
    run = here / "runs/odd"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("num-layers = 1\n")
    (run / "status.json").write_text("[" * 100_000)
    for record in ({"lm_loss": [1]}, {"lm_loss": 1.0, "consumed_samples": "x"}, {"lm_loss": "x"}):
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1} | record) + "\n")
        assert runs([]) == 0 and compare(["odd"]) == 2
        assert "compare: odd: damaged settings or records" in capsys.readouterr().err


ODD = {
    "escape": "a\x1b[31mb",
    "a line": "a\nresumed runs/b/ckpt, step 9",
    "return": "a\rb",
    "delete": "a\x7f",
    "next line": "a\x85",
    "right to left": "a\u202eb",
    "no UTF-8": "a\udcff",
}


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_names_with_control_characters_are_refused_and_shown_escaped(name, here, capsys):
    assert early_answer([*SHAPE.split(), "--train-iters", "1", "--run-name", name]) == 2
    assert early_answer([*SHAPE.split(), "--train-iters", "1", f"--{name}"]) == 2
    said = capsys.readouterr()
    (refused,) = [line for line in said.err.splitlines() if "--run-name" in line]
    assert "must be the name of a folder in runs/, of printable characters" in refused
    assert not any(char in said.out + said.err.replace("\n", "") for char in name if not char.isprintable())
    assert escaped(name, keep="").isprintable()


def test_plain_text_is_shown_as_it_is():
    text = "caf\u00e9 \u3000\u4f60\u597d \U0001f600\n\tindented\u00a0"
    assert escaped(text) == text
    assert escaped("\x1b[2J\x07") == "\\x1b[2J\\x07" and escaped("a\nb", keep="") == "a\\nb"


def test_runs_of_strange_names_are_listed_escaped(here, capsys):
    folder = here / "runs/a\x1b]0;title\x07"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("train-iters = 3\n")
    (folder / "status.json").write_text(json.dumps({"state": "done\x1b[31m"}))
    assert runs([]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\\x1b]0;title\\x07" in out and "done\\x1b[31m" in out
