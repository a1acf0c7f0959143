"""Counters of a training step on the device, as a table for the whole model: FP8 casts, load of experts.

    step t        before_step      the counts are zero
                  ...              forward and backward of all microbatches
                  before_update    one or two all-reduces over all ranks give the table
    step t + 1    after_step       the table is on the host with the other numbers of step t

Fp8Stats, in every N-th step (--log-fp8-stats N): a row for each tensor x, w, g of a layer

    scale        factor of the values; the smallest one if rows, blocks or microbatches have several
    amax         the largest |x|; infinite if there was a NaN
    saturated    share of values above the format's largest, which they became
    underflow    share of nonzero values that became zero

Casts of an evaluation do not count, nor does the first forward of a layer that is recomputed. Counts are of
the rowwise cast: with scales per row or block the columnwise copy loses other values, about as many. A tensor
replicated over tp counts once per rank, which changes no share. All experts of a layer count as one tensor,
padding included. Such a step costs three passes over the values cast (blocks two more in fp32) and memory for
one |x|; weights that the optimizer casts are gathered in 16 bits and cast again.

ExpertLoad, in every step: a row for each layer with experts; a token counts for each of its experts

    tokens of each expert [E] | dropped ones [E] | losses of the router, each the mean of the batch
"""

from typing import Any

import torch

from nanomegatron.batch import Batch
from nanomegatron.comm import all_gather_text, all_reduce_
from nanomegatron.fp8 import E4M3, ROLES
from nanomegatron.ops.fp8_cast import Fp8Matrix, fp8_amax, fp8_decode, fp8_limit, fp8_scale
from nanomegatron.report.steps import StepReport
from nanomegatron.router import loss_weights
from nanomegatron.step import GlobalBatch, Numbers, Observer, Training

KINDS = ("scale", "amax", "saturated", "underflow")
ROUNDING = 1.0 + 2.0**-20  # rounding may put the largest value times its scale slightly above the limit


def cast_losses(x: torch.Tensor, row: Fp8Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the values of x `[m, k]` that saturated in its cast, and those that became zero -> 0-d, 0-d"""
    top, scale_inv = torch.finfo(row.data.dtype).max * ROUNDING, row.scale_inv
    if scale_inv.shape in ((), (len(x), 1)):
        bound = (scale_inv * top).view(-1, 1)
    else:
        bound = fp8_decode(Fp8Matrix(scale_inv.new_full((1, 1), top).expand(x.shape), scale_inv))
    zeros = (row.data.view(torch.uint8) & 0x7F) == 0
    return (x.abs() > bound).sum(), (zeros & (x != 0)).sum()


class Fp8Stats(Observer):
    """Counts of the casts of every N-th step, in all FP8 layers of all pipeline stages.

    Built on every rank after its layers; communicates the layers' names over pp, and waits for them.
    """

    def __init__(self, run: Training) -> None:
        scales = run.model.scales
        pp = run.mesh.pp
        self.run = run
        self.scales = scales
        texts = all_gather_text("\n".join(scales.layers), pp, scales.amax_history.device)
        names = [text.splitlines() for text in texts]
        self.names = [name for stage in names for name in stage]
        first = len(ROLES) * sum(map(len, names[: pp.rank]))
        self.mine = slice(first, first + len(ROLES) * len(scales.layers))

    def before_step(self, batch: GlobalBatch, microbatches: list[Batch]) -> None:
        if batch.iteration % self.run.config.run.log_fp8_stats == 0:
            self.run.buckets.wait_params()  # the weights, which are cast again to be counted
            self.begin()

    def before_update(self) -> Numbers:
        return {"fp8": self.end_counting()} if self.scales.stats_hook else {}

    def after_step(self, step: StepReport) -> None:
        table = step.numbers.pop("fp8", None)
        if table is not None:
            batch = step.batch
            self.run.log.details("fp8", batch.iteration, batch.end, self.by_name(table))

    def begin(self) -> None:
        """Start counting; clears the weight cache, so that the casts of weights are counted too."""
        tensors = len(ROLES) * len(self.names)
        self.amax = self.scales.amax_history.new_zeros(tensors)
        self.counts = self.amax.new_zeros(3, tensors, dtype=torch.float64)  # values, saturated, underflow
        self.scales.stats_hook = self._record
        self.scales.clear_weight_cache()

    def _record(self, slot: int, x: torch.Tensor, row: Fp8Matrix) -> None:
        at = self.mine.start + slot
        fp8_amax(x, self.amax[at])
        for count, more in zip(self.counts[:, at], (x.numel(), *cast_losses(x, row)), strict=True):
            count.add_(more)

    def end_counting(self) -> torch.Tensor:
        """Return the table `[layers * 3, 4]` fp64, a column for each of KINDS. Call before Scales.end_step.

        Does two small all-reduces over world.
        """
        scales, recipe = self.scales, self.scales.recipe
        scales.stats_hook = None
        most = self.amax.new_zeros(2, len(self.amax))
        most[0] = self.amax.nan_to_num(torch.inf, torch.inf)
        if recipe.quantizer_class.keeps_history and scales.has_history:  # else the scales of this step's amax
            most[1, self.mine] = scales.scale
        amax, scale = all_reduce_(most, self.run.mesh.world, "max")
        values, saturated, underflow = all_reduce_(self.counts, self.run.mesh.world)
        for i, (role, dtype) in enumerate(zip(ROLES, (E4M3, E4M3, recipe.gradient), strict=True)):
            of = slice(i, None, len(ROLES))
            now = fp8_scale(amax[of], recipe.limit(dtype), recipe.quantizer_class.power_of_two)[0]
            if role == "g":  # gradients of experts are in E4M3, in any format
                ratio = fp8_limit(recipe.gradient) / fp8_limit(E4M3)
                now /= now.new_tensor([ratio if ".experts." in name else 1.0 for name in self.names])
            scale[of] = scale[of].where(scale[of] > 0, now)
        values.clamp_(min=1.0)
        return torch.stack((scale.double(), amax.double(), saturated / values, underflow / values), dim=1)

    def by_name(self, table: list[list[float]]) -> dict[str, float]:
        """Return the table of `end_counting`, on the host, as {"layer/tensor/kind": number}."""
        tensors = [f"{name.removesuffix('.weight')}/{role}" for name in self.names for role in ROLES]
        rows = zip(tensors, table, strict=True)
        return {f"{t}/{kind}": x for t, row in rows for kind, x in zip(KINDS, row, strict=True)}


class ExpertLoad(Observer):
    """The counts of all routers of all pipeline stages, in every step."""

    def __init__(self, run: Training) -> None:
        self.run = run
        self.config = run.config.model
        self.mesh = mesh = run.mesh
        self.losses = tuple(loss_weights(self.config))
        self.layers = [layer for layer, sparse in enumerate(self.config.moe_layers) if sparse]
        self.routers = run.model.routers
        rows = [self.layers.index(router.layer) for router in self.routers]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=mesh.device)

    def before_step(self, batch: GlobalBatch, microbatches: list[Batch]) -> None:
        self.tokens = batch.tokens

    def before_update(self) -> Numbers:
        return {"experts": self.table(self.tokens)}

    def after_step(self, step: StepReport) -> None:
        """Put the means of all layers among the numbers that are logged, each layer's into a file."""
        table = step.numbers.pop("experts")
        step.numbers |= self.means(table)
        if self.run.config.run.moe_per_layer_logging:
            batch = step.batch
            self.run.log.details("experts", batch.iteration, batch.end, self.by_name(table))

    def table(self, tokens: int) -> torch.Tensor:
        """Return the table of the step `[layers, 2 E + losses]` fp64. tokens: those of the global batch.

        All-reduces the table over world.
        """
        experts, mesh = self.config.num_experts, self.mesh
        width = 2 * experts + len(self.losses)
        table = torch.zeros(len(self.layers), width, dtype=torch.float64, device=mesh.device)
        if self.routers and (self.config.sequence_parallel or mesh.tp.rank == 0):  # else counted tp times
            kinds = [[getattr(r, name) for r in self.routers] for name in ("counts", "dropped", "values")]
            mine = torch.cat([torch.stack(each).double() for each in kinds], dim=1)
            mine[:, 2 * experts :] /= tokens
            table.index_copy_(0, self.rows, mine)
        return all_reduce_(table, mesh.world)

    def numbers(self, row: list[float]) -> dict[str, float]:
        """Return for a layer: tokens of the busiest expert over the mean, share of dropped tokens, losses."""
        experts = self.config.num_experts
        tokens, dropped, losses = row[:experts], row[experts : 2 * experts], row[2 * experts :]
        total = max(sum(tokens), 1.0)
        return {
            "moe_load_imbalance": max(tokens) * experts / total,
            "moe_dropped_share": sum(dropped) / total,
            **dict(zip(self.losses, losses, strict=True)),
        }

    def means(self, table: list[list[float]]) -> dict[str, float]:
        """Return the means of `numbers` over all layers with experts. table: on the host."""
        each = [self.numbers(row) for row in table]
        return {kind: sum(found[kind] for found in each) / len(each) for kind in each[0]}

    def by_name(self, table: list[list[float]]) -> dict[str, Any]:
        """Return `numbers` of each layer as {"layer/kind": x}; "layer/tokens": the tokens of each expert."""
        found: dict[str, Any] = {}
        for layer, row in zip(self.layers, table, strict=True):
            name = f"decoder.layers.{layer}"
            found[f"{name}/tokens"] = [round(count) for count in row[: self.config.num_experts]]
            found |= {f"{name}/{kind}": x for kind, x in self.numbers(row).items()}
        return found
