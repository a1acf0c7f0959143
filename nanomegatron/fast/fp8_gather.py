"""The casts of FP8 weights that the optimizer makes of its main weights, a shard at a time.

    end_step       amaxes of the step that ends -> scales                              delayed
    AdamW          main weights -> bytes, in its own pass; notes the amax of each weight
    scale_weights  the amaxes of all weights, agreed upon -> scales                     tensorwise: the bytes
    cast           main weights -> bytes again                                          above were made with
    gather         bytes of all shards                                                  the old ones
    first use      transposed copy (fp8.py)

What is cast is the main weight rounded to 16 bits, which is the weight that a checkpoint has. A step that is
skipped casts as well: its weights are the old ones, their scales may be new.
"""

from collections.abc import Callable

import torch

from nanomegatron.dp_bucket import Bucket
from nanomegatron.fp8 import E4M3
from nanomegatron.ops.adamw import Segments
from nanomegatron.param import ParamSpec


class WeightCasts:
    """What a shard of a bucket has of weights that the optimizer casts, with a segment for each.

    segments: on `device`, where the main weights are; kind: of a segment, for AdamW.
    """

    def __init__(self, bucket: Bucket, device: torch.device, kind: Callable[[ParamSpec], int]) -> None:
        self.shard = bucket.fp8[bucket.shard].view(E4M3)
        self.scales, self.device = bucket.layers[0].scales, device
        ranges, slots, first = [], [], bucket.shard.start
        for param, layer, begin in zip(bucket.params, bucket.layers, bucket.begins, strict=True):
            start, stop = max(begin, first), min(begin + param.numel(), bucket.shard.stop)
            if start < stop:
                ranges.append((start - first, stop - first, kind(param.spec)))
                slots.append(layer.slot("w"))
        self.segments = Segments.of(ranges, device)
        self.slots = torch.tensor(slots, dtype=torch.int64, device=bucket.device)

    def begin(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where casts are to be written, the scales, and amaxes to be raised and then noted: on `device`."""
        scale = self.scales.scale.index_select(0, self.slots).to(self.device)
        here = self.shard.device == self.device
        copy = self.shard if here else torch.empty_like(self.shard, device=self.device)
        return copy, scale, torch.zeros_like(scale)

    def note(self, amax: torch.Tensor) -> None:
        """For the scales of later steps, or of `scale_weights`."""
        noted = self.scales.history[0]
        amax = torch.maximum(noted.index_select(0, self.slots), amax.to(noted.device))
        noted.index_copy_(0, self.slots, amax)
