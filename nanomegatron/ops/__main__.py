"""`nanomegatron ops`: which implementation each op uses here, and why."""

import sys

from nanomegatron.config.help import CommandParser
from nanomegatron.ops.paths import print_report


def main(argv: list[str]) -> int:
    """Print the report; returns the exit code."""
    parser = CommandParser(prog="nanomegatron ops", description="Paths of all ops.")
    parser.parse_args(argv)
    print_report()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
