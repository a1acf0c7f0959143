"""What says that a run has had checkpoints: where these are missing it does not begin again without a word.

    ckpt/latest_checkpointed_iteration.txt    the newest iteration that was published there
    runs/NAME/status.json                     the folder that the run saved to or resumed from; null: none yet
    runs/NAME/metrics.jsonl                   its steps; they tell only if there is no status.json

A disk that is not mounted, and folders that were moved or renamed, look like a new run. A run that was killed
before its first save has steps in metrics.jsonl and no checkpoint in status.json: it does begin again.
"""

from pathlib import Path

from nanomegatron.checkpoint.checkpoint import agreed, latest, load
from nanomegatron.checkpoint.folder import LATEST
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.comm import all_gather_text
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import escaped
from nanomegatron.mesh import Mesh
from nanomegatron.report.log import RunLog
from nanomegatron.report.status import read_status
from nanomegatron.report.writers import read_jsonl


def check_history(config: Config, mesh: Mesh, log: RunLog) -> None:
    """Compare what is in --save with what the run's records say; a note if a run begins again.

    Raises CheckpointError on all ranks if checkpoints are missing, unless --no-exit-on-missing-checkpoint is
    given. Gathers texts over world.
    """
    said = agreed(mesh, "", _compare if log.is_main else None, config, log)
    text = all_gather_text(said or "", mesh.world, mesh.device)[0]
    if text and config.checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"{text}; mount or move back what is missing; "
            "or train from step 1 with --no-exit-on-missing-checkpoint"
        )
    if text and log.is_main:
        log.warn(f"{text}; --no-exit-on-missing-checkpoint: the run begins at step 1")
        log.status("running", iteration=0, checkpoint=None)


def is_done(config: Config, mesh: Mesh) -> bool:
    """Whether the run in this folder has trained all steps, evaluated and saved; if so, says how to go on.

    Then nothing is built or evaluated again; the last checkpoint is verified. Gathers texts over world.
    """
    save, said = Path(config.checkpoint.save), ""
    if mesh.rank == 0 and not config.run.eval_only and config.checkpoint.ckpt_step is None:
        facts = read_status(config.run.folder / "status.json", lambda _: None)
        said = str(facts.get("iteration")) if facts.get("state") == "done" else ""
    said = all_gather_text(said, mesh.world, mesh.device)[0]
    if not said.isdecimal() or int(said) < config.run.train_iters:
        return False
    try:
        found = load(save, [], mesh, integrity=config.checkpoint.verify_integrity)
    except CheckpointError:  # the start that follows says it
        return False
    if found is None or found.iteration != int(said):
        return False
    if mesh.rank == 0:
        print(
            f"done    all {said} steps of {config.run.folder} are saved in {save}: nothing left to train",
            "note    a larger --train-iters goes further, another --run-name begins from step 1",
            sep="\n",
            flush=True,
        )
        if facts.get("next"):
            print(escaped(f"next    {facts['next']}"), flush=True)
    return True


def _compare(config: Config, log: RunLog) -> str:
    """Say what knows of checkpoints that are all missing; "": none are. Warns if only the newest is."""
    save, load = Path(config.checkpoint.save), config.checkpoint.load
    newest, published = latest(save), _published(save)
    if newest is not None:
        if published is not None and published > newest:
            log.warn(
                f"missing checkpoint: {save / LATEST} names iteration {published}, which is not there; "
                f"loading iteration {newest} instead: {published - newest} iterations are lost"
            )
        return ""
    none = f"{save} has no checkpoint"
    if published is not None:
        return f"{save / LATEST} says that iteration {published} was saved, and {none}"
    known, last = log.before.get("checkpoint"), log.before.get("iteration")
    if known and (not load or _same(save, load) or _same(save, known)):
        hint = "" if _same(save, known) else f", --load {known} continues from there"
        return f"{log.folder / 'status.json'} says that step {last} has checkpoints in {known}{hint}; {none}"
    metrics = log.folder / "metrics.jsonl"
    steps = max((record["iteration"] for record in read_jsonl(metrics, log.warn)), default=0)
    if steps and log.before and not known:
        log.line(f"note    {metrics}: {steps} steps, of which none was saved: from step 1 again")
    elif steps and not log.before and not load:
        return f"{metrics} has steps up to {steps}, there is no status.json, and {none}"
    return ""


def _same(one: str | Path, other: str | Path | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


def _published(save: Path) -> int | None:
    """The iteration that the file of the newest checkpoint names; None if there is none."""
    try:
        return int((save / LATEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
