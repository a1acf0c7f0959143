"""`nanomegatron completion bash|zsh`: completes commands, flags, presets and the values of flags.

    eval "$(nanomegatron completion bash)"          in ~/.bashrc; zsh likewise, in ~/.zshrc

The script is completion.bash beside this module, with the words filled in. All else is completed as files.
"""

import contextlib
import io
import re
from pathlib import Path

from nanomegatron.commands import verbs
from nanomegatron.config.help import PRESETS, TOPICS, CommandParser
from nanomegatron.config.rules import declared, flag
from nanomegatron.config.settings import Config

ZSH = "(( ${+functions[compdef]} )) || { autoload -U compinit && compinit }\n"
SHELLS = {"bash": "", "zsh": ZSH + "autoload -U bashcompinit && bashcompinit\n"}
Words = dict[str, list[str]]  # the flags of a command, each with the values to choose from


def main(argv: list[str]) -> int:
    """Print the script of a shell; returns the exit code."""
    parser = CommandParser(prog="nanomegatron completion", description=__doc__.splitlines()[0])
    parser.add_argument("shell", choices=SHELLS, help='for eval "$(nanomegatron completion SHELL)"')
    shell = parser.parse_args(argv).shell
    cases = {"VERB ": [*verbs.COMMANDS], "VERB FLAGS": ["--help", "--version"], "completion ": [*SHELLS]}
    for verb in verbs.COMMANDS.keys() - {"ops"}:  # whose --help would import torch
        words = train_words() if verb == "train" else words_of_help(verb)
        cases |= {f"{verb} FLAGS": [*words]} | {
            f"{verb} {name}": words[name] for name in words if words[name]
        }
    rows = (f'        "{case}") words="{" ".join(words)}" ;;' for case, words in sorted(cases.items()))
    script = Path(__file__).with_suffix(".bash").read_text(encoding="utf-8")
    print(SHELLS[shell] + script.replace("@CASES@", "\n".join(rows)), end="")
    return 0


def train_words() -> Words:
    """Every spelling of every setting, `--no-x` of switches, and the flags that are no settings."""
    words = {"--help": ["all", "presets", *TOPICS], "--print-config": []}
    words["--config"] = sorted(path.stem for path in PRESETS.glob("*.toml"))
    for _, s, _ in declared(Config()):
        names = [s.name, *s.metadata["aliases"]]
        words |= {flag(name): [*map(str, s.metadata["choices"])] for name in names}
        if s.type in (bool, bool | None) and not s.name.startswith("no_"):
            words |= {flag(f"no-{name}"): [] for name in names}
    return words


def words_of_help(verb: str) -> Words:
    """The flags in a command's --help, from argparse; none if a package that it imports is missing."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit, ImportError):
        verbs.main([verb, "--help"])
    words = {}
    for line in re.findall(r"^  (-.*?)(?:  |$)", text.getvalue(), re.M):
        choices = re.search(r"\{(.*?)\}", line)
        words |= dict.fromkeys(re.findall(r"--[\w-]+", line), choices[1].split(",") if choices else [])
    return words
