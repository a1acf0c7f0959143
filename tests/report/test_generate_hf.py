"""Where a text of a Hugging Face model ends; transformers' generate is the oracle."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import convert
from nanomegatron.checkpoint.hf import stops_of
from nanomegatron.commands.generate_args import main
from nanomegatron.data.tokenizer import ByteTokenizer, NullTokenizer
from tests.hf_models import VOCAB, hugging_face, save, transformers

PROMPTS = [[5, 9, 2, 40], [3], [12, 50, 8]]
COUNT = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder, and the tokens that its model appends to each prompt if nothing ends it."""
    folder, model = tmp_path_factory.mktemp("hf"), hugging_face("llama")
    save(model, folder)
    new = [theirs(model, prompt, eos_token_id=None)[len(prompt) :] for prompt in PROMPTS]
    assert all(len(set(tokens)) > 5 and VOCAB - 1 not in tokens for tokens in new), new
    return folder, new


def theirs(model, prompt: list[int], **how) -> list[int]:
    """What transformers' generate returns, greedily."""
    ids = torch.tensor([prompt])
    how |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    return model.generate(ids, do_sample=False, max_new_tokens=COUNT, **how)[0].tolist()


def flags_for(folder) -> list[str]:
    """Those of the command for the same texts."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", " ".join(map(str, prompt)))]
    flags = ["--max-new-tokens", str(COUNT), "--temperature", "0", "--device", "cpu"]
    return ["--load", str(folder), *prompts, *flags]


def ids_of(printed: str) -> list[list[int]]:
    """The ids that the command prints, without a tokenizer."""
    return [[*map(int, text.split())] for text in printed.split("---")]


def ours(capsys, folder) -> list[list[int]]:
    assert main(flags_for(folder)) == 0
    return ids_of(capsys.readouterr().out)


def with_ends(source, folder, generation: dict | None, config: dict):
    """The folder again, with other eos_token_id -> what transformers makes of it, without the end."""
    shutil.copytree(source[0], folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | config))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    texts = [theirs(model, prompt) for prompt in PROMPTS]
    return [text[:-1] if text[-1] in ends else text for text in texts]


@pytest.mark.parametrize("kind", ["number", "list", "config", "config list", "null", "over config"])
def test_a_text_ends_where_transformers_ends_it(source, tmp_path, capsys, kind):
    new = source[1]
    first, several = new[0][4], [new[0][4], new[1][2], VOCAB + 5]
    generation, config = {
        "number": ({"eos_token_id": first}, {}),
        "list": ({"eos_token_id": several}, {}),
        "config": (None, {"eos_token_id": first}),
        "config list": (None, {"eos_token_id": several}),
        "null": ({"eos_token_id": None}, {"eos_token_id": several}),
        "over config": ({"eos_token_id": [new[2][1]]}, {"eos_token_id": several}),
    }[kind]
    expected = with_ends(source, tmp_path / "hf", generation, config)
    whole = [prompt + tokens for prompt, tokens in zip(PROMPTS, new, strict=True)]
    assert (expected == whole) == (kind == "null")
    assert ours(capsys, tmp_path / "hf") == expected


def test_a_checkpoint_keeps_the_ends(source, tmp_path, capsys):
    """To ours and back, with the files of before."""
    ends = {"eos_token_id": [source[1][0][4], source[1][1][2]]}
    expected = with_ends(source, tmp_path / "hf", ends, {})
    for kinds in (("hf", "nanomegatron"), ("nanomegatron", "hf")):
        paths = ("--input-path", str(tmp_path / kinds[0]), "--output-path", str(tmp_path / f"{kinds[1]}"))
        if kinds[1] == "hf":
            shutil.rmtree(tmp_path / "hf")
        assert convert.main(["--source", kinds[0], "--target", kinds[1], *paths]) == 0
        capsys.readouterr()
        assert ours(capsys, tmp_path / kinds[1]) == expected
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == ends


def test_the_tokenizers_own_end_counts_too(tmp_path):
    """But not that of a NullTokenizer, which stands for an unknown one, where a file names others."""
    (tmp_path / "hf").mkdir()
    assert stops_of(tmp_path, NullTokenizer(9)) == {8} and stops_of(tmp_path, ByteTokenizer()) == {256}
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert stops_of(tmp_path, NullTokenizer(9)) == {3, 5} and stops_of(tmp_path, ByteTokenizer()) == {
        3,
        5,
        256,
    }


@pytest.mark.full
@pytest.mark.parametrize("layout", ["--tp", "--pp"])
def test_ranks_end_a_text_together(source, tmp_path, layout):
    ends = {"eos_token_id": [source[1][0][4], source[1][1][2]]}
    expected = with_ends(source, tmp_path / "hf", ends, {})
    command = [sys.executable, "-m", "nanomegatron", "generate", *flags_for(tmp_path / "hf")]
    done = subprocess.run(
        [*command, layout, "2", "--nproc", "2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert ids_of(done.stdout) == expected


@pytest.mark.parametrize("ends", ["</s>", [1, "2"], -1, True, {"a": 1}])
def test_ends_that_are_no_tokens_are_refused(source, tmp_path, capsys, ends):
    shutil.copytree(source[0], tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert main(["--load", str(tmp_path / "hf"), "--prompt", "1", "--device", "cpu"]) == 2
    assert "generation_config.json: eos_token_id = " in capsys.readouterr().err
