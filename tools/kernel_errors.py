"""Errors of all kernels on a GPU, results and gradients beside float64: `python -m tools.kernel_errors`.

    largest error    fp32     bf16     fp16
    rms_norm          1.5e-07  2.9e-03  2.8e-04  OK

A quick look in one process, for compute-sanitizer too; tests/gpu/test_kernel_*.py are thorough.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

from nanomegatron.ops.adamw import DECAY, FlatState, Segments, adamw_flat_, adamw_flat_ref_
from nanomegatron.ops.bias import column_sums
from nanomegatron.ops.cross_entropy import cross_entropy_grad_, cross_entropy_stats
from nanomegatron.ops.dropout import Dropout, bias_dropout_add, bias_dropout_add_ref
from nanomegatron.ops.embedding import add_position_grad_, add_word_grad_, lookup
from nanomegatron.ops.fp8_cast import fp8_cast, fp8_cast_ref
from nanomegatron.ops.gelu import SQUARED_RELU, TANH, bias_act, bias_act_ref
from nanomegatron.ops.kernels import FLOATS
from nanomegatron.ops.merge import PartialRows, merge_rows, merge_rows_ref
from nanomegatron.ops.norm import add_norm, norm, norm_ref
from nanomegatron.ops.permute import permute, route, unpermute
from nanomegatron.ops.rope import rope, rope_ref
from nanomegatron.ops.softmax import scaled_softmax, scaled_softmax_ref
from nanomegatron.ops.swiglu import SILU, gated, gated_ref

TOLERANCE = dict(zip(FLOATS, (1e-5, 2e-2, 2e-3)))  # relative to the largest value
T, H, V, EPS = 21, 130, 67, 1e-5  # odd sizes


def cases(device: torch.device) -> dict[str, tuple[Callable, Callable, tuple]]:
    """For each op with a kernel: a call of it, the same in torch for float64, and its inputs' shapes."""
    x, w = (7, 3, H), (H,)
    tables = [f(torch.arange(7.0 * 14, device=device).view(7, 1, 1, 14)) for f in (torch.cos, torch.sin)]
    labels = torch.arange(T, device=device) * 5 % V
    ids = (torch.arange(2 * T, device=device) * 3 % 5).int().view(T, 2)
    probs = torch.linspace(0, 1, 2 * T, device=device).view(T, 2)
    scale = torch.ones((), device=device)

    def loss(x):
        maximum, total, target = cross_entropy_stats(x.detach(), labels)
        lse = maximum + total.log()
        return lse - target, cross_entropy_grad_(x.detach().clone(), labels, lse, probs[:, 0])

    def loss_ref(x):
        losses = torch.nn.functional.cross_entropy(x, labels, reduction="none")
        return losses.detach(), torch.autograd.grad(losses, x, probs[:, 0].double())[0]

    def moe(x):
        routing = route(ids, 5, 4)
        return unpermute(permute(x, routing), routing, probs)

    def casts(x):
        row, flip = fp8_cast(x.detach(), scale, torch.float8_e4m3fn, outputs="both")
        return row.float(), flip.float().t()

    return {
        "rms_norm": (lambda x, w: norm(x, w, None, EPS), lambda x, w: norm_ref(x, w, None, EPS), (x, w)),
        "layer_norm": (lambda *a: norm(*a, EPS), lambda *a: norm_ref(*a, EPS), (x, w, w)),
        "add_norm": (
            lambda x, y, w, b: add_norm(x, y, w, b, EPS),
            lambda x, y, w, b: (norm_ref(x + y, w, b, EPS), x + y),
            (x, x, w, w),
        ),
        "bias_dropout_add": (_branch(bias_dropout_add), _branch(bias_dropout_add_ref), (x, x, w)),
        "rope": (lambda x: rope(x, *tables), lambda x: rope_ref(x, *tables), ((7, 3, 2, 30),)),
        "swiglu": (lambda x: gated(x, SILU), lambda x: gated_ref(x, SILU), (x,)),
        "gelu": _of_act(TANH),
        "squared_relu": _of_act(SQUARED_RELU),
        "column_sums": (
            lambda x: column_sums(x.detach(), x.new_empty(H, dtype=torch.float32)),
            lambda x: x.detach().sum((0, 1)),
            (x,),
        ),
        "scaled_softmax": (
            lambda x: scaled_softmax(x, 0.3, None, True),
            lambda x: scaled_softmax_ref(x, 0.3, None, True, None),
            ((2, 3, 5, 67),),
        ),
        "cross_entropy": (loss, loss_ref, ((T, V),)),
        "adamw_": (_adamw(adamw_flat_), _adamw(adamw_flat_ref_), (w, w)),
        "fp8_cast": (
            casts,
            lambda x: (fp8_cast_ref(x.detach(), scale, torch.float8_e4m3fn).float(),) * 2,
            ((T, H),),
        ),
        "permute": (moe, lambda x: x * probs.sum(1, keepdim=True), ((T, H),)),
        "merge_rows": (_merged(merge_rows), _merged(merge_rows_ref), ((T, 2, 3, 16), (9, 2, 3, 16))),
        "embedding": (_embedding, _embedding_ref, ((V, H), (7, H), (7, 3, H))),
    }


def _embedding(*inputs):
    """Rows of a table plus positions, and sums of gradients: of ids [3, 7], some without a row, places."""
    table, positions, grad = (x.detach() for x in inputs)
    ids, places = _ids(table)
    sums = [torch.zeros(len(x), H, dtype=torch.float32, device=x.device) for x in (table, positions)]
    with torch.no_grad():
        add_word_grad_(sums[0], ids, grad)
        add_position_grad_(sums[1], places, grad)
    return lookup(ids, table, 0, 1.5, positions, places), *sums


def _embedding_ref(*inputs):
    """The same by products with zeros and ones."""
    table, positions, grad = (x.detach() for x in inputs)
    ids, places = _ids(table)
    hot = (ids.t()[..., None] == torch.arange(V, device=ids.device)).to(table.dtype)
    x = hot @ table * 1.5 + positions[places][:, None] * hot.sum(2, keepdim=True)
    return x, hot.flatten(0, 1).t() @ grad.flatten(0, 1), grad.sum(1)[places.argsort()]


def _ids(table) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(T, device=table.device)
    return at.view(3, 7) * 5 % (V + 9), at[:7].flip(0)


def _of_act(act: int) -> tuple[Callable, Callable, tuple]:
    return partial(bias_act, act=act), partial(bias_act_ref, act=act), ((7, 3, H), (H,))


def _branch(add: Callable) -> Callable:
    def run(x, residual, bias):
        counters = (torch.arange(n, device=x.device) for n in x.shape[:2])
        return add(x, bias, residual, Dropout(0.1, 1, 2, *counters))

    return run


def _merged(merge: Callable) -> Callable:
    def run(first, part):
        lses = (x.detach()[..., 0].permute(1, 2, 0).float() for x in (first, part))
        out, ends = torch.empty_like(first), (slice(None), slice(T - 9, T))
        parts = (
            PartialRows(x.detach(), at, lse) for x, at, lse in zip((first, part), ends, lses, strict=True)
        )
        return out, merge([*parts], out)

    return run


def _adamw(update: Callable) -> Callable:
    def run(p, g):
        one, segments = (
            p.new_ones((), dtype=torch.float32),
            Segments.from_ranges([(0, 50, DECAY), (50, H, 0)], p.device),
        )
        moments = torch.zeros(2, H, device=p.device)
        state = FlatState(p.detach().float().clone(), None, g.detach().float(), *moments)
        update(state, segments, (one, one.new_tensor([0.1, 0.1, 0.01]), one, 0 * one), (0.9, 0.95, 1e-8))
        return state.main

    return run


def largest_error(run: Callable, exact: Callable, inputs: list[torch.Tensor]) -> float:
    """The largest error of results and gradients, relative to their largest values. inputs: `[...]` each"""
    found, expected = _results(run, inputs), _results(exact, [x.double() for x in inputs])
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()


def _results(function: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [y for y in results if y.requires_grad]
    weights = [(torch.arange(y.numel(), device=y.device) % 11 - 4).view(y.shape).to(y.dtype) for y in wanted]
    return [*results, *(torch.autograd.grad(wanted, leaves, weights) if wanted else ())]


def self_test(device: torch.device) -> bool:
    """Run all `cases` and print their errors -> whether all are within the tolerances."""
    generator, good = torch.Generator(device).manual_seed(1), True
    for op, (run, exact, shapes) in cases(device).items():
        errors = {}
        for dtype in FLOATS:
            given = [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]
            try:
                errors[dtype] = largest_error(run, exact, given)
            except (RuntimeError, ValueError) as error:
                errors[dtype] = float("nan")
                print(f"{op}, {dtype}: {error}")
        fine = all(error <= TOLERANCE[dtype] for dtype, error in errors.items())
        good &= fine
        print(f"{op:<16}", *(f"{error:8.1e}" for error in errors.values()), " OK" if fine else " FAILED")
    return good


if __name__ == "__main__":
    print("largest error    fp32     bf16     fp16")
    sys.exit(0 if self_test(torch.device("cuda", torch.cuda.current_device())) else 1)
