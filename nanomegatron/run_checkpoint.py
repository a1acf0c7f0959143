"""What a checkpoint of a run holds, and how a run takes one up.

    folder runs/NAME/ckpt    weights, main weights and Adam's moments by global name and slice
                             state: iteration, samples consumed, good steps, loss scale, seed, tokenizer
                             the resolved settings

There is no random state to keep: weights come from (seed, name), the order of the data from (seed, samples
consumed), dropout from (seed, sample, place). So a run that goes on does so to the bit, and under any layout.
"""

import torch

from nanomegatron.checkpoint import CheckpointError, latest, load, save, training_pieces
from nanomegatron.config_cli import to_toml
from nanomegatron.run import Run, settle


def circumstances(run: Run) -> dict:
    """What must be the same for a run to go on to the bit, and not only with the same data and state."""
    mesh = run.mesh
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    sizes = {axis.name: axis.size for axis in (mesh.tp, mesh.pp, mesh.cp, mesh.dp)}
    return {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads(), **sizes}


def save_checkpoint(run: Run) -> None:
    """Write everything that the next run needs to go on to the bit."""
    settle(run)
    state = {
        "iteration": run.iteration,
        "consumed_samples": run.consumed_samples,
        "optimizer": run.optimizer.scalars(),
        "seed": run.config.run.seed,
        "tokenizer": run.tokenizer.spec,
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
        "circumstances": circumstances(run),
    }
    states = {} if run.config.checkpoint.no_save_optim else run.optimizer.states()
    pieces = training_pieces(run.optimizer.params, states, run.mesh.dp_cp)
    save(run.config.checkpoint.save, run.iteration, pieces, state, to_toml(run.config), run.mesh)
    run.log.line(f"saved   {run.config.checkpoint.save}, step {run.iteration}")
    run.log.status("running", iteration=run.iteration, checkpoint=run.config.checkpoint.save)


def load_checkpoint(run: Run) -> None:
    """Take up --load, or else this run's own newest checkpoint if it has one."""
    config = run.config.checkpoint
    root = config.load or config.save
    newest = latest(config.save)
    own = newest is not None and config.ckpt_step is None
    if config.ckpt_step is not None and (newest or 0) > config.ckpt_step:
        raise ValueError(
            f"--ckpt-step {config.ckpt_step}: {config.save} holds iteration {newest}, which a later resume "
            "would take; give a new --run-name and --load this folder"
        )
    root = config.save if own else root
    finetune = config.finetune and not own
    states = {} if finetune or config.no_load_optim else run.optimizer.states()
    pieces = training_pieces(run.optimizer.params, states, run.mesh.dp_cp)
    loaded = load(root, pieces, run.mesh, config.ckpt_step, cast=not states)
    if loaded is None:
        if config.load:
            raise CheckpointError(
                f"--load {config.load}: no checkpoint there; train from scratch without --load"
            )
        return
    for note in loaded.notes:
        run.log.warn(note)
    if not finetune:
        run.iteration = loaded.state["iteration"]
        if loaded.state["consumed_samples"] != run.consumed_samples:
            raise ValueError(
                f"--global-batch-size {run.global_batch_size}: {root} has consumed "
                f"{loaded.state['consumed_samples']} samples in {run.iteration} iterations; keep its batch "
                "size, or start at iteration 0 with --finetune"
            )
        if states:
            run.optimizer.load_scalars(loaded.state["optimizer"])
    if not states:
        run.optimizer.reset_main()
    run.log.line(f"resumed {root}, step {loaded.iteration}" + (" (weights alone)" if finetune else ""))
    before, now = loaded.state["circumstances"], circumstances(run)
    if changed := [f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]:
        run.log.line(f"note    the same state and data, but not the same bits: {', '.join(changed)}")
    run.log.status("running", iteration=run.iteration, checkpoint=root)
