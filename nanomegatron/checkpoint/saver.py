"""When a run's save counts as failed, and what then: retries, warning or end; beside the training or not.

    --async-save            begin | step | step: flags of all ranks | ... | next save, or the end: join
    an error on one rank    is in the next step's all-reduce, so that all ranks act alike: try again
    after --save-retries    --on-save-error exit: SaveError; warn: a line, and the run continues

A synchronous save goes the same way in one call.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from nanomegatron.checkpoint.async_save import AsyncSaver
from nanomegatron.checkpoint.checkpoint import SaveError, on_all_ranks, owned_pieces, save
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import Retention
from nanomegatron.config.settings import CheckpointConfig
from nanomegatron.mesh import Mesh

PAUSE = 0.5  # seconds before a save is tried again


class Saver:
    """Saves the checkpoints of a run. warn: logs a text; published: is called on rank 0 with an iteration.

    pieces: those of a checkpoint of this run.
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
        wanted &= config.ckpt_format == "sharded"
        if wanted and often and hasattr(os, "memfd_create"):
            self.writer = AsyncSaver(mesh, sum(piece.data.nbytes for piece in owned_pieces(pieces)))
        elif wanted and often:
            warn("--async-save: needs Linux, whose processes can share memory: saves are synchronous")
        self.in_flight = self.announced = self.stale = self.last = False
        self.iteration = self.attempts = self.saved = 0  # the last: the newest iteration that is published

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
        self.iteration, self.attempts = iteration, 0
        self.announced, self.last = False, last
        contents = self.config.save, iteration, pieces, state, config
        keep = Retention(self.config.keep_last_k, self.config.save_retain_interval, persistent)
        if self.writer and (errors := on_all_ranks(self.mesh, self.writer.buffer.ready.result)[1]):
            self.warn(f"--async-save: {'; '.join(errors)}: saves are synchronous")
            self.close()
        if self.writer:
            self.in_flight = self._repeat(partial(self.writer.begin, *contents, keep))
        else:
            self._repeat(lambda: self._done(save(*contents, self.mesh, keep, self.config.ckpt_format)))

    def _repeat(self, work: Callable[[], None]) -> bool:
        """Call `work` until it raises no SaveError; False if there are no more retries."""
        while True:
            try:
                work()
                return True
            except SaveError as error:
                if not self._again(error):
                    return False

    def _again(self, error: SaveError) -> bool:
        """Whether to try again after an error, logged here. Raises it if it is to end the run."""
        again = self.attempts < self.config.save_retries
        if not again and (self.last or self.config.on_save_error == "exit"):
            raise error
        self.warn(
            f"{error}; trying again"
            if again
            else f"{error}; the run continues, and the next save is due as usual (--on-save-error warn)"
        )
        self.attempts += 1
        time.sleep(PAUSE * again)
        return again

    def _done(self, notes: list[str]) -> None:
        """The save is published, as all ranks know."""
        self.saved, self.in_flight = self.iteration, False
        self._announce(notes)

    def _announce(self, notes: list[str]) -> None:
        if self.mesh.world.rank == 0 and not self.announced:
            self.published(self.iteration)
            for note in notes:
                self.warn(note)
        self.announced = True

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed on this rank; for the next all-reduce of stop flags."""
        return self.in_flight and self.writer.failed

    def wait_copies(self) -> None:
        """Call before the states change: the step's stream waits until a snapshot is copied."""
        if self.in_flight:
            self.writer.wait_copies()

    def poll(self, failed: bool, pending: bool) -> None:
        """Look at the save in flight, after each step. All ranks call this. Raises SaveError.

        failed: whether it had failed on a rank when the reported step was launched; pending: a step launched
        since then is in flight, whose flags say the same.
        """
        failed, self.stale = failed and not self.stale, False
        if failed and self.in_flight:
            self.writer.cancel()
            self._join()
            self.stale = pending
        elif self.in_flight and self.writer.published.done() and not self.writer.failed:
            self._announce(self.writer.published.result())

    def finish(self, last: bool = False) -> None:
        """Wait until the save in flight, if any, is published. All ranks call this. last: as in `save`."""
        self.last = last
        while self.in_flight:
            self._join()

    def _join(self) -> None:
        """Wait for the save in flight; one that fails is begun again, and is then in flight."""
        try:
            self._done(self.writer.join())
        except SaveError as error:
            self.in_flight = self._again(error) and self._repeat(self.writer.submit)

    def close(self) -> None:
        """End the writer process, if there is one."""
        if self.writer:
            self.writer.close()
        self.writer = None
