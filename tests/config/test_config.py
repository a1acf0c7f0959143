"""Flags, files and checks: what they give, and that every wrong one is named with its value and a way out."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import (
    PRESETS,
    ConfigError,
    Parsed,
    build_config,
    from_toml,
    megatron_flags,
    parse,
    to_toml,
)
from nanomegatron.config.early import early_answer
from nanomegatron.config.help import help_text
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.run_folder import resume_conflicts
from nanomegatron.config.settings import Config, padded_vocab_size
from tests.config.test_reuse import full_name

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4"
GOOD = f"{SHAPE} --mock-data --vocab-size 100 --seq-length 32 --train-iters 10"


def read(flags: str) -> Parsed:
    return parse(flags.split())


def errors_of(flags: str, world: int = 1) -> list[str]:
    parsed = read(flags)
    return [*parsed.errors, *validate(parsed.config, world)]


# flags behind GOOD | processes | what the message must hold: the flag, the value, the way out
WRONG = """
--hiden-size 3 | 1 | --hiden-size: unknown flag | did you mean --hidden-size
--xyzzy | 1 | --xyzzy: unknown flag | --help all
--tpp 2 | 1 | --tpp: unknown flag | did you mean --tensor-model-parallel-size (--tp)
-- 2 | 1 | --: unknown flag
--skip-train yes | 1 | --eval-only yes: a switch
--num-layers | 1 | --num-layers: takes one value
--num-layers 2 3 | 1 | --num-layers 2 3: takes one value
--num-layers two | 1 | --num-layers two: must be a whole number
--num-layers 2.5 | 1 | --num-layers 2.5: must be a whole number
--lr fast | 1 | --lr fast: must be a number
--swiglu yes | 1 | --swiglu yes: a switch
--normalization rmsnorm | 1 | --normalization rmsnorm: must be one of | did you mean RMSNorm
--position-embedding-type rotary | 1 | rotary: must be one of learned_absolute, rope
--attention-backend cudnn | 1 | --attention-backend cudnn: must be one of auto
--lr-decay-style cosin | 1 | did you mean cosine
--lr-wsd-decay-style sqrt | 1 | --lr-wsd-decay-style sqrt: must be one of
--dataloader-type external | 1 | --dataloader-type external: must be one of single, cyclic
--tokenizer-type Bert | 1 | must be one of ByteTokenizer
--ckpt-format zarr | 1 | --ckpt-format zarr: must be one of sharded, torch_dist, torch
--device tpu | 1 | --device tpu: must be one of auto
--config nowhere | 1 | --config nowhere: no such file | llama3-8b
--fp8-format hybrid --no-bf16 | 1 | --fp8-format hybrid: needs --bf16
--main-params-dtype fp16 | 1 | --main-params-dtype: | not here | main weights are fp32
--use-megatron-fsdp | 1 | --use-megatron-fsdp: | replicas are whole
--overlap-param-gather --no-use-distributed-optimizer | 1 | needs --use-distributed-optimizer
--recompute-method block | 1 | --recompute-method block: needs --recompute-granularity full
--recompute-activations --recompute-modules norms | 1 | norms: each must be one of core_attn, mlp
--recompute-granularity full --recompute-method block --recompute-num-layers 0 | 1 | --recompute-num-layers 0:
--distribute-saved-activations | 1 | --distribute-saved-activations: needs --recompute-granularity full
--exp-avg-dtype bf16 | 1 | --exp-avg-dtype bf16: needs --use-precision-aware-optimizer
--grad-reduce-in-bf16 | 1 | --grad-reduce-in-bf16: needs --bf16
--use-precision-aware-optimizer --main-grads-dtype bf16 | 1 | --main-grads-dtype bf16: needs --bf16
--optimizer-offload-fraction 0.5 | 1 | --optimizer-offload-fraction 0.5: needs --optimizer-cpu-offload
--optimizer-offload-fraction 2 --cpu-offload-optimizer --bf16 | 1 | 2.0: must be greater than 0 and at most 1
--overlap-cpu-optimizer-d2h-h2d | 1 | needs --optimizer-cpu-offload
--optimizer-cpu-offload --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 | 1 | moments in fp32
--optimizer-cpu-offload --no-bf16 | 1 | --optimizer-cpu-offload: needs --bf16 or --fp16
--recompute-modules mlp | 1 | --recompute-modules mlp: needs --recompute-granularity selective
--recompute-activations --recompute-modules | 1 | --recompute-modules: takes at least one value
--use-distributed-optimizer --data-parallel-sharding-strategy no_shard | 1 | -optimizer: not with --data
--ddp-bucket-size 0 | 1 | --ddp-bucket-size 0: must be greater than 0
--data-parallel-sharding-strategy optim_grads_params | 1 | are not sharded over dp | use optim_grads
--rampup-batch-size 1 2 3 | 1 | --rampup-batch-size 1 2 3: | --global-batch-size
--optimizer sgd | 1 | --optimizer sgd: here only adam
--rotary-percent 1.5 --position-embedding-type rope | 1 | 1.5: must be greater than 0 and at most 1
--use-flash-attn 1 | 1 | --use-flash-attn 1: takes 0 values
--num-layers 0 | 1 | --num-layers 0: must be greater than 0
--lr inf | 1 | --lr inf: must be a finite number
--seed 4294967296 | 1 | --seed 4294967296: must be at least 0 and less than 4294967296
--run-name ../x | 1 | --run-name ../x: must be the name of a folder
--split nan,1 | 1 | --split nan,1: must be
--hidden-size -64 | 1 | --hidden-size -64: must be greater than 0
--micro-batch-size 0 | 1 | --micro-batch-size 0: must be greater than 0
--train-iters 0 | 1 | --train-iters 0: must be greater than 0
--eval-interval 0 | 1 | --eval-interval 0: must be greater than 0
--exit-interval 0 | 1 | --exit-interval 0: must be greater than 0
--lr -1 | 1 | --lr -1.0: must be at least 0
--weight-decay -0.1 | 1 | --weight-decay -0.1: must be at least 0
--clip-grad -1 | 1 | --clip-grad -1.0: must be at least 0
--hidden-dropout 1 | 1 | --hidden-dropout 1.0: must be at least 0 and less than 1
--attention-dropout 1.5 | 1 | --attention-dropout 1.5: must be
--adam-beta1 1.0 | 1 | --adam-beta1 1.0: must be
--hidden-size 66 | 1 | --hidden-size 66: must be a multiple of --num-attention-heads 4 | 64 or 68
--num-query-groups 3 | 1 | --num-query-groups 3: must divide --num-attention-heads 4
--kv-channels 15 --position-embedding-type rope | 1 | head size 15: must be even | --kv-channels
--max-position-embeddings 16 | 1 | --max-position-embeddings 16: must be at least --seq-length 32
--tp 3 | 3 | --num-attention-heads 4: must be a multiple of --tensor-model-parallel-size 3
--tp 4 --num-attention-heads 24 --hidden-size 96 --num-query-groups 6 | 4 | --num-query-groups 6: must be a
--tp 4 --ffn-hidden-size 130 | 4 | --ffn-hidden-size 130: | nearest 128 or 132
--tp 4 | 2 | --tensor-model-parallel-size 4: | --nproc 4 | 1, 2
--dp 3 | 2 | --data-parallel-size 3: | --nproc
--pp 2 --tp 2 | 6 | --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2: | --nproc 8
--pp 3 | 3 | --num-layers 4: must be a multiple of 3 pipeline ranks | nearest --num-layers 3 or 6
--sp --tp 4 --seq-length 30 | 4 | --seq-length 30: must be a multiple of --tensor-model-parallel-size 4
--tp-comm-overlap --tp 2 | 2 | --tp-comm-overlap: needs --sequence-parallel
--distributed-backend nccl | 2 | --distributed-backend nccl: needs GPUs
--global-batch-size 5 --micro-batch-size 2 | 2 | --global-batch-size 5: | dp 2 = 4 | 4 or 8
--bf16 --fp16 | 1 | --bf16: not with --fp16; leave one out
--loss-scale 128 | 1 | --loss-scale 128.0: needs --fp16
--attention-backend fused | 1 | --attention-backend fused: needs a GPU
--attention-backend flash --attention-dropout 0.1 | 1 | --attention-backend flash: has no attention dropout
--min-lr 1 | 1 | --min-lr 1.0: must be at least 0 and at most --lr 0.0003
--lr-warmup-init 1 | 1 | --lr-warmup-init 1.0: must be at least 0 and at most --lr 0.0003
--lr-warmup-iters 2 --lr-warmup-fraction 0.1 | 1 | --lr-warmup-iters 2: not with --lr-warmup-fraction; leave
--lr-warmup-fraction 2 | 1 | --lr-warmup-fraction 2.0: must be at least 0 and at most 1
--lr-warmup-iters 10 | 1 | --lr-warmup-iters 10: must be less than the decay's 10
--lr-decay-samples 100 | 1 | --lr-decay-samples 100: | use --lr-decay-iters
--lr-decay-style WSD | 1 | --lr-decay-style WSD: needs --lr-wsd-decay-iters
--lr-decay-style WSD --lr-wsd-decay-iters 20 | 1 | --lr-wsd-decay-iters 20: | longer than the decay's 10
--train-samples 100 | 1 | --train-iters 10 --train-samples 100: give one
--data-path x | 1 | --data-path x: no file x.bin and x.idx | nanomegatron preprocess
--data-path x | 1 | --mock-data: not with --data-path; leave one out
--valid-data-path y | 1 | --valid-data-path y: needs --train-data-path
--split 0,1,1 | 1 | --split 0,1,1: must be up to three numbers | 99,1,0
--split a,b | 1 | --split a,b: must be up to three numbers
--split 1,1,1,1 | 1 | --split 1,1,1,1: must be
--tokenizer-type TikTokenizer | 1 | --tokenizer-type TikTokenizer: needs --tokenizer-model
--tokenizer-type GPT2BPETokenizer --vocab-file v | 1 | needs --merge-file
--tokenizer-model m | 1 | --tokenizer-model m: needs --tokenizer-type
--tokenizer-type ByteTokenizer --null-tokenizer-eod-id 0 | 1 | eod-id 0: needs --tokenizer-type NullTokenizer
--tokenizer-type SentencePieceTokenizer --tokenizer-model no/m | 1 | --tokenizer-model no/m: no such file
--finetune | 1 | --finetune: needs --load
--config | 1 | --config: takes one file or preset
--group-query-attention | 1 | --group-query-attention: needs | --num-query-groups
--no-position-embedding | 1 | --no-position-embedding: needs --position-embedding-type rope or yarn or none
--no-load-optim | 1 | --no-load-optim: needs --load
"""
CASES = [[cell.strip() for cell in line.split("|")] for line in WRONG.strip().splitlines()]


def test_control_is_right():
    assert errors_of(GOOD) == [] and errors_of(GOOD + " --tp 2 --pp 2", 8) == []
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_error_has_value_rule_and_fix(case):
    flags, world, *parts = case
    messages = errors_of(f"{GOOD} {flags}", int(world))
    assert any(all(part in message for part in parts) for message in messages), messages
    assert len(messages) <= 3  # what is wrong, and not a page of what follows from it


@pytest.mark.parametrize("rate", ("-1", "nan"))
def test_a_wrong_bound_of_another_setting_is_one_error(rate):
    [message] = errors_of(f"{GOOD} --lr {rate} --min-lr 1e-5")
    assert message.startswith("--lr")


def test_all_errors_come_together():
    messages = errors_of(
        f"{GOOD} --hidden-size 66 --bf16 --fp16 --main-params-dtype fp16 --hiden 3 --split x --clip-grad -1"
    )
    assert len(messages) == 6


def test_flags_lie_over_the_default_preset():
    """Unless they give the whole shape: then a preset changes nothing of theirs."""
    tiny, parsed = read("--config tiny-cpu").config, read("--num-layers 2 --lr 1e-3")
    assert parsed.preset == "tiny-cpu"
    assert parsed.config.model == dataclasses.replace(tiny.model, num_layers=2)
    assert parsed.config.data == tiny.data
    assert parsed.config.optimizer == dataclasses.replace(tiny.optimizer, lr=1e-3)
    note = (
        "no --hidden-size and no --num-attention-heads: what no flag says is the preset tiny-cpu's; "
        "give --hidden-size and --num-attention-heads for a model of your own, or --config NAME for another "
        "preset"
    )
    assert parsed.notes == [note]
    parsed = read("--num-layers 2 --hidden-size 64 --swiglu")
    assert parsed.config.model.num_attention_heads == tiny.model.num_attention_heads
    assert "no --num-attention-heads: what no flag says is the preset" in parsed.notes[0]
    parsed = read("--lr 1e-3")
    assert parsed.preset == "tiny-cpu" and "no model is given: the preset tiny-cpu" in parsed.notes[0]
    parsed = read("--num-layers 2 --hidden-size 64 --num-attention-heads 4")
    assert parsed.preset is None and parsed.notes == []
    assert parsed.config == build_config({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4})


def test_an_error_says_that_a_number_may_be_the_presets(capsys):
    assert early_answer("--num-attention-heads 5".split()) == 2
    error, note = capsys.readouterr().err.splitlines()[1:]
    assert "--hidden-size 192" in error and "no --num-layers and no --hidden-size: what no flag says" in note
    assert early_answer("--lrr 5".split()) == 2 and "preset" not in capsys.readouterr().err


def test_the_summary_of_torchrun_ends_with_the_error(tmp_path, monkeypatch, capsys):
    """On whichever rank it ends first; only rank 0 prints it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")
    assert early_answer("--lrr 5".split()) == 2 and capsys.readouterr().err == ""
    failure = ProcessFailure(1, 1, 2, str(tmp_path / "error.json"))
    summary = str(ChildFailedError("train.py", {1: failure})).rstrip("=\n")
    assert "1 error, nothing was started" in summary and "--lrr" in summary.splitlines()[-1]


def test_spellings_and_precedence(tmp_path):
    (tmp_path / "base.toml").write_text("num-layers = 2\nhidden_size = 64\nlr = 0.1\nbf16 = true\n")
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\nnum-attention-heads = 4\nlr = 0.2\ntp = 2\n')
    config = read(f"--config {tmp_path}/mine.toml --lr=0.3 --hidden_size 128 --no-bf16 --swiglu").config
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (2, 128, 0.3)
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.model.swiglu and not config.precision.bf16
    config = read(f"{SHAPE} --use-rotary-position-embeddings --persistent-save-interval 7").config
    assert config.model.position_embedding_type == "rope" and config.checkpoint.save_interval == 7


@pytest.mark.parametrize("order", (1, -1))
def test_no_position_embedding_keeps_rope(order):
    flags = ["--use-rotary-position-embeddings", "--no-position-embedding"][::order]
    parsed = read(" ".join([GOOD, *flags]))
    assert parsed.errors == () and parsed.config.model.position_embedding_type == "rope"


def test_shape_flags_alone_have_no_name():
    """Not that of the current folder."""
    parsed = parse("--num-layers 2 --hidden-size 8 --num-attention-heads 2".split())
    assert parsed.preset is None and not parsed.own_file


def test_a_zero_puts_a_preset_away_too():
    """It is a wish, unlike a switch that is off."""
    assert parse(["--config", "llama3-8b"]).config.optimizer.lr_warmup_fraction
    found = parse("--config llama3-8b --lr-warmup-iters 0 --no-mock-data".split())
    assert not found.errors and found.config.optimizer.lr_warmup_fraction is None


def test_a_flag_puts_away_the_other_ways_of_a_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("train-iters = 99\nlr-warmup-iters = 9\nbf16 = true\nmock-data = true\n")
    flags = f"{SHAPE} --config {path} --train-samples 8 --lr-warmup-fraction 0.1 --fp16 --data-path x"
    config = read(flags).config
    assert (config.run.train_iters, config.run.train_samples) == (None, 8)
    assert config.optimizer.lr_warmup_iters == 0 and not config.precision.bf16 and not config.data.mock_data


def test_a_resolved_run_can_be_read_again():
    config = resolve(
        parse(f"{SHAPE} --mock-data --vocab-size 9 --train-samples 8 --save a\r\x7f".split(" ")).config, 1
    )
    assert from_toml(to_toml(config)) == config and validate(config, 1) == []


def test_file_errors(tmp_path):
    path = tmp_path / "c.toml"
    for text, part in (
        ("num-layer = 2", "unknown key num-layer; did you mean --num-layers?"),
        ("num-layers = 2.5", "num-layers = 2.5: must be a whole number"),
        ("num-layers = ", "c.toml: "),
        ('extends = "c.toml"', "extends itself"),
        ("extends = 3", "extends 3: no such file or preset"),
        ('extends = "gone.toml"', "gone.toml: no such file"),
    ):
        path.write_text(text)
        assert any(part in error for error in read(f"--config {path}").errors), text


def test_toml_round_trip():
    config = resolve(read(f'{GOOD} --swiglu --lr 1e-5 --data-path a b --run-name x"\\y --fp16').config, 1)
    assert from_toml(to_toml(config)) == config
    with pytest.raises(ConfigError, match="unknown key"):
        from_toml("num-layer = 2")


def test_megatron_flags():
    table = megatron_flags()
    assert all(any(name.startswith(prefix) for name in table["unsupported"]) for prefix in table["hints"])
    parsed = read(f"{GOOD} --use-flash-attn --transformer-impl local --optimizer adam --openai-gelu")
    assert parsed.errors == () and parsed.config == read(GOOD).config
    *notes, defaults = parsed.notes
    assert notes == [
        "--use-flash-attn: always on",
        "--transformer-impl: not needed here",
        "--optimizer: always on",
        "--openai-gelu: not needed here",
    ]
    assert defaults.startswith("Megatron-LM's defaults differ: --hidden-dropout 0.1")


def test_a_command_line_of_megatron():
    flags = (
        "--tensor-model-parallel-size 2 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 4096 --micro-batch-size 4 --global-batch-size 256"
    )
    config = resolve(read(flags).config, 8)
    assert errors_of(flags, 8) == [] and config.parallel.data_parallel_size == 4
    assert config.model.ffn_hidden_size == 16384 and config.model.max_position_embeddings == 4096


PUBLISHED = {  # parameters in billions
    "gpt2-124m": 0.1244,
    "llama2-7b": 6.738,
    "llama3-8b": 8.030,
    "llama3-70b": 70.55,
    "mistral-7b": 7.248,
    "qwen3-8b": 8.191,
    "mixtral-8x7b": 46.70,
    "qwen3-30b-a3b": 30.53,
}


def parameters(config: Config) -> int:
    """Counted by hand from the shape, bias and norm weights included."""
    m, v = config.model, config.data.vocab_size
    h, d, f = m.hidden_size, m.head_dim, m.ffn_size
    heads, groups = m.num_attention_heads, m.num_kv_heads
    weights = h * d * (heads + 2 * groups) + d * heads * h
    if m.num_experts:
        weights += m.num_experts * (3 * h * (m.moe_ffn_hidden_size or f) + h)
    else:
        weights += (3 if m.swiglu else 2) * h * f
    norms, extra = 2 * h, 2 * d if m.qk_layernorm else 0
    if m.normalization == "LayerNorm":  # biases: of both norms, QKV, projection, both MLP matrices
        norms, extra = 4 * h, d * (heads + 2 * groups) + h + f + h
    tables = v * h * (2 if m.untie_embeddings_and_output_weights else 1)
    positions = config.data.seq_length * h if m.position_embedding_type == "learned_absolute" else 0
    final = 2 * h if m.normalization == "LayerNorm" else h
    return m.num_layers * (weights + norms + extra) + tables + positions + final


@pytest.mark.parametrize("name", [p.stem for p in PRESETS.glob("*.toml") if p.stem != "llama"])
def test_presets(name):
    parsed = read(f"--config {name}")
    assert parsed.errors == () and validate(parsed.config, 2 if "tiny" in name else 8, "cuda") == []
    if name in PUBLISHED:
        assert parameters(parsed.config) / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-4)
    assert PUBLISHED.keys() <= {p.stem for p in PRESETS.glob("*.toml")}


def test_no_torch_and_fast():
    code = "from nanomegatron.config.check import validate; import sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_run_name_and_folder_match():
    config = resolve(read(GOOD).config, 1)
    logged = dataclasses.replace(config, run=dataclasses.replace(config.run, log_interval=3, eval_iters=1))
    assert full_name(config) == full_name(logged)
    other = resolve(read(GOOD + " --lr 1").config, 1)
    assert full_name(config) != full_name(other) and resume_conflicts(config, other) == []
    wider = resolve(read(GOOD + " --hidden-size 128 --seed 5").config, 1)
    flags = [message.split()[0] for message in resume_conflicts(config, wider)]
    assert {"--hidden-size", "--seed"} <= set(flags)


def test_defaults_in_the_help():
    text = " ".join(help_text("all").split())
    assert " --profile-ranks N ... ranks to profile; default 0 " in text
    assert re.search(
        r" --peer-memory [^;]*; default on \(off: --no-peer-memory\) ", text
    )  # as it is switched off
    assert (
        re.search(r" --min-lr X [^;]*; default 0\.0 ", text) and "(False)" not in text
    )  # a default of 0 is one


def test_padded_vocab_size():
    assert padded_vocab_size(50257, 128, 1) == 50304 and padded_vocab_size(50257, 128, 8) == 51200
    assert tomllib.loads((PRESETS / "gpt2-124m.toml").read_text())["vocab-size"] == 50257


@pytest.mark.parametrize("freq", [1, 2, 3, 4, 12, [1, 0, 0] * 4])
def test_layers_with_a_window_or_without_rope_are_megatrons(freq):
    """A number N leaves out every N-th layer, the last of each N; a list says it of each layer."""
    theirs = pytest.importorskip("megatron.core.transformer.utils").is_layer_window_attention
    settings = {
        "num_layers": 12,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "position_embedding_type": "rope",
    }
    windows = TransformerConfig(**settings, window_size=(5, 0), window_attn_skip_freq=str(freq)).windows
    assert windows == [5 if theirs((5, 0), freq, i + 1) else None for i in range(12)]
    without = freq if isinstance(freq, list) else ([0] * (freq - 1) + [1]) * (12 // freq)  # its no_rope_freq
    kinds = TransformerConfig(**settings, no_rope_freq=str(freq)).rotary_kinds
    assert kinds == [None if no else "global" for no in without]
