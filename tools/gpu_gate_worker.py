"""What runs in a worker of tools/gpu_gate.py: cases of one checkout, by that checkout's own code.

    ask-0007.json  -->  run a case  -->  answer-0007.0.json   one file a rank; without `slices` that is all
                        pause after the warm-up, and after every slice: the numbers go on
    ask-0008.json  -->  train a slice of the case

It runs in the other checkout's folder, with that on the path, and imports nothing from beside itself: what it
needs of the checkout it looks up by name, in the places where that is or has been (`find`).
"""

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

IDLE = 900  # seconds without a word from the driver: it must be gone
POLL = 0.01  # seconds between two looks for a file: under 1 % of a core
DROPPED = 2  # steps at the beginning of a slice: one was launched before the pause, one begins with no work


class Case(NamedTuple):
    """Flags of train.py, or for attention in blocks the sizes of `run_blocks`; warm-up and timed steps.

    slices: parts of a training, of `timed` steps each, taken in turn with the other checkout's; not
    without warm-up. limit: percent that this case may take longer, if not --limit.
    """

    name: str
    flags: str
    warm: int
    timed: int
    kind: str = "train"  # or "blocks"
    slices: int = 0
    limit: float = 0


class Ended(Exception):
    """A case is over: all steps have been reported, or the text says what the checkout does not have."""


def find(name: str, *modules: str) -> Any:
    """What is called so in the first of the modules that has it. Raises Ended."""
    for module in modules:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # something that the module itself imports
                raise
        else:
            if hasattr(found, name):
                return getattr(found, name)
    raise Ended(f"this checkout has no {name} in {' or '.join(modules)}")


class Driver:
    """What a rank has of tools/gpu_gate.py: its files are read here, and answered."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.turn = folder, rank, 0

    def hear(self) -> dict:
        """What is asked next. Ends this rank if it is to stop."""
        self.turn, end = self.turn + 1, time.monotonic() + IDLE
        asked, stop = self.folder / f"ask-{self.turn:04}.json", self.folder / "stop"
        while not asked.exists():
            if stop.exists() or time.monotonic() > end:
                os._exit(0)  # without the exit handlers: they take time
            time.sleep(POLL)
        return json.loads(asked.read_text())

    def tell(self, content: dict) -> None:
        """Answer what was heard last; before that, say that the rank is there."""
        write(self.folder / f"answer-{self.turn:04}.{self.rank}.json", content)


class Steps:
    """The records of a training, and where it pauses and ends.

        warm-up | 2 dropped, 10 timed | 2 dropped, 10 timed | 1 profiled | end         slices of 10
                pause                 pause

    Called instead of RunLog.step, on every rank, when the next step is in flight; at the end nothing is. From
    one call to the next the host goes once through the training loop: its ops are counted at the end.
    """

    def __init__(self, case: Case, driver: Driver) -> None:
        self.case, self.driver, self.records = case, driver, []
        self.dropped = DROPPED if case.slices else 0
        self.each = self.dropped + case.timed
        self.last = case.warm + max(case.slices, 1) * self.each
        self.profile, self.ops = None, 0

    def __call__(self, record: dict) -> None:
        """Count; pause until the driver says go on. Raises Ended."""
        import torch

        self.records.append(record)
        if self.profile:
            self.profile.stop()
            self.ops = len(self.profile.events())
            raise Ended  # before anything is saved
        if len(self.records) == self.last:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()
            return
        since = len(self.records) - self.case.warm
        if self.case.slices and since >= 0 and since % self.each == 0:
            wait_for_gpu()  # else the step in flight takes time of the other checkout's
            self.driver.tell({})
            self.driver.hear()

    def timed(self) -> list[dict]:
        """The records that count."""
        after = enumerate(self.records[self.case.warm : self.last])
        return [record for i, record in after if i % self.each >= self.dropped]


def wait_for_gpu() -> None:
    """Until all that was launched is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_training(case: Case, world: Any, meshes: dict, driver: Driver) -> dict:
    """Train as train.py does, up to the report of the last step. All ranks call this together."""
    import torch

    places = ("train", "nanomegatron.run", "nanomegatron.build")
    settings, set_up, train = (find(name, *places) for name in ("settings", "set_up", "train"))
    Mesh, pick_device = (find(name, "nanomegatron.mesh") for name in ("Mesh", "pick_device"))
    RunLog = find("RunLog", "nanomegatron.metrics_log", "nanomegatron.report.log")
    steps = Steps(case, driver)
    parsed, config = settings(f"{case.flags} --train-iters {steps.last + 2} --run-name gate".split(), world)
    device = pick_device(config.run.device, world)
    if case.name not in meshes:  # kept: to make communicators takes seconds, and memory
        watched = {}
        with contextlib.suppress(Ended):  # a checkout whose mesh counts by itself
            watched["observer"] = find("Traffic", "nanomegatron.report.traffic")()
        meshes[case.name] = Mesh.build(config.parallel, world, device, config.model.num_kv_heads, **watched)
    mesh = meshes[case.name]
    log = RunLog(Path.cwd(), config, mesh.rank, mesh.label, io.StringIO())
    log.step = steps
    run = set_up(parsed, config, mesh, log)
    try:
        with contextlib.suppress(Ended):
            train(run)
        if world.size > 1:  # no rank may still read from another's memory when that is given back
            wait_for_gpu()
            torch.distributed.barrier()
    finally:
        for loader in filter(None, getattr(run, "loaders", None) or run.data.loaders):
            loader.close()
        log.close()
        for number in (signal.SIGTERM, signal.SIGINT):  # the run's handlers keep all of it in memory
            signal.signal(number, signal.SIG_DFL)
    timed = steps.timed()
    peak = max(record.get("peak_mem_gib") or 0 for record in timed)
    times = [round(record["step_time_ms"], 3) for record in timed]
    return {"step_ms": times, "loss": timed[-1]["lm_loss"], "peak_gib": peak, "ops": steps.ops}


def run_blocks(case: Case, *_: Any) -> dict:
    """Rank 1 of a ring of 4, forward and backward: its own keys, half of rank 0's, all of ranks 2 and 3."""
    import torch

    places = [f"nanomegatron.{x}" for x in ("ops.attention_blocks", "ops.attention", "attention_blocks")]
    attend, attend_backward, Block = (find(n, *places) for n in ("attend", "attend_backward", "Block"))
    s, heads, groups, dim = map(int, case.flags.split())
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    random = torch.Generator(device).manual_seed(1)
    shapes = ((s, 1, n, dim) for n in (heads, heads, groups, groups))
    dout, q, k, v = (torch.randn(x, generator=random, device=device, dtype=dtype) for x in shapes)

    marks: list[Any] = []
    for _ in range(case.warm + case.timed + 1):
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()
        results = []
        for first, keys, causal in ((0, s, True), (0, s // 2, False), *[(s // 2, s, False)] * 2):
            own, block = (q[first:], k[:keys], v[:keys]), Block(causal=causal)
            out, lse = attend(*own, block, "fused")
            results += [out, *attend_backward(dout[first:], *own, out, lse, block, "fused")]
    loss = sum(x.float().abs().mean().item() for x in results)  # waits for the GPU
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0
    pairs = zip(marks[case.warm :], marks[case.warm + 1 :])
    times = [a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in pairs]
    return {"step_ms": times, "loss": loss, "peak_gib": peak}


def run_case(case: Case, world: Any, meshes: dict, driver: Driver) -> dict:
    """Run a case and give back its memory. `problem` in the result: why it cannot be compared."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    folder = driver.folder / f"run-{driver.turn:04}"
    folder.mkdir(exist_ok=True)
    try:
        with contextlib.chdir(folder):
            run = run_training if case.kind == "train" else run_blocks
            result = run(case, world, meshes, driver)
    except Ended as error:
        result = {"problem": str(error)}
    except torch.cuda.OutOfMemoryError as error:
        if world.size > 1:  # the other ranks wait for this one
            raise
        result = {"problem": f"out of memory: {' '.join(str(error).split())[:200]}"}
    gc.collect()
    torch.cuda.empty_cache()  # without a GPU it does nothing
    return result | {"left_gib": torch.cuda.memory_allocated() / 2**30}


def work(folder: Path, rank: int) -> None:
    """What a rank does: case after case, until there is a file `stop`. Does not return."""
    threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
    try:
        import torch

        if (at := Path(importlib.import_module("train").__file__).resolve().parent) != Path.cwd():
            raise RuntimeError(f"train.py comes from {at}, not from {Path.cwd()}")
        world = find("World", "nanomegatron.mesh").from_environment()
        if cuda := torch.cuda.is_available():
            torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        answer = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
        driver, meshes = Driver(folder, rank), {}
        driver.tell(answer)
        while True:
            case = Case(**driver.hear())
            driver.tell(run_case(case, world, meshes, driver))
    except BaseException:
        write(folder / f"failed.{rank}.json", {"error": f"rank {rank}: {traceback.format_exc()}"})
        os._exit(1)  # peers may wait for this rank in a collective


def leave_with(parent: int) -> None:
    """End this rank when its launcher has ended, even while it waits in a collective."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def write(path: Path, content: dict) -> None:
    """As JSON, in a file that is there in one piece or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content))
    beside.replace(path)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(os.environ.get("RANK", 0)))
