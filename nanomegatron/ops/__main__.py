"""`nanomegatron ops`: which implementation each op uses here, and whether kernels are correct."""

import sys

from nanomegatron.config.help import CommandParser
from nanomegatron.ops.paths import print_report


def main(argv: list[str]) -> int:
    """Print the report; returns the exit code."""
    parser = CommandParser(prog="nanomegatron ops", description="Paths of all ops.")
    parser.parse_args(argv)
    return print_report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
