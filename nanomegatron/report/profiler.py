"""Records of a run by torch's own tools: the profiler's trace of some steps, and the memory history.

    iteration   1  ...  start-1 | start  ...  end-1 | end  ...
                                [===== recorded ====]            --profile-step-start, --profile-step-end

In the trace each step is a range, `ProfilerStep#3`, and in it the parts that `report/timers.py` times and the
pipeline's ops (`report/trace.py`). On a GPU the same steps are between cudaProfilerStart and
cudaProfilerStop, so that this command records them, with NVTX ranges of the ops:

    nsys profile -c cudaProfilerApi torchrun ... train.py --profile ...
"""

import os
from pathlib import Path

import torch

from nanomegatron.batch import Batch
from nanomegatron.config.settings import RunConfig
from nanomegatron.mesh import Mesh
from nanomegatron.report.log import RunLog
from nanomegatron.step import GlobalBatch, Observer

HISTORY = 100_000  # number of allocations that are kept


class Profile(Observer):
    """--profile and --record-memory-history of one rank; does nothing if neither is set."""

    def __init__(self, run: RunConfig, mesh: Mesh, log: RunLog) -> None:
        """Starts to record the memory history, if configured."""
        self.run, self.mesh = run, mesh
        self.log, self.folder = log, log.folder
        self.cuda = mesh.device.type == "cuda"
        self.wanted = run.profile and mesh.rank in run.profile_ranks
        self.profiler: torch.profiler.profile | None = None
        self.remembers = run.record_memory_history and self.cuda
        if self.remembers:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)
            torch._C._cuda_attach_out_of_memory_observer(
                lambda *_: self.remembers and self._dump("-out-of-memory")
            )
        if run.profile:
            steps = f"steps {run.profile_step_start} to {run.profile_step_end - 1}"
            files = ", ".join(str(self.path(rank)) for rank in run.profile_ranks)
            log.line(f"profile will record {steps}: {files}")

    def path(self, rank: int) -> Path:
        """The file of a rank's trace."""
        return self.folder / f"profile-rank{rank}.json"

    def before_step(self, batch: GlobalBatch, microbatches: list[Batch]) -> None:
        """Start or stop the profiler, or mark a step."""
        iteration = batch.iteration
        inside = self.run.profile_step_start <= iteration < self.run.profile_step_end
        with self.log.attempt("profile"):
            if not inside:
                self._stop()
            elif self.profiler is not None:
                self.profiler.step()
            elif self.wanted:
                self._start(iteration)

    def end(self) -> None:
        """Write all records."""
        with self.log.attempt("profile"):
            self._stop()
        if self.remembers:
            with self.log.attempt("memory history"):
                self._dump()
            torch.cuda.memory._record_memory_history(enabled=None)
            self.remembers = False

    def _start(self, iteration: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no lines of its own among those of the run
        kinds = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(
            activities=[kinds.CPU] + [kinds.CUDA] * self.cuda,
            schedule=lambda _: torch.profiler.ProfilerAction.RECORD,  # with one, `step` marks the steps
        )
        self.profiler.step_num = iteration
        if self.cuda:
            torch.cuda.synchronize(self.mesh.device)
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        self.profiler.start()

    def _stop(self) -> None:
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        if self.cuda:
            torch.cuda.synchronize(self.mesh.device)
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
        profiler.stop()
        path = self.path(self.mesh.rank)
        profiler.export_chrome_trace(str(path))
        self.log.line(f"profile {path} is written; https://ui.perfetto.dev or chrome://tracing shows it")

    def _dump(self, when: str = "") -> None:
        name = Path(self.run.memory_snapshot_path)
        path = self.folder / f"{name.stem}-rank{self.mesh.rank}{when}{name.suffix}"
        torch.cuda.memory._dump_snapshot(str(path))
        self.log.line(
            f"memory  {path}: a pickle, which can run code when loaded; for https://pytorch.org/memory_viz "
            "alone, which reads it in the browser"
        )
