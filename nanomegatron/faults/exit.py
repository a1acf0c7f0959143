"""The end of a run: exit codes, the report of a rank that fails, and which rank failed first.

When a rank dies its connections close, so the others fail a moment later, with errors that do not name the
cause. These are reported as a lost peer, and replaced by the message of the rank that failed first, or by
what the launcher of `--nproc` saw of its end.
"""

import re
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from nanomegatron.checkpoint.checkpoint import CheckpointError, SaveError
from nanomegatron.config.cli import ConfigError
from nanomegatron.config.early import tell_torchrun
from nanomegatron.config.user_files import escaped
from nanomegatron.faults import launch
from nanomegatron.faults.health import BadSteps, MachineFault
from nanomegatron.faults.lock import FolderLost, lock
from nanomegatron.faults.signals import PREEMPTED
from nanomegatron.report.log import LOST_PEER, RunLog
from nanomegatron.report.status import read_status, write_status

DONE, BAD_CONFIG = 0, 2
NO_CHECKPOINT, SAVE_FAILED = 3, 4
BAD_STEPS, FAULTY_MACHINE = 16, 17
CODES = {
    ConfigError: BAD_CONFIG,
    CheckpointError: NO_CHECKPOINT,
    SaveError: SAVE_FAILED,
    FolderLost: SAVE_FAILED,
    BadSteps: BAD_STEPS,
    MachineFault: FAULTY_MACHINE,
}
EXIT_CODES = tuple(CODES.values())  # the rank has printed its message
LOST = (
    r"Connection (closed|reset) by peer|Broken pipe|Timed out waiting|remote process exited|ncclRemoteError"
)


def report_failure(log: RunLog, error: BaseException, begun: bool) -> int:
    """Write to console, log and status.json why this rank fails; returns its exit code.

    begun: set-up is done. Before, a ValueError means wrong settings or data; after, it is like any error.
    """
    kinds = CODES if begun else CODES | {ValueError: BAD_CONFIG}
    code = next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)
    if isinstance(error, FolderLost) and not log.is_main:
        log.folder_lost = True
    if code != 1:
        first = log.status("failed", exit_code=code, message=str(error))
        tell_torchrun(escaped(str(error)))
        if log.is_main:
            log.warn(str(error))
        elif first:
            log.line(f"! {error}")
        return code
    frames = traceback.extract_tb(error.__traceback__)
    where = " > ".join(frame.name for frame in frames if "/torch/" not in frame.filename)
    message = f"{''.join(traceback.format_exception_only(error)).strip()} (in {where})"
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RuntimeError) and re.search(LOST, str(error)):
        cause = " ".join(str(error).partition(". ")[0].split())
        message = text = (
            f"{LOST_PEER} in {where}: another rank died or hangs, see its message or the launcher's ({cause})"
        )
    log.status("failed", exit_code=1, message=message)
    log.warn(text)
    return code


def name_culprit(folder: Path, began: str, rank: int, codes: list[int], running: list[int]) -> None:
    """Print which rank failed first: its own message, or what the launcher saw, also put in status.json.

    Prints nothing if rank 0 has reported wrong settings or data. began: `timestamp` of the launch; rank: the
    first that failed; codes: all exit codes; running: ranks that had to be stopped.
    """
    code, path = codes[rank], folder / "status.json"
    if code in (DONE, PREEMPTED) or (code in EXIT_CODES and code == codes[0]):
        return
    what = seen_by_launcher(rank, code, running)
    said = said_by_rank(path, began)
    if not said and code not in EXIT_CODES and path.exists():
        with suppress(ConfigError, OSError), lock(folder):  # not if another run holds the folder
            said = said_by_rank(path, began)  # by rank 0, which has just left
            if not said:
                failed = dict(state="failed", exit_code=1, message=what, rank=f"rank {rank}")
                write_status(path, read_status(path, lambda _: None) | failed)
    print(escaped(f"nanomegatron train: {said or what}"), file=sys.stderr)


def said_by_rank(path: Path, began: str) -> str:
    """Return what the rank that failed first has written to status.json; "" of a lost peer, or if none has.

    began: what is older is of an earlier run.
    """
    facts = read_status(path, lambda text: print(escaped(text), file=sys.stderr))
    message = str(facts.get("message"))
    if facts.get("state") != "failed" or message.startswith(LOST_PEER) or str(facts.get("time")) < began:
        return ""
    return f"{facts['rank']} failed first: {message}"


def seen_by_launcher(rank: int, code: int, running: list[int]) -> str:
    """Describe how the rank that failed first ended, and which ranks still ran then, if any."""
    others = f"rank{'s' * (len(running) > 1)} {' '.join(map(str, running))} still ran"
    late = f"{launch.GRACE:.0f} s later and had to be stopped"
    if rank in running:
        return f"a second signal came; {others} {late}"
    if code == launch.UNSEEN:
        return (
            "the process that starts the ranks was killed (out of memory? see dmesg), and they ended with it"
        )
    if code < 0:
        signals = {number.value: number.name for number in signal.Signals}
        hint = " (out of memory? see dmesg)" if -code == signal.SIGKILL else ""
        ended = f"rank {rank} was killed by {signals.get(-code, f'signal {-code}')}{hint}"
    else:
        ended = f"rank {rank} was the first to end, with exit code {code}"
    if not running:
        return f"{ended}; what other ranks say of a lost peer follows from it"
    return f"{ended}; {others} {late}: look there for a hang"
