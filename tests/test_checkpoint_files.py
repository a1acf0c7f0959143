"""A checkpoint folder: every damaged bit is found, every forgery refused, nothing in it is ever run."""

import hashlib
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanomegatron.checkpoint import (
    CheckpointError,
    Piece,
    latest,
    load,
    read_manifest,
    save,
)
from nanomegatron.checkpoint_files import DTYPES, MANIFEST, MANIFEST_SUM, Rectangle, tiling_error
from tests.checkpoints import (
    ALONE,
    cuts,
    expect_newest,
    newest_files,
    random_tiles,
    tensor,
    two_by_two,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Iterations 10 and 20; not to be changed."""
    return two_by_two(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def root(saved, tmp_path) -> Path:
    """A copy of these, to be changed."""
    return shutil.copytree(saved, tmp_path / "ckpt")


def test_folder_is_what_tools_can_read(saved):
    folder = saved / "iter_0000020"
    assert [path.name for path in newest_files(saved)] == [
        MANIFEST,
        MANIFEST_SUM,
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    ]
    entries = load_file(folder / "rank_00001.safetensors")  # the library's own reader
    assert sorted(entries) == ["exp_avg/w[0:8,6:12]", "model/experts[0:4,3:6,0:2]", "model/w[0:8,6:12]"]
    assert torch.equal(entries["model/w[0:8,6:12]"], tensor("model/w", 20)[:, 6:])
    subprocess.run(["sha256sum", "-c", MANIFEST_SUM], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "20\n"
    assert latest(saved) == 20 and read_manifest(folder).state == {"consumed_samples": 80}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_returns_to_the_bit(tmp_path, dtype):
    """Odd sizes before larger items, a scalar, a view with strides; every bit pattern, so NaNs as well."""
    size = dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (4, 7 * size), dtype=torch.uint8)
    data = bits.view(dtype)
    odd = torch.tensor([True] * 3)
    pieces = [
        Piece("odd", (3,), (0,), odd),
        Piece("t", (7, 4), (0, 0), data.t()),
        Piece("s", (), (), data[0, 0]),
    ]
    save(tmp_path, 1, pieces, {}, "", ALONE)
    wanted = [Piece(p.key, p.shape, p.offset, torch.zeros(p.shape, dtype=p.data.dtype)) for p in pieces]
    load(tmp_path, wanted, ALONE)
    for before, after in zip(pieces, wanted):
        assert torch.equal(
            before.data.contiguous().reshape(-1).view(torch.uint8), after.data.reshape(-1).view(torch.uint8)
        )


def test_tiling_agrees_with_counting():
    """Against a count of how often each element is covered."""
    rng, seen = random.Random(1), set()
    for _ in range(600):
        shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(3)))
        tiles = random_tiles(rng, shape, 3)
        for i in range(len(tiles) * rng.randrange(2)):  # disturb some
            offset = tuple(
                rng.randrange(-1, n) if rng.random() < 0.2 else o for o, n in zip(tiles[i][0], shape)
            )
            tiles[i] = (offset, tiles[i][1])
        count, inside = torch.zeros(shape), True
        for offset, tile in tiles:
            inside &= all(o >= 0 and o + n <= s for o, n, s in zip(offset, tile, shape))
            count[tuple(slice(max(o, 0), o + n) for o, n in zip(offset, tile))] += 1
        good = inside and bool((count == 1).all())
        error = tiling_error(shape, [Rectangle(o, n, "f", "k") for o, n in tiles])
        assert (error == "") == good, (shape, tiles, error)
        seen.add(error.split()[-1] if error.endswith("overlap") else good)
    assert seen == {True, False, "overlap"}


# Damage is found and named, and the checkpoint before it used.


def expect_fallback(root: Path, bad: Path) -> None:
    notes = expect_newest(root, 10)
    assert len(notes) == 1 and bad.name in notes[0]
    assert "loading iteration 10 instead: 10 iterations are lost" in notes[0]
    with pytest.raises(CheckpointError, match=bad.name):
        load(root, cuts(None), ALONE, step=20)


def test_every_flipped_bit_is_found(root):
    rng = random.Random(2)
    for path, _ in itertools.product(newest_files(root), range(30)):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        expect_fallback(root, path)
        path.write_bytes(good)
    assert expect_newest(root, 20) == []


def test_every_missing_byte_is_found(root):
    for path in newest_files(root):
        good = path.read_bytes()
        for size in (0, 1, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:size])
            expect_fallback(root, path)
        path.unlink()
        expect_fallback(root, path)
        (root / "copy").write_bytes(good)
        path.symlink_to(root / "copy")  # not followed, whatever it points to
        expect_fallback(root, path)
        path.unlink()
        path.write_bytes(good)
    assert expect_newest(root, 20) == []


# Forgery: a manifest whose hash is right and whose content is not.


def forge(folder: Path, change: Callable) -> None:
    """Change the manifest in place, or give it another text, and its hash with it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    text = change(manifest)
    text = (text if isinstance(text, str) else json.dumps(manifest)).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / MANIFEST_SUM).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def rename_shard(name: str):
    def change(manifest: dict) -> None:
        manifest["files"][name] = manifest["files"].pop("rank_00000.safetensors")
        for saved in manifest["tensors"].values():
            for r in saved["rectangles"]:
                r["file"] = r["file"].replace("rank_00000.safetensors", name)

    return change


def change_tensor(**values):
    return lambda manifest: manifest["tensors"]["model/w"].update(values)


def change_rectangle(**values):
    return lambda manifest: manifest["tensors"]["model/w"]["rectangles"][1].update(values)


FORGERIES = {
    "parent folder": rename_shard("../rank_00000.safetensors"),
    "absolute name": rename_shard("/etc/passwd"),
    "4 kB name": rename_shard("rank_" + "0" * 4096 + ".safetensors"),
    "hidden file": rename_shard(".rank_00000.safetensors"),
    "unlisted file": change_rectangle(file="rank_00007.safetensors"),
    "negative offset": change_rectangle(offset=[0, -6]),
    "negative shape": change_tensor(shape=[-8, 12]),
    "huge shape": change_tensor(shape=[2**40, 2**40]),
    "huge rectangle": change_rectangle(shape=[2**40, 2**20]),
    "size beyond int64": change_tensor(shape=[2**70]),
    "float size": change_rectangle(offset=[0, 6.0]),
    "bool size": change_rectangle(offset=[False, 6]),
    "text for sizes": change_rectangle(offset="06"),
    "overlap": change_rectangle(offset=[0, 5]),
    "outside": change_rectangle(offset=[0, 7]),
    "hole": lambda m: m["tensors"]["model/w"]["rectangles"].pop(),
    "1000 dims": change_tensor(shape=[1] * 1000),
    "no such dtype": change_tensor(dtype="os.system"),
    "another dtype": change_tensor(dtype="I32"),
    "another entry's key": change_rectangle(key="model/experts[0:4,3:6,0:2]"),
    "no such key": change_rectangle(key="nothing"),
    "newer format": lambda m: m.update(format_version=2),
    "no version": lambda m: m.pop("format_version") and None,
    "state of text": lambda m: m.update(state="x"),
    "files of lists": lambda m: m.update(files=[["rank_00000.safetensors"]]),
    "a list": lambda m: "[]",
    "no JSON": lambda m: "{",
    "deep JSON": lambda m: "[" * 200000,
    "long number": lambda m: '{"format_version": ' + "9" * 10000 + "}",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_manifest_is_refused(root, forgery):
    forge(root / "iter_0000020", FORGERIES[forgery])
    pieces = [piece for piece in cuts(None) if piece.key == "model/w"]
    if forgery == "another dtype":  # fits the wanted dtype, not the file
        pieces[0] = Piece("model/w", (8, 12), (0, 0), torch.zeros(8, 12, dtype=torch.int32))
    began, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="iter_0000020"):
        load(root, pieces, ALONE, step=20)
    assert time.monotonic() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 2**10


def test_sizes_that_the_file_cannot_hold_are_refused(root):
    """A forgery without a contradiction in itself."""
    huge = {"offset": [0, 0], "shape": [2**30, 2**30], "file": "rank_00000.safetensors", "key": "k"}
    forge(root / "iter_0000020", change_tensor(shape=huge["shape"], rectangles=[huge]))
    with pytest.raises(CheckpointError, match="does not fit into"):
        read_manifest(root / "iter_0000020")


class Canary:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def header_bomb(size: int) -> bytes:
    """A valid safetensors file without a tensor, all header."""
    text = b'{"__metadata__": {"a": "' + b"a" * size + b'"}}'
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("kind", ["pickle", "torch", "text", "header bomb", "long header"])
def test_shard_that_is_none_is_refused(root, tmp_path, kind):
    path = root / "iter_0000020" / "rank_00000.safetensors"
    if kind == "torch":
        torch.save(Canary(tmp_path / "canary"), path)
    else:
        path.write_bytes(
            {
                "pickle": pickle.dumps(Canary(tmp_path / "canary")) * 50,
                "text": b"tensors " * 500,
                "header bomb": header_bomb(20 * 2**20),
                "long header": (2**62).to_bytes(8, "little") * 500,
            }[kind]
        )
    data = path.read_bytes()
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(path.parent, lambda m: m["files"].update({path.name: record}))
    reason = "header is longer" if "header" in kind else "iter_0000020"
    with pytest.raises(CheckpointError, match=reason):
        load(root, cuts(None), ALONE)
    assert not (tmp_path / "canary").exists()


def test_oversized_manifest_is_not_read(root):
    os.truncate(root / "iter_0000020" / MANIFEST, 2**40)  # a hole: takes no room on the disk
    assert "is larger than" in expect_newest(root, 10)[0]
