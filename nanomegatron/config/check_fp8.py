"""FP8 in a run looked at before it starts: a part of `config/check.py`.

    y  = x  W^T     [tokens, out]    summed over the inputs
    dx = dy W       [tokens, in]     over the outputs
    dW = dy^T x     [out, in]        over the tokens

Each of the three sizes is summed over once, and FP8 matmuls sum over multiples of 16, or over whole blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from nanomegatron.config.check_parallel import length_unit
from nanomegatron.config.cli import flag
from nanomegatron.config.settings import Config, PrecisionConfig

OF_DELAYED = ("fp8_amax_history_len", "fp8_amax_compute_algo")
ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
CUT = {"rowwise": "rows", "blockwise": "blocks"}


def fp8_errors(config: Config, *_: Any) -> Iterator[str]:
    """What is wrong with the FP8 of a run: its settings, and the sizes of its matmuls."""
    settings = [s for s in fields(PrecisionConfig) if s.name.startswith("fp8_") or s.name.endswith("_bf16")]
    given = [s.name for s in settings if getattr(config.precision, s.name) != s.default]
    if not 1 <= (length := config.precision.fp8_amax_history_len) <= 1024:
        yield f"--fp8-amax-history-len {length}: must be 1 to 1024"
    if config.precision.fp8_format is None:
        given += ["log_fp8_stats"] * bool(config.run.log_fp8_stats)
        if given:
            names = ", ".join("--no-fp8-wgrad" if name == "fp8_wgrad" else flag(name) for name in given)
            yield f"{names}: need{'s' * (len(given) == 1)} --fp8-format"
        return
    yield from _settings(config, given)
    yield from _sizes(config)


def gpu_errors(config: Config, capability: tuple) -> Iterator[str]:
    """What a GPU of this compute capability, such as (9, 0), cannot do of it; () is no GPU, or not known."""
    precision, here = config.precision, ".".join(map(str, capability))
    if not capability or precision.fp8_format is None:
        return
    if capability < (8, 9):
        need = "needs a GPU of compute capability 8.9 or more (Ada, Hopper), here it is"
        yield f"--fp8-format {precision.fp8_format}: {need} {here}; leave it out"
    elif capability[0] != 9:
        need = "needs a GPU of compute capability 9.0 (Hopper), here it is"
        if precision.fp8_recipe == "blockwise":
            yield f"--fp8-recipe blockwise: {need} {here}; use tensorwise or rowwise"
        elif precision.fp8_recipe == "rowwise" and config.model.num_experts and config.model.moe_grouped_gemm:
            yield f"--fp8-recipe rowwise: of experts {need} {here}; use tensorwise, or --no-moe-grouped-gemm"


def _settings(config: Config, given: list[str]) -> Iterator[str]:
    precision, recipe = config.precision, config.precision.fp8_recipe
    if not precision.bf16:
        instead = " instead of --fp16" if precision.fp16 else ""
        yield f"--fp8-format {precision.fp8_format}: needs --bf16{instead}, the type of all that is not FP8"
    for name in given:
        words = f"{flag(name)} {getattr(precision, name)}"
        if name in OF_DELAYED and recipe != "delayed":
            yield f"{words}: is for --fp8-recipe delayed, not {recipe}"
        if name in ENDS and not precision.first_last_layers_bf16:
            yield f"{words}: needs --first-last-layers-bf16"
    if config.parallel.tp_comm_overlap and config.parallel.tensor_model_parallel_size > 1:
        yield "--tp-comm-overlap: not with --fp8-format, whose bytes are gathered whole; leave one out"
    if precision.fp8_param_gather and config.parallel.sharding == "no_shard":
        yield "--fp8-param-gather: needs --use-distributed-optimizer; without it nothing is gathered"
    elif precision.fp8_param_gather and recipe in CUT:
        why = f"a rank's shard of the weights cuts {CUT[recipe]}, which it cannot scale"
        yield f"--fp8-param-gather: not with --fp8-recipe {recipe}: {why}; use delayed or tensorwise"
    if not precision.first_last_layers_bf16:
        return
    if recipe == "delayed":
        yield "--first-last-layers-bf16: not with --fp8-recipe delayed; use tensorwise, rowwise or blockwise"
    if not precision.fp8_layers(layers := config.model.num_layers):
        words = " ".join(f"{flag(name)} {getattr(precision, name)}" for name in ENDS)
        yield f"{words}: leave none of --num-layers {layers} in FP8; together at most {layers - 1}"


def _sizes(config: Config) -> Iterator[str]:
    """An error for each flag that has to change, with the nearest values that fit."""
    model, data, tp = config.model, config.data, config.parallel.tensor_model_parallel_size
    unit = config.precision.fp8_multiple
    n, g = model.num_attention_heads // tp, model.num_kv_heads // tp or 1  # heads of a rank
    d, length, micro = model.head_dim, data.seq_length, data.micro_batch_size
    each = math.lcm(*(unit // math.gcd(unit, heads) for heads in (n, n + 2 * g)))
    head = hidden = "hidden_size", model.hidden_size, math.lcm(unit, each * model.num_attention_heads)
    if model.kv_channels:
        head, hidden = ("kv_channels", d, each), (*hidden[:2], unit)
    cp, cut = config.parallel.context_parallel_size, config.sequence_cut
    every = math.lcm(unit * cp * cut // math.gcd(unit * cp * cut, micro), length_unit(config))
    of_cut = f" / cp {cp}" * (cp > 1) + f" / tp {cut}" * (cut > 1)
    rank = " of a tp rank" * (tp > 1)
    rows = (  # in words, the size, the flag to change: its value, what it has to be a multiple of
        ("--hidden-size", model.hidden_size, hidden),
        (f"head size {d} x {n} query heads{rank} =", n * d, head),
        (f"head size {d} x {n} query, 2 x {g} key/value heads{rank} =", (n + 2 * g) * d, head),
        *_inner_sizes(config),
        (
            f"--seq-length {length} x --micro-batch-size {micro}{of_cut} =",
            length * micro / cp / cut * (not data.variable_seq_lengths),  # packs are padded
            ("seq_length", length, every),
        ),
    )
    told = set()
    for words, size, (name, value, step) in rows:
        if size % unit and name not in told:
            told.add(name)
            near = [f"{m}" for m in (value // step * step, (value // step + 1) * step) if m]
            rule = f"must divide by {unit} for FP8"
            yield f"{words} {size:.9g}: {rule}; nearest {flag(name)} {' or '.join(near)}"


def _inner_sizes(config: Config) -> Iterator[tuple[str, float, tuple[str, int, int]]]:
    """As `_sizes` has them: the inner features of dense layers, of shared experts, and of experts in FP8."""
    model, parallel, precision = config.model, config.parallel, config.precision
    tp = parallel.tensor_model_parallel_size
    try:
        sparse = model.moe_layers
    except ValueError:  # of which config/check_moe.py tells
        return
    shared, experts = "moe_shared_expert_intermediate_size", any(sparse) and precision.fp8_recipe == "rowwise"
    own = "moe_ffn_hidden_size" if model.moe_ffn_hidden_size else "ffn_hidden_size"
    kinds = (
        ("ffn_hidden_size", model.ffn_size, "tp", tp, not all(sparse)),
        (shared, model.moe_shared_expert_intermediate_size or 0, "tp", tp, any(sparse)),
        (own, model.moe_ffn_size, "expert tp", parallel.expert_tensor_parallel_size or tp, experts),
    )
    for name, size, axis, ranks, there in kinds:
        if there:
            words = f"{flag(name)} {size}" + f" / {axis} {ranks}" * (ranks > 1)
            yield f"{words} =", size / ranks, (name, size, precision.fp8_multiple * ranks)
