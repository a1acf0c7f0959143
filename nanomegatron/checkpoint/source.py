"""Which checkpoint a run starts from, and how many samples the data of each earlier run was built for.

    --save has a checkpoint     the run resumes from it; --eval-only: only if there is no --load
    it has none                 --load, if given; --finetune, upcycling: only its weights, at iteration 0

All ranks use the folder that rank 0 chooses.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from nanomegatron.checkpoint.checkpoint import latest_for_all, read_state
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.config.batch import batch_size_at, samples_before
from nanomegatron.config.cli import ConfigError, from_toml, to_toml
from nanomegatron.config.hf import effective
from nanomegatron.config.rules import flag
from nanomegatron.config.settings import Config
from nanomegatron.data.identity import trained_on
from nanomegatron.data.tokenizer import Tokenizer
from nanomegatron.mesh import Mesh
from nanomegatron.pick_variants import pick_schedules
from nanomegatron.step import Progress

# Settings on which the order of the data depends, besides the numbers of samples and the data themselves
# (data/identity.py).
ORDER = ("variable-seq-lengths", "seq-length", "seed")
# Settings that --use-checkpoint-opt-param-scheduler takes from the checkpoint.
SCHEDULE = """
lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples
lr_warmup_fraction lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples
weight_decay start_weight_decay end_weight_decay weight_decay_incr_style
""".split()
# Settings that may differ where only weights are loaded: for positions beyond those of the pretraining.
POSITIONS = ("rotary", "rope", "use_rope", "no_rope", "yarn", "mscale", "window")


class LoadSource(NamedTuple):
    """The checkpoint that a run resumes from: a folder, and the iteration (None: the newest)."""

    root: str
    step: int | None
    only_weights: bool  # the run begins at iteration 0
    upcycling: bool  # its weights are of a dense model, the run's model has experts
    begins: bool  # the run takes no progress from it: it has only weights, or --eval-only

    def saved(self, mesh: Mesh) -> list | None:
        """`read_state` of the checkpoint whose progress the run takes; None if there is none."""
        return None if self.begins else read_state(self.root, mesh, self.step)


def find_source(whole: Config, mesh: Mesh) -> LoadSource:
    """Return the run's own folder if it has a checkpoint, or else --load.

    --eval-only prefers --load; --finetune and --moe-use-upcycling apply only to a run without a checkpoint.
    Rank 0's view of the folders is broadcast over world. Raises ValueError if --ckpt-step is older than the
    newest checkpoint of the run's own folder.
    """
    config, eval_only = whole.checkpoint, whole.run.eval_only
    newest, step = latest_for_all(config.save, mesh), config.ckpt_step
    upcycling = config.moe_use_upcycling
    resumes = newest is not None and not eval_only
    if resumes and upcycling:
        step = None  # it named an iteration of the dense model
    if resumes and step is not None and newest > step:
        raise ValueError(
            f"--ckpt-step {step}: {config.save} holds iteration {newest}, which a later resume "
            "would take; give a new --run-name and --load this folder"
        )
    if newest is not None and step is None and not (eval_only and config.load):
        return LoadSource(config.save, None, only_weights=False, upcycling=False, begins=eval_only)
    only_weights = config.finetune or upcycling
    return LoadSource(
        config.load or config.save, step, only_weights, upcycling, begins=only_weights or eval_only
    )


def data_samples(config: Config, mesh: Mesh, warn: Callable[[str], None], wanted: int) -> list[int]:
    """Return the numbers of samples of the runs before this one, and `wanted`: the data is built for them.

    The former are in the checkpoint that this run resumes from. Communicates over world. Raises
    CheckpointError if the numbers in it are invalid.
    """
    source = find_source(config, mesh)
    root, found = source.root, source.saved(mesh)
    if found is None or not found[0].get("consumed_samples"):
        return [wanted]
    counts, note = found[0].get("data_samples", []), ""
    try:
        before, now = (tomllib.loads(text) for text in (found[1], to_toml(config)))
    except ValueError as error:
        raise CheckpointError(f"{root}: its settings cannot be read ({error})") from None
    if not isinstance(counts, list) or not all(type(n) is int and n > 0 for n in counts):
        raise CheckpointError(f"{root}: data_samples {str(counts)[:80]} are not numbers of samples")
    if not counts:
        note = f"{root} does not say how many samples its data was made for"
    elif changed := [f"--{key}" for key in ORDER if before.get(key) != now.get(key)]:
        note = f"{', '.join(changed)}: {root} was made with another"
    if note and mesh.rank == 0:
        warn(f"{note}: samples may be in another order, some come again and others never")
    return counts if counts and wanted <= counts[-1] else [*counts, wanted]


def has_weights_only(state: dict) -> bool:
    """Whether a checkpoint was converted, and has no progress to resume from."""
    return "hf" in state or "iteration" not in state


def check_tokenizer(config: Config, mesh: Mesh, tokenizer: Tokenizer) -> None:
    """Raise ConfigError, on all ranks, if a run resumes with a tokenizer that gives other ids.

    Before anything is built for its vocabulary. --allow-data-change allows it.
    """
    source = find_source(config, mesh)
    found = source.saved(mesh)
    if found is None or has_weights_only(found[0]) or config.checkpoint.allow_data_change:
        return
    if found[0].get("tokenizer_fingerprint") not in (None, tokenizer.fingerprint):
        error = (
            f"{source.root} was trained on {trained_on(found[0])}, "
            f"with tokenizer {found[0].get('tokenizer')}, not {tokenizer.spec}, which gives other ids: "
            "give that data, or another --run-name to train on this from the start; "
            "--allow-data-change resumes with this, --finetune starts at step 0"
        )
        raise ConfigError([error])


def model_changes(saved: Config, config: Config, source: LoadSource) -> tuple[list[str], list[str]]:
    """Return lines for settings that make another function of saved weights: errors, and notes."""
    old, new = saved.model, config.model
    new = replace(new, num_experts=None) if source.upcycling else new
    if old.num_layers is None:
        return [], []
    if bool(old.num_experts) != bool(new.num_experts):
        fix = "--moe-use-upcycling makes experts of a dense model's MLPs, in a new --run-name"
        return [f"--num-experts {new.num_experts}: saved with {old.num_experts}; {fix}"], []
    before, now, found = effective(old), effective(new), ([], [])
    if new.position_embedding_type != "learned_absolute":
        del now["max_position_embeddings"]
    if old.softmax_scale == new.softmax_scale:
        del now["softmax_scale"]  # it follows from the size of heads
    for name in [name for name in now if name in before]:
        was, value = before[name], now[name]
        if isinstance(value, list):  # one for each layer; their number is compared by itself
            layers = min(len(was), len(value))
            was, value = tuple(was[:layers]), tuple(value[:layers])
        if was != value:
            place = name.startswith(POSITIONS) or {was, value} == {"rope", "yarn"}
            hint = "; --finetune may change it" * place
            found[place and source.begins].append(f"{flag(name)} {value}: saved with {was}{hint}")
    return found


def value_changes(
    saved: str, config: Config, progress: Progress, steps_before: int, steps_now: int
) -> list[str]:
    """Return a line for each value of the next step that is another than with the `saved` settings (TOML).

    progress: of this run; steps_before, steps_now: with an update, of the checkpoint and of this run's
    optimizer, whose schedule begins again without its states.
    """
    table = progress.samples_before
    iteration = progress.iteration
    try:
        before = from_toml(saved)
    except ValueError:
        return []  # `check_model` says it
    if iteration + 1 >= len(table) or (before.optimizer, before.data, before.run, steps_before) == (
        config.optimizer,
        config.data,
        config.run,
        steps_now,
    ):
        return []
    then, now = (table[min(steps, iteration)] for steps in (steps_before, steps_now))
    old = [at(then) for at in pick_schedules(before, samples_before(before, 1))]
    new = [at(now) for at in pick_schedules(config, table)]
    of_all, of_vocabulary, decay = zip(old, new, strict=True)
    sizes = (batch_size_at(before.data, table[iteration]), table[iteration + 1] - table[iteration])
    pairs = {"learning rate": of_all, "weight decay": decay, "global batch size": sizes}
    if of_vocabulary != of_all:
        pairs["learning rate of embedding and output layer"] = of_vocabulary
    return [
        f"{name} at step {iteration + 1}: {now:g} (was {was:g})"
        for name, (was, now) in pairs.items()
        if not math.isclose(was, now, rel_tol=1e-9)
    ]


def with_saved_schedule(config: Config, mesh: Mesh) -> Config:
    """Return the config with the schedule of the checkpoint that the run resumes from, if a flag asks for it.

    Its decay ends where it would have ended in that run. Communicates over world. Raises CheckpointError.
    """
    source = find_source(config, mesh)
    wanted = config.checkpoint.use_checkpoint_opt_param_scheduler
    if not wanted or (found := source.saved(mesh)) is None:
        return config
    if not found[1]:
        raise CheckpointError(f"{source.root}: another program saved it; give the schedule by flags")
    try:
        saved = from_toml(found[1])
    except ValueError as error:
        raise CheckpointError(f"{source.root}: its settings cannot be read ({error})") from None
    values = {name: getattr(saved.optimizer, name) for name in SCHEDULE}
    if not (values["lr_decay_iters"] or values["lr_decay_samples"]):
        unit = "samples" if saved.run.train_samples else "iters"
        values[f"lr_decay_{unit}"] = getattr(saved.run, f"train_{unit}")
    return replace(config, optimizer=replace(config.optimizer, **values))
