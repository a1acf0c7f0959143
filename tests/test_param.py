"""Initial weights: the slices of all ranks are one tensor, the same to the bit whatever cuts it."""

import math
from dataclasses import replace

import pytest
import torch

from nanomegatron.checkpoint.checkpoint import offset_of
from nanomegatron.fast.moe_pieces import AdditionStore
from nanomegatron.mesh import Axis
from nanomegatron.param import (
    Init,
    ParamSpec,
    WeightGradStore,
    accumulate,
    add_grad,
    draw_normal,
    is_deferred,
    new_parameter,
    replica,
    scaled_std,
    shard,
    stacked,
)


def axes(size):
    """The axis as each of its ranks sees it; without groups, since nothing is sent here."""
    return [Axis("tp", size, rank, tuple(range(size))) for rank in range(size)]


def put_together(params):
    """The global tensors by name from the local ones of all ranks; each element from exactly one owner."""
    whole, times = {}, {}
    for part, param in [(part, p) for p in params for part in p.spec.parts]:
        tensor = whole.setdefault(part.name, torch.full(part.shape, torch.nan))
        count = times.setdefault(part.name, torch.zeros(part.shape))
        view = part.local_view(param.detach())
        here = tuple(slice(start, start + n) for start, n in zip(offset_of(part), view.shape, strict=True))
        assert tensor[here].isnan().all() or torch.equal(tensor[here], view), "copies differ"
        tensor[here] = view
        assert torch.equal(part.global_view(tensor), view)
        count[here] += part.owner
    assert all((count == 1).all() for count in times.values()), "each element has one owner"
    return whole


def fused(axis):
    """q of 8 rows, k and v of 4, one after the other."""
    sizes = {"q": 8, "k": 4, "v": 4}
    return stacked(shard(f"a.{name}.weight", (rows, 6), 0, axis) for name, rows in sizes.items())


SPECS = {
    "rows": lambda axis: ParamSpec((shard("rows", (8, 6), 0, axis),), (8 // axis.size, 6)),
    "columns": lambda axis: ParamSpec((shard("columns", (6, 8), 1, axis),), (6, 8 // axis.size)),
    "one dim": lambda axis: ParamSpec((shard("one", (8,), 0, axis),), (8 // axis.size,)),
    "replica": lambda axis: ParamSpec((replica("replica", (5, 6), axis),), (5, 6)),
    "fused": fused,
    "vocabulary": lambda axis: ParamSpec(
        (shard("vocabulary", (9, 6), 0, axis, local_size=16 // axis.size),), (16 // axis.size, 6)
    ),
}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_gives_the_same_weights(kind, dtype):
    init = Init(seed=7, dtype=dtype, std=0.5)
    whole = {n: put_together([new_parameter(SPECS[kind](a), init) for a in axes(n)]) for n in (1, 2, 4)}
    for name, tensor in whole[1].items():
        assert torch.equal(tensor, draw_normal(name, tensor.shape, init).to(dtype).float())
        assert torch.equal(tensor, whole[2][name]) and torch.equal(tensor, whole[4][name])


def test_fused_parts_lie_one_after_the_other():
    spec = fused(axes(2)[1])
    assert [(p.name, offset_of(p), p.start, p.stop, p.local_start) for p in spec.parts] == [
        ("a.q.weight", (4, 0), 4, 8, 0),
        ("a.k.weight", (2, 0), 2, 4, 4),
        ("a.v.weight", (2, 0), 2, 4, 6),
    ]
    assert spec.name == "a.weight"
    biases = tuple(shard(f"a.{name}.bias", (4,), 0, Axis.single()) for name in "qkv")
    assert ParamSpec(biases, (12,)).name == "a.bias" and ParamSpec(biases[:1], (4,)).name == "a.q.bias"
    experts = tuple(shard(f"a.{i}.fc2.weight_t", (4,), 0, Axis.single()) for i in range(3))
    assert ParamSpec(experts, (12,)).name == "a.fc2.weight_t"
    local = torch.arange(8 * 6).view(8, 6)
    assert torch.equal(torch.cat([part.local_view(local) for part in spec.parts]), local)


def test_replicas_hold_the_same_slice():
    """Two heads of 3 rows on 4 ranks: ranks 0 and 1 hold the first, 2 and 3 the second."""
    pairs = [Axis("kv", 2, rank % 2, (rank // 2 * 2, rank // 2 * 2 + 1)) for rank in range(4)]
    ranks = [replace(axis, parts={2: pair}) for axis, pair in zip(axes(4), pairs, strict=True)]
    parts = [shard("k", (6, 2), 0, axis, copies=2) for axis in ranks]
    assert [part.partial for part in parts] == pairs
    assert [(p.start, p.stop, p.owner) for p in parts] == [
        (0, 3, True),
        (0, 3, False),
        (3, 6, True),
        (3, 6, False),
    ]
    params = [new_parameter(ParamSpec((part,), (3, 2)), Init(std=1.0)) for part in parts]
    assert torch.equal(params[2], params[3]) and not torch.equal(params[0], params[2])
    put_together(params)


def test_padding_rows_are_zero_and_belong_to_no_part():
    """9 rows padded to 16 on 4 ranks: 4, 4, 1 and no real rows."""
    params = [new_parameter(SPECS["vocabulary"](axis), Init(std=1.0)) for axis in axes(4)]
    parts = [p.spec.parts[0] for p in params]
    assert [(part.start, part.stop) for part in parts] == [(0, 4), (4, 8), (8, 9), (9, 9)]
    assert [part.local_view(p).shape[0] for part, p in zip(parts, params, strict=True)] == [4, 4, 1, 0]
    for part, param in zip(parts, params, strict=True):
        rows = part.stop - part.start
        assert (param[:rows] != 0).all() and (param[rows:] == 0).all()


def test_view_is_a_view():
    local = torch.zeros(8, 6)
    fused(axes(2)[0]).parts[1].local_view(local).fill_(1.0)
    assert local.sum() == 12 and local[4:6].sum() == 12


def test_weights_depend_on_seed_and_name():
    def new(name, seed):
        return new_parameter(
            ParamSpec((replica(name, (100, 100), Axis.single()),), (100, 100)), Init(seed, std=0.02)
        )

    torch.manual_seed(3)
    a = new("a", 1)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert torch.equal(a, new("a", 1)), "torch's own generator plays no part"
    assert torch.equal(before, torch.get_rng_state())
    for other in new("b", 1), new("a", 2):
        assert torch.corrcoef(torch.stack((a.flatten(), other.flatten())))[0, 1].abs() < 0.05
    assert abs(a.std() / 0.02 - 1) < 0.03 and a.mean().abs() < 0.001


def test_values_are_stable():
    """Old runs can be repeated: literal values of torch's CPU generator."""
    found = (
        draw_normal("decoder.layers.0.mlp.linear_fc1.weight", (2, 2), Init(1234, std=0.02)).flatten().tolist()
    )
    assert found == pytest.approx([-0.0015471466, -0.0208222941, -0.0155407339, -0.0139091648], abs=1e-8)


def test_fill_and_scaled_std():
    param = new_parameter(SPECS["vocabulary"](axes(4)[2]), Init(), fill=1.0)
    assert param.tolist() == [[1.0] * 6] + [[0.0] * 6] * 3
    assert scaled_std(0.02, 8) == pytest.approx(0.005)


class Bucket:
    """What `accumulate` sees of a bucket; its gradients have memory once it is asked for."""

    def __init__(self, param, unwritten=False):
        param.bucket, param.main_grad = self, None
        self.param, self.calls = param, []
        self.unwritten = {param} if unwritten else set()

    def grad_buffer(self, param):
        assert param is self.param
        if param.main_grad is None:
            param.main_grad = torch.full((8, 6), math.nan if self.unwritten else 2.0)
            self.calls.append("alloc")
        beta = 0 if self.unwritten else 1
        self.unwritten.clear()
        return param.main_grad, beta

    def count(self, param):
        assert param is self.param
        self.calls.append("ready")


def adding(grad, betas):
    """A `write` of this gradient `[...]` that notes each beta."""

    def write(out, beta):
        betas.append(beta)
        add_grad(out, grad, beta)

    return write


def parameter():
    return new_parameter(SPECS["rows"](Axis.single()), Init(dtype=torch.bfloat16, std=1.0))


def test_a_gradient_goes_to_the_bucket_or_to_autograd():
    """Without a bucket in the type of the parameter; with one into its fp32, and reported."""
    param, betas = parameter(), []
    write = adding(torch.ones(8, 6), betas)
    grad = accumulate(param, write)
    assert (grad == 1).all() and grad.dtype == torch.bfloat16
    bucket = Bucket(param)
    assert accumulate(param, write) is None and (param.main_grad == 3).all()
    assert bucket.calls == ["alloc", "ready"] and betas == [0, 1] and param.main_grad.dtype == torch.float32


@pytest.mark.parametrize("store", [WeightGradStore, AdditionStore])
def test_a_deferred_gradient(store):
    """Nothing is asked of the bucket before `write` runs: neither memory nor beta, which differ by then."""
    param, betas = parameter(), []
    bucket, param.wgrad_store = Bucket(param, unwritten=True), store()
    write = adding(torch.ones(8, 6), betas)
    with param.wgrad_store.collect() as works:
        assert accumulate(param, write) is accumulate(param, write) is None
        assert is_deferred(param)
    assert not bucket.calls and not betas
    WeightGradStore.run(works)
    assert betas == [0, 1] and bucket.calls == ["alloc", "ready", "ready"] and (param.main_grad == 2).all()


def test_a_deferred_gradient_without_a_bucket():
    param = parameter()
    param.wgrad_store = WeightGradStore()
    with param.wgrad_store.collect() as works:
        for _ in range(2):
            accumulate(param, adding(torch.ones(8, 6), []))
    assert param.grad is None
    WeightGradStore.run(works)
    assert (param.grad == 2).all()


def test_biases_and_norms_are_not_deferred():
    param = torch.nn.Parameter(torch.zeros(4))
    param.wgrad_store = WeightGradStore()
    with param.wgrad_store.collect() as works:
        assert not is_deferred(param)
        assert (accumulate(param, adding(torch.ones(4), [])) == 1).all()
    assert not works


@pytest.mark.parametrize("kind", SPECS)
def test_a_part_lies_in_one_piece(kind):
    """`flat_range` finds in the flattened local tensor what `local_view` shows."""
    for axis in axes(4):
        spec = SPECS[kind](axis)
        local = torch.arange(torch.Size(spec.local_shape).numel()).view(spec.local_shape)
        for part in spec.parts:
            begin, end = part.flat_range(spec.local_shape)
            assert torch.equal(local.flatten()[begin:end], part.local_view(local).flatten())
