"""What makes a peer a program like train.py: its flags, its ranks, its samples and its metrics.jsonl.

python benchmarks/peers.py KIND FLAGS          torchrun ... KIND FLAGS          ... KIND FLAGS --nproc 2

main -> run_rank on each process -> KIND(config, mesh) -> train_peer: batches, peer.step, a line a step
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

import train
from nanomegatron.comm import all_reduce_, barrier
from nanomegatron.config.early import print_errors
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.data.loader import BatchLoader
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.report.speed import peak_memory, speed_of
from nanomegatron.report.timers import Clock
from nanomegatron.report.writers import JsonLines


class Steps(Protocol):
    """What trains."""

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """One iteration over a rank's microbatches, `[b, s + 1]` each. Returns its mean loss, 0-d."""


def on_gpu(mesh: Mesh) -> bool:
    return mesh.device.type == "cuda"


def main(kinds: dict[str, Callable], words: list[str]) -> int:
    """Train the kind of peer that the first word names, by the flags behind it; the exit code."""
    if not words or words[0] not in kinds:
        print(f"the first word says who trains: {', '.join(kinds)}", file=sys.stderr)
        return BAD_CONFIG
    world, argv = World.from_environment(), words[1:]
    try:
        _, config = train.settings(argv, world)
    except ValueError as error:
        print_errors(error, world.rank)
        return BAD_CONFIG
    task = kinds[words[0]], argv
    if (config.run.nproc or 1) == 1 or world.size > 1:
        return run_rank(world, *task)
    return max(map(abs, launch(run_rank, config.run.nproc, task)))


def run_rank(world: World, make: Callable[[Config, Mesh], Steps], argv: list[str]) -> int:
    """One process of the run; returns its exit code."""
    _, config = train.settings(argv, world)
    device = pick_device(config.run.device, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = Mesh.build(config.parallel, world, device, config.model.num_kv_heads)
    train_peer(make(config, mesh), config, mesh)
    barrier(mesh.world)
    Mesh.close()
    return DONE


def train_peer(peer: Steps, config: Config, mesh: Mesh) -> None:
    """All iterations, on the samples of train.py; a step's numbers are read when the next one is launched."""
    data, dp, iterations = config.data, mesh.dp, config.run.train_iters
    tokenizer, size = choose_tokenizer(data), data.global_batch_size
    dataset = build_datasets(data, (iterations * size, 0, 0), config.run.seed, tokenizer)[0]
    loader = BatchLoader(dataset, data, tokenizer.eod, dp, mesh.device)
    records, pending = JsonLines(Path(config.run.metrics_jsonl or config.run.folder / "metrics.jsonl")), None
    if on_gpu(mesh):
        torch.cuda.reset_peak_memory_stats()
    for iteration in range(iterations + 1):
        previous, pending = pending, None
        if iteration < iterations:
            clock, first = Clock(mesh.device), iteration * size
            samples = range(first, first + size, data.micro_batch_size * dp.size)
            batches = [loader.get(sample) for sample in samples]
            loss = peer.step([torch.cat((b.tokens, b.labels[:, -1:]), dim=1) for b in batches])
            loss = all_reduce_(loss.float().clone(), mesh.dp_cp) / mesh.dp_cp.size
            read = torch.empty((), pin_memory=on_gpu(mesh)).copy_(loss, non_blocking=True)
            pending = iteration + 1, clock.stop(), read
        if previous and mesh.rank == 0:
            records.append(record(config, mesh, *previous))
    loader.close()


def record(config: Config, mesh: Mesh, iteration: int, clock: Clock, loss: torch.Tensor) -> dict:
    """A line of metrics.jsonl; waits for the end of the step."""
    seconds, data = clock.milliseconds() / 1e3, config.data
    padded = padded_vocab_size(data.vocab_size, data.make_vocab_size_divisible_by, mesh.tp.size)
    done = iteration * data.global_batch_size
    found = dict(iteration=iteration, consumed_samples=done, lm_loss=loss.item())
    found |= speed_of(config, mesh, padded, Counter({data.seq_length: data.global_batch_size}), seconds)
    return found | {"peak_mem_gib": peak_memory(mesh.device) / 2**30}
