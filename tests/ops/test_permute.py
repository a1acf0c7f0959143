"""Routing tables, permute and unpermute in plain torch: values by hand, round trips, and what is refused."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.ops.permute import permute, route, unpermute


def ids_of(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_tables_by_hand():
    """Four tokens, two experts each of three; expert 1 has none but padding, a copy is dropped."""
    routing = route(ids_of((2, 0), (0, 2), (-1, 2), (2, 0)), experts=3, multiple=4)
    assert routing.counts.tolist() == [3, 0, 4] and routing.offsets.tolist() == [0, 4, 8, 12]
    assert routing.position.tolist() == [[8, 0], [1, 9], [-1, 10], [11, 2]]
    # 8 copies are two fours, and each expert may have one that it does not fill
    assert routing.source.tolist() == [1, 2, 7] + [-1] * 5 + [0, 3, 5, 6] + [-1] * 8
    assert all(
        t.dtype == torch.int32 for t in (routing.position, routing.source, routing.offsets, routing.counts)
    )


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "tokens, k, experts", [(100, 2, 8), (7, 8, 64), (50, 1, 3), (0, 2, 4), (5, 0, 4), (1, 1, 1)]
)
def test_tables_agree_with_one_another(tokens, k, experts, multiple):
    ids = torch.randint(-1, experts + 1, (tokens, k), dtype=torch.int32)
    routing = route(ids, experts, multiple)
    kept = (ids >= 0) & (ids < experts)
    assert torch.equal(routing.position >= 0, kept) and int(routing.counts.sum()) == int(kept.sum())
    assert (routing.offsets % multiple == 0).all() and routing.offsets[-1] <= len(routing.source)
    assert routing.offsets.diff().min() >= (multiple if multiple > 1 else 0)
    copies = torch.arange(tokens * k, dtype=torch.int32).view(tokens, k)
    assert torch.equal(routing.source[routing.position[kept].long()], copies[kept])
    assert int((routing.source >= 0).sum()) == int(kept.sum())
    for e in range(experts):
        begin, count = int(routing.offsets[e]), int(routing.counts[e])
        assert torch.equal(routing.source[begin : begin + count], copies[ids == e].sort().values)


def test_a_round_trip_weighs_and_sums():
    x = torch.randn(20, 6, dtype=torch.float32)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(20)]).int()
    routing, probs = route(ids, 5, 4), torch.rand(20, 3)
    rows = permute(x, routing)
    assert torch.equal(rows[routing.source < 0], torch.zeros(int((routing.source < 0).sum()), 6))
    torch.testing.assert_close(unpermute(rows, routing, probs), x * probs.sum(1, keepdim=True))
    torch.testing.assert_close(unpermute(permute(x, routing, probs), routing), x * probs.sum(1, keepdim=True))
    assert torch.equal(unpermute(rows, route(torch.full_like(ids, -1), 5, 4)), torch.zeros_like(x))


def test_each_is_the_backward_of_the_other():
    routing = route(torch.randint(-1, 4, (6, 2), dtype=torch.int32), 4, 2)
    x, probs = torch.randn(6, 5, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    rows = permute(x, routing, probs)
    grad = torch.randn_like(rows)
    dx, dprobs = torch.autograd.grad(rows, (x, probs), grad)
    torch.testing.assert_close(dx, unpermute(grad, routing, probs))
    dots = (x[:, None] * grad[routing.position.long()]).sum(-1) * (routing.position >= 0)
    torch.testing.assert_close(dprobs, dots)
    z, dy = torch.randn(len(routing.source), 5, requires_grad=True), torch.randn(6, 5)
    dz, dprobs = torch.autograd.grad(unpermute(z, routing, probs), (z, probs), dy)
    torch.testing.assert_close(dz, permute(dy, routing, probs))
    dots = (dy[:, None] * z[routing.position.long()]).sum(-1) * (routing.position >= 0)
    torch.testing.assert_close(dprobs, dots)


def test_what_is_refused():
    routing = route(ids_of((0, 1)), 2)
    calls = [
        lambda: route(torch.zeros(2, 2, dtype=torch.int64), 2),
        lambda: route(torch.zeros(2, dtype=torch.int32), 2),
        lambda: route(ids_of((0, 1)), 2000),
        lambda: route(ids_of((0, 1)), 2, 0),
        lambda: route(ids_of((0, 1)), 2, 2**30),
        lambda: permute(torch.ones(2, 4), routing),
        lambda: permute(torch.ones(1, 4).long(), routing),
        lambda: permute(torch.ones(1, 4), routing, torch.ones(2, 1)),
        lambda: permute(torch.ones(1, 4), routing, torch.ones(1, 2).half()),
        lambda: unpermute(torch.ones(1, 4), routing),
        lambda: permute(torch.ones(1, 4), replace(routing, position=routing.position.long())),
        lambda: permute(torch.ones(1, 4), replace(routing, position=routing.position.repeat(1, 2)[:, ::2])),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()
