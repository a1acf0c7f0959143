"""The speed of a step in every unit that is logged, and the peak memory."""

from collections import Counter
from contextlib import suppress

import torch

from nanomegatron.config.settings import Config
from nanomegatron.mesh import Mesh
from nanomegatron.plan.flops import CONVENTIONS, flops_per_iteration, mfu
from nanomegatron.plan.gpus import device_peak
from nanomegatron.report.banner import local_ranks


def speed_of(
    config: Config, mesh: Mesh, padded_vocab_size: int, lengths: Counter[int], seconds: float
) -> dict[str, float | None]:
    """Return the speed of a step of `seconds` with these sequence lengths, in every unit that is logged."""
    model = config.model
    world = mesh.world.size
    peak = None
    if mesh.device.type == "cuda":
        peak = device_peak(torch.cuda.get_device_name(mesh.device), config.dtype_name)

    def flops(convention: str) -> float:
        return sum(
            flops_per_iteration(model, padded_vocab_size, s, n, convention) for s, n in lengths.items()
        )

    usual, *others = CONVENTIONS
    result = {
        "step_time_ms": 1e3 * seconds,
        "tokens_per_s": sum(length * n for length, n in lengths.items()) / seconds,
        "tflops_per_gpu": flops(usual) / seconds / world / 1e12,
        "mfu": mfu(flops(usual), seconds, world, peak),
    }
    if config.run.log_throughput:
        result |= {f"tflops_per_gpu_{c}": flops(c) / seconds / world / 1e12 for c in others}
    return result


def machine_gpus(mesh: Mesh) -> list[str]:
    """Return the UUIDs of the GPUs of this machine's ranks, as far as this rank sees them; [] on a CPU."""
    if mesh.device.type != "cuda":
        return []
    seen = min(local_ranks(mesh.world.size), torch.cuda.device_count())  # it may see only its own
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(seen)]


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(ImportError):  # only on Unix
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 0
