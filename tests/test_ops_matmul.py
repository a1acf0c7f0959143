"""Matmuls by cuBLASLt with a chosen algorithm, and the tuner that chooses, by a library for the CPU."""

from pathlib import Path

import pytest
import torch

from nanomegatron.fast.fused_loss import fused_linear_cross_entropy
from nanomegatron.fp8 import Recipe, Scales
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.mesh import Axis
from nanomegatron.ops import fp8_matmul as ops_fp8_matmul
from nanomegatron.ops import tuner as ops_tuner
from nanomegatron.ops.matmul import A_TRANSPOSED, ADD, B_TRANSPOSED, Problem, candidates, matmul
from nanomegatron.ops.tuner import Tuner
from nanomegatron.param import Init, add_product
from nanomegatron.tp import ColumnParallelLinear, LinearFunction
from tests import fake_cublaslt
from tests.fake_cublaslt import made

pytestmark = fake_cublaslt.emulated
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LISTED = 4  # candidates: the library's five but for number 2, which it says has failed
GPU, TP = "GPU, cuBLASLt 1", Axis.single("tp")


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """The extension with cuda/matmul.cu alone; memory of a CPU is aligned to 64 bytes."""
    monkeypatch.setattr(ops_tuner, "ADDRESS_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with fake_cublaslt.installed(monkeypatch, ops_tuner, ops_fp8_matmul) as module:
        yield module


def whole(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Small whole numbers, whose sums of products are exact."""
    return torch.randint(-2, 3, shape).to(dtype)


class Times:
    """Instead of a clock: calls each candidate once, says what it is given, and counts."""

    def __init__(self, *times: float) -> None:
        self.times, self.taken = list(times) or [1.0] * LISTED, 0

    def __call__(self, run, count: int) -> list[float]:
        assert count == len(self.times)
        for choice in range(count):
            run(choice)
        self.taken += 1
        return self.times


def tuner(folder: Path, *times: float, owner: str = GPU, writes: bool = True) -> Tuner:
    return Tuner(folder / "new" / "gemm.json", owner, writes, Times(*times))


@pytest.mark.parametrize("out_type", [None, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("flags", range(8))
def test_all_candidates_of_all_forms(flags, dtype, out_type):
    """out = a b or out += a b, whatever is transposed; what is not added to is not read."""
    m, n, k = 6, 10, 4
    a, b, out = whole(m, k, dtype=dtype), whole(k, n, dtype=dtype), whole(m, n, dtype=out_type or dtype)
    expected = a.double() @ b.double() + (out.double() if flags & ADD else 0)
    stored = [x.t().contiguous() if flags & flag else x for x, flag in ((a, A_TRANSPOSED), (b, B_TRANSPOSED))]
    problem = Problem(m, n, k, dtype, dtype, out.dtype, flags)
    if not flags & ADD:
        out.fill_(float("nan"))
    assert candidates(problem, out, *stored) == LISTED
    used = []
    for choice in range(LISTED):
        found = out.clone()
        matmul(problem, choice, found, *stored)
        assert torch.equal(found.double(), expected)
        used.append(made("last_algorithm"))
    assert used == [0, 1, 3, 4]


def test_a_choice_beyond_the_list_is_an_error():
    a, b, out = whole(2, 4), whole(4, 2), whole(2, 2)
    with pytest.raises(IndexError):
        matmul(Problem(2, 2, 4, BF16, BF16, BF16, 0), LISTED, out, a, b)


def test_types_that_the_library_does_not_have_are_named():
    a, b, out = whole(2, 4), whole(4, 2), whole(2, 2, dtype=FP16)
    text = r"matmul: .*NOT_SUPPORTED, \[2, 4\] bf16 x \[4, 2\] bf16"
    with pytest.raises(RuntimeError, match=text):
        matmul(Problem(2, 2, 4, BF16, BF16, FP16, 0), 0, out, a, b)


@pytest.mark.parametrize(
    "times, algorithm",
    [((5.0, 4.0, 3.0, 6.0), 3), ((5.0, 4.0, 4.5, 6.0), 1), ((5.0, 4.96, 5.1, 6.0), 0)],
    ids=["third", "second", "gain too small"],
)
def test_the_fastest_is_chosen(tmp_path, times, algorithm):
    chosen = tuner(tmp_path, *times)
    a, weight = whole(3, 5, 8), whole(6, 8)
    for _ in range(2):
        y = chosen.product(a, weight.t())
        assert y.shape == (3, 5, 6) and torch.equal(y, a @ weight.t())
        assert made("last_algorithm") == algorithm
    assert torch.equal(chosen.product(y, weight), y @ weight)  # another problem
    assert chosen.time.taken == 2


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_timing_adds_nothing(tmp_path, dtype):
    """Candidates add to memory of their own, the chosen one once."""
    chosen, target = tuner(tmp_path, 5.0, 4.0, 5.0, 5.0), whole(6, 8, dtype=dtype)
    grad, x = whole(16, 6), whole(16, 8)
    before, sums = target.clone(), grad.double().t() @ x.double()
    for times in (1, 2):
        add_product(target, grad, x, tuner=chosen)
        assert torch.equal(target.double(), before.double() + times * sums)
    assert chosen.time.taken == 1 and made("last_algorithm") == 1


def test_operands_take_turns(tmp_path, monkeypatch):
    """As many as exceed the cache; all with the same numbers."""
    monkeypatch.setattr(ops_tuner, "ROTATED", 3 * (16 * 8 + 8 * 4 + 16 * 4) * 2)
    seen = []

    def launched(problem, choice, out, a, b):
        seen.append((out.data_ptr(), a.data_ptr(), b.data_ptr()))
        matmul(problem, choice, out, a, b)

    monkeypatch.setattr(ops_tuner, "matmul", launched)
    a, b = whole(16, 8), whole(8, 4)
    assert torch.equal(tuner(tmp_path).product(a, b), a @ b)
    assert len(set(seen)) == 3 and seen[3] == seen[0] == seen[4] and seen[0][1] == a.data_ptr()


def test_what_is_not_timed(tmp_path, monkeypatch):
    """In a CUDA graph and without gradients an unknown problem is torch's; a known one is not."""
    chosen, a, b = tuner(tmp_path, 5.0, 4.0, 5.0, 5.0), whole(4, 8), whole(8, 2)
    before = made("matmuls")
    assert torch.equal(chosen.when(False).product(a, b), a @ b)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(chosen.when(True).product(a, b), a @ b)
    assert made("matmuls") == before and not chosen.problems
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    chosen.product(a, b)
    before = made("matmuls")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for training in (False, True):
        assert torch.equal(chosen.when(training).product(a, b), a @ b)
    assert made("matmuls") == before + 2 and chosen.time.taken == 1


def test_what_stays_with_torch(tmp_path):
    chosen, before = tuner(tmp_path), made("matmuls")
    for a, b in (
        (whole(4, 8, dtype=FP32), whole(8, 2, dtype=FP32)),
        (whole(4, 16)[:, ::2], whole(8, 2)),
        (whole(4, 8), whole(8, 4)[:, ::2]),
        (whole(5, 8).flatten()[1:33].view(4, 8), whole(8, 2)),  # not aligned
        (whole(0, 8), whole(8, 2)),
        (whole(4, 0), whole(0, 2)),
    ):
        assert torch.equal(chosen.product(a, b), a @ b)
    grad, x = whole(16, 6), whole(16, 8)
    for target in (
        torch.zeros(8, 6).t(),
        torch.zeros(6, 8, dtype=torch.float64),
        torch.zeros(49)[1:].view(6, 8),
    ):
        add_product(target, grad, x, tuner=chosen)
        assert torch.equal(target.double(), grad.double().t() @ x.double())
    assert made("matmuls") == before and not chosen.problems


def test_no_memory_to_time(tmp_path):
    """The list's first is used, and not kept in the file."""

    def fails(run, count):
        raise torch.OutOfMemoryError("full")

    chosen, a, b = tuner(tmp_path), whole(4, 8), whole(8, 2)
    chosen.time = fails
    with pytest.warns(UserWarning, match=r"no memory to time \[4, 8\] \[8, 2\] bfloat16"):
        assert torch.equal(chosen.product(a, b), a @ b)
    assert made("last_algorithm") == 0 and not chosen.path.exists()


# In layers.


def problems(chosen: Tuner) -> list[str]:
    return [str(problem) for problem in chosen.problems]


class Everything(set):
    def __contains__(self, _: object) -> bool:
        return True


class Bucket:
    """As much of a bucket as a layer needs. overwrites: every gradient is the step's first."""

    def __init__(self, overwrites: bool = False) -> None:
        self.stale = Everything() if overwrites else set()
        self.ready = lambda weight: None


@pytest.mark.parametrize("overwrites", [False, True])
def test_the_three_matmuls_of_a_linear_layer(tmp_path, overwrites):
    """The same numbers as torch's; a step's first weight gradient is written, others are added."""
    chosen = tuner(tmp_path, 5.0, 4.0, 5.0, 5.0)
    x, weight, grad = whole(3, 2, 8).requires_grad_(), whole(6, 8).requires_grad_(), whole(3, 2, 6)
    weight.main_grad = torch.ones(6, 8)
    weight.bucket = Bucket(overwrites)
    plain = LinearFunction.apply(x, weight, TP, "copy")
    (dx,) = torch.autograd.grad(plain, x, grad)
    dw = weight.main_grad.clone()
    weight.main_grad.fill_(float("nan") if overwrites else 1.0)
    y = LinearFunction.apply(x, weight, TP, "copy", None, chosen)
    assert torch.equal(y, plain) and torch.equal(torch.autograd.grad(y, x, grad)[0], dx)
    assert torch.equal(weight.main_grad, dw)
    assert problems(chosen) == [
        "[6, 8] [8, 6]' bfloat16 x bfloat16 = bfloat16",
        "[6, 6] [6, 8] bfloat16 x bfloat16 = bfloat16",
        f"[6, 6]' [6, 8] bfloat16 x bfloat16 {'' if overwrites else '+'}= float32",
    ]


def test_the_matmuls_of_a_fused_loss(tmp_path):
    chosen = tuner(tmp_path, 5.0, 4.0, 5.0, 5.0)
    x, weight = whole(4, 2, 8).requires_grad_(), whole(16, 8).requires_grad_()
    labels, weights = torch.randint(16, (2, 4)), torch.rand(2, 4)
    results = []
    for each in (None, chosen):
        loss = fused_linear_cross_entropy(x, weight, labels, weights, TP, 16, tuner=each)
        results.append((loss, *torch.autograd.grad((loss * weights).sum(), (x, weight))))
    for plain, ours in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)
    assert len(chosen.problems) == 3 and " = float32" in problems(chosen)[2]
    with torch.no_grad():
        fused_linear_cross_entropy(x[:2], weight, labels[:, :2], None, TP, 16, tuner=chosen)
    assert len(chosen.problems) == 3


@pytest.mark.parametrize(
    "recipe, overwrites", [("tensorwise", False), ("tensorwise", True), ("rowwise", False)]
)
def test_the_three_matmuls_of_an_fp8_layer(tmp_path, recipe, overwrites):
    """Of one scale a tensor. Those of rows stay with torch."""
    linear = ColumnParallelLinear(32, 16, TP, Init(dtype=BF16, name="layer"), bias=False)
    use_fp8(linear, Scales(Recipe(recipe), torch.device("cpu")).add_layer("layer"))
    x, grad = torch.randn(16, 1, 32).to(BF16).requires_grad_(), torch.randn(16, 1, 16).to(BF16)
    linear.weight.main_grad = torch.zeros(16, 32)
    linear.weight.bucket = Bucket(overwrites)
    results = []
    for linear.fp8.tuner in (None, tuner(tmp_path, 5.0, 4.0, 5.0, 5.0)):
        linear.weight.main_grad.fill_(torch.nan if overwrites else 0)
        y = linear(x)[0] if isinstance(linear(x), tuple) else linear(x)
        results.append((y, *torch.autograd.grad(y, x, grad), linear.weight.main_grad.clone()))
    for plain, ours in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    expected = [
        "[16, 32] [32, 16]' float8_e4m3fn x float8_e4m3fn = bfloat16 fast",
        "[16, 16] [16, 32]' float8_e5m2 x float8_e4m3fn = bfloat16",
        f"[16, 16] [16, 32]' float8_e5m2 x float8_e4m3fn {'=' if overwrites else '+='} float32",
    ]
    assert problems(linear.fp8.tuner) == (expected if recipe == "tensorwise" else [])
