"""Gradients summed over replicas, cut or not, against one process and plain torch."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from nanomegatron.build import buckets_class
from nanomegatron.config.settings import OptimizerConfig, ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets, lay_out, split_into_buckets
from nanomegatron.param import Init, ParamSpec, new_parameter, replica
from nanomegatron.report.banner import buckets_text
from nanomegatron.zero2 import Zero2Bucket
from tests.checkpoints import ALONE
from tests.spmd import run_spmd, spmd
from tests.toy import LENGTH, SAMPLES, VOCAB, Toy, built, parameter, samples, torch_train, train_step

STRATEGIES = ("no_shard", "optim", "optim_grads")
CASES = list(itertools.product(STRATEGIES, (False, True), (None, 1, 700)))
FEW = [  # of the fast tier
    ("no_shard", False, 1),
    ("no_shard", True, 1),
    ("no_shard", True, 700),
    ("optim", False, 700),
    ("optim", True, 700),
    ("optim", True, None),
    ("optim_grads", False, 700),
    ("optim_grads", True, 700),
    ("optim_grads", False, None),
]


def as_flags(strategy, overlap, size):
    return {
        "data_parallel_sharding_strategy": strategy,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap,
        "ddp_bucket_size": size,
        "ddp_average_in_collective": size == 700,
    }


def train(mesh, flags, steps):
    """Norms and weights after some steps."""
    model, buckets, optimizer = built(mesh, flags)
    norms = [train_step(model, buckets, optimizer, mesh).item() for _ in range(steps)]
    buckets.wait_params()
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_all(mesh, cases, steps):
    return [train(mesh, as_flags(*case), steps) for case in cases]


def close(ours, theirs, rel):
    assert ours[0] == pytest.approx(theirs[0], rel=rel)
    for name, weight in theirs[1].items():
        assert (ours[1][name] - weight).norm() <= rel * weight.norm(), name


@pytest.mark.parametrize(
    "world, cp", [(1, 1), (2, 1), (3, 1), (4, 2), pytest.param(4, 1, marks=pytest.mark.full)]
)
def test_every_way_to_cut_trains_like_torch(world, cp, full):
    """fp32; overlapped or not to the bit, and all ranks have the same parameters to the bit."""
    cases, steps = (CASES, 3) if full else (FEW, 2)
    ranks = run_spmd(train_all, world, cases, steps, cp=cp)
    expected = torch_train(steps)
    results = dict(zip(cases, zip(*ranks, strict=True), strict=True))
    for (strategy, overlap, size), each in results.items():
        for result in each:
            close(result, expected, 1e-6)
            same = [each[0]]  # and without a size the buckets differ: one, or as large as a network wants
            if overlap and size is not None and (strategy, False, size) in results:
                same.append(results[strategy, False, size][0])
            for twin in same:
                assert result[0] == twin[0]
                assert all(torch.equal(result[1][name], weight) for name, weight in twin[1].items())


def test_layout_is_aligned_flat_and_in_reverse_order():
    model, buckets, _ = built(ALONE, {})
    (bucket,) = buckets.all
    assert [p.spec.name for p in bucket.params[:4]] == ["2.bias", "2.outer", "2.inner", "2.norm"]
    assert bucket.params[-1] is model.embedding.weight and bucket.params == list(model.parameters())[::-1]
    assert all(begin % 64 == 0 for begin in bucket.begins) and len(bucket.gathered.param_data) % 128 == 0
    for begin, param in zip(bucket.begins, bucket.params, strict=True):
        for view, flat in ((param.data, bucket.gathered.param_data), (param.main_grad, bucket.grads)):
            assert view.data_ptr() == flat[begin:].data_ptr() and view.shape == param.spec.local_shape
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), Toy().parameters(), strict=True))
    assert lay_out([nn.Parameter(torch.zeros(n)) for n in (1, 64, 65, 3)], 384) == ([0, 64, 128, 256], 384)


def test_buckets_are_split_by_size():
    params = [parameter(str(i), (n,)) for i, n in enumerate((5, 5, 5, 20, 1))]
    params.insert(1, parameter("tied", (3,), uses=2, tied=True))

    def names(size):
        return ["".join(p.spec.name[0] for p in members) for members in split_into_buckets(params, size)]

    assert names(10) == ["0", "t", "12", "3", "4"] and names(1) == ["0", "t", "1", "2", "3", "4"]
    assert names(math.inf) == ["0t1234"]


@spmd(world=3)
def test_shards_are_equal_parts_of_each_bucket(mesh):
    _, buckets, _ = built(mesh, {"use_distributed_optimizer": True, "ddp_bucket_size": 500})
    assert len(buckets.all) > 3
    for bucket in buckets.all:
        size = len(bucket.gathered.param_data) // 3
        assert size % 128 == 0 and (bucket.shard.start, bucket.shard.stop) == (
            mesh.dp.rank * size,
            mesh.dp.rank * size + size,
        )
        assert bucket.gathered.shard.data_ptr() == bucket.gathered.param_data[bucket.shard].data_ptr()


def test_gradients_are_autograds():
    """main_grad of three microbatches against .grad of the same network without buckets."""
    model, buckets, _ = built(ALONE, {})
    plain = Toy()
    buckets.zero_grad_buffer(3)
    for data in samples().tensor_split(3):
        for net in (model, plain):
            net(data[:, :-1], data[:, 1:]).backward()
    buckets.finish_grad_sync()
    for p, twin in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, twin.grad, rtol=1e-5, atol=1e-5)
    buckets.zero_grad_buffer()
    assert all(p.bucket.grad_buffer(p) == (p.main_grad, 0) for p in model.parameters())
    assert all(p.bucket.grad_buffer(p) == (p.main_grad, 1) for p in model.parameters())


# What is communicated, and when.


def record(mesh, flags):
    """Reductions before the embedding's backward, and in all; buckets on their way after its forward."""
    model, buckets, optimizer = built(mesh, flags)
    reductions, pending = [], []

    def calls():
        return sum(
            n
            for (_, kind, what), n in mesh.observer.counts.items()
            if kind != "all_gather" and what == "calls"
        )

    def note(module, args, result):
        result.register_hook(lambda grad: reductions.append(calls()))
        pending.append([bucket.pending_gather is not None for bucket in buckets.all])

    order = []
    for i, bucket in enumerate(buckets.all):
        bucket.start_gather = lambda i=i, start=bucket.start_gather: (order.append(i), start())
    model.embedding.register_forward_hook(note)
    train_step(model, buckets, optimizer, mesh)
    assert order == list(reversed(range(len(buckets.all)))), "as the forward needs them"
    total = calls()
    model(*[samples()[:, :-1]] * 2)
    return reductions, total, pending, len(buckets.all)


@spmd(world=2)
def test_reductions_start_in_the_last_backward_and_gathers_end_in_the_forward(mesh):
    for strategy in ("no_shard", "optim"):
        flags = {"data_parallel_sharding_strategy": strategy, "ddp_bucket_size": 300}
        sums, total, pending, n = record(mesh, flags)
        assert sums == [0, 0, 0] and total == n + 1  # one more for the norm
        assert not any(pending[-1])
        mesh.observer.counts.clear()
        flags |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
        sums, total, pending, n = record(mesh, flags)
        assert sums == [0, 0, n - 1] and total == n + 1  # but the tied table's
        assert pending[-1] == [True] * (n - 1) + [False]  # the embedding has waited for its own alone
        mesh.observer.counts.clear()
    flags["data_parallel_sharding_strategy"] = "optim_grads"
    sums, total, pending, n = record(mesh, flags)
    assert sums == [n - 1, 2 * n - 1, 3 * n - 1] and total == 3 * n + 1


def test_one_collective_each_without_buckets():
    run_spmd(one_collective, 2)


def one_collective(mesh):
    model, buckets, optimizer = built(mesh, {"use_distributed_optimizer": True})
    train_step(model, buckets, optimizer, mesh)
    elements = len(buckets.all[0].gathered.param_data)
    assert mesh.observer.counts["dp_cp", "reduce_scatter", "bytes"] == 4 * elements
    assert mesh.observer.counts["dp_cp", "all_gather", "bytes"] == 4 * elements
    assert mesh.observer.counts["dp_cp", "reduce_scatter", "calls"] == 1


# Memory.


def memory(mesh, flags, config, grad_dtype):
    """Bytes a (padded) parameter of everything that stays after a step; the most gradients there were."""
    model, buckets, optimizer = built(mesh, flags, torch.bfloat16, config, grad_dtype)
    most = 0

    def on_full(bucket, inner=buckets.on_full):
        nonlocal most
        most = max(most, sum(b.grads is not None for b in buckets.all) + len(buckets.in_flight))
        inner(bucket)

    def alloc_grads(bucket):
        Zero2Bucket.alloc_grads(bucket)
        assert all(each.microbatch > bucket.done for each in buckets.in_flight), "of an earlier microbatch"

    buckets.on_full = on_full
    for bucket in () if buckets.bucket_class.keeps_grads else buckets.all:
        bucket.alloc_grads = partial(alloc_grads, bucket)
    train_step(model, buckets, optimizer, mesh)
    assert not buckets.in_flight
    if not buckets.bucket_class.keeps_grads:
        assert all(b.grads is None for b in buckets.all)
        assert all(p.main_grad is None for p in buckets.params)
    tensors = [t for b in buckets.all for t in (b.gathered.param_data, b.grads, b.grad_shard)]
    tensors += [t for s in optimizer.shards for t in (s.main, s.exp_avg, s.exp_avg_sq)]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None
    }
    return sum(storages.values()) / sum(len(b.gathered.param_data) for b in buckets.all), most


LOW = OptimizerConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
FULL = OptimizerConfig()


def memory_on_four(mesh):
    assert mesh.dp_cp.size == 4
    size = {"ddp_bucket_size": 300}
    for strategy, config, grad_dtype, expected in [
        ("no_shard", FULL, torch.float32, 18),
        ("optim", FULL, torch.float32, 6 + 12 / 4),
        ("optim_grads", FULL, torch.float32, 2 + 16 / 4),
        ("optim", LOW, torch.bfloat16, 4 + 8 / 4),
    ]:
        flags = size | {"data_parallel_sharding_strategy": strategy}
        found, most = memory(mesh, flags, config, grad_dtype)
        assert found == expected, strategy
        assert strategy != "optim_grads" or most <= 2, "the table's, and the one that is full"
    flags = size | {"data_parallel_sharding_strategy": "optim_grads", "overlap_grad_reduce": True}
    expected, most = memory(mesh, flags, FULL, torch.float32)
    assert expected == 6 and most <= 4, "the table's, the one that is full, and two on their way"


def test_memory_is_what_the_formulas_say():
    run_spmd(memory_on_four, 4)
    assert memory(ALONE, {}, FULL, torch.float32)[0] == 18


# Partial gradients, precision, errors.


class Several(nn.Module):
    """A norm, whose gradient is partial over tp, and a fused weight of which k's rows are."""

    def __init__(self, tp) -> None:
        super().__init__()
        q, k = (replica(name, (3, 50), tp, partial_grad=name == "k") for name in "qk")
        fused = ParamSpec((q, type(k)(**{**vars(k), "local_start": 3})), (6, 50))
        self.fused = new_parameter(fused, Init(), 1.0)
        self.norm = new_parameter(ParamSpec((replica("norm", (70,), tp, True),), (70,)), Init(), 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@spmd(world=4, tp=2)
def test_partial_gradients_are_summed_over_tp(mesh, strategy):
    """In one collective; each of two microbatches gives rank r the gradient r + 1."""
    model = Several(mesh.tp)
    flags = ParallelConfig(data_parallel_sharding_strategy=strategy, tensor_model_parallel_size=2)
    buckets = buckets_class(flags)(model, flags, mesh)
    buckets.zero_grad_buffer(2)
    for _ in range(2):
        (sum(p.sum() for p in model.parameters()) * (mesh.rank + 1)).backward()
    buckets.finish_grad_sync()
    assert mesh.observer.counts["tp", "all_reduce", "calls"] == 1
    own = 2 * sum(rank + 1 for rank in mesh.dp_cp.ranks)
    (bucket,) = buckets.all
    found = {}
    for _, piece in buckets.slices():
        values = piece.shard_view(bucket.grad_shard).unique().tolist()
        assert values == [own if piece.part.name == "q" else 2 * 10]
        found[piece.part.name] = piece.stop - piece.start
    assert strategy != "no_shard" or found == {"q": 150, "k": 150, "norm": 70}
    held = sum(piece.stop - piece.start for piece in bucket.slices)
    assert bucket.grad_shard.count_nonzero() == held


def bf16_gradients(mesh):
    """Gradients summed in bf16: how far they are from those summed in fp32, relative to their norm."""
    errors = []
    for strategy in STRATEGIES:
        shards = []
        for dtype in (torch.float32, torch.bfloat16):
            flags = {"data_parallel_sharding_strategy": strategy}
            model, buckets, optimizer = built(mesh, flags, grad_dtype=dtype)
            train_step(model, buckets, optimizer, mesh)
            expected = torch.float32 if strategy == "optim_grads" else dtype
            assert buckets.all[0].grad_shard.dtype == expected
            shards.append(torch.cat([bucket.grad_shard.float() for bucket in buckets.all]))
        errors.append(((shards[1] - shards[0]).norm() / shards[0].norm()).item())
    return errors, {key[1:]: n for key, n in mesh.observer.counts.items() if key[0] == "dp_cp"}


def test_bf16_reductions_are_half_the_bytes_within_a_bound():
    """Three microbatches and two ranks: 5 roundings of at most 2^-9, random in sign."""
    for errors, traffic in run_spmd(bf16_gradients, 2):
        assert all(1e-5 < error < 5 * 2**-9 for error in errors), errors
        once = traffic["all_reduce", "bytes"] // 6
        assert traffic["reduce_scatter", "bytes"] == pytest.approx(4 * 6 * once, rel=0.05)


def test_missing_and_superfluous_gradients_are_named():
    """A layer that is not used, or not in each microbatch; and more microbatches than were announced."""
    model, buckets, optimizer = built(ALONE, {"ddp_bucket_size": 100})
    train_step(model, buckets, optimizer, ALONE)
    data = samples()
    buckets.zero_grad_buffer(2)
    model(data[:, :-1], data[:, 1:]).backward()
    model.output(model.layers[0](model.embedding(data[:, :-1])), data[:, 1:]).backward()
    with pytest.raises(RuntimeError) as caught:
        buckets.finish_grad_sync()
    for name in ("1.inner", "2.outer", "2.norm"):
        assert name in str(caught.value)
    assert "0.inner" not in str(caught.value) and "embedding" not in str(caught.value)
    buckets.zero_grad_buffer()
    model(data[:, :-1], data[:, 1:]).backward()
    with pytest.raises(RuntimeError, match=r"gradient number [23], where each of 1 microbatches has [12]"):
        model(data[:, :-1], data[:, 1:]).backward()


def test_a_microbatch_is_done_when_every_parameter_has_it():
    """Also where chunks of a pipeline go ahead of others, and where a weight is used twice."""
    params = [parameter("late", (4,)), parameter("early", (4,)), parameter("tied", (4,), uses=2)]
    buckets = ParamAndGradBuckets(nn.ParameterList(params), ParallelConfig(), ALONE)
    late, early, tied = params
    buckets.zero_grad_buffer(3)
    (bucket,) = buckets.all
    seen = []
    for param in (early, early, tied, tied, tied, late, late, tied, early, tied, late, tied):
        bucket.count(param)
        seen.append(bucket.done)
    assert seen == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert not bucket.missing(3)


@spmd(world=2)
def test_parameters_read_before_they_are_there(mesh):
    """As where a layer's forward is not called, but its weights are used by name: nothing waits for them."""
    flags = {"use_distributed_optimizer": True, "overlap_param_gather": True, "ddp_bucket_size": 1}
    model, buckets, optimizer = built(mesh, flags)
    train_step(model, buckets, optimizer, mesh)
    model.layers[1]._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match="1.bias, 1.outer, 1.inner, 1.norm: read without the forward"):
        train_step(model, buckets, optimizer, mesh)
    buckets.wait_params()


def test_moved_gradients_add_up_in_fp32():
    """256 + 1 is 256 in bf16; nothing is lost between microbatches."""
    model = nn.ParameterList([parameter("bias", (1,), torch.bfloat16, 1.0)])
    buckets = ParamAndGradBuckets(model, ParallelConfig(), ALONE)
    buckets.zero_grad_buffer(2)
    for value in 256.0, 1.0:
        (model[0] * value).sum().backward()
    buckets.finish_grad_sync()
    assert model[0].main_grad.item() == 257.0 and model[0].grad is None


def test_description_says_what_is_out_of_the_ordinary():
    assert buckets_text(built(ALONE, {})[1]) == ""
    flags = {
        "data_parallel_sharding_strategy": "optim_grads",
        "overlap_grad_reduce": True,
        "ddp_bucket_size": 1,
    }
    text = buckets_text(built(ALONE, flags, grad_dtype=torch.bfloat16)[1])
    for words in ("states and gradients cut over 1 ranks", "13 buckets", "bfloat16", "during the backward"):
        assert words in text, text


def test_padding_and_loss():
    """The toy is worth testing with: padded rows, a loss near ln(13) = 2.6 a token before training."""
    model, data = Toy(), samples()
    assert (model.embedding.weight[VOCAB:] == 0).all()
    loss = model(data[:, :-1], data[:, 1:]).item() / (SAMPLES * LENGTH)
    assert 2 < loss < 4
