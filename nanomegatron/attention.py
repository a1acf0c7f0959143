"""Self attention of a decoder layer, its heads sharded over tp.

Tests: tests/test_model.py. Page: docs/architecture.md.

    x [s, b, h] -> linear_qkv -> q [s, b, n/tp, d], k, v [s, b, g/tp, d]
                   (q, k norm), rotary embedding
                   context = softmax(q k^T / sqrt(d)) v     [s, b, h/tp]    ops/attention.py; over cp: cp.py
                   (other scales: q is multiplied by --softmax-scale * sqrt(d) before)
                -> linear_proj -> y [s, b, h]

With fewer key/value heads than tp ranks (g < tp), neighbouring ranks hold the same head.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from nanomegatron.batch import Batch
from nanomegatron.config.model import TransformerConfig
from nanomegatron.cp import context_attention
from nanomegatron.layers import Norm
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Mask, choose_backend, core_attention
from nanomegatron.ops.dropout import attention_dropout
from nanomegatron.ops.rope import rope, rope_packed
from nanomegatron.param import Init, scaled_std, slot
from nanomegatron.recompute import recomputed
from nanomegatron.tp import ColumnParallelLinear, RowParallelLinear


class Cache(Protocol):
    """Keys and values of the tokens before, which never change, so that generation keeps them.

    attend: `core_attention`, or what does the same.
    """

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new ones; return those to attend to. k, v `[s, b, g, d]` -> `[t, b, g, d]`, `[t, b, g, d]`"""


class SelfAttention(nn.Module):
    """Causal self attention with grouped queries. x `[s, b, h]` or `[s/tp, b, h]`, the result likewise.

    context_attention: the function for rows sharded over cp. mask: which keys of a whole row its queries see.
    q_norm, k_norm: of each head, or None. `pick_variants.py` may set these four.
    """

    context_attention: Callable[..., torch.Tensor] = slot(context_attention)
    has_variants = False  # whether `pick_variants` has set what the flags ask for

    def __init__(self, config: TransformerConfig, layer: int, tp: Axis, init: Init) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.tp = tp
        self.head_dim = config.head_dim
        self.mask = Mask(True, config.windows[layer])
        n = config.num_attention_heads
        g = config.num_kv_heads
        if n % tp.size or (g % tp.size and tp.size % g):
            raise ValueError(
                f"{n} query heads must be a multiple of tp {tp.size}, "
                f"{g} key/value heads a multiple or a divisor of it"
            )
        copies = max(tp.size // g, 1)  # ranks that hold a key/value head
        q_size = n * self.head_dim
        kv_size = g * self.head_dim
        sizes = {"q": (q_size, 1), "k": (kv_size, copies), "v": (kv_size, copies)}
        bias = not config.disable_bias_linear
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            sizes,
            tp,
            init.at("linear_qkv"),
            bias=config.add_qkv_bias or bias,
            sequence_parallel=config.sequence_parallel,
        )
        self.linear_proj = RowParallelLinear(
            q_size,
            config.hidden_size,
            tp,
            init.at("linear_proj", scaled_std(config.init_method_std, config.num_layers)),
            bias=bias,
            sequence_parallel=config.sequence_parallel,
        )
        self.widths = [size * copies // tp.size for size, copies in sizes.values()]
        self.q_norm = self.k_norm = None
        if config.qk_layernorm:
            self.q_norm = Norm(config, config.head_dim, tp, init.at("q_layernorm"), partial_grad=True)
            self.k_norm = Norm(config, config.head_dim, tp, init.at("k_layernorm"), partial_grad=True)
        self.backend = choose_backend(config.backend, init.device, init.dtype, config.attention_dropout)

    def forward(
        self, x: torch.Tensor, batch: Batch, rotary: tuple | None, cache: Cache | None = None
    ) -> torch.Tensor:
        """-> `[s, b, h]` or `[s/tp, b, h]`. rotary: (cos, sin) of x; cache: adds keys, values of the past."""
        packed = self.linear_qkv(x)
        context = self.attend(packed, batch, rotary, cache)
        return self.linear_proj(context)

    def attend(
        self, packed: torch.Tensor, batch: Batch, rotary: tuple | None, cache: Cache | None = None
    ) -> torch.Tensor:
        """Return the context, which `linear_proj` reads. packed `[s, b, m/tp]` -> `[s, b, h/tp]`

        packed: queries, keys and values of this rank's heads, as `linear_qkv` returns them.

        Raises RuntimeError if a flag asks for a variant that `pick_variants` has not set.
        """
        self.config.check_variants("attention", self.has_variants)
        q, k, v = self._queries_keys_values(packed, rotary)
        if self.config.softmax_scale is not None:
            q = q * (self.config.softmax_scale * math.sqrt(self.head_dim))
        mask = replace(self.mask, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        if cache is not None:
            k, v = cache(self.layer, k, v)
            return cache.attend(q, k, v, self.backend, mask, 0.0, None, self.config.masked_softmax_fusion)[0]
        attention = self._whole_rows if batch.shard is None else self._over_cp
        core = partial(attention, batch=batch, mask=mask)
        return recomputed(core, q, k, v, when=self.config.recomputes("core_attn"))

    def _whole_rows(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask
    ) -> torch.Tensor:
        p, drop = self._dropout(q, batch)
        return core_attention(q, k, v, self.backend, mask, p, drop, self.config.masked_softmax_fusion)[0]

    def _over_cp(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask
    ) -> torch.Tensor:
        """There is no dropout over cp (config/check_layout.py)."""
        return self.context_attention(
            q, k, v, batch.shard, self.layer, mask, self.backend, self.config.masked_softmax_fusion
        )

    def _queries_keys_values(
        self, packed: torch.Tensor, rotary: tuple | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split, normalize, rotate."""
        fused = self.config.rope_fusion
        interleaved = self.config.rotary_interleaved
        if rotary is not None and self.q_norm is None and fused:  # below, in one kernel
            cos, sin = rotary
            return rope_packed(packed, self.widths, self.head_dim, cos, sin, interleaved)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in packed.split(self.widths, -1))
        if self.q_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if rotary is not None:
            cos, sin = rotary
            q = rope(q, cos, sin, interleaved, fused)
            k = rope(k, cos, sin, interleaved, fused)
        return q, k, v

    def _dropout(self, q: torch.Tensor, batch: Batch) -> tuple[float, Callable | None]:
        """Return the dropout probability, and for the unfused path dropout with one mask under any layout."""
        p = self.config.attention_dropout
        if not p or batch.dropout_seed is None:
            return 0.0, None
        drop = partial(
            attention_dropout,
            p=p,
            seed=batch.dropout_seed,
            site=-1 - self.layer,
            positions=(batch.positions, batch.positions),  # in training queries and keys are the same tokens
            sample_ids=batch.sample_ids,
            heads=torch.arange(q.shape[2], device=q.device) + self.tp.rank * q.shape[2],
        )
        return p, drop
