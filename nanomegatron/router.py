"""The router: chooses the experts of each token and their weights, and keeps the experts' load balanced.

Tests: tests/test_router.py. Page: docs/moe.md.

    x [t, h] -> logits x W^T + b [t, E] -> ids of the k best, probs [t, k]

    scores                              the best by               probs of the chosen
    softmax                             logits                    softmax of their k logits         Mixtral
    softmax, moe_router_pre_softmax     softmax(logits)           as they are                       Qwen
    sigmoid                             sigmoid(logits) + bias    sigmoid / sum of the k, if k > 1  DeepSeek

A copy is one token for one of its k experts. b is there where linear layers have biases; that of DeepSeek's
choice is another one.

Losses, each with a weight; microbatches are weighted by their tokens. P_e is expert e's mean score over a
microbatch's tokens on tp and cp, f_e its share of these tokens' k choices (the f_e sum to 1)

    aux_loss    E sum f_e P_e
    z_loss      mean of logsumexp(logits)^2

Only P has a gradient. Each rank differentiates its own tokens' share of P and sums f over the ranks, so the
ranks' gradients add up to the whole under any tp, cp and pp (docs/moe.md: what else the losses depend on).
As in Megatron, tokens that the main loss masks take part, and f counts the k best scores before the bias.
Not counted are padding of packs and forwards without autograd, which are recomputed with it.

Slots, which `pick_variants.py` fills with whole functions of `variants/`: `compute_logits` (input jitter,
forced balance), `choose_experts` (sinkhorn), `best_experts` (of groups), `drop` (a capacity), rows of
`loss_functions`. On GPUs `gate` is that of `fast/split_gate.py`, unless --no-fast-paths.
(Switch, arXiv 2101.03961; z-loss 2202.08906; bias 2408.15664)
"""

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from nanomegatron.batch import Batch
from nanomegatron.comm import all_reduce, all_reduce_
from nanomegatron.config.model import TransformerConfig
from nanomegatron.mesh import Mesh
from nanomegatron.param import Init, accumulate, add_product, replicated, slot


class RouterOutput(NamedTuple):
    """The experts chosen for this rank's tokens, of all E experts."""

    probs: torch.Tensor  # fp32 [t, k]
    ids: torch.Tensor  # int32 [t, k], -1 for a dropped copy
    chosen: torch.Tensor  # int64 [t, k], the ids before dropping
    logits: torch.Tensor  # fp32 [t, E]
    token_mask: torch.Tensor | None  # bool [t, 1]: false for padding of a pack; None: all true


class LossInput(NamedTuple):
    """What the losses are computed from, of this rank's tokens."""

    scores: torch.Tensor  # fp32 [t, E], zeros for padding of a pack
    top: torch.Tensor  # int64 [t, k], the experts with the best scores
    logits: torch.Tensor  # fp32 [t, E]
    token_mask: torch.Tensor | None  # as in RouterOutput
    columns: int  # samples of the microbatch; the tokens are [s, columns]


class GateFunction(torch.autograd.Function):
    """x W^T, multiplied in `dtype`; x is saved in its own dtype. x `[t, h]`, weight `[E, h]` -> `[t, E]`"""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: a saved-tensor hook would return it without its bucket
        y = gate_matmul(x, weight.t(), dtype)
        return y.float() if dtype == torch.float64 else y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors

        def write(out: torch.Tensor, beta: int) -> None:
            add_product(out, grad, x.to(grad.dtype), beta)

        dx = (grad @ ctx.weight.to(grad.dtype)).to(x.dtype)
        return dx, accumulate(ctx.weight, write), None


def gate_matmul(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b in `dtype`. a `[m, k]`, b `[k, n]` -> `[m, n]`

    A GPU's matmul of 16-bit inputs needs no copies of them for fp32.
    """
    if a.is_cuda and dtype == torch.float32 and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def compute_logits(router: "Router", x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return x W^T + b. x `[t, h]` -> fp32 `[t, E]`; batch is for variants."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(router.config.moe_router_dtype, x.dtype)
    logits = router.gate(x, router.weight, dtype).float()
    return logits if router.bias is None else logits + router.bias.float()


def choose_experts(
    router: "Router", logits: torch.Tensor, batch: Batch, token_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts per token. logits fp32 `[t, E]` -> their weights probs `[t, k]`, ids int64 `[t, k]`

    The router's bias `[E]` is added to scores for the choice only. batch and token_mask `[t, 1]`, which is
    false for padding, are for variants.
    """
    config = router.config
    bias = router.expert_bias
    sigmoid = config.moe_router_score_function == "sigmoid"
    if sigmoid:
        scores = logits.sigmoid()
    elif config.moe_router_pre_softmax:
        scores = logits.softmax(-1)
    else:
        scores = logits
    ids = router.best_experts(scores if bias is None else scores + bias, config)
    probs = scores.gather(1, ids)
    if sigmoid and config.moe_router_topk > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    elif not sigmoid and not config.moe_router_pre_softmax:
        probs = probs.softmax(-1)
    return probs * (config.moe_router_topk_scaling_factor or 1.0), ids


@torch.no_grad()
def best_experts(scores: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return the k experts with the best scores. scores `[t, E]` -> ids `[t, k]`"""
    return scores.topk(config.moe_router_topk).indices


def aux_loss(router: "Router", given: LossInput) -> torch.Tensor:
    """Return this rank's part of E sum f_e P_e times the microbatch's tokens; all-reduces f's counts `[E]`

    given: of this rank's tokens -> `[]`
    """
    counts = count_copies(given.top, given.scores.shape[1], given.token_mask)
    # without sequence parallelism tp times the counts: tp ranks have the same tokens
    return load_loss(given.scores, all_reduce(counts, router.mesh.tp_cp))


def z_loss(router: "Router", given: LossInput) -> torch.Tensor:
    """Return the sum of logsumexp(logits)^2 over this rank's tokens -> `[]`"""
    squares = given.logits.logsumexp(-1, keepdim=True).square()
    return (squares if given.token_mask is None else squares * given.token_mask).sum()


class Router(nn.Module):
    """Chooses the experts of this rank's tokens. x `[t, h]` -> probs fp32 `[t, k]`, ids int32 `[t, k]`

    counts, dropped     int64 `[E]`: this rank's copies since `begin_step`, and how many of them were dropped
    values              `[len(losses)]`: this rank's part of each loss since then; over all microbatches and
                        ranks they add up to the mean loss times the tokens of the global batch
    expert_bias         `[E]`, or None: `move_expert_biases` changes it between steps

    In training aux_loss all-reduces counts `[E]` over tp and cp. Slots stand first.
    """

    gate: Callable[..., torch.Tensor] = slot(GateFunction.apply)
    compute_logits: Callable[..., torch.Tensor] = slot(compute_logits)
    choose_experts: Callable[..., tuple[torch.Tensor, torch.Tensor]] = slot(choose_experts)
    best_experts: Callable[..., torch.Tensor] = slot(best_experts)
    loss_functions: ClassVar[dict[str, Callable]] = {"aux_loss": aux_loss, "z_loss": z_loss}
    drop: Callable[..., torch.Tensor] | None = None  # (probs, chosen, config) -> ids, -1 for a dropped copy
    has_variants = False  # whether `pick_variants` has filled them

    def __init__(self, config: TransformerConfig, layer: int, mesh: Mesh, init: Init) -> None:
        super().__init__()
        experts = config.num_experts
        self.config = config
        self.layer = layer
        self.mesh = mesh
        self.weight = replicated(
            init.at("weight"), (experts, config.hidden_size), mesh.tp, partial_grad=config.sequence_parallel
        )
        self.bias = None
        if not config.disable_bias_linear:  # drawn like the weight, as Megatron does
            self.bias = replicated(init.at("bias"), (experts,), mesh.tp, config.sequence_parallel)
        self.losses = loss_weights(config)
        bias = torch.zeros(experts, device=init.device) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        # whether the chosen experts are those with the best scores, which losses count
        self.chooses_best = bias is None and not config.moe_router_group_topk
        for name in ("counts", "dropped"):
            zeros = torch.zeros(experts, dtype=torch.int64, device=init.device)
            self.register_buffer(name, zeros, persistent=False)
        self.register_buffer("values", torch.zeros(len(self.losses), device=init.device), persistent=False)

    def states(self) -> dict[str, torch.Tensor]:
        """Return the expert bias for a checkpoint, {global name: view}; {} without one -> `[E]`"""
        name = self.weight.spec.name.removesuffix(".weight")
        return {} if self.expert_bias is None else {f"{name}.expert_bias": self.expert_bias}

    def begin_step(self) -> None:
        """Zero the counts, before the first microbatch of a step."""
        for name, buffer in self.named_buffers():
            if name != "expert_bias":
                buffer.zero_()

    def forward(self, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses read the batch's aux_scale, packs its residual_positions."""
        output = self.choose(x, batch)
        return self.balance(output, batch), output.ids

    def choose(self, x: torch.Tensor, batch: Batch) -> RouterOutput:
        """First half of the forward: choose experts for x `[t, h]`.

        Raises RuntimeError if a flag asks for a variant that `pick_variants` has not set.
        """
        self.config.check_variants("router", self.has_variants)
        token_mask = None
        if batch.cu_seqlens is not None:
            real = batch.residual_positions >= 0
            token_mask = real.repeat_interleave(len(x) // len(real), output_size=len(x))[:, None]
        logits = self.compute_logits(self, x, batch)
        probs, chosen = self.choose_experts(self, logits, batch, token_mask)
        ids = chosen if self.drop is None else self.drop(probs, chosen, self.config)
        return RouterOutput(probs, ids.int(), chosen, logits, token_mask)

    def balance(self, output: RouterOutput, batch: Batch) -> torch.Tensor:
        """Second half: in training count the copies and attach the losses to probs -> `[t, k]`"""
        probs, ids, chosen, _, token_mask = output
        if not (self.training and torch.is_grad_enabled()):
            return probs
        self.counts += count_copies(chosen, self.config.num_experts, token_mask)
        if self.drop is not None:
            lost = ids < 0 if token_mask is None else (ids < 0) & token_mask
            self.dropped += count_copies(chosen, self.config.num_experts, lost)
        if not self.losses or batch.aux_scale is None:
            return probs
        return AttachLoss.apply(probs, self.weighted_losses(output, batch), batch.aux_scale)

    def weighted_losses(self, output: RouterOutput, batch: Batch) -> torch.Tensor:
        """This rank's part of the weighted sum of all losses, times the microbatch's tokens -> `[]`"""
        scores = loss_scores(output.logits, self.config)
        top = output.chosen
        if not self.chooses_best:
            top = scores.topk(self.config.moe_router_topk).indices
        if output.token_mask is not None:
            scores = scores * output.token_mask
        given = LossInput(scores, top, output.logits, output.token_mask, len(batch.sample_ids))
        values = [self.loss_functions[name](self, given) for name in self.losses]
        self.values += torch.stack(values).detach()
        return sum(coeff * value for coeff, value in zip(self.losses.values(), values, strict=True))


def loss_scores(logits: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """The scores of all experts, which add up to 1, as losses take them. logits fp32 `[t, E]` -> `[t, E]`"""
    if config.moe_router_score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def load_loss(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of E sum f_e P_e, times all ranks' tokens; by columns, it is their mean.

    scores `[t, E]` of its tokens, zeros for padding; counts `[E]` or `[columns, E]`: copies on all ranks
    -> `[]`
    """
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return counts.shape[-1] * (share * scores.view(-1, *counts.shape).sum(0)).sum()


class AttachLoss(torch.autograd.Function):
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


def count_copies(ids: torch.Tensor, experts: int, of: torch.Tensor | None = None) -> torch.Tensor:
    """Count the copies for each expert. ids `[t, k]` -> int64 `[E]`

    of `[t, k]` or `[t, 1]`: only copies where it is true count.
    """
    ones = torch.ones_like(ids) if of is None else of.to(ids.dtype).expand_as(ids)
    return ids.new_zeros(experts).scatter_add_(0, ids.flatten(), ones.flatten())


def loss_weights(config: TransformerConfig) -> dict[str, float]:
    """Return the router losses in use, {name: weight}."""
    kinds = [*config.moe_router_load_balancing_type, "z_loss"]
    weights = zip(kinds, [*config.moe_aux_loss_coeff, config.moe_z_loss_coeff], strict=True)
    return {kind: weight for kind, weight in weights if weight and kind not in ("sinkhorn", "none")}


def expert_capacity(tokens: int, config: TransformerConfig) -> int:
    """Return how many of a rank's `tokens` tokens an expert takes at most, with a capacity factor."""
    return math.ceil(tokens * config.moe_router_topk / config.num_experts * config.moe_expert_capacity_factor)


def kept_tokens(routers: list[Router]) -> torch.Tensor:
    """Return the copies that all ranks have sent to each expert in this step, and kept -> `[routers, E]`

    All-reduces them over dp_cp, and over tp if its ranks have different tokens.
    """
    own = torch.stack([router.counts - router.dropped for router in routers])
    if routers[0].config.sequence_parallel:  # without it tp ranks have the same tokens
        own = all_reduce_(own, routers[0].mesh.tp)
    return all_reduce_(own, routers[0].mesh.dp_cp)


def move_expert_biases(routers: list[Router], counts: torch.Tensor) -> None:
    """Raise the biases of experts with fewer copies than the mean in the last step; lower those with more.

    counts `[routers, E]`: copies on all ranks, but for those that were dropped.
    """
    biases = [router.expert_bias for router in routers]
    rate = routers[0].config.moe_router_bias_update_rate
    below = (counts.sum(-1, keepdim=True) - counts * counts.shape[-1]).sign()
    torch._foreach_copy_(biases, list(torch.stack(biases).add_(below, alpha=rate)))
