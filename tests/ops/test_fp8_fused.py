"""Norms and gated units with FP8 results: references, what is refused, and the kernels run on this CPU."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.ops import adamw as ops_adamw
from nanomegatron.ops import fp8_fused as ops_fused_fp8
from nanomegatron.ops.adamw import FlatState, Segments, adamw_flat_, cast_flat_
from nanomegatron.ops.fp8_cast import FORMATS, Fp8Output, fp8_cast_ref
from nanomegatron.ops.fp8_fused import (
    bias_act_backward_fp8,
    bias_act_fp8,
    cross_entropy_grad_fp8,
    gated_backward_fp8,
    gated_fp8,
    norm_fp8,
)
from nanomegatron.ops.gelu import EXACT, SQUARED_RELU, TANH, bias_act_ref
from nanomegatron.ops.norm import norm_ref
from nanomegatron.ops.swiglu import GELU, SILU, gated_ref
from tests import cuda_on_cpu

E4M3, E5M2 = FORMATS
EPS, NAN, INF = 1e-5, float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def wanted(dtype=E4M3, outputs="both", scale=37.5, amax=0.0, device="cpu") -> Fp8Output:
    return Fp8Output(dtype, torch.tensor(scale, device=device), torch.tensor(amax, device=device), outputs)


def near(found, exact: torch.Tensor, scale: torch.Tensor, kind: torch.dtype, slack: float = 1e-5) -> None:
    """Between the casts of the exact result a little lower and a little higher; NaN where that is.

    kind: of the op without FP8, to which the result is rounded first.
    """
    if found is None or not exact.numel():
        assert found is None or found.shape == exact.shape
        return
    off = slack * (exact.abs() + exact.abs().nan_to_num(0, 0, 0).amax())
    low, high = (fp8_cast_ref((exact + side).to(kind), scale, found.dtype).float() for side in (-off, off))
    nan = exact.isnan()
    assert found.shape == exact.shape and found.is_contiguous()
    assert torch.equal(found.float().isnan(), nan)
    assert ((low <= found.float()) & (found.float() <= high) | nan | exact.isinf()).all()


def both(pair, exact, spec: Fp8Output, kind: torch.dtype) -> None:
    """Both outputs and the amax, which is of the values rounded to `kind`; exact is float64."""
    row, flip = pair
    assert (row is None) == (spec.outputs == "columnwise") and (flip is None) == (spec.outputs == "rowwise")
    near(row, exact, spec.scale, kind)
    near(flip, exact.t(), spec.scale, kind)
    if row is not None and flip is not None:
        assert torch.equal(row.view(torch.uint8).t(), flip.view(torch.uint8))
    largest = exact.abs().max().cpu() if exact.numel() else torch.zeros(())
    amax = spec.amax.view(()).cpu()
    low, high = (largest * (1 + side) for side in (-2e-5, 2e-5))
    assert low.to(kind) <= amax <= high.to(kind) or amax.isnan() and largest.isnan()
    assert amax.isnan() or torch.equal(amax.to(kind).float(), amax)


def norm_case(rows, h, dtype, biased, add, wide=False):
    kind = torch.float32 if wide else dtype
    x, residual = (torch.randn(rows, h) + 0.5).to(dtype), torch.randn(rows, h).to(dtype) if add else None
    return x, residual, torch.randn(h).to(kind), torch.randn(h).to(kind) if biased else None


def check_norm(case, from_one: bool, spec: Fp8Output, also: bool) -> None:
    x, residual, weight, bias = case
    got = norm_fp8(*case, EPS, from_one, spec, also)
    total = x if residual is None else x + residual
    assert (got.total is None) if residual is None else torch.equal(got.total, total)
    v = total.double().view(-1, weight.numel())
    exact = norm_ref(v, weight.double(), None if bias is None else bias.double(), EPS, from_one)
    both((got.rowwise, got.columnwise), exact, spec, x.dtype)
    mean = v.mean(-1) if bias is not None else None
    assert (got.mean is None) == (mean is None)
    if mean is not None:
        torch.testing.assert_close(
            got.mean.double(), mean, rtol=1e-5, atol=1e-5 * float(v.norm() / max(len(v), 1))
        )
    var = (v if mean is None else v - mean[:, None]).square().mean(-1)
    torch.testing.assert_close(got.rstd.double(), (var + EPS).rsqrt(), rtol=1e-5, atol=0)
    assert (got.out is not None) == also
    if also:
        rtol = torch.finfo(x.dtype).eps
        torch.testing.assert_close(got.out.double(), exact.view(x.shape), rtol=rtol, atol=1e-5)


def check_gated(x, grad, act: int, dtype=E4M3, outputs="both", scale=37.5) -> None:
    wide = x.double().flatten(0, -2).requires_grad_()
    y = gated_ref(wide, act)
    specs = [wanted(dtype, outputs, scale, device=x.device) for _ in range(2)]
    both(gated_fp8(x, act, specs[0]), y.detach(), specs[0], x.dtype)
    (dx,) = torch.autograd.grad(y, wide, grad.double().flatten(0, -2))
    both(gated_backward_fp8(grad, x, act, specs[1]), dx, specs[1], x.dtype)


def check_biased(x, bias, grad, act: int, dtype=E4M3, outputs="both", scale=37.5) -> None:
    """An activation with a bias or without; the bias's gradient, new and added to what is there."""
    wide = x.double().flatten(0, -2)
    wide = (wide if bias is None else wide + bias.double()).requires_grad_()
    y = bias_act_ref(wide, act=act)
    specs = [wanted(dtype, outputs, scale, device=x.device) for _ in range(2)]
    both(bias_act_fp8(x, bias, act, specs[0]), y.detach(), specs[0], x.dtype)
    (dx,) = torch.autograd.grad(y, wide, grad.double().flatten(0, -2))
    dbias = None if bias is None else torch.full_like(bias, torch.nan, dtype=torch.float32)
    pair = bias_act_backward_fp8(grad, x, bias, act, specs[1], dbias)
    both(pair, dx, specs[1], x.dtype)
    if bias is None:
        return
    slack = 3e-6 * (dx.abs() + grad.double().flatten(0, -2).abs() * (1 + wide.detach().abs())).sum(0)
    assert dbias.dtype == torch.float32 and ((dbias - dx.sum(0)).abs() <= slack + 1e-30).all()
    target, spec = torch.ones_like(dbias), wanted(dtype, outputs, scale, device=x.device)
    both(bias_act_backward_fp8(grad, x, bias, act, spec, target, 1), dx, spec, x.dtype)
    spec = wanted(dtype, outputs, scale, device=x.device)
    both(bias_act_backward_fp8(grad, x, bias, act, spec), dx, spec, x.dtype)  # that of the bias is not wanted
    assert ((target - 1 - dx.sum(0)).abs() <= slack + 1e-6 * (1 + dx.sum(0).abs())).all()


def check_loss(logits, labels, lse, grad, real: int, dtype=E5M2, outputs="both", scale=37.5) -> None:
    """The gradient of the logits; the logits stay as they are."""
    before, spec = logits.clone(), wanted(dtype, outputs, scale, device=logits.device)
    exact = (logits.double() - lse.double()[:, None]).exp()
    exact -= (labels[:, None] == torch.arange(logits.shape[1], device=logits.device)).double()
    exact *= grad.double()[:, None]
    exact[:, real:] = 0
    both(cross_entropy_grad_fp8(logits, labels, lse, grad, real, spec), exact, spec, logits.dtype)
    assert torch.equal(logits, before)


def loss_case(t, width, dtype):
    """With labels of other ranks, and log-sum-exps of more columns than there are."""
    logits, labels = (torch.randn(t, width) * 3).to(dtype), torch.randint(-3, width + 3, (t,))
    return logits, labels, logits.float().logsumexp(-1) + torch.rand(t), torch.randn(t)


def biased_case(shape, dtype):
    x, bias, grad = torch.randn(shape) * 2, torch.randn(shape[-1]), torch.randn(shape)
    return tuple(t.to(dtype) for t in (x, bias, grad))


def gated_case(shape, dtype):
    return (torch.randn(shape) * 2).to(dtype), torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)


def adamw_case(n: int, ranges, offset=0, device="cpu", copy=E4M3) -> tuple[FlatState, Segments, tuple]:
    """A state with a copy in E4M3 `offset` elements after what is aligned, segments and numbers."""

    def flat(dtype=torch.float32, scale=1.0):
        return (torch.randn(n + offset, device=device) * scale).to(dtype)[offset:]

    count = len(ranges)
    scale, amax = torch.rand(count, device=device) * 100 + 30, torch.zeros(count, device=device)
    s = FlatState(flat(), flat(copy), flat(torch.bfloat16), flat(), flat(scale=0.1).square(), scale, amax)
    numbers = tuple(torch.tensor(x, device=device) for x in (3.0, (1e-2, 3e-3, 0.1), 8.0, 0.0))
    return s, Segments.from_ranges(ranges, torch.device(device)), numbers


def check_adamw(case) -> None:
    """The other outputs are those of the same step with a copy in bf16; the copy in E4M3 is the cast of that.

    And so where the step is skipped, or there is none but `cast_flat_`.
    """
    s, segments, numbers = case
    hyper, none = (0.9, 0.95, 1e-8), (*numbers[:3], torch.ones_like(numbers[3]))
    for skipped in (True, False):
        before = [x.clone() for x in s.tensors]
        if skipped:
            adamw_flat_(s, segments, none, hyper)
        else:
            cast_flat_(s.main, s.params, segments, s.scale, s.amax)
        check_copy(s, segments, before)
        for i in (0, 2, 3, 4):
            assert torch.equal(s.tensors[i].nan_to_num(), before[i].nan_to_num())
        s.params.copy_(before[1]), s.amax.zero_()
    before = [x.clone() for x in s.tensors]
    other = FlatState(before[0].clone(), before[0].bfloat16(), *(x.clone() for x in before[2:]))
    adamw_flat_(s, segments, numbers, hyper)
    adamw_flat_(other, segments, numbers, hyper)
    for ours, theirs in zip((s.main, *s.tensors[2:]), (other.main, *other.tensors[2:]), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    check_copy(s, segments, before)


def check_copy(s: FlatState, segments: Segments, before: list[torch.Tensor]) -> None:
    """The copy and the amax are those of a parameter in bf16; what no segment has is as before."""
    untouched = torch.ones(len(s.main), dtype=torch.bool, device=s.main.device)
    for i, (start, stop, _) in enumerate(segments.ranges):
        w = s.main[start:stop].bfloat16().float()
        copy, expected = s.params[start:stop].float(), fp8_cast_ref(w, s.scale[i], s.params.dtype).float()
        torch.testing.assert_close(copy, expected, rtol=0, atol=0, equal_nan=True)
        largest = w.abs().max() if start < stop else torch.zeros_like(s.amax[i])
        torch.testing.assert_close(s.amax[i], largest, rtol=0, atol=0, equal_nan=True)
        untouched[start:stop] = False
    assert torch.equal(s.params.view(torch.uint8)[untouched], before[1].view(torch.uint8)[untouched])
    assert torch.equal(s.main[untouched], before[0][untouched])


RANGES = [(0, 5, 2), (5, 8200, 0), (8201, 8202, 3), (8210, 8210, 0), (8215, 25000, 3)]


@pytest.mark.parametrize("kind, expected", [(torch.float32, 1.125), (torch.bfloat16, 1.0)])
def test_a_norm_is_rounded_to_its_type_before_fp8(kind, expected):
    """1.0625 + 2^-10 is above the half of FP8's 1 and 1.125, in bf16 it is the half, which goes to even."""
    x, weight = torch.tensor([[1.0, 1.0]], dtype=kind), torch.tensor([1.0625 + 2**-10, 1.0])
    for spec in (wanted(scale=1.0), wanted(E5M2, scale=64.0)):
        got = norm_fp8(x, None, weight, None, 0.0, False, spec, also=True)
        assert spec.amax == got.out.max().float() == (1.0625 if kind == torch.bfloat16 else 1.0625 + 2**-10)
    got = norm_fp8(x, None, weight, None, 0.0, False, wanted(scale=1.0))
    assert got.rowwise.float().tolist() == [[expected, 1.0]]


@pytest.mark.parametrize("outputs", ["rowwise", "columnwise", "both"])
def test_references(outputs):
    for biased, add in ((False, True), (True, False)):
        case = norm_case(6, 24, torch.float32, biased, add, wide=add)
        check_norm(case, add, wanted(outputs=outputs), biased)
    for act in (SILU, GELU):
        check_gated(*gated_case((3, 2, 20), torch.float32), act, E5M2, outputs)
    check_loss(*loss_case(6, 20, torch.float32), 17, E5M2, outputs)
    for act in (TANH, EXACT, SQUARED_RELU):
        x, bias, grad = biased_case((3, 2, 20), torch.float32)
        check_biased(x, bias if act else None, grad, act, E5M2, outputs)


def test_no_rows_and_no_amax():
    got = norm_fp8(torch.zeros(0, 8), None, torch.ones(8), None, EPS, False, Fp8Output(E4M3, torch.ones(1)))
    assert got.rowwise.shape == (0, 8) and got.columnwise is None and got.rstd.shape == (0,)
    row, flip = gated_backward_fp8(torch.zeros(0, 8), torch.zeros(0, 16), SILU, wanted())
    assert row.shape == (0, 16) and flip.shape == (16, 0)


def test_adamw_with_a_copy_in_e4m3():
    check_adamw(adamw_case(25003, RANGES))
    s, segments, numbers = adamw_case(8, [(0, 8, 0)])
    for bad in (
        dict(scale=None),
        dict(amax=s.amax[:0]),
        dict(params=s.params.to(E5M2)),
        dict(main=s.main.half()),
    ):
        with pytest.raises(ValueError, match="must be"):
            adamw_flat_(replace(s, **bad), segments, numbers, (0.9, 0.95, 1e-8))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: wanted(torch.bfloat16), "E4M3 or E5M2"),
        (lambda: wanted(outputs="columns"), "columnwise"),
        (lambda: wanted(scale=[1.0, 2.0]), "one fp32 element"),
        (lambda: wanted(amax=[1.0, 2.0]), "one fp32 element"),
        (lambda: gated_fp8(torch.zeros(2, 4).double(), SILU, wanted()), "must be fp32"),
        (lambda: gated_fp8(torch.zeros(2, 5), SILU, wanted()), "two halves"),
        (lambda: gated_fp8(torch.zeros(2, 4, device="meta"), SILU, wanted()), "on meta"),
        (lambda: gated_backward_fp8(torch.zeros(2, 4), torch.zeros(2, 4), SILU, wanted()), "gradient"),
        (lambda: gated_backward_fp8(torch.zeros(2, 2).half(), torch.zeros(2, 4), SILU, wanted()), "gradient"),
        (lambda: bias_act_backward_fp8(torch.zeros(2), torch.zeros(2, 4), None, TANH, wanted()), "gradient"),
        (
            lambda: cross_entropy_grad_fp8(*loss_case(4, 8, torch.half)[:3], torch.zeros(3), 8, wanted()),
            "numbers",
        ),
        (lambda: norm_fp8(torch.zeros(2, 4), None, torch.ones(3), None, EPS, False, wanted()), "weight"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The kernels, by the emulator.
FILES = "norm_fp8", "fp8_cast", "swiglu_fp8", "gelu_fp8", "column_sums", "adamw", "cross_entropy_fp8"


@pytest.fixture
def emulated(monkeypatch):
    if cuda_on_cpu.cuda_home() is None:
        pytest.skip("no CUDA headers here")
    cuda_on_cpu.run_here(monkeypatch, FILES, ops_fused_fp8, ops_adamw)


def unaligned(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None else torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 264), (16, 4104), (7, 72), (19, 37), (1, 1), (3, 2049), (0, 16)])
def test_norm_kernel(emulated, shape, dtype):
    for i, outputs in enumerate(("rowwise", "columnwise", "both")):
        for biased, add in ((False, True), (True, False), (True, True)):
            case = norm_case(*shape, dtype, biased, add, wide=add != biased)
            check_norm(case, add, wanted(FORMATS[i % 2], outputs), also=i != 1)
            if shape[0] == 32:
                check_norm(tuple(map(unaligned, case)), add, wanted(FORMATS[i % 2], outputs), also=True)


@pytest.mark.parametrize("shape", [(16, 8192), (8, 16384)])
def test_norm_of_rows_that_shared_memory_does_not_hold(emulated, shape):
    case = norm_case(*shape, torch.bfloat16, True, True)
    check_norm(case, False, wanted(outputs="both" if shape[0] == 16 else "rowwise"), also=False)


def test_norm_of_what_is_no_number(emulated):
    x, _, weight, _ = norm_case(16, 64, torch.bfloat16, False, False)
    x[3, 5], x[7, 0] = NAN, INF
    check = norm_fp8(x, None, weight, None, EPS, False, spec := wanted())
    expected = norm_ref(x.float(), weight.float(), None, EPS)
    assert spec.amax.isnan() and torch.equal(check.rowwise.float().isnan(), expected.isnan())
    assert torch.equal(check.columnwise.float().isnan(), expected.isnan().t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [SILU, GELU])
@pytest.mark.parametrize("shape", [(144, 2 * 136), (5, 2 * 13), (2, 65, 2 * 24), (1, 2), (0, 16)])
def test_gated_kernel(emulated, shape, act, dtype):
    case = gated_case(shape, dtype)
    for i, outputs in enumerate(("rowwise", "columnwise", "both")):
        check_gated(*case, act, FORMATS[i % 2], outputs)
    if shape[0] == 144:
        check_gated(*map(unaligned, case), act)


@pytest.mark.parametrize("act", [SILU, GELU])
def test_gated_kernel_of_strange_numbers(emulated, act):
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38, 1e-38, INF, -INF, NAN])
    gate, up = torch.meshgrid(values, values[:9].clamp(-1e2, 1e2), indexing="ij")
    x = torch.cat((gate.flatten()[None], up.flatten()[None]), -1)
    for name, found in (("y", gated_fp8(x, act, wanted())), ("dx", None)):
        if found is None:
            found = gated_backward_fp8(torch.ones_like(x[:, : gate.numel()]), x, act, wanted())
            wide = x.clone().requires_grad_()
            gated_ref(wide, act).sum().backward()
            expected = wide.grad
        else:
            expected = gated_ref(x, act)
        assert torch.equal(found[0].float().isnan(), expected.isnan()), name
        near(
            found[0][~expected.isnan()],
            expected[~expected.isnan()].double().clamp(-1e30, 1e30),
            torch.tensor(37.5),
            torch.float32,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [TANH, EXACT, SQUARED_RELU])
@pytest.mark.parametrize("shape", [(144, 136), (5, 13), (2, 65, 24), (130, 131), (1, 1), (0, 16)])
def test_bias_and_activation_kernel(emulated, shape, act, dtype):
    x, bias, grad = biased_case(shape, dtype)
    for i, outputs in enumerate(("rowwise", "columnwise", "both")):
        check_biased(x, bias, grad, act, FORMATS[i % 2], outputs)
        check_biased(x, None, grad, act, FORMATS[(i + 1) % 2], outputs)
    if shape[0] == 144:
        check_biased(*map(unaligned, (x, bias, grad)), act)
        check_biased(x, unaligned(bias), grad, act)


@pytest.mark.parametrize("act", [TANH, EXACT, SQUARED_RELU])
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_bias_and_activation_kernel_of_what_is_no_number(emulated, odd, act):
    x, bias, grad = biased_case((32, 64), torch.bfloat16)
    x[3, 5] = odd
    at = (x.double() + bias.double()).requires_grad_()
    y = bias_act_ref(at, act=act)
    (dx,) = torch.autograd.grad(y, at, grad.double())
    row, flip = bias_act_fp8(x, bias, act, wanted())
    assert torch.equal(row.float().isnan(), y.isnan()) and torch.equal(flip.float().isnan(), y.isnan().t())
    dbias = torch.empty(64)
    row, _ = bias_act_backward_fp8(grad, x, bias, act, wanted(), dbias)
    assert torch.equal(row.float().isnan(), dx.isnan()) and torch.equal(dbias.isnan(), dx.sum(0).isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(144, 136, 130), (5, 13, 13), (130, 264, 257), (1, 1, 1), (16, 128, 0)])
def test_loss_kernel(emulated, shape, dtype):
    case = loss_case(*shape[:2], dtype)
    for i, outputs in enumerate(("rowwise", "columnwise", "both")):
        check_loss(*case, shape[2], FORMATS[i % 2], outputs)
    if shape[0] == 144:
        check_loss(unaligned(case[0]), *case[1:], shape[2])


def test_loss_kernel_of_what_is_no_number(emulated):
    """In the columns that count; behind them it is 0."""
    logits, labels, lse, grad = loss_case(32, 64, torch.bfloat16)
    logits[3, 5], lse[7], logits[9, 60] = NAN, INF, NAN
    row, flip = cross_entropy_grad_fp8(logits, labels, lse, grad, 60, spec := wanted(E5M2))
    assert row.float().isnan().nonzero().tolist() == [[3, 5]] and spec.amax.isnan()
    assert torch.equal(flip.view(torch.uint8), row.view(torch.uint8).t()) and not row[:, 60:].float().any()


@pytest.mark.parametrize("offset", [0, 3])
def test_adamw_kernel(emulated, offset):
    case = adamw_case(25003, RANGES, offset)
    case[0].grads[20000] = NAN
    check_adamw(case)
