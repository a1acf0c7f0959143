"""The router: chooses the experts of each token and their weights, and keeps the experts' load balanced.

    x [t, h] -> logits x W^T + b [t, E] -> ids of the k best, probs [t, k] -> id -1 for copies over capacity

    scores                              the best by               probs of the chosen
    softmax                             logits                    softmax of their k logits         Mixtral
    softmax, moe_router_pre_softmax     softmax(logits)           as they are                       Qwen
    sigmoid                             sigmoid(logits) + bias    sigmoid / sum of the k, if k > 1  DeepSeek
    any, load balancing by sinkhorn     a table that gives each   softmax(logits) as they are,
                                        expert the same load      sigmoid for k = 1

A copy is one token for one of its k experts. b is there where linear layers have biases; that of DeepSeek's
choice is another one. Sinkhorn's table covers a microbatch on one replica: the tokens of all tp and cp ranks,
so it does not depend on the layout. (Megatron's covers the tokens of one rank.)

Losses, each with a weight; microbatches are weighted by their tokens. P_e is expert e's mean score over a
microbatch's tokens on tp and cp, f_e its share of these tokens' k choices (the f_e sum to 1)

    aux_loss           E sum f_e P_e                    f, P of a microbatch on one replica
    seq_aux_loss       the mean of that over samples    f, P of a sample
    global_aux_loss    E sum f_e P_e                    f of all replicas' microbatches so far in this step;
                                                        Megatron's gradient is smaller by a factor dp
    z_loss             mean of logsumexp(logits)^2

Only P has a gradient. Each rank differentiates its own tokens' share of P and sums f over the ranks, so the
ranks' gradients add up to the whole under any tp, cp and pp (docs/moe.md: what else the losses depend on).
As in Megatron, tokens that the main loss masks take part, and f counts the k best scores before bias, group
limit and drops. Not counted are padding of packs and forwards without autograd, which are recomputed with it.
(Switch, arXiv 2101.03961; z-loss 2202.08906; global balance 2501.11873; bias 2408.15664; groups 2412.19437)
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from nanomegatron.batch import Batch
from nanomegatron.comm import all_reduce
from nanomegatron.config.model import TransformerConfig
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.ops import dropout
from nanomegatron.param import Init, ParamSpec, accumulate, add_grad, add_product, new_parameter, replica

SINKHORN_ROUNDS, SINKHORN_TOLERANCE = 1000, 1e-4  # the most rounds; the mean change at which they end


def loss_weights(config: TransformerConfig) -> dict[str, float]:
    """Return the router losses in use, {name: weight}."""
    kinds = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
    found = {kind: coeff for kind, coeff in kinds if coeff and kind not in ("sinkhorn", "none")}
    return found | ({"z_loss": config.moe_z_loss_coeff} if config.moe_z_loss_coeff else {})


def choose(
    logits: torch.Tensor,
    config: TransformerConfig,
    bias: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts per token. logits fp32 `[t, E]` -> their weights probs `[t, k]`, ids int64 `[t, k]`

    bias `[E]` is added to sigmoid scores for the choice only. table `[t, E]`: the result of `sinkhorn`, which
    replaces the scores in the choice (in training); ties then go to the lower id.
    """
    k, sigmoid = config.moe_router_topk, config.moe_router_score_function == "sigmoid"
    if "sinkhorn" in config.moe_router_load_balancing_type:
        scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
        ids = (scores if table is None else table).sort(descending=True, stable=True).indices[:, :k]
        return scores.gather(1, ids), ids
    before = config.moe_router_pre_softmax
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1) if before else logits
    ids = best_experts(scores if bias is None else scores + bias, config)
    probs = scores.gather(1, ids)
    if sigmoid and k > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    elif not sigmoid and not before:
        probs = probs.softmax(-1)
    return probs * (config.moe_router_topk_scaling_factor or 1.0), ids


@torch.no_grad()
def best_experts(scores: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return the k best experts, with a group limit only of the best groups. scores `[t, E]` -> ids `[t, k]`

    A group is E / groups consecutive experts; its score is the sum of its k / limit best scores.
    """
    k, groups, limit = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    if limit:
        worth = scores.unflatten(1, (groups, -1)).topk(k // limit).values.sum(-1)
        taken = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(limit).indices, True)
        scores = scores.masked_fill(~taken.repeat_interleave(scores.shape[1] // groups, 1), -math.inf)
    return scores.topk(k).indices


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, axis: Axis, real: torch.Tensor | None = None) -> torch.Tensor:
    """Scale rows and columns of exp(logits) until all rows have one sum, and all columns another.

    logits `[t, E]` -> `[t, E]`, over the tokens of all ranks of the axis; real `[t, 1]`: false for padding.
    Each round all-reduces E numbers, and the host waits for them. A few tokens with logits far apart would
    take thousands of rounds, hence the limit. fp64: equal entries stay equal in any order of ranks' sums.
    (arXiv 2202.01169)
    """
    table, least = logits.double().softmax(-1), torch.finfo(torch.float64).tiny
    tokens = table.new_ones(len(table)) if real is None else real[:, 0].double()
    n = all_reduce(tokens.sum(), axis).clamp(min=1)
    columns = table.new_ones(table.shape[1])
    for _ in range(SINKHORN_ROUNDS):
        rows = 1 / (n * (table @ columns))
        sums = all_reduce((tokens * rows) @ table, axis)
        before, columns = columns, 1 / (len(columns) * sums.clamp(min=least))
        moved = (before - columns).abs().mean()
        if (moved / (1e-6 * columns.mean()).clamp(min=1)).item() <= SINKHORN_TOLERANCE:  # large: 1e-10 x
            break
    return (columns * table * rows[:, None]).float()


def expert_capacity(tokens: int, config: TransformerConfig) -> int | None:
    """Return how many of a rank's `tokens` tokens an expert takes at most; None: no limit."""
    factor = config.moe_expert_capacity_factor
    return factor and math.ceil(tokens * config.moe_router_topk / config.num_experts * factor)


@torch.no_grad()
def drop(probs: torch.Tensor, ids: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return the ids, with -1 for copies over their expert's capacity. probs, ids `[t, k]` -> `[t, k]`

    An expert keeps the copies with the largest probs, or with the policy "position" the first tokens'.
    """
    t, rank, capacity = len(ids), probs, expert_capacity(len(ids), config)
    if capacity is None or capacity >= t:
        return ids
    if config.moe_token_drop_policy == "position":
        rank = torch.arange(t, 0, -1.0, device=ids.device)[:, None].expand_as(probs)
    table = probs.new_full((t, config.num_experts), -math.inf).scatter(1, ids, rank)
    kept = torch.zeros_like(table, dtype=torch.bool).scatter(0, table.topk(capacity, dim=0).indices, True)
    return ids.where(kept.gather(1, ids), -1)


def count_copies(
    ids: torch.Tensor, experts: int, columns: int = 1, of: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the copies for each expert, by column of the batch. ids `[t, k]` -> int64 `[columns, E]`

    The t tokens are `[s, columns]`, flattened. of `[t, k]` or `[t, 1]`: only copies where it is true count.
    """
    place = torch.arange(len(ids), device=ids.device)[:, None] % columns * experts + ids
    ones = torch.ones_like(ids) if of is None else of.to(ids.dtype).expand_as(ids)
    counts = ids.new_zeros(columns * experts).scatter_add_(0, place.flatten(), ones.flatten())
    return counts.view(columns, experts)


def load_loss(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of E sum f_e P_e, the mean over the batch's columns, times all ranks' tokens.

    scores `[t, E]` of its tokens, zeros for padding; counts `[columns, E]`: copies on all ranks -> `[]`
    """
    columns, experts = counts.shape
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return experts * (share * scores.view(-1, columns, experts).sum(0)).sum()


def z_loss(logits: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Sum logsumexp(logits)^2 over tokens, or over real `[t, 1]` ones. logits `[t, E]` -> `[]`"""
    squares = logits.logsumexp(-1, keepdim=True).square()
    return (squares if real is None else squares * real).sum()


def mm_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of 16-bit matrices, at their speed on GPUs. a `[m, k]`, b `[k, n]` -> fp32 `[m, n]`"""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class GateFunction(torch.autograd.Function):
    """x W^T, multiplied in `dtype`; x is saved in its own dtype. x `[t, h]`, weight `[E, h]` -> `[t, E]`"""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: a saved-tensor hook would return it without its bucket
        if dtype == torch.float32 != x.dtype:
            return mm_in_fp32(x, weight.t())
        y = x.to(dtype) @ weight.to(dtype).t()
        return y.float() if dtype == torch.float64 else y  # the gradient, too, has this dtype

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if grad.dtype == torch.float32 and x.dtype == torch.bfloat16:  # as a sum of three bf16 parts
            summands = []
            for _ in range(3):
                summands.append(grad.bfloat16())
                grad = grad - summands[-1]
            parts = torch.cat(summands, dim=1)

            def write_sum(out: torch.Tensor, beta: int) -> None:
                add_grad(out, mm_in_fp32(parts.t(), x).view(3, *weight.shape).sum(0), beta)

            return parts @ weight.repeat(3, 1), accumulate(weight, write_sum), None

        def write(out: torch.Tensor, beta: int) -> None:
            add_product(out, grad, x.to(grad.dtype), beta)

        return (grad @ weight.to(grad.dtype)).to(x.dtype), accumulate(weight, write), None


class LossFunction(torch.autograd.Function):
    """Returns probs `[t, k]` -> `[t, k]` unchanged, with `loss` attached for the backward.

    loss `[]` gets the gradient scale `[]` there.
    """

    @staticmethod
    def forward(ctx, probs: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale.to(loss.dtype)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.scale, None


class Choice(NamedTuple):
    """The experts chosen for this rank's tokens, of all E experts."""

    probs: torch.Tensor  # fp32 [t, k]
    ids: torch.Tensor  # int32 [t, k], -1 for a dropped copy
    best: torch.Tensor  # int64 [t, k], the ids before dropping
    logits: torch.Tensor  # fp32 [t, E]
    real: torch.Tensor | None  # bool [t, 1]: false for padding of a pack; None: all true


class Router(nn.Module):
    """Chooses the experts of this rank's tokens. x `[t, h]` -> probs fp32 `[t, k]`, ids int32 `[t, k]`

    counts, dropped     int64 `[E]`: this rank's copies since `begin_step`, and how many of them were dropped
    values              `[len(losses)]`: this rank's part of each loss since then; over all microbatches and
                        ranks they add up to the mean loss times the tokens of the global batch
    expert_bias         `[E]`, or None: `move_expert_biases` changes it between steps

    In training each loss but z_loss all-reduces counts, at most `[b, E]`, over tp and cp or all replicas, and
    sinkhorn `[E]` in each round.
    """

    def __init__(self, config: TransformerConfig, layer: int, mesh: Mesh, init: Init) -> None:
        super().__init__()
        experts, h = config.num_experts, config.hidden_size
        self.config, self.layer, self.mesh = config, layer, mesh
        # over which tp ranks' tokens differ: without sequence parallelism they are the same
        self.tokens_axis = mesh.tp if config.sequence_parallel else Axis.single("tp")
        part = replica(f"{init.name}.weight", (experts, h), mesh.tp, partial=config.sequence_parallel)
        self.weight = new_parameter(ParamSpec((part,), (experts, h)), init)
        self.bias = None
        if not config.disable_bias_linear:  # drawn like the weight, as Megatron does
            part = replica(f"{init.name}.bias", (experts,), mesh.tp, partial=config.sequence_parallel)
            self.bias = new_parameter(ParamSpec((part,), (experts,), decay=False), init)
        self.losses = loss_weights(config)
        bias = torch.zeros(experts, device=init.device) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        for name in ("counts", "dropped", "global_counts"):  # the last: of all replicas, for global_aux_loss
            zeros = torch.zeros(experts, dtype=torch.int64, device=init.device)
            self.register_buffer(name, zeros, persistent=False)
        self.register_buffer("values", torch.zeros(len(self.losses), device=init.device), persistent=False)

    def states(self) -> dict[str, torch.Tensor]:
        """Return the expert bias for a checkpoint, {global name: view}; {} without one -> `[E]`"""
        name = self.weight.spec.name.removesuffix(".weight")
        return {} if self.expert_bias is None else {f"{name}.expert_bias": self.expert_bias}

    def begin_step(self) -> None:
        """Zero the counts, before the first microbatch of a step."""
        torch._foreach_zero_([self.counts, self.dropped, self.global_counts])
        self.values.zero_()

    def forward(self, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses read the batch's aux_scale and sample_ids, packs and jitter its residual_positions."""
        choice = self.choose(x, batch)
        return self.balance(choice, batch), choice.ids

    def choose(self, x: torch.Tensor, batch: Batch) -> Choice:
        """First half of the forward: choose experts for x `[t, h]` and drop copies over their capacity."""
        config, t = self.config, len(x)
        real, table = None, None
        if batch.cu_seqlens is not None:
            positions = batch.residual_positions
            real = (positions >= 0).repeat_interleave(t // len(positions), output_size=t)[:, None]
        logits = self._logits(x, batch)
        if "sinkhorn" in config.moe_router_load_balancing_type and batch.dropout_seed is not None:
            table = sinkhorn(logits, self.mesh.tp_cp, real)
        probs, best = choose(logits, config, self.expert_bias, table)
        return Choice(probs, drop(probs, best, config).int(), best, logits, real)

    def balance(self, choice: Choice, batch: Batch) -> torch.Tensor:
        """Second half: in training count the copies and attach the losses to probs -> `[t, k]`"""
        probs, ids, best, _, real = choice
        if not (self.training and torch.is_grad_enabled()):
            return probs
        self.counts += count_copies(best, self.config.num_experts, of=real)[0]
        if self.config.moe_expert_capacity_factor:
            lost = ids < 0 if real is None else (ids < 0) & real
            self.dropped += count_copies(best, self.config.num_experts, of=lost)[0]
        if not self.losses or batch.aux_scale is None:
            return probs
        return LossFunction.apply(probs, self._loss(choice, batch), batch.aux_scale)

    def _logits(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The router's logits, of jittered x or with forced balance if configured -> fp32 `[t, E]`"""
        config, site = self.config, -1 - self.config.num_layers - self.layer  # after attention's sites

        def jitter(x: torch.Tensor, eps: float) -> torch.Tensor:
            place = batch.dropout_seed, site, batch.residual_positions, batch.sample_ids
            rows = x.view(len(batch.residual_positions), -1, x.shape[1])
            return dropout.jitter(rows, eps, *place).view_as(x)

        if config.moe_input_jitter_eps and batch.dropout_seed is not None:
            x = jitter(x, config.moe_input_jitter_eps)
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(config.moe_router_dtype, x.dtype)
        logits = GateFunction.apply(x, self.weight, dtype).float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        if config.moe_router_force_load_balancing and batch.dropout_seed is not None:
            logits = logits + (jitter(torch.ones_like(logits), 1.0) - logits).detach()
        return logits

    def _loss(self, choice: Choice, batch: Batch) -> torch.Tensor:
        """This rank's part of the weighted sum of all losses, times the microbatch's tokens."""
        config, (_, _, ids, logits, real) = self.config, choice
        columns = len(batch.sample_ids) if "seq_aux_loss" in self.losses else 1
        if config.moe_router_score_function == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        if self.expert_bias is not None or config.moe_router_group_topk:
            ids = scores.topk(config.moe_router_topk).indices
        scores = scores if real is None else scores * real
        counts, values = count_copies(ids, config.num_experts, columns, real), []
        for name in self.losses:
            if name == "z_loss":
                values.append(z_loss(logits, real))
                continue
            each = counts if name == "seq_aux_loss" else counts.sum(0, keepdim=True)
            if name == "global_aux_loss":
                self.global_counts += all_reduce(all_reduce(each[0], self.tokens_axis), self.mesh.dp_cp)
                each = self.global_counts[None]
            else:  # without sequence parallelism tp times the counts: tp ranks have the same tokens
                each = all_reduce(each, self.mesh.tp_cp)
            values.append(load_loss(scores, each))
        self.values += torch.stack(values).detach()
        return sum(coeff * value for coeff, value in zip(self.losses.values(), values, strict=True))


def move_expert_biases(routers: list[Router], counts: torch.Tensor) -> None:
    """Raise the biases of experts with fewer copies than the mean in the last step; lower those with more.

    counts `[routers, E]`: copies on all ranks, but for those that were dropped.
    """
    if routers:
        biases = [router.expert_bias for router in routers]
        rate = routers[0].config.moe_router_bias_update_rate
        below = (counts.sum(-1, keepdim=True) - counts * counts.shape[-1]).sign()
        torch._foreach_copy_(biases, list(torch.stack(biases).add_(below, alpha=rate)))
