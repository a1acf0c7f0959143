"""Checks of the model, its FP8 sizes and its data before a run starts.

FP8 matmuls sum over multiples of 16, or over whole blocks; each of the three sizes is summed over once:

    y  = x  W^T     [tokens, out]    summed over the inputs
    dx = dy W       [tokens, in]     over the outputs
    dW = dy^T x     [out, in]        over the tokens
"""

import difflib
import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nanomegatron.config.check_layout import ETP, TP, length_unit, multiple, nearest
from nanomegatron.config.model import SHARED, TransformerConfig, layer_pattern
from nanomegatron.config.rules import flag, spelled, those_that_hold
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import read_text


def model_errors(config: Config, device: str) -> Iterator[str]:
    """Yield the errors in the model's shape and in how it is computed."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_kv_heads
    if model.kv_channels is None:
        yield from multiple("--hidden-size", model.hidden_size, "--num-attention-heads", heads)
    yield from multiple("--num-attention-heads", heads, TP, tp)
    if heads % groups:
        yield f"--num-query-groups {groups}: must divide --num-attention-heads {heads}"
    elif heads % tp == 0 and groups % tp and tp % groups:
        yield f"--num-query-groups {groups}: must be a multiple or a divisor of {TP} {tp}"
    rotated, kind = int(model.head_dim * model.rotary_percent), model.position_embedding_type
    if kind in ("rope", "yarn") and model.rotary_percent <= 1 and (rotated % 2 or not rotated):
        share = "" if model.rotary_percent == 1 else f" x --rotary-percent {model.rotary_percent} = {rotated}"
        yield f"head size {model.head_dim}{share}: must be even for {kind}; set --kv-channels"
    for name in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq"):
        try:
            layer_pattern(getattr(model, name), model.num_layers)
        except ValueError as error:
            yield f"{flag(name)} {error}"
    kinds = {*config.parallel.cp_types(model.num_layers)} - {"a2a"}
    cap = model.attn_logit_softcapping
    yield from those_that_hold(
        (
            model.window_size[1:] not in ((), (0,)),
            f"{spelled('window_size', model.window_size)}: must end in 0, such as 4095 0",
        ),
        (
            model.attention_dropout and model.attention_backend == "flash" and device == "cpu",
            "--attention-backend flash: has no attention dropout on a CPU; use auto or unfused",
        ),
        (
            model.attention_backend == "fused" and (device == "cpu" or config.dtype_name == "float32"),
            "--attention-backend fused: needs a GPU and --bf16 or --fp16; use auto",
        ),
        (
            cap and config.parallel.context_parallel_size > 1 and kinds,
            f"--attn-logit-softcapping {cap}: over cp needs --cp-comm-type a2a",
        ),
    )
    if model.distribute_saved_activations:
        yield from multiple("--hidden-size", model.hidden_size, TP, tp)
    for name, size, shards, ranks, _ in inner_sizes(config):
        yield from multiple(name, size, shards, ranks)
    if model.num_experts is not None:
        yield from _routing(model)
    checkpoint = config.checkpoint
    why = "for --moe-use-upcycling, which copies the MLP"
    yield from those_that_hold(
        (
            model.num_experts and not any(model.moe_layers),
            f"--moe-layer-freq {model.moe_layer_freq}: no layer has experts; leave out --num-experts",
        ),
        (
            checkpoint.moe_use_upcycling and model.moe_ffn_size != model.ffn_size,
            f"--moe-ffn-hidden-size {model.moe_ffn_size}: must be --ffn-hidden-size {model.ffn_size} {why}",
        ),
        (
            checkpoint.moe_use_upcycling and checkpoint.save and checkpoint.save == checkpoint.load,
            f"--save {checkpoint.save}: must be another folder than --load {why}",
        ),
    )


def inner_sizes(config: Config) -> list[tuple[str, int, str, int, str]]:
    """Return for each kind of MLP: flag and inner features; flag, number and short name of its shards."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    etp, kinds = config.parallel.expert_tensor_parallel_size or tp, []
    if not all(model.moe_layers):
        kinds.append(("--ffn-hidden-size", model.ffn_size, TP, tp, "tp"))
    if any(model.moe_layers):
        own = "--moe-ffn-hidden-size" if model.moe_ffn_hidden_size else "--ffn-hidden-size"
        kinds.append((own, model.moe_ffn_size, ETP, etp, "expert tp"))
        kinds.append((SHARED, model.moe_shared_expert_intermediate_size or 0, TP, tp, "tp"))
    return kinds


def _routing(model: TransformerConfig) -> Iterator[str]:
    """Yield the errors in the losses that balance experts, and in the choice of a token's."""
    types, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    words = spelled("moe_router_load_balancing_type", types)
    for name, weight in zip(types, weights, strict=False):
        if name in ("sinkhorn", "none") and weight:
            yield f"--moe-aux-loss-coeff {weight}: {name} has no loss; give 0, or aux_loss"
    experts, topk = model.num_experts, model.moe_router_topk
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    softmax = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    yield from those_that_hold(
        (
            not types or len(types) != len(weights),
            f"{spelled('moe_aux_loss_coeff', weights)}: must be one for each {words}, at least one",
        ),
        (
            len({*types}) < len(types) or ("sinkhorn" in types and len(types) > 1),
            f"{words}: give each once, with one weight, and sinkhorn alone",
        ),
        (
            topk == 1 and softmax and "sinkhorn" not in types,
            "--moe-router-topk 1: a softmax over one expert is 1, and teaches the router nothing; "
            "give --moe-router-pre-softmax",
        ),
    )
    if groups and best:
        yield from multiple("--num-experts", experts, "--moe-router-num-groups", groups)
        if best <= groups and not best <= topk <= best * (experts // groups):
            yield (
                f"--moe-router-group-topk {best}: must be at most --moe-router-topk {topk}, and at least "
                f"{math.ceil(topk * groups / experts)}, of {groups} groups of {experts} experts"
            )


def fp8_errors(config: Config, capability: tuple = ()) -> Iterator[str]:
    """Yield the errors in FP8 settings; capability: the GPU's compute capability, () if not known."""
    precision, layers = config.precision, config.model.num_layers
    if precision.fp8_format is None:
        return
    if not precision.fp8_layers(layers):
        ends = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        words = " ".join(spelled(name, getattr(precision, name)) for name in ends)
        yield f"{words}: leave none of --num-layers {layers} in FP8; together at most {layers - 1}"
    yield from _fp8_sizes(config)
    here, needs = f"here it is {'.'.join(map(str, capability))}", "needs a GPU of compute capability"
    grouped = precision.fp8_recipe == "rowwise" and config.model.num_experts and config.model.moe_grouped_gemm
    if not capability or capability[0] == 9:
        return
    old = capability < (8, 9)
    yield from those_that_hold(
        (
            old,
            f"--fp8-format {precision.fp8_format}: {needs} 8.9 or more (Ada, Hopper), {here}; leave it out",
        ),
        (
            not old and precision.fp8_recipe == "blockwise",
            f"--fp8-recipe blockwise: {needs} 9.0 (Hopper), {here}; use tensorwise or rowwise",
        ),
        (
            not old and grouped,
            f"--fp8-recipe rowwise: of experts {needs} 9.0 (Hopper), {here}; "
            "use tensorwise, or --no-moe-grouped-gemm",
        ),
    )


def _fp8_sizes(config: Config) -> Iterator[str]:
    """Yield an error for each flag that has to change, with the nearest values that fit."""
    model, data = config.model, config.data
    tp = config.parallel.tensor_model_parallel_size
    unit, cp = config.precision.fp8_multiple, config.parallel.context_parallel_size
    cut = config.sequence_cut
    n, g = model.num_attention_heads // tp, model.num_kv_heads // tp or 1  # heads of a rank
    d, length, micro = model.head_dim, data.seq_length, data.micro_batch_size
    each = math.lcm(*(unit // math.gcd(unit, heads) for heads in (n, n + 2 * g)))
    head = hidden = "--hidden-size", model.hidden_size, math.lcm(unit, each * model.num_attention_heads)
    if model.kv_channels:
        head, hidden = ("--kv-channels", d, each), (*hidden[:2], unit)
    rank = " of a tp rank" * (tp > 1)
    rows = [  # in words, the size, the flag to change: its value, its unit
        ("--hidden-size", model.hidden_size, hidden),
        (f"head size {d} x {n} query heads{rank} =", n * d, head),
        (f"head size {d} x {n} query, 2 x {g} key/value heads{rank} =", (n + 2 * g) * d, head),
    ]
    for name, size, _, ranks, axis in inner_sizes(config):
        if axis != "expert tp" or config.precision.fp8_recipe == "rowwise":  # else experts are in bf16
            words = f"{name} {size}" + f" / {axis} {ranks}" * (ranks > 1) + " ="
            rows.append((words, size / ranks, (name, size, unit * ranks)))
    if config.precision.fp8_output_proj:
        rows.append(
            (
                "the rows of the output layer,",
                divisor := data.make_vocab_size_divisible_by,
                ("--make-vocab-size-divisible-by", divisor, unit),
            )
        )
    if not data.variable_seq_lengths:  # packs are padded
        step = math.lcm(unit * cp * cut // math.gcd(unit * cp * cut, micro), length_unit(config))
        words = f"--seq-length {length} x --micro-batch-size {micro}"
        words += f" / cp {cp}" * (cp > 1) + f" / tp {cut}" * (cut > 1) + " ="
        rows.append((words, length * micro / cp / cut, ("--seq-length", length, step)))
    errors: dict[str, str] = {}  # the first error of each flag
    for words, size, (name, value, step) in rows:
        if size % unit:
            rule = f"must be a multiple of {unit} for FP8; nearest {name} {nearest(value, step)}"
            errors.setdefault(name, f"{words} {size:.9g}: {rule}")
    yield from errors.values()


def data_errors(config: Config) -> Iterator[str]:
    """Yield the errors in the data's sources, split and tokenizer."""
    data = config.data
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        yield from _blend(flag(name), getattr(data, name))
    if path := data.data_args_path:
        try:
            words = read_text(path).split()
            yield from _blend(f"--data-args-path {path}:", words)
            if not words:
                yield f"--data-args-path {path}: has no data path in it"
        except FileNotFoundError:
            yield f"--data-args-path {path}: no such file"
        except ValueError as error:
            yield f"--data-args-path {error}"
    weights = [_number(word) for word in data.split.split(",")]
    kind = data.tokenizer_type
    null = kind == "NullTokenizer" or (kind is None and data.mock_data)
    yield from those_that_hold(
        (
            len(weights) > 3 or not all(0 <= weight < math.inf for weight in weights) or not weights[0],
            f"--split {data.split}: must be up to three numbers, the first greater than 0, such as 99,1,0",
        ),
        (
            data.null_tokenizer_eod_id is not None and not null,
            f"--null-tokenizer-eod-id {data.null_tokenizer_eod_id}: needs --tokenizer-type NullTokenizer",
        ),
    )
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        value = getattr(data, name)
        if value and kind and not Path(value).exists() and (kind != "TikTokenizer" or "/" in value):
            yield f"{flag(name)} {value}: no such file{hub_hint(value)}"


def plain_text_hint(folder: Path) -> str:
    """Say what to do with a folder of plain text; "" if it has no .txt files."""
    if not any(folder.glob("*.txt")):
        return ""
    return f"it holds .txt files, each a document: nanomegatron preprocess --input '{folder}/*.txt'"


def hub_hint(name: str, fits: Callable[[Path], bool] = Path.exists) -> str:
    """The end of a message on a path with nothing there: what its folder has that fits, such as runs/.

    Without such a folder: the same in runs/, or how to download a Hugging Face repository, if `name` looks
    like one.
    """
    path = Path(name)
    here = next((folder for folder in path.parents if os.path.isdir(folder)), Path())
    if here.name:
        there = [found.name for found in here.glob("[!.]*") if fits(found)]
        closest = difflib.get_close_matches(path.parts[len(here.parts)], there, 6, 0)
        more = ", ..." * (len(there) > len(closest))
        return f"; {here}/ has {', '.join(closest)}{more}" * bool(closest)
    if fits(in_runs := Path("runs") / name):
        return f"; did you mean {in_runs}?"
    if not re.fullmatch(r"(?!runs/|\.)[\w.-]+/[\w.-]+", name):
        return ""
    return f"; nothing is fetched here: hf download {name} --local-dir {path.name}, and name that folder"


def _blend(where: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the errors in prefixes, or in alternating weights and prefixes (an odd number: only prefixes)."""
    weights = [] if len(words) % 2 else [_number(word) for word in words[::2]]
    weighted = not all(map(math.isnan, weights))
    if weighted and not all(0 < weight < math.inf for weight in weights):
        yield f"{where} {' '.join(words)}: give a weight above 0 before every prefix, or none"
        return
    for prefix in words[1::2] if weighted else words:
        if missing := [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(prefix + end).is_file()]:
            fix = "make them with nanomegatron preprocess"
            near = sorted(Path(p).with_suffix("") for p in glob.glob(f"{glob.escape(prefix)}_*_document.idx"))
            if Path(prefix).is_dir():
                fix = plain_text_hint(Path(prefix)) or (
                    f"it is a folder; give a prefix that nanomegatron preprocess --input {prefix} makes"
                )
            elif prefix.endswith((".bin", ".idx")) and Path(prefix).is_file():
                fix = f"leave the ending out: {prefix[:-4]}"
            elif near:
                fix = f"did you mean {' or '.join(map(str, near[:3]))}?"
            if len(prefix.split()) > 1:
                fix = "a blend is several words: leave the quotes out"
            yield f"{where} {prefix}: no file {' and '.join(missing)}; {fix}"


def _number(word: str) -> float:
    """The number that a word spells, NaN if it spells none."""
    try:
        return float(word)
    except ValueError:
        return math.nan
