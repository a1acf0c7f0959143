"""`nanomegatron ops`: which implementation each op uses here, and why."""

import sys

import torch

from nanomegatron.config.help import CommandParser
from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops.kernels import kernels_unavailable
from nanomegatron.ops.matmul import missing
from nanomegatron.ops.paths import paths


def main(argv: list[str]) -> int:
    """Print what is built and what runs; returns the exit code."""
    parser = CommandParser(prog="nanomegatron ops", description="Paths of all ops.")
    parser.parse_args(argv)
    kernels = ops_kernels._kernels
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    none = f"no kernels: {ops_kernels.MISSING}" if device else "no kernels, which only a GPU needs"
    built = f"{kernels.__file__}, for {kernels.archs}" if kernels else none
    print(f"built     {built} | torch {torch.__version__}")
    if device is None:
        print("device    no GPU here: all ops run in plain torch on the CPU")
    else:
        major, minor = torch.cuda.get_device_capability(device)
        fits = kernels_unavailable(device) or f"the kernels run; cuBLASLt: {missing() or 'there'}"
        print(f"device    {torch.cuda.get_device_name(device)}, sm_{major}{minor}: {fits}")
    print("\n" + "\n".join(f"{op:<16} {path}" for op, path in paths(device or torch.device("cpu")).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
