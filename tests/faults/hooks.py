"""What a rank of a case does besides training: it says where it is, waits there, or dies inside a save.

Nothing of the project is replaced but the sample and the picture at the end, which take seconds: functions of
train.py leave a mark (a file in_NAME) when they are entered. Points inside a save are found by what the
process asks of the operating system, not by the names of functions: Python's audit events, and os.fsync.
"""

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import train
from nanomegatron.checkpoint import resume
from nanomegatron.launch import data as run_data
from nanomegatron.launch import ending
from nanomegatron.mesh import World
from nanomegatron.report import plots
from nanomegatron.step import Training
from train import run_rank

MARKED = {  # where each is called
    "build_datasets": (run_data,),
    "load_checkpoint": (train,),
    "evaluate": (train, ending),
    "save_checkpoint": (resume,),
}
POINTS = (
    "after mkdir",
    "amid a shard",
    "before a shard's fsync",
    "before the manifest",
    "before the rename",
    "before the folder's fsync",
    "at the hint",
    "amid a removal",
)


@dataclass(frozen=True)
class Death:
    """SIGKILL to a rank at a point of the save of an iteration; amid a shard: at one of its bytes."""

    point: str
    rank: int
    iteration: int
    byte: int = 0


@dataclass(frozen=True)
class Hooks:
    """slow: seconds that a function of train.py takes longer; step: that a step takes longer."""

    slow: tuple[tuple[str, float], ...] = ()
    step: float = 0.0
    death: Death | None = None
    ledger: bool = False  # write down the tokens of every microbatch


def rank_of_case(hooks: Hooks, world: World, argv: list[str]) -> int:
    """train.run_rank, in the folder of the case."""
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1), os.dup2(out, 2)
    Path(f"pid{world.rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    plots.plot_loss = ending.show_sample = lambda *_: None
    for name in MARKED:
        mark(name, dict(hooks.slow).get(name, 0.0), world.rank == 0)
    if hooks.step:
        usual = train.train_step
        train.train_step = lambda *given: (time.sleep(hooks.step), usual(*given))[1]
    if hooks.ledger:
        keep_ledger(world.rank)
    if hooks.death and hooks.death.rank == world.rank:
        die_in_save(hooks.death)
    return run_rank(world, argv)


def mark(name: str, seconds: float, says: bool) -> None:
    """Let a function of train.py, or a save, leave a file in_NAME when it is entered, and take longer."""
    usual = getattr(MARKED[name][0], name, None) or resume.Checkpoints.save

    def marked(*args, **kwargs):
        if says:
            Path(f"in_{name}").touch()
        end = time.monotonic() + seconds  # a signal does not shorten it
        while (left := end - time.monotonic()) > 0:
            time.sleep(left)
        return usual(*args, **kwargs)

    if name == "save_checkpoint":
        resume.Checkpoints.save = marked
    for module in MARKED[name]:
        setattr(module, name, marked)


def keep_ledger(rank: int) -> None:
    """Write a line for each microbatch of training: iteration, place in the order of the run, tokens."""
    usual = Training.next_batches

    def next_batches(run):
        batches = usual(run)
        for batch in batches:
            line = [run.progress.iteration + 1, batch.sample_ids.tolist(), batch.tokens.tolist()]
            with open(f"ledger{rank}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        return batches

    Training.next_batches = next_batches


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(death: Death) -> None:
    """Arm the death of this process: it watches its own calls of the operating system."""
    temporary = f"iter_{death.iteration:07d}.tmp"
    seen: set[str] = set()
    react = reactions(death, temporary, seen)

    def watch(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            react("write", args[0])
        elif event == "os.rename":
            react("rename", os.fspath(args[1]))
        elif event in ("os.remove", "shutil.rmtree"):
            react(event.split(".")[1], os.fspath(args[0]))

    def fsync(descriptor: int, usual: Callable = os.fsync) -> None:
        react("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        usual(descriptor)

    sys.addaudithook(watch)
    os.fsync = fsync


def reactions(death: Death, temporary: str, seen: set[str]) -> Callable[[str, str], None]:
    """What to do at (event, path) for each point."""
    shard = re.compile(rf"{temporary}/rank_\d+\.safetensors$")
    limits = {"at": death.byte}

    def react(event: str, path: str) -> None:
        if event == "rename" and path.endswith(temporary.removesuffix(".tmp")):
            seen.add("renamed")
            if death.point == "before the rename":
                die()
        if event == "rmtree" and "renamed" in seen and re.search(r"iter_\d+(\.\w+)?$", path):
            seen.add("removing")
        if event == "remove" and "removing" in seen and death.point == "amid a removal":
            seen.add("second") if "second" not in seen else die()
        if "renamed" in seen:
            if event == "fsync" and path.endswith("/ckpt") and death.point == "before the folder's fsync":
                die()
            if event == "rename" and path.endswith("iteration.txt") and death.point == "at the hint":
                die()
        elif event == "write" and shard.search(path):
            if death.point == "after mkdir":
                die()
            if death.point == "amid a shard":
                die_at_byte(limits["at"])
        elif event == "write" and path.endswith(f"{temporary}/manifest.json"):
            if death.point == "before the manifest":
                die()
        elif event == "fsync" and shard.search(path) and death.point == "before a shard's fsync":
            die()

    return react


def die_at_byte(at: int) -> None:
    """Let the kernel kill this process (SIGXFSZ) when it writes a file beyond this size."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.RLIM_INFINITY))
