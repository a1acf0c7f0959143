"""Initializes a model with experts from a dense one: --moe-use-upcycling (arXiv 2212.05055, 2410.07524).

    dense                     with experts
    mlp.linear_fc1.weight     mlp.experts.0.linear_fc1.weight, mlp.experts.1.linear_fc1.weight, ...
    mlp.linear_fc2.weight     mlp.experts.0.linear_fc2.weight_t, ...           transposed
    nothing                   mlp.router.weight                                random
    all others                the same

All experts start as the same function. So if the weights of a token's experts have a known sum, fc2 is
divided by it and the model starts equal to the dense one. With --moe-router-pre-softmax and such it is not
known: fc2 is divided by its value for equally good experts (Megatron does the same, with the root of this
number in both layers), and the model starts close to the dense one.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from nanomegatron.checkpoint.files import Piece
from nanomegatron.config.settings import TransformerConfig


def dense_source(name: str) -> tuple[str, bool] | None:
    """Return the dense model's tensor for `name`, and whether it is transposed; None: `name` is new."""
    if ".mlp.router." in name:
        return None
    found = re.sub(r"\.mlp\.experts\.\d+\.", ".mlp.", name)
    return found.removesuffix("_t"), found.endswith("_t")


def dense_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the dense model's pieces that fill `pieces`: same memory, experts' fc2 transposed, no router."""
    found = []
    for piece in pieces:
        source = dense_source(piece.key) if piece.key.startswith("model/") else (piece.key, False)
        if source is None:
            continue
        piece = replace(piece, key=source[0])
        if source[1]:
            shape, offset = piece.shape[::-1], piece.offset[::-1]
            piece = replace(piece, shape=shape, offset=offset, data=piece.data.t())
        found.append(piece)
    return found


def sum_of_weights(config: TransformerConfig) -> tuple[float, bool]:
    """Return the initial sum of the weights of a token's experts, and whether every token has this sum."""
    k, share = config.moe_router_topk, config.moe_router_topk / config.num_experts
    factor, sigmoid = config.moe_router_topk_scaling_factor or 1.0, False
    if "sinkhorn" in config.moe_router_load_balancing_type:
        factor = 1.0
        raw, sigmoid = True, k == 1
    elif config.moe_router_score_function == "sigmoid":
        raw, sigmoid = k == 1, True
    else:
        raw = config.moe_router_pre_softmax
    if not raw or (share == 1 and not sigmoid):
        return factor, config.moe_expert_capacity_factor is None
    return factor * (0.5 if sigmoid else share), False


@torch.no_grad()
def divide_outputs(params: Iterable[nn.Parameter], config: TransformerConfig) -> list[str]:
    """Divide fc2 of experts by the sum of a token's weights, in place; returns notes for the user."""
    total, exact = sum_of_weights(config)
    for param in params if total != 1 else ():
        for part in param.spec.parts:
            if ".experts." in part.name and ".linear_fc2." in part.name:
                part.local_view(param).div_(total)
    notes = [f"upcycling: fc2 of experts divided by {total:g}, the sum of a token's weights"] * (total != 1)
    why = "the weights of a token's experts are not known before, or some of them are dropped"
    return notes + [f"upcycling: the model begins near the dense one, not as it: {why}"] * (not exact)
