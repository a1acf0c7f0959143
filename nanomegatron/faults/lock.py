"""Locks on a run's folders: one run at a time writes there, and all its machines must see the same ones.

    runs/NAME/run.lock       pid 4711 on node7 since 2026-11-22T21:45:00+01:00, run 3735928559
    runs/NAME/ckpt/run.lock

Rank 0 locks the files (flock) before anything is written. The kernel unlocks them when the process ends,
however it ends (on NFS, if its machine is lost, when the lease expires); the files stay. Every rank then
checks that the files hold the number of this run.

A folder that is removed or moved takes its lock along, and another run could begin at its path. So rank 0
compares the file at the path with its own at each check for signals (signals.py), and before each save.
"""

import os
import secrets
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from nanomegatron.comm import all_gather_text, all_reduce
from nanomegatron.config.cli import ConfigError, from_toml
from nanomegatron.config.durable import sync
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import read_text
from nanomegatron.data.indexed_dataset import lock_file
from nanomegatron.mesh import Mesh
from nanomegatron.report.writers import timestamp

LOCK = "run.lock"
DYING = 5.0  # seconds for a killed predecessor to release its lock
STALE = 60.0  # seconds for which NFS may remember that a file was not there
SECOND_LOOK = 0.5  # seconds after which a folder that seems lost is checked again


def settings_in(folder: Path) -> Config | None:
    """Read the settings of the run in a folder; None if there is no run. Raises ConfigError if damaged."""
    path = folder / "config.toml"
    try:
        if not path.is_file():
            return None
        config = from_toml(read_text(path))
        if None in (config.model.num_layers, config.run.train_iters):  # of the first and the last part
            raise ValueError("it is cut short")
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                f"{path}: damaged ({error}); if this command has the settings of the run in there, "
                "remove the file, it is written again; or choose another --run-name"
            ]
        ) from None
    return config


class FolderLost(Exception):
    """Raised on all ranks: a folder of this run was removed or moved."""


@dataclass(frozen=True)
class Held:
    """A locked folder. name: its flag; number: of this run."""

    name: str
    folder: Path
    file: TextIO
    number: int

    def lost(self) -> str:
        """Say what has become of the folder; "" if it is there, or if the file system does not say."""
        path = self.folder / LOCK
        try:
            found = path.stat()
            with suppress(OSError):
                if os.path.samestat(found, os.fstat(self.file.fileno())):
                    return ""
            owner, _, number = path.read_text(encoding="utf-8", errors="replace").partition(", run ")
        except (FileNotFoundError, NotADirectoryError):
            return "was removed or moved"
        except OSError:
            return ""
        if number.strip() == str(self.number):
            return ""
        return f"is used by another run ({owner.strip()})"


class Locks(ExitStack):
    """The folders that rank 0 has locked, until it is closed; `held` is empty on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []

    def lost(self) -> list[Held]:
        """Return the folders that are lost; checks twice before it says so."""
        lost = [each for each in self.held if each.lost()]
        if lost:
            time.sleep(SECOND_LOOK)
        return [each for each in lost if each.lost()]


def claim(config: Config, mesh: Mesh, notes: list[str]) -> Locks:
    """Lock the run folder and the --save folder until the result is closed. notes: gets lines for the log.

    --eval-only does not lock the second. If the run folder cannot be written, the run continues without its
    logs. All-reduces numbers and gathers texts over world. Raises ConfigError on all ranks, with the messages
    on rank 0, if another run holds a folder, --save cannot be written, or a rank does not see rank 0's
    folders.
    """
    folder, save = config.run.folder, Path(config.checkpoint.save)
    saves = not config.run.eval_only
    folders = [(f"--run-name {config.run.run_name}", folder), (f"--save {save}", save)]
    wanted = not saves or save.resolve() != folder.resolve(), saves
    locks, errors = Locks(), []
    number, held = 0, [0, 0]
    if mesh.rank == 0:
        number = 1 + secrets.randbits(32)
        for i, (name, path) in enumerate(folders):
            if not wanted[i]:
                continue
            try:
                file = locks.enter_context(lock(path, name, number, notes))
                locks.held.append(Held(name, path.absolute(), file, number))
                held[i] = 1
            except ConfigError as error:
                errors += error.messages
                break
            except OSError as error:
                text = f"{name}: cannot write to {path} ({error.strerror or error})"
                errors += [f"{text}; give another folder"] if path is save else []
                notes.append(f"{text}: training continues without its logs there")
    number, *held = all_reduce(torch.tensor([0 if errors else number, *held], device=mesh.device), mesh.world)
    if number:
        held[0] *= not config.run.run_folder_per_host
        shared = {name: path for (name, path), locked in zip(folders, held, strict=True) if locked}
        errors = not_seen(shared, int(number), mesh)
    if errors or not number:
        locks.close()
        raise ConfigError(errors)
    return locks


def lock(
    folder: Path, name: str = "", number: int = 0, notes: list[str] | None = None, wait: bool = True
) -> TextIO:
    """Lock a folder, made if absent, and return the open lock file: closing it unlocks. name: its flag.

    With `wait` tries for DYING seconds. Raises ConfigError if another process holds the folder, OSError if it
    cannot be written.
    """
    end = time.monotonic() + DYING * wait
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
    while not _locked(file, notes):
        if time.monotonic() > end:
            file.seek(0)
            owner = file.read().strip().partition(", run ")[0] or "another process"
            file.close()
            fix = f"wait for it, stop it, or give another {name.split()[0]}" if name else "wait for it"
            raise ConfigError([f"{name}: {folder} is in use by {owner}; {fix}"])
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()} since {timestamp()}, run {number}\n")
    sync(file)
    return file


def _locked(file: TextIO, notes: list[str] | None) -> bool:
    """Try to lock a file; False if another process holds it. Without lock support: True, and a note."""
    try:
        return lock_file(file, wait=False)
    except OSError as error:
        if notes is not None:
            notes.append(f"{file.name}: no locks here ({error}); two runs in this folder would not notice it")
    return True


def not_seen(folders: dict[str, Path], number: int, mesh: Mesh) -> list[str]:
    """Return a message for each folder in which a rank does not find rank 0's number. folders: by flag.

    Gathers a text over world for each.
    """
    end = time.monotonic() + STALE
    errors = []
    for name, folder in folders.items():
        seen = _sees(folder / LOCK, f", run {number}\n", end)
        place = "" if seen else f"{socket.gethostname()} (rank {mesh.rank})"
        blind = [text for text in all_gather_text(place, mesh.world, mesh.device) if text]
        fix = "give --save a folder that all machines share"
        if name.startswith("--run-name"):
            fix = "start in a folder that all machines share, or give --run-folder-per-host"
        if blind:
            errors.append(f"{name}: {folder} of rank 0 is not the one on {', '.join(blind)}; {fix}")
    return errors


def _sees(path: Path, text: str, end: float) -> bool:
    """Wait until the file holds the text; False if it does not by the time `end`."""
    while True:
        try:
            if text in path.read_text(encoding="utf-8", errors="replace"):
                return True
        except OSError:
            pass  # not there, or not yet
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
