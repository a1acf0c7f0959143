"""Runs a layout for a few steps with everything recorded, and compares two of them.

layout A    3 runs: as it is, and twice with weights moved by rounding, for the noise of each tensor
layout B    1 run
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanomegatron.build import build, build_optimizer
from nanomegatron.checkpoint.hf import load_weights
from nanomegatron.config.batch import samples_before
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, parse
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.debug.compare import INITIAL, Comparison, Difference, noise_levels
from nanomegatron.debug.gather import assemble, load_pieces, save_pieces
from nanomegatron.debug.hf import HfRecorder
from nanomegatron.debug.record import Recorder
from nanomegatron.faults.launch import launch, one_thread_if_small
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.param import Init, draw_normal
from nanomegatron.pick_fast_paths import install, paths_for
from nanomegatron.pick_variants import pick_dataset, pick_schedules
from nanomegatron.plan.flops import parameter_count
from nanomegatron.pp import ModelChunks, run_schedule
from nanomegatron.step import Progress, Training, TrainingData, build_loaders, train_step, warm_up_step

SEEDS = (0, 1, 2)  # of the perturbation; 0: none
MOST_SECONDS = 1800.0  # after which a run is ended


class Layout(NamedTuple):
    """A layout in words, its command line of train.py, number of processes and resolved configuration."""

    word: str
    argv: list[str]
    size: int
    config: Config


def checked(argv: list[str], size: int, device: str) -> Config:
    """The resolved configuration of a command line. Raises ConfigError with all errors."""
    parsed = parse(argv)
    errors = [*parsed.errors, *validate(parsed.config, size, device)]
    if parsed.config.data.variable_seq_lengths:
        errors.append("--variable-seq-lengths: packs differ by layout; leave it out to debug")
    if parsed.config.precision.fp8_format and parsed.config.parallel.fast_paths is not False:
        errors.append("--fp8-format: fast paths hand on casts that cannot be compared; give --no-fast-paths")
    if errors:
        raise ConfigError(errors)
    return resolve(parsed.config, size)


def build_run(config: Config, mesh: Mesh, seed: int) -> Training:
    """Build what a training step needs. seed: of the noise that is added to the weights, 0 for none."""
    torch.set_deterministic_debug_mode("error" if mesh.device.type == "cpu" else "default")
    data = config.data
    before = samples_before(config, mesh.dp.size)
    tokenizer = choose_tokenizer(data)
    vocab_size = data.vocab_size or tokenizer.vocab_size
    datasets = build_datasets(data, (before[-1], 0, 0), config.run.seed, tokenizer, kind=pick_dataset(data))
    padded = padded_vocab_size(vocab_size, data.make_vocab_size_divisible_by, mesh.tp.size)
    paths = paths_for(config, mesh)
    init = Init(config.run.seed, getattr(torch, config.dtype_name), mesh.device)
    model = install(build(config, mesh, vocab_size, padded, init), paths)
    one_thread_if_small(sum(p.numel() for p in model.parameters()))
    if config.checkpoint.load:
        load_weights(config.checkpoint.load, model.parameters(), config.model, vocab_size)
    perturb(model, seed)
    loaders = build_loaders(config, mesh, model, datasets, tokenizer.eod)
    grads, optimizer = build_optimizer(
        model, config, mesh, step_values(pick_schedules(config, before), before), paths
    )
    data = TrainingData(tokenizer, datasets, loaders, [])
    return Training(config, mesh, None, data, model, Progress(before), grads, optimizer)


@torch.no_grad()
def perturb(model: ModelChunks, seed: int) -> None:
    """Multiply every weight by 1 + eps times a normal number, alike under any layout; seed 0: do nothing."""
    for param in model.parameters() if seed else ():
        for part in param.spec.parts:
            init = Init(seed, device=param.device, std=torch.finfo(param.dtype).eps)
            own = part.local_view(param)
            own.copy_(own.float() * (1 + part.global_view(draw_normal(part.name, part.shape, init))))


def record_rank(
    world: World,
    argv: list[str],
    folder: Path,
    seeds: tuple[int, ...] = (0,),
    hf: str | None = None,
) -> int:
    """One rank: run all steps for each seed, and write what was recorded to folder/SEED/rankN.

    hf: a folder whose model transformers runs, too; what it computes goes to folder/hf.
    """
    device = pick_device(parse(argv).config.run.device, world)
    config = checked(argv, world.size, device.type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = Mesh.build(config.parallel, world, device, config.model.num_kv_heads)
    for number, seed in enumerate(seeds, 1):
        if world.rank == 0:
            print(f"layout {folder.name}: run {number} of {len(seeds)}", file=sys.stderr, flush=True)
        run = build_run(config, mesh, seed)
        if device.type == "cuda" and mesh.pp.size > 1:
            warm_up_step(run)
        recorder = Recorder(run)
        run.observers.append(recorder)
        run.run_schedule = partial(run_schedule, tracer=recorder)
        try:
            recorder.add_weights(INITIAL)
            while run.progress.iteration < config.run.train_iters:
                recorder.finish(train_step(run))
                run.progress.iteration += 1
        except Exception as error:
            place = folder / f"failed{world.rank:05d}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps([recorder.step, recorder.inside[-1], repr(error)]), encoding="utf-8")
            raise
        finally:  # what a step has computed before it failed may say why
            run.data.loaders[0].close()
            save_pieces(recorder.pieces, recorder.order, folder / str(seed) / f"rank{world.rank:05d}")
    if hf:
        save_pieces(HfRecorder(build_run(config, mesh, 0), hf).record(), {}, folder / "hf/rank")
    Mesh.close()
    return 0


def record_layout(layout: Layout, folder: Path, *more: Any) -> str:
    """Record a layout on processes of this machine; more: as of `record_rank`. Returns how it failed."""
    codes = launch(record_rank, layout.size, (layout.argv, folder, *more), timeout=MOST_SECONDS)
    return f"the run failed, exit codes {codes}: see the ranks' messages above" if any(codes) else ""


def compare_layouts(a: Layout, b: Layout, hf: str | None = None) -> Difference | None:
    """Run two layouts; return the first difference. hf: compare b with transformers' model of this folder.

    If the run of b fails and nothing differs, that is where it failed. Raises RuntimeError if that of a does,
    and ValueError if both are the same layout.
    """
    if not hf and a.config == b.config:
        raise ValueError(f"--b {b.word} is the same as --a {a.word}: give another layout, such as --b tp2")
    one_thread_if_small(parameter_count(a.config.model, a.config.data.vocab_size or 0))
    with tempfile.TemporaryDirectory(prefix="debug-") as name:
        folder = Path(name)
        failed = record_layout(a, folder / "a", SEEDS, hf)
        if failed:
            raise RuntimeError(failed)
        failed = record_layout(b, folder / "b")
        found = first_difference(folder, a.config, bool(failed))
        if failed:
            return found._replace(note=failed) if found else end_of(folder / "b")
    return found


def end_of(folder: Path) -> Difference:
    """Where a run ended that has computed nothing wrong. Raises RuntimeError if its ranks were killed."""
    ends = {int(path.name[-5:]): json.loads(path.read_text()) for path in sorted(folder.glob("failed*"))}
    if not ends:
        raise RuntimeError("the ranks were killed: see their messages above")
    step, module, error = next(iter(ends.values()))
    key, rows = (step, "end of the run", module), torch.ones(1, dtype=torch.bool)
    return Difference(key, module, rows, list(ends), 1.0, 0.0, f"nothing differed before {error}")


def first_difference(folder: Path, config: Config, ended_early: bool = False) -> Difference | None:
    """Compare what was recorded in folder/a/SEED, or folder/a/hf, with folder/b/0."""
    pieces, order = load_pieces(folder / "a/0")
    usual = assemble(pieces)
    levels = noise_levels(usual, (assemble(load_pieces(folder / f"a/{seed}")[0]) for seed in SEEDS[1:]))
    reference = assemble(load_pieces(folder / "a/hf")[0]) or usual
    found = assemble(load_pieces(folder / "b/0")[0])
    eps = torch.finfo(getattr(torch, config.dtype_name)).eps
    return Comparison(reference, found, levels, order, eps, ended_early).first()
