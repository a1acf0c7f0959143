"""Settings of experts: wrong ones named with a way out, Megatron's spellings, layers that have experts."""

import re

import pytest

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import from_toml, parse, to_toml
from nanomegatron.config.model import MAX_EXPERTS
from nanomegatron.config.run_folder import resume_conflicts
from nanomegatron.config.settings import Config, TransformerConfig
from tests.house.test_style import ROOT

PLAIN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 "
    "--train-iters 10 --disable-bias-linear"
)
NAMES = {  # short for the flags below
    "E": "--num-experts",
    "EP": "--expert-model-parallel-size",
    "ETP": "--expert-tensor-parallel-size",
    "TP": "--tensor-model-parallel-size",
    "SP": "--sequence-parallel",
    "TOPK": "--moe-router-topk",
    "GROUPS": "--moe-router-num-groups",
    "BEST": "--moe-router-group-topk",
    "TYPE": "--moe-router-load-balancing-type",
    "COEFF": "--moe-aux-loss-coeff",
    "BIAS": "--moe-router-enable-expert-bias",
    "SCORES": "--moe-router-score-function",
    "SHARED": "--moe-shared-expert-intermediate-size",
    "CAPACITY": "--moe-expert-capacity-factor",
    "DISPATCHER": "--moe-token-dispatcher-type",
    "OVERLAP": "--overlap-moe-expert-parallel-comm",
    "FREQ": "--moe-layer-freq",
    "RECOMPUTE": "--recompute-granularity selective --recompute-modules",
}


def spelled(text: str) -> str:
    return re.sub(rf"\b({'|'.join(NAMES)})\b", lambda word: NAMES[word[0]], text)


def config_of(flags: str) -> Config:
    parsed = parse(f"{PLAIN} {spelled(flags)}".split())
    assert parsed.errors == ()
    return parsed.config


# flags behind PLAIN | processes | what the message must hold: the flag, the value, the way out
WRONG = """
TOPK 4 | 1 | TOPK 4: needs E
EP 2 | 2 | EP 2: needs E
ETP 2 | 2 | ETP 2: needs E
SHARED 64 CAPACITY 1.0 --no-moe-grouped-gemm | 1 | CAPACITY 1.0, --no-moe-grouped-gemm, SHARED 64: need E
COEFF 0.1 | 1 | COEFF 0.1: needs E
OVERLAP --moe-per-layer-logging | 1 | OVERLAP, --moe-per-layer-logging: need E
RECOMPUTE mlp moe_act | 1 | --recompute-modules mlp moe_act: needs E
RECOMPUTE moe_layer E 4 | 1 | moe_layer: each must be one of | moe, moe_act, shared_experts
E 0 | 1 | E 0: must be greater than 0
E 4 --moe-ffn-hidden-size 0 | 1 | --moe-ffn-hidden-size 0: must be greater than 0
E 4 TOPK 0 | 1 | TOPK 0: must be greater than 0
E 4 TOPK 5 | 1 | TOPK 5: must be greater than 0 and at most E 4
E 4 TOPK 1 | 1 | TOPK 1: | give --moe-router-pre-softmax
E 4 GROUPS 2 | 1 | GROUPS 2: needs BEST
E 4 BEST 2 | 1 | BEST 2: needs GROUPS
E 8 GROUPS 3 BEST 1 | 1 | E 8: must be a multiple of GROUPS 3; nearest 6 or 9
E 8 GROUPS 2 BEST 3 TOPK 4 | 1 | BEST 3: must be greater than 0 and at most GROUPS 2
E 8 GROUPS 4 BEST 3 | 1 | BEST 3: must be at most TOPK 2, and at least 1, of 4 groups of 8 experts
E 8 GROUPS 4 BEST 1 TOPK 3 | 1 | BEST 1: must be at most TOPK 3, and at least 2, of 4 groups
E 4 BIAS | 1 | BIAS: needs SCORES sigmoid
E 4 SCORES sigmoid --moe-router-pre-softmax | 1 | --moe-router-pre-softmax: not with SCORES sigmoid
E 4 --moe-router-bias-update-rate 1e-2 | 1 | --moe-router-bias-update-rate 0.01: needs BIAS
E 4 --moe-router-bias-update-rate -1 | 1 | --moe-router-bias-update-rate -1.0: must be at least 0
E 4 TYPE aux_los | 1 | TYPE aux_los: each must be one of aux_loss, | did you mean aux_loss?
E 4 TYPE aux_loss seq_aux_loss | 1 | COEFF 0.0: must be one for each TYPE aux_loss seq_aux_loss
E 4 TYPE aux_loss COEFF 0.1 0.2 | 1 | COEFF 0.1 0.2: must be one for each TYPE aux_loss
E 4 TYPE COEFF | 1 | COEFF: takes at least one value
E 4 COEFF -0.1 | 1 | COEFF -0.1: each must be at least 0
E 4 COEFF nan | 1 | COEFF nan: each must be a finite number
E 4 COEFF a | 1 | COEFF a: each must be a number
E 4 TYPE none COEFF 0.1 | 1 | COEFF 0.1: none has no loss; give 0, or aux_loss
E 4 TYPE sinkhorn COEFF 0.1 | 1 | COEFF 0.1: sinkhorn has no loss
E 4 TYPE sinkhorn CAPACITY 1.0 | 1 | CAPACITY 1.0: not with TYPE sinkhorn
E 4 TYPE sinkhorn aux_loss COEFF 0 0 | 1 | TYPE sinkhorn aux_loss: give each once, | sinkhorn alone
E 4 TYPE aux_loss aux_loss COEFF 1 2 | 1 | TYPE aux_loss aux_loss: give each once
E 4 --moe-z-loss-coeff -1 | 1 | --moe-z-loss-coeff -1.0: must be at least 0
E 4 --moe-input-jitter-eps 1 | 1 | --moe-input-jitter-eps 1.0: must be at least 0 and less than 1
E 4 --moe-router-dtype bf16 | 1 | --moe-router-dtype bf16: must be one of fp32, fp64
E 4 CAPACITY 0 | 1 | CAPACITY 0.0: must be greater than 0
E 4 --moe-token-drop-policy position | 1 | --moe-token-drop-policy position: needs CAPACITY
E 4 --moe-pad-expert-input-to-capacity | 1 | --moe-pad-expert-input-to-capacity: needs CAPACITY
E 4 --moe-shared-expert-gate | 1 | --moe-shared-expert-gate: needs SHARED
E 4 --moe-shared-expert-overlap SHARED 64 | 1 | --moe-shared-expert-overlap: needs DISPATCHER alltoall
E 4 RECOMPUTE shared_experts | 1 | --recompute-modules shared_experts: needs SHARED
E 4 OVERLAP | 1 | OVERLAP: needs DISPATCHER alltoall
E 4 CAPACITY 1.0 --moe-pad-expert-input-to-capacity DISPATCHER alltoall OVERLAP | 1 | not with --moe-pad
E 4 OVERLAP | 1 | OVERLAP: needs DISPATCHER alltoall
E 4 DISPATCHER flex | 1 | DISPATCHER flex: there is no DeepEP; use alltoall
E 4 FREQ 0 | 1 | FREQ 0: must be a number N, or a list of 4 ones and zeros
E 4 FREQ [1,0] | 1 | FREQ [1,0]: must be a number N, or a list of 4
E 4 FREQ [0]*4 | 1 | FREQ [0]*4: no layer has experts; leave out E
E 1025 | 1 | E 1025: must be greater than 0 and at most 1024
E 4 EP 3 | 3 | E 4: must be a multiple of EP 3; nearest 3 or 6
E 3 EP 6 --pp 2 | 6 | E 3: must be a multiple of EP 6; nearest 6
E 4 EP 4 | 2 | EP 4 x ETP 1 = 4: must divide 2 processes; use --nproc 4
E 4 EP 2 ETP 2 --pp 2 | 6 | EP 2 x ETP 2 = 4: must divide 6 processes / pp 2 = 3; use --nproc 8
E 4 TP 2 --no-sp | 2 | TP 2: needs SP with E, or ranks route the same tokens
E 4 TP 2 SP --moe-ffn-hidden-size 65 | 2 | --moe-ffn-hidden-size 65: | multiple of ETP 2; nearest 64 or 66
E 4 TP 2 SP --ffn-hidden-size 65 ETP 1 FREQ 2 | 2 | --ffn-hidden-size 65: must be a multiple of TP 2
E 4 TP 2 SP SHARED 65 | 2 | SHARED 65: must be a multiple of TP 2; nearest 64 or 66
E 4 EP 2 --variable-seq-lengths | 2 | DISPATCHER allgather: must be alltoall with --variable-seq-lengths
E 4 EP 2 --variable-seq-lengths CAPACITY 1.0 --moe-pad-expert-input-to-capacity | 2 | not with --variable-seq
E 4 --variable-seq-lengths TYPE seq_aux_loss COEFF 0.1 | 1 | TYPE seq_aux_loss: | give aux_loss
E 4 --cp 2 --dynamic-context-parallel --variable-seq-lengths | 2 | --dynamic-context-parallel: not with E
E 4 --moe-use-upcycling | 1 | --moe-use-upcycling: needs --load
E 4 --moe-use-upcycling --load A | 1 | --moe-use-upcycling: needs --save
--moe-use-upcycling --load A --save B | 1 | --moe-use-upcycling: needs E
E 4 --moe-use-upcycling --load A --save A | 1 | --save A: must be another folder than --load
E 4 --moe-use-upcycling --moe-ffn-hidden-size 8 | 1 | --moe-ffn-hidden-size 8: must be --ffn-hidden-size 256
E 4 --moe-use-upcycling SHARED 64 | 1 | SHARED 64: not with --moe-use-upcycling
--moe-enable-deepep | 1 | --moe-enable-deepep: | --moe-token-dispatcher-type alltoall
--moe-layer-recompute | 1 | --moe-layer-recompute: | --recompute-modules moe
"""
CASES = [[cell.strip() for cell in line.split("|")] for line in WRONG.strip().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_error_has_value_rule_and_fix(case):
    flags, world, *parts = case
    parsed = parse(f"{PLAIN} {spelled(flags)}".split())
    messages = [*parsed.errors, *validate(parsed.config, int(world))]
    assert any(all(spelled(part) in message for part in parts) for message in messages), messages


@pytest.mark.parametrize("world", (2, 4, 6, 10))
def test_the_number_of_processes_of_an_error_works(world):
    config = config_of("E 4 EP 4 --pp 2 --global-batch-size 24")
    found = [re.search(r"must divide .*; use --nproc (\d+)", message) for message in validate(config, world)]
    [processes] = [match[1] for match in found if match]
    assert validate(config, int(processes)) == []


RIGHT = """
E 8 | 1
E 8 EP 8 | 8
E 8 EP 4 TP 2 SP ETP 1 | 8
E 8 EP 2 TP 2 SP --pp 2 --cp 2 | 8
E 8 EP 2 ETP 2 | 4
E 8 TP 2 SP --ffn-hidden-size 65 --moe-ffn-hidden-size 64 | 2
E 8 GROUPS 4 BEST 2 TOPK 4 BIAS SCORES sigmoid TYPE seq_aux_loss none COEFF 1e-4 0 | 1
E 8 TOPK 1 --moe-router-pre-softmax CAPACITY 1.25 --moe-token-drop-policy position | 1
E 8 TOPK 1 SCORES sigmoid TYPE sinkhorn | 1
E 8 TYPE aux_loss,seq_aux_loss,global_aux_loss COEFF 1e-2,1e-3,1e-3 --moe-z-loss-coeff 1e-3 | 1
E 8 SHARED 64 --moe-shared-expert-gate --moe-shared-expert-overlap DISPATCHER alltoall EP 2 | 2
E 8 OVERLAP DISPATCHER alltoall EP 2 RECOMPUTE core_attn moe_act | 2
E 8 OVERLAP DISPATCHER alltoall CAPACITY 1 SHARED 64 --moe-shared-expert-overlap RECOMPUTE shared_experts | 1
E 8 --no-disable-bias-linear --no-moe-permute-fusion | 1
E 8 --no-moe-grouped-gemm SHARED 64 | 1
E 8 --variable-seq-lengths EP 2 --cp 2 | 4
E 8 --variable-seq-lengths EP 4 --cp 2 DISPATCHER alltoall TYPE global_aux_loss COEFF 0.1 | 4
E 8 EP 2 --ddp-average-in-collective --use-distributed-optimizer | 2
E 8 --moe-use-upcycling --load A --save B TOPK 1 --moe-router-pre-softmax | 1
--etp 1 | 2
"""


@pytest.mark.parametrize("case", RIGHT.strip().splitlines())
def test_what_is_right_is_taken(case):
    flags, world = case.split("|")
    flags = flags.replace("aux_loss,seq_aux_loss,global_aux_loss", "aux_loss seq_aux_loss global_aux_loss")
    config = config_of(flags)
    assert validate(config, int(world)) == []
    whole = resolve(config, int(world))
    assert validate(whole, int(world)) == [] and resolve(whole, int(world)) == whole
    assert from_toml(to_toml(whole)) == whole


def test_a_command_line_of_megatron():
    """Mixtral, as Megatron's example has it."""
    config = config_of(
        "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer "
        "--expert-model-parallel-size 8 --moe-router-fusion --moe-permute-fusion"
    )
    assert validate(config, 8) == [] and config.model.moe_aux_loss_coeff == (0.01,)
    assert resolve(config, 8).model.moe_ffn_hidden_size == 256


@pytest.mark.parametrize(
    "freq, layers",
    [("1", "1111111"), ("3", "1001001"), ("[0]*1+[1]*6", "0111111"), ("([1]+[0])*3+[1]", "1010101")],
)
def test_layers_that_have_experts(freq, layers):
    shape = dict(num_layers=7, hidden_size=8, num_attention_heads=2, moe_layer_freq=freq)
    assert TransformerConfig(**shape, num_experts=4).moe_layers == [bool(int(digit)) for digit in layers]
    assert TransformerConfig(**shape).moe_layers == [False] * 7


def test_a_run_goes_on_with_other_ranks_and_kernels_alone():
    one = resolve(config_of("E 8 EP 2 DISPATCHER allgather"), 4)
    other = resolve(
        config_of("E 8 EP 4 DISPATCHER alltoall --no-moe-grouped-gemm --moe-per-layer-logging"), 4
    )
    assert resume_conflicts(one, other) == []
    assert resume_conflicts(one, resolve(config_of("E 8 EP 2 TOPK 4"), 4)) == [
        "--moe-router-topk 4: the run in this folder has 2"
    ]


def test_the_limit_is_the_kernels():
    assert f"EXPERTS = {MAX_EXPERTS}," in (ROOT / "cuda" / "permute.cu").read_text()
