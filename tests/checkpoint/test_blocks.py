"""Checksums of files in blocks: bytes written in parallel, damage found in every block, old and new sums."""

import hashlib
import random
import threading
import zlib
from pathlib import Path

import pytest
import torch

from nanomegatron.checkpoint import blocks, files, manifest
from nanomegatron.checkpoint.blocks import verify_files, write_blocks
from nanomegatron.checkpoint.checkpoint import load, save
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import read_manifest
from nanomegatron.checkpoint.manifest import CheckpointError, SavedFile
from tests.checkpoints import ALONE, change_manifest


@pytest.fixture
def small_blocks(monkeypatch) -> int:
    """Of 1,000 bytes."""
    for module in (blocks, manifest):
        monkeypatch.setattr(module, "CRC_BLOCK", 1000)
    return 1000


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_of_any_size_become_one_file(tmp_path, small_blocks, threads):
    """The bytes in order; the CRC-32 of every 1,000 of them, and the SHA-256 of all."""
    rng = random.Random(1)
    for case in range(20):
        sizes = [rng.choice((0, 1, 7, 999, 1000, 1001, 2500)) for _ in range(rng.randrange(1, 9))]
        chunks = [rng.randbytes(size) for size in sizes]
        whole, path = b"".join(chunks), tmp_path / str(case)
        saved = write_blocks(path, map(memoryview, chunks), threads)
        parts = [whole[at : at + 1000] for at in range(0, len(whole), 1000)]
        assert path.read_bytes() == whole
        assert saved == SavedFile(
            len(whole), hashlib.sha256(whole).hexdigest(), tuple(map(zlib.crc32, parts))
        )
        verify_files({path: saved}, threads, integrity=True)
    with pytest.raises(FileExistsError):
        write_blocks(path, [b""], threads)


def test_damage_is_found_in_every_block(tmp_path, small_blocks):
    """A flipped bit anywhere, by either checksum; the file and the block are named."""
    rng, data = random.Random(2), random.Random(3).randbytes(3456)
    good = {tmp_path / name: write_blocks(tmp_path / name, [data], 2) for name in "ab"}
    verify_files(good, 2, integrity=True)
    for _ in range(60):
        at = rng.randrange(len(data))
        bad = bytearray(data)
        bad[at] ^= 1 << rng.randrange(8)
        path = tmp_path / rng.choice("ab")
        path.write_bytes(bad)
        begin = at // 1000 * 1000
        where = f"{path} is damaged: the CRC-32 of bytes {begin} to {min(begin + 999, 3455)} is not"
        with pytest.raises(CheckpointError, match=where):
            verify_files(good, 2)
        without = {path: SavedFile(file.bytes, file.sha256) for path, file in good.items()}
        with pytest.raises(CheckpointError, match=f"{path} is damaged: its SHA-256 is not"):
            verify_files(without, 2)
        path.write_bytes(data)
    verify_files(good, 2, integrity=True)


def test_a_write_that_fails_in_a_thread_is_an_error(tmp_path, small_blocks, monkeypatch):
    def fails(descriptor: int, block: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks, "_write_at", fails)
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        write_blocks(tmp_path / "a", [bytes(100_000)], 2)
    assert threading.active_count() == before


def test_sha256_is_compared_where_it_is_asked_for(tmp_path):
    """A file changed together with its CRC-32, as no accident does."""
    save(tmp_path, 1, [Piece("t", (64,), (0,), torch.ones(64))], {}, "", ALONE)
    folder = tmp_path / "iter_0000001"
    path = folder / "rank_00000.safetensors"
    bad = path.read_bytes()[:-4] + b"\0\0\0\0"
    path.write_bytes(bad)
    change_manifest(folder, lambda m: m["files"][0].__setitem__(3, f"{zlib.crc32(bad):08x}"))
    load(tmp_path, [], ALONE)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is not the manifest's"):
        load(tmp_path, [], ALONE, integrity=True)


class CountingFile:
    """Stands for an opened safetensors file; counts the bytes that are read of slices."""

    read: list[int] = []

    def __init__(self, path: Path, framework: str) -> None:
        self.file = USUAL(path, framework)

    def __enter__(self) -> "CountingFile":
        self.inner = self.file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def get_slice(self, name: str) -> "CountingSlice":
        return CountingSlice(self.inner.get_slice(name))


class CountingSlice:
    def __init__(self, inner) -> None:
        self.get_dtype, self.get_shape, self.inner = inner.get_dtype, inner.get_shape, inner

    def __getitem__(self, at: tuple) -> torch.Tensor:
        found = self.inner[at]
        CountingFile.read.append(found.nbytes)
        return found


USUAL = files.safe_open


def test_a_load_reads_no_more_than_its_slices(tmp_path, monkeypatch):
    """Only the overlaps, of 2 of 8 columns: each byte that is wanted, once."""
    whole = torch.randn(16, 8)
    halves = [Piece("t", (16, 8), (8 * i, 0), whole[8 * i : 8 * i + 8]) for i in (0, 1)]
    save(tmp_path, 1, [*halves, Piece("other", (99,), (0,), torch.ones(99))], {}, "", ALONE)
    CountingFile.read.clear()
    monkeypatch.setattr(files, "safe_open", CountingFile)
    target = torch.zeros(16, 2)
    load(tmp_path, [Piece("t", (16, 8), (0, 3), target)], ALONE)
    assert torch.equal(target, whole[:, 3:5])
    assert CountingFile.read == [64, 64]
    assert read_manifest(tmp_path / "iter_0000001").files[0].bytes > 900


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path):
    """By its path, as a file; also among very many that are damaged, which are one line."""
    pieces = [Piece("model/w", (3,), (0,), torch.arange(3.0))]
    for step in (1, 2):
        save(tmp_path, step, pieces, {}, "", ALONE)
    for path in (tmp_path / "iter_0000002/rank_00000.safetensors", tmp_path / "iter_0000002/manifest.json"):
        path.unlink()
        path.mkdir()
        (note,) = load(tmp_path, pieces, ALONE).notes
        assert f"damaged checkpoint: {path} is not a plain file; loading iteration 1 instead" in note
    for step in range(3, 1500):
        (tmp_path / f"iter_{step:07d}").mkdir()
    (note,) = load(tmp_path, pieces, ALONE).notes
    assert note.count("iter_") == 3 and "iter_0001499" in note and "; and 1495 more; loading" in note
    with pytest.raises(CheckpointError, match="and 1489 more$"):
        (tmp_path / "iter_0000001/manifest.json").unlink()
        load(tmp_path, pieces, ALONE)
