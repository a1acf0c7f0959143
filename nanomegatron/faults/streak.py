"""Steps in a row that were not finite, counted on disk: a run that is started again continues the count.

    ckpt/bad_steps.json    {"first": 12, "count": 10, "text": "step 12 ...", "settings": "<hash>"}

A good step ends the row and removes the file, unless it lies before the first bad step: a run that resumes
from an earlier checkpoint does these again. Other settings, such as a lower --lr, begin a new count. Rank 0
writes the file, and its content is that of all ranks.
"""

import hashlib
import json
from pathlib import Path

from nanomegatron.comm import all_gather_text
from nanomegatron.config.cli import to_toml
from nanomegatron.config.settings import Config
from nanomegatron.mesh import Mesh
from nanomegatron.report.log import RunLog
from nanomegatron.report.writers import replace_file

FILE = "bad_steps.json"


class Streak:
    """A row of bad steps: their count, the first one's iteration and text."""

    def __init__(
        self, config: Config | None = None, mesh: Mesh | None = None, log: RunLog | None = None
    ) -> None:
        """Continue the row of the file, if there is one, of the same settings. No arguments: keep no file.

        Gathers a text over world.
        """
        self.count = 0
        self.first = 0  # iteration
        self.text = ""  # what is said of the first
        self.earlier = 0  # of `count`, before this start of the run
        self.now = False  # the last step was bad
        self.log = log if log and log.is_main else None
        if config:
            self.path = Path(config.checkpoint.save) / FILE
            self.settings = hashlib.sha256(to_toml(config).encode()).hexdigest()[:16]
            self._resume(mesh)

    def _resume(self, mesh: Mesh) -> None:
        text = ""
        if self.log:
            with self.log.attempt(str(self.path)):
                text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        text = all_gather_text(text, mesh.world, mesh.device)[0]
        try:
            kept = json.loads(text) if text else {}
            if kept.get("settings") == self.settings:
                self.text = str(kept["text"])
                self.first = int(kept["first"])
                self.count = self.earlier = int(kept["count"])
        except (ValueError, TypeError, KeyError, AttributeError):
            pass  # damaged: as if it were not there
        if text and not self.count:
            self._keep()
        if self.count and self.log:
            self.log.line(
                f"note    {self.path}: {self.count} in a row, from step {self.first} on, were not finite; "
                "the count continues (other settings begin a new one)"
            )

    def add(self, iteration: int, text: str) -> None:
        """Count a bad step; text: what is said of it."""
        self.now = True
        if not self.count or iteration < self.first:
            self.first, self.text = iteration, text
        self.count += 1
        self._keep()

    def end(self, iteration: int) -> None:
        """A step was good."""
        self.now = False
        if self.count and iteration >= self.first:
            self.count = self.earlier = 0
            self._keep()

    def _keep(self) -> None:
        if not self.log:
            return
        kept = dict(first=self.first, count=self.count, text=self.text, settings=self.settings)
        with self.log.attempt(str(self.path)):
            if self.count:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path, json.dumps(kept) + "\n")
            else:
                self.path.unlink(missing_ok=True)
