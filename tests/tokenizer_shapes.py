"""Tokenizers of every shape, made here, each beside the library's own; and strange strings for them."""

import base64
import functools
import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from nanomegatron.data.tokenizer import EOD, MEGATRON_PATTERNS, Tokenizer, build_tokenizer
from nanomegatron.data.vocabulary import byte_alphabet, write_ranks

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [EOD, "<|end_of_text|>", "<|begin_of_text|>", "<|im_start|>", "<s>", "</s>", "<unk>"]
BLANKS = [chr(c) for c in (9, 10, 11, 12, 13, 32, 0x1C, 0x1F, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200E))]
BLANKS += [*"\u2028\u2029\u202f\u205f\u2060\u3000\ufeff\u2581", "  ", "    ", " \n", "\r\n", " " * 9]
EMOJI = [
    "\U0001f917",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd",
]
# Contents and flags of the added tokens of a tokenizer.json.
ADDED = {
    "  ": {},
    "    ": {"normalized": False},
    "\n ": {"normalized": False},
    " x": {},
    "\u3000": {},
    "<left>": {"lstrip": True},
    "<right>": {"rstrip": True, "normalized": False},
    "alone": {"single_word": True},
    "caf\u00e9": {"normalized": True},
    "<|im_start|>": {"special": True},
    "</s>": {"special": True, "lstrip": True, "rstrip": True},
    "<s>": {"special": True, "normalized": False},
    EOD: {"special": True},
}
# First code points of blocks of scripts: Latin to Egyptian hieroglyphs, musical signs, private use.
SCRIPTS = [*range(0xA0, 0x2000, 0x60), *range(0x2070, 0xD7A0, 0x400), *range(0xE000, 0xFFA0, 0x300)]
SCRIPTS += [*range(0x10000, 0x1F900, 0x800), 0x20000, 0x2F800, 0xE0000, 0x10FF00]
PARTS = [
    *"abst019.,_-+'\"/()<>|#",
    *("'s", "'t", "'ll", "'re", "'S", "'x", "don't", "we'll've", "I'LL", "\0", "\x01", "\x7f", "e\u0301"),
    *(")\n", ");\n\n", "//", "*/\n", "\n/", "def", "return ", "import json\n", "fooBar", "x" * 20, "-" * 40),
    *("cafe\u0301", "alone", "aloneness", "\u0663", "=\u0338", "\u0130", "\ufb01", "http://a.b/c"),
]


def strange(seed: int, count: int) -> list[str]:
    """Strings of blanks, controls, words, scripts, emoji, added and special tokens, in any mixture."""
    draw = random.Random(seed)

    def script() -> str:
        first = draw.choice(SCRIPTS)
        return "".join(chr(first + draw.randrange(96)) for _ in range(draw.randrange(1, 8)))

    kinds = [
        script,
        lambda: draw.choice(EMOJI),
        lambda: chr(draw.choice([*range(32), *range(0x7F, 0xA0)])),
        lambda: "".join(draw.choices(BLANKS, k=draw.randrange(1, 4))),
        lambda: draw.choice(SPECIAL),
        lambda: draw.choice([*ADDED]),
        lambda: draw.choice(PARTS),
        lambda: draw.choice("ab<>_ \n") * draw.randrange(1, 9),
    ]
    texts = ["", " ", "\n", *SPECIAL, *ADDED, "a \nb", "a" * 999, " " * 999, "\n" * 99, "\u4f60" * 99]
    while len(texts) < count:
        mine = kinds if len(texts) % 3 else draw.choices(kinds, k=2)
        texts.append("".join(draw.choice(mine)() for _ in range(draw.randrange(1, 12))))
    return texts


class Shape(NamedTuple):
    """A tokenizer that the library made, and ours on the same file."""

    ours: Tokenizer
    plain: Callable[[str], list[int]]  # by the library; special tokens are text
    special: Callable[[str], list[int]] | None  # they are those tokens; None: the library has no such way
    takes_halves: bool = False  # of surrogate pairs


def trained_on() -> list[str]:
    """Code, and strange strings: so that tokens join blanks of all kinds with what is beside them."""
    code = "".join(Path(module.__file__).read_text() for module in (json, subprocess, pytest))
    draw = random.Random(0)
    blanks = ["".join(draw.choices([*BLANKS, *"ab. 0\n"], k=draw.randrange(1, 8))) for _ in range(4000)]
    return [*code.splitlines(keepends=True), *strange(1, 1000), *blanks]


@functools.cache
def trained_pairs(fallback: bool) -> str:
    """The vocabulary of byte pairs, or of characters with bytes for the unknown, as JSON.

    Byte pairs are made without a split into words, so that a wrong split shows.
    """
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(
        library.models.BPE(byte_fallback=fallback, unk_token="<unk>" if fallback else None)
    )
    pre = library.pre_tokenizers
    made.pre_tokenizer = (
        pre.Metaspace() if fallback else pre.ByteLevel(add_prefix_space=False, use_regex=False)
    )
    first = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))] if fallback else []
    alphabet = ["\u2581", *map(chr, range(33, 127))] if fallback else pre.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=alphabet,
        limit_alphabet=600,
        special_tokens=first,
        show_progress=False,
    )
    made.train_from_iterator(trained_on(), trainer)
    settings = json.loads(made.to_str())
    return json.dumps(settings | {"added_tokens": []})  # without the trainer's


def byte_pairs(folder: Path, pre_tokenizer=None, normalizer=None, fallback=False, added=()) -> Path:
    """Write a tokenizer.json of byte pairs; returns its folder."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer.from_str(trained_pairs(fallback))
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    return saved(folder, made, added)


def saved(folder: Path, made, added) -> Path:
    library = pytest.importorskip("tokenizers")
    made.add_tokens([library.AddedToken(text, **ADDED[text]) for text in added])
    made.add_special_tokens([EOD, "<|im_start|>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


def hugging_face(folder: Path) -> Shape:
    library = pytest.importorskip("tokenizers")
    theirs = library.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str, special: bool) -> list[int]:
        theirs.encode_special_tokens = not special
        return theirs.encode(text).ids

    ours = build_tokenizer("HuggingFaceTokenizer", str(folder))
    return Shape(ours, lambda text: ids(text, False), lambda text: ids(text, True))


def split(pattern: str):
    library = pytest.importorskip("tokenizers")
    pre = library.pre_tokenizers
    by = pre.Split(library.Regex(pattern), "isolated")
    return pre.Sequence([by, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level():
    return pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel(add_prefix_space=False)


def plain_bytes(folder: Path) -> Shape:
    return Shape(build_tokenizer("ByteTokenizer"), lambda text: [*text.encode()], None)


def gpt2_json(folder: Path) -> Shape:
    return hugging_face(byte_pairs(folder, byte_level()))


def neox(folder: Path) -> Shape:
    """GPT-NeoX's: added tokens of several blanks, which are not special."""
    nfc = pytest.importorskip("tokenizers").normalizers.NFC()
    return hugging_face(byte_pairs(folder, byte_level(), nfc, added=["  ", "    ", "\n ", " x"]))


def every_flag(folder: Path) -> Shape:
    nfc = pytest.importorskip("tokenizers").normalizers.NFC()
    return hugging_face(byte_pairs(folder, byte_level(), nfc, added=ADDED))


def llama3_json(folder: Path) -> Shape:
    return hugging_face(byte_pairs(folder, split(LLAMA3), added=["  ", "<left>"]))


def llama2_json(folder: Path) -> Shape:
    normal = pytest.importorskip("tokenizers").normalizers
    steps = normal.Sequence([normal.Prepend("\u2581"), normal.Replace(" ", "\u2581")])
    return hugging_face(byte_pairs(folder, None, steps, fallback=True, added=["<left>", "alone", "</s>"]))


def unigram_json(folder: Path) -> Shape:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.Unigram())
    made.normalizer, made.pre_tokenizer = library.normalizers.NFKC(), library.pre_tokenizers.Metaspace()
    trainer = library.trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    made.train_from_iterator(filter(str.isascii, trained_on()[:600]), trainer)
    return hugging_face(saved(folder, made, ADDED))


def word_piece_json(folder: Path) -> Shape:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = (
        library.normalizers.BertNormalizer(),
        library.pre_tokenizers.BertPreTokenizer(),
    )
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=1500, special_tokens=["[UNK]"], show_progress=False
    )
    made.train_from_iterator(trained_on(), trainer)
    return hugging_face(saved(folder, made, ADDED))


def pieces(folder: Path, **settings) -> Shape:
    """A SentencePiece model, by default as Llama 2's; control tokens such as </s> are text to the package."""
    library = pytest.importorskip("sentencepiece")
    usual = {"normalization_rule_name": "identity", "byte_fallback": True, "model_type": "bpe"}
    settings = usual | {"user_defined_symbols": ["<left>", "alone", "\u3000"]} | settings
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in trained_on()[:4000] if "\0" not in text]),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=1600,
        character_coverage=0.99,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **settings,
    )
    theirs = library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return Shape(
        build_tokenizer("SentencePieceTokenizer", str(folder / "tokenizer.model")), theirs.encode, None
    )


def unigram_pieces(folder: Path) -> Shape:
    return pieces(folder, model_type="unigram", normalization_rule_name="nmt_nfkc", byte_fallback=False)


def merges() -> list[tuple[str, str]]:
    """Pairs of GPT-2's letters for bytes, in order, one for each token."""
    pairs = json.loads(trained_pairs(False))["model"]["merges"]
    first = {}
    for pair in pairs:
        first.setdefault("".join(pair), pair)
    return [pair for token, pair in first.items() if token not in SPECIAL]


def merged() -> list[bytes]:
    """The tokens of byte pairs, in order: the bytes, then merges."""
    alphabet = byte_alphabet()
    bytes_first = [bytes([b]) for b in range(256)]
    return [*bytes_first, *(bytes(alphabet[c] for c in "".join(pair)) for pair in merges())]


def tiktoken_shape(ours: Tokenizer, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> Shape:
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return Shape(
        ours,
        theirs.encode_ordinary,
        lambda text: theirs.encode(text, allowed_special="all"),
        takes_halves=True,
    )


def rank_file(folder: Path) -> Shape:
    tokens = merged()
    write_ranks(folder / "ranks", tokens)
    ours = build_tokenizer("TikTokenizer", str(folder / "ranks"))
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken_shape(ours, GPT2, ranks, {EOD: len(tokens)})


def gpt2_files(folder: Path) -> Shape:
    tokens = [*byte_alphabet(), *map("".join, merges()), EOD]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    lines = "".join(" ".join(pair) + "\n" for pair in merges())
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + lines, encoding="utf-8")
    names = str(folder / "encoder.json"), str(folder / "vocab.bpe")
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=names[1], encoder_json_file=names[0])
    return tiktoken_shape(build_tokenizer("GPT2BPETokenizer", None, *names), GPT2, ranks, {EOD: len(ranks)})


def llama3_model(folder: Path) -> Shape:
    """Meta's own class names more special tokens; the strings hold only these."""
    tokens = merged()
    write_ranks(folder / "tokenizer.model", tokens)
    special = {"<|begin_of_text|>": len(tokens), "<|end_of_text|>": len(tokens) + 1}
    ranks = {token: i for i, token in enumerate(tokens)}
    ours = build_tokenizer("Llama3Tokenizer", str(folder / "tokenizer.model"))
    return tiktoken_shape(ours, LLAMA3, ranks, special)


def megatron_json(folder: Path) -> Shape:
    """Its patterns and ids are held to Megatron Core's own class in data/test_tokenizer.py."""
    tokens = merged()
    named = [{"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)]
    (folder / "vocabulary.json").write_text(json.dumps(named))
    model, size = str(folder / "vocabulary.json"), len(named) + 10
    ours = build_tokenizer("TikTokenizer", model, vocab_size=size, pattern="v2", special=10)
    names = [*"<unk> <s> </s> <mask> <pad> <cls> <sep>".split(), "<SPECIAL_7>", "<SPECIAL_8>", "<SPECIAL_9>"]
    ranks = {token: 10 + i for i, token in enumerate(tokens)}
    special = {name: i for i, name in enumerate(names)}
    return tiktoken_shape(ours, MEGATRON_PATTERNS["v2"], ranks, special)


SHAPES = [
    *(plain_bytes, gpt2_json, neox, every_flag, llama3_json, llama2_json, unigram_json, word_piece_json),
    *(pieces, unigram_pieces, rank_file, gpt2_files, llama3_model, megatron_json),
]
