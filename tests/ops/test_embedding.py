"""Embedding in plain torch: values and gradients against float64, its bits on a CPU, what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.ops.embedding import add_position_grad_, add_word_grad_, lookup
from nanomegatron.param import Init, ParamSpec, WeightGradStore, new_parameter, replica
from nanomegatron.tp import EmbeddingFunction, VocabParallelEmbedding

FP32, BF16 = torch.float32, torch.bfloat16
ONE = Axis.single()
S, B = 12, 3
H, ROWS = 5, 9
IDS = torch.tensor([[0, 8, 9, -1, 3, 3, 3, 20, 8, 1, 1, 0]] * 2 + [[3] * S])
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]] * B)


def test_values_by_hand():
    """Ids without a row give zeros, also where a position is added."""
    table, positions = torch.arange(6.0).view(3, 2), torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    ids = torch.tensor([[5, 7], [4, 6]])
    found = lookup(ids, table, 5, 2.0, positions, torch.tensor([1, 0]))
    assert found.tolist() == [[[30.0, 42.0], [0.0, 0.0]], [[18.0, 30.0], [14.0, 26.0]]]
    assert torch.equal(found, lookup(ids, table, 5, 2.0, positions, torch.tensor([[1, 0], [1, 0]])))
    assert torch.equal(found, lookup(ids.int(), table, 5, 2.0, positions, torch.tensor([1, 0]).int()))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("packed", [False, True])
def test_the_bits_of_plain_torch(packed, dtype):
    """As by indexing, F.embedding and autograd, into main_grads that have a contribution already."""
    table, positions, grad = torch.randn(ROWS, H), torch.randn(S, H), torch.randn(S, B, H)
    table, positions, grad = (x.to(dtype) for x in (table, positions, grad))
    places, (words, others) = (
        PACKED if packed else torch.randperm(S),
        (torch.randn(ROWS, H), torch.randn(S, H)),
    )
    local = IDS.t().contiguous()
    here = ((local >= 0) & (local < ROWS))[..., None]
    leaf = positions.clone().requires_grad_()
    added = F.embedding(places.t() if packed else places[:, None], leaf)
    plain = table[local.remainder(ROWS)] * here * 1.5 + added
    assert torch.equal(lookup(IDS, table, 0, 1.5, positions, places), plain.where(here, 0.0))
    plain.backward(grad)
    expected = words.index_put((local.remainder(ROWS),), (grad * here).float(), accumulate=True)
    add_word_grad_(found := words.clone(), IDS, grad)
    assert torch.equal(found, expected)
    add_position_grad_(found := others.clone(), places, grad)
    assert torch.equal(found, others + leaf.grad)


class Model(nn.Module):
    """Words and positions on one rank, whose table holds the ids 0 to 8."""

    def __init__(self) -> None:
        super().__init__()
        self.words = VocabParallelEmbedding(ROWS, ROWS, H, ONE, Init(name="words", std=1.0))
        spec = ParamSpec((replica("positions", (S, H), ONE),), (S, H))
        self.positions = new_parameter(spec, Init(std=1.0))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.words(IDS, 2.0, self.positions, places)


@pytest.mark.parametrize("places", [torch.arange(S).flip(0), PACKED], ids=["row", "packed"])
@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients(places, bucket, deferred):
    """Against float64; twice, as two microbatches; only when the deferred work runs."""
    model, grad = Model(), torch.randn(S, B, H)
    params = model.words.weight, model.positions
    table, positions = (p.detach().double() for p in params)
    local, at = IDS.t(), places[:, None].expand(S, B) if places.dim() == 1 else places.t()
    here = ((local >= 0) & (local < ROWS))[..., None]
    rows = local.clamp(0, ROWS - 1)
    exact = (table[rows] * 2 + positions[at]).where(here, 0.0)
    own = torch.zeros_like(table).index_put((rows,), 2 * grad.double() * here, accumulate=True)
    # Of other ranks' tokens, too: a rank has the whole gradient of the sum over tp.
    whole = torch.zeros_like(positions).index_put((at,), grad.double(), accumulate=True)
    if bucket:
        ParamAndGradBuckets(model, ParallelConfig(), Mesh()).zero_grad_buffer(2)
    store = WeightGradStore()
    for param in params:
        param.wgrad_store = store
    for microbatch in range(2):
        y = model(places)
        torch.testing.assert_close(y.double(), exact)
        if not deferred:
            y.backward(grad)
            continue
        with store.collect() as works:
            y.backward(grad)
        assert len(works) == 2 and all((p.grad is None) == (bucket or microbatch == 0) for p in params)
        assert not bucket or all(p.bucket.counts[p] == microbatch for p in params)
        store.run(works)
    for param, expected in zip(params, (own, whole), strict=True):
        found = param.main_grad if bucket else param.grad
        torch.testing.assert_close(found.double(), 2 * expected, rtol=1e-5, atol=1e-6)
        assert not bucket or (param.grad is None and not param.bucket.missing(2))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_one_gets_no_gradient(frozen):
    model = Model()
    params = list(model.parameters())
    params[frozen].requires_grad_(False)
    model(PACKED).sum().backward()
    assert params[frozen].grad is None and params[1 - frozen].grad.abs().sum() > 0


def test_a_gradient_has_a_gradient():
    table, weight = (
        torch.randn(ROWS, H, dtype=torch.float64, requires_grad=True),
        torch.randn(S, B, H).double(),
    )

    def function(table):
        return EmbeddingFunction.apply(IDS, table, 0, 2.0, None, None, ONE).pow(3) * weight

    assert torch.autograd.gradgradcheck(function, (table,))


def test_nothing_to_look_up():
    ids, target = torch.empty(2, 0, dtype=torch.int64), torch.ones(ROWS, H)
    assert lookup(ids, target).shape == (0, 2, H)
    add_word_grad_(target, ids, torch.empty(0, 2, H))
    add_position_grad_(target, ids, torch.empty(0, 2, H))
    assert torch.equal(target, torch.ones(ROWS, H))


def test_what_is_refused():
    table, places = torch.ones(ROWS, H), torch.arange(S)
    for given in (
        (IDS.float(), table),
        (IDS[0], table),
        (IDS, table[0]),
        (IDS, table, 0, 1.0, table.bfloat16(), places),
        (IDS, table, 0, 1.0, table[:, :2], places),
        (IDS, table, 0, 1.0, table),
        (IDS, table, 0, 1.0, table, places[:-1]),
        (IDS, table, 0, 1.0, table, places.float()),
    ):
        with pytest.raises(ValueError, match="must"):
            lookup(*given)
    with pytest.raises(IndexError):
        lookup(IDS, table, 0, 1.0, table, places)  # nine positions, twelve places
