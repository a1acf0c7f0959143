"""`nanomegatron to-megatron`: what it prints is read again as the same run, in Megatron's flags alone."""

import shlex
from dataclasses import fields, replace

import pytest

import preprocess
from nanomegatron.commands.to_megatron import command, script
from nanomegatron.commands.verbs import main
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import MEGATRON_DEFAULTS, parse, to_toml
from nanomegatron.config.help import PRESETS
from nanomegatron.config.megatron import megatron_flags
from nanomegatron.config.rules import declared, flag
from nanomegatron.config.settings import Config

LAYOUTS = {  # flags of a run, and its processes
    "--bf16 --tp 2 --pp 2 --vpp 2 --sp --use-distributed-optimizer --overlap-grad-reduce": 8,
    "--cp 2 --cp-comm-type a2a --bf16 --fp8-format hybrid --fp8-recipe tensorwise --no-fp8-wgrad": 4,
    "--train-samples 800 --lr-warmup-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 80": 1,
    "--recompute-granularity full --hidden-dropout 0.2 --no-rope-fusion --window-size 7 0 --seed 5": 2,
    "--eval-only --load x --check-replicas 3 --use-checkpoint-opt-param-scheduler --profile": 2,
    "--num-experts 4 --moe-aux-loss-coeff 0.1 0.2 --moe-router-load-balancing-type aux_loss seq_aux_loss": 1,
}
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --position-embedding-type rope"
)


def theirs() -> set[str]:
    """All flags of Megatron-LM."""
    known = megatron_flags()
    own = {flag(s.name)[2:]: s for _, s, _ in declared(Config())}
    names = {name for name in own if name not in known["own"] and name not in known["renamed"]}
    names |= {f"no-{name}" for name in names if own[name].type is bool}
    for kind in ("always_on", "not_needed", "unsupported", "spellings"):
        names |= {name for name in known[kind] if " " not in name}
    return {f"--{name}" for name in names | {*known["renamed"].values()}}


def config_of(flags: str, world: int) -> Config:
    parsed = parse(flags.split())
    errors = [*parsed.errors, *validate(parsed.config, world, "cuda", (9, 0))]
    assert [error for error in errors if "no such folder" not in error] == []
    return resolve(parsed.config, world)


def read_back(config: Config, world: int) -> Config:
    flags, _ = command(config)
    assert {words[0] for words in flags} <= theirs(), [words for words in flags if words[0] not in theirs()]
    parsed = parse([word for words in flags for word in words])
    assert not parsed.errors and not validate(parsed.config, world, "cuda", (9, 0)), parsed.errors
    return resolve(parsed.config, world)


def same(config: Config, again: Config) -> None:
    """All parts are equal but files, records, and the name of the order in which samples are read."""
    data = replace(again.data, dataloader_type=config.data.dataloader_type)
    for part in (f.name for f in fields(Config)):
        if part not in ("run", "checkpoint", "data"):
            assert getattr(again, part) == getattr(config, part)
    assert data == config.data
    for name in ("seed", "train_iters", "train_samples", "eval_interval", "eval_iters", "eval_only"):
        assert getattr(again.run, name) == getattr(config.run, name), name


@pytest.mark.parametrize("preset", [path.stem for path in PRESETS.glob("*.toml") if path.stem != "llama"])
def test_a_preset_is_read_back(preset):
    size = parse(["--config", preset]).config.data.vocab_size or 1000
    world = 2 if "tiny" in preset else 8
    flags = f"--config {preset} --mock-data --vocab-size {size} --tokenizer-type NullTokenizer"
    config = config_of(flags, world)
    same(config, read_back(config, world))


@pytest.mark.parametrize("flags, world", LAYOUTS.items())
def test_flags_are_read_back(flags, world):
    config = config_of(f"{SMALL} --mock-data --vocab-size 99 --tokenizer-type NullTokenizer {flags}", world)
    if config.run.eval_only:
        assert ["--skip-train"] in command(config)[0]
        assert ["--check-weight-hash-across-dp-replicas-interval", "3"] in command(config)[0]
    same(config, read_back(config, world))


def test_defaults_that_differ_are_written_out():
    flags, lacking = command(config_of(f"{SMALL} --mock-data --vocab-size 99", 1))
    given = {words[0]: words[1:] for words in flags}
    assert {flag(name) for name in MEGATRON_DEFAULTS} <= given.keys()
    assert given["--lr-decay-style"] == ["cosine"] and given["--hidden-dropout"] == ["0"]
    assert given["--lr"] == ["0.0003"] and "--calculate-per-token-loss" in given
    assert given["--attention-dropout"] == ["0"] and any("adds one" in line for line in lacking)
    assert given["--dataloader-type"] == ["single"] and any("reads in this order" in line for line in lacking)


def test_whole_numbers_have_no_fraction():
    """Megatron's --rotary-base is an int."""
    flags, _ = command(
        config_of(f"{SMALL} --mock-data --vocab-size 99 --rotary-base 1e6 --norm-epsilon 1e-6", 1)
    )
    assert ["--rotary-base", "1000000"] in flags and ["--norm-epsilon", "1e-06"] in flags


def test_what_megatron_lacks_is_said():
    flags = f"{SMALL} --mock-data --vocab-size 99 --pp 2 --pipeline-schedule zb-h1 --on-spike skip --log-comm"
    _, lacking = command(config_of(flags, 2))
    for words in ("--pipeline-schedule zb-h1", "--on-spike skip", "--log-comm"):
        assert f"{words}: no flag of Megatron-LM" in lacking
    _, lacking = command(config_of(SMALL, 1))
    assert sum("is to be added" in line for line in lacking) == 2


def test_what_stops_megatron_is_said():
    """Its own asserts: in SharedExpertMLP, and on the layout in TransformerConfig."""
    experts = "--num-experts 4 --moe-shared-expert-intermediate-size 8 --tp 2 --sp"
    flags = f"{SMALL} {experts} --mock-data --vocab-size 99 --tokenizer-type NullTokenizer"
    _, lacking = command(config_of(flags, 2))
    shared = "--moe-shared-expert-intermediate-size 8 without --disable-bias-linear"
    assert f"{shared}: Megatron-LM stops" in lacking
    assert "--expert-tensor-parallel-size 2: Megatron-LM has biases of experts only with 1" in lacking
    _, lacking = command(config_of(f"{flags} --disable-bias-linear", 2))
    assert not [line for line in lacking if "Megatron-LM" in line]


def test_a_run_is_printed_as_a_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = f"{SMALL} --tp 2 --train-data-path a/b --tokenizer-type ByteTokenizer --num-query-groups 2"
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    parsed = parse(flags.split())
    (folder / "config.toml").write_text(to_toml(resolve(parsed.config, 32)))
    assert main(["to-megatron", "mine"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    words = shlex.split("\n".join(lines))
    assert words[:6] == "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 4 --nproc-per-node 8".split()
    assert words[6] == "pretrain_gpt.py" and "# --tokenizer-type ByteTokenizer: NullTokenizer takes" in text
    at = words.index("--group-query-attention")
    assert words[at : at + 3] == ["--group-query-attention", "--num-query-groups", "2"]
    assert words[words.index("--vocab-size") + 1] == "257" and len(lines) > 20
    assert main(["to-megatron", "mime"]) == 2
    assert (
        "no run, neither runs/mime nor mime has a config.toml; did you mean mine?" in capsys.readouterr().err
    )


def test_the_tokenizer_is_that_of_the_data(tmp_path, monkeypatch, capsys):
    """A run that has it from its data, of two blended; what the command line says is not overridden."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    words = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/x --tokenizer-type HuggingFaceTokenizer"
    assert preprocess.main([*words.split(), "--tokenizer-model", str(tmp_path)]) == 0
    monkeypatch.chdir(tmp_path)
    given = f"{SMALL} --data-path 1 {tmp_path}/x_text_document 2 other --vocab-size 8"
    for more, kind in ("", "HuggingFaceTokenizer"), (" --tokenizer-type NullTokenizer", "NullTokenizer"):
        (tmp_path / "config.toml").write_text(to_toml(resolve(parse((given + more).split()).config, 1)))
        assert main(["to-megatron", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert f"--tokenizer-type {kind}" in text and "is to be added" not in text
        assert (f"--tokenizer-model {tmp_path}/tokenizer.json" in text) == (kind != "NullTokenizer")
        assert "--vocab-size 8" in text


def test_the_tables_name_settings():
    known, own = megatron_flags(), {flag(s.name)[2:] for _, s, _ in declared(Config())}
    assert {*known["own"], *known["renamed"], *known["written"]} <= own
    assert not {*known["own"]} & {*known["renamed"]} and not {*known["own"]} & {*known["written"]}
    kinds = next(s for _, s, _ in declared(Config()) if s.name == "tokenizer_type").metadata["choices"]
    assert {*known["own-tokenizers"]} <= {*kinds}
    assert script(config_of(f"{SMALL} --mock-data --vocab-size 9", 1)).count("pretrain_gpt.py") == 1


def test_a_ramp_counted_in_iterations_is_none_of_megatrons():
    flags = f"{SMALL} --mock-data --vocab-size 100 --global-batch-size 8 --rampup-batch-size 4 4 16"
    for length, said in (("--train-iters 9", True), ("--train-samples 64", False)):
        (line,) = [line for line in command(config_of(f"{flags} {length}", 1))[1] if "--rampup" in line]
        assert ("only in runs of --train-samples there" in line) == said
