"""A snapshot on a GPU: what the states were at the boundary, whatever the stream does afterwards."""

from pathlib import Path

import pytest
import torch

import train
from nanomegatron.checkpoint.async_save import AsyncSaver
from nanomegatron.checkpoint.checkpoint import load
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import KEEP_ALL
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.faults.exit import DONE
from nanomegatron.mesh import Mesh, World
from nanomegatron.report import plots
from tests.gpu.test_on_gpu import FLAGS, corpus  # noqa: F401 (a fixture)

CUDA = torch.device("cuda", 0)
SIZE = 2**26  # elements: 256 MiB, whose copy takes some 5 ms


def pieces_with(value: float) -> list[Piece]:
    return [
        Piece(f"t{i}", (SIZE,), (0,), torch.full((SIZE,), value + i, device=CUDA, dtype=torch.float32))
        for i in range(4)
    ]


def test_a_snapshot_is_of_the_boundary(tmp_path):
    """Tensors are written after `wait_copies`, or freed and their memory used again at once."""
    mesh = Mesh.build(ParallelConfig(), World(), CUDA)
    found = AsyncSaver(mesh, 16 * SIZE)
    data = found.buffer.ready.result()
    for step in (1, 2):
        pieces = pieces_with(step)
        found.begin(tmp_path, step, pieces, {}, "", KEEP_ALL)
        if step == 1:
            found.wait_copies()
            for piece in pieces:
                piece.data.zero_()
        else:
            del pieces, piece
            reused = [torch.zeros(SIZE, device=CUDA) for _ in range(8)]
        assert found.join() == []
        target = pieces_with(-1)
        load(tmp_path, target, mesh)
        assert [piece.data.unique().tolist() for piece in target] == [[step + i] for i in range(4)]
    assert len(reused) == 8 and data.is_pinned()
    found.close()


def run(argv: list[str], folder: Path, monkeypatch) -> dict[str, bytes]:
    """The tensors' files of a run's checkpoints."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(plots, "plot_loss", lambda *_: None)
    assert train.main([*FLAGS, *argv]) == DONE
    torch.use_deterministic_algorithms(False)  # other tests of this process measure memory
    files = sorted((folder / "runs/test/ckpt").glob("iter_*/rank*"))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ["", "--fp8-format hybrid"])
def test_training_beside_saves_changes_nothing(kind, corpus, tmp_path, monkeypatch):  # noqa: F811
    """By default on a GPU, every step; the files of synchronous saves, to the byte."""
    argv = [*corpus, *f"--bf16 --deterministic-mode --train-iters 6 --save-interval 1 {kind}".split()]
    beside = run(argv, tmp_path / "async", monkeypatch)
    assert "saved   runs/test/ckpt, step 3" in (tmp_path / "async/runs/test/log.txt").read_text()
    assert beside == run([*argv, "--no-async-save"], tmp_path / "sync", monkeypatch) and len(beside) == 6
