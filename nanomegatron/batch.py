"""One microbatch: loaders make it, the training step adds to it, the model reads it.

Tests: tests/test_model.py. Page: docs/data.md.

A row of 8 tokens with three documents, kept apart (--reset-position-ids, --reset-attention-mask):

    tokens         a  b  .  c  .  d  e  f       . ends a document; the first one began in an earlier row
    labels         b  .  c  .  d  e  f  g       the token that follows, also across documents
    positions      0  1  2  3  4  5  6  7
    position_ids   0  1  2  0  1  0  1  2
    cu_seqlens     0        3     5        8    a query sees keys of its own document
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Batch:
    """A microbatch on one rank. A document ends with its end-of-document token, and every row starts one.

    A rank with neither the first nor the last pipeline stage has no tokens, labels and loss mask. With a
    `shard` all tensors but sample_ids and cu_seqlens cover the s/cp tokens of each row on this rank.
    """

    tokens: torch.Tensor | None  # [b, s] int64
    positions: torch.Tensor  # [s] int64, place in the sample; padding has positions below 0
    sample_ids: torch.Tensor | None = None  # [b] int64, place in the order of the whole run
    labels: torch.Tensor | None = None  # [b, s] int64, the token that follows each
    loss_mask: torch.Tensor | None = None  # [b, s] float32, 1 where a label counts
    position_ids: torch.Tensor | None = None  # [b, s] int64, place in the document; None: as `positions`
    cu_seqlens: torch.Tensor | None = None  # [documents + 1] int32, document bounds in the b * s tokens
    max_seqlen: int | None = None  # tokens of the longest document
    shard: Any = None  # the `cp.SequenceShard` under context parallelism: which tokens of the rows are here
    # What a training step adds:
    dropout_seed: int | None = None  # decides dropout masks, with sample_ids and positions; None: no dropout
    loss_weights: torch.Tensor | None = None  # [b, s], factor of each token's loss, for the fused loss
    aux_scale: torch.Tensor | None = None  # 0-d, factor of the routers' losses; None: there are none
    # What the model adds:
    residual_positions: torch.Tensor | None = None  # [s/tp], positions of this rank's part of the stream

    @property
    def embedded_positions(self) -> torch.Tensor:
        """Positions for the learned position embedding -> `[s]` or `[b, s]`"""
        return self.positions if self.position_ids is None else self.position_ids

    @property
    def rotary_positions(self) -> torch.Tensor:
        """Positions for rotary embedding -> `[s]` or `[b, s]`: in the row if attention crosses documents."""
        return self.positions if self.cu_seqlens is None else self.embedded_positions

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the batch by name -> `[...]` each"""
        return {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor)}

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with `change` applied to every tensor."""
        return replace(self, **{name: change(x) for name, x in self.tensors().items()})

    def part(self, shard: Any) -> "Batch":
        """Return the tokens that a `cp.SequenceShard` of the rows has here, and the shard. -> `[b, s/cp]`"""
        at = torch.from_numpy(shard.positions)
        names = ("tokens", "labels", "loss_mask", "position_ids")
        rows = {name: x[:, at] for name in names if (x := getattr(self, name)) is not None}
        return replace(self, positions=self.positions[at], shard=shard, **rows)

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on `device`; a copy from pinned memory to a GPU does not wait."""
        return self.each(lambda t: t.to(device, non_blocking=True))
