"""The order in which a rank issues its work: no result shows that communication begins late.

Ranks are on CPUs, and tell in words what they begin, what they wait for, and when they multiply (`order.py`);
words that follow themselves are one. Where GPUs copy in each other's memory, every read and write on one
stream must be ordered with those on others by a wait: a CPU would compute the same without.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch

import train
from nanomegatron.config.settings import ParallelConfig, PrecisionConfig
from nanomegatron.dp import ParamAndGradBuckets, ShardComm
from nanomegatron.fast.dp_peer import peer_shard_comm
from nanomegatron.fast.offload import HostStaging
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.tp_overlap import overlapped_linear
from nanomegatron.mesh import World
from nanomegatron.optim import Optimizer, ShardState, StepScalars
from nanomegatron.pp import OpRunner
from nanomegatron.tp import ColumnParallelLinear, RowParallelLinear
from tests.order import Recorder, recorded
from tests.spmd import spmd
from tests.test_cp import on_a_rank
from tests.test_pp import LLAMA, gradients
from tests.toy import CONFIG, RATES, Toy, samples, train_step
from tests.training import arguments, set_up, sources  # noqa: F401


def noting(recorder: Recorder, owner: type, name: str, word):
    """A context in which each call of a method is noted: as word(self, its arguments)."""
    real = getattr(owner, name)
    return patch.object(owner, name, lambda *args: recorder.note(word(*args)) or real(*args))


def backward_of(layer: torch.nn.Module, x: torch.Tensor) -> str:
    with recorded() as found:
        y = layer(x)
        found.log.clear()
        y.backward(torch.ones_like(y))
    return ", ".join(found.log)


@spmd(world=2, tp=2)
def test_a_linear_layer_communicates_beside_its_matmuls(mesh):
    """x is gathered beside dx = dy W; dx is summed beside the weight gradient."""
    x = torch.randn(6, 2, 8, requires_grad=True)
    plain = ColumnParallelLinear(8, 12, mesh.tp)
    assert backward_of(plain, x) == "mm, start reduce, mm, end reduce"
    cut = ColumnParallelLinear(8, 12, mesh.tp, sequence_parallel=True)
    assert backward_of(cut, x) == "start gather, mm, start scatter, end gather, mm, end scatter"


def overlapped(mesh, peers: PeerAccess | None, folder=None) -> tuple[list[str], list[str]]:
    """Words of a column-parallel and a row-parallel layer, and of the backward of both; races."""
    how = dict(bias=False, sequence_parallel=True)
    layers = ColumnParallelLinear(8, 12, mesh.tp, **how), RowParallelLinear(12, 8, mesh.tp, **how)
    x = torch.randn(6, 2, 8, requires_grad=True)
    with recorded(folder, mesh.rank) as found:
        for layer in layers:
            layer.linear = partial(overlapped_linear, peers)
        for _ in range(2):  # slots of memory are used again
            found.log.clear()
            y = layers[0](x)
            found.note("|")
            y = layers[1](y)
            found.note("|")
            y.backward(torch.ones_like(y))
    return found.take().split(", |, "), found.races


@spmd(world=2, tp=2)
def test_pieces_travel_by_collectives_beside_matmuls(mesh):
    """Own rows are multiplied while the others' arrive, second halves while the first ones are summed."""
    gather, halves = "start gather, mm, end gather, mm", "mm, start scatter, mm, start scatter"
    forward, backward = (
        [gather, f"{halves}, end scatter"],
        f"start gather, {halves}, end gather, mm, end scatter",
    )
    assert overlapped(mesh, None)[0] == [*forward, f"{gather}, {backward}"]


@spmd(world=2, tp=2)
def test_pieces_travel_by_copy_engines_beside_matmuls(mesh, tmp_path):
    """All copies are issued before the first matmul of a gather, each after its own one of a scatter."""
    words, races = overlapped(mesh, PeerAccess({"tp": ""}), tmp_path)
    gather = "barrier, copy, mm"
    assert words == [gather, "mm, copy, barrier", f"{gather}, {gather}, copy, mm, barrier"]
    assert not races


def of_two_steps(mesh, recorder: Recorder, shard_comm) -> tuple[Toy, ParamAndGradBuckets]:
    """Train with a sharded optimizer and both overlaps; words of the second step remain."""
    flags = dict(use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True)
    model = Toy()
    buckets = ParamAndGradBuckets(
        model, ParallelConfig(ddp_bucket_size=300, **flags), mesh, torch.float32, shard_comm
    )
    optimizer = Optimizer(buckets, CONFIG, PrecisionConfig(), RATES)
    with noting(recorder, ShardState, "update", lambda *_: "update"):
        for _ in range(2):
            recorder.log.clear()
            train_step(model, buckets, optimizer, mesh, 1)
    return model, buckets


@spmd(world=2)
def test_replicas_communicate_beside_the_step(mesh):
    """A bucket is summed beside the backward, gathered beside the next update, awaited where it is read."""
    with recorded() as found:
        model, buckets = of_two_steps(mesh, found, ShardComm)
        found.note("forward")
        model(samples()[:, :-1], samples()[:, 1:])
    n = len(buckets.all)
    backward, _, rest = found.take().replace("sync, ", "").partition(", end scatter, ")
    assert backward.endswith(", mm, start scatter" * n)
    update, _, forward = rest.partition(", forward, ")
    assert update == "start reduce, end reduce" + ", update, start gather" * n
    assert forward.startswith("end gather, mm, end gather, mm, end gather, mm")


@spmd(world=2)
def test_replicas_copy_what_is_there(mesh, tmp_path):
    """And gradients are written when no peer copies the last ones any more: behind a barrier."""
    with recorded(tmp_path, mesh.rank) as found:
        _, buckets = of_two_steps(mesh, found, partial(peer_shard_comm, PeerAccess({"dp_cp": ""})))
        buckets.zero_grad_buffer()
        stream, behind_reductions = found.barriers[-len(buckets.all)]
        assert found.main.seen[stream] >= behind_reductions
    assert found.log.count("copy") >= 2 * len(buckets.all) and not found.races


# The backward of rank 0 of 4: keys that come and gradients that leave.
KEYS_THEN_GRADIENTS = "start, mm, end, start, end, "  # of keys; of the last gradients, of these; of keys
RINGS = {
    "plain": f"start, mm, start, end, {KEYS_THEN_GRADIENTS * 2}mm, end, start, end",
    "fast": "start, mm, end, start, mm, start, end, mm, end, start, end",
}


@spmd(world=4, cp=4)
@pytest.mark.parametrize("form", ["plain", "fast"])
def test_keys_travel_beside_attention(mesh, form):
    """Those of the next round; in the backward also the gradients of the last one."""
    with recorded() as found, noting(found, torch.autograd, "grad", lambda *_: "backward"):
        on_a_rank(mesh, "p2p", dict(backend="unfused", b=2, g=2), form)
    words = found.take().replace("start send, start recv", "start").replace("end send, end recv", "end")
    forward, _, backward = words.partition(", backward, ")
    if mesh.rank == 0:
        assert forward == "start, mm, end, " * (3 if form == "plain" else 2) + "mm"
        assert backward == RINGS[form]


@spmd(world=2, pp=2)
def test_a_stage_sends_before_it_computes_more(mesh):
    """And nothing waits for what is sent; weight gradients come behind it."""
    with recorded() as found, noting(found, OpRunner, "run", lambda _, op, x: f"{op.kind}{op.microbatch}"):
        gradients(mesh, LLAMA, dict(pipeline_schedule="zb-h1"), microbatches=3)
    if mesh.rank == 1:
        words = found.take().replace("sync, ", "")
        assert all(f"B{i}, mm, start send" in words and f"W{i}, mm" in words for i in range(3))
        assert "B0, mm, start send, end recv, start recv, F1" in words, "on its way beside the next forward"


@pytest.mark.parametrize("flags", ["--hidden-dropout 0.1", "--fp8-format hybrid --fp8-recipe delayed"])
def test_the_host_waits_for_nothing_in_a_step(flags, sources, tmp_path):  # noqa: F811
    run = set_up(World(), arguments(sources, "gpt", flags, "--bf16 --use-distributed-optimizer"), tmp_path)
    train.train_step(run)
    run.progress.iteration += 1
    with recorded() as found:
        train.train_step(run)
    assert "mm" in found.log and "sync" not in found.log


def test_gradients_come_to_the_host_while_it_updates(tmp_path):
    """And what the device reads or writes is no buffer that a copy still needs."""
    grads, weights, words = torch.ones(2, 4), torch.zeros(2, 4), []
    with recorded(tmp_path) as found:
        staging = HostStaging(list(grads), torch.device("cuda", 0), prefetch=True)
        for _ in range(3):  # buffers are used again
            grads.mul_(2)
            for weight in weights:
                grad, _ = staging.fetch(StepScalars(*[torch.ones(())] * 4))
                found.note("update")
                staging.send(lambda out, grad=grad: out.copy_(grad), weight)
            words.append(found.take())
            assert (weights == grads).all()
    assert words[0] == "copy, sync, copy, update, copy, sync, update, copy"
    assert not found.races
