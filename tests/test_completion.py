"""`nanomegatron completion`: its script, sourced in a real shell and asked for the words of a line."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from nanomegatron.commands import verbs
from nanomegatron.commands.completion import SHELLS, main, train_words, words_of_help
from nanomegatron.config.cli import parse
from nanomegatron.config.help import PRESETS
from tests.test_style import ROOT

# What a shell runs to complete the last of its arguments: bash's variables, and the function that it calls.
ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_nanomegatron
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    """The script as a user gets it."""
    path = tmp_path_factory.mktemp("completion") / "completion.bash"
    command = [sys.executable, "-m", "nanomegatron", "completion", "bash"]
    path.write_text(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return path


def completed(script: Path, line: str, cwd: Path = ROOT) -> list[str]:
    """What bash offers for the last word of a line, which may be empty."""
    command = ["bash", "-u", "-c", ASK, "bash", str(script), *line.split(" ")]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "line, expected",
    [
        ("nanomegatron ", " ".join(verbs.COMMANDS)),
        ("nanomegatron com", "compare completion"),
        ("/usr/bin/nanomegatron --v", "--version"),
        (
            "nanomegatron train --tens",
            "--tensor-model-parallel-size --tensorboard-dir",
        ),
        ("nanomegatron train --t", None),
        ("nanomegatron train --tp 2 --no-swi", "--no-swiglu"),
        ("nanomegatron train --no-no", ""),
        ("nanomegatron train --device ", "auto cpu cuda"),
        ("nanomegatron train --device cu", "cuda"),
        ("nanomegatron train --device = c", "cpu cuda"),
        ("nanomegatron train --device =", "auto cpu cuda"),
        ("nanomegatron train --cp-comm-type p2p a2", "a2a a2a+p2p"),
        ("nanomegatron train --help fp", "fp8"),
        ("nanomegatron train --data-path ", ""),
        ("train.py --config tiny-m", "tiny-moe-cpu"),
        ("./train.py --pipeline-schedule zb", "zb-h1 zb-v"),
        ("torchrun --nproc-per-node 8 train.py --config tiny-m", "tiny-moe-cpu"),
        ("torchrun --nproc-per-node 8 tr", ""),
        ("python -m nanomegatron sch", "schedules"),
        ("nanomegatron convert --source ", "hf nanomegatron megatron-core megatron"),
        ("nanomegatron schedules --schedule zb", "zb-h1 zb-v"),
        ("nanomegatron preprocess --append", "--append-eod"),
        ("preprocess.py --tiktoken-pattern v", "v1 v2"),
        ("nanomegatron doctor --", "--help --json"),
        ("nanomegatron completion z", "zsh"),
        ("nanomegatron unknown --", ""),
    ],
)
def test_bash_completes(script, line, expected):
    found = completed(script, line)
    assert "--tp" in found if expected is None else found == expected.split()


def test_a_config_is_a_preset_or_a_file(script, tmp_path):
    (tmp_path / "mine.toml").touch()
    presets = sorted(path.stem for path in PRESETS.glob("*.toml"))
    assert completed(script, "nanomegatron train --config ", tmp_path) == [*presets, "mine.toml"]
    assert completed(script, "nanomegatron train --config m", tmp_path) == [
        *(name for name in presets if name[0] == "m"),
        "mine.toml",
    ]


def test_bash_calls_it_for_each_program(script):
    done = subprocess.run(["bash", "-c", f"source {script}; complete -p"], capture_output=True, text=True)
    names = {line.split()[-1] for line in done.stdout.splitlines() if "-F _nanomegatron" in line}
    assert names == {"nanomegatron", "train.py", "preprocess.py", "convert.py", "torchrun"}


def test_each_word_of_train_is_a_flag():
    words = train_words()
    assert len(words) > 250 and words.pop("--config") and words.pop("--help")
    argv = [word for name, choices in words.items() for word in (name, *choices[:1])]
    errors = parse(argv).errors
    assert not [error for error in errors if "unknown flag" in error or "one of" in error]
    assert "--no-such: unknown flag" in parse(["--no-such"]).errors[0]


@pytest.mark.parametrize("verb", sorted(verbs.COMMANDS.keys() - {"ops", "train"}))
def test_each_command_has_its_flags(verb):
    where = verbs.COMMANDS[verb][0]
    if not where.endswith(".py") and not find_spec(where):
        pytest.skip(f"{where} is not there")
    assert "--help" in words_of_help(verb)


@pytest.mark.parametrize("argv", ([], ["fish"]), ids=str)
def test_other_shells_have_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert not capsys.readouterr().out


def test_zsh_gets_the_script_with_its_bash_completion_loaded(script, capsys):
    assert main(["zsh"]) == 0
    text = capsys.readouterr().out
    assert text == SHELLS["zsh"] + script.read_text() and "bashcompinit\n" in SHELLS["zsh"]
