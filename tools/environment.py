"""Make a virtual environment and put the project in it: `python3 tools/environment.py .venv viz hf`.

There are two kinds of machine:

    nothing there yet                everything is installed, at the exact versions of constraints.txt
    the interpreter that runs        the environment sees that interpreter's packages, whatever their
    this has torch >= 2.11           versions, and only what is missing there is installed

The second is the usual GPU machine or container: torch fits its CUDA, and often there is no network. A
virtual environment made with --system-site-packages would not do, since that interpreter may itself live
in a virtual environment, whose packages would stay hidden. One .pth file does it in every case: each of
its lines is a folder that Python adds to sys.path. It also names this checkout, so the project is
importable from everywhere and an edit counts at once.

Needs the standard library alone. Prints what it did, and exits with 1 and a reason where it could not.
"""

from __future__ import annotations  # an older Python must get as far as the message in main()

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 11)
COMMAND = """#!{python}
import sys
from nanomegatron.commands.verbs import main
if __name__ == "__main__":
    sys.exit(main())
"""


def numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def installed(name: str, folders: list[str]) -> str | None:
    """Version of a distribution in these folders, or None."""
    found = next(iter(metadata.distributions(name=name, path=folders)), None)
    return found.version if found else None


def requirements(extras: list[str]) -> list[str]:
    """What pyproject.toml asks for: ['torch>=2.11', ...], those of the extras behind the required ones."""
    import tomllib  # new in 3.11, so not at the top: main() is to name the reason

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]


def name_of(requirement: str) -> str:
    """'torch>=2.11' -> 'torch'."""
    return re.match(r"[\w.-]+", requirement).group()


def pip(python: Path, *words: str) -> bool:
    """Run pip install in the environment; True if it went through."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def add_missing(python: Path, requirement: str, *options: str) -> None:
    """Install what the borrowed packages lack, at the pinned version; only a required one must succeed."""
    name = name_of(requirement)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = next((line for line in lines if line.startswith(f"{name}==")), requirement)
    # One short attempt: a machine without a network says so within seconds, not minutes.
    if pip(python, "-qqq", "--retries=0", "--timeout=10", *options, pinned):
        return
    if requirement in requirements([]):
        sys.exit(
            f"{name} is needed, not here, and could not be installed; with a network: pip install {name}"
        )
    print(f"{name} is not here and could not be installed: what needs it is left out (pip install {name})")


def write_command(path: Path, python: Path) -> None:
    """Write the program `nanomegatron` as pip would: the processes that a run starts import it again."""
    path.write_text(COMMAND.format(python=python))
    path.chmod(0o755)


def main() -> None:
    """Arguments: folder of the environment, then the extras of pyproject.toml to install."""
    if sys.version_info < MIN_PYTHON:
        sys.exit(
            f"Python >= 3.11 is needed, {sys.executable} is {sys.version.split()[0]}; "
            "name another: make PYTHON=..."
        )
    if len(sys.argv) < 2:
        sys.exit("usage: python3 tools/environment.py FOLDER [EXTRA ...]")
    home, extras = Path(sys.argv[1]).absolute(), sys.argv[2:]
    own = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    torch = installed("torch", own)
    borrowed = own if torch and numbers(torch) >= MIN_TORCH else []
    kind = f"with its torch {torch}" if borrowed else "and the packages of constraints.txt"
    print(f"{home.name}: Python {sys.version.split()[0]} {kind}; extras {' '.join(extras)}", flush=True)
    # Borrowed packages include pip, and such an interpreter may lack the module that unpacks one.
    options = ["--without-pip"] if borrowed else []
    if subprocess.run([sys.executable, "-m", "venv", *options, home]).returncode:
        sys.exit("no virtual environment could be made (on Debian and Ubuntu: apt install python3-venv)")
    python = home / "bin" / "python"
    site = next(home.glob("lib/python3*/site-packages"))
    (site / "nanomegatron.pth").write_text("\n".join([str(ROOT), *borrowed]) + "\n")
    write_command(home / "bin" / "nanomegatron", python)

    wanted = requirements([e for e in extras if e != "oracle"])
    alone = [r for r in requirements(extras) if r not in wanted]  # the oracle, without its dependencies
    if borrowed:
        for requirement in wanted + alone:
            if installed(name_of(requirement), [str(site), *borrowed]) is None:
                add_missing(python, requirement, *(["--no-deps"] if requirement in alone else []))
        return
    done = pip(python, "-c", "constraints.txt", *wanted) and all(pip(python, "--no-deps", r) for r in alone)
    if not done:
        sys.exit("pip could not install the packages above: is there a network?")


if __name__ == "__main__":
    main()
