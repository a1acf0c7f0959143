"""What the host issues in one training step on several GPUs is what it was: a golden for each fast path.

    main   mm 4096                      a matmul on the stream of the step; bytes of what it makes
    main   add mul sum x2 512           light ops in order, folded into a line; bytes of them all
    main   record e1                    an event; recorded again it keeps its number
    s1     wait e1
    s1     copy_ 1024 peer1 -> @1024    out of rank 1's shared memory, to an offset in a larger tensor
    main   barrier tp                   of a symmetric memory's handle
    main   all_gather tp 8192 w1        a collective, its axis, the bytes of the larger of its two sides
    main   wait w1

The paths for several GPUs run whole, by `train.py`'s own `set_up` and `train_step`, on CPU ranks that are
faked (`host_trace.py`); the second step is recorded. Streams, events and works are numbered as they
come up in it; a wait for one not recorded before is for one of the first step.

What differs from a GPU: no kernels of `cuda/`, whose plain torch twins run; attention is unfused; FP8 and
mixed matmuls are made up of several ops that count as one; messages are not coalesced; one has been sent when
it is waited for (no work is ever `is_completed`). Not seen: waits that autograd adds between streams,
`record_stream`, timing events.

    python -m tests.host_trace [--write] [NAME ...]       print, or renew the files in goldens/host_traces

A golden is for the version of torch that made it: others take other ops for the same.
"""

import contextlib
import difflib
import io
import itertools
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.report.log import RunLog
from tests.host_trace import Issued, Recorder, faked
from tests.spmd import run_spmd
from tests.training import no_garbage

GOLDENS = Path(__file__).parent / "goldens" / "host_traces"
VERSION = ".".join(torch.__version__.split(".")[:2])
KINDS = "ops matmuls copies collectives barriers records waits syncs".split()
WIDTH, SHOWN = 90, 60  # characters of light ops in a line, lines of a difference
COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 4 --eval-iters 0 --device cpu --distributed-backend gloo --num-workers 0 --split 1 "
    "--tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 4 --attention-backend unfused "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --run-name test "
)
TP = "--num-layers 1 --sequence-parallel --tp-comm-overlap --untie-embeddings-and-output-weights"
DP = "--num-layers 2 --ddp-bucket-size 9000 --overlap-grad-reduce --overlap-param-gather"
FP8 = f"{DP} --bf16 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer"
MOE = "--num-layers 1 --num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.02"
HALVES = "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm"
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
OFFLOAD = "--bf16 --use-distributed-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
CASES = {  # name: ranks, microbatches of a rank, sequence length, flags
    "tp-overlap-2": (2, 1, 32, f"{TP} --tp 2"),
    "tp-overlap-fp8-2": (2, 1, 32, f"{TP} --tp 2 --bf16 --fp8-format hybrid --fp8-recipe delayed"),
    "tp-overlap-4": (4, 1, 64, f"{TP} --tp 4 --bf16"),
    "zero1-2": (2, 2, 16, f"{DP} --use-distributed-optimizer"),
    "zero1-4": (4, 1, 16, f"{DP} --use-distributed-optimizer --bf16"),
    "zero2-2": (2, 2, 16, f"{DP} --data-parallel-sharding-strategy optim_grads"),
    "zero2-4": (4, 2, 16, f"{DP} --data-parallel-sharding-strategy optim_grads --bf16"),
    "fp8-gather-delayed-2": (2, 1, 16, f"{FP8} --fp8-recipe delayed"),
    "fp8-gather-tensorwise-2": (2, 1, 32, f"{FP8} --fp8-recipe tensorwise"),
    "cp-ring-2": (2, 1, 32, "--num-layers 1 --cp 2 --bf16 --num-query-groups 2"),
    "cp-ring-documents-4": (4, 1, 64, f"--num-layers 1 --cp 4 {DOCUMENTS}"),
    "moe-blocks-2": (2, 1, 16, f"{MOE} --ep 2"),
    "moe-blocks-4": (4, 1, 32, f"{MOE} --ep 4"),
    "moe-halves-2": (2, 1, 16, f"{MOE} --ep 2 {HALVES}"),
    "moe-shared-2": (2, 1, 32, f"{MOE} --ep 2 --moe-token-dispatcher-type alltoall {SHARED}"),
    "moe-halves-4": (4, 1, 32, f"{MOE} --ep 4 {HALVES}"),
    "moe-shared-4": (4, 1, 16, f"{MOE} --ep 4 --moe-token-dispatcher-type alltoall {SHARED}"),
    "pp-zb-v-2": (2, 3, 16, "--num-layers 4 --pp 2 --pipeline-schedule zb-v"),
    "pp-zb-v-4": (4, 4, 16, "--num-layers 8 --pp 4 --pipeline-schedule zb-v --bf16"),
    "pp-interleaved-2": (2, 4, 16, "--num-layers 4 --pp 2 --vpp 2"),
    "pp-interleaved-4": (4, 4, 16, "--num-layers 8 --pp 4 --vpp 2 --bf16"),
    "offload-2": (2, 1, 16, f"--num-layers 1 --ddp-bucket-size 9000 {OFFLOAD}"),
    "offload-overlap-2": (2, 2, 32, f"{DP} {OFFLOAD}"),
}


def folded(issued: list[Issued], coarse: bool) -> list[str]:
    """A line each, but light ops that follow each other on a stream, coarse: matmuls too; totals last."""
    lines: list[str] = []
    light = ("ops", "matmuls") if coarse else ("ops",)
    for (stream, folds), run in itertools.groupby(issued, lambda one: (one.stream, one.kind in light)):
        if not folds:
            lines += [f"{stream:6} {one.what}" for one in run]
            continue
        what, size = "", 0
        for op, same in itertools.groupby(run, lambda one: one.what.split()[0]):
            sizes = [one.size for one in same]
            if len(what) > WIDTH:
                lines.append(f"{stream:6} {what.strip()} {size}")
                what, size = "", 0
            what, size = f"{what} {op}" + f" x{len(sizes)}" * (len(sizes) > 1), size + sum(sizes)
        lines.append(f"{stream:6} {what.strip()} {size}")
    counts = Counter(one.kind for one in issued)
    return [*lines, "# " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)]


def record(world: World, name: str, folder: Path) -> list[str]:
    """The second step of a case on this rank."""
    _, microbatches, length, flags = CASES[name]
    os.chdir(folder)
    recorder = Recorder(folder, world.rank)
    argv = f"{COMMON} --data-path {folder.parent}/data --seq-length {length} {flags}".split()
    with faked(recorder), contextlib.redirect_stdout(io.StringIO()):
        dp = world.size // _sharing(argv)
        parsed, config = train.settings([*argv, "--global-batch-size", str(microbatches * dp)], world)
        mesh = Mesh.build(config.parallel, world, recorder.gpu, config.model.num_kv_heads)
        recorder.axes = [axis for axis in vars(mesh).values() if isinstance(axis, Axis)]
        recorder.axes += [link.axis for link in mesh.p2p_links.values()]
        run = train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank))
        run.optimizer.cast_weights()
        for step in range(2):
            recorder.on = step == 1
            with no_garbage():
                stepped = train.train_step(run)
            recorder.on = False
            run.iteration += 1
        assert stepped.read()[1]["good"] == 1
        with recorder.quiet():
            Mesh.close()
    return folded(recorder.issued, coarse="--pp" in flags)


def _sharing(argv: list[str]) -> int:
    """Ranks that work on one row together."""
    size = 1
    for flag, value in zip(argv, argv[1:]):
        size *= int(value) if flag in ("--tp", "--cp", "--pp") else 1
    return size


def record_all(world: World, names: list[str], folder: str) -> dict[str, list[str]]:
    """Several cases, one after the other, on ranks that stay up."""
    found = {}
    for name in names:
        place = Path(folder, name)
        place.mkdir(exist_ok=True)
        found[name] = record(replace(world, rendezvous=f"file://{place}/store"), name, place)
    return found


def write_data(prefix: str) -> None:
    """Documents of 3 to 40 tokens."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for i in range(200):
            text = np.arange(3 + 7 * i % 38, dtype=np.uint16) * (i + 3) % 256
            builder.add_document(np.append(text, np.uint16(256)))
        builder.finalize()


def traces(names: list[str]) -> dict[str, str]:
    """The text of each case: the trace of rank 0, and of the last rank where that does other things."""
    found = {}
    for size in sorted({CASES[name][0] for name in names}):
        here = [name for name in names if CASES[name][0] == size]
        with tempfile.TemporaryDirectory(prefix="traces-") as folder:
            write_data(f"{folder}/data")
            ranks = run_spmd(record_all, size, here, folder, timeout=120)
        for name in here:
            _, microbatches, length, flags = CASES[name]
            about = f"{size} ranks, {microbatches} microbatches of {length} tokens"
            lines = [f"# {name}: torch {VERSION}, {about}", f"# {flags}", "# rank 0", *ranks[0][name]]
            if "--pp" in flags or "--cp" in flags:
                lines += [f"# rank {size - 1}", *ranks[-1][name]]
            found[name] = "\n".join([*lines, ""])
    return found


def main(argv: list[str]) -> None:
    """Print the traces of these cases, or of all, or write them."""
    names = [name for name in argv if name != "--write"] or list(CASES)
    for name, text in traces(names).items():
        if "--write" in argv:
            (GOLDENS / f"{name}.txt").write_text(text)
        else:
            print(text)


@pytest.fixture(scope="module")
def recorded(request) -> dict[str, str]:
    """All traces that this session asks for, a launch for each number of ranks."""
    mine = [item for item in request.session.items if item.module is request.module]
    wanted = {item.callspec.params["name"] for item in mine if hasattr(item, "callspec")}
    return traces([name for name in CASES if name in wanted])


@pytest.mark.parametrize("name", CASES)
def test_trace_is_the_golden(name, request):
    golden = (GOLDENS / f"{name}.txt").read_text()
    version = golden.split(":", 1)[1].split(",")[0].strip()
    if version != f"torch {VERSION}":
        pytest.skip(f"the golden is of {version}, this is torch {VERSION}")
    found = request.getfixturevalue("recorded")[name]
    sides = golden.splitlines(), found.splitlines()
    lines = [*difflib.unified_diff(*sides, "golden", "now", lineterm="", n=4)]
    more = [f"... and {len(lines) - SHOWN} lines more"] * (len(lines) > SHOWN)
    renew = f"if that is meant: python -m tests.host_trace --write {name}"
    assert golden == found, "\n".join(["the host issues something else", *lines[:SHOWN], *more, renew])


def test_every_golden_has_a_case():
    assert {path.stem for path in GOLDENS.glob("*.txt")} == set(CASES)
