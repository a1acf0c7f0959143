"""The face of the kernels: one function an op, written in plain torch.

These few lines a function are the documentation of each op, its path on a CPU and the oracle that a kernel
is tested against. `python -m nanomegatron.ops` prints which path each op takes here, and why.

Letters in shapes: s sequence, b batch, h hidden, n heads, d head size, f ffn, V vocabulary.
"""

import torch
import torch.nn.functional as F

OPS = (
    "rms_norm",
    "layer_norm",
    "rope",
    "swiglu",
    "gelu",
    "scaled_softmax",
    "dropout",
    "cross_entropy",
    "adamw_",
)


def paths(device: torch.device) -> dict[str, str]:
    """For every op the implementation that runs on `device`."""
    fused = {"rms_norm", "layer_norm", "adamw_"}  # one kernel of torch's own instead of several
    return {op: f"torch {'fused' if op in fused else 'reference'} on {device.type}" for op in OPS}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, statistics in fp32. `[..., h] -> [..., h]`"""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim. `[..., h] -> [..., h]`"""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate; up]. `[..., 2f] -> [..., f]` (arXiv 2002.05202)"""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form, as GPT-2 and Megatron's fused path have it. `[..., f] -> [..., f]`"""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2. `[..., f] -> [..., f]` (arXiv 2109.08668)"""
    return F.relu(x).square()


def scaled_softmax(
    scores: torch.Tensor, scale: float, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scores * scale) over keys, in fp32; hidden: where a query does not see a key, broadcast.

    `[b, n, s, t]` -> the same in the dtype of the scores, and the log-sum-exp `[b, n, s]` in fp32.
    """
    scores32 = scores.float() * scale
    if hidden is not None:
        scores32 = scores32.masked_fill(hidden, float("-inf"))
    return scores32.softmax(dim=-1).type_as(scores), scores32.detach().logsumexp(dim=-1)


def dropout(
    x: torch.Tensor, p: float, seed: int, site: int, positions: torch.Tensor, sample_ids: torch.Tensor
) -> torch.Tensor:
    """Dropout whose mask is a function of (seed, sample, site, position, feature) and of nothing else.

    x: `[s, b, h]`, positions: `[s]`, sample_ids: `[b]`. The same under any layout and when recomputed; `site`
    numbers the places in the model. 24 bits decide, so p is met to 6e-8.
    """
    return _drop(x, p, _hashed(seed, site, sample_ids, positions[:, None]))


def attention_dropout(
    probs: torch.Tensor,
    p: float,
    seed: int,
    site: int,
    positions: torch.Tensor,
    sample_ids: torch.Tensor,
    heads: torch.Tensor,
) -> torch.Tensor:
    """Dropout of attention probabilities, a function of (seed, site, sample, head, query, key) alone.

    probs: `[b, n, s, t]`, positions of the queries: `[s]`, sample_ids: `[b]`, heads: `[n]`, as numbered over
    all ranks.
    """
    return _drop(probs, p, _hashed(seed, site, sample_ids[:, None, None], heads[:, None], positions))


def _drop(x: torch.Tensor, p: float, rows: torch.Tensor) -> torch.Tensor:
    """Zero a share p of x, by the counters `rows` (of x's shape without the last dim) and the last index."""
    columns = torch.arange(x.shape[-1], device=x.device)
    bits = (_mix(rows[..., None] + columns) >> 20) & 0xFFFFFF
    return x * (bits >= int(p * 2**24)).to(x.dtype) / (1.0 - p)


def _hashed(seed: int, site: int, *indices: torch.Tensor) -> torch.Tensor:
    """One well-mixed int64 for (seed, site) and each combination of the indices, which broadcast."""
    rows = (seed * 1_000_003 + site) * 0x9E3779B97F4A7C15 % 2**63
    for index in indices:
        rows = _mix(index + rows)
    return rows


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 tensors (products wrap; shifts are made logical by a mask)."""
    x = x * -7046029254386353131  # 0x9E3779B97F4A7C15, so that neighbours start far apart
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def cross_entropy_stats(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Maximum, sum of exp(logit - maximum) and the label's logit of each row, in fp32.

    logits: `[t, V]`, labels: `[t]`; a label outside 0..V-1 (of another shard) gives the logit 0, and no
    columns at all (a shard of padding) the statistics of an empty sum.
    """
    if logits.shape[-1] == 0:
        zeros = torch.zeros(labels.shape, device=labels.device)
        return zeros - float("inf"), zeros, zeros
    logits32 = logits.float()
    maximum = logits32.amax(dim=-1)
    total = (logits32 - maximum[:, None]).exp_().sum(dim=-1)
    here = (labels >= 0) & (labels < logits.shape[-1])
    target = logits32.gather(-1, labels.where(here, labels.new_zeros(()))[:, None])[:, 0]
    return maximum, total, target.where(here, target.new_zeros(()))


def cross_entropy_grad(
    logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """grad * (exp(logits - lse) - onehot(labels)) in the dtype of the logits. `[t, V]`, the rest `[t]`"""
    if logits.shape[-1] == 0:
        return logits
    result = (logits.float() - lse[:, None]).exp_()
    here = (labels >= 0) & (labels < logits.shape[-1])
    column = labels.where(here, labels.new_zeros(()))[:, None]
    result.scatter_add_(-1, column, -here[:, None].to(result.dtype))
    return result.mul_(grad[:, None]).to(logits.dtype)


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    step: torch.Tensor,
    lr: torch.Tensor,
    hyper: tuple[float, float, float, float],
    grad_scale: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    """One AdamW step over fp32 tensors, in place, everything that changes read from the device.

    hyper: (beta1, beta2, eps, weight_decay). step: number of this update, from 1. The gradient is divided by
    `grad_scale` first (loss scale and clipping in one); where `skip` is 1 nothing changes. See `adamw_ref_`.
    """
    beta1, beta2, eps, weight_decay = hyper
    torch._fused_adamw_(
        params,
        grads,
        *moments,
        [],
        [step] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=skip,
    )


def adamw_ref_(params, grads, moments, step, lr, hyper, grad_scale, skip) -> None:
    """`adamw_` as the paper writes it (arXiv 1711.05101), a tensor at a time: specification and oracle."""
    beta1, beta2, eps, weight_decay = hyper
    if skip:
        return
    for p, g, m, v in zip(params, grads, *moments, strict=True):
        g = g / grad_scale
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps))


if __name__ == "__main__":
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("\n".join(f"{op:<16} {path}" for op, path in paths(here).items()))
