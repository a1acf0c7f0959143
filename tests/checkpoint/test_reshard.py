"""Row X1: what any of 12 layouts has saved, any other loads to the bit, and its next loss is the same.

One model of dense and expert layers for all of them, in fp32: weights and Adam's moments; and in bf16, where
main weights are saved beside the weights, for a few. Checkpoints are sharded and torch_dist in turn.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from nanomegatron.checkpoint.optimizer_state import optimizer_states
from nanomegatron.checkpoint.resume import Checkpoints, all_pieces, load_checkpoint
from nanomegatron.mesh import World
from tests.layouts import flags_of
from tests.spmd import run_spmd
from tests.training import arguments, numbers_of, save_checkpoint, set_up

LAYOUTS = """
one dp2z1bk dp4ep2z2bk dp4ep4z1 tp2sp tp2spep2et tp2spdp2ep2z1 pp2v2dp2ep2z1ov pp2zbv tp2pp2spzb cp2 cp2pp2ep2
""".split()
FAST = ["tp2spep2et", "pp2zbv", "dp2z1bk", "cp2"]
PAIRS = [(a, b) for b in LAYOUTS for a in LAYOUTS if a != b]
SHORT = "--global-batch-size 4 --train-iters 3 --hidden-size 16 --moe-ffn-hidden-size 24 --seq-length 16"
FORMATS = ("sharded", "torch_dist")


def pieces_of(run) -> list:
    """All that a checkpoint holds, on this rank."""
    run.buckets.wait_params()
    return all_pieces(run, optimizer_states(run.optimizer))


def step(run) -> float:
    """One more step -> its loss"""
    loss = numbers_of(train.train_step(run))["lm_loss"]
    run.progress.iteration += 1
    return loss


def train_and_save(world: World, argv: list[str], folder: str) -> tuple[list, float]:
    """Save after two steps, in both formats -> this rank's pieces as they were, the loss of the next step"""
    run = set_up(world, [*argv, "--save", f"{folder}/none"], folder)
    step(run), step(run)
    for format in FORMATS:
        change = dict(save=f"{folder}/{format}", ckpt_format=format)
        run.observer(Checkpoints).saver.config = replace(run.config.checkpoint, **change)
        save_checkpoint(run)
    kept = [(p.key, p.shape, p.offset, p.data.clone()) for p in pieces_of(run)]
    return kept, step(run)


def load_all(world: World, argv: list[str], folder: str, sources: list[str]) -> list[float]:
    """Load what each source has saved, compare it with what its ranks had -> losses of the next step"""
    flags = ["--save", f"{folder}/none", "--no-exit-on-missing-checkpoint"]
    run = set_up(world, [*argv, *flags], folder)
    losses = []
    for source in sources:
        pieces = pieces_of(run)
        for piece in pieces:
            piece.data.fill_(torch.nan)
        run.config = replace(run.config, checkpoint=replace(run.config.checkpoint, load=source))
        load_checkpoint(run)
        whole = torch.load(Path(source).parent / "whole.pt", weights_only=True)
        for piece in pieces:
            window = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape, strict=True))
            assert torch.equal(piece.data, whole[piece.key][window]), (source, piece.key)
        assert run.progress.iteration == 2
        losses.append(step(run))
    return losses


class Reshard:
    """Runs layouts of one model in a folder; what each has saved is kept."""

    def __init__(self, folder: Path, sources, more: str = "") -> None:
        self.folder, self.sources, self.more = folder, sources, more
        self.losses: dict[str, float] = {}

    def launch(self, body, layout: str, *args) -> list:
        """The results of all ranks."""
        size, flags = (1, "") if layout == "one" else flags_of(layout)
        (self.folder / layout).mkdir(exist_ok=True)
        argv = arguments(self.sources, "moe", SHORT, flags, self.more)
        return run_spmd(body, size, argv, str(self.folder / layout), *args, timeout=150)

    def save(self, layout: str) -> None:
        """Train and save, and put together what the ranks had, without the code of checkpoints."""
        ranks, whole = self.launch(train_and_save, layout), {}
        for key, shape, offset, data in (piece for pieces, _ in ranks for piece in pieces):
            full = whole.setdefault(key, torch.full(shape, torch.nan, dtype=data.dtype))
            full[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
        assert not any(full.isnan().any() for full in whole.values())
        moments = {key: bool(full.any()) for key, full in whole.items() if key.startswith("exp_avg")}
        assert sum(moments.values()) > 0.9 * len(moments), [key for key in moments if not moments[key]]
        torch.save(whole, self.folder / layout / "whole.pt")
        self.losses[layout] = ranks[0][1]

    def load(self, layout: str, others: list[str], bound: float = 1e-6) -> None:
        """Load what others have saved; each in the format whose turn it is."""
        formats = [FORMATS[(LAYOUTS.index(layout) + i) % 2] for i in range(len(others))]
        paths = [str(self.folder / name / format) for name, format in zip(others, formats, strict=True)]
        for losses in self.launch(load_all, layout, paths):
            expected = [self.losses[name] for name in others]
            assert losses == pytest.approx(expected, rel=bound), (others, "->", layout)


def test_some_layouts_load_each_other(sources, tmp_path):
    """Nine ordered pairs."""
    runs = Reshard(tmp_path, sources)
    for i, layout in enumerate(FAST):
        runs.save(layout)
        if i:
            runs.load(layout, FAST[:i])
    runs.load(FAST[0], FAST[1:])


@pytest.mark.full
def test_all_layouts_load_each_other(sources, tmp_path):
    """132 ordered pairs of 12."""
    runs, done = Reshard(tmp_path, sources), 0
    for layout in LAYOUTS:
        runs.save(layout)
    for layout in LAYOUTS:
        others = [name for name in LAYOUTS if name != layout]
        runs.load(layout, others)
        done += len(others)
    assert done == 132


@pytest.mark.full
def test_main_weights_load_too(sources, tmp_path):
    """In bf16, where a loss has three digits; 20 ordered pairs."""
    runs = Reshard(tmp_path, sources, "--bf16")
    some = ["one", "dp4ep2z2bk", "tp2spdp2ep2z1", "pp2v2dp2ep2z1ov", "cp2pp2ep2"]
    for layout in some:
        runs.save(layout)
        assert any(key.startswith("main/") for key in torch.load(tmp_path / layout / "whole.pt"))
    for layout in some:
        runs.load(layout, [name for name in some if name != layout], bound=1e-3)
