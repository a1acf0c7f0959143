"""The vocab-parallel losses on 1, 2 and 4 ranks against dense float64 torch with the same global weights."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanomegatron.comm import all_gather, own_slice
from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.fused_loss import FusedLossFunction, fused_linear_cross_entropy, fused_output_loss
from nanomegatron.layers import OutputLayer, logits_then_loss
from nanomegatron.mesh import Axis
from nanomegatron.ops import cross_entropy as ops_loss
from nanomegatron.pick_variants import pick_variants
from nanomegatron.tp import LinearFunction
from nanomegatron.tp import vocab_parallel_cross_entropy as unfused
from tests.spmd import run_spmd

SIZES = [1, 2, 4]
S, B, H, PADDED = 8, 2, 6, 16


class Bucket:
    """What `dp.py` attaches to a parameter, without anything behind it; counts its calls."""

    def __init__(self, param):
        param.bucket, param.main_grad = self, torch.zeros(param.shape)
        self.reported = 0

    def grad_buffer(self, param):
        return param.main_grad, 1

    def count(self, param):
        self.reported += 1


def close(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


def cross_entropy(mesh, vocab, chunk):
    """Padding columns hold large numbers, which must play no part; the chunks cut the 10 tokens unevenly."""
    ops_loss.CHUNK_TOKENS = chunk
    whole = 3 * torch.randn(5, 2, PADDED)
    whole[..., vocab:] = 100.0
    labels = torch.randint(vocab, (2, 5))
    labels[0, :2] = torch.tensor([0, vocab - 1])
    logits = own_slice(whole, mesh.tp, dim=-1).clone().requires_grad_()
    before = logits.detach().clone()
    dense = whole[..., :vocab].double().requires_grad_()
    loss = unfused(logits, labels, mesh.tp, vocab)
    expected = F.cross_entropy(dense.permute(1, 2, 0), labels, reduction="none")
    assert loss.shape == (2, 5) and loss.dtype == torch.float32
    close(loss, expected)
    same_on_all_ranks(loss, mesh.tp)
    weight = torch.rand(2, 5)
    (loss * weight).sum().backward()
    (expected * weight).sum().backward()
    close(logits.grad, own_slice(F.pad(dense.grad, (0, PADDED - vocab)), mesh.tp, dim=-1))
    assert torch.equal(logits.detach(), before), "the values of a leaf are not written over"


def same_on_all_ranks(x, axis):
    for other in all_gather(x.detach()[None], axis):
        assert torch.equal(other, x)


@pytest.mark.parametrize(
    "vocab, chunk, size",
    [(16, 2048, 1), (13, 4, 2), (13, 4, 4), (9, 10, 4)]
    + [pytest.param(16, 2048, size, marks=pytest.mark.full) for size in (2, 4)]
    + [pytest.param(9, 10, size, marks=pytest.mark.full) for size in (1, 2)],
)
def test_cross_entropy(vocab, chunk, size):
    """All columns real; a padded last shard; with 4 ranks and 9 words a last shard of nothing but padding."""
    run_spmd(cross_entropy, size, vocab, chunk, tp=size)


@pytest.mark.parametrize("fused_too", [False, True])
def test_the_loss_is_of_scaled_and_bounded_logits(fused_too):
    """--logits-scaling divides them, --final-logit-softcapping bounds them; the fused loss has no bound."""
    cap = None if fused_too else 3.0
    config = TransformerConfig(1, H, 2, logits_scaling=4.0, final_logit_softcapping=cap)
    x, weight = torch.randn(S, B, H), torch.nn.Parameter(3 * torch.randn(PADDED, H))
    layer, labels = OutputLayer(config, 13, weight, Axis.single()), torch.randint(13, (B, S))
    layer.loss = fused_output_loss if fused_too else logits_then_loss
    if not fused_too:
        with pytest.raises(RuntimeError, match="--final-logit-softcapping: the output layer needs a variant"):
            layer(x, labels, None)
    pick_variants(layer, Axis.single("cp"))
    logits = (x @ weight[:13].t()).double() / 4
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    with torch.no_grad():
        close(layer(x, labels, torch.ones(B, S)), expected)


def problem(tp, vocab, sequence_parallel=False, dtype=torch.float32):
    """This rank's x and weight, labels and loss weights, and the dense float64 losses, dx and dW."""
    x, table = torch.randn(S, B, H).to(dtype), torch.randn(PADDED, H).to(dtype)
    labels, weights = torch.randint(vocab, (B, S)), torch.rand(B, S)
    labels[0, :2] = torch.tensor([0, vocab - 1])
    weights[1, 2:5] = 0.0  # masked tokens
    dense_x, dense = x.double().requires_grad_(), table[:vocab].double().requires_grad_()
    losses = F.cross_entropy((dense_x @ dense.t()).permute(1, 2, 0), labels, reduction="none")
    (losses * weights).sum().backward()
    table[vocab:] = 10.0  # must play no part
    x_here, dx = (own_slice(t, tp) if sequence_parallel else t for t in (x, dense_x.grad))
    weight = torch.nn.Parameter(own_slice(table, tp))
    dw = own_slice(F.pad(dense.grad, (0, 0, 0, PADDED - vocab)), tp)
    given = SimpleNamespace(x=x_here.clone().requires_grad_(), weight=weight, labels=labels, weights=weights)
    return given, SimpleNamespace(losses=losses.detach(), dx=dx, dw=dw)


def fused(given, tp, vocab, sequence_parallel=False):
    args = given.x, given.weight, given.labels, given.weights
    return fused_linear_cross_entropy(*args, tp, vocab, sequence_parallel)


def fused_loss_on_ranks(mesh, vocab, chunk, sequence_parallel, in_bucket):
    """Losses and both gradients; in a bucket over two microbatches, each reported once and after its end."""
    FusedLossFunction.chunk = chunk
    given, expected = problem(mesh.tp, vocab, sequence_parallel)
    bucket = Bucket(given.weight) if in_bucket else None
    for microbatch in range(1, 3):
        given.x.grad = given.weight.grad = None
        losses = fused(given, mesh.tp, vocab, sequence_parallel)
        assert losses.shape == (B, S) and losses.dtype == torch.float32
        close(losses, expected.losses)
        same_on_all_ranks(losses, mesh.tp)
        (losses * given.weights).sum().backward()
        close(given.x.grad, expected.dx)
        if bucket:
            assert bucket.reported == microbatch and given.weight.grad is None
            close(given.weight.main_grad, expected.dw * microbatch)
        else:
            close(given.weight.grad, expected.dw)


ON_FOUR = [(16, 2048, 4, True, True), (13, 7, 4, True, False), (9, 3, 4, False, True), (9, 3, 4, True, True)]
ON_TWO = [(16, 2048, 2, False, False), (13, 7, 2, False, True), (9, 3, 2, True, True)]
ALONE = [(16, 2048, 1, False, True), (13, 7, 1, False, False)]
FAST = ON_FOUR + ON_TWO + ALONE
GRID = itertools.product(((16, 2048), (13, 7), (9, 3)), SIZES, (False, True), (False, True))
GRID = [(*vocab, *more) for vocab, *more in GRID]


@pytest.mark.parametrize(
    "vocab, chunk, size, sequence_parallel, in_bucket",
    FAST + [pytest.param(*case, marks=pytest.mark.full) for case in GRID if case not in FAST],
)
def test_fused_loss(size, vocab, chunk, sequence_parallel, in_bucket):
    """The vocabularies as above; one chunk, uneven chunks, chunks smaller than tp."""
    run_spmd(fused_loss_on_ranks, size, vocab, chunk, sequence_parallel, in_bucket, tp=size)


def tied(mesh):
    """The embedding's contribution is another: the two add up, and each is reported."""
    given, expected = problem(mesh.tp, 13)
    bucket = Bucket(given.weight)
    given.weight.main_grad.fill_(0.5)
    (fused(given, mesh.tp, 13) * given.weights).sum().backward()
    close(given.weight.main_grad, expected.dw + 0.5)
    assert bucket.reported == 1


def test_adds_to_what_is_there():
    run_spmd(tied, 2, tp=2)


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def bf16(mesh, sequence_parallel):
    """Bounds: 2^-8 is one rounding; logits, their gradient, each rank's dx."""
    FusedLossFunction.chunk = 7
    given, expected = problem(mesh.tp, 13, sequence_parallel, torch.bfloat16)
    losses = fused(given, mesh.tp, 13, sequence_parallel)
    (losses * given.weights).sum().backward()
    assert given.x.grad.dtype == given.weight.grad.dtype == torch.bfloat16
    assert off(losses, expected.losses) < 2**-8
    for found, right in (given.x.grad, expected.dx), (given.weight.grad, expected.dw):
        assert off(found, right) < 2 * 2**-8


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bf16(sequence_parallel):
    run_spmd(bf16, 2, sequence_parallel, tp=2)


def test_bf16_chunks_add_up_in_fp32(monkeypatch):
    """512 equal chunks: a bf16 sum would stand still halfway."""
    monkeypatch.setattr(FusedLossFunction, "chunk", 1)
    x = torch.ones(512, 1, 1, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    labels = torch.zeros(1, 512, dtype=torch.int64)
    fused_linear_cross_entropy(x, weight, labels, torch.ones(1, 512), Axis.single(), 2).sum().backward()
    assert weight.grad.tolist() == [[-256.0], [256.0]]


def collectives(mesh):
    """With sequence parallelism x is gathered once, not twice as unfused; dx is sent once."""
    size = 4 * S * B * H
    for sequence_parallel, kind in (False, "all_reduce"), (True, "reduce_scatter"):
        for chunk in 16, 4:
            FusedLossFunction.chunk = chunk
            given, _ = problem(mesh.tp, 13, sequence_parallel)
            statistics = mesh.tp.size * 2 * 4 * S * B
            mesh.observer.counts.clear()
            (fused(given, mesh.tp, 13, sequence_parallel) * given.weights).sum().backward()
            assert mesh.observer.counts["tp", kind, "bytes"] == size
            assert mesh.observer.counts["tp", "all_gather", "bytes"] == statistics + size * sequence_parallel
            assert mesh.observer.counts["tp", kind, "calls"] == 16 // chunk


def test_collectives():
    run_spmd(collectives, 2, tp=2)


def test_only_losses_without_gradients():
    """no_grad, frozen tensors: losses without loss weights, nothing written, no gradient matmul."""
    given, expected = problem(Axis.single(), 13)
    bucket, given.weights = Bucket(given.weight), None
    with torch.no_grad(), Recorder() as recorder:
        close(fused(given, Axis.single(), 13), expected.losses)
    assert recorder.calls.count("aten.mm") == 1
    given.x.requires_grad_(False)
    given.weight.requires_grad_(False)
    losses = fused(given, Axis.single(), 13)
    assert not losses.requires_grad and not bucket.reported and not given.weight.main_grad.any()


def test_the_gradient_must_be_the_loss_weights():
    given, _ = problem(Axis.single(), 13)
    bucket = Bucket(given.weight)
    for factor in 0.5, torch.where(torch.arange(S) == 3, 2.0, 1.0), float("nan"):
        loss = (fused(given, Axis.single(), 13) * given.weights * factor).sum()
        with pytest.raises(RuntimeError, match="loss_weights"):
            loss.backward()
    assert given.x.grad is None and not bucket.reported
    given.weights = None
    with pytest.raises(ValueError, match="loss_weights"):
        fused(given, Axis.single(), 13)


def test_gradients_are_given_once():
    """They were added to main_grad in the forward: a second backward has none to give."""
    given, _ = problem(Axis.single(), 13)
    loss = (fused(given, Axis.single(), 13) * given.weights).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


class Recorder(TorchDispatchMode):
    """The ops that run, and the largest sum of bytes that were alive at a time in new tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append(str(func.overloadpacket))
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in (t for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in old and storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata, None)
                self.largest = max(self.largest, tensor.numel())
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def test_saved_tensors_may_pass_through_hooks():
    """As save_on_cpu does: the result is no parameter, and has no bucket."""
    weight, x = torch.randn(8, 4, requires_grad=True), torch.randn(3, 1, 4, requires_grad=True)
    labels, weights = torch.tensor([[1, 5, 7]]), torch.rand(1, 3)
    found = []
    for hooks in (lambda x: x, lambda x: x.clone()):
        with torch.autograd.graph.saved_tensors_hooks(hooks, lambda x: x):
            loss = fused_linear_cross_entropy(x, weight, labels, weights, Axis.single(), 8)
        found.append(torch.autograd.grad((loss * weights).sum(), (x, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_weight_that_passed_through_hooks_still_reports_its_gradient():
    """The parameter itself must be notified, whatever the hooks make of saved tensors."""
    weight, x = torch.nn.Parameter(torch.randn(8, 4)), torch.randn(3, 1, 4, requires_grad=True)
    bucket, weights = Bucket(weight), torch.rand(1, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = fused_linear_cross_entropy(x, weight, torch.tensor([[1, 5, 7]]), weights, Axis.single(), 8)
    (loss * weights).sum().backward()
    assert bucket.reported == 1


def peak(loss, dtype, chunk, vocab=512, padded=512):
    """Most bytes a logit of a chunk (and largest tensor in them) that 64 tokens' loss and backward take."""
    x = torch.randn(64, 1, 2, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(padded, 2, dtype=dtype))
    Bucket(weight)
    labels, weights = torch.randint(vocab, (1, 64)), torch.ones(1, 64)
    with Recorder() as recorder:
        loss(x, weight, labels, weights, Axis.single(), vocab).sum().backward()
    return recorder.peak / (chunk * padded), recorder.largest / (chunk * padded)


def unfused_loss(x, weight, labels, weights, tp, vocab):
    return unfused(LinearFunction.apply(x, weight, tp, "copy"), labels, tp, vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [512, 500])
def test_peak_memory(monkeypatch, dtype, vocab):
    """As the docstring says: 10 (in fp32 8) bytes a logit of a chunk; unfused all logits once and 8 (4)."""
    monkeypatch.setattr(FusedLossFunction, "chunk", 8)
    monkeypatch.setattr(ops_loss, "CHUNK_TOKENS", 8)
    copies = 2 if dtype == torch.bfloat16 else 1  # in fp32 the logits need no copy in fp32
    small = 1.5  # all that is no logits: x, dx, and numbers for each token
    found, largest = peak(fused_linear_cross_entropy, dtype, 8, vocab)
    assert largest == 1 and abs(found - (6 + 2 * copies)) < small
    found, largest = peak(unfused_loss, dtype, 8, vocab)
    beside = 4 * 8 if dtype == torch.bfloat16 else 4  # on a CPU all gradients are made fp32
    assert largest == 8 and abs(found - (8 * dtype.itemsize + beside)) < small
