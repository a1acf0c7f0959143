"""What a checkpoint of a run holds, and how a run resumes from one.

    folder runs/NAME/ckpt    weights, main weights and Adam's moments by global name and slice
                             FP8 scales, biases of routers
                             state: iteration, samples consumed and asked for, good steps, loss scale, seed,
                             tokenizer, data (data/identity.py), losses and norms of the last steps and
                             iterations to skip (faults/health.py, faults/recovery.py)
                             the resolved settings

There is no random state to keep: weights depend on (seed, name), the order of the data on (seed, samples
requested by each run), dropout on (seed, sample, place). So a run resumes to the bit, under any layout.
"""

from dataclasses import replace
from pathlib import Path

import torch

from nanomegatron.checkpoint.checkpoint import (
    agreed,
    load,
    load_megatron,
    module_states,
    read_state,
    state_pieces,
    training_pieces,
)
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import remove_leftovers
from nanomegatron.checkpoint.formats import layout_words
from nanomegatron.checkpoint.fp8_state import fp8_state, load_fp8_state
from nanomegatron.checkpoint.hf import folder_tokenizer, keep_source_files, load_weights
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.checkpoint.megatron import open_megatron
from nanomegatron.checkpoint.optimizer_state import (
    load_optimizer_scalars,
    optimizer_scalars,
    optimizer_states,
    reset_main,
)
from nanomegatron.checkpoint.saver import Saver
from nanomegatron.checkpoint.source import (
    LoadSource,
    find_source,
    has_weights_only,
    model_changes,
    value_changes,
)
from nanomegatron.checkpoint.strictness import some
from nanomegatron.checkpoint.upcycle import dense_pieces, divide_outputs
from nanomegatron.comm import all_gather_text
from nanomegatron.config.cli import ConfigError, from_toml, to_toml
from nanomegatron.config.hf import is_hf_folder
from nanomegatron.config.megatron_args import megatron_folder, megatron_progress, why_no_checkpoint
from nanomegatron.data.identity import data_changes
from nanomegatron.faults.alive import why_dead
from nanomegatron.faults.health import BadSteps, Health
from nanomegatron.faults.signals import Signals
from nanomegatron.report.steps import Reporter
from nanomegatron.step import Observer, Training, due

FP8_PREFIX = "fp8/"  # begins the keys of FP8 scales


class Checkpoints(Observer):
    """Saves a training when it is due. It adds its `saver` to the observers, which sees a save through."""

    def __init__(self, run: Training, reporter: Reporter, health: Health, signals: Signals) -> None:
        """Removes what a killed run has left."""
        self.run = run
        self.config = run.config.checkpoint
        self.reporter = reporter
        self.health = health
        self.signals = signals
        main = run.mesh.rank == 0
        if main:
            with run.log.attempt("removal of what killed saves have left"):
                remove_leftovers(Path(self.config.save))
        warn = run.log.warn if main else run.log.line
        self.saver = Saver(self.config, run.mesh, self.pieces(), warn, self.published)
        run.observers.append(self.saver)

    def published(self, iteration: int) -> None:
        """Log a checkpoint that is there."""
        self.run.log.line(f"saved   {self.config.save}, step {iteration}")
        self.run.log.status("running", iteration=iteration, checkpoint=self.config.save)

    def save_if_due(self) -> None:
        """Save, or begin to, if an interval says so; the last iteration is left to `save_last`."""
        progress = self.run.progress
        iteration = progress.iteration
        persistent = due(self.config.save_interval, iteration)
        last = progress.stop or iteration == self.run.config.run.train_iters
        if not last and (persistent or due(self.config.non_persistent_save_interval, iteration)):
            self.save(persistent)

    def save_last(self) -> None:
        """Save the last iteration if it is not saved yet; all of it is published then. Raises SaveError.

        Raises BadSteps, on all ranks, if the run ends in bad steps, unless a signal has ended it: then the
        steps since the last save are left to the next start, which continues the count of bad steps.
        """
        self.saver.finish()
        if self.saver.saved < self.run.progress.iteration:
            self.save(last=True)
        self.saver.finish(last=True)
        self.saver.close()

    def pieces(self) -> list[Piece]:
        """Collect what a checkpoint of this run holds."""
        states = {} if self.config.no_save_optim else optimizer_states(self.run.optimizer)
        return all_pieces(self.run, states)

    def save(self, persistent: bool = True, last: bool = False) -> None:
        """Save everything that the next run needs to continue to the bit; waits for the step in flight.

        With --async-save it is only begun. Arguments: as for `Saver.save`. A spike that a rollback undoes is
        not saved, nor is anything while steps are bad or weights are dead (faults/alive.py): a warning says
        so. Raises BadSteps, on all ranks, if a tensor is not finite, or if the last save of a run would be
        left out, and FolderLost if --save was removed or moved.
        """
        run = self.run
        health = self.health
        iteration = run.progress.iteration
        self.signals.check_folders(run.mesh, "--save")
        run.buckets.wait_params()
        pieces = self.pieces()
        finite = health.finite(pieces)  # launched behind the step in flight
        self.reporter.flush()
        if health.spike is not None and not last:
            return
        health.check_pieces(*finite, iteration)
        bad = health.streak.now
        why = health.bad_steps() if bad else why_dead(run, health)
        if why:
            if last and not run.progress.preempted:
                text = f"{why}. {health.advice()}" if bad else why
                raise BadSteps(f"step {iteration}, the last, is not saved: {text}")
            if run.mesh.rank == 0:
                run.log.warn(f"step {iteration} is not saved: {why}")
            return
        state = training_state(run) | {"health": health.state()}
        self.saver.save(iteration, pieces, state, to_toml(run.config), persistent, last)


def training_state(run: Training) -> dict:
    """Collect what a checkpoint keeps of a training besides tensors and the health's window."""
    progress = run.progress
    return {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "skipped_samples": progress.skipped_samples,
        "data_samples": run.data.samples,
        "optimizer": optimizer_scalars(run.optimizer),
        "seed": run.config.run.seed,
        "data": run.data.identity,
        "tokenizer": run.data.tokenizer.spec,
        "tokenizer_fingerprint": run.data.tokenizer.fingerprint,
        "circumstances": environment_info(run),
        "skipped_iterations": sorted(progress.skipped_iterations),
        "evaluated": progress.evaluated,
    }


def environment_info(run: Training) -> dict:
    """Return hardware and layout: a resumed run gives the same bits only where they are the same."""
    mesh = run.mesh
    return {
        "device": torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "layout": layout_words(mesh),
        "sharding": run.config.parallel.sharding,
    }


def all_pieces(run: Training, states: dict) -> list[Piece]:
    """Collect what a checkpoint holds, with the optimizer's `states`; of FP8 scales `[...]` a copy."""
    fp8 = {f"{FP8_PREFIX}{name}": x for name, x in fp8_state(run.model.scales).items()}
    small = state_pieces(fp8 | module_states(run.model), run.mesh)
    return training_pieces(run.model.parameters(), states, run.mesh) + small


def load_checkpoint(run: Training, health: Health | None = None) -> None:
    """Resume from the folder that `find_source` chooses: of this program, Megatron-LM or Hugging Face.

    Raises CheckpointError if --load names a folder without a checkpoint, unless that is --save's, too.
    """
    source = find_source(run.config, run.mesh)
    if is_hf_folder(source.root):
        line, with_states = load_hf_folder(run, source), False
    elif theirs := megatron_folder(source.root, source.step):
        line, with_states = load_megatron_folder(run, source, theirs)
    else:
        line, with_states = load_own_folder(run, source, health)
    if not line:
        return
    if source.upcycling:
        log_notes(run, divide_outputs(run.model.parameters(), run.config.model))
        line += ", each expert as the MLP"
    if run.optimizer and not with_states:
        reset_main(run.optimizer)
    run.log.line(line)


def load_own_folder(run: Training, source: LoadSource, health: Health | None) -> tuple[str, bool]:
    """Load a checkpoint of this program -> a line that says so ("": there is none), whether with states"""
    config = run.config.checkpoint
    root = source.root
    found = read_state(root, run.mesh, source.step)
    if found and not source.begins and has_weights_only(found[0]):
        raise ValueError(f"--load {root}: it has weights only; add --finetune to train it")
    if found:
        check_model(run, source, found[1])
    states = {} if source.begins or config.no_load_optim else optimizer_states(run.optimizer)
    pieces = all_pieces(run, states)
    loaded = load(
        root,
        dense_pieces(pieces) if source.upcycling else pieces,
        run.mesh,
        source.step,
        not states,
        config.verify_integrity,
        config.dist_ckpt_strictness,
    )
    if loaded is None:
        check_absence(run, source)
        return "", False
    warn_once(run, loaded.notes)
    check_data(run, root, loaded.state, resumes=not source.begins)
    if source.only_weights:
        keep_source(run, root)
    else:
        restore_progress(run, root, loaded.state, health)
        before, now = loaded.state.get("circumstances", {}), environment_info(run)
        changed = [f"{key} {before[key]} -> {x}" for key, x in now.items() if before.get(key, x) != x]
        if changed:
            log_notes(run, [f"the same state and data, but not the same bits: {', '.join(changed)}"])
    if states:
        load_optimizer_scalars(run.optimizer, loaded.state["optimizer"])
    if run.optimizer and not source.begins:
        before = loaded.state["optimizer"]["good_steps"]
        log_notes(
            run, value_changes(loaded.config, run.config, run.progress, before, before if states else 0)
        )
    if run.model.scales is not None:
        fp8 = {
            piece.key.removeprefix(FP8_PREFIX): piece.data
            for piece in pieces
            if piece.key.startswith(FP8_PREFIX)
        }
        load_fp8_state(run.model.scales, fp8)
    run.log.status("running", iteration=run.progress.iteration, checkpoint=root)
    word = "loaded " if run.config.run.eval_only else "resumed"
    return f"{word} {root}, step {loaded.iteration}{' (weights only)' * source.only_weights}", bool(states)


def check_absence(run: Training, source: LoadSource) -> None:
    """Raise CheckpointError unless a run may begin without a checkpoint."""
    config = run.config.checkpoint
    root = source.root
    if config.load and Path(config.load).resolve() == Path(config.save).resolve() and not source.begins:
        log_notes(run, [f"--load {root}, which is --save too, has no checkpoint yet: from scratch"])
    elif config.load:
        fix = why_no_checkpoint(root, source.step) or "; train from scratch without --load"
        raise CheckpointError(f"--load {root}: no checkpoint there{fix}")
    elif run.config.run.eval_only:
        raise CheckpointError(f"--eval-only: no checkpoint in {root}; name one with --load")


def check_model(run: Training, source: LoadSource, saved: str) -> None:
    """Raise ConfigError if a checkpoint's settings (TOML) are of another model. Gathers a text over world."""
    try:
        errors, notes = model_changes(from_toml(saved), run.config, source)
    except (ValueError, TypeError, ArithmeticError) as error:  # perhaps of another version
        warn_once(run, [f"{source.root}: its model is not compared: {error}".partition("\n")[0]])
        return
    if errors and not run.config.checkpoint.dist_ckpt_strictness.startswith(("log_", "ignore_")):
        fix = "give the same; without flags that describe a model --load takes all from there"
        raise ConfigError([f"{source.root} is of another model: {fix}", *errors])
    warn_once(run, [f"{source.root} is of another model: {note}" for note in [*errors, *notes]])


def check_data(run: Training, root: str, state: dict, resumes: bool) -> None:
    """Compare a checkpoint's data and tokenizer with this run's; gathers a text over world.

    Raises ConfigError on all ranks if a run `resumes` on other data without --allow-data-change. Where only
    weights are loaded any data may be used; another tokenizer is a warning.
    """
    tokenizer = run.data.tokenizer
    changes = []
    if "data" in state and run.data.identity and resumes:
        changes = data_changes(state["data"], run.data.identity)
    changes = all_gather_text("\n".join(changes), run.mesh.world, run.mesh.device)[0].splitlines()
    if state.get("tokenizer_fingerprint") not in (None, tokenizer.fingerprint):
        changes.append(f"tokenizer {state.get('tokenizer')} -> {tokenizer.spec}, which gives other ids")
    if changes and resumes and not run.config.checkpoint.allow_data_change:
        fix = "give the same; --allow-data-change resumes on these, --finetune starts at step 0"
        raise ConfigError([f"{root} was trained on other data: {fix}", *changes])
    warn_once(run, [f"{root} was trained on other data: {change}" for change in changes])


def warn_once(run: Training, notes: list[str]) -> None:
    """Warn of ten notes, on other ranks of those that rank 0 does not have; gathers a text over world."""
    notes = some(notes)
    first = all_gather_text("\n".join(notes), run.mesh.world, run.mesh.device)[0]
    for note in notes:
        if run.mesh.rank == 0 or note not in first:
            run.log.warn(note)


def restore_progress(run: Training, root: str, state: dict, health: Health | None = None) -> None:
    """Set the iteration and the skipped samples to those of a checkpoint's state.

    Raises ValueError if by then this run would have consumed another number of samples.
    """
    progress = run.progress
    progress.iteration = state.get("iteration", 0)
    progress.skipped_samples = state.get("skipped_samples", 0)
    progress.skipped_iterations = set(state.get("skipped_iterations", ()))
    progress.evaluated = state.get("evaluated", progress.iteration)
    if health:
        health.load(state.get("health", []))
    done = run.progress.iteration >= len(run.progress.samples_before) or run.config.run.eval_only
    if not done and state["consumed_samples"] != run.progress.consumed_samples:
        raise ValueError(
            f"--global-batch-size {run.config.data.global_batch_size}: {root} has consumed "
            f"{state['consumed_samples']} samples in {run.progress.iteration} iterations, this run "
            f"{run.progress.consumed_samples}; keep its batch sizes, or start at iteration 0 with --finetune"
        )


def load_hf_folder(run: Training, source: LoadSource) -> str:
    """Load a Hugging Face model's weights, into experts its MLPs -> a line that says so; raises ValueError"""
    model = run.model
    log_notes(
        run,
        load_weights(source.root, model.parameters(), run.config.model, model.vocab_size, source.upcycling),
    )
    warn_once(run, tokenizer_notes(run, source.root) if run.mesh.rank == 0 else [])
    keep_source(run, source.root)
    return f"loaded  {source.root}, the weights of a Hugging Face model"


def tokenizer_notes(run: Training, root: str) -> list[str]:
    """Return a note if a Hugging Face folder has another tokenizer than the data."""
    ours = run.data.tokenizer
    try:
        theirs = folder_tokenizer(Path(root), run.model.vocab_size)
    except ValueError:  # it cannot be read: nothing to compare with
        return []
    if "NullTokenizer" in (ours.spec["type"], theirs.spec["type"]) or ours.fingerprint == theirs.fingerprint:
        return []
    return [f"the data's tokenizer is a {ours.spec['type']}, not that of {root}: its ids may be others"]


def load_megatron_folder(run: Training, source: LoadSource, folder: Path) -> tuple[str, bool]:
    """Load a Megatron-LM checkpoint: to resume at its iteration if it has optimizer states, else its weights.

    Returns as `load_own_folder`. Raises CheckpointError, or ValueError if by then this run would have
    consumed another number of samples.
    """
    model = run.config.model
    whole = replace(model, num_experts=None) if source.upcycling else model
    manifest = agreed(run.mesh, "", open_megatron, folder, whole, run.model.vocab_size)
    resumes = not source.begins and any(key.startswith("exp_avg/") for key in manifest.tensors)
    with_states = resumes and not run.config.checkpoint.no_load_optim
    pieces = all_pieces(run, optimizer_states(run.optimizer) if with_states else {})
    pieces = dense_pieces(pieces) if source.upcycling else pieces
    warn_once(run, load_megatron(folder, manifest, pieces, run.mesh))
    if not resumes:
        return f"loaded  {folder} of Megatron-LM, its weights", False
    iteration, samples = megatron_progress(folder)
    run.progress.iteration = iteration
    consumed = run.progress.consumed_samples if samples is None else samples
    restore_progress(run, str(folder), {"iteration": iteration, "consumed_samples": consumed})
    if with_states:
        numbers = optimizer_scalars(run.optimizer) | {"good_steps": iteration}
        load_optimizer_scalars(run.optimizer, numbers)
    return f"loaded  {folder} of Megatron-LM, step {iteration}", with_states


def keep_source(run: Training, root: str) -> None:
    """Copy a Hugging Face model's files beside its weights to --save/hf, for a later export."""
    if run.mesh.rank == 0 and not run.config.run.eval_only:
        keep_source_files(root, Path(run.config.checkpoint.save) / "hf")


def log_notes(run: Training, notes: list[str]) -> None:
    """Log each note as a line."""
    for note in notes:
        run.log.line(f"note    {note}")
