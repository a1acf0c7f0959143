"""Small runs for the fault matrix (docs/reliability.md): started, watched, killed, compared to the bit.

    place = Place(folder)                            data, and the undisturbed run of each layout, made once
    job = place.start("case", "tp2sp")               ten steps, a save after every second: about a second
    job.reach(3, seconds=0.01)                       10 ms after the numbers of the third step
    job.kill(pid), job.wait()                        SIGKILL to a process; the exit code
    place.rerun("case", "tp2sp")                     the same command again, to its end
    place.expect_equal("case", "tp2sp")              losses and final checkpoint, to the bit

`how` a run is started: "launcher" is `python train.py --nproc N` without the seconds of imports: launcher and
ranks are forked from a server that has imported everything. "command" is that command itself, "torchrun" is
torchrun. All compute with one thread: another number gives other bits.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file

import train
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.faults.launch import start_fork_server, take_signals
from tests.faults.hooks import Hooks, rank_of_case

ROOT = Path(__file__).resolve().parents[2]
RUN = Path("runs/run")
CKPT = RUN / "ckpt"
STEPS, EVERY = 10, 2  # steps of a run, and from one save to the next
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 2e-3 --hidden-dropout 0.1 --attention-dropout 0.1 --device cpu "
    "--run-name run --split 90,10,0 --eval-iters 0 --distributed-timeout-minutes 0.5 "
    f"--train-iters {STEPS} --save-interval {EVERY}"
)
DEEP = "--num-layers 4 --pp 2"
LAYOUTS = {  # processes, flags
    "dp2": (2, "--use-distributed-optimizer"),
    "tp2sp": (2, "--tp 2 --sequence-parallel"),
    "pp2": (2, "--pp 2"),
    "cp2": (2, "--cp 2 --attention-dropout 0"),
    "tp2pp2": (4, "--tp 2 --pp 2"),
    "one": (1, ""),
    "dp2z2": (
        2,
        "--data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --ddp-bucket-size 4000",
    ),
    "pp2v2": (2, f"{DEEP} --vpp 2"),
    "pp2zbv": (2, f"{DEEP} --pipeline-schedule zb-v"),
    "dp2ep2": (2, "--num-experts 4 --moe-ffn-hidden-size 48 --ep 2"),
}
FIVE = tuple(LAYOUTS)[:5]  # those of the matrix: dp, tp with sp, pp, cp, tp x pp
NONE = Hooks()
ALIVE = 60.0  # seconds that a case may take: longer is a hang
PRELOAD = ["torch", "torch._dynamo", "train", "tests.faults.hooks"]


class MissedError(Exception):
    """The run was over before the fault came: no fault, so no case; another moment is drawn."""


class Outcome(NamedTuple):
    """What two runs must have in common: a hash of the final checkpoint's tensors, and each step's loss."""

    tensors: str
    losses: dict[int, str]  # iteration -> hexadecimal float


class Reference(NamedTuple):
    """The undisturbed run."""

    outcome: Outcome
    pace: float  # seconds a step, saves included
    shards: list[int]  # bytes of each rank's file of tensors


def start_server() -> None:
    """Start the process from which launchers and ranks are forked, if there is none."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # the server imports from this checkout
    start_fork_server(PRELOAD)
    os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)


def launcher(argv: list[str], folder: str, hooks: Hooks, address: str) -> None:
    """`python train.py ARGV` in a process that is forked in place of a new interpreter."""
    server = multiprocessing.forkserver  # the ranks come from the same server as this process
    server.ensure_running = server._forkserver.ensure_running = lambda: None
    server._forkserver._forkserver_address = address
    take_signals()  # unlike a rank, it has nothing to hold them back for
    os.chdir(folder)
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1), os.dup2(out, 2)
    train.run_rank = partial(rank_of_case, hooks)
    sys.exit(train.main(argv))


class Job:
    """A run that was started in a folder: its launchers (one a machine) and its ranks."""

    def __init__(self, folder: Path, processes: list, how: str) -> None:
        self.folder, self.processes, self.how = folder, processes, how
        self.began = time.monotonic()

    # What it does

    def over(self) -> bool:
        if self.how == "launcher":
            return not self.processes[0].is_alive()
        return all(process.poll() is not None for process in self.processes)

    def ranks(self, attempt: int = 0) -> dict[int, int]:
        """The process of each rank that lives; under torchrun those of an attempt."""
        if self.how != "torchrun":
            files = {int(path.name[3:]): path.read_text() for path in self.folder.glob("pid*")}
            found = {rank: int(text) for rank, text in files.items() if text}
            return {rank: pid for rank, pid in found.items() if is_alive(pid)}
        agents = {process.pid for process in self.processes}
        return ranks_of(agents, str(attempt))

    def records(self) -> list[dict]:
        """The steps that are logged."""
        path = self.folder / RUN / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def text(self) -> str:
        """All that it has said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("out*.txt")))

    def until(self, condition: Callable[[], object], seconds: float = ALIVE) -> object:
        """Wait for a condition, and return it. MissedError if the run ends before."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            if self.over():
                raise MissedError(f"the run has ended: {tail(self.text())}")
            assert time.monotonic() < end, f"nothing happens for {seconds} seconds: {tail(self.text())}"
            time.sleep(0.002)
        return found

    def reach(self, steps: int, seconds: float = 0.0, ranks: int = 0, attempt: int = 0) -> dict[int, int]:
        """Wait until this number of steps is logged, then `seconds`; returns the ranks' processes."""
        size = ranks or 1
        self.until(lambda: len(self.ranks(attempt)) >= size)
        self.until(lambda: len(self.records()) >= steps)
        time.sleep(seconds)
        found = self.ranks(attempt)
        if len(found) < size or self.over():
            raise MissedError("the ranks are leaving")
        return found

    # What is done to it

    def wait(self, seconds: float = ALIVE) -> int:
        """Wait for the end; returns the exit code, of several launchers the largest."""
        end = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > end:
                self.end()
                raise AssertionError(f"still there after {seconds} seconds: {tail(self.text())}")
            time.sleep(0.005)
        if self.how == "launcher":
            self.processes[0].join()
            return self.processes[0].exitcode
        return max((process.returncode for process in self.processes), key=abs)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise MissedError("the process has ended") from None

    def end(self) -> None:
        """Kill whatever is left."""
        everyone = [process.pid for process in self.processes]
        for attempt in range(6 if self.how == "torchrun" else 1):
            everyone += self.ranks(attempt).values()
        for pid in everyone:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join() if self.how == "launcher" else process.wait()


class Place:
    """A folder with the data of all cases, a folder for each, and what undisturbed runs give."""

    def __init__(self, folder: Path, minutes: float = 30.0) -> None:
        self.folder, self.minutes = folder, minutes
        self.references: dict[tuple, Reference] = {}
        self.jobs: list[Job] = []
        start_server()
        write_data(str(folder / "data"))

    def arguments(self, layout: str, flags: str = "") -> tuple[int, list[str]]:
        """Processes, and the command line of train.py without --nproc."""
        size, more = LAYOUTS[layout]
        data = ["--data-path", str(self.folder / "data"), "--tokenizer-type", "ByteTokenizer"]
        return size, [*MODEL.split(), *data, *more.split(), *flags.split()]

    def start(
        self,
        case: str,
        layout: str,
        flags: str = "",
        how: str = "launcher",
        hooks: Hooks = NONE,
        restarts=3,
    ) -> Job:
        """Start a run in the folder of a case; the same again resumes. restarts: of torchrun."""
        size, argv = self.arguments(layout, flags)
        folder = self.folder / case
        folder.mkdir(exist_ok=True)
        for path in [*folder.glob("pid*"), *folder.glob("in_*"), *folder.glob("out*.txt")]:
            path.unlink()
        if how == "launcher":
            address = multiprocessing.forkserver._forkserver._forkserver_address
            words = [*argv, "--nproc", str(size)]
            context = multiprocessing.get_context("forkserver")
            process = context.Process(target=launcher, args=(words, str(folder), hooks, address))
            process.start()
        elif how == "command":
            process = spawn([str(ROOT / "train.py"), *argv, "--nproc", str(size)], folder)
        else:
            agent = f"-m torch.distributed.run --standalone --nproc-per-node {size} --max-restarts {restarts}"
            process = spawn([*agent.split(), str(ROOT / "train.py"), *argv], folder)
        return self.started(Job(folder, [process], how))

    def started(self, job: Job) -> Job:
        self.jobs.append(job)
        return job

    def end_all(self) -> None:
        """Kill what a case has left running."""
        for job in self.jobs:
            job.end()
        self.jobs.clear()

    def rerun(self, case: str, layout: str, flags: str = "", how: str = "launcher", seconds=ALIVE) -> str:
        """Run the same command to its end, which must come with exit code 0; returns the log."""
        job = self.start(case, layout, flags, how)
        code = job.wait(seconds)
        assert code == 0, f"the same command again: exit code {code}: {tail(job.text())}"
        return (job.folder / RUN / "log.txt").read_text()

    def reference(
        self, layout: str, flags: str = "", how: str = "launcher", seconds: float = ALIVE
    ) -> Reference:
        """The undisturbed run, made once."""
        key = layout, flags, how
        if key not in self.references:
            case = f"reference{len(self.references)}"
            job = self.start(case, layout, flags, how)
            job.until(job.records)
            first = time.monotonic(), len(job.records())
            code = job.wait(seconds)
            assert code == 0, f"the undisturbed run of {layout}: exit code {code}: {tail(job.text())}"
            steps = len(job.records()) - first[1]
            found = outcome(job.folder)
            sizes = [path.stat().st_size for path in sorted(newest(job.folder).glob("*.safetensors"))]
            self.references[key] = Reference(found, (time.monotonic() - first[0]) / max(1, steps), sizes)
        return self.references[key]

    def expect_equal(self, case: str, layout: str, flags: str = "", how: str = "launcher") -> None:
        """Losses of all steps and tensors of the final checkpoint are those of the undisturbed run."""
        expected, found = self.reference(layout, flags, how).outcome, outcome(self.folder / case)
        expect_same_losses(found.losses, expected.losses)
        assert found.losses.keys() == expected.losses.keys(), f"steps {sorted(found.losses)}"
        assert found.tensors == expected.tensors, "tensors of the final checkpoint differ"


# Processes


def spawn(words: list[str], folder: Path, before: tuple[str, ...] = (), out: str = "out.txt"):
    """Start an interpreter in a folder, in a session of its own; `before`: words of a command around it."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD", "MASTER"))
    }
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    with open(folder / out, "ab") as file:
        return subprocess.Popen(
            [*before, sys.executable, *words],
            cwd=folder,
            env=kept | more,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ranks_of(agents: set[int], attempt: str) -> dict[int, int]:
    """The processes of torchrun's agents by rank, of one attempt."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent not in agents or not is_alive(int(folder.name)):
                continue
            text = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has just ended
        values = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        if values.get("TORCHELASTIC_RESTART_COUNT") == attempt and "RANK" in values:
            found[int(values["RANK"])] = int(folder.name)
    return found


# Data and results


def write_data(prefix: str) -> None:
    """40 documents of words that repeat, as bytes."""
    random = np.random.RandomState(0)
    words = [random.randint(97, 123, size=random.randint(2, 7)) for _ in range(50)]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(40):
            text = np.concatenate([np.append(words[random.randint(50)], 32) for _ in range(100)])
            builder.add_document(np.append(text, 256))
        builder.finalize()


def iterations(folder: Path) -> list[int]:
    """The iterations of the published checkpoints of a case."""
    return sorted(int(path.name[5:]) for path in (folder / CKPT).glob("iter_*") if path.suffix == "")


def newest(folder: Path) -> Path:
    """The newest published checkpoint of a case."""
    return folder / CKPT / f"iter_{iterations(folder)[-1]:07d}"


def losses_of(folder: Path) -> dict[int, str]:
    path = folder / RUN / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return {record["iteration"]: float(record["lm_loss"]).hex() for record in map(json.loads, lines)}


def outcome(folder: Path) -> Outcome:
    """The final checkpoint's tensors (weights, main weights, moments) as a hash, and the losses."""
    digest = hashlib.sha256()
    for path in sorted(newest(folder).glob("*.safetensors")):
        for name, values in sorted(load_file(path).items()):
            digest.update(f"{name} {values.dtype} {values.shape}".encode())
            digest.update(values.tobytes())
    return Outcome(digest.hexdigest(), losses_of(folder))


def expect_same_losses(found: dict[int, str], expected: dict[int, str]) -> None:
    """Each loss is the undisturbed run's."""
    wrong = [
        f"step {i}: {found[i]}, undisturbed {expected.get(i)}" for i in found if found[i] != expected.get(i)
    ]
    assert not wrong, f"losses differ: {wrong[0]}, and {len(wrong) - 1} more"


def status(folder: Path) -> dict:
    return json.loads((folder / RUN / "status.json").read_text())


def tail(text: str, lines: int = 12) -> str:
    """The last lines of an output, for a message."""
    return "\n    " + "\n    ".join(text.strip().splitlines()[-lines:])
