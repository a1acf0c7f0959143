"""How evenly experts are busy: one table of the whole model a step, for the log and the routers' biases.

    step t        begin    every router counts from zero (router.py)
                  ...      forward and backward of all microbatches
                  end      one all-reduce over all ranks, one table; biases move towards an even load
    step t + 1    the table comes to the host with the other numbers of step t

    row of a layer    tokens of each expert [E] | of these dropped [E] | losses, each the batch's mean

A token counts with each of its experts.
"""

from typing import Any

import torch
from torch import nn

from nanomegatron.comm import all_reduce_
from nanomegatron.config.settings import TransformerConfig
from nanomegatron.mesh import Mesh
from nanomegatron.router import Router, loss_weights, update_expert_bias


class ExpertLoad:
    """The counts of all routers of all pipeline stages; `model` is what this rank has of it."""

    def __init__(self, model: nn.Module, config: TransformerConfig, mesh: Mesh) -> None:
        self.config, self.mesh, self.losses = config, mesh, tuple(loss_weights(config))
        self.layers = [layer for layer, sparse in enumerate(config.moe_layers) if sparse]
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        rows = [self.layers.index(router.layer) for router in self.routers]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=mesh.device)

    def begin(self) -> None:
        """Before the first microbatch of a step: nothing is counted yet."""
        for router in self.routers:
            router.begin_step()

    def end(self, tokens: int) -> torch.Tensor:
        """The table of the step `[layers, 2 E + losses]`, fp64; of so many tokens in the global batch.

        Moves the routers' biases. Communicates the table over all ranks.
        """
        experts, mesh = self.config.num_experts, self.mesh
        width = 2 * experts + len(self.losses)
        table = torch.zeros(len(self.layers), width, dtype=torch.float64, device=mesh.device)
        if self.routers and (self.config.sequence_parallel or mesh.tp.rank == 0):  # else each token tp times
            kinds = [[getattr(r, name) for r in self.routers] for name in ("counts", "dropped", "values")]
            mine = torch.cat([torch.stack(each).double() for each in kinds], dim=1)
            mine[:, 2 * experts :] /= tokens
            table.index_copy_(0, self.rows, mine)
        all_reduce_(table, mesh.world)
        if self.routers and self.config.moe_router_enable_expert_bias:
            biases = [router.expert_bias for router in self.routers]
            moved, counts = torch.stack(biases), table[:, :experts].index_select(0, self.rows)
            update_expert_bias(moved, counts, self.config.moe_router_bias_update_rate)
            torch._foreach_copy_(biases, list(moved))
        return table

    def numbers(self, row: list[float]) -> dict[str, float]:
        """Of a layer: the busiest expert's tokens over the mean, the share of tokens dropped, the losses."""
        experts = self.config.num_experts
        tokens, dropped, losses = row[:experts], row[experts : 2 * experts], row[2 * experts :]
        total = max(sum(tokens), 1.0)
        found = {
            "moe_load_imbalance": max(tokens) * experts / total,
            "moe_dropped_share": sum(dropped) / total,
        }
        return found | dict(zip(self.losses, losses, strict=True))

    def means(self, table: list[list[float]]) -> dict[str, float]:
        """The same of the model, the mean over its layers with experts; `table` on the host."""
        each = [self.numbers(row) for row in table]
        return {kind: sum(found[kind] for found in each) / len(each) for kind in each[0]}

    def by_layer(self, table: list[list[float]]) -> dict[str, Any]:
        """The same under layer/kind, and tokens, those of each expert."""
        told: dict[str, Any] = {}
        for layer, row in zip(self.layers, table, strict=True):
            name = f"decoder.layers.{layer}"
            told[f"{name}/tokens"] = [round(count) for count in row[: self.config.num_experts]]
            told |= {f"{name}/{kind}": x for kind, x in self.numbers(row).items()}
        return told
