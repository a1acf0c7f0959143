"""The experts of a run looked at before it starts: a part of `config/check.py`."""

import math
from collections.abc import Iterator
from dataclasses import fields

from nanomegatron.config.check_parallel import multiple
from nanomegatron.config.cli import did_you_mean, flag
from nanomegatron.config.model import BALANCING, layer_pattern
from nanomegatron.config.settings import Config

E, EP, ETP = "num_experts", "expert_model_parallel_size", "expert_tensor_parallel_size"
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
SHARED, CAPACITY = "moe_shared_expert_intermediate_size", "moe_expert_capacity_factor"
OVERLAP, UPCYCLING = "overlap_moe_expert_parallel_comm", "moe_use_upcycling"
GROUPS, BEST, BIAS = "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"
SCORES, DISPATCHER = "moe_router_score_function", "moe_token_dispatcher_type"
MAX_EXPERTS = 1024  # as ops/permute.py has it
RECOMPUTED = ("moe", "moe_act", "shared_experts")
# A setting that is given | needs another | of this value, if not any
NEEDS = f"""
{BIAS} | {SCORES} | sigmoid
moe_router_bias_update_rate | {BIAS}
moe_router_pre_softmax | {SCORES} | softmax
moe_token_drop_policy | {CAPACITY}
moe_pad_expert_input_to_capacity | {CAPACITY}
moe_shared_expert_gate | {SHARED}
moe_shared_expert_overlap | {SHARED}
moe_shared_expert_overlap | {DISPATCHER} | alltoall
{OVERLAP} | {DISPATCHER} | alltoall
{GROUPS} | {BEST}
{BEST} | {GROUPS}
{UPCYCLING} | load
{UPCYCLING} | save
"""


def moe_errors(config: Config, world: int, _: str) -> Iterator[str]:
    """What is wrong with the experts of a run: their choice, their sizes, their ranks."""
    parts = (config.model, config.parallel, config.checkpoint, config.run)
    settings = {s.name: (s.default, getattr(part, s.name)) for part in parts for s in fields(part)}
    given = [name for name, (default, value) in settings.items() if value not in (default, None)]
    alone = settings[ETP][1] in (None, 1, settings[TP][1])  # which changes nothing without experts
    names = [n for n in given if n.startswith("moe_") or n in (OVERLAP, EP) or (n == ETP and not alone)]
    again = [n for n in config.model.recompute_modules if n in RECOMPUTED]
    if config.model.num_experts is None:
        words = [*map(_word, names), *(f"--recompute-modules {name}" for name in again)]
        if words:
            yield f"{', '.join(words)}: need{'s' * (len(words) == 1)} --num-experts"
        return
    for name, other, *wanted in (line.split(" | ") for line in NEEDS.strip().splitlines()):
        if name in given and (settings[other][1] != wanted[0] if wanted else other not in given):
            yield f"{_word(name)}: needs {' '.join([flag(other), *wanted])}"
    if "shared_experts" in again and config.model.moe_shared_expert_intermediate_size is None:
        yield f"--recompute-modules shared_experts: needs {flag(SHARED)}"
    for check in (_layers, _choice, _balance, _ranks, _packs, _company):
        yield from check(config, world)


def _word(name: str) -> str:
    """The flag of a setting that is not at its default."""
    off = name in ("moe_permute_fusion", "moe_grouped_gemm")
    return flag(f"no_{name}" if off else name)


def _layers(config: Config, _: int) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if model.num_experts > MAX_EXPERTS:
        yield f"--num-experts {model.num_experts}: must be at most {MAX_EXPERTS}, the kernels' limit"
    try:
        pattern = layer_pattern(str(model.moe_layer_freq), model.num_layers, first=True)
        if 0 in pattern:
            yield from multiple("ffn_hidden_size", model.ffn_size, flag(TP), tp)
        if 1 not in pattern:
            yield f"--moe-layer-freq {model.moe_layer_freq}: no layer has experts; leave out --num-experts"
    except ValueError as error:
        yield f"--moe-layer-freq {error}"
    etp = config.parallel.expert_tensor_parallel_size or tp
    name = "moe_ffn_hidden_size" if model.moe_ffn_hidden_size else "ffn_hidden_size"
    yield from multiple(name, model.moe_ffn_size, flag(ETP), etp)
    yield from multiple(SHARED, model.moe_shared_expert_intermediate_size or 0, flag(TP), tp)
    if config.checkpoint.moe_use_upcycling:
        yield from _upcycling(config)


def _upcycling(config: Config) -> Iterator[str]:
    model, checkpoint, why = config.model, config.checkpoint, "for --moe-use-upcycling, which copies the MLP"
    if model.moe_ffn_size != model.ffn_size:
        be = f"must be --ffn-hidden-size {model.ffn_size} {why}"
        yield f"--moe-ffn-hidden-size {model.moe_ffn_size}: {be}"
    if size := model.moe_shared_expert_intermediate_size:
        yield f"{flag(SHARED)} {size}: not with --moe-use-upcycling, a dense model has nothing like it"
    if checkpoint.save and checkpoint.save == checkpoint.load:
        yield f"--save {checkpoint.save}: must be another folder than --load {why}"


def _choice(config: Config, _: int) -> Iterator[str]:
    model = config.model
    experts, topk = model.num_experts, model.moe_router_topk
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    if topk > experts:
        yield f"--moe-router-topk {topk}: must not exceed --num-experts {experts}"
    if topk == 1 and model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax:
        why = "a softmax over one expert is 1, and teaches the router nothing"
        yield f"--moe-router-topk 1: {why}; give --moe-router-pre-softmax"
    if not groups or not best:
        return
    yield from multiple(E, experts, flag(GROUPS), groups)
    if best > groups:
        yield f"{flag(BEST)} {best}: must not exceed {flag(GROUPS)} {groups}"
    elif best > topk:
        yield f"{flag(BEST)} {best}: must not exceed --moe-router-topk {topk}, experts of so many groups"
    elif (room := best * (experts // groups)) < topk:
        need = f"--moe-router-topk {topk} needs {math.ceil(topk * groups / experts)} or more"
        yield f"{flag(BEST)} {best}: has {room} experts of {experts} in {groups} groups; {need}"


def _balance(config: Config, _: int) -> Iterator[str]:
    model = config.model
    types, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    words, numbers = " ".join(types), " ".join(f"{w:g}" for w in weights)
    for name in sorted({*types} - {*BALANCING}):
        near = did_you_mean(name, BALANCING)
        yield f"--moe-router-load-balancing-type {name}: must be of {', '.join(BALANCING)}{near}"
    if not types or len(types) != len(weights):
        ways = f"--moe-router-load-balancing-type {words}".rstrip()
        yield f"--moe-aux-loss-coeff {numbers}".rstrip() + f": must be one for each {ways}, at least one"
    if not all(0 <= weight < math.inf for weight in weights):
        yield f"--moe-aux-loss-coeff {numbers}: each must be at least 0"
    for name, weight in zip(types, weights, strict=False):
        if name in ("sinkhorn", "none") and weight:
            yield f"--moe-aux-loss-coeff {weight:g}: {name} has no loss; give 0, or aux_loss"
    if "sinkhorn" not in types:
        return
    others = [flag(name) for name in (GROUPS, BIAS, CAPACITY) if getattr(model, name)]
    if others := [*others, *(name for name in types if name != "sinkhorn")]:
        yield f"--moe-router-load-balancing-type sinkhorn: not with {', '.join(others)}"


def _ranks(config: Config, world: int) -> Iterator[str]:
    """Experts have a grid of their own over the ranks of a pipeline stage: etp, then ep, then edp."""
    parallel, model = config.parallel, config.model
    tp, pp, ep = (getattr(parallel, name) for name in (TP, PP, EP))
    etp, cp = parallel.expert_tensor_parallel_size or tp, parallel.context_parallel_size
    yield from multiple(E, model.num_experts, flag(EP), ep)
    if world % (tp * cp * pp) == 0 and world % (ep * etp * pp):
        unit = math.lcm(ep * etp, tp * cp) * pp
        of = f"{world} processes" + f" / pp {pp} = {world // pp}" * (pp > 1)
        words = f"{flag(EP)} {ep} x {flag(ETP)} {etp} = {ep * etp}"
        yield f"{words}: must divide {of}; use --nproc {-(-world // unit) * unit}"
    if tp > 1 and not model.sequence_parallel:
        yield f"{flag(TP)} {tp}: needs --sequence-parallel with --num-experts, or ranks route the same tokens"


def _packs(config: Config, _: int) -> Iterator[str]:
    """Where microbatches are packs of documents, and each replica has packs of other lengths."""
    model, parallel, tp = config.model, config.parallel, config.parallel.tensor_model_parallel_size
    if parallel.dynamic_context_parallel:
        why = "whose ranks need equally many microbatches, as --variable-seq-lengths alone gives them"
        yield f"--dynamic-context-parallel: not with --num-experts, {why}; leave it out"
    if not config.data.variable_seq_lengths:
        return
    if "seq_aux_loss" in model.moe_router_load_balancing_type:
        why = "counts each sample by itself, of which packs have many with --variable-seq-lengths"
        yield f"--moe-router-load-balancing-type seq_aux_loss: {why}; give aux_loss"
    ranks = (parallel.expert_tensor_parallel_size or tp) * parallel.expert_model_parallel_size
    if tp * parallel.context_parallel_size % ranks:  # replicas share experts
        why = "with --variable-seq-lengths, where ranks that share experts have not equally many tokens"
        if model.moe_token_dispatcher_type != "alltoall":
            yield f"--moe-token-dispatcher-type {model.moe_token_dispatcher_type}: must be alltoall {why}"
        if model.moe_pad_expert_input_to_capacity:
            yield f"--moe-pad-expert-input-to-capacity: not {why}; leave it out"


def _company(config: Config, _: int) -> Iterator[str]:
    """Settings that experts do not go with."""
    if config.model.moe_pad_expert_input_to_capacity and config.parallel.overlap_moe_expert_parallel_comm:
        why = "where half the tokens would be padded to what an expert takes of all"
        yield f"--moe-pad-expert-input-to-capacity: not with {flag(OVERLAP)}, {why}; give one of the two"
