"""The peers of peers.py with torchao's FP8 in the linear layers of their blocks, for bench_parallel.py.

    on_one_gpu       torchao's recipe "tensorwise" (one scale a tensor, of the tensor itself) or "rowwise"
    fully_sharded    tensorwise; FSDP2 gathers FP8 bytes, and one all-reduce behind the optimizer's step
                     agrees on the scales of all weights

Weights are those of the bf16 peers; embedding and output layer stay in bf16. torchao is no requirement: where
it is not installed, building one of these raises ImportError. (https://github.com/pytorch/ao, float8)
"""

import torch
from torch import nn

from benchmarks import peers
from nanomegatron.config.settings import Config


def in_fp8(block: nn.Module, recipe: str, gather: bool = False) -> nn.Module:
    """All linear layers of a block in FP8; gather: FSDP2 is to gather their weights in FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if gather:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)  # tensorwise, as it is by default
    return convert_to_float8_training(block, config=config)


def on_one_gpu(
    config: Config, device: torch.device, recipe: str, backend: str | None, compile_loss: bool = True
) -> peers.Peer:
    """The model by itself, every block and the loss compiled by `backend`."""
    return peers.on_one_gpu(config, device, backend, compile_loss, lambda block: in_fp8(block, recipe))


class Gathered(peers.Peer):
    """With weights that are gathered in FP8."""

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        loss = super().step(batches)
        precompute_float8_dynamic_scale_for_fsdp(self.model)
        return loss


def fully_sharded(
    config: Config, device: torch.device, keep: bool, backend: str | None, compile_loss: bool = True
) -> peers.Peer:
    """FSDP2 over all ranks of the world, every block and the loss compiled by `backend`."""

    def convert(block: nn.Module) -> nn.Module:
        return in_fp8(block, "tensorwise", gather=True)

    return peers.fully_sharded(config, device, keep, backend, compile_loss, convert, Gathered)
