"""The harness itself: failures are shown, hangs end, results come back in order, runs do not clash."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from nanomegatron.mesh import World
from tests.spmd import one_at_a_time, run_spmd, spmd


def rank_and_sum(mesh, scale):
    total = torch.tensor([float(mesh.rank)]) * scale
    dist.all_reduce(total)
    return {"rank": mesh.rank, "tp": mesh.tp.ranks, "total": total}


def fail_on(world: World, ranks):
    if world.rank in ranks:
        raise ValueError(f"broken on rank {world.rank}")


def fail_before_collective(mesh):
    if mesh.rank == 2:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def one_waits_for_nobody(mesh):
    if mesh.rank == 1:
        dist.recv(torch.ones(1), src=0)  # never sent
    dist.barrier()


def leave_early(world: World):
    raise SystemExit(0 if world.rank else 3)


def draw_and_count(world: World):
    return torch.rand(3), torch.get_num_threads()


def test_results_in_rank_order():
    results = run_spmd(rank_and_sum, 4, 0.5, tp=2)
    assert [r["rank"] for r in results] == [0, 1, 2, 3]
    assert [r["tp"] for r in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert all(torch.equal(r["total"], torch.tensor([3.0])) for r in results)


def test_traceback_of_the_failing_rank_is_shown():
    with pytest.raises(AssertionError) as caught:
        run_spmd(fail_on, 2, [1])
    text = str(caught.value)
    assert "rank 1 of 2 failed" in text
    assert "in fail_on" in text and "ValueError: broken on rank 1" in text


def test_lowest_failing_rank_wins():
    with pytest.raises(
        AssertionError, match=r"(?s)rank 1 of 4 failed \(failed: \[1, 3\]\).*broken on rank 1"
    ):
        run_spmd(fail_on, 4, [3, 1])


def test_cause_wins_over_peers_that_lost_it():
    """Ranks 0, 1 and 3 only see a closed connection; the message names rank 2's error."""
    with pytest.raises(AssertionError, match="(?s)rank 2 of 4 failed.*ValueError: the cause"):
        run_spmd(fail_before_collective, 4)


def test_leaving_early_is_a_failure():
    with pytest.raises(AssertionError, match="(?s)rank 0 of 2 failed.*SystemExit: 3"):
        run_spmd(leave_early, 2)


def test_deadlock_ends_in_time_and_shows_where():
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_spmd(one_waits_for_nobody, 2, timeout=3)
    assert time.monotonic() - start < 8
    text = str(caught.value)
    assert "ranks [0, 1] of 2 left no result within 3 s" in text
    assert "--- rank 0" in text and "--- rank 1" in text and "in one_waits_for_nobody" in text


def test_two_runs_at_once_do_not_clash():
    found = {}
    runs = [
        threading.Thread(target=lambda scale=scale: found.update({scale: run_spmd(rank_and_sum, 2, scale)}))
        for scale in (1.0, 10.0)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert {scale: [r["total"].item() for r in rs] for scale, rs in found.items()} == {
        1.0: [1, 1],
        10.0: [10, 10],
    }


def test_four_ranks_wait_for_other_four():
    """A lock that another pytest process would hold is held by this one."""
    run = threading.Thread(target=run_spmd, args=(draw_and_count, 4))
    with one_at_a_time():
        run.start()
        run.join(1.0)
        assert run.is_alive()
    run.join(30)
    assert not run.is_alive()


def test_ranks_draw_what_the_parent_draws():
    mine = torch.rand(3)
    for drawn, threads in run_spmd(draw_and_count, 2):
        assert torch.equal(drawn, mine) and threads == 1


@pytest.mark.parametrize("scale", [1, 3])
@spmd(world=2, tp=2)
def test_decorated_body_runs_on_every_rank(mesh, scale, tmp_path):
    """Parameters and fixtures reach the ranks; the body's asserts are the test's."""
    assert mesh.tp.size == 2 and tmp_path.is_dir()
    total = torch.tensor([mesh.rank + 1]) * scale
    dist.all_reduce(total)
    assert total.item() == 3 * scale


@spmd(world=2)
def only_rank_0(mesh):
    assert mesh.rank == 0, "not I"


def test_decorated_body_fails_as_an_assertion():
    with pytest.raises(AssertionError, match="(?s)rank 1 of 2 failed.*AssertionError: not I"):
        only_rank_0()
