"""The manifest of a model of any size on any number of ranks, without its weights and without the ranks.

    python -m tests.large_checkpoint [Llama-405B] [Qwen3-235B]      bytes, time and memory of LAYOUTS

Each rank's part is of the project's own buckets and parameters, on the device "meta".
"""

import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanomegatron.build import build
from nanomegatron.checkpoint.checkpoint import offset_of, training_pieces
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import MANIFEST, read_manifest, write_manifest
from nanomegatron.checkpoint.manifest import (
    CRC_BLOCK,
    ITEM_BYTES,
    Manifest,
    Range,
    Rectangle,
    SavedFile,
    SavedTensor,
    merge,
    rank_file,
    to_json,
)
from nanomegatron.config.check import resolve
from nanomegatron.config.cli import parse
from nanomegatron.dp import ParamAndGradBuckets, reduction_axis
from nanomegatron.mesh import Axis, Mesh, axis_groups
from nanomegatron.param import Init

LLAMA_405B = """--config llama3-70b --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
    --num-attention-heads 128 --num-query-groups 8 --vocab-size 128256 --bf16 --use-distributed-optimizer
    --global-batch-size 2048 --micro-batch-size 1 --tp 8 --pp 16 --decoder-first-pipeline-num-layers 7
    --decoder-last-pipeline-num-layers 7"""
QWEN_235B = """--config qwen3-30b-a3b --num-layers 94 --hidden-size 4096 --num-attention-heads 64
    --moe-ffn-hidden-size 1536 --tp 4 --pp 8 --ep 8 --expert-tensor-parallel-size 1 --bf16
    --use-distributed-optimizer --global-batch-size 2048 --micro-batch-size 1
    --decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11"""
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {"Llama-405B": (LLAMA_405B, 16384), "Qwen3-235B": (QWEN_235B, 256)}
KINDS = ("main", "exp_avg", "exp_avg_sq")
Tensors = dict[str, SavedTensor]


def stages(argv: str, world: int) -> Iterator[tuple[Mesh, ParamAndGradBuckets]]:
    """Mesh and buckets of every rank, those that hold the same parameters one after the other."""
    config = resolve(parse(argv.split()).config, world)
    groups = axis_groups(config.parallel, world)
    alike = [(dense, [r for r in edp if r in dense]) for dense in groups["dp_cp"] for edp in groups["edp"]]
    for dense, ranks in [(dense, ranks) for dense, ranks in alike if ranks]:
        axes = {}
        for name, found in groups.items():
            mine = next((group for group in found if ranks[0] in group), (ranks[0],))
            axes[name] = Axis(name, len(mine), mine.index(ranks[0]), mine)
        mesh = Mesh(ranks[0], torch.device("meta"), **axes)
        vocab = config.data.vocab_size
        model = build(config, mesh, vocab, vocab, Init(dtype=torch.bfloat16, device=mesh.device))
        buckets = ParamAndGradBuckets(model, config.parallel, mesh)
        for rank in ranks:
            among = replace(mesh.dp_cp, rank=dense.index(rank)), replace(mesh.edp, rank=ranks.index(rank))
            mesh = replace(mesh, rank=rank, dp_cp=among[0], edp=among[1])
            for bucket in buckets.all:
                bucket.axis = bucket.shard_axis = among[bucket.params[0].spec.expert]
                length = bucket.size // bucket.shard_axis.size
                bucket.shard = slice(bucket.shard_axis.rank * length, (bucket.shard_axis.rank + 1) * length)
                bucket.slices = list(bucket._slices())
            yield mesh, buckets


def saved_by(mesh: Mesh, buckets: ParamAndGradBuckets, boxes: dict) -> Tensors:
    """What a rank's index lists, from the slices of its buckets. boxes: {} at first, those of all parts."""
    if mesh.edp.rank == 0:
        parts = [(param, part) for param in buckets.params for part in param.spec.parts]
        boxes |= {part.name: Rectangle(offset_of(part), tuple(part.local_view(p).shape)) for p, part in parts}
    tensors: Tensors = {}
    for param in [param for param in buckets.params if not reduction_axis(param, mesh).rank]:
        for part in [part for part in param.spec.parts if part.owner]:
            box = boxes[part.name]
            whole = {box: [Range(0, math.prod(box.shape), mesh.rank)]}
            tensors[f"model/{part.name}"] = SavedTensor("BF16", part.shape, whole)
    for _, piece in buckets.slices():
        if piece.saver:
            part = piece.part
            found = Range(piece.at, piece.at + piece.stop - piece.start, mesh.rank)
            for kind in KINDS:
                tensors[f"{kind}/{part.name}"] = SavedTensor("F32", part.shape, {boxes[part.name]: [found]})
    return tensors


def pieces_of(mesh: Mesh, buckets: ParamAndGradBuckets) -> list[Piece]:
    """The same from what a save is given."""
    slices = [(piece, piece.shard_view(bucket.grad_shard)) for bucket, piece in buckets.slices()]
    return [p for p in training_pieces(buckets.params, dict.fromkeys(KINDS, slices), mesh) if p.owner]


def write_indices(folder: Path, argv: str, world: int) -> None:
    """What all ranks of a save leave for rank 0."""
    boxes: dict = {}
    for mesh, buckets in stages(argv, world):
        tensors = saved_by(mesh, buckets, boxes)
        size = sum(
            (r.end - r.begin) * ITEM_BYTES[t.dtype]
            for t in tensors.values()
            for ranges in t.boxes.values()
            for r in ranges
        )
        size += 2**20
        saved = SavedFile(size, "0" * 64, (0,) * math.ceil(size / CRC_BLOCK))
        part = Manifest(0, {}, "", tensors, {mesh.rank: saved})
        (folder / rank_file("sharded", mesh.rank)).with_suffix(".json").write_text(to_json(part))


def timed(what: str, work: Callable, *args: object) -> Any:
    """Its result, with a line of seconds and memory."""
    began = time.process_time()
    result = work(*args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what:36} {time.process_time() - began:7.1f} s of CPU   peak {peak:5.2f} GiB", flush=True)
    return result


def measure(folder: Path, argv: str, world: int) -> None:
    """Save and read the manifest of one layout."""
    timed(f"{world:,} ranks' parts", write_indices, folder, argv, world)
    parts = sorted(folder.iterdir())
    tensors, files = timed("merged and checked", merge, parts)
    timed("written", write_manifest, folder, Manifest(1, {}, "", tensors, files))
    ranges = sum(len(found) for tensor in tensors.values() for found in tensor.boxes.values())
    sizes = [sum(path.stat().st_size for path in paths) / 2**20 for paths in (parts, [folder / MANIFEST])]
    print(f"{ranges:,} ranges of {len(tensors):,} tensors: parts {sizes[0]:.1f}, manifest {sizes[1]:.1f} MiB")
    del tensors, files
    timed("read and checked", read_manifest, folder)


def main(argv: list[str]) -> None:
    """Those of LAYOUTS that are named; a stage's parameters in one bucket, then in many."""
    for name in argv or LAYOUTS:
        for flags in ("", OVERLAP):
            print(name, flags or "one bucket a stage")
            with tempfile.TemporaryDirectory() as folder:
                measure(Path(folder), f"{LAYOUTS[name][0]} {flags}", LAYOUTS[name][1])


if __name__ == "__main__":
    main(sys.argv[1:])
