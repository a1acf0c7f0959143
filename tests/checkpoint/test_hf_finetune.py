"""A Hugging Face folder from its download to its export after fine-tuning, as a user types it."""

import json
from types import SimpleNamespace

import pytest
import torch

import convert
import train
from nanomegatron.checkpoint.resume import tokenizer_notes
from nanomegatron.commands import generate_args
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.faults.exit import BAD_CONFIG
from tests.checkpoint.test_convert import byte_tokenizer
from tests.hf_models import VOCAB, data, hugging_face, save

EXTRAS = {
    "chat_template.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "generation_config.json": '{"temperature": 0.6}',
    "special_tokens_map.json": "{}",
}
SHORT = "--seq-length 16 --mock-data --train-iters 2 --eval-iters 1 --device cpu --lr 1e-3".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A downloaded model with the files beside its weights, and a bos token that is not the first id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", lambda *_: None)
    path = tmp_path / "theirs"
    save(hugging_face("llama", bos_token_id=7, eos_token_id=VOCAB - 4), path)
    byte_tokenizer(path)
    for name, text in EXTRAS.items():
        (path / name).write_text(text)
    return path


def train_on(*flags: str) -> int:
    return train.main([*SHORT, "--vocab-size", str(VOCAB), *flags])


def test_fine_tuning_keeps_what_is_no_weights(folder, tmp_path):
    assert train_on("--load", "theirs", "--finetune", "--run-name", "tuned") == 0
    out = ["--output-path", "exported", "--input-path", "runs/tuned/ckpt"]
    assert convert.main(["--source", "nanomegatron", "--target", "hf", *out]) == 0
    for name, text in EXTRAS.items():
        assert (tmp_path / "exported" / name).read_text() == text
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("theirs", "exported"))
    assert after["bos_token_id"] == 7 and after.keys() >= before.keys()
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").float()
    assert torch.isfinite(model(data()[0]).logits).all()


def test_a_converted_folder(folder, tmp_path, capsys):
    """Its settings are found; without --finetune the message says so; what it kept is exported again."""
    paths = ["--input-path", "theirs", "--output-path", "ours"]
    layout = ["--target-tensor-parallel-size", "2", "--pipeline-model-parallel-size", "1"]
    assert convert.main(["--source", "hf", "--target", "nanomegatron", *paths, *layout]) == 0
    assert "layout are needless" in capsys.readouterr().out
    assert train_on("--load", "ours", "--run-name", "plain") == BAD_CONFIG
    assert "--load ours: it has weights only; add --finetune to train it" in capsys.readouterr().out
    assert train_on("--load", "ours", "--finetune", "--run-name", "tuned") == 0
    out = ["--output-path", "exported", "--input-path", "runs/tuned/ckpt"]
    assert convert.main(["--source", "nanomegatron", "--target", "hf", *out]) == 0
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == EXTRAS["chat_template.jinja"]


def test_evaluating_a_folder_takes_no_memory_for_training(folder, capsys):
    assert train_on("--load", "theirs", "--eval-only", "--run-name", "evaluated") == 0
    said = capsys.readouterr().out
    assert "validation" in said and "gradients" not in said.split("memory")[1].splitlines()[0]


def test_contradictions_with_the_weights_are_named(folder, capsys):
    assert (
        train_on("--load", "theirs", "--finetune", "--num-layers", "3", "--run-name", "other") == BAD_CONFIG
    )
    assert "layers.2" in (said := capsys.readouterr().out) and "--num-layers" in said


def test_generating_from_a_folder(folder, capsys):
    flags = ["--prompt", "abc", "--max-new-tokens", "4", "--temperature", "0", "--device", "cpu"]
    assert generate_args.main(["--load", "theirs", *flags]) == 0
    assert capsys.readouterr().out.startswith("a b c")


def test_data_of_another_tokenizer_is_noted(folder):
    data = SimpleNamespace(tokenizer=build_tokenizer("ByteTokenizer"))
    run = SimpleNamespace(data=data, model=SimpleNamespace(vocab_size=VOCAB))
    (note,) = tokenizer_notes(run, str(folder))
    assert note == f"the data's tokenizer is a ByteTokenizer, not that of {folder}: its ids may be others"
    run.data.tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder))
    assert tokenizer_notes(run, str(folder)) == []
    run.data.tokenizer = build_tokenizer("NullTokenizer", vocab_size=9)  # whatever made them
    assert tokenizer_notes(run, str(folder)) == []
