r"""The update of one shard: its main parameters and moments, on the device or in host memory.

    on the device    grads -> AdamW on main, m, v -> params, or casts of them (fast/fp8_gather.py)

    in host memory   device   grads 0  grads 1  grads 2 ...        params 0  params 1
                                 \        \        \                 /         /
                     host         [ AdamW 0     ][ AdamW 1     ][ AdamW 2     ] ...

The host takes the gradients of the next shard and gives back the parameters of the last while it works on
one, if asked to (--overlap-cpu-optimizer-d2h-h2d): that needs two pinned buffers each way, as large as the
largest shard, beside 12 bytes a parameter of ordinary host memory.
(ZeRO-Offload, arXiv 2101.06840)
"""

from collections import Counter, deque
from collections.abc import Iterable

import torch

from nanomegatron.config.settings import OptimizerConfig
from nanomegatron.dp_bucket import Bucket
from nanomegatron.fast.fp8_gather import WeightCasts
from nanomegatron.ops.adamw import DECAY, DECOUPLED, FlatState, Segments, adamw_, adamw_flat_, cast_flat_
from nanomegatron.ops.kernels import usable
from nanomegatron.param import ParamSpec

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # what --decoupled-lr is for
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Ferry:
    """Carries shards of gradients to the host, in the order of `begin`, and of parameters back.

    On a CPU both are plain copies.
    """

    def __init__(self, device: torch.device, ahead: bool) -> None:
        self.device, self.ahead = device, ahead
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: dict[tuple, torch.Tensor] = {}
        self.busy: dict[tuple, torch.cuda.Event] = {}  # the copy that last used a buffer
        self.waiting: deque[torch.Tensor] = deque()
        self.sailing: deque[tuple] = deque()
        self.turns = Counter()

    def begin(self, grads: Iterable[torch.Tensor]) -> None:
        """Shards of final gradients that `fetch` will give, one after the other."""
        self.waiting.extend(grads)
        self.largest = max(map(len, self.waiting))
        if self.ahead:
            self._load()

    def fetch(self) -> torch.Tensor:
        """The next shard of gradients in host memory; the host waits for it. Good until the next but one."""
        if not self.sailing:
            self._load()
        key, size = self.sailing.popleft()
        self._landed(key)
        if self.ahead and self.waiting:
            self._load()
        return self.buffers[key][:size]

    def send(self, main: torch.Tensor, params: torch.Tensor) -> None:
        """Begin to write the host's main parameters to those on the device; its stream waits for them."""
        out = self._buffer("out", params.dtype)
        self._landed(out)
        staged = self.buffers[out][: len(main)].copy_(main)
        self._copy(params, staged, out)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.busy[out])

    def _load(self) -> None:
        grads = self.waiting.popleft()
        key = self._buffer("in", grads.dtype)
        self._copy(self.buffers[key][: len(grads)], grads, key)
        self.sailing.append((key, len(grads)))

    def _buffer(self, way: str, dtype: torch.dtype) -> tuple:
        """The buffer of this way and type whose turn it is."""
        self.turns[way, dtype] += 1
        key = (way, dtype, self.turns[way, dtype] % 2)
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

    def _landed(self, key: tuple) -> None:
        if key in self.busy:
            self.busy[key].synchronize()


class ShardState:
    """Main parameters and moments of this rank's shard of one bucket, flat, and the update that needs them.

    On a GPU one kernel does it all. Torch's own update works on what is kept in bf16 in fp32, so that a step
    takes memory for the copy of one shard.
    """

    on_host = False

    def __init__(self, bucket: Bucket, config: OptimizerConfig, ferry: Ferry) -> None:
        self.bucket, self.config, self.ferry = bucket, config, ferry
        self.mixed = bucket.param_shard.dtype != torch.float32
        device = torch.device("cpu") if self.on_host else bucket.param_shard.device
        self.main = bucket.param_shard.float().to(device)  # in fp32 the parameters themselves
        self.exp_avg = torch.zeros_like(self.main, dtype=DTYPES[config.exp_avg_dtype])
        self.exp_avg_sq = torch.zeros_like(self.main, dtype=DTYPES[config.exp_avg_sq_dtype])

        def kind(spec: ParamSpec) -> int:
            return DECAY * spec.decay | DECOUPLED * (spec.name in VOCABULARY)

        ranges = [(piece.start, piece.stop, kind(piece.param.spec)) for piece in bucket.slices]
        self.casts = None if bucket.fp8 is None else WeightCasts(bucket, device, kind)
        self.segments = Segments.merged(ranges, device) if self.casts is None else self.casts.segments
        bucket.write_shard = lambda out: out.copy_(self.main)

    def update(
        self, step: torch.Tensor, values: torch.Tensor, grad_scale: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """AdamW's step number `step` from the bucket's `grad_shard` to its `param_shard`, or the casts of it.

        All 0-d, where the states are. values: `step_values` of this step. The gradients are divided by
        `grad_scale` first; where `skip` is 1 nothing changes.
        """
        if usable(grads := self.bucket.grad_shard, "adamw"):
            config, casts = self.config, self.casts
            copy, *fp8 = casts.begin() if casts else [self.bucket.param_shard if self.mixed else None]
            state = FlatState(self.main, copy, grads, self.exp_avg, self.exp_avg_sq, *fp8)
            hyper = (config.adam_beta1, config.adam_beta2, config.adam_eps)
            adamw_flat_(state, self.segments, (step, values, grad_scale, skip), hyper)
            if casts:
                casts.note(state.amax)
            return
        self.adamw(self.bucket.grad_shard.float(), step, values, grad_scale, skip)
        self.publish()

    @property
    def waits(self) -> bool:
        """Whether its casts have scales only when the amaxes of all weights are known."""
        return self.casts is not None and not self.bucket.layers[0].knows_scales

    def publish(self) -> None:
        """Write what other ranks are given of the main weights as they are."""
        if self.casts:
            self.cast()
        elif self.mixed:
            self.bucket.param_shard.copy_(self.main)

    def cast(self) -> torch.Tensor:
        """The casts of the main weights as they are, where these are; their amaxes are noted."""
        copy, scale, amax = self.casts.begin()
        cast_flat_(self.main, copy, self.segments, scale, amax)
        self.casts.note(amax)
        return copy

    def adamw(
        self,
        grads: torch.Tensor,
        step: torch.Tensor,
        values: torch.Tensor,
        grad_scale: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """The same from fp32 `grads` to `main`, all in one place."""
        config = self.config
        moments = self.exp_avg.float(), self.exp_avg_sq.float()
        for kind in sorted({kind for *_, kind in self.segments.ranges}):
            parts = [slice(start, stop) for start, stop, k in self.segments.ranges if k == kind]
            main, g, m, v = ([x[part] for part in parts] for x in (self.main, grads, *moments))
            lr, decay = values[kind & DECOUPLED], config.weight_decay if kind & DECAY else 0.0
            if kind & DECAY and config.weight_decay_incr_style != "constant":
                decay = 0.0  # torch's update takes but a host's number
                torch._foreach_mul_(main, 1.0 - lr * values[2] * (1.0 - skip))
            hyper = (config.adam_beta1, config.adam_beta2, config.adam_eps, decay)
            adamw_(main, g, (m, v), step, lr, hyper, grad_scale, skip)
        for kept, new in zip((self.exp_avg, self.exp_avg_sq), moments, strict=True):
            if kept.dtype != torch.float32:
                kept.copy_(new)

    def reset_main(self) -> None:
        """Take the main parameters from the parameters again."""
        if self.mixed:
            self.main.copy_(self.bucket.param_shard)


class HostShard(ShardState):
    """The same in host memory, for parameters in 16 bits; updates come in the order of `Ferry.begin`."""

    on_host = True

    def update(
        self, step: torch.Tensor, values: torch.Tensor, grad_scale: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """As above, the numbers on the host, which waits for the gradients."""
        self.adamw(self.ferry.fetch().float(), step, values, grad_scale, skip)
        self.publish()

    def publish(self) -> None:
        if self.casts:
            self.ferry.send(*(x.view(torch.uint8) for x in (self.cast(), self.casts.shard)))
        else:
            self.ferry.send(self.main, self.bucket.param_shard)
