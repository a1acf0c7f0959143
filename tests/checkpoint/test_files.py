"""A checkpoint folder: every damaged bit is found, every forgery refused, nothing in it is ever run."""

import hashlib
import itertools
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanomegatron.checkpoint.checkpoint import latest, load, save
from nanomegatron.checkpoint.files import DTYPES, Piece
from nanomegatron.checkpoint.folder import LATEST, MANIFEST, MANIFEST_SUM, read_manifest
from nanomegatron.checkpoint.manifest import CheckpointError
from tests.checkpoints import (
    ALONE,
    RELEASED,
    change_manifest,
    cuts,
    expect_kept,
    expect_newest,
    kept,
    kept_root,
    newest_files,
    save_alone,
    sign,
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


# Damage is found and named, and the checkpoint before it used.


@pytest.fixture(params=RELEASED, ids="version {}".format)
def old_and_new(request, tmp_path) -> Path:
    """A checkpoint of every format and version, iteration 20, and one before it."""
    return kept_root(tmp_path / "ckpt", request.param)


def expect_fallback(root: Path, bad: Path) -> None:
    notes = expect_kept(root, 10)
    assert len(notes) == 1 and bad.name in notes[0]
    assert "loading iteration 10 instead: 10 iterations are lost" in notes[0]
    with pytest.raises(CheckpointError, match=bad.name):
        load(root, [], ALONE, step=20)


def flipped(rng: random.Random, data: bytes) -> bytes:
    """With another bit somewhere."""
    bad = bytearray(data)
    bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def test_every_flipped_bit_is_found(old_and_new, full):
    """In shards, manifest and its hash: 250 in all formats, 2,500 in the full tier."""
    rng = random.Random(2)
    for path, _ in itertools.product(newest_files(old_and_new), range(100 if full else 10)):
        good = path.read_bytes()
        path.write_bytes(flipped(rng, good))
        expect_fallback(old_and_new, path)
        path.write_bytes(good)
    assert expect_kept(old_and_new, 20) == []


def test_every_missing_byte_is_found(old_and_new, full):
    rng = random.Random(3)
    for path in newest_files(old_and_new):
        good = path.read_bytes()
        more = [rng.randrange(len(good)) for _ in range(30 if full else 0)]
        for size in (0, 1, len(good) // 2, len(good) - 1, *more):
            path.write_bytes(good[:size])
            expect_fallback(old_and_new, path)
        path.write_bytes(good + b" ")
        expect_fallback(old_and_new, path)
        path.unlink()
        expect_fallback(old_and_new, path)
        (old_and_new / "copy").write_bytes(good)
        path.symlink_to(old_and_new / "copy")  # not followed, whatever it points to
        expect_fallback(old_and_new, path)
        path.unlink()
        path.write_bytes(good)
    assert expect_kept(old_and_new, 20) == []


def test_a_damaged_hint_changes_nothing(old_and_new, full):
    """Which folder is the newest is known by the names of the folders."""
    hint, rng = old_and_new / LATEST, random.Random(4)
    good = hint.read_bytes()
    flips = [flipped(rng, good) for _ in range(50 if full else 5)]
    for bad in [*flips, b"", good[:1], good[:-1], b"9" * 400, None]:
        hint.unlink() if bad is None else hint.write_bytes(bad)
        assert expect_kept(old_and_new, 20) == []
    save_alone(old_and_new, 30)
    assert hint.read_bytes() == b"30\n"


def test_the_iterations_that_are_lost_are_counted(root):
    save_alone(root, 30)
    for newest, lost in (30, 10), (20, 20):
        (root / f"iter_{newest:07}" / MANIFEST).write_text("{}")
        (note,) = load(root, [], ALONE).notes
        assert f"loading iteration {newest - 10} instead: {lost} iterations are lost" in note


# Forgery: a manifest whose hash is right and whose content is not.


def change_cut(*place: int, by: object):
    """Of model/w's cut [shape, box, box], with boxes [offset, shape, rank, begin, end, ...]."""

    def change(manifest: dict) -> None:
        *path, last = place
        entry = manifest["cuts"][manifest["tensors"]["model/w"][1]]
        for i in path:
            entry = entry[i]
        entry[last] = by

    return change


FORGERIES = {
    "no version": lambda m: m.pop("format_version") and None,
    "state of text": lambda m: m.update(state="x"),
    "config of numbers": lambda m: m.update(config=1),
    "files of lists": lambda m: m.update(files=[["rank_00000.safetensors"]]),
    "a file by name": lambda m: m["files"][0].__setitem__(0, "../rank_00000.safetensors"),
    "files of text": lambda m: m.update(files="x"),
    "tensors of text": lambda m: m.update(tensors="x"),
    "iteration of text": lambda m: m.update(iteration="20"),
    "a list": lambda m: "[]",
    "no JSON": lambda m: "{",
    "deep JSON": lambda m: "[" * 200000,
    "long number": lambda m: '{"format_version": ' + "9" * 10000 + "}",
    "unlisted file": change_cut(2, 2, by=7),
    "a file beyond all": change_cut(2, 2, by=2**61),
    "a negative file": change_cut(2, 2, by=-1),
    "another rank's file": change_cut(2, 2, by=0),
    "negative offset": change_cut(2, 0, by=[-3, 0]),
    "negative shape": change_cut(0, by=[-6, 10]),
    "huge shape": change_cut(0, by=[2**40, 2**40]),
    "huge box": change_cut(2, 1, by=[2**40, 2**20]),
    "size beyond int64": change_cut(0, by=[2**70]),
    "float size": change_cut(2, 0, by=[3.0, 0]),
    "bool size": change_cut(2, 0, by=[3, False]),
    "text for sizes": change_cut(2, 0, by="30"),
    "overlap": change_cut(2, 0, by=[2, 0]),
    "the same twice": change_cut(2, 0, by=[0, 0]),
    "outside": change_cut(2, 0, by=[4, 0]),
    "no box": change_cut(2, by=[]),
    "a box of text": change_cut(2, by="box"),
    "hole": lambda m: m["cuts"][m["tensors"]["model/w"][1]].pop(),
    "1000 dims": change_cut(0, by=[1] * 1000),
    "a range too short": change_cut(2, 4, by=29),
    "a range too long": change_cut(2, 4, by=31),
    "a range that begins too late": change_cut(2, 3, by=1),
    "an empty range": change_cut(2, 3, by=30),
    "a range backwards": change_cut(2, by=[[3, 0], [3, 10], 1, 30, 0]),
    "ranges out of order": change_cut(2, by=[[3, 0], [3, 10], 1, 10, 30, 1, 0, 10]),
    "ranges that overlap": change_cut(2, by=[[3, 0], [3, 10], 1, 0, 20, 1, 10, 20]),
    "ranges that the file has not": change_cut(2, by=[[3, 0], [3, 10], 1, 0, 10, 1, 10, 30]),
    "half a range": change_cut(2, by=[[3, 0], [3, 10], 1, 0]),
    "a float range": change_cut(2, 4, by=30.0),
    "a bool range": change_cut(2, 3, by=False),
    "a range of text": change_cut(2, 4, by="30"),
    "a huge range": change_cut(2, 4, by=2**80),
    "no such dtype": lambda m: m["tensors"].update({"model/w": ["os.system", 2]}),
    "another dtype": lambda m: m["tensors"].update({"model/w": ["I16", 2]}),
    "another tensor's cut": lambda m: m["tensors"].update({"model/w": ["BF16", 0]}),
    "no such cut": lambda m: m["tensors"].update({"model/w": ["BF16", 99]}),
    "a cut from the end": lambda m: m["tensors"].update({"model/w": ["BF16", -3]}),
    "no cut": lambda m: m["tensors"].update({"model/w": ["BF16"]}),
    "cuts by name": lambda m: m.update(cuts={"0": []}),
    "the format of version 1": lambda m: m.update(format_version=1),
    "a CRC too few": lambda m: m["files"][0].__setitem__(3, "0" * 7),
    "a CRC too many": lambda m: m["files"][0].__setitem__(3, "0" * 16),
    "a CRC of words": lambda m: m["files"][0].__setitem__(3, "nonsense"),
    "another CRC": lambda m: m["files"][0].__setitem__(3, "00000000"),
    "a CRC of another type": lambda m: m["files"][0].__setitem__(3, 12345678),
    "a size without its CRCs": lambda m: m["files"][0].__setitem__(1, 2**40),
    "five words for a file": lambda m: m["files"][0].append(""),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_manifest_is_refused(tmp_path, forgery):
    root = kept_root(tmp_path / "ckpt", 3)
    change_manifest(root / "iter_0000020", FORGERIES[forgery])
    # one of another dtype fits what is wanted, not the file
    dtype = torch.int16 if forgery == "another dtype" else torch.bfloat16
    pieces = [Piece("model/w", (6, 10), (0, 0), torch.zeros(6, 10, dtype=dtype))]
    began, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="iter_0000020"):
        load(root, pieces, ALONE, step=20)
    assert time.monotonic() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 2**10


def test_sizes_that_the_file_cannot_hold_are_refused(tmp_path):
    """A forgery without a contradiction in itself."""
    root, huge = kept_root(tmp_path / "ckpt", 3), [2**30, 2**30]
    cut = [huge, [[0, 0], huge, 0, 0, 2**60]]
    change_manifest(root / "iter_0000020", lambda m: m["cuts"].__setitem__(2, cut))
    with pytest.raises(CheckpointError, match="does not fit into"):
        read_manifest(root / "iter_0000020")


def test_random_changes_of_numbers_are_refused_or_harmless(tmp_path, full):
    """Any number of a manifest replaced by any other: an error of ours, or what was asked for."""
    rng, root = random.Random(6), kept_root(tmp_path / "ckpt", 3)
    folder = root / "iter_0000020"
    text = (folder / MANIFEST).read_text()
    for _ in range(2000 if full else 150):
        found = rng.choice(list(re.finditer(r"\d+", text)))
        by = rng.choice(["0", "1", "3", "5", "19", "-1", "2.5", "null", "[]", '""', str(2**61), "1e9"])
        sign(folder, text[: found.start()] + by + text[found.end() :])
        pieces = [Piece("exp_avg/w", (6, 10), (0, 0), torch.full((6, 10), torch.nan))]
        try:
            load(root, pieces, ALONE, step=20)
        except CheckpointError:
            continue
        assert torch.equal(pieces[0].data, kept("exp_avg/w"))
    sign(folder, text)
    assert expect_kept(root, 20) == []


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
                "header bomb": header_bomb(100 * 10**6),
                "long header": (2**62).to_bytes(8, "little") * 500,
            }[kind]
        )
    data = path.read_bytes()
    record = [0, len(data), hashlib.sha256(data).hexdigest()]
    change_manifest(path.parent, lambda m: m["files"].__setitem__(0, record))
    reason = "header too large" if "header" in kind else "iter_0000020"
    with pytest.raises(CheckpointError, match=reason):
        load(root, cuts(None), ALONE)
    assert not (tmp_path / "canary").exists()


def test_oversized_manifest_is_not_read(root):
    os.truncate(root / "iter_0000020" / MANIFEST, 2**40)  # a hole: takes no room on the disk
    assert "is larger than" in expect_newest(root, 10)[0]
