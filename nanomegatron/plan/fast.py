"""The memory of the fast paths in `fast/`: their buffers beside the layers, and what they save.

    keys in a ring over cp     slots that other ranks write into, the same for all layers
    matmuls in pieces          slots for tokens, over tp and over the ranks that share experts
    fused loss                 logits of one chunk of tokens at a time, forward and backward at once
    FP8 casts                  the optimizer makes them, so that no weights are kept in 16 bits
    graphs of layers           what passes between layers stays reserved, for each kind of microbatch

The plan assumes these paths, the default on GPUs.
"""

from nanomegatron.config.check_layout import graph_impl
from nanomegatron.plan.layer import Sizes

# The values of the code that allocates; tests/plan/test_memory.py compares them.
RING_ROUND = 2  # ranks whose keys arrive at a time: ring.ROUND
FUSED_LOSS_CHUNK = 2048  # tokens: FusedLossFunction.chunk


def ring_buffers(sizes: Sizes) -> float:
    """Return the bytes of a ring's slots: keys and values of two rounds, gradients of all and one more."""
    ranks = max((mode.keys for mode in sizes.cp_modes if not mode.gathered), default=1)
    if ranks == 1 or not sizes.machine.gpu or sizes.parallel.dynamic_context_parallel:
        return 0
    slots = min(RING_ROUND, ranks - 1) * (3 + -(-(ranks - 1) // RING_ROUND))
    return slots * 2 * sizes.g * sizes.value


def piece_buffers(sizes: Sizes) -> float:
    """Return the bytes of slots for matmuls in pieces: two for a rank's tokens, two for all ranks'."""
    model, parallel, tp = sizes.model, sizes.parallel, sizes.tp
    slots = 0
    if parallel.tp_comm_overlap and tp > 1:
        slots += 2 * (1 + tp)
    ranks = sizes.etp * parallel.expert_model_parallel_size
    gathers = model.num_experts and model.moe_token_dispatcher_type == "allgather"
    if gathers and ranks > 1 and not parallel.overlap_moe_expert_parallel_comm:
        slots += 2 * (1 + ranks)
    return slots * sizes.h * sizes.value * sizes.machine.gpu


def fused_loss(sizes: Sizes, columns: int, fp32: int) -> float:
    """Return the bytes of a chunk of logits, with `fp32` bytes of copies each, and of the stream's gradient.

    Under sequence parallelism also the last norm's gathered output, and its gradient before the scatter.
    """
    stream = sizes.model.hidden_size * (2 if sizes.h < sizes.model.hidden_size else 1)
    return columns * min(sizes.tokens, FUSED_LOSS_CHUNK) * (sizes.item + fp32) + stream * sizes.value


def layer_graphs(sizes: Sizes, microbatches: int) -> float:
    """Return the bytes of the residual stream that graphs of layers keep, beside the activations.

    Of the first microbatch the branches and copies at both ends; of the others also sums and gradients.
    """
    config, layers = sizes.config, sizes.model.num_layers
    if not sizes.machine.gpu or graph_impl(config, sizes.shards(config)[0]) != "local":
        return 0
    kept = layers + 4 + (3 * layers + 4) * (microbatches > 1)
    return kept * sizes.h * sizes.value
