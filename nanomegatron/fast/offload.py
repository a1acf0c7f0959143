r"""Same result as `optim.ShardState`, its main parameters and moments in host memory and updated there.

To the bit on a CPU; on a GPU to the rounding of torch's AdamW against the kernel's. With
--overlap-cpu-optimizer-d2h-h2d copies run beside the host's work:

    device   grads 0  grads 1  grads 2 ...        params 0  params 1
                  \        \        \                 /         /
    host         [ AdamW 0     ][ AdamW 1     ][ AdamW 2     ] ...

Gain (--optimizer-cpu-offload): 6 bytes a parameter on the GPU, not 18, so that one H200 trains Llama-3-8B
(benchmarks/results/2026-11-21-h200-llama3-8b-cpu-offload.jsonl). On the host 12 bytes a parameter, and two
pinned buffers each way, as large as the largest shard. (ZeRO-Offload, arXiv 2101.06840)
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from nanomegatron.config.settings import OptimizerConfig
from nanomegatron.dp import Bucket, ParamAndGradBuckets
from nanomegatron.optim import ShardState, StepScalars

HOST = torch.device("cpu")


class HostStaging:
    """Copies shards of gradients to the host, in the same order every step, and parameters back.

    grads `[size/ranks]`: the shards, complete when a step fetches the first. prefetch: copy the next shard
    while the host updates this one. If the device is a CPU, all are plain copies.
    """

    def __init__(self, grads: Sequence[torch.Tensor], device: torch.device, prefetch: bool) -> None:
        self.grads, self.device, self.prefetch = grads, device, prefetch
        self.largest = max(map(len, grads), default=0)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: dict[tuple, torch.Tensor] = {}
        self.busy: dict[tuple, torch.cuda.Event] = {}  # the copy that last used a buffer
        self.waiting: deque[torch.Tensor] = deque()
        self.copying: deque[tuple] = deque()
        self.turns = Counter()

    def fetch(self, now: StepScalars) -> tuple[torch.Tensor, StepScalars]:
        """Wait for the next shard of gradients -> `[size/ranks]`, and the step's scalars, on the host.

        The buffer of a shard is used again by the next but one.
        """
        if not self.waiting and not self.copying:  # the first one of a step
            self.waiting.extend(self.grads)
            if self.prefetch:
                self._load()
            self.now = StepScalars._make(number.cpu() for number in now)
        if not self.copying:
            self._load()
        key, size = self.copying.popleft()
        self._wait_copy(key)
        if self.prefetch and self.waiting:
            self._load()
        return self.buffers[key][:size], self.now

    def send(self, write: Callable[[torch.Tensor], None], out: torch.Tensor) -> None:
        """Start to copy to out `[size/ranks]` the values that `write` writes; the device's stream waits."""
        key = self._buffer("out", out.dtype)
        self._wait_copy(key)
        staged = self.buffers[key][: len(out)]
        write(staged)
        self._copy(out, staged, key)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.busy[key])

    def _load(self) -> None:
        grads = self.waiting.popleft()
        key = self._buffer("in", grads.dtype)
        self._copy(self.buffers[key][: len(grads)], grads, key)
        self.copying.append((key, len(grads)))

    def _buffer(self, direction: str, dtype: torch.dtype) -> tuple:
        """The key of the buffer to use next for this direction and type; there are two of each."""
        self.turns[direction, dtype] += 1
        key = (direction, dtype, self.turns[direction, dtype] % 2)
        if key not in self.buffers:
            self.buffers[key] = torch.empty(self.largest, dtype=dtype, pin_memory=self.stream is not None)
        return key

    def _copy(self, out: torch.Tensor, source: torch.Tensor, key: tuple) -> None:
        if self.stream is None:
            out.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            out.copy_(source, non_blocking=True)
            self.busy[key] = self.stream.record_event()

    def _wait_copy(self, key: tuple) -> None:
        if key in self.busy:
            self.busy[key].synchronize()


class HostShard(ShardState):
    """A shard whose main parameters and moments are in host memory."""

    def __init__(self, bucket: Bucket, config: OptimizerConfig, staging: HostStaging) -> None:
        super().__init__(bucket, config, HOST)
        self.staging = staging

    def update(self, now: StepScalars) -> None:
        """Update on the host, which waits for the gradients."""
        grads, on_host = self.staging.fetch(now)
        self.adamw(grads.float(), on_host)
        self.publish()

    def publish(self) -> None:
        """Write the parameters as `ShardState.publish` does, through a staging buffer."""
        gathered = self.bucket.gathered
        self.staging.send(partial(gathered.write, self.main), gathered.shard)


def host_state(
    buckets: ParamAndGradBuckets,
    config: OptimizerConfig,
    otherwise: Callable[[Bucket, OptimizerConfig], ShardState] = ShardState,
) -> Callable[[Bucket, OptimizerConfig], ShardState]:
    """Makes the states of the first buckets of the forward on the host, for `optim.ShardUpdates`.

    They hold the fraction of all parameters that `config` asks for, up to a bucket more; `otherwise` makes
    the other states.
    """
    most = config.optimizer_offload_fraction * sum(len(bucket.grad_shard) for bucket in buckets.all)
    moved, size = [], 0
    for bucket in reversed(buckets.all):
        if size < most:
            moved.append(bucket)
            size += len(bucket.grad_shard)
    grads = [bucket.grad_shard for bucket in moved]
    staging = HostStaging(grads, buckets.params[0].device, config.overlap_cpu_optimizer_d2h_h2d)

    def state(bucket: Bucket, config: OptimizerConfig) -> ShardState:
        return HostShard(bucket, config, staging) if bucket in moved else otherwise(bucket, config)

    return state
