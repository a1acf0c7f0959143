"""Steps as CUDA graphs, fast/cuda_graphs.py, beside the plain ones: equal to the bit, on CPUs by a recorder.

The recorder keeps the ops of a microbatch with the tensors that they read and wrote, and repeats them on
these, as a graph does its kernels: nothing that Python does besides is repeated. tests/gpu has real graphs.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.check_layout import graph_impl
from nanomegatron.config.cli import parse
from nanomegatron.fast.cuda_graphs import GraphedSteps
from nanomegatron.fast.fused_layer import FusedLayers
from nanomegatron.fast.layer_graphs import GraphedLayers
from nanomegatron.mesh import World
from nanomegatron.pp import run_schedule
from nanomegatron.report.evaluate import evaluate
from nanomegatron.report.steps import Reporter
from tests.spmd import run_spmd
from tests.training import arguments, numbers_of, set_up, sources  # noqa: F401

GELU = "--normalization LayerNorm --hidden-dropout 0.1 --cross-entropy-loss-fusion"
WAYS = {
    "gelu, dropout, ramp-up": ("gpt", f"{GELU} --rampup-batch-size 2 2 8 --global-batch-size 4"),
    "fp16, loss scale found": ("llama", "--fp16 --initial-loss-scale 65536"),
    "fp8 delayed": ("llama", "--bf16 --fp8-format hybrid --fp8-amax-history-len 3 --hidden-size 64"),
    "fp8 rowwise, recomputed": (
        "llama",
        "--bf16 --fp8-format hybrid --fp8-recipe rowwise --hidden-size 64 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "overlap, sharded": ("llama", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}


class Recorder(TorchDispatchMode):
    """Keeps every op that runs inside: (op, arguments, results)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.calls.append((op, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run all ops again, on the same tensors, into the same tensors; autograd sees nothing of it."""
        touched = {id(x): x for x in tree_leaves(self.calls) if isinstance(x, torch.Tensor)}
        with torch.autograd._unsafe_preserve_version_counter(tuple(touched.values())):
            for op, args, kwargs, result in self.calls:
                again = op(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def graphed(run, kind: type[GraphedSteps] = GraphedSteps) -> GraphedSteps:
    """Make a run's steps graphs of the recorder; a capture computes nothing, so gradients are put back."""

    def capture(step, pool):
        scales = run.model.scales
        changed = [bucket.grads for bucket in run.buckets.all] + ([scales.amax_history] if scales else [])
        before = [x.clone() for x in changed]
        with Recorder() as recorder:
            step()
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)
        return recorder.replay

    if kind is GraphedLayers:
        for chunk in run.model:
            chunk.run_layers = FusedLayers()
    said: list[str] = []
    graphs = kind(
        run_schedule,
        run.buckets,
        run.model.scales,
        said.append,
        warm_up=2,
        capture=capture,
        missing=lambda device: 0,
    )
    graphs.lines = said
    run.run_schedule = partial(graphs, tracer=run.observer(Reporter).tracer)
    return graphs


def trained(run, steps: int, evaluate_after: int = 0) -> list:
    """Losses and norms of the steps, then all parameters."""
    found = []
    for number in range(steps):
        numbers = numbers_of(train.train_step(run))
        found += [numbers["lm_loss"], numbers["grad_norm"], numbers["good"]]
        run.progress.iteration += 1
        if number + 1 == evaluate_after:
            evaluate(run, lambda: False)
    run.buckets.wait_params()
    return found + [param.detach().clone() for param in run.buckets.params]


LOCAL = [way for way in WAYS if "recomputed" not in way]


@pytest.mark.parametrize("way", LOCAL)
def test_graphs_of_layers_train_alike_to_the_bit(way, sources, tmp_path):  # noqa: F811
    """As below; every layer in a first and a later microbatch."""
    model, flags = WAYS[way]
    argv = arguments(sources, model, flags, "--train-iters 9 --eval-iters 1 --micro-batch-size 2")
    runs = [set_up(World(), argv, tmp_path) for _ in range(2)]
    graphs = graphed(runs[1], GraphedLayers)
    plain, fast = (trained(run, 8, evaluate_after=3) for run in runs)
    assert equal(plain, fast)
    assert len(graphs.graphs) == 2 * len(runs[1].model[0].layers) and not graphs.said


def equal(a: list, b: list) -> bool:
    return all(
        torch.equal(torch.as_tensor(x).nan_to_num(), torch.as_tensor(y).nan_to_num()) for x, y in zip(a, b)
    )


@pytest.mark.parametrize("way", WAYS)
def test_graphs_train_alike_to_the_bit(way, sources, tmp_path):  # noqa: F811
    """With accumulation, changed batch sizes, dropout, FP8, skipped steps and an evaluation between."""
    model, flags = WAYS[way]
    argv = arguments(sources, model, flags, "--train-iters 9 --eval-iters 1 --micro-batch-size 2")
    runs = [set_up(World(), argv, tmp_path) for _ in range(2)]
    graphs = graphed(runs[1])
    plain, fast = (trained(run, 8, evaluate_after=3) for run in runs)
    assert equal(plain, fast)
    assert len(graphs.graphs) == 2 and not graphs.said  # a first and a later microbatch


def train_on_two(world, argv: list[str], folder: str, kind: type[GraphedSteps]) -> int:
    """Two replicas, with graphs and without: equal to the bit; the number of graphs."""
    runs = [set_up(world, argv, folder) for _ in range(2)]
    graphs = graphed(runs[1], kind)
    plain, fast = (trained(run, 5, evaluate_after=3) for run in runs)
    assert equal(plain, fast) and not graphs.said
    return len(graphs.graphs)


SHARDED = "--use-distributed-optimizer"
BOTH = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
BUCKETS = "--ddp-bucket-size 4000 --train-iters 9 --eval-iters 1 --global-batch-size"


def test_replicas_communicate_between_steps(sources, tmp_path):  # noqa: F811
    argv = arguments(sources, "gpt", GELU, SHARDED, BUCKETS, "8")
    assert run_spmd(train_on_two, 2, argv, str(tmp_path), GraphedSteps) == [2, 2]


@pytest.mark.parametrize(
    "model, flags, microbatches",
    [
        ("gpt", f"{GELU} {BOTH}", 2),
        ("gpt", f"{GELU} {SHARDED} --overlap-param-gather", 1),
        ("llama", f"--bf16 --fp8-format hybrid --hidden-size 64 {BOTH}", 1),
    ],
    ids=["dropout", "gather", "fp8"],
)
def test_replicas_communicate_between_layers(model, flags, microbatches, sources, tmp_path):  # noqa: F811
    """Every microbatch has graphs of its four layers, also those beside which ranks communicate."""
    argv = arguments(sources, model, flags, "--micro-batch-size 2", BUCKETS, str(4 * microbatches))
    assert run_spmd(train_on_two, 2, argv, str(tmp_path), GraphedLayers) == [4 * microbatches] * 2


def test_what_graphs_cannot_do_runs_without_them(sources, tmp_path):  # noqa: F811
    """A hook, ops that are timed, too little memory; each is said once, and the losses stay."""
    argv = arguments(sources, "llama", "--train-iters 12 --micro-batch-size 2 --global-batch-size 4")
    runs = [set_up(World(), argv, tmp_path) for _ in range(2)]
    graphs, losses = graphed(runs[1]), [trained(runs[0], 10)]
    found, called, gib = trained(runs[1], 4), [], 2**30

    def steps(n: int) -> None:
        found[-len(runs[1].buckets.params) :] = trained(runs[1], n)

    hook = runs[1].model[0].layers[1].register_forward_hook(lambda *_: called.append(1))
    steps(2)
    hook.remove()
    runs[1].observer(Reporter).tracer.detailed = True
    steps(1)
    runs[1].observer(Reporter).tracer.detailed = False
    graphs.graphs.clear()
    graphs.seen = Counter(dict.fromkeys(graphs.seen, graphs.warm_up))
    graphs.missing = lambda device: 3 * gib
    steps(1)
    graphs.missing = lambda device: 1 / 0  # not asked in every step
    steps(1)
    graphs.missing = lambda device: 0
    graphs.too_large.clear()
    steps(1)
    assert equal(losses[0], found) and len(called) == 2 * 2 and len(graphs.graphs) == 2
    reasons = ("module 0.layers.1 has a hook", "each of its ops is timed", "3.0 GiB more memory")
    assert all(any(reason in why for why in graphs.said) for reason in reasons) and len(graphs.said) == 3


@pytest.mark.parametrize(
    "flags, why",
    {
        "--tp 2": "--tensor-model-parallel-size 2",
        "--num-experts 4": "--num-experts",
        "--reset-attention-mask": "documents",
        "--data-parallel-sharding-strategy optim_grads": "optim_grads",
        "--attention-dropout 0.1 --recompute-granularity selective": "recomputed attention dropout",
        "--recompute-granularity full --recompute-method uniform": "",
        "--use-distributed-optimizer": "",
        "--overlap-grad-reduce": "",
        "--overlap-grad-reduce --dp 2": "--overlap-grad-reduce, whose ranks",
    }.items(),
)
def test_a_run_that_cannot_have_graphs_says_so_before_it_starts(flags, why):
    parsed = parse(f"--mock-data --cuda-graph-impl full_iteration {flags}".split())
    errors = validate(parsed.config, 2 if " 2" in flags else 1)
    assert any(f"--cuda-graph-impl full_iteration: not with {why}" in e for e in errors) == bool(why), errors


OVERLAP = "--overlap-grad-reduce --dp 2"
AGAIN = "--recompute-granularity full --recompute-method uniform"


@pytest.mark.parametrize(
    "flags, impl",
    {
        "": "full_iteration",
        OVERLAP: "local",
        f"{OVERLAP} {AGAIN}": "none",
        "--tp 2": "none",
        "--cuda-graph-impl none": "none",
    }.items(),
)
def test_the_first_form_that_can_be_is_the_default(flags, impl):
    world = 2 if " 2" in flags else 1
    config = resolve(parse(f"--mock-data --vocab-size 99 {flags}".split()).config, world)
    assert graph_impl(config, world) == impl


def test_layers_that_are_computed_again_have_no_graphs_of_their_own():
    parsed = parse(f"--mock-data --cuda-graph-impl local {OVERLAP} {AGAIN}".split())
    assert any("--cuda-graph-impl local: not with recomputed layers" in e for e in validate(parsed.config, 2))
