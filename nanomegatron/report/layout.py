"""The layout of --auto-layout on this machine, and what makes room in its memory."""

import torch

from nanomegatron.config.cli import Parsed
from nanomegatron.config.settings import Config, DataConfig
from nanomegatron.data.gpt_dataset import choose_tokenizer
from nanomegatron.mesh import Mesh
from nanomegatron.plan.auto import with_best_layout
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.room import Planned, remedies
from nanomegatron.plan.search import FILLED
from nanomegatron.report.banner import machine_of, memory_room


def chosen_layout(parsed: Parsed, world: int, device: torch.device) -> Parsed:
    """Return the settings with the layout that --auto-layout chooses for `world` ranks.

    Raises ConfigError if none fits.
    """
    where = described(device, world)
    return with_best_layout(parsed, vocabulary_size(parsed.config.data), world, *where)


def out_of_memory_advice(config: Config, mesh: Mesh) -> str:
    """The lines on changes that make room, for a run that a GPU's memory was too small for."""
    _, kind, room = described(mesh.device, mesh.world.size)
    run = Planned(config, vocabulary_size(config.data), kind, mesh.world.size)
    return "\n".join(["what the plan says to take less memory, the cheapest first:", *remedies(run, room)])


def vocabulary_size(data: DataConfig) -> int:
    """Return the number of token ids: as set, or the tokenizer's."""
    return data.vocab_size or choose_tokenizer(data).vocab_size


def described(device: torch.device, ranks: int) -> tuple[str, Machine, float]:
    """Return a device's name, what the planner knows of it, and the bytes for each of all `ranks`."""
    room, shared = memory_room(device, ranks)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return name, machine_of(device), FILLED * room / shared
