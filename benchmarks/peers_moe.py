"""transformers' mixtures of experts: its whole model under FSDP2, a program, and its block.

    torchrun benchmarks/peers_moe.py KIND FLAGS OF train.py

FSDP2 cuts parameters, gradients and AdamW's moments, fp32, over all ranks and gathers each layer's in bf16
when it is used: every rank then has all experts of a layer, for its own tokens. The experts are computed by
torch's grouped matmul (`grouped`) or in a loop over them; where the kind ends in -recomputed, the backward
computes layers again. Weights are transformers' own, so that losses are not those of train.py.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peer_program import main
from benchmarks.peers import Peer, token_loss
from nanomegatron.config.hf import to_hf
from nanomegatron.config.settings import Config
from nanomegatron.mesh import Mesh


def hf_config(config: Config, experts: str):
    """transformers' configuration of our model, with its own attention through torch's."""
    from transformers import AutoConfig

    settings = {k: v for k, v in to_hf(config).items() if k not in ("architectures", "torch_dtype", "dtype")}
    found = AutoConfig.for_model(**settings)
    found._attn_implementation, found._experts_implementation = "sdpa", experts
    found.use_cache = False
    return found


class Sharded(Peer):
    """The model and its optimizer."""

    def __init__(self, config: Config, mesh: Mesh, experts: str, recompute: bool) -> None:
        from transformers import AutoModelForCausalLM

        hf = hf_config(config, experts)
        with mesh.device:
            model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
        if recompute:
            model.gradient_checkpointing_enable()
        ranks = init_device_mesh(mesh.device.type, (mesh.world.size,))
        policy = MixedPrecisionPolicy(getattr(torch, config.dtype_name), torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=ranks, mp_policy=policy)
        model = fully_shard(model, mesh=ranks, mp_policy=policy).train()
        super().__init__(model, config.optimizer, lambda y, labels: token_loss(y.logits, labels), nullcontext)


KINDS = {
    "grouped": partial(Sharded, experts="grouped_mm", recompute=False),
    "grouped-recomputed": partial(Sharded, experts="grouped_mm", recompute=True),
    "loop-recomputed": partial(Sharded, experts="eager", recompute=True),
}


def block(config: Config, device: torch.device, experts: str, ours: nn.Module) -> nn.Module:
    """transformers' layer of experts, with the weights of `ours`, which has all of them. bf16"""
    from transformers import AutoModelForCausalLM

    hf = hf_config(config, experts)
    hf.num_hidden_layers = 1
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16).model.layers[0].mlp
    found = found.to_empty(device=device)
    count, h = config.model.num_experts, config.model.hidden_size
    with torch.no_grad():
        found.gate.weight.copy_(ours.router.weight)
        found.experts.gate_up_proj.copy_(ours.experts.weight1.view(count, -1, h))
        found.experts.down_proj.copy_(ours.experts.weight2.view(count, -1, h).mT)
    return found


if __name__ == "__main__":
    sys.exit(main(KINDS, sys.argv[1:]))
