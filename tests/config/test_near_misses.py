"""What a user nearly gave: the message names what is there, the rule, and what to give instead."""

import json

import pytest

from nanomegatron.checkpoint.hf import Folder
from nanomegatron.commands.plan import known_gpu
from nanomegatron.config.check import validate
from nanomegatron.config.check_model import hub_hint
from nanomegatron.config.cli import parse
from nanomegatron.config.hf import settings_of
from nanomegatron.config.megatron_args import why_no_checkpoint
from nanomegatron.data.columns import folder_files
from nanomegatron.data.tokenizer import build_tokenizer

MIXTRAL = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 2}
MIXTRAL |= {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    "files, says",
    [
        (["ckpt/iter_0000010/manifest.json"], "give {0}/ckpt"),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin is a pickle"),
        (["config.json"], "no weights: copy model.safetensors there"),
        (
            ["iter_0000010/.metadata"],
            "it has iter_0000010, and its latest_checkpointed_iteration.txt names none of them: give {0}/",
        ),
        (
            ["iter_0000010/.metadata", "latest_checkpointed_iteration.txt"],
            "it has iter_0000010, and its latest_checkpointed_iteration.txt names none",
        ),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_what_it_is(tmp_path, files, says):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert says.format(tmp_path) in why_no_checkpoint(tmp_path)


def test_an_iteration_is_not_the_folder_of_checkpoints(tmp_path):
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / "manifest.json").touch()
    assert f"give {tmp_path}, with --ckpt-step 10" in why_no_checkpoint(tmp_path / "iter_0000010")


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer"])
def test_a_pointer_of_git_lfs_is_no_tokenizer(kind, tmp_path):
    (tmp_path / "tokenizer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match="tokenizer: a pointer of git-lfs.*run git lfs pull"):
        build_tokenizer(kind, model=str(tmp_path / "tokenizer"))


def test_a_pointer_of_git_lfs_is_no_weight_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match="model.safetensors: a pointer of git-lfs.*run git lfs pull"):
        Folder(tmp_path)


def test_more_experts_chosen_than_there_are():
    with pytest.raises(ValueError, match="num_experts_per_tok = 3: must be at most num_local_experts = 2"):
        settings_of(MIXTRAL | {"num_experts_per_tok": 3})


def test_data_paths_near_data(tmp_path):
    for end in ("bin", "idx"):
        (tmp_path / f"my_text_document.{end}").touch()

    def said(path):
        argv = ["--data-path", str(path), "--tokenizer-type", "ByteTokenizer"]
        return "\n".join(validate(parse(argv).config, 1, "cpu"))

    assert f"did you mean {tmp_path}/my_text_document?" in said(tmp_path / "my")
    assert f"leave the ending out: {tmp_path}/my_text_document" in said(tmp_path / "my_text_document.bin")
    assert f"nanomegatron preprocess --input {tmp_path}" in said(tmp_path)


def test_a_folder_of_plain_text_is_told_how_to_become_data(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    argv = ["--data-path", str(tmp_path), "--tokenizer-type", "ByteTokenizer"]
    errors = validate(parse(argv).config, 1, "cpu")
    with pytest.raises(ValueError, match=f"nanomegatron preprocess --input '{tmp_path}/[*].txt'") as raised:
        folder_files(tmp_path)
    assert any(str(raised.value).partition(": ")[2] in error for error in errors)


def test_flags_and_gpus_near_known_ones():
    assert "did you mean --recompute-activations" in parse(["--recompute-activation"]).errors[0]
    unknown = parse(["--lora-rank", "8"]).errors[0]
    assert "unknown flag" in unknown and "did you mean --lr?" not in unknown and "--help all" in unknown
    assert known_gpu("rtx4090") == ("rtx4090", 24.0)
    with pytest.raises(ValueError, match="--gpu H10: none of .*H100.*did you mean"):
        known_gpu("H10")


def test_what_is_not_in_a_folder_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_hint("runs/x") == hub_hint("x") == ""
    assert "hf download org/name --local-dir name" in hub_hint("org/name")
    for name in ("runs/tiny", "runs/python", "org/other"):
        (tmp_path / name).mkdir(parents=True)
    assert hub_hint("runs/pyton/ckpt") == "; runs/ has python, tiny"
    assert hub_hint("org/name") == "; org/ has other"
    assert hub_hint("org/other/name") == ""


@pytest.mark.parametrize(
    "name, says",
    [
        ("bin", "pytorch_model.bin is a pickle"),
        ("bin/pytorch_model.bin", "it is a file: give the folder"),
        ("x", "did you mean runs/x?"),
        ("runs/z", "runs/ has x"),  # not the run that has no checkpoint
        ("runs/z/ckpt", "runs/ has x"),
        ("nowhere", "there is no such folder"),
    ],
)
def test_a_wrong_load_is_told_what_is_there(name, says, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytorch_model.bin").touch()
    (tmp_path / "runs/x/ckpt/iter_0000002").mkdir(parents=True)
    (tmp_path / "runs/evaluated").mkdir()
    monkeypatch.chdir(tmp_path)
    said = why_no_checkpoint(name)
    assert said.startswith(f"; {says}") and "evaluated" not in said


def test_the_folder_of_a_run_stands_for_its_checkpoints(tmp_path):
    (tmp_path / "ckpt/iter_0000002").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for given, load in (".", "ckpt"), ("ckpt", "ckpt"), ("other", "other"):
        assert parse(["--load", str(tmp_path / given)]).config.checkpoint.load == str(tmp_path / load)
