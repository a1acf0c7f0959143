"""Mixture of experts: in place of a layer's MLP, few of many for each token.

    x [t, h] --+-- Router           probs, ids [t, k] --+
               |                                         |
               +-- dispatch: tokens to the ranks of their experts, GroupedExperts, back, sum --+-- y
               |                                                                               |
               +-- shared experts: an MLP that every token takes -----------------------------+

The tokens of a rank are its own under sequence and context parallelism; experts are spread over the `ep` axis
of the grid of their own (`mesh.py`), which may run along data-, context- and tensor-parallel ranks, and each
is cut over `etp`. Which token goes where is decided by its own rank, for sinkhorn with sums over tp and cp.
(Switch, arXiv 2101.03961; grids folded into each other: MoE Parallel Folding, 2504.14960)
"""

import torch
from torch import nn

from nanomegatron.batch import Batch
from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.moe_dispatch import Journey
from nanomegatron.moe_experts import GroupedExperts
from nanomegatron.param import Init, ParamSpec, new_parameter, replica
from nanomegatron.recompute import keeping, recomputed
from nanomegatron.router import MoeAxes, Router


class MoELayer(nn.Module):
    """Router, experts and shared experts: `[s, b, h] -> [s, b, h]`, under sequence parallelism of s/tp."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        axes: MoeAxes,
        init: Init,
        shared: nn.Module | None = None,
    ) -> None:
        """shared: what every token takes beside its experts."""
        super().__init__()
        self.router = Router(config, layer, axes, init.at("router"))
        self.experts = GroupedExperts(config, axes, init.at("experts"))
        self.shared_experts, self.gate_weight = shared, None
        if shared is not None and config.moe_shared_expert_gate:
            name, shape = init.at("shared_experts.gate_weight"), (1, config.hidden_size)
            part = replica(name.name, shape, axes.tp, partial=config.sequence_parallel)
            self.gate_weight = new_parameter(ParamSpec((part,), shape), name)
        self.axes, self.dispatcher = axes, config.moe_token_dispatcher_type
        self.recompute_shared = config.recomputes("shared_experts")
        self.recompute = config.recomputes("moe")

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            with keeping(x):
                return self._run(x, batch)

        return recomputed(run, x) if self.recompute else run(x)

    def _run(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = x.flatten(0, 1)
        journey = Journey(rows, self.experts, self.axes, self.dispatcher)
        probs, _ = self.router(rows, batch, journey.route)
        shared: list[torch.Tensor] = []

        def meanwhile() -> None:
            if self.shared_experts is not None:
                shared.append(recomputed(self._shared, x) if self.recompute_shared else self._shared(x))

        y = journey.sums(probs, meanwhile).view_as(x)
        return y + shared[0] if shared else y

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """What the shared experts make of every token."""
        y, gate = self.shared_experts(x), self.gate_weight
        return y if gate is None else y * torch.sigmoid(x @ gate.t())
