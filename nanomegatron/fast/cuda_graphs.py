"""Same result as `pp.run_schedule`, to the bit: forward and backward of a microbatch as one CUDA graph.

The plain form launches each of some hundred kernels from Python; for a small model that takes longer than
the kernels (--cuda-graph-impl full_iteration):

    host   F   B                                     eager: a launch a kernel
    GPU    |k|  |k|  |k|  |k|  |k|  ...
    host   copy, launch                              graph: one launch
    GPU    |k|k|k|k|k|...

A graph repeats kernels with the addresses that they had when it was captured, and runs nothing of the host.
So a microbatch's tensors are first copied to those that the graph reads, and the gradients are counted
afterwards. The first steps run as usual, and so does each step that a graph cannot repeat.

    kind     captured                           differs in
    first    the first microbatch of a step     FP8 weights are transposed, gradients may be overwritten
    later    any other                          it adds to gradients, and reads what the first has made

Both kinds share one memory pool, as large as the activations of a microbatch; it stays reserved. dp cannot
communicate inside a graph: with its overlaps layers are graphs (`layer_graphs.py`).
Gain, GPT-2 124M in FP8, 8 sequences, one H100: 19.2 ms a step, not 36.1; 64 sequences 126.3, not 128.9
(benchmarks/results/2026-11-25-gpt2-h100-graphs.json, without: 2026-11-25-gpt2-h100-before.json).
(Whole-network capture: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs)
"""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from nanomegatron.dp import ParamAndGradBuckets, wait_params
from nanomegatron.fp8 import Scales

LEFT_FREE = 2**30  # bytes that are left free


def inputs(step: Any, i: int) -> list[torch.Tensor]:
    """The tensors that microbatch i of a `step.ForwardStep` reads besides parameters -> `[...]` each"""
    return [*step.batches[i].tensors().values(), step.scale, step.tokens, step.total]


def shape_of(step: Any, i: int) -> Hashable:
    """What decides which kernels run for microbatch i; None: they depend on its contents."""
    batch = step.batches[i]
    if batch.cu_seqlens is not None or batch.shard is not None or step.aux_scale is not None:
        return None
    return tuple((name, x.shape) for name, x in batch.tensors().items())


def copied(step: Any, i: int) -> Any:
    """A step of only microbatch i, on copies of its `inputs`."""
    numbers = {name: getattr(step, name).clone() for name in ("scale", "tokens", "total")}
    return replace(step, batches=[step.batches[i].each(torch.clone)], **numbers)


def capture_graph(run: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Capture the kernels that `run` launches; return the function that launches them again."""
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # a graph that is freed during a capture ends it
    try:
        # thread_local: threads that read data may pin memory meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    finally:
        if collects:
            gc.enable()
    return graph.replay


def missing_memory(device: torch.device, activations: float = 2) -> int:
    """How many bytes are too few for graphs beside a step without them, by what the steps so far have used.

    Both need memory for the activations of a microbatch, and neither can use that of the other: for
    `activations` times what these take.
    """
    used = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return round(activations * used) + LEFT_FREE - torch.cuda.mem_get_info(device)[0] - cached


@dataclass
class GraphedSteps:
    """The function that a run calls as `pp.run_schedule`. plain: that; say: takes a line for the log.

    Raises nothing of its own: what graphs cannot do runs by `plain`, and `say` gets the reason once.
    """

    what: ClassVar[str] = "forward and backward of a microbatch are launched as a CUDA graph"

    plain: Callable[..., None]
    grads: ParamAndGradBuckets
    scales: Scales | None
    say: Callable[[str], None]
    warm_up: int = 3  # steps of a shape before it is captured
    capture: Callable[[Callable[[], None], Any], Callable[[], None]] = capture_graph
    missing: Callable[[torch.device], int] = missing_memory
    seen: Counter[Hashable] = field(default_factory=Counter)  # steps of each shape
    graphs: dict[Hashable, Any] = field(default_factory=dict)
    too_large: dict[Hashable, str] = field(default_factory=dict)  # shapes without memory, asked once
    said: set[str] = field(default_factory=set)
    pool: Any = None

    def __call__(
        self,
        stages: nn.ModuleList,
        step: Any,
        microbatches: int,
        shape: tuple[int, int, int],
        forward_only: bool = False,
        tracer: Any = None,
    ) -> None:
        """Run forward and backward of all microbatches, as `pp.run_schedule`. step: a `step.ForwardStep`"""
        scales = self.scales
        first_scales = (
            scales is not None and scales.recipe.quantizer_class.keeps_history and not scales.has_history
        )
        if forward_only or first_scales or not self.ready(stages, step, microbatches, tracer):
            return self.plain(stages, step, microbatches, shape, forward_only, tracer)
        for layer in scales.layers.values() if scales is not None else ():
            layer.cached_weight = None  # an evaluation may have made it; casts of the optimizer stay
        if self.pool is None and step.total.is_cuda:
            self.pool = torch.cuda.graph_pool_handle()
            self.say(f"graphs  {self.what} from here on")
        for i in range(microbatches):
            self.run(stages[0], step, i)

    def ready(self, stages: nn.ModuleList, step: Any, microbatches: int, tracer: Any) -> bool:
        """Whether graphs run this step; counts it as a warm-up if later ones of its shape could."""
        if why := self.eager_reason(stages, step, microbatches, tracer):
            if why not in self.said:
                self.say(f"graphs  not in this step: {why}")
            self.said.add(why)
            return False
        self.seen[key := shape_of(step, 0)] += 1
        return self.seen[key] > self.warm_up

    def eager_reason(self, stages: nn.ModuleList, step: Any, microbatches: int, tracer: Any) -> str:
        """Why this step cannot be a graph; "" if it can."""
        shapes = {shape_of(step, i) for i in range(microbatches)}
        if None in shapes or len(shapes) > 1:
            return "the kernels depend on the documents in it"
        if getattr(tracer, "watches", False):
            return "each of its ops is timed"
        if self.scales is not None and self.scales.stats_hook is not None:
            return "casts are counted (--log-fp8-stats)"
        if hooked := next((name for name, m in stages.named_modules() if has_hooks(m)), None):
            return f"module {hooked} has a hook"
        key = shape_of(step, 0)
        fresh = self.seen[key] == self.warm_up  # this step is the first to be captured
        if fresh and key not in self.too_large and (missing := self.missing(self.grads.params[0].device)) > 0:
            self.too_large[key] = f"{missing / 2**30:.1f} GiB more memory would be needed"
        return self.too_large.get(key, "")

    def run(self, chunk: nn.Module, step: Any, i: int) -> None:
        """Run microbatch i by its graph, which is captured if there is none yet."""
        wait_params(self.grads.params)
        kind = shape_of(step, i), i == 0
        if kind not in self.graphs:
            static = copied(step, i)
            self.graphs[kind] = static, self.captured(lambda: static(chunk, 0).backward())
        static, launch = self.graphs[kind]
        torch._foreach_copy_(inputs(static, 0), inputs(step, i))
        launch()
        step.total.copy_(static.total)

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the kernels of `run`; return what launches them and counts the gradients that they add."""
        with recorded(self.grads) as contributions:
            replay = self.capture(run, self.pool)

        def launch() -> None:
            replay()
            for param in contributions:
                param.bucket.count(param)

        return launch


@contextmanager
def recorded(grads: ParamAndGradBuckets) -> Iterator[list[nn.Parameter]]:
    """Context manager: contributions to gradients inside are listed, and not counted."""
    contributions: list[nn.Parameter] = []
    for bucket in grads.all:
        bucket.count = contributions.append  # hides the method
    yield contributions
    for bucket in grads.all:
        del bucket.count


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks other than that which waits for its parameters; graphs run none."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    hooks: Sequence[Any] = [hook for kind in kinds for hook in kind.values()]
    return any(getattr(hook, "func", None) is not wait_params for hook in hooks)
