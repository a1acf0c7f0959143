"""The guides and the README: their commands run, their flags exist, and the page of all flags is current.

A block of code that begins with ```sh holds commands; those of a document run in order in one folder, with
the programs of this checkout. A word behind it says what a block needs that a test does not have: gpu,
cluster, network, package or files. Such a block is not run, but the flags of its trainings are checked.
"""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from nanomegatron.config.check import validate
from nanomegatron.config.cli import parse
from tools import environment, flags, megatron_flags

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
RUN = [*GUIDES, ROOT / "docs" / "from-megatron.md"]  # those whose commands run
DOCUMENTS = [ROOT / "README.md", *RUN]
PAGES = [ROOT / "README.md", *(path for path in ROOT.glob("docs/**/*.md") if path.name != "log.md")]
NEEDS = {"gpu", "cluster", "network", "package", "files"}
SHORT = "--train-iters 4 --eval-iters 1"  # put before a command's own flags, which therefore win
TRAIN = re.compile(
    r"^(?:\w+=\S+ )*(?:srun )?(?:torchrun .*?|python )?(?:nanomegatron train|train\.py)(?= |$)(?!  +\w)"
)
LATER = (
    r"^--config \S+\.toml: no such file|: no such (file|folder)(?! or preset)|: no file |: needs the package "
)


class Block(NamedTuple):
    """A block of commands: what it needs ("": it can run here) and its lines."""

    needs: str
    text: str


def blocks(document: Path) -> list[Block]:
    """The ```sh blocks of a document."""
    found = re.findall(r"(?ms)^```sh([^\n]*)\n(.*?)^```$", document.read_text(encoding="utf-8"))
    return [Block(needs.strip(), text) for needs, text in found]


def train_commands(document: Path) -> list[tuple[str, int, list[str]]]:
    """(line, processes, arguments) of each command that trains, in any block, fenced or indented.

    What is in [brackets] may be left out, and is.
    """
    text = document.read_text(encoding="utf-8")
    parts = re.findall(r"(?ms)^```[^\n]*\n(.*?)^```$|^    ([^\n]*\n)", text)
    code = "".join(fenced + indented for fenced, indented in parts).replace("\\\n", " ")
    code = re.sub(r" \[.*\]", "", code)
    found = []
    for line in code.splitlines():
        if match := TRAIN.match(line.strip()):
            words = shlex.split(line.strip()[match.end() :], comments=True)
            nodes, each = (
                int((re.findall(rf"--{name}[ =](\d+)", match[0]) or [1])[0])
                for name in ("nnodes", "nproc-per-node")
            )
            found.append((line.strip(), nodes * each, words))
    return found


def mistakes(processes: int, words: list[str]) -> list[str]:
    """The errors of a command that trains, without those of LATER; `...` are flags that a page leaves out."""
    parsed = parse([word for word in words if word != "..."])
    errors = list(parsed.errors)
    if parsed.action == "train" and "..." not in words:
        kinds = ("cuda",) if processes > 1 else ("cpu", "cuda")
        world = processes if processes > 1 else parsed.config.run.nproc or 1
        each = [validate(parsed.config, world, kind) for kind in kinds]
        errors += [error for error in each[0] if all(error in others for others in each)]
    known = (e for e in errors if e in parsed.errors or parsed.unread.isdisjoint(re.findall(r"--[\w-]+", e)))
    return [error for error in known if not re.search(LATER, error)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_that_train_are_right(path):
    wrong = [f"{line}: {error}" for line, n, words in train_commands(path) for error in mistakes(n, words)]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_command_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh gpu\ntorchrun --nproc-per-node 8 train.py --tp 3 \\\n  --lrr 1 # why\n```\n")
    [(_, processes, words)] = train_commands(page)
    assert processes == 8 and words == ["--tp", "3", "--lrr", "1"]
    assert any("--lrr" in error for error in mistakes(processes, words))
    page.write_text("    python train.py --pp 3 [--vpp 2] \\\n       --lrr 1\n\n    train.py    a program\n")
    assert [words for *_, words in train_commands(page)] == [["--pp", "3", "--lrr", "1"]]
    assert mistakes(8, ["--tp", "3"]) and not mistakes(8, ["--tp", "2"])
    assert not mistakes(1, ["--data-path", "made_later"]) and mistakes(1, ["--seq-length", "0"])


def test_guides_have_commands_and_say_what_these_need():
    assert len(GUIDES) >= 8 and all(len(path.read_text().splitlines()) <= 170 for path in GUIDES)
    assert sum(len(train_commands(path)) for path in DOCUMENTS) > 30
    assert {block.needs for path in RUN for block in blocks(path)} <= {"", *NEEDS}


def test_the_index_names_every_document():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").glob("**/*.md")]
    assert [str(page) for page in pages if f"({page})" not in index and page.name != "README.md"] == []


def names_not_found(text: str) -> list[str]:
    """Constants in backticks that no file named up to their step of a page defines, nor the page itself."""
    made = set(re.findall(r"(?m)^ *([A-Z][A-Z_]{2,}) = ", text))
    missing, source = [], ""
    for step in re.split(r"(?m)^(?=\d\. )", text):
        for name in re.findall(r"`(?:nanomegatron/)?([\w/]+\.(?:py|toml))`", step):
            found = [at for at in (ROOT / name, ROOT / "nanomegatron" / name) if at.is_file()]
            source += "".join(at.read_text(encoding="utf-8") for at in found)
        names = set(re.findall(r"`([A-Z][A-Z_]{2,})(?:\[[^`]*)?`", step)) - made
        missing += [x for x in sorted(names) if not re.search(rf"(?m)^[\w, ]*\b{x}\b[^=\n]*=", source)]
    return missing


@pytest.mark.parametrize("path", (ROOT / "docs/how-to-add").glob("*.md"), ids=lambda path: path.stem)
def test_how_to_add_pages_name_what_is_there(path):
    assert names_not_found(path.read_text(encoding="utf-8")) == []


def test_a_name_that_has_moved_is_found():
    assert names_not_found("1. A word, in `tests/layouts.py`: `ap` in `FLAGS`, `dp2` in `NAMED`") == ["FLAGS"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with this checkout's programs in bin/, and the embedded text, if it is prepared already."""
    folder = tmp_path_factory.mktemp("guides")
    (folder / "bin").mkdir()
    environment.write_command(folder / "bin" / "nanomegatron", Path(sys.executable))
    programs = {"torchrun": "-m torch.distributed.run", "python": ""}
    for name, module in programs.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def run_blocks(document: Path, place: Path, short: str = SHORT, first: str = "") -> None:
    """Run all blocks of a document that need nothing else, in a folder of their own; `first` before them."""
    folder = place / document.stem
    folder.mkdir()
    for name in ("train.py", "preprocess.py", "convert.py", "examples"):
        (folder / name).symlink_to(ROOT / name)
    shared = ROOT / "data" if (ROOT / "data").is_dir() else place / "data"
    shared.mkdir(exist_ok=True)
    (folder / "data").symlink_to(shared)
    paths = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    hidden = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for block in [Block("", first), *blocks(document)]:
        if block.needs:
            continue
        script = re.sub(
            r"(nanomegatron train|train\.py)(?= |$)(?! --help)", rf"\1 {short}", block.text, flags=re.M
        )
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=os.environ | paths | hidden,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (
            f"{document.name}:\n{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )


@pytest.mark.full
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_commands_run(path, place):
    run_blocks(path, place)


@pytest.mark.full
def test_commands_of_the_readme_run(place):
    """After `make train`, which runs this first; their names of runs are those of whole trainings."""
    assert len(blocks(ROOT / "README.md")) == 3
    make_train = "python train.py --config tiny-cpu --run-name python --nproc 2"
    run_blocks(ROOT / "README.md", place, "--exit-interval 4 --eval-iters 1", make_train)


@pytest.mark.full
def test_the_two_runs_of_the_readme_agree_to_the_end(tmp_path, place):
    [block] = [block for block in blocks(ROOT / "README.md") if "nanomegatron compare" in block.text]
    page = tmp_path / "pair.md"
    page.write_text("```sh\n" + block.text[: block.text.index("nanomegatron debug")] + "```\n")
    run_blocks(page, place, short="")
    runs = [place / "pair" / "runs" / name / "metrics.jsonl" for name in ("one", "four")]
    one, four = ([json.loads(line)["lm_loss"] for line in run.read_text().splitlines()] for run in runs)
    assert len(one) == len(four) >= 40
    assert one == pytest.approx(four, rel=1e-6)


@pytest.mark.full
def test_the_picture_of_a_pipeline_is_drawn_as_its_page_says(place, tmp_path):
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    words = re.search(r"^    python (train\.py --nproc 4 --pp 4 --num-layers 16 .*)$", text, re.M)[1]
    words = words.replace("train.py", f"train --run-name here {SHORT} --mock-data --vocab-size 99")
    command = [place / "bin" / "nanomegatron", *words.split(), "--trace-iterations", "2", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "what no flag says is the preset tiny-cpu's" in done.stdout
    assert (tmp_path / "trace" / "here" / "iteration-2.svg").is_file()


def test_a_command_that_fails_is_found(tmp_path, place):
    page = tmp_path / "failing.md"
    page.write_text("```sh gpu\nexit 3\n```\n```sh\ntrue\nfalse\ntrue\n```\n")
    with pytest.raises(AssertionError, match=r"failing\.md"):
        run_blocks(page, place)


def test_the_page_of_flags_is_current():
    assert flags.PAGE.read_text(encoding="utf-8") == flags.page(), "python tools/flags.py --write"


def test_check_fails_where_the_page_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(flags, "PAGE", tmp_path / "flags.md")
    monkeypatch.setattr(flags, "ROOT", tmp_path)
    assert flags.main([]) == 1
    assert flags.main(["--write"]) == 0 and flags.main([]) == 0
    flags.PAGE.write_text("other")
    assert flags.main([]) == 1


def test_the_table_of_megatrons_flags_is_current(tmp_path, monkeypatch):
    assert megatron_flags.main([]) == 0, "python tools/megatron_flags.py --write"
    text = megatron_flags.PAGE.read_text(encoding="utf-8")
    for words in ("| `--skip-train` | `--eval-only` |", "`--use-mup`", "**Only here**"):
        assert words in text
    page = tmp_path / "page.md"
    page.write_text(text.replace("`--use-mup`", "`--use-mop`"))
    monkeypatch.setattr(megatron_flags, "PAGE", page)
    assert megatron_flags.main([]) == 1
    assert megatron_flags.main(["--write"]) == 0 and page.read_text(encoding="utf-8") == text
