"""The manifest: what tiles a tensor, the size for a large model, every version of the format."""

import itertools
import math
import random
import time
from pathlib import Path

import pytest
import torch

from nanomegatron.checkpoint import folder as checkpoint_folder
from nanomegatron.checkpoint import manifest as checkpoint_manifest
from nanomegatron.checkpoint.checkpoint import SaveError, load, save
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import MANIFEST, read_manifest, write_manifest
from nanomegatron.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Range,
    Rectangle,
    merge,
    rectangles,
    tiling_error,
)
from tests import large_checkpoint as large
from tests.checkpoints import (
    ALONE,
    GOLDENS,
    KEPT,
    KEPT_HASH,
    RELEASED,
    change_manifest,
    expect_kept,
    golden,
    hash_of,
    kept_root,
    random_tiles,
    save_alone,
    write_kept,
)
from tests.spmd import run_spmd


def random_ranges(rng: random.Random, size: int, rank: int) -> list[Range]:
    """Of a flat box: from 0 to its end."""
    ends = sorted({*(rng.randrange(1, size + 1) for _ in range(rng.randrange(3))), size})
    return [Range(begin, end, rank) for begin, end in zip([0, *ends], ends)]


def disturbed(rng: random.Random, found: list[Range]) -> list[Range]:
    """In order, with one of them longer, shorter or gone, or as it was."""
    i, how = rng.randrange(len(found)), rng.randrange(12)
    changed = found[i]._replace(end=found[i].end + (how % 2 or -1))
    return found[:i] + {0: [], 1: [changed], 2: [changed]}.get(how, found[i : i + 1]) + found[i + 1 :]


def test_tiling_agrees_with_counting():
    """Against a count of how often each element is covered."""
    rng, seen = random.Random(1), set()
    for _ in range(900):
        shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(4)))
        tiles = random_tiles(rng, shape, 3)
        for i in range(len(tiles) * rng.randrange(2)):  # disturb some
            offset = tuple(
                rng.randrange(-1, n) if rng.random() < 0.2 else o for o, n in zip(tiles[i][0], shape)
            )
            tiles[i] = (offset, tiles[i][1])
        boxes: dict[Rectangle, list[Range]] = {}
        count, inside = torch.zeros(shape), True
        for offset, tile in tiles:
            ranges = disturbed(rng, random_ranges(rng, math.prod(tile), 0))
            boxes.setdefault(Rectangle(offset, tile), []).extend(ranges)
            inside &= all(o >= 0 and o + n <= s for o, n, s in zip(offset, tile, shape))
            inside &= all(0 <= begin < end <= math.prod(tile) for begin, end, _ in ranges)
            flat = torch.zeros(math.prod(tile))
            for begin, end, _ in ranges:
                flat[begin:end] += 1
            if inside:
                count[tuple(slice(o, o + n) for o, n in zip(offset, tile))] += flat.view(tile)
        good = inside and bool((count == 1).all())
        error = tiling_error(shape, boxes)
        assert (error == "") == good, (shape, boxes, error)
        seen.add(error.split()[-1] if error.endswith("overlap") else good)
    assert seen == {True, False, "overlap"}


def test_tiling_takes_linear_time():
    """15,625 boxes of a cube, then 16,384 ranges of one box: as they are, and with the last moved by one."""
    began, shape = time.process_time(), (50, 75, 25)
    boxes = {
        Rectangle((2 * i, 3 * j, k), (2, 3, 1)): [Range(0, 6, 0)]
        for i, j, k in itertools.product(range(25), repeat=3)
    }
    assert tiling_error(shape, boxes) == ""
    (last, size), ranges = boxes.popitem()
    assert "cover 93744 of 93750" in tiling_error(shape, boxes)
    assert "overlap" in tiling_error(shape, boxes | {Rectangle((last[0], last[1] - 1, 24), size): ranges})
    box, ranges = Rectangle((0, 0), (7, 16384)), [Range(7 * i, 7 * i + 7, i) for i in range(16384)]
    assert tiling_error(box.shape, {box: ranges}) == ""
    assert "cover 114681 of 114688" in tiling_error(box.shape, {box: ranges[:-1]})
    assert "overlap" in tiling_error(box.shape, {box: [*ranges[:-1], Range(7 * 16383 - 1, 7 * 16384 - 1, 0)]})
    assert time.process_time() - began < 5  # 8 s and more where pairs are compared


def test_random_ranges_load_random_slices(tmp_path):
    """Boxes cut flat anywhere, as the optimizer's states are; what is wanted are slices of any kind."""
    rng = random.Random(7)
    for case in range(40):
        shape = tuple(rng.randrange(1, 8) for _ in range(rng.randrange(4)))
        whole, pieces = torch.randn(shape), []
        for offset, tile in random_tiles(rng, shape, 2):
            box = Rectangle(offset, tile)
            for begin, end, _ in random_ranges(rng, math.prod(tile), 0):
                for corner, size in rectangles(tile, begin, end):
                    at = tuple(a + b for a, b in zip(offset, corner))
                    view = whole[tuple(slice(a, a + n) for a, n in zip(at, size))]
                    pieces.append(Piece("t", shape, at, view, range=(box, begin, end)))
        save(tmp_path, case, pieces, {}, "", ALONE)
        (saved,) = read_manifest(tmp_path / f"iter_{case:07d}").tensors.values()
        assert sum(map(len, saved.boxes.values())) == len({piece.range for piece in pieces})
        target = torch.full(shape, torch.nan)
        wanted = [
            (o, target[tuple(slice(a, a + n) for a, n in zip(o, s))]) for o, s in random_tiles(rng, shape, 4)
        ]
        load(tmp_path, [Piece("t", shape, offset, view) for offset, view in wanted], ALONE)
        assert torch.equal(whole, target)


# Sizes.


def merged(folder: Path, argv: str, world: int) -> Manifest:
    """A checkpoint's manifest without its tensors, written and read."""
    large.write_indices(folder, argv, world)
    write_manifest(folder, Manifest(1, {}, "", *merge(sorted(folder.glob("rank_*.json")))))
    return read_manifest(folder)


SMALL = """--config tiny-cpu --tp 2 --pp 2 --num-layers 4 --use-distributed-optimizer --bf16
    --global-batch-size 8 --micro-batch-size 1 --vocab-size 256 --untie-embeddings-and-output-weights"""


@pytest.mark.parametrize("flags", ["", f"{large.OVERLAP} --ddp-bucket-size 20000"])
def test_parts_are_what_a_save_writes(tmp_path, flags):
    """The index of every rank, made of its buckets, lists what the pieces that it saves are of; no more."""
    boxes: dict = {}
    for mesh, buckets in large.stages(f"{SMALL} {flags}", 16):
        found = {
            (key, box, r.begin, r.end)
            for key, tensor in large.saved_by(mesh, buckets, boxes).items()
            for box, ranges in tensor.boxes.items()
            for r in ranges
        }
        given = large.pieces_of(mesh, buckets)
        whole = [(Rectangle(p.offset, tuple(p.data.shape)), 0, p.data.numel()) for p in given]
        assert {(p.key, *(p.range or alone)) for p, alone in zip(given, whole)} == found
    manifest = merged(tmp_path, f"{SMALL} {flags}", 16)
    assert set(manifest.files) == set(range(16))
    assert {key.split("/")[0] for key in manifest.tensors} == {"model", *large.KINDS}


@pytest.mark.full
@pytest.mark.parametrize("flags, size", [("", 6), (large.OVERLAP, 7)])
def test_405b_on_16384_ranks(tmp_path, flags, size):
    """MiB of the manifest, of 64 that may be; CPU seconds of a reader."""
    merged(tmp_path, f"{large.LLAMA_405B} {flags}", 16384)
    assert (tmp_path / MANIFEST).stat().st_size < size * 2**20
    began = time.process_time()
    manifest = read_manifest(tmp_path)
    assert time.process_time() - began < 20
    weights = sum(math.prod(t.shape) for key, t in manifest.tensors.items() if key.startswith("model/"))
    assert 405e9 < weights < 407e9 and len(manifest.files) == 16384


def test_a_manifest_that_none_could_read_is_not_published(tmp_path, monkeypatch):
    save_alone(tmp_path, 10)
    monkeypatch.setattr(checkpoint_folder, "MANIFEST_LIMIT", 100)
    with pytest.raises(SaveError, match=r"manifest.json of \d+ bytes is larger than 100: larger buckets"):
        save_alone(tmp_path, 20)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000010"]


def test_what_would_take_for_ever_to_check_is_refused(tmp_path, monkeypatch):
    """Tensors of many dims; one cut that many tensors have."""
    save(tmp_path, 1, [Piece(key, (2,) * 6, (0,) * 6, torch.ones((2,) * 6)) for key in "abc"], {}, "", ALONE)
    folder = tmp_path / "iter_0000001"
    halves = [[[i, *[0] * 5], [1, *[2] * 5], 0, 0, 32] for i in (0, 1)]
    change_manifest(folder, lambda m: m.update(cuts=[[[2] * 6, *halves]]))
    read_manifest(folder)
    monkeypatch.setattr(checkpoint_manifest, "RANGES_LIMIT", 5)
    with pytest.raises(CheckpointError, match="c: by here it has more than 5 ranges"):
        read_manifest(folder)
    corners = [[list(at), [1] * 9, 0, 0, 1] for at in itertools.product((0, 1), repeat=9)]
    change_manifest(folder, lambda m: m.update(cuts=[[[2] * 9, *corners]]))
    with pytest.raises(CheckpointError, match="is not a list of at most 6 sizes"):
        read_manifest(folder)


# Versions.


@pytest.mark.parametrize("version", RELEASED)
def test_a_kept_checkpoint_loads(tmp_path, version):
    """Saved by ranks whose buckets end in the middle of rows (torch: by one); every number of it."""
    assert expect_kept(kept_root(tmp_path / "ckpt", version), 20) == []
    folder = golden(version)
    assert hash_of(folder) == KEPT_HASH
    halves = [Piece("exp_avg/w", (6, 10), (0, 5 * i), torch.zeros(6, 5)) for i in (0, 1)]
    load(folder, halves, ALONE)
    assert torch.equal(torch.cat([half.data for half in halves], 1), torch.arange(60.0).view(6, 10) / 4 + 1)
    assert set(read_manifest(folder / "iter_0000020").tensors) == set(KEPT)


def test_a_save_writes_the_kept_bytes(tmp_path):
    """What changes them is a new version of the format."""
    run_spmd(write_kept, 4, tmp_path, tp=2)
    files = sorted((GOLDENS / "checkpoint_v3/iter_0000020").iterdir())
    assert len(files) == 6
    for path in files:
        assert (tmp_path / path.parent.name / path.name).read_bytes() == path.read_bytes(), path.name


def load_kept(mesh, root: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(root, [], mesh)
    return str(error.value)


def test_a_newer_format_is_no_damage(tmp_path):
    """It is refused, whatever else it has, on all ranks, though there is an older checkpoint."""
    root = kept_root(tmp_path / "ckpt", 3)
    change_manifest(root / "iter_0000020", lambda m: '{"format_version": 4}')
    for message in run_spmd(load_kept, 2, root, tp=2):
        assert "format_version 4, this program reads 3: update the program" in message
    with pytest.raises(CheckpointError, match="update the program"):
        load(root, [], ALONE, step=20)
    assert load(root, [], ALONE, step=10).notes == []


@pytest.mark.parametrize("version", [0, 1, 2])
def test_an_older_format_is_no_damage(tmp_path, version):
    """It is refused on all ranks, though there is an older checkpoint, and the message says what to do."""
    root = kept_root(tmp_path / "ckpt", 3)
    change_manifest(root / "iter_0000020", lambda m: m.update(format_version=version))
    for message in run_spmd(load_kept, 2, root, tp=2):
        assert f"format_version {version}, this program reads 3: " in message
        assert message.endswith("or go on with the one that wrote it")
    assert load(root, [], ALONE, step=10).notes == []


@pytest.mark.parametrize("version", ["-1", '"3"', "true", "3.0", "null", "[3]"])
def test_what_is_no_version_is_damage(tmp_path, version):
    root = kept_root(tmp_path / "ckpt", 3)
    change_manifest(root / "iter_0000020", lambda m: f'{{"format_version": {version}}}')
    assert "iter_0000020" in expect_kept(root, 10)[0]
