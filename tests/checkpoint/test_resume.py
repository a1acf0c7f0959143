"""What of a checkpoint is saved and loaded: --no-save-optim, --finetune, strictness, the schedule."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import train
from nanomegatron.checkpoint import source
from nanomegatron.checkpoint.checkpoint import load, save
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.checkpoint.optimizer_state import optimizer_states
from nanomegatron.checkpoint.resume import Checkpoints, all_pieces, check_model, restore_progress
from nanomegatron.checkpoint.source import LoadSource, find_source
from nanomegatron.config.cli import ConfigError, build_config
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Mesh, World
from nanomegatron.pick_variants import pick_schedules
from nanomegatron.step import Progress
from tests.checkpoints import ALONE
from tests.layouts import flags_of
from tests.spmd import run_spmd
from tests.training import arguments, numbers_of, save_checkpoint, set_up

FORMATS = ("sharded", "torch_dist", "torch")
TINY = "--bf16 --num-layers 1 --hidden-size 16 --seq-length 16 --global-batch-size 4 --train-iters 4"
# Flags of a load -> iteration, whether moments are the saved ones; of a checkpoint with the states of the
# optimizer and of one without.
FOLDER = "[^\n]*/without/iter_0000002"
WITH_STATES = {
    "": (2, True),
    "--no-load-rng --dist-ckpt-strictness raise_all": (2, True),
    "--no-load-optim --dist-ckpt-strictness raise_all": (2, False),
    "--finetune": (0, False),
    "--finetune --no-load-optim --no-load-rng": (0, False),
}
WITHOUT = {
    "": rf"^{FOLDER} does not fit this model:\n  saved without optimizer states .*; resume with --no-load-",
    "--dist-ckpt-strictness raise_unexpected": "saved without optimizer states",
    "--dist-ckpt-strictness log_unexpected": (2, False),
    "--dist-ckpt-strictness ignore_all": (2, False),
    "--no-load-optim": (2, False),
    "--finetune --no-save-optim --no-save-rng": (0, False),
}


def states_of(run) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's states of this rank, in one tensor a kind."""
    kinds = {kind: [flat for _, flat in ranges] for kind, ranges in optimizer_states(run.optimizer).items()}
    kinds["weights"] = [p.detach() for p in run.model.parameters()]
    return {kind: torch.cat([x.float().flatten() for x in found]) for kind, found in kinds.items()}


def load_in_every_way(world: World, argv: list[str], folder: str, format: str) -> None:
    """Save after two steps, with and without states, then load it with the flags above."""
    for name, more, loads in (
        ("with", "", WITH_STATES),
        ("without", "--no-save-optim --no-save-rng", WITHOUT),
    ):
        place = f"{folder}/{name}"
        new = f"--save {place} --ckpt-format {format} --no-exit-on-missing-checkpoint {more}"
        run = set_up(world, [*argv, *new.split()], folder)
        for _ in range(2):
            train.train_step(run)
            run.progress.iteration += 1
        run.optimizer.cast_weights()
        save_checkpoint(run)
        saved = states_of(run)
        assert saved["exp_avg"].any() and not torch.equal(saved["main"], saved["main"].bfloat16().float())
        for flags, expected in loads.items():
            again = [*argv, "--load", place, "--save", f"{folder}/none", *flags.split()]
            if isinstance(expected, str):
                with pytest.raises(CheckpointError, match=expected):
                    set_up(world, again, folder)
                continue
            run = set_up(world, again, folder)
            found, (iteration, whole) = states_of(run), expected
            assert run.progress.iteration == iteration, flags
            assert torch.equal(found["weights"], saved["weights"]), flags
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[kind], saved[kind] * whole), (flags, kind)
            main = saved["main"] if whole else saved["main"].bfloat16().float()
            assert torch.equal(found["main"], main), flags


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_saved_and_loaded(format, sources, tmp_path):
    """In every format, on two ranks that share the optimizer's states."""
    argv = arguments(sources, "gpt", TINY, flags_of("dp2z1")[1])
    run_spmd(load_in_every_way, 2, argv, str(tmp_path), format, timeout=120)


def test_weights_without_a_place_are_noted(tmp_path):
    """By default only weights are; kinds that are not loaded do not count."""
    save(
        tmp_path,
        1,
        [Piece(f"{k}/{i}", (3,), (0,), torch.ones(3)) for k in ("model", "main") for i in (1, 2)],
        {},
        "",
        ALONE,
    )
    wanted = Piece("model/1", (3,), (0,), torch.zeros(3))
    for strictness in ("assume_ok_unexpected", "raise_unexpected"):
        assert load(tmp_path, [wanted], ALONE, strictness=strictness).notes == [
            "1 saved tensors are not used: model/2"
        ]
    assert load(tmp_path, [], ALONE).notes == []


def test_ten_missing_tensors_are_listed(tmp_path):
    """Some kinds of states are there: then each that is not is named; a model has thousands."""
    save(tmp_path, 1, [Piece("exp_avg/a", (3,), (0,), torch.ones(3))], {}, "", ALONE)
    names = [f"{kind}/{i:02}" for kind in ("model", "exp_avg") for i in range(8)]
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, [Piece(key, (2,), (0,), torch.zeros(2)) for key in names], ALONE)
    first, *lines, last = str(error.value).splitlines()
    assert first.endswith("iter_0000001 does not fit this model:") and last == "  and 6 more"
    assert lines == [f"  {key}: missing, wanted [2]" for key in names[:10]]


def load_strictly(mesh: Mesh, root: Path) -> list:
    """Rank 0 wants a tensor that was not saved; one that was saved is wanted by none."""
    first = mesh.world.rank == 0
    found = []
    for strictness in ("assume_ok_unexpected", "raise_unexpected", "raise_all", "log_unexpected", "log_all"):
        new = [Piece("model/new", (2,), (0,), torch.full((2,), 7.0))] * first
        pieces = [Piece("model/a", (3,), (0,), torch.zeros(3)), *new]
        try:
            notes = load(root, pieces, mesh, strictness=strictness).notes
            assert pieces[0].data.tolist() == [1, 1, 1] and all(piece.data.eq(7).all() for piece in new)
            found.append(" and ".join(notes))
        except CheckpointError as error:
            found.append(str(error).splitlines()[-1].strip())
    return found


def test_strictness_says_the_same_on_all_ranks(tmp_path):
    pieces = [Piece(key, (3,), (0,), torch.ones(3)) for key in ("model/a", "model/b", "exp_avg/a")]
    save(tmp_path, 1, pieces, {}, "", ALONE)
    kept = "1 tensors are not in the checkpoint and keep their initial values: model/new"
    one, two = run_spmd(load_strictly, 2, tmp_path, tp=2)
    assert (
        one
        == two
        == [
            "model/new: missing, wanted [2]",
            "model/new: missing, wanted [2]",
            "1 saved tensors have no place here: model/b; --dist-ckpt-strictness log_all leaves them out",
            kept,
            f"1 saved tensors are not used: model/b and {kept}",
        ]
    )


@pytest.mark.parametrize(
    "flags, kept",
    [("--override-opt_param-scheduler", False), ("", False)]
    + [
        ("--use-checkpoint-opt_param-scheduler", True),
        ("--use-checkpoint-opt-param-scheduler", True),
        ("--use-checkpoint-opt_param-scheduler --finetune", False),
    ],
)
def test_whose_schedule(flags, kept, sources, tmp_path):
    """The command line's, or that of the run that saved, to its end."""
    argv = arguments(sources, "gpt", TINY, "--lr-warmup-iters 1")
    changed = [*argv, *"--lr 7e-3 --lr-decay-style linear --lr-warmup-iters 2 --train-iters 6".split()]
    rates = run_spmd(saved_and_resumed, 1, argv, changed, flags, str(tmp_path))[0]
    assert rates["resumed"][:4] == rates["saved" if kept else "changed"][:4]
    assert rates["saved"][:4] != rates["changed"][:4]


def rates_of(run) -> list[float]:
    """The learning rate of each step, as the optimizer has it."""
    return step_values(pick_schedules(run.config, run.progress.samples_before), run.progress.samples_before)[
        0
    ]


def saved_and_resumed(world: World, argv: list[str], changed: list[str], flags: str, folder: str) -> dict:
    """The learning rates of a run, of one with other flags, and of this one resuming from the first twice."""
    run, place = set_up(world, [*argv, "--save", f"{folder}/one"], folder), f"{folder}/one"
    rates = {"saved": rates_of(run)}
    save_checkpoint(run)
    for name, more in (
        ("changed", "--no-exit-on-missing-checkpoint"),
        ("resumed", f"--load {place} {flags}"),
    ):
        run = set_up(world, [*changed, "--save", f"{folder}/{name}", *more.split()], folder)
        rates[name] = rates_of(run)
    if "use-checkpoint" in flags and "finetune" not in flags:
        save_checkpoint(run)  # it keeps this schedule for the next
        again = set_up(world, [*changed, "--save", f"{folder}/resumed", *flags.split()], folder)
        assert rates_of(again) == rates["resumed"]
    return rates


def load_as_another_model(world: World, argv: list[str], cases: dict, folder: str) -> list[str]:
    """Save a model, load it with the flags of each case -> the error, or the lines of the log about it"""
    place, found = f"{folder}/one", []
    run = set_up(world, [*argv, "--save", place], folder)
    train.train_step(run)
    run.progress.iteration += 1
    save_checkpoint(run)
    for flags in cases:
        Path(folder, "log.txt").write_text("")
        more = ["--load", place, "--save", f"{folder}/none", *flags.split()]
        try:
            run = set_up(world, [*argv, *more], folder)
        except ConfigError as error:
            first, *lines = error.messages
            assert first.startswith(f"{place} is of another model: give the same")
            found.append("; ".join(lines))
        except CheckpointError as error:
            found.append(f"tensors {error}")
        else:
            assert run.progress.iteration == int("finetune" not in flags)
            log = Path(folder, "log.txt").read_text().splitlines()
            about = [line.partition("is of another model: ") for line in log]
            found.append("noted " + "; ".join(line[2] for line in about if line[1]))
    check_model(run, find_source(run.config, run.mesh), "of-another-version = 1")  # loads, but it is said
    assert "its model is not compared: config: unknown key" in Path(folder, "log.txt").read_text()
    return found


LAYERS = "--num-layers 2: saved with 3"
HEADS = (
    "--num-attention-heads 2: saved with 4; --kv-channels 8: saved with 4; --num-query-groups 2: saved with 4"
)
BASE = "--rotary-base 50000.0: saved with 10000.0; --finetune may change it"
MEANINGS = {  # flags -> errors, or what is noted
    "--num-layers 2": LAYERS,
    "--num-layers 2 --finetune": LAYERS,
    "--num-layers 2 --eval-only --eval-iters 1 --split 8,1,1": LAYERS,
    "--num-attention-heads 2 --num-layers 2 --finetune": f"{LAYERS}; {HEADS}",
    "--num-attention-heads 2 --dist-ckpt-strictness raise_all": HEADS,
    "--num-layers 2 --dist-ckpt-strictness log_all": f"noted {LAYERS}",
    "--num-attention-heads 2 --finetune --dist-ckpt-strictness ignore_all": f"noted {HEADS}",
    "--norm-epsilon 1e-6 --finetune": "--norm-epsilon 1e-06: saved with 1e-05",
    "--squared-relu": "--squared-relu True: saved with False; --bias-gelu-fusion False: saved with True",
    "--window-size 4 0": "--window-size (4, 4, 4): saved with (None, None, None); --finetune may change it",
    "--rotary-base 5e4": BASE,
    "--rotary-base 5e4 --finetune": f"noted {BASE}",
    "--position-embedding-type learned_absolute --finetune": "--position-embedding-type learned_absolute: "
    "saved with rope",
    "--max-position-embeddings 64": "noted ",
    "--num-query-groups 4 --kv-channels 4 --ffn-hidden-size 64 --attention-dropout 0.1": "noted ",
    "--hidden-size 32 --lr 3e-3 --finetune": "--hidden-size 32: saved with 16; "
    "--ffn-hidden-size 128: saved with 64; --kv-channels 8: saved with 4",
}


def test_a_model_of_other_settings(sources, tmp_path):
    """Weights that fit by their shapes would be used for something else, or layers left out."""
    argv = arguments(sources, "gpt", TINY, "--num-layers 3 --position-embedding-type rope")
    (found,) = run_spmd(load_as_another_model, 1, argv, MEANINGS, str(tmp_path), timeout=120)
    assert dict(zip(MEANINGS, found, strict=True)) == MEANINGS


def resume_with_new_moments(world: World, argv: list[str], folder: str) -> tuple[list[float], str]:
    """Save after two steps, resume with --no-load-optim -> the rates of the next two steps, its log"""
    place = f"{folder}/one"
    run = set_up(world, [*argv, "--save", place], folder)
    for _ in range(2):
        train.train_step(run)
        run.progress.iteration += 1
    save_checkpoint(run)
    Path(folder, "log.txt").unlink()
    run = set_up(world, [*argv, "--load", place, "--save", f"{folder}/two", "--no-load-optim"], folder)
    rates = []
    for _ in range(2):
        rates.append(numbers_of(train.train_step(run))["lr"])
        run.progress.iteration += 1
    return rates, Path(folder, "log.txt").read_text()


def test_new_moments_begin_the_schedule_again(sources, tmp_path):
    """And it is said with which rate."""
    argv = arguments(sources, "gpt", TINY, "--lr-warmup-iters 2 --lr-warmup-init 5e-4")
    ((rates, log),) = run_spmd(resume_with_new_moments, 1, argv, str(tmp_path))
    assert rates == pytest.approx([5e-4, 1.25e-3])
    (note,) = [line for line in log.splitlines() if "learning rate at step 3" in line]
    assert "learning rate at step 3: 0.0005 (was " in note


def lines_of_resumes(world: World, argv: list[str], cases: list[str], folder: str) -> list[list[str]]:
    """Save after 2 of 4 steps, resume with the flags of each case -> the lines about values of step 3"""
    place, found = f"{folder}/one", []
    run = set_up(world, [*argv, "--save", place], folder)
    for _ in range(2):
        train.train_step(run)
        run.progress.iteration += 1
    save_checkpoint(run)
    for flags in cases:
        Path(folder, "log.txt").write_text("")
        set_up(world, [*argv, "--load", place, "--save", f"{folder}/none", *flags.split()], folder)
        log = Path(folder, "log.txt").read_text().splitlines()
        found.append([line.removeprefix("note    ") for line in log if " at step 3: " in line])
    return found


def test_a_resume_says_what_its_flags_change_at_once(sources, tmp_path):
    """The values of the next step, by Megatron's scheduler, now and as they would have been."""
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler

    def rate(lr: float, length: int, warmup: int = 0) -> str:
        numbers = (0.0, lr, 0.0, warmup, length, "cosine", 0.01, 0.01, length, "constant")
        theirs = scheduler(SimpleNamespace(param_groups=[]), *numbers)
        theirs.num_steps = 8
        return f"{theirs.get_lr({}):g}"

    was, decay = rate(1e-3, 16), "weight decay at step 3: 0.2 (was 0.01)"
    longer = f"learning rate at step 3: {rate(1e-3, 32)} (was {was})"
    cases = {
        "": [],
        "--log-interval 7 --lr-decay-iters 4": [],
        "--train-iters 8": [longer],
        "--train-iters 8 --use-checkpoint-opt-param-scheduler": [],
        "--lr 5e-4 --weight-decay 0.2": [f"learning rate at step 3: {rate(5e-4, 16)} (was {was})", decay],
        "--decoupled-lr 2e-3": [
            f"learning rate of embedding and output layer at step 3: {rate(2e-3, 16)} (was {was})"
        ],
        "--global-batch-size None --step-batch-size-schedule 0:4,128:8": [
            f"learning rate at step 3: {rate(1e-3, 24)} (was {was})",
            "global batch size at step 3: 8 (was 4)",
        ],
    }
    argv = arguments(sources, "gpt", TINY, "--lr 1e-3 --min-lr 0 --weight-decay 0.01 --lr-warmup-iters 0")
    (found,) = run_spmd(lines_of_resumes, 1, argv, [*cases], str(tmp_path))
    assert dict(zip(cases, found, strict=True)) == cases


def begin_beside_leftovers(world: World, argv: list[str], folder: str) -> None:
    """What a kill in a save has left goes when a run that trains begins there, and only there."""
    root = Path(folder) / "one"
    run = set_up(world, [*argv, "--save", str(root)], folder)
    for run.progress.iteration in (1, 2, 3):
        save_checkpoint(run)
    run.observer(Checkpoints).saver.close()
    for step in (1, 2):
        shutil.copytree(root / f"iter_000000{step}", root / f"iter_000000{step}.old")
    (root / "iter_0000002/rank_00000.safetensors").write_text("cut")
    (root / "iter_0000003").rename(root / "iter_0000003.old")  # killed between two renames
    (root / "iter_0000004.tmp").mkdir()
    (root / "latest_checkpointed_iteration.txt.tmp").write_text("4")
    before = {path.name for path in root.iterdir()}
    other = ["--load", str(root), "--save", f"{folder}/none"]
    for flags in (other, [*other, "--eval-only"], ["--save", str(root), "--eval-only"]):
        assert set_up(world, [*argv, *flags], folder).model and {p.name for p in root.iterdir()} == before
    run = set_up(world, [*argv, "--save", str(root)], folder)
    assert run.progress.iteration == 3
    gone = {"iter_0000001.old", "iter_0000004.tmp", "latest_checkpointed_iteration.txt.tmp"}
    assert {path.name for path in root.iterdir()} == before - gone


def test_a_run_removes_what_a_killed_save_left(sources, tmp_path):
    argv = arguments(sources, "gpt", TINY, "--eval-iters 1 --split 8,1,1")
    run_spmd(begin_beside_leftovers, 1, argv, str(tmp_path))


def save_by_torch_and_load(world: World, argv: list[str], folder: str) -> None:
    """A checkpoint of another program, with our names: weights for a new run, and no run to resume."""
    run = set_up(world, [*argv, "--save", f"{folder}/none"], folder)
    train.train_step(run)
    weights = {p.key: p.data.clone() for p in all_pieces(run, {})}
    dcp.save(weights, checkpoint_id=f"{folder}/theirs/iter_0000007", no_dist=True)
    with pytest.raises(ValueError, match="theirs: it has weights only; add --finetune to train it"):
        set_up(world, [*argv, "--load", f"{folder}/theirs", "--save", f"{folder}/none"], folder)
    more = ["--load", f"{folder}/theirs", "--finetune", "--save", f"{folder}/none"]
    again = set_up(world, [*argv, *more], folder)
    assert again.progress.iteration == 0
    assert all(torch.equal(p.data, weights[p.key]) for p in all_pieces(again, {}))
    assert "no hash says whether it is damaged" in (Path(folder) / "log.txt").read_text()


def test_a_run_begins_with_the_weights_of_another_program(sources, tmp_path):
    run_spmd(save_by_torch_and_load, 1, arguments(sources, "llama", TINY), str(tmp_path))


def test_the_newest_iteration_may_be_named(monkeypatch):
    """A resume takes it anyway; an older one would be followed by newer ones that it has not seen."""
    monkeypatch.setattr(source, "latest_for_all", lambda *_: 8)
    for step in (8, 9):
        config = build_config({"save": "ckpt", "ckpt_step": step})
        assert find_source(config, ALONE) == LoadSource("ckpt", step, False, False, False)
    with pytest.raises(ValueError, match="--ckpt-step 7: ckpt holds iteration 8"):
        find_source(build_config({"save": "ckpt", "ckpt_step": 7}), ALONE)


def test_what_a_run_has_counted_is_counted_on():
    """And the samples consumed by then have to be those of this run's batches, 4 a step."""
    run = SimpleNamespace(progress=Progress([0, 4, 8, 12]), config=build_config({"global_batch_size": 4}))
    counted = {"skipped_samples": 4, "skipped_iterations": [2], "evaluated": 0}
    restore_progress(run, "ckpt", counted | {"iteration": 2, "consumed_samples": 8})
    found = run.progress
    assert (found.iteration, found.consumed_samples, found.skipped_samples) == (2, 8, 4)
    assert found.skipped_iterations == {2} and found.evaluated == 0
    with pytest.raises(ValueError, match="consumed 6 samples in 2 iterations, this run 8"):
        restore_progress(run, "ckpt", counted | {"iteration": 2, "consumed_samples": 6})
