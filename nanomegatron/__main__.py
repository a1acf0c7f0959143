"""`python -m nanomegatron COMMAND ...`: the commands beside train.py, preprocess.py and convert.py."""

import importlib
import sys

# Command: the module with its `main(argv)`, imported when it is run, and what the command does.
COMMANDS = {
    "generate": ("nanomegatron.commands.generate_args", "continue a text with a trained model"),
    "ops": ("nanomegatron.ops.__main__", "the path of every op here, and why; on a GPU a self-test"),
    "schedules": ("nanomegatron.commands.schedules", "print or draw a pipeline schedule"),
}


def main(argv: list[str]) -> int:
    """Run the command that the first argument names; returns its exit code, 2 for an unknown one."""
    name, *rest = argv or ["--help"]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    lines = ["usage: python -m nanomegatron COMMAND ...   (COMMAND --help: its options)", ""]
    lines += [f"  {command:<12}{what}" for command, (_, what) in COMMANDS.items()]
    if name in ("-h", "--help"):
        print("\n".join(lines))
        return 0
    print("\n".join([f"python -m nanomegatron: no command {name!r}", *lines]), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
