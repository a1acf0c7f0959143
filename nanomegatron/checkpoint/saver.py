"""When a run's save counts as failed, and what then: retries, warning or end; beside the training or not.

    --async-save            begin | step: flags of all ranks | step | ... | published
    an error on one rank    is in the next step's all-reduce: all ranks wait, and try again
    after --save-retries    --on-save-error exit: SaveError; warn: a line, and the run continues

A synchronous save goes the same way in one call.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from nanomegatron.checkpoint.async_save import AsyncSaver
from nanomegatron.checkpoint.checkpoint import SaveError, on_all_ranks, owned_pieces, save
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import Retention
from nanomegatron.config.settings import CheckpointConfig
from nanomegatron.mesh import Mesh
from nanomegatron.step import LocalNumbers, Numbers, Observer

PAUSE = 0.5  # seconds before a save is tried again


class Saver(Observer):
    """Saves the checkpoints of a run, and sees to it that a save in flight goes well.

    pieces: those of a checkpoint of this run. warn: logs a text. published: is called on rank 0 with an
    iteration that is saved.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        mesh: Mesh,
        pieces: list[Piece],
        warn: Callable[[str], None],
        published: Callable[[int], None],
    ) -> None:
        self.config, self.mesh = config, mesh
        self.warn, self.published = warn, published
        self.writer: AsyncSaver | None = None
        often = config.save_interval or config.non_persistent_save_interval
        wanted = mesh.device.type == "cuda" if config.async_save is None else config.async_save
        wanted &= config.ckpt_format == "sharded" and hasattr(os, "memfd_create")  # of Linux
        if wanted and often:
            self.writer = AsyncSaver(mesh, sum(piece.data.nbytes for piece in owned_pieces(pieces)))
        self.in_flight = False
        self.iteration = 0
        self.saved = 0  # the newest iteration that is published

    def save(
        self,
        iteration: int,
        pieces: list[Piece],
        state: dict[str, Any],
        config: str,
        persistent: bool = True,
        last: bool = False,
    ) -> None:
        """Save, or begin to; first waits for the save in flight. All ranks call this. Raises SaveError.

        last: an error ends the run in any case, after the retries.
        """
        self.finish()
        self.iteration = iteration
        contents = self.config.save, iteration, pieces, state, config
        keep = Retention(self.config.keep_last_k, self.config.save_retain_interval, persistent)
        if self.writer and (errors := on_all_ranks(self.mesh, self.writer.buffer.ready.result)[1]):
            self.warn(f"--async-save: {'; '.join(errors)}: saves are synchronous")
            self.close()
        if self.writer:
            self.in_flight = self._try(lambda: self.writer.begin(*contents, keep), last)
        else:
            self._try(lambda: self._done(save(*contents, self.mesh, keep, self.config.ckpt_format)), last)

    def _try(self, work: Callable[[], None], last: bool) -> bool:
        """Call `work` until it raises no SaveError; False if there are no more retries.

        Raises the last error if it is to end the run.
        """
        for retries in range(self.config.save_retries, -1, -1):
            try:
                work()
                return True
            except SaveError as error:
                if not retries and (last or self.config.on_save_error == "exit"):
                    raise
                end = "the run continues, and the next save is due as usual (--on-save-error warn)"
                self.warn(f"{error}; {'trying again' if retries else end}")
                time.sleep(PAUSE)
        return False

    def _done(self, notes: list[str] | None) -> None:
        """The save is published, as all ranks know. notes: on rank 0."""
        self.in_flight = False
        self.saved = self.iteration
        if self.mesh.world.rank == 0:
            self.published(self.iteration)
            for note in notes:
                self.warn(note)

    def before_sync(self) -> LocalNumbers:
        """What this rank knows of the save in flight."""
        failed = self.in_flight and self.writer.failed
        published = self.in_flight and self.mesh.world.rank == 0 and self.writer.published.done()
        return {"save_failed": float(failed), "save_published": float(published)}

    def before_update(self) -> Numbers:
        """From here on the states change: the step's stream waits until a snapshot is copied."""
        if self.in_flight:
            self.writer.wait_copies()
        return {}

    def after_step(self, step: Any) -> None:
        """End a save that any rank says has failed, or is published. Raises SaveError."""
        if step.numbers["save_failed"]:
            self.finish()
        elif step.numbers["save_published"] and self.in_flight:
            self._done(self.writer.published.result())

    def finish(self, last: bool = False) -> None:
        """Wait until the save in flight, if any, is published. All ranks call this. last: as in `save`."""
        if self.in_flight:
            self._try(lambda: self._done(self.writer.join()), last)
            self.in_flight = False

    def close(self) -> None:
        """Free the memory of the snapshots, if there is one; saves are synchronous from here on."""
        if self.writer:
            self.writer.close()
        self.writer = None
