"""A start that is refused leaves no new folder: wrong settings or data, a checkpoint that cannot be used.

The exit code (2 or 3) and the messages say it all, and `nanomegatron runs` lists no run that never was. A
folder that was there before keeps everything; wrong settings or data leave the status of the run in there as
it was. Under torchrun, which hides exit codes, status.json has the new end.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanomegatron.config.cli import ConfigError
from nanomegatron.config.settings import Config
from nanomegatron.faults.exit import BAD_CONFIG, NO_CHECKPOINT
from nanomegatron.faults.lock import LOCK, lock
from nanomegatron.report.status import read_status, write_status

REFUSED = (BAD_CONFIG, NO_CHECKPOINT)
WRITTEN = ("config.toml", "status.json", "log.txt", "log.*.txt", LOCK)  # before the first step


def absent_folders(config: Config) -> list[Path]:
    """Return the folders of a run, and those above them, that are not there yet; inner ones first."""
    wanted = (config.run.folder.absolute(), Path(config.checkpoint.save).absolute())
    absent = {above for folder in wanted for above in (folder, *folder.parents) if not os.path.exists(above)}
    return sorted(absent, key=lambda folder: len(folder.parts), reverse=True)


def undo_start(config: Config, absent: list[Path], earlier: dict[str, Any]) -> None:
    """Remove what a refused start has made of `absent`, if no other run is or was in there.

    earlier: the status.json of a run that was there, put back if settings or data were wrong.
    """
    folder = config.run.folder.absolute()
    code = read_status(folder / "status.json", lambda _: None).get("exit_code", BAD_CONFIG)
    with suppress(ConfigError, OSError):  # it is in use, or somebody else's
        if earlier and code == BAD_CONFIG:
            with lock(folder, wait=False):
                write_status(folder / "status.json", earlier)
        if folder not in absent or code not in REFUSED or (folder / "metrics.jsonl").exists():
            return
        for path in filter(Path.is_dir, absent):
            with lock(path, wait=False):
                for file in (file for name in WRITTEN for file in path.glob(name)):
                    file.unlink()
            path.rmdir()
