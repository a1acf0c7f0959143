"""`nanomegatron VERB`: the list of commands, the programs behind it, and modules that are none."""

import ast
import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nanomegatron.commands.verbs import COMMANDS, main
from tests.house.test_style import PACKAGE, ROOT
from tools.environment import write_command

MOCK = "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8"


def run(*words: str, cwd: Path = ROOT, code: int = 0, program: str = sys.executable) -> str:
    """What a command of Python or of another program prints, errors included."""
    done = subprocess.run([program, *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("argv", ([], ["--help"], ["-h"]), ids=str)
def test_all_commands_fit_one_screen(argv, capsys):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*COMMANDS]


def test_an_unknown_command_gets_the_nearest(capsys):
    assert main(["comparee"]) == 2
    assert "no command 'comparee'; did you mean compare?" in capsys.readouterr().err


def test_each_module_that_runs_is_listed():
    """A module runs if it has a block for `__main__`, or a main(argv) in commands/."""
    listed = {where.removesuffix(".py").removeprefix("nanomegatron.") for where, _ in COMMANDS.values()}
    runs = {s.module for s in PACKAGE if '\nif __name__ == "__main__":\n' in s.text} - {"__main__"}
    runs |= {
        s.module
        for s in PACKAGE
        if s.module.startswith("commands.")
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in s.tree.body)
    } - {"commands.verbs"}
    assert runs == {module for module in listed if "." in module}


@pytest.mark.parametrize("module", ("nanomegatron.tp", "nanomegatron.commands.generate"))
def test_other_modules_do_not_run_in_silence(module):
    """Also where Python has flags of its own; modules that import the package are not concerned."""
    assert f"{module} is a module to import, not a command" in run("-m", module, code=1)
    assert "not a command" in run("-X", "dev", f"-m{module}", "x", code=1)


def test_ops_also_runs_as_a_module():
    assert "usage:" in run("-m", "nanomegatron.ops", "--help")


@pytest.mark.parametrize("verb", ("train", "preprocess", "convert"))
def test_programs_are_the_same_code(verb):
    """Help, and a wrong flag, as `python train.py` has them."""
    for argv, code in ((["--help"], 0), (["--no-such-flag"], 2)):
        assert run("-m", "nanomegatron", verb, *argv, code=code) == run(f"{verb}.py", *argv, code=code)


@pytest.fixture
def command(tmp_path) -> str:
    """The program `nanomegatron` that `make train` puts into .venv/bin."""
    write_command(tmp_path / "nanomegatron", Path(sys.executable))
    return str(tmp_path / "nanomegatron")


def test_processes_that_the_command_starts_can_import_it(command, capsys):
    """Python names the program `__mp_main__` there; it must not begin again."""
    found = runpy.run_path(command, run_name="__mp_main__")
    assert found["main"] is main and capsys.readouterr().out == ""


def test_ranks_of_a_program_start_outside_the_checkout(command, tmp_path, full):
    """--nproc starts ranks that import the program again."""
    flags = f"{MOCK} --nproc 2 --train-iters 2 --eval-iters 0 --run-name two --device cpu".split()
    assert "saved" in run("train", *flags, cwd=tmp_path, program=command)
    assert (tmp_path / "runs/two/metrics.jsonl").read_text().count("\n") == 2
    if full:
        words = "generate --load runs/two/ckpt --prompt=1 --max-new-tokens 2 --nproc 2 --tp 2 --device cpu"
        assert "generate: 2 tokens" in run(*words.split(), cwd=tmp_path, program=command)
        words = f"debug {MOCK} --b tp2 --global-batch-size 2 --device cpu"
        assert "no tensor differs by more than" in run(*words.split(), cwd=tmp_path, program=command)


def test_a_reader_that_has_read_enough_is_no_error():
    """As `| head` does, which leaves no one to write to."""
    words = "-m nanomegatron schedules --stages 2 --microbatches 4"
    command = subprocess.Popen(
        [sys.executable, *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    command.stdout.close()
    assert command.stderr.read() == b"" and command.wait() == 0


def test_the_version_is_one(capsys):
    assert main(["--version"]) == 0
    version = capsys.readouterr().out.split()[1]
    assert f"## {version.removesuffix('.0')}\n" in (ROOT / "CHANGELOG.md").read_text()


WRONG = {
    "preprocess --tokenizer-type HuggingfaceTokenizer": "must be one of | did you mean HuggingFaceTokenizer?",
    "convert --source hff --target hf": "--source hff: must be one of hf, nanomegatron, | did you mean hf?",
    "generate --load x --device gpu": "--device gpu: must be one of auto, cpu, cuda",
    "schedules --schedule zbv": "--schedule zbv: must be one of gpipe, | ; did you mean zb-v?",
    "compare": "arguments are required: RUN; --help lists all flags",
    "runs --lines": "unrecognized arguments: --lines; --help lists all flags",
    "generate --load x --max-tokens=5": "--max-tokens=5; did you mean --max-new-tokens?",
    "compare a --pictures 5": "--pictures 5; did you mean --picture?",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line(words, capsys):
    """Value, rule and fix, behind the name of the command; not behind its usage of up to 18 lines."""
    verb, *argv = words.split()
    program = importlib.import_module(COMMANDS[verb][0].removesuffix(".py"))
    with pytest.raises(SystemExit) as left:
        program.main(argv)
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith(f"nanomegatron {verb}: ") and said.count("\n") == 1
    assert all(part in said for part in WRONG[words].split(" | ")), said


def test_a_checkpoint_that_is_not_there_is_told_before_torch_is_imported(tmp_path):
    code = "import sys\nfrom nanomegatron.commands.verbs import main\n"
    code += "code = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    said = run("-c", code, "generate", "--load", str(tmp_path / "runs/x/ckpt"), cwd=ROOT, code=3)
    assert (
        said == f"nanomegatron generate: no checkpoint in {tmp_path}/runs/x/ckpt; there is no such folder\n"
    )
