"""Train a model: the story of a run, top to bottom.

    python train.py                                  one process, a small model, Python's own sources as text
    python train.py --nproc 2                        the same on two processes of this machine
    torchrun --nproc-per-node 8 train.py --config llama3-8b --data-path my_text_document

    main -> settings (all errors at once) -> run_rank on each process -> set_up -> train -> finish
                                                                          |
                                                     train_step: batches, forward, backward, sync, update

Exit codes: 0 done, 2 bad configuration or data, 3 no usable checkpoint, 4 save failed, 75 pre-empted and
saved. torchrun turns every failure into 1, so the code also stands in runs/NAME/status.json.
"""

import math
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nanomegatron import comm
from nanomegatron.checkpoint import CheckpointError, SaveError
from nanomegatron.config import Config, padded_vocab_size
from nanomegatron.config_check import default_run_name, must_match, resolve, validate
from nanomegatron.config_cli import ConfigError, Parsed, from_toml, help_text, parse, to_toml
from nanomegatron.data import (
    Batch,
    GPTDataset,
    build_datasets,
    choose_tokenizer,
    load_batch,
    microbatch_sample_ids,
)
from nanomegatron.dp import GradBuffer
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.mesh_launch import launch
from nanomegatron.metrics import bits_per_byte
from nanomegatron.metrics_log import RunLog
from nanomegatron.metrics_plot import plot_loss
from nanomegatron.model import GPTModel, Tokens
from nanomegatron.optim import Optimizer, Schedule
from nanomegatron.param import Init
from nanomegatron.run import (
    Clock,
    Run,
    StepReport,
    banner,
    due,
    listen_for_signals,
    print_errors,
    report,
    run_folder,
    settle,
    show_sample,
)
from nanomegatron.run_checkpoint import load_checkpoint, save_checkpoint
from preprocess import prepare_embedded

DONE, BAD_CONFIG, NO_CHECKPOINT, SAVE_FAILED, PREEMPTED = 0, 2, 3, 4, 75


# Settings: what is to be run. Nothing here needs another process or a GPU.


def main(argv: list[str]) -> int:
    """Check the whole run, then do it here or in --nproc processes of this machine; returns the exit code."""
    world = World.from_environment()
    try:
        asked = parse(argv).action
        if asked.startswith("help"):
            print(help_text(everything=asked == "help all"))
            return DONE
        parsed, config = settings(argv, world)
    except ValueError as error:
        if world.rank == 0:
            print_errors(error)
        return BAD_CONFIG
    if parsed.action == "print-config":
        print(to_toml(config), end="")
        return DONE
    if config.run.nproc == 1 or world.size > 1:
        return run_rank(world, argv)
    codes = launch(run_rank, config.run.nproc, (argv,))
    named = (code for code in (BAD_CONFIG, NO_CHECKPOINT, SAVE_FAILED) if code in codes)
    return next(named, 1 if set(codes) - {DONE, PREEMPTED} else max(codes))


def settings(argv: list[str], world: World) -> tuple[Parsed, Config]:
    """The parsed command line and the resolved configuration of the whole run.

    Raises ConfigError (a ValueError) with everything that is wrong at once.
    """
    parsed = parse(argv)
    config = parsed.config
    size = world.size if world.size > 1 else config.run.nproc
    if errors := [*parsed.errors, *validate(config, size, pick_device(config.run.device, world).type)]:
        raise ConfigError(errors)
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data):
        embedded = prepare_embedded()
        text = "text: the Python standard library's own sources"
        parsed.notes.append("; ".join(part for part in (text, embedded.note) if part))
        data = replace(
            data,
            train_data_path=(embedded.train_prefix,),
            valid_data_path=(embedded.valid_prefix,),
            tokenizer_type=embedded.tokenizer_type,
            tokenizer_model=embedded.tokenizer_model,
        )
    config = resolve(replace(config, data=data), size)
    name = config.run.run_name or default_run_name(config, parsed.preset)
    folder = config.checkpoint.save or str(Path("runs") / name / "ckpt")
    config = replace(
        config,
        run=replace(config.run, run_name=name),
        checkpoint=replace(config.checkpoint, save=folder),
    )
    earlier = run_folder(config) / "config.toml"
    if earlier.exists() and (errors := must_match(from_toml(earlier.read_text()), config)):
        raise ConfigError([*errors, f"{earlier.parent} holds another run: choose another --run-name"])
    return parsed, config


# One process of the run.


def run_rank(world: World, argv: list[str]) -> int:
    """Everything one process does; returns its exit code."""
    try:
        parsed, config = settings(argv, world)
        device = pick_device(config.run.device, world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh = Mesh.build(config.parallel, world, device)
        log = RunLog(run_folder(config), config, mesh.rank, mesh.label)
    except ValueError as error:
        if world.rank == 0:
            print_errors(error)
        return BAD_CONFIG
    try:
        run = set_up(parsed, config, mesh, log)
        code = train(run)
    except (ValueError, CheckpointError, SaveError) as error:
        kind = {CheckpointError: NO_CHECKPOINT, SaveError: SAVE_FAILED}
        code = kind.get(type(error), BAD_CONFIG)
        log.status("failed", exit_code=code, message=str(error))
        if mesh.rank == 0:
            log.warn(str(error))
    except BaseException:
        log.status("failed", exit_code=1, message=traceback.format_exc(limit=-1).strip())
        log.warn(traceback.format_exc())
        log.close()
        os._exit(1)  # peers may wait in a collective for ever: leave without the exit handlers
    log.close()
    Mesh.close()
    return code


def set_up(parsed: Parsed, config: Config, mesh: Mesh, log: RunLog) -> Run:
    """Tokenizer, data, model, optimizer, and the newest checkpoint if there is one."""
    torch.use_deterministic_algorithms(config.precision.deterministic_mode or mesh.device.type == "cpu")
    data, length, batch = config.data, config.run.train_iters, config.data.global_batch_size
    tokenizer = choose_tokenizer(data)
    vocab_size = data.vocab_size or tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the tokenizer has {tokenizer.vocab_size} tokens; give at least that"
        )
    datasets = build_datasets(
        data, (length * batch, config.run.eval_iters * batch, 0), config.run.seed, tokenizer
    )
    padded = padded_vocab_size(vocab_size, data.make_vocab_size_divisible_by, mesh.tp.size)
    init = Init(config.run.seed, getattr(torch, config.dtype_name), mesh.device)
    positions = config.model.max_position_embeddings
    model = GPTModel(config.model, vocab_size, padded, positions, mesh.tp, init)
    grads = GradBuffer(model.parameters(), mesh.dp_cp)
    schedule = Schedule.of(config.optimizer, length, batch)
    rates = [schedule.at(i * batch) for i in range(length)]
    optimizer = Optimizer(model.parameters(), config.optimizer, config.precision, rates, mesh.model)
    run = Run(config, mesh, log, tokenizer, datasets, model, grads, optimizer, padded)
    banner(run, parsed.notes, vocab_size)
    load_checkpoint(run)
    if mesh.rank == 0:
        (log.folder / "config.toml").write_text(to_toml(config))
    return run


# Training.


def train(run: Run) -> int:
    """All iterations; returns the exit code. Each step's numbers are read when the next one is under way."""
    config = run.config.run
    listen_for_signals(run)
    run.log.begin(run.iteration, config.train_iters)
    saved = run.iteration
    if run.iteration >= config.train_iters:
        run.log.line(f"nothing left to train: step {run.iteration} is done; --train-iters goes further")
    while run.iteration < config.train_iters and not run.stop:
        previous, run.pending = run.pending, train_step(run)
        run.iteration += 1
        report(run, previous)
        if due(config.exit_interval, run.iteration):
            run.stop = f"--exit-interval {config.exit_interval}"
        if due(config.eval_interval, run.iteration) and run.iteration < config.train_iters:
            evaluate(run)
        if due(run.config.checkpoint.save_interval, run.iteration):
            save_checkpoint(run)
            saved = run.iteration
    settle(run)
    if saved < run.iteration:
        save_checkpoint(run)
    return finish(run)


def step_batches(run: Run, dataset: GPTDataset, first_sample: int) -> Iterator[Batch]:
    """This rank's microbatches of the global batch that begins at `first_sample`, on the device."""
    data, dp = run.config.data, run.mesh.dp
    for microbatch in range(run.global_batch_size // (data.micro_batch_size * dp.size)):
        ids = microbatch_sample_ids(first_sample, microbatch, data.micro_batch_size, dp.rank, dp.size)
        yield load_batch(dataset, ids, data.dataloader_type).to(run.mesh.device)


def loss_sum(run: Run, batch: Batch, dropout_seed: int | None = None) -> torch.Tensor:
    """Sum of the loss over the batch's unmasked tokens, 0-d fp32."""
    tokens = Tokens(batch.tokens, batch.positions, batch.sample_ids, dropout_seed)
    return (run.model(tokens, batch.labels) * batch.loss_mask).sum()


def train_step(run: Run) -> StepReport:
    """One iteration: gradient of the mean loss over the unmasked tokens of the global batch, and the update.

    Communicates the token count and the gradients over dp_cp, the loss and the wish to stop over world, the
    gradient norm over tp x pp, and what the model does. The host waits for nothing.
    """
    mesh, seed = run.mesh, run.config.run.seed
    clock = Clock(mesh.device)
    mesh.traffic.clear()
    torch.manual_seed(seed + 1_000_003 * run.iteration + mesh.rank)  # attention dropout of the fused kernels
    batches = list(step_batches(run, run.datasets[0], run.consumed_samples))
    tokens = comm.all_reduce_(sum(batch.loss_mask.sum() for batch in batches), mesh.dp_cp).clamp(min=1)
    run.grads.zero()
    total = torch.zeros((), device=mesh.device)
    for batch in batches:
        loss = loss_sum(run, batch, dropout_seed=seed) / tokens
        (loss * run.optimizer.scaler.scale).backward()
        total += loss.detach()
    run.grads.grad_sync()
    mine = total if mesh.model.rank == 0 else torch.zeros_like(total)  # the same on all of tp: it counts once
    wishes = torch.tensor(run.wants_to_stop, dtype=torch.float32, pin_memory=mesh.device.type == "cuda")
    shared = comm.all_reduce_(torch.cat((mine[None], wishes.to(mesh.device, non_blocking=True))), mesh.world)
    stats = run.optimizer.step(shared[0])
    return StepReport(run.iteration + 1, shared, stats, clock, mesh.traffic)


@torch.no_grad()
def evaluate(run: Run, split: str = "validation") -> None:
    """Mean loss over the first --eval-iters global batches of the held-out data, the same ones every time."""
    settle(run)
    dataset, batch_size, device = run.datasets[1], run.global_batch_size, run.mesh.device
    if dataset is None or not run.config.run.eval_iters:
        return
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for i in range(run.config.run.eval_iters):
        for batch in step_batches(run, dataset, i * batch_size):
            total += torch.stack((loss_sum(run, batch), batch.loss_mask.sum()))
    loss, tokens = comm.all_reduce_(total, run.mesh.dp_cp).tolist()
    loss = loss / max(tokens, 1)
    text = None if run.config.data.mock_data else dataset.indexed.sidecar()
    bpb = bits_per_byte(loss, text["tokens"], text["text_bytes"]) if text else None
    run.log.evaluation(run.iteration, split, loss, math.exp(min(20, loss)), bpb)


# The end.


def finish(run: Run) -> int:
    """The last lines: held-out loss, a sample, the pictures, what to do next."""
    config, log = run.config, run.log
    if run.preempted:
        log.line(f"stopped by {run.stop} after step {run.iteration}; the same command goes on from there")
        log.status("preempted", exit_code=PREEMPTED, iteration=run.iteration)
        return PREEMPTED
    if run.stop:
        log.line(f"stopped by {run.stop} after step {run.iteration} of {config.run.train_iters}")
    evaluate(run)
    show_sample(run)
    if run.mesh.rank == 0 and (picture := plot_loss(log.folder, log.line)):
        log.line(f"picture {picture}")
    log.line(f"next    python -m nanomegatron.generate --load {config.checkpoint.save} --prompt def")
    log.status("done", exit_code=DONE, iteration=run.iteration)
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
