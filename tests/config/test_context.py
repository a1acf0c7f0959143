"""Settings of context parallelism: wrong ones named with a way out, right ones resolved, replicas counted."""

import dataclasses
import re

import pytest

from nanomegatron.config.check import resolve, run_notes, validate
from nanomegatron.config.cli import from_toml, parse, to_toml
from nanomegatron.config.run_folder import resume_conflicts
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.variants.packing import Ranks
from tests.config.test_reuse import full_name

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 96 --mock-data --vocab-size 100 "
    "--train-iters 10"
)
NAMES = {  # short for the flags below
    "CP": "--context-parallel-size",
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "TYPE": "--cp-comm-type",
    "SIZES": "--hierarchical-context-parallel-sizes",
    "DYNAMIC": "--dynamic-context-parallel",
    "MOST": "--max-seqlen-per-dp-cp-rank",
    "LENGTHS": "--variable-seq-lengths",
    "HEADS": "--num-attention-heads",
    "GROUPS": "--num-query-groups",
    "MICRO": "--micro-batch-size",
}


def spelled(text: str) -> str:
    return re.sub(rf"\b({'|'.join(NAMES)})\b", lambda word: NAMES[word[0]], text)


def config_of(flags: str) -> Config:
    parsed = parse(f"{GOOD} {spelled(flags)}".split())
    assert parsed.errors == ()
    return parsed.config


# flags behind GOOD | processes | what the message must hold: the flag, the value, the way out
WRONG = """
CP 0 | 1 | CP 0: must be greater than 0
TYPE a2a | 2 | TYPE a2a: needs CP greater than 1
SIZES 2 2 | 2 | SIZES 2 2: needs CP greater than 1
TYPE a2a+p2p SIZES 2 2 | 2 | TYPE a2a+p2p, SIZES 2 2: need CP greater than 1
DYNAMIC LENGTHS | 2 | DYNAMIC: needs CP greater than 1
CP 2 TYPE ring | 2 | TYPE ring: each must be one of p2p, a2a, allgather, a2a+p2p
CP 2 TYPE allgather allgathr p2p p2p | 2 | p2p: each must be one of | did you mean allgather?
CP 2 TYPE p2p a2a | 2 | TYPE p2p a2a: must be one, or one for each of --num-layers 4
CP 2 TYPE | 2 | TYPE: takes at least one value
CP 4 TYPE a2a+p2p | 4 | SIZES: must have the product of CP 4 for TYPE a2a+p2p, such as 2 2
CP 8 TYPE p2p a2a a2a+p2p p2p | 8 | SIZES: must have the product of CP 8 | such as 2 4
CP 4 SIZES 2 2 | 4 | SIZES 2 2: needs TYPE a2a+p2p
CP 4 SIZES 2 4 TYPE a2a+p2p | 4 | SIZES 2 4: must have the product of CP 4 | such as 2 2
CP 4 SIZES 0 4 TYPE a2a+p2p | 4 | SIZES 0 4: each must be greater than 0
CP 4 SIZES 2 TYPE a2a+p2p | 4 | SIZES 2: takes 2 values
CP 3 TYPE a2a HEADS 8 | 3 | TYPE a2a: 8 query heads must be a multiple of 3 ranks, | ; use p2p or allgather
CP 4 TP 4 TYPE a2a | 16 | TYPE a2a: 2 query heads of a tp rank | multiple of 4 ranks, | ; use p2p or allgather
CP 4 HEADS 12 GROUPS 6 --hidden-size 96 TYPE a2a | 4 | 4 ranks, and 6 key/value heads a multiple or a divisor
CP 6 HEADS 12 GROUPS 4 --hidden-size 96 TYPE a2a+p2p SIZES 6 1 | 6 | 4 key/value heads a multiple or a divisor
CP 4 --attention-dropout 0.1 | 4 | --attention-dropout 0.1: there is none with CP 4; set --attention-dropout 0
CP 2 --reset-attention-mask MICRO 2 | 2 | MICRO 2: must be 1 for documents (--reset-attention-mask) over CP 2
LENGTHS MICRO 2 | 1 | MICRO 2: must be 1 with LENGTHS, which packs documents
LENGTHS PP 2 | 2 | LENGTHS: not with PP greater than 1, whose messages are all of one size
CP 2 DYNAMIC | 2 | DYNAMIC: needs LENGTHS, documents of different lengths
CP 6 DYNAMIC LENGTHS | 6 | DYNAMIC: has groups of 2, 4, 8 ... ranks; CP 6 must be such a number
CP 2 DYNAMIC LENGTHS PP 2 | 4 | DYNAMIC, LENGTHS: not with PP greater than 1
CP 2 DYNAMIC LENGTHS --data-parallel-sharding-strategy optim_grads | 2 | DYNAMIC: not with | use optim
CP 2 DYNAMIC LENGTHS --trace-dir t | 2 | DYNAMIC: not with --trace-dir | use --profile
CP 4 DYNAMIC LENGTHS TYPE a2a+p2p SIZES 2 2 | 4 | DYNAMIC: not with TYPE a2a+p2p; use p2p, a2a or allgather
CP 2 DYNAMIC LENGTHS --trace-dir x | 2 | DYNAMIC: not with --trace-dir
CP 2 MOST 96 | 2 | MOST 96: needs DYNAMIC
CP 2 DYNAMIC LENGTHS MOST 47 | 2 | MOST 47: x CP 2 = 94: must hold --seq-length 96; give 48 or more
CP 2 DYNAMIC LENGTHS MOST 0 | 2 | MOST 0: must be greater than 0
CP 5 | 5 | --seq-length 96: must be a multiple of 2 x CP 5 = 10; nearest 90 or 100
CP 3 TP 2 --sp --seq-length 10 | 6 | --seq-length 10: must be a multiple of CP 3 x TP 2 = 6; nearest 6 or 12
CP 2 TP 8 --sp --seq-length 40 | 16 | --seq-length 40: | multiple of CP 2 x TP 8 = 16; nearest 32 or 48
CP 2 TP 3 --sp HEADS 6 --hidden-size 96 --seq-length 90 | 6 | multiple of 2 x CP 2 x TP 3 = 12; nearest 84
TP 5 --sp HEADS 5 --hidden-size 100 | 5 | --seq-length 96: must be a multiple of TP 5; nearest 95 or 100
CP 2 TP 2 | 6 | TP 2 x CP 2: must divide the number of processes, 6; use --nproc 8 or a size of 1, 2, 3, 6
CP 2 --train-samples 8 | 1 | CP 2: must divide the number of processes, 1; use --nproc 2 or a size of 1
CP 4 | 2 | CP 4: must divide the number of processes, 2; use --nproc 4 or a size of 1, 2
CP 2 TP 2 PP 2 --dp 3 | 8 | --data-parallel-size 3: 8 processes / TP 2 / CP 2 / PP 2 give 1; start 24
CP 2 --dp 2 | 2 | --data-parallel-size 2: 2 processes / CP 2 give 1; start 4 processes
CP 2 --global-batch-size 6 | 8 | --global-batch-size 6: | multiple of MICRO 1 x dp 4 = 4; nearest 4 or 8
CP 2 --bf16 --fp8-format hybrid --seq-length 112 | 2 | 112 x MICRO 1 / cp 2 = 56: must | 96 or 128
CP 2 TP 2 --sp --bf16 --fp8-format e4m3 --seq-length 96 | 4 | / cp 2 / tp 2 = 24: | --seq-length 64 or 128
"""
CASES = [[cell.strip() for cell in spelled(line).split(" | ")] for line in WRONG.strip().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[line.partition("|")[0] for line in WRONG.strip().splitlines()])
def test_each_error_has_value_rule_and_fix(case):
    flags, world, *parts = case
    parsed = parse(f"{GOOD} {flags}".split())
    messages = [*parsed.errors, *validate(parsed.config, int(world))]
    assert any(all(part in message for part in parts) for message in messages), messages
    follow = ("must be greater than 0", "takes 2 values")  # from which others may
    assert len(messages) == 1 or parts[0].endswith(follow), messages


def test_all_errors_come_together():
    config = config_of(
        "CP 3 TYPE a2a a2a a2a+p2p --attention-dropout 0.1 MICRO 2 --reset-attention-mask DYNAMIC "
        "MOST 16 --seq-length 100 PP 2 --data-parallel-sharding-strategy optim_grads"
    )
    found = [message.split(":")[0] for message in validate(config, 6)]
    wanted = (
        "--seq-length 100 | TYPE a2a a2a a2a+p2p | SIZES | TYPE a2a | --attention-dropout 0.1 | MICRO 2 | "
        "DYNAMIC | DYNAMIC | DYNAMIC | DYNAMIC | DYNAMIC | MOST 16"
    )
    assert sorted(found) == sorted(spelled(wanted).split(" | "))


# flags behind GOOD | processes | replicas | type of each layer
RIGHT = """
CP 1 | 1 | 1 | p2p p2p p2p p2p
TYPE p2p | 2 | 2 | p2p p2p p2p p2p
CP 2 | 4 | 2 | p2p p2p p2p p2p
CP 3 --seq-length 96 | 3 | 1 | p2p p2p p2p p2p
CP 2 TP 2 PP 2 --sp | 16 | 2 | p2p p2p p2p p2p
CP 8 TYPE a2a | 8 | 1 | a2a a2a a2a a2a
CP 8 TYPE a2a GROUPS 2 --seq-length 64 | 8 | 1 | a2a a2a a2a a2a
CP 4 TYPE all_gather | 4 | 1 | allgather allgather allgather allgather
CP 4 TYPE p2p allgather a2a p2p | 4 | 1 | p2p allgather a2a p2p
CP 8 TYPE a2a+p2p SIZES 4 2 HEADS 4 | 8 | 1 | a2a+p2p a2a+p2p a2a+p2p a2a+p2p
CP 4 TYPE a2a+p2p p2p a2a+p2p p2p SIZES 2 2 | 4 | 1 | a2a+p2p p2p a2a+p2p p2p
CP 2 --reset-attention-mask --reset-position-ids --eod-mask-loss | 2 | 1 | p2p p2p p2p p2p
CP 2 MICRO 3 --reset-position-ids | 2 | 1 | p2p p2p p2p p2p
CP 2 --window-size 7 0 --window-attn-skip-freq 2 | 2 | 1 | p2p p2p p2p p2p
CP 2 --hidden-dropout 0.1 --use-distributed-optimizer --overlap-grad-reduce | 4 | 2 | p2p p2p p2p p2p
CP 4 LENGTHS | 4 | 1 | p2p p2p p2p p2p
CP 4 LENGTHS --seq-length 95 TP 2 --sp --bf16 --fp8-format e4m3 | 8 | 1 | p2p p2p p2p p2p
CP 4 DYNAMIC LENGTHS MOST 32 TYPE a2a | 8 | 2 | a2a a2a a2a a2a
CP 4 --hybrid-context-parallel LENGTHS --use-distributed-optimizer | 4 | 1 | p2p p2p p2p p2p
CP 2 TP 2 --sp --bf16 --fp8-format hybrid --seq-length 128 | 4 | 1 | p2p p2p p2p p2p
"""


@pytest.mark.parametrize("line", RIGHT.strip().splitlines())
def test_what_is_right_is_resolved_and_can_be_read_again(line):
    flags, world, replicas, types = (cell.strip() for cell in line.split(" | "))
    config, world = config_of(flags), int(world)
    assert validate(config, world) == []
    config = resolve(config, world)
    parallel = config.parallel
    assert parallel.data_parallel_size == int(replicas) == world // parallel.ranks_per_replica
    assert config.data.global_batch_size == int(replicas) * config.data.micro_batch_size
    assert parallel.cp_types(4) == types.split()
    assert resolve(config, world) == config and validate(config, world) == []
    assert from_toml(to_toml(config)) == config


def test_sizes_of_a_replica():
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, context_parallel_size=3, pipeline_model_parallel_size=5
    )
    assert parallel.ranks_per_replica == 30


def test_tokens_of_a_rank_follow_from_the_length():
    """Where they are not given all ranks together can take one document of the greatest length."""
    for flags, most in (("LENGTHS", 24), ("DYNAMIC LENGTHS", 24), ("DYNAMIC LENGTHS MOST 30", 30)):
        assert Ranks.from_config(resolve(config_of(f"CP 4 {flags}"), 4)).limit == most


def test_documents_are_told_by_the_data():
    """Beside whole documents the flags for ends inside of samples do nothing, which is said."""
    flags = "--reset-position-ids --reset-attention-mask"
    assert run_notes(config_of(flags)) == [] == run_notes(config_of("LENGTHS"))
    (note,) = run_notes(config_of(f"LENGTHS {flags}"))
    assert "--variable-seq-lengths" in note and "not at end-of-document tokens" in note


def test_samples_count_replicas():
    config = resolve(config_of("CP 2 PP 2 --train-iters 5 --global-batch-size 4"), 8)
    assert config.parallel.data_parallel_size == 2 and config.run.train_iters == 5
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --mock-data --vocab-size 9 --cp 2"
    by_samples = parse(f"{flags} --train-samples 12".split()).config
    assert resolve(by_samples, 8).run.train_iters == 3


def test_a_run_goes_on_with_another_cp_and_is_named_by_its_own():
    one, two = (resolve(config_of(f"--global-batch-size 4 {flags}"), 4) for flags in ("", "CP 2 TYPE a2a"))
    assert resume_conflicts(one, two) == [] and full_name(one) != full_name(two)
    (message,) = resume_conflicts(one, resolve(config_of("--global-batch-size 4 LENGTHS"), 4))
    assert message.startswith("--variable-seq-lengths True: the run in this folder has False")


def test_megatrons_defaults():
    pytest.importorskip("megatron.core")
    from megatron.core.model_parallel_config import ModelParallelConfig as Theirs

    theirs = {field.name: field.default for field in dataclasses.fields(Theirs)}
    ours = ParallelConfig()
    assert (ours.cp_comm_type, ours.hierarchical_context_parallel_sizes) == (("p2p",), ())
    assert theirs["hierarchical_context_parallel_sizes"] is None and theirs["context_parallel_size"] == 1
    assert ours.dynamic_context_parallel == theirs["hybrid_context_parallel"]
    assert ours.max_seqlen_per_dp_cp_rank == theirs["max_seqlen_per_dp_cp_rank"]
