"""A start that is refused leaves no new folder: wrong settings or data, a checkpoint that cannot be used.

The exit code (2 or 3) and the messages say it all, and `nanomegatron runs` lists no run that never was. A
folder that was there before keeps everything. Under torchrun, which hides exit codes, status.json stays.
"""

import os
from contextlib import suppress
from pathlib import Path

from nanomegatron.config.cli import ConfigError
from nanomegatron.config.settings import Config
from nanomegatron.faults.exit import BAD_CONFIG, NO_CHECKPOINT
from nanomegatron.faults.lock import LOCK, lock
from nanomegatron.report.status import read_status

REFUSED = (BAD_CONFIG, NO_CHECKPOINT)
WRITTEN = ("config.toml", "status.json", "log.txt", "log.*.txt", LOCK)  # before the first step


def absent_folders(config: Config) -> list[Path]:
    """Return the folders of a run, and those above them, that are not there yet; inner ones first."""
    wanted = (config.run.folder.absolute(), Path(config.checkpoint.save).absolute())
    absent = {above for folder in wanted for above in (folder, *folder.parents) if not os.path.exists(above)}
    return sorted(absent, key=lambda folder: len(folder.parts), reverse=True)


def remove_new_folders(config: Config, absent: list[Path]) -> None:
    """Remove what a refused start has made of `absent`, if no other run is or was in there."""
    folder = config.run.folder.absolute()
    facts = read_status(folder / "status.json", lambda _: None)
    refused = facts.get("exit_code", BAD_CONFIG) in REFUSED  # without the file: before it was written
    if folder not in absent or not refused or (folder / "metrics.jsonl").exists():
        return
    with suppress(ConfigError, OSError):  # it is in use, or somebody else's
        for path in filter(Path.is_dir, absent):
            with lock(path, wait=False):
                for file in (file for name in WRITTEN for file in path.glob(name)):
                    file.unlink()
            path.rmdir()
