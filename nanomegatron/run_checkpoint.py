"""What a checkpoint of a run holds, and how a run takes one up.

    folder runs/NAME/ckpt    weights, main weights and Adam's moments by global name and slice
                             state: iteration, samples consumed, good steps, loss scale, seed, tokenizer
                             the resolved settings

There is no random state to keep: weights come from (seed, name), the order of the data from (seed, samples
consumed), dropout from (seed, sample, place). So a run that goes on does so to the bit, and under any layout.
"""

from dataclasses import replace

import torch

from nanomegatron.checkpoint import CheckpointError, latest, load, save, training_pieces
from nanomegatron.checkpoint_files import Piece
from nanomegatron.config import TransformerConfig
from nanomegatron.config_cli import flag, to_toml
from nanomegatron.config_hf import is_hf_folder, read_folder
from nanomegatron.hf import load_weights
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.run import Run, settle


def circumstances(run: Run) -> dict:
    """What must be the same for a run to go on to the bit, and not only with the same data and state."""
    mesh = run.mesh
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    sizes = {axis.name: axis.size for axis in (mesh.tp, mesh.pp, mesh.cp, mesh.dp)}
    sizes["sharding"] = run.config.parallel.sharding
    return {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads(), **sizes}


def fp8_pieces(run: Run) -> list[Piece]:
    """Amaxes and scales of the FP8 layers on this rank; all ranks that share a layer have the same."""
    if run.model.scales is None:
        return []
    first = run.mesh.tp.rank == run.mesh.dp_cp.rank == 0
    state = run.model.scales.state()
    return [Piece(f"fp8/{name}", tuple(x.shape), (0,) * x.dim(), x, first) for name, x in state.items()]


def save_checkpoint(run: Run) -> None:
    """Write everything that the next run needs to go on to the bit."""
    settle(run)
    state = {
        "iteration": run.iteration,
        "consumed_samples": run.consumed_samples,
        "skipped_samples": run.skipped_samples,
        "optimizer": run.optimizer.scalars(),
        "seed": run.config.run.seed,
        "tokenizer": run.tokenizer.spec,
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
        "circumstances": circumstances(run),
    }
    run.grads.wait_params()
    states = {} if run.config.checkpoint.no_save_optim else run.optimizer.states()
    pieces = training_pieces(run.optimizer.params, states, run.mesh.dp_cp) + fp8_pieces(run)
    save(run.config.checkpoint.save, run.iteration, pieces, state, to_toml(run.config), run.mesh)
    run.log.line(f"saved   {run.config.checkpoint.save}, step {run.iteration}")
    run.log.status("running", iteration=run.iteration, checkpoint=run.config.checkpoint.save)


def load_checkpoint(run: Run) -> None:
    """Take up this run's own newest checkpoint if it has one, or else --load: ours or a Hugging Face folder.

    --eval-only wants what --load names, whatever the run has. Raises CheckpointError where nothing is found.
    """
    config, eval_only = run.config.checkpoint, run.config.run.eval_only
    newest = latest(config.save)
    own = newest is not None and config.ckpt_step is None and not (eval_only and config.load)
    if config.ckpt_step is not None and (newest or 0) > config.ckpt_step and not eval_only:
        raise ValueError(
            f"--ckpt-step {config.ckpt_step}: {config.save} holds iteration {newest}, which a later resume "
            "would take; give a new --run-name and --load this folder"
        )
    root = config.save if own else config.load or config.save
    if is_hf_folder(root):
        whole = (part for param in whole_model(run).parameters() for part in param.spec.parts)
        for note in [
            *load_weights(root, run.optimizer.params, whole),
            *contradictions(root, run.config.model),
        ]:
            run.log.line(f"note    {note}")
        run.optimizer.reset_main()
        run.log.line(f"loaded  {root}, the weights of a Hugging Face model")
        return
    finetune = config.finetune and not own
    states = {} if finetune or eval_only or config.no_load_optim else run.optimizer.states()
    fp8 = fp8_pieces(run)
    pieces = training_pieces(run.optimizer.params, states, run.mesh.dp_cp) + fp8
    loaded = load(root, pieces, run.mesh, config.ckpt_step, cast=not states, optional="fp8/")
    if loaded is None:
        if config.load:
            raise CheckpointError(f"--load {root}: no checkpoint there; train from scratch without --load")
        if eval_only:
            raise CheckpointError(f"--eval-only: no checkpoint in {root}; name one with --load")
        return
    for note in loaded.notes:
        run.log.warn(note)
    if loaded.state.get("tokenizer_fingerprint") not in (None, run.tokenizer.fingerprint):
        run.log.warn(f"{root} was trained on {loaded.state['tokenizer']}, the data here is another's ids")
    if not finetune:
        take_up(run, root, loaded.state)
        if states:
            run.optimizer.load_scalars(loaded.state["optimizer"])
    if not states:
        run.optimizer.reset_main()
    if run.model.scales is not None:
        run.model.scales.load({piece.key.removeprefix("fp8/"): piece.data for piece in fp8})
    run.log.line(f"resumed {root}, step {loaded.iteration}" + (" (weights alone)" if finetune else ""))
    now = circumstances(run)
    before = now | loaded.state["circumstances"]  # one that is not known has not changed
    changed = [f"{key} {before[key]} -> {now[key]}" for key in now if before[key] != now[key]]
    if changed and not finetune:
        run.log.line(f"note    the same state and data, but not the same bits: {', '.join(changed)}")
    run.log.status("running", iteration=run.iteration, checkpoint=root)


def whole_model(run: Run) -> GPTModel:
    """The model that all stages make up, without memory for its weights."""
    return GPTModel(
        replace(run.config.model, attention_backend="auto"),  # the one of the run may want a device
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
