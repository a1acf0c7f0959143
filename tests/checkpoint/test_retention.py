"""Which checkpoints stay: the last ones, multiples of an interval, one that is not persistent; kills."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from nanomegatron.checkpoint import folder as checkpoint_folder
from nanomegatron.checkpoint.checkpoint import SaveError, latest, load, save
from nanomegatron.checkpoint.folder import LATEST, NON_PERSISTENT, Retention, folders
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import World
from tests.checkpoints import ALONE, cuts, die_at, expect_newest, save_alone


def saved_with(root: Path, step: int, keep: Retention) -> list[str]:
    """Save iteration `step` with this retention; the notes."""
    return save(root, step, cuts(step), {"consumed_samples": 4 * step}, f"step = {step}\n", ALONE, keep)


def expect_only(root: Path, steps: list[int]) -> None:
    """Assert that these are published, nothing else is there, and the newest is whole."""
    assert sorted(folders(root)) == steps
    names = [f"iter_{step:07d}" for step in steps]
    assert sorted(path.name for path in root.iterdir()) == [*names, LATEST]
    assert (root / LATEST).read_text() == f"{steps[-1]}\n"
    assert expect_newest(root, steps[-1]) == []


@pytest.mark.parametrize(
    "keep, expected",
    [
        (Retention(), range(1, 10)),
        (Retention(2), [8, 9]),
        (Retention(3), [7, 8, 9]),
        (Retention(None, 4), [4, 8, 9]),  # alone it keeps the last two
        (Retention(3, 2), [2, 4, 6, 7, 8, 9]),
        (Retention(2, 1), range(1, 10)),
    ],
)
def test_what_stays(tmp_path, keep, expected):
    for step in range(1, 10):
        assert saved_with(tmp_path, step, keep) == []
        assert sorted(folders(tmp_path))[-2:] == [step - 1, step][step == 1 :]
    expect_only(tmp_path, list(expected))


def test_one_that_is_not_persistent_replaces_the_one_before(tmp_path):
    """It counts as none of the last ones, and stays until the next of its kind."""
    once = Retention(2, persistent=False)
    for step in range(1, 9):
        saved_with(tmp_path, step, Retention(2) if step % 3 == 0 else once)
        if step == 4:
            expect_only(tmp_path, [3, 4])
    expect_only(tmp_path, [3, 6, 8])
    assert (tmp_path / "iter_0000008" / NON_PERSISTENT).is_file()
    saved_with(tmp_path, 9, Retention(2))
    expect_only(tmp_path, [6, 8, 9])
    saved_with(tmp_path, 8, Retention(2))  # once more, as a persistent one
    saved_with(tmp_path, 10, once)
    expect_only(tmp_path, [8, 9, 10])


def test_what_is_no_checkpoint_of_the_run_stays(tmp_path):
    """Links and what they point to, other names, and later iterations, of a run that began again before.

    A link is none of the last two: the folder of step 2 stays for it until two others are there.
    """
    root, outside = tmp_path / "ckpt", tmp_path / "outside"
    saved_with(outside, 3, Retention())
    for step in (1, 2, 7):
        saved_with(root, step, Retention())
    (root / "iter_0000003").symlink_to(outside / "iter_0000003")
    others = ["iter_0000001.bak", "iter_00000001", "xiter_0000001", "1"]
    for name in others:
        shutil.copytree(root / "iter_0000001", root / name)
    before = sorted(path.name for path in outside.rglob("*"))
    for step, left in ((4, [2, 3, 4, 7]), (5, [3, 4, 5, 7]), (6, [3, 5, 6, 7])):
        assert saved_with(root, step, Retention(2)) == []
        assert sorted(folders(root)) == left
    assert all((root / name).is_dir() for name in others) and (root / "iter_0000003").is_symlink()
    assert sorted(path.name for path in outside.rglob("*")) == before


def test_a_link_is_loaded_from_and_never_replaced(tmp_path):
    """To a folder on another disk; if the newest leads to nothing, or to damage, nothing else is loaded."""
    root = tmp_path / "ckpt"
    for step in (10, 20):
        save_alone(root, step)
    link, target = root / "iter_0000020", tmp_path / "disk/iter_0000020"
    target.parent.mkdir()
    os.rename(link, target)
    link.symlink_to(target)
    assert latest(root) == 20 and expect_newest(root, 20) == []
    with pytest.raises(SaveError, match="iter_0000020 is a symbolic link, which is not replaced"):
        save_alone(root, 20)
    assert os.readlink(link) == str(target) and expect_newest(root, 20) == []
    manifest = target / "manifest.json"
    text = manifest.read_text()
    manifest.write_text("{}")
    with pytest.raises(CheckpointError, match="iter_0000020 cannot be read, and nothing in its place:"):
        load(root, cuts(None), ALONE)
    manifest.write_text(text)
    os.rename(target, tmp_path / "unmounted")
    for look in (lambda: latest(root), lambda: load(root, cuts(None), ALONE)):
        with pytest.raises(CheckpointError, match="iter_0000020 is a symbolic link to .* not there: mount"):
            look()
    save_alone(root, 30)  # an older one does not matter
    assert expect_newest(root, 30) == [] and link.is_symlink()


def test_a_damaged_one_is_none_of_the_last(tmp_path):
    """A short file or a bad manifest; the undamaged one before it stays until two others are there."""
    for step, name in ((1, None), (2, "rank_00000.safetensors"), (3, "manifest.json")):
        saved_with(tmp_path, step, Retention(2))
        if name:
            os.truncate(tmp_path / f"iter_{step:07d}" / name, 10)
    saved_with(tmp_path, 4, Retention(2))
    assert sorted(folders(tmp_path)) == [1, 2, 3, 4]
    saved_with(tmp_path, 5, Retention(2))
    expect_only(tmp_path, [4, 5])


def test_what_cannot_be_removed_is_a_note(tmp_path, monkeypatch):
    """The save itself has succeeded; the next one tries again."""
    for step in (1, 2):
        saved_with(tmp_path, step, Retention())

    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    usual = checkpoint_folder.shutil.rmtree
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", fails)
    (note,) = saved_with(tmp_path, 3, Retention(2))
    assert "an old checkpoint could not be removed" in note and "iter_0000001.tmp" in note
    assert sorted(folders(tmp_path)) == [2, 3] and expect_newest(tmp_path, 3) == []
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", usual)
    saved_with(tmp_path, 4, Retention(2))
    expect_only(tmp_path, [3, 4])


def prune_and_die(world: World, root: Path, step: int, last: int, place: str, call: int) -> int:
    die_at(place, call)
    saved_with(root, step, Retention(last))
    return 0


POINTS = {  # where, in which call; the first os.rename is that of the publication
    "before anything is removed": ("nanomegatron.checkpoint.folder.prune", 1),
    "before a folder loses its name": ("os.rename", 2),
    "between two folders": ("os.rename", 3),
    "before the root's fsync": ("nanomegatron.checkpoint.folder.sync_folder", 4),
    "before a folder is removed": ("shutil.rmtree", 1),
    "amid a folder": ("os.unlink", 3),
    "between two removals": ("shutil.rmtree", 2),
}


FAST = ("before a folder loses its name", "amid a folder")


@pytest.mark.parametrize(
    "point", [p if p in FAST else pytest.param(p, marks=pytest.mark.full) for p in POINTS]
)
def test_kill_amid_the_removal(tmp_path, point, full):
    """All that has a checkpoint's name is one, at least k of them; the next save ends the removal."""
    place, call = POINTS[point]
    for last in (2, 3, 5) if full else (2,):
        root = tmp_path / str(last)
        steps = list(range(1, last + 2))
        for step in steps:
            saved_with(root, step, Retention())
        new = steps[-1] + 1
        args = (root, new, last, place, call)
        assert launch(prune_and_die, 1, args, timeout=30) == [-signal.SIGKILL]
        found = sorted(folders(root))
        assert latest(root) == new and len(found) >= last
        for step in found:
            shutil.copytree(root / f"iter_{step:07d}", tmp_path / "one" / f"iter_{step:07d}")
            assert expect_newest(tmp_path / "one", step) == []
            shutil.rmtree(tmp_path / "one")
        saved_with(root, new + 1, Retention(last))
        expect_only(root, list(range(new + 2 - last, new + 2)))
