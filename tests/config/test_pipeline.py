"""Settings of pipelines, traces and profiles: wrong ones named with a way out, right ones resolved."""

import re

import pytest

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import from_toml, parse, to_toml
from nanomegatron.config.run_folder import resume_conflicts
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.config.split import layout_sizes, stage_ranges
from tests.config.test_reuse import full_name

GOOD = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 "
    "--train-iters 10"
)
NAMES = {  # short for the flags below
    "PP": "--pipeline-model-parallel-size",
    "VPP": "--num-virtual-stages-per-pipeline-rank",
    "SIZE": "--num-layers-per-virtual-pipeline-stage",
    "GROUP": "--microbatch-group-size-per-virtual-pipeline-stage",
    "FIRST": "--decoder-first-pipeline-num-layers",
    "LAST": "--decoder-last-pipeline-num-layers",
    "SCHEDULE": "--pipeline-schedule",
    "EMBEDDING": "--account-for-embedding-in-pipeline-split",
    "LOSS": "--account-for-loss-in-pipeline-split",
    "SPLIT": "--pipeline-split",
    "LAYOUT": "--pipeline-model-parallel-layout",
}


def spelled(text: str) -> str:
    return re.sub(rf"\b({'|'.join(NAMES)})\b", lambda word: NAMES[word[0]], text)


def config_of(flags: str) -> Config:
    parsed = parse(f"{GOOD} {spelled(flags)}".split())
    assert parsed.errors == ()
    return parsed.config


# flags behind GOOD | processes | what the message must hold: the flag, the value, the way out
WRONG = """
VPP 2 | 2 | VPP 2: needs PP greater than 1
SIZE 2 SCHEDULE zb-h1 | 1 | SIZE 2, SCHEDULE zb-h1: need PP greater than 1
FIRST 2 LOSS | 2 | FIRST 2, LOSS: need PP
SPLIT flops | 1 | SPLIT flops: needs PP greater than 1
PP 0 | 1 | PP 0: must be greater than 0
PP 2 VPP 0 | 2 | VPP 0: must be greater than 0
PP 2 SIZE 2 VPP 2 | 2 | VPP 2: not with SIZE; give the number of pieces
PP 2 SIZE 3 | 2 | --num-layers 8: must be a multiple of PP 2 x SIZE 3; | nearest --num-layers 6 or 12
PP 2 SIZE 2 EMBEDDING | 2 | --num-layers 8 + 1: must | nearest --num-layers 7 or 11
PP 2 SIZE 2 FIRST 2 | 2 | FIRST 2: not with SIZE; give the number of pieces
PP 2 SIZE 2 SPLIT flops | 2 | SPLIT flops: not with SIZE; give the number of pieces
PP 2 VPP 2 SCHEDULE 1f1b | 2 | SCHEDULE 1f1b: has 1 of | not 2; leave VPP out, or use interleaved
PP 2 SIZE 2 SCHEDULE zb-h1 | 2 | SCHEDULE zb-h1: has 1 of | not 2
PP 2 VPP 4 SCHEDULE zb-v | 2 | SCHEDULE zb-v: has 2 of | not 4
PP 2 SCHEDULE interleaved | 2 | SCHEDULE interleaved: needs VPP 2 or more
PP 2 SCHEDULE zbv | 2 | SCHEDULE zbv: must be one of gpipe, 1f1b | did you mean zb-v?
PP 2 GROUP 4 | 2 | GROUP 4: is for SCHEDULE interleaved, not 1f1b
PP 4 VPP 2 GROUP 3 | 4 | GROUP 3: must be at least PP 4
PP 4 GROUP 0 VPP 2 | 4 | GROUP 0: must be at least PP 4
PP 3 | 3 | --num-layers 8: must be a multiple of 3 pipeline ranks; | or SPLIT flops
PP 2 VPP 3 | 2 | --num-layers 8: | multiple of 2 pipeline ranks x 3 pieces; nearest --num-layers 6 or 12
PP 2 FIRST 0 | 2 | FIRST 0: must be greater than 0
PP 2 FIRST 3 LAST 4 | 2 | --num-layers 8: FIRST 3 LAST 4 make 7; leave one out
PP 4 SCHEDULE zb-v LAST 2 | 4 | LAST 2: the last stage is on rank 0, as the first; use FIRST
PP 2 FIRST 4 LOSS | 2 | FIRST 4: not with EMBEDDING or LOSS; leave one out
PP 2 LAST 4 SPLIT flops | 2 | LAST 4: not with SPLIT flops; leave one out
PP 2 SPLIT flops LOSS | 2 | LOSS: not with SPLIT flops; leave one out
PP 2 SPLIT flops LAYOUT Ett!ttttttL | 2 | SPLIT flops: not with LAYOUT; leave one out
PP 16 SPLIT flops | 16 | --num-layers 8: leave nothing for pipeline rank 8 of 16; use PP 9 or less
PP 2 --tp 2 | 6 | --tensor-model-parallel-size 2 x PP 2: must divide the number of processes, 6; use --nproc 8
PP 4 | 2 | PP 4: must divide the number of processes, 2; use --nproc 4 or a size of 1, 2
PP 2 --tp 2 --dp 2 | 4 | -size 2: 4 processes / --tensor-model-parallel-size 2 / PP 2 give 1
PP 2 --global-batch-size 6 | 8 | --global-batch-size 6: must be a multiple of --micro-batch-size 1 x dp 4 = 4
LAYOUT EttttttttL | 1 | LAYOUT EttttttttL: needs PP greater than 1
PP 2 LAYOUT Etttt!ttttL SIZE 2 | 2 | LAYOUT Etttt!ttttL: not with SIZE
PP 2 LAYOUT Etttt!tttL | 2 | LAYOUT Etttt!tttL: has 7 layers (t), not --num-layers 8
PP 2 LAYOUT Et!t*5!ttL | 2 | has 3 stages, which must be a multiple of PP 2
PP 2 LAYOUT Etttt!tttmL | 2 | LAYOUT Etttt!tttmL: 'm': there is no multi-token prediction
PP 2 LAYOUT Etttt!ttxtL | 2 | LAYOUT Etttt!ttxtL: 'x': must be E, t, L, ! or (...)*n
PP 2 LAYOUT Etttt!(tt)*(2)L | 2 | '(': must be E, t, L
PP 2 LAYOUT tttt!ttttL | 2 | must begin with its only E and end with its only L
PP 2 LAYOUT Etttt!ttttLL | 2 | must begin with its only E
PP 2 LAYOUT E!t*1000000L | 2 | LAYOUT E!t*1000000L: '0': must be
PP 2 LAYOUT E(t*99999)*99999!L | 2 | is longer than 100000 layers and stages
PP 3 LAYOUT Et*4!!t*4L | 3 | LAYOUT Et*4!!t*4L: leaves nothing for pipeline rank 1
PP 2 LAYOUT Et*4!t*4L FIRST 4 | 2 | FIRST 4: not with LAYOUT; leave one out
PP 2 LAYOUT Et*4!t*4L VPP 2 | 2 | VPP 2: LAYOUT Et*4!t*4L has 1 on each of 2 ranks; leave it out
PP 2 LAYOUT Et!t!ttt!tttL SCHEDULE 1f1b | 2 | SCHEDULE 1f1b: has 1 of | not 2
--delay-wgrad-compute | 1 | --delay-wgrad-compute: | SCHEDULE zb-h1 or zb-v defers weight gradients
--trace-dir x --trace-iterations | 1 | --trace-iterations: takes at least one value
--trace-iterations 0 3 | 1 | --trace-iterations 0 3: each must be greater than 0
--profile --profile-step-start 12 | 1 | --profile-step-end 12: must exceed --profile-step-start 12
--profile --profile-ranks 0 2 | 2 | --profile-ranks 2: must be of the processes 0 to 1
--record-memory-history | 1 | --record-memory-history: needs a GPU
"""
CASES = [[cell.strip() for cell in spelled(line).split(" | ")] for line in WRONG.strip().splitlines()]


@pytest.mark.parametrize(
    "case", CASES, ids=[line.rpartition("|")[2].strip() for line in WRONG.strip().splitlines()]
)
def test_each_error_has_value_rule_and_fix(case):
    flags, world, *parts = (cell.replace("!", "|") for cell in case)  # a stage ends at |
    parsed = parse(f"{GOOD} {flags}".split())
    messages = [*parsed.errors, *validate(parsed.config, int(world))]
    assert any(all(part in message for part in parts) for message in messages), messages
    assert len(messages) == 1 or "must be greater than 0" in parts[0]  # from which others may follow


# flags behind GOOD | processes | schedule | pieces of a rank | layers of the stages
RIGHT = """
| 1 | 1f1b | 1 | 8
VPP 1 | 1 | 1f1b | 1 | 8
PP 2 | 4 | 1f1b | 1 | 4 4
PP 4 --tp 2 SCHEDULE zb-h1 | 8 | zb-h1 | 1 | 2 2 2 2
PP 2 VPP 2 | 2 | interleaved | 2 | 2 2 2 2
PP 2 SIZE 2 GROUP 3 | 2 | interleaved | 2 | 2 2 2 2
PP 2 SIZE 4 | 2 | 1f1b | 1 | 4 4
PP 2 SIZE 2 SCHEDULE gpipe | 2 | gpipe | 2 | 2 2 2 2
PP 2 SCHEDULE zb-v | 2 | zb-v | 2 | 2 2 2 2
PP 2 SIZE 2 SCHEDULE zb-v | 2 | zb-v | 2 | 2 2 2 2
PP 2 VPP 2 FIRST 6 | 2 | interleaved | 2 | 3 1 3 1
PP 3 FIRST 3 LAST 1 | 3 | 1f1b | 1 | 3 4 1
PP 3 LOSS | 3 | 1f1b | 1 | 3 3 2
PP 5 SIZE 1 EMBEDDING LOSS | 5 | interleaved | 2 | 0 1 1 1 1 1 1 1 1 0
PP 3 SPLIT flops | 3 | 1f1b | 1 | 3 3 2
PP 2 LAYOUT E,t*5!tttL | 2 | 1f1b | 1 | 5 3
PP 2 LAYOUT Ett!(ttt!)*2L | 2 | interleaved | 2 | 2 3 3 0
PP 2 VPP 2 LAYOUT Ett!ttt!ttt!L SCHEDULE zb-v | 2 | zb-v | 2 | 2 3 3 0
PP 2 --train-samples 20 | 4 | 1f1b | 1 | 4 4
PP 2 --use-distributed-optimizer --overlap-grad-reduce --bf16 --optimizer-cpu-offload | 4 | 1f1b | 1 | 4 4
--profile --profile-ranks 0 1 --trace-dir x --trace-iterations 3 7 | 2 | 1f1b | 1 | 8
"""


@pytest.mark.parametrize("line", RIGHT.strip().splitlines())
def test_what_is_right_is_resolved_and_can_be_read_again(line):
    flags, world, schedule, chunks, layers = (cell.replace("!", "|") for cell in line.split("|"))
    config, world = config_of(flags), int(world)
    assert validate(config, world) == []
    config = resolve(config, world)
    parallel = config.parallel
    assert (parallel.schedule, parallel.chunks) == (schedule.strip(), int(chunks))
    assert [len(part) for part in stage_ranges(parallel, 8)] == [*map(int, layers.split())]
    assert parallel.data_parallel_size == world // parallel.ranks_per_replica
    assert config.data.global_batch_size == parallel.data_parallel_size
    assert resolve(config, world) == config and validate(config, world) == []
    assert from_toml(to_toml(config)) == config


LAYOUTS = ["EttL", "Ett|(tt|)*2t,L", "E|t*3|(t|)*4|tL", "E||(tt,)*3|L", "Et*2|tt|t|L", "(E)*1(t|t)*7L", "E|L"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_in_letters_is_megatrons(layout):
    """The layers of every stage as Megatron Core's own parser has them."""
    module = "megatron.core.transformer.pipeline_parallel_layer_layout"
    parser = pytest.importorskip(module).PipelineParallelLayerLayout
    theirs = [[kind.name for kind in stage] for stage in parser.parse_str_to_list(layout)]
    assert layout_sizes(layout) == [stage.count("decoder") for stage in theirs]
    assert (theirs[0][0], theirs[-1][-1]) == ("embedding", "loss")


def test_settings_of_a_library_user_need_no_resolving():
    assert (ParallelConfig().schedule, ParallelConfig().chunks) == ("1f1b", 1)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=3)
    assert (parallel.schedule, parallel.chunks) == ("interleaved", 3)
    assert ParallelConfig(pipeline_schedule="zb-v").chunks == 2


def test_the_head_weighs_in_the_split_by_cost():
    parallel = ParallelConfig(pipeline_model_parallel_size=4, pipeline_split="flops")
    assert [len(part) for part in stage_ranges(parallel, 32, head=2.4)] == [9, 9, 8, 6]
    even = ParallelConfig(pipeline_model_parallel_size=4)
    assert [len(part) for part in stage_ranges(even, 32, head=2.4)] == [8, 8, 8, 8]


def test_the_number_of_pieces_puts_their_size_away(tmp_path):
    """--vpp on the command line holds against the other way to say it in a file, and the other way round."""
    path = tmp_path / "c.toml"
    for written, given in (("num-layers-per-virtual-pipeline-stage = 1", "VPP 2"), ("vpp = 4", "SIZE 2")):
        path.write_text(f"pp = 2\n{written}\n")
        config = config_of(f"--config {path} {given}")
        assert validate(config, 2) == [] and resolve(config, 2).parallel.chunks == 2


def test_a_run_goes_on_in_another_pipeline_and_is_named_by_its_own():
    one, two = (
        resolve(config_of(f"--global-batch-size 4 {flags}"), 4) for flags in ("", "PP 4 SCHEDULE zb-v")
    )
    assert resume_conflicts(one, two) == [] and full_name(one) != full_name(two)
    looked_at = config_of(
        "--trace-dir x --profile --profile-step-end 20 --profile-ranks 1 --trace-iterations 5"
    )
    assert full_name(resolve(looked_at, 4)) == full_name(one)


def test_a_gpu_records_its_memory():
    config = config_of("--record-memory-history --memory-snapshot-path y")
    assert validate(config, 1, "cuda") == [] and len(validate(config, 1, "cpu")) == 1


def test_a_step_is_repeated_on_gpus_only_if_it_gives_the_same_bits():
    config = config_of("--rerun-mode validate_results")
    assert validate(config, 1, "cpu") == []
    assert ["add --deterministic-mode" in error for error in validate(config, 1, "cuda")] == [True]
    exact = config_of("--rerun-mode validate_results --deterministic-mode")
    assert validate(exact, 1, "cuda") == []


def test_megatrons_flags_of_what_is_always_so():
    flags = "--use-pytorch-profiler --nvtx-ranges --overlap-p2p-communication-warmup-flush"
    parsed = parse(f"{GOOD} {flags} --no-overlap-p2p-communication".split())
    assert parsed.errors == () and [note.split(": ")[1] for note in parsed.notes[:-1]] == [
        *["always on"] * 3,
        "not needed here",
    ]
