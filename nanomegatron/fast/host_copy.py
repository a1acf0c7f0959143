"""Same result as `comm.read` on one rank, the copy to the host in flight while other work is launched.

Gain: the host waits for the numbers alone, not for what was launched after them. So a generated token is read
while the next one is computed (`decode.py`; benchmarks/results/2026-11-29-decode-h200.json), and experts'
numbers of rows while shared experts are launched (`moe_dispatch.py`).
"""

import torch


class AsyncHostCopy:
    """A copy of numbers `[...]` from the GPU to the host, in flight as soon as this is constructed."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.event = numbers.to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list:
        """Wait for the copy, and all work launched before it, and return the numbers."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers.tolist()
