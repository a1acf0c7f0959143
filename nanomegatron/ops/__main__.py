"""`python -m nanomegatron.ops`: the path of every op here, and whether kernels compute what they should."""

import sys

from nanomegatron.ops.paths import report

if __name__ == "__main__":
    sys.exit(report())
