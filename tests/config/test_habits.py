"""What people used to Megatron-LM or to Hugging Face type: taken with a note, or answered in their words."""

import json

import pytest

from nanomegatron.config.check import resolve, run_notes, validate
from nanomegatron.config.cli import MEGATRON_DEFAULTS, parse
from nanomegatron.config.rules import values_of
from nanomegatron.config.settings import Config

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --mock-data"


def read(flags: str, processes: int = 1):
    """(config, notes), of a command line without errors."""
    parsed = parse(f"{MODEL} {flags}".split())
    assert not parsed.errors and not validate(parsed.config, processes), parsed.errors
    return parsed.config, parsed.notes


def errors_of(words: list[str], processes: int = 1) -> list[str]:
    parsed = parse(MODEL.split() + words)
    return [*parsed.errors, *validate(parsed.config, processes)]


@pytest.mark.parametrize(
    "flags, processes, name, value, note",
    [
        ("--overlap-param-gather", 1, "use_distributed_optimizer", True, "--overlap-param-gather needs"),
        ("--fp8-format e4m3", 1, "bf16", True, "--bf16: set, which --fp8-format e4m3 needs"),
        ("--optimizer-cpu-offload", 1, "bf16", True, "--bf16: set, which --optimizer-cpu-offload needs"),
        ("--recompute-granularity full", 1, "recompute_method", "uniform", "--recompute-method uniform: set"),
        (
            "--recompute-granularity full --recompute-method block",
            1,
            "recompute_num_layers",
            1,
            "--recompute-num-layers 1: set, which --recompute-granularity full needs",
        ),
        ("--num-experts 4 --tp 2", 2, "sequence_parallel", True, "--sequence-parallel: set, which --num-ex"),
    ],
)
def test_an_obvious_companion_is_set_and_said(flags, processes, name, value, note):
    config, notes = read(flags, processes)
    parts = [config.model, config.parallel, config.precision]
    assert [getattr(part, name) for part in parts if hasattr(part, name)] == [value]
    assert any(note in said for said in notes), notes


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--fp8-format e4m3 --no-bf16", "--fp8-format e4m3: needs --bf16"),
        ("--fp8-format e4m3 --fp16", "--fp8-format e4m3: needs --bf16"),
        ("--num-experts 4 --tp 2 --no-sp", "needs --sequence-parallel with --num-experts"),
        ("--overlap-param-gather --no-use-distributed-optimizer", "--overlap-param-gather: needs"),
    ],
)
def test_what_is_said_to_be_off_stays_off(flags, part):
    assert part in "\n".join(errors_of(flags.split(), 2 if "tp" in flags else 1))


def test_none_is_the_default():
    config, _ = read("--window-attn-skip-freq None --num-experts None --load None --rotary-base 5000")
    assert (config.model.window_attn_skip_freq, config.model.num_experts, config.checkpoint.load) == (
        None,
    ) * 3


def test_a_lone_learning_rate_below_the_presets_least():
    low = parse("--config tiny-cpu".split()).config.optimizer
    parsed = parse(f"--config tiny-cpu --lr {low.min_lr / 10}".split())
    opt = parsed.config.optimizer
    assert opt.min_lr == pytest.approx(opt.lr * low.min_lr / low.lr) and 0 < opt.min_lr < opt.lr
    assert any("scaled with --lr" in note for note in parsed.notes)
    assert parse(f"--config tiny-cpu --lr {low.lr * 2}".split()).config.optimizer.min_lr == low.min_lr


def test_quotes_that_a_script_quotes():
    assert parse([*MODEL.split(), "--split", "'98,1,1'"]).config.data.split == "98,1,1"
    assert read('--save "a"')[0].checkpoint.save == "a"


def test_a_blend_in_quotes():
    words = [word for word in MODEL.split() if word != "--mock-data"] + ["--data-path", "0.3 a 0.7 b"]
    parsed = parse(words)
    assert any("a blend is several words: leave the quotes out" in e for e in validate(parsed.config, 1))


def test_settings_without_effect_are_noted():
    hang, replicas = run_notes(resolve(read("--check-replicas 2 --hang-timeout-secs 600")[0], 1))
    assert "no replica" in replicas and "collectives end after 600 s" in hang
    effective = "--check-replicas 2 --hang-timeout-secs 500 --global-batch-size 4"
    assert not run_notes(resolve(read(effective)[0], 2))


def test_what_only_another_tokenizer_or_format_has_is_noted():
    config, _ = read(
        "--tokenizer-type NullTokenizer --tiktoken-pattern v2 --async-save --ckpt-format torch_dist"
    )
    pattern, saves = run_notes(resolve(config, 1))
    assert "TikTokenizer has one" in pattern and "torch_dist is waited for" in saves
    assert not run_notes(resolve(read("--async-save")[0], 1))


@pytest.mark.parametrize(
    "flags, name, value, note",
    [
        ("--vocab-file v --merge-file m", "tokenizer_type", "GPT2BPETokenizer", "which --merge-file m needs"),
        ("--tokenizer-library null", "tokenizer_type", "NullTokenizer", ""),
        ("--data-impl mmap", "mock_data", True, "--data-impl: not needed here"),
        ("--padded-vocab-size 128", "vocab_size", 100, "changes no loss"),
    ],
)
def test_older_and_newer_flags(flags, name, value, note):
    parsed = parse(f"{MODEL} {flags}".split())
    assert not parsed.errors and getattr(parsed.config.data, name) == value
    assert not note or any(note in said for said in parsed.notes)


def test_a_flag_that_is_taken_for_one_value_is_refused_for_others():
    assert "--data-impl lazy: here only mmap" in errors_of(["--data-impl", "lazy"])
    assert any("--tokenizer-type" in e for e in errors_of(["--tokenizer-library", "own"]))
    assert any("must be one of nccl, gloo" in e for e in errors_of(["--distributed-backend", "nccl3"]))


def test_samples_that_are_no_whole_batches():
    """Rounded down, as in Megatron."""
    config, _ = read("--train-samples 103 --global-batch-size 4 --train-iters None")
    config = resolve(config, 1)
    assert config.run.train_iters == 25
    assert "--train-samples 103: 100 are trained, in batches of 4" in run_notes(config)
    assert not [
        note
        for note in run_notes(resolve(read("--train-samples 100 --global-batch-size 4")[0], 1))
        if "train" in note
    ]


def test_names_of_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B".split()
    said = "\n".join(errors_of(words))
    assert "nothing is fetched here: hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B" in said


@pytest.mark.parametrize(
    "flags, name, value",
    [
        ("--use_rotary_position_embeddings", "position_embedding_type", "rope"),
        ("--virtual-pipeline-model-parallel-size 2 --pp 2", "num_virtual_stages_per_pipeline_rank", 2),
        ("--checkpoint-activations", "recompute_method", "uniform"),
        ("--distributed-backend nccl2", "distributed_backend", "nccl"),
        ("--enable-cuda-graph", "cuda_graph_impl", "local"),
        ("--cuda-graph-impl transformer_engine", "cuda_graph_impl", "local"),
    ],
)
def test_other_spellings(flags, name, value):
    config = parse(f"{MODEL} --num-layers 4 {flags}".split()).config
    parts = [config.model, config.parallel]
    assert [getattr(part, name) for part in parts if hasattr(part, name)] == [value]


def test_a_files_spellings(tmp_path):
    (tmp_path / "mine.toml").write_text("use_rotary_position_embeddings = true\nnum-layers = 2\n")
    parsed = parse(["--config", str(tmp_path / "mine.toml")])
    assert not parsed.errors and parsed.config.model.position_embedding_type == "rope"


@pytest.mark.parametrize(
    "flags",
    ["--no-save-rng", "--no-load-rng"],
)
def test_megatrons_small_flags(flags):
    assert any(flags.split()[0] in note for note in read(flags)[1])


def test_megatrons_defaults():
    """Said once where a script's flags are Megatron's, and taken by a flag; what is given stays."""
    model, said = read("--use-mcore-models --transformer-impl local --lr-decay-style constant")
    (note,) = [note for note in said if "defaults differ" in note]
    assert "--hidden-dropout 0.1" in note and "--split 969,30,1" in note and "decay-style" not in note
    assert model.model.hidden_dropout == 0 and not any("differ" in note for note in read("--lr 1e-3")[1])
    theirs, said = read("--use-mcore-models --megatron-defaults --attention-dropout 0")
    assert not any("defaults differ" in note for note in said)
    found = theirs.model.hidden_dropout, theirs.model.attention_dropout, theirs.optimizer.lr_decay_style
    assert found == (0.1, 0.0, "linear") and (theirs.data.dataloader_type, theirs.data.split) == (
        "single",
        "969,30,1",
    )


def test_the_defaults_that_are_noted_differ():
    ours = values_of(Config())
    assert all(ours[name] != value for name, value in MEGATRON_DEFAULTS.items())


HF = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=100)
HF |= dict(intermediate_size=96, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=5e4)


def test_flags_override_single_settings_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "model.safetensors").write_bytes(b"")
    parsed = parse(f"--load {tmp_path} --num-layers 3 --seq-length 32".split())
    model = parsed.config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.rotary_base) == (3, 64, 96, 5e4)
    assert any("but for other flags" in note for note in parsed.notes)


def test_a_converted_folder_brings_its_settings(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(HF))
    parsed = parse(f"--load {tmp_path} --finetune --seq-length 32".split())
    assert parsed.config.model.ffn_hidden_size == 96 and not parsed.errors
    assert parsed.preset == tmp_path.name
