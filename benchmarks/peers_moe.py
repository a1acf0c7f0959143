"""transformers' mixtures of experts: its whole model under FSDP2, and its block by itself.

FSDP2 cuts parameters, gradients and AdamW's moments, fp32, over all ranks and gathers each layer's in bf16
when it is used: every rank has all experts of a layer then, for its own tokens. The experts are computed by
`experts_implementation`: torch's grouped matmul, or the loop over experts ("eager"). Tried in this order are
the grouped matmul, the same with layers recomputed, and the loop with layers recomputed.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peers import token_loss
from nanomegatron.config.hf import to_hf
from nanomegatron.config.settings import Config


def hf_config(config: Config, experts: str):
    """transformers' configuration of our model, with its own attention through torch's."""
    from transformers import AutoConfig

    settings = {k: v for k, v in to_hf(config).items() if k not in ("architectures", "torch_dtype", "dtype")}
    found = AutoConfig.for_model(**settings)
    found._attn_implementation, found._experts_implementation = "sdpa", experts
    found.use_cache = False
    return found


class Sharded:
    """The model and its optimizer; `step` is one iteration over this rank's microbatches."""

    def __init__(self, config: Config, device: torch.device, experts: str, again: bool) -> None:
        from transformers import AutoModelForCausalLM

        hf = hf_config(config, experts)
        with device:
            model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
        if again:
            model.gradient_checkpointing_enable()
        mesh = init_device_mesh(device.type, (config.parallel.data_parallel_size,))
        cut = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for layer in model.model.layers:
            fully_shard(layer, **cut)
        self.model, self.clip = fully_shard(model, **cut).train(), config.optimizer.clip_grad
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """batches: tokens and one more, `[b, s + 1]` each. Returns this rank's mean loss, 0-d."""
        total = 0.0
        for i, tokens in enumerate(batches, 1):
            self.model.set_requires_gradient_sync(i == len(batches))
            loss = token_loss(self.model(tokens[:, :-1]).logits, tokens[:, 1:]) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


BUILDS = {
    "grouped": partial(Sharded, experts="grouped_mm", again=False),
    "grouped, layers again": partial(Sharded, experts="grouped_mm", again=True),
    "loop, layers again": partial(Sharded, experts="eager", again=True),
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
