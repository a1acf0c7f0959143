"""What a checkpoint of a run holds, and how a run takes one up.

    folder runs/NAME/ckpt    weights, main weights and Adam's moments by global name and slice
                             FP8 scales, biases of routers
                             state: iteration, samples consumed and asked for, good steps, loss scale, seed,
                             tokenizer
                             the resolved settings

There is no random state to keep: weights come from (seed, name), the order of the data from (seed, samples
asked for, run by run), dropout from (seed, sample, place). So a run resumes to the bit, under any layout.
"""

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.checkpoint import (
    CheckpointError,
    latest,
    load,
    module_states,
    read_state,
    save,
    state_pieces,
    training_pieces,
)
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.hf import load_weights
from nanomegatron.checkpoint.upcycle import dense_source, divide_outputs
from nanomegatron.comm import broadcast_
from nanomegatron.config.batch import samples_before
from nanomegatron.config.cli import flag, from_toml, to_toml
from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.config.settings import Config, TransformerConfig
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init, Part
from nanomegatron.report.log import RunLog
from nanomegatron.run import Run

# What the order of the data depends on, besides the numbers of samples.
ORDER = """
data-path data-args-path train-data-path split mock-data variable-seq-lengths seq-length seed
""".split()


def circumstances(run: Run) -> dict:
    """What must be the same for a run to go on to the bit, and not only with the same data and state."""
    mesh = run.mesh
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    experts = (mesh.ep, mesh.etp) if run.config.model.num_experts else ()
    sizes = {axis.name: axis.size for axis in (mesh.tp, mesh.pp, mesh.cp, mesh.dp, *experts)}
    sizes["sharding"] = run.config.parallel.sharding
    return {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads(), **sizes}


def all_pieces(run: Run, states: dict) -> tuple[list[Piece], dict[str, torch.Tensor]]:
    """What a checkpoint holds, with `states` of the optimizer; and, of FP8, copies of amaxes and scales."""
    scales = run.model.scales
    fp8 = {} if scales is None else {f"fp8/{name}": x for name, x in scales.state().items()}
    small = state_pieces(fp8 | module_states(run.model), run.mesh)
    return training_pieces(run.optimizer.params, states, run.mesh) + small, fp8


def save_checkpoint(run: Run) -> None:
    """Write everything that the next run needs to go on to the bit."""
    run.flush_report()
    state = {
        "iteration": run.iteration,
        "consumed_samples": run.consumed_samples,
        "skipped_samples": run.skipped_samples,
        "data_samples": run.data_samples,
        "optimizer": run.optimizer.scalars(),
        "seed": run.config.run.seed,
        "tokenizer": run.tokenizer.spec,
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
        "circumstances": circumstances(run),
    }
    run.grads.wait_params()
    states = {} if run.config.checkpoint.no_save_optim else run.optimizer.states()
    pieces, _ = all_pieces(run, states)
    save(run.config.checkpoint.save, run.iteration, pieces, state, to_toml(run.config), run.mesh)
    run.log.line(f"saved   {run.config.checkpoint.save}, step {run.iteration}")
    run.log.status("running", iteration=run.iteration, checkpoint=run.config.checkpoint.save)


def source(whole: Config, mesh: Mesh) -> tuple[str, bool, int | None]:
    """The folder that a run takes up, whether that is its own, and which iteration if not the newest.

    Its own if it has a checkpoint, or else --load. --eval-only wants what --load names, whatever the run has;
    --moe-use-upcycling is for a run's beginning. What rank 0 sees counts: it is broadcast over world. Raises
    ValueError for a step back in the run's own.
    """
    config, eval_only = whole.checkpoint, whole.run.eval_only
    seen, step = latest(config.save), config.ckpt_step
    number = int(broadcast_(torch.tensor(-1 if seen is None else seen, device=mesh.device), mesh.world))
    newest = None if number < 0 else number
    if config.moe_use_upcycling and newest is not None and not eval_only:
        step = None  # it was one of the dense model's
    own = newest is not None and step is None and not (eval_only and config.load)
    if step is not None and (newest or 0) > step and not eval_only:
        raise ValueError(
            f"--ckpt-step {step}: {config.save} holds iteration {newest}, which a later resume "
            "would take; give a new --run-name and --load this folder"
        )
    return config.save if own else config.load or config.save, own, step


def data_samples(config: Config, mesh: Mesh, log: RunLog, wanted: int) -> list[int]:
    """Numbers of samples that the training data is built for: those of the runs before, then `wanted`.

    The former are in the checkpoint that this run resumes; for one of an earlier version its settings say how
    many. Communicates over world. Raises CheckpointError where they are not numbers of samples.
    """
    root, own, step = source(config, mesh)
    begins = (config.checkpoint.finetune or config.checkpoint.moe_use_upcycling) and not own
    found = None if begins or config.run.eval_only else read_state(root, mesh, step)
    if found is None or not found[0].get("consumed_samples"):
        return [wanted]
    counts, note = found[0].get("data_samples", []), ""
    try:
        before, now = (tomllib.loads(text) for text in (found[1], to_toml(config)))
    except ValueError as error:
        raise CheckpointError(f"{root}: its settings cannot be read ({error})") from None
    if "data_samples" not in found[0] and "train-iters" in before:
        with suppress(ValueError):  # settings that this program does not know
            counts = [samples_before(from_toml(found[1]), mesh.dp.size)[-1]]
    if not isinstance(counts, list) or not all(type(n) is int and n > 0 for n in counts):
        raise CheckpointError(f"{root}: data_samples {str(counts)[:80]} are not numbers of samples")
    if not counts:
        note = f"{root} does not say how many samples its data was made for"
    elif changed := [f"--{key}" for key in ORDER if before.get(key) != now.get(key)]:
        note = f"{', '.join(changed)}: {root} was made with another"
    if note and mesh.rank == 0:
        log.warn(f"{note}: samples may be in another order, some come again and others never")
    return counts if counts and wanted <= counts[-1] else [*counts, wanted]


def load_checkpoint(run: Run) -> None:
    """Take up the run's `source`: a checkpoint of ours or a Hugging Face folder.

    Raises CheckpointError where --load names a folder without a checkpoint, but for --save's, which a first
    launch begins.
    """
    config, eval_only = run.config.checkpoint, run.config.run.eval_only
    root, own, step = source(run.config, run.mesh)
    upcycling = config.moe_use_upcycling and not own
    if is_hf_folder(root):
        load_hf_folder(run, root, upcycling)
        return
    finetune = (config.finetune or upcycling) and not own
    needed = finetune or eval_only
    states = {} if needed or config.no_load_optim else run.optimizer.states()
    pieces, fp8 = all_pieces(run, states)
    loaded = load(root, dense_pieces(pieces) if upcycling else pieces, run.mesh, step, cast=not states)
    if loaded is None:
        if config.load and Path(config.load).resolve() == Path(config.save).resolve() and not needed:
            run.log.line(f"note    --load {root}, which is --save too, has no checkpoint yet: from scratch")
        elif config.load:
            raise CheckpointError(f"--load {root}: no checkpoint there; train from scratch without --load")
        elif eval_only:
            raise CheckpointError(f"--eval-only: no checkpoint in {root}; name one with --load")
        return
    for note in [*loaded.notes, *computed_otherwise(root, loaded.config_toml, run.config.model)]:
        run.log.warn(note)
    if loaded.state.get("tokenizer_fingerprint") not in (None, run.tokenizer.fingerprint):
        run.log.warn(f"{root} was trained on {loaded.state['tokenizer']}, the data here is another's ids")
    if not finetune:
        take_up(run, root, loaded.state)
        if states:
            run.optimizer.load_scalars(loaded.state["optimizer"])
    if upcycling:
        begin_experts(run)
    if not states:
        run.optimizer.reset_main()
    if run.model.scales is not None:
        run.model.scales.load({key.removeprefix("fp8/"): x for key, x in fp8.items()})
    how = " (weights alone, each expert as the MLP)" if upcycling else " (weights alone)" * finetune
    run.log.line(f"resumed {root}, step {loaded.iteration}{how}")
    now = circumstances(run)
    before = now | loaded.state["circumstances"]  # one that is not known has not changed
    changed = [f"{key} {before[key]} -> {now[key]}" for key in now if before[key] != now[key]]
    if changed and not finetune:
        run.log.line(f"note    the same state and data, but not the same bits: {', '.join(changed)}")
    run.log.status("running", iteration=run.iteration, checkpoint=root)


def computed_otherwise(root: str, settings: str, model: TransformerConfig) -> Iterator[str]:
    """What an earlier version of this program, which wrote a checkpoint, did not compute as this one does."""
    gelu = not (model.swiglu or model.squared_relu)
    if gelu and model.disable_bias_linear and "bias-gelu-fusion" not in settings:
        yield f"{root} was trained with GELU in its tanh form; without biases it is exact, as in Megatron"


def load_hf_folder(run: Run, root: str, upcycling: bool) -> None:
    """Take the weights of a Hugging Face model, for the experts those of its MLPs. Raises ValueError."""
    params, model = run.optimizer.params, run.config.model
    if upcycling:
        if read_folder(root)[1].get("num_experts"):
            raise ValueError(f"--moe-use-upcycling: {root} has experts; leave it out")
        dense = whole_model(run, num_experts=None)
        notes = load_weights(root, params, all_parts(dense), dense_source)
        begin_experts(run)
    else:
        notes = load_weights(root, params, all_parts(whole_model(run)))
    for note in [*notes, *contradictions(root, model)]:
        run.log.line(f"note    {note}")
    run.optimizer.reset_main()
    how = ", each expert as the MLP" * upcycling
    run.log.line(f"loaded  {root}, the weights of a Hugging Face model{how}")


def dense_pieces(pieces: list[Piece]) -> list[Piece]:
    """The same memory, as pieces of the dense model that it is to be filled from."""
    found = []
    for piece in pieces:
        weight = piece.key.startswith("model/")
        if (made_of := dense_source(piece.key) if weight else (piece.key, False)) is not None:
            key, transposed = made_of
            shape, offset, data = piece.shape, piece.offset, piece.data
            if transposed:
                shape, offset, data = shape[::-1], offset[::-1], data.t()
            found.append(replace(piece, key=key, shape=shape, offset=offset, data=data))
    return found


def begin_experts(run: Run) -> None:
    """After the weights of a dense model have come."""
    for note in divide_outputs(run.optimizer.params, run.config.model):
        run.log.line(f"note    {note}")


def all_parts(model: GPTModel) -> Iterator[Part]:
    """Of all its parameters."""
    return (part for param in model.parameters() for part in param.spec.parts)


def whole_model(run: Run, **changes: Any) -> GPTModel:
    """The model that all stages make up, or with other settings would, without memory for its weights."""
    return GPTModel(
        replace(run.config.model, attention_backend="auto", **changes),  # the run's may want a device
        vocab_size=run.model.vocab_size,
        max_sequence_length=run.config.model.max_position_embeddings,
        init=Init(device=torch.device("meta")),
    )


def contradictions(folder: str, model: TransformerConfig) -> list[str]:
    """What the weights of a Hugging Face folder fit, but were not trained with."""
    free = {"init_method_std", "max_position_embeddings"}
    said = {name: value for name, value in read_folder(folder)[1].items() if name in vars(model)}
    return [
        f"{flag(name)} {getattr(model, name)}: {folder} was trained with {value}"
        for name, value in said.items()
        if name not in free and getattr(model, name) != value
    ]


def take_up(run: Run, root: str, state: dict) -> None:
    """Go on behind the samples that a checkpoint has consumed.

    Raises ValueError where this run would have consumed others by then.
    """
    run.iteration, run.skipped_samples = state["iteration"], state.get("skipped_samples", 0)
    done = run.iteration >= len(run.samples_before) or run.config.run.eval_only
    if not done and state["consumed_samples"] != run.consumed_samples:
        raise ValueError(
            f"--global-batch-size {run.config.data.global_batch_size}: {root} has consumed "
            f"{state['consumed_samples']} samples in {run.iteration} iterations, this run "
            f"{run.consumed_samples}; keep its batch sizes, or start at iteration 0 with --finetune"
        )
