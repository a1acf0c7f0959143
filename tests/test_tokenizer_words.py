"""Many texts at once, by their words, against each library, text by text."""

import json
import random

import numpy as np
import pytest
import tiktoken

from nanomegatron.data import words
from nanomegatron.data.library_tokenizers import piece_cuts
from nanomegatron.data.text import encode_batch
from nanomegatron.data.tokenizer import CUTS, GPT2_PATTERN, MEGATRON_PATTERNS, build_tokenizer
from nanomegatron.data.vocabulary import read_ranks, write_ranks
from tests.test_tokenizer import TEXTS, corpus, gpt2_files, rank_file  # noqa: F401 (fixtures)

SPECIAL = ["<|endoftext|>", "<|end_of_text|>", "<s>", "</s>", "<unk>", "<|im_start|>", "<added>"]
PARTS = [
    *"abst019.,_-+'\"/()<>|#",
    *("'s", "'t", "'ll", "'ve", "'re", "'S", "''", "'x", "don't", "we'll've", "\x1c", "\x7f", " 's"),
    *(" ", "  ", "   ", "    ", "\n", "\n\n", "\n    ", "\t", "\t\t", "\r", "\r\n", " \n ", "\x0b", "\x0c"),
    *(")\n", ");\n\n", "//", "*/\n", "\n/", "def", "return ", "import json\n", "fooBar", "HTTPServer"),
    *("x" * 20, "-" * 40, "internationalization", *SPECIAL),
]
SCRIPTS = [
    *("\u00e9", "\u4f60\u597d", "\U0001f917", "\u00a0", "\u2003", "\u0085", "e\u0301", "\u0663", "\u3000"),
    *("\0", "\u2581", "\u200d", "\u0130", "=\u0338", "\ud800", "\ufeff", "\u2028"),
]


def compare(tokenizer, texts):
    """The ids of `encode`; a text that the library refuses is refused with the others too."""
    expected = []
    try:
        expected += map(tokenizer.encode, texts)
    except ValueError:
        with pytest.raises(ValueError):
            encode_batch(tokenizer, texts)
        return
    ids, lengths = encode_batch(tokenizer, texts)
    assert lengths.tolist() == [len(each) for each in expected], texts
    assert ids.tolist() == [i for each in expected for i in each], texts


def trained(corpus, tmp_path, pre_tokenizer, normalizer=None, **model):  # noqa: F811
    """A tokenizer.json of byte pairs, with two special tokens and one that is no special one."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE(**model))
    if model:
        made.pre_tokenizer = library.pre_tokenizers.Metaspace()  # so that no piece holds two words
        alphabet = ["\u2581", *(chr(i) for i in range(33, 127))]
        trainer = library.trainers.BpeTrainer(
            vocab_size=900,
            initial_alphabet=alphabet,
            show_progress=False,
            special_tokens=[f"<0x{i:02X}>" for i in range(256)],
        )
        texts = [text.rstrip("\n") for text in corpus]
    else:
        made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
        alphabet, texts = library.pre_tokenizers.ByteLevel.alphabet(), corpus
        trainer = library.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    settings = json.loads(made.to_str())
    settings["added_tokens"] = []
    made = library.Tokenizer.from_str(json.dumps(settings))
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    made.add_special_tokens(["<|endoftext|>", "</s>", "<|im_start|>"])
    made.add_tokens(["<added>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def split(pattern):
    library = pytest.importorskip("tokenizers")
    pre = library.pre_tokenizers
    by = pre.Split(library.Regex(pattern), "isolated")
    return pre.Sequence([by, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


KINDS = ["gpt2", "llama3", "v1", "v2", "hf gpt2", "hf qwen", "hf o200k", "hf pieces", "hf llama", "pieces"]


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path, corpus):  # noqa: F811
    name = request.param
    if name in ("gpt2", "llama3"):
        kind = {"gpt2": "TikTokenizer", "llama3": "Llama3Tokenizer"}[name]
        return build_tokenizer(kind, str(request.getfixturevalue("rank_file")))
    if name in ("v1", "v2"):
        ranks = request.getfixturevalue("rank_file")
        path = tmp_path / "bpe"
        path.write_bytes(ranks.read_bytes())
        (tmp_path / "bpe.json").write_text(json.dumps({"pattern": MEGATRON_PATTERNS[name]}))
        return build_tokenizer("TikTokenizer", str(path))
    library = pytest.importorskip("tokenizers")
    if name == "hf gpt2":
        return trained(corpus, tmp_path, library.pre_tokenizers.ByteLevel(add_prefix_space=False))
    if name == "hf qwen":
        pattern = words.LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
        return trained(corpus, tmp_path, split(pattern), library.normalizers.NFC())
    if name == "hf o200k":
        return trained(corpus, tmp_path, split(constructed("o200k_base")["pat_str"]))
    if name == "hf pieces":
        meta = library.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        return trained(corpus, tmp_path, meta, byte_fallback=True)
    if name == "hf llama":
        blanks = library.normalizers.Replace(" ", "\u2581")
        steps = library.normalizers.Sequence([library.normalizers.Prepend("\u2581"), blanks])
        return trained(corpus, tmp_path, None, steps, byte_fallback=True)
    return pieces(corpus, tmp_path)


def pieces(corpus, tmp_path, **settings):  # noqa: F811
    """Trained as Llama 2's: byte pairs, text as it is, a blank before it, bytes for the unknown."""
    library = pytest.importorskip("sentencepiece")
    settings = {"normalization_rule_name": "identity", "byte_fallback": True, "model_type": "bpe"} | settings
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[:1500]),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600,
        remove_extra_whitespaces=False,
        minloglevel=2,
        user_defined_symbols=["<added>"],
        **settings,
    )
    return build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tokenizer.model"))


def test_random_texts(tokenizer):
    """Every order of the classes: chunks of up to eight texts, ASCII alone and with other scripts."""
    assert tokenizer.encode_many and getattr(tokenizer, "_words", True)
    draw = random.Random(0)
    for i in range(400):
        parts = PARTS + SCRIPTS[: (0, 9, 99)[i % 3]]
        compare(tokenizer, ["".join(draw.choices(parts, k=draw.randrange(25))) for _ in range(i % 8 + 1)])
    compare(tokenizer, [])
    compare(tokenizer, ["", "", " ", "\n", ""])
    compare(tokenizer, ["a" * n for n in range(40)] + [" " + "b" * 24, "c" * 1000, " " * 30 + "x"] * 2)


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, words.LLAMA3_PATTERN, *MEGATRON_PATTERNS.values()])
def test_all_pairs_are_tokens(pattern, tmp_path):
    """So that a cut in the wrong place, and a joiner that is no word by itself, change the ids."""
    characters = "abx019.('/ \n\t\r\u00e9"
    tokens = [bytes([i]) for i in range(256)]
    tokens += [(a + b).encode() for a in characters for b in characters if (a + b).isascii()]
    write_ranks(tmp_path / "bpe", [*tokens, b"   ", b"\n\n ", b"000", b"x0x"])
    (tmp_path / "bpe.json").write_text(json.dumps({"pattern": pattern}))
    tokenizer, draw = build_tokenizer("TikTokenizer", str(tmp_path / "bpe")), random.Random(0)
    for i in range(600):
        compare(tokenizer, ["".join(draw.choices(characters[: 14 + i % 2], k=40)) for _ in range(8)])


@pytest.mark.full
def test_many_random_texts(tokenizer):
    draw = random.Random(1)
    for i in range(30_000):
        parts = PARTS + SCRIPTS[: (0, 9, 99)[i % 3]]
        compare(tokenizer, ["".join(draw.choices(parts, k=draw.randrange(40))) for _ in range(i % 8 + 1)])


def test_real_text(gpt2_files, corpus, monkeypatch):  # noqa: F811
    """Words meet again in later chunks, some at the place of others; full tables are emptied."""
    whole = "".join(corpus)
    chunks = [[whole[i : i + 700], whole[i + 700 : i + 2000]] for i in range(0, len(whole), 2000)]
    for bits, most in (20, 1 << 26), (6, 20_000):  # 64 places: words push each other out
        monkeypatch.setattr(words, "BITS", bits)
        monkeypatch.setattr(words, "MOST_BYTES", most)
        tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=gpt2_files[1])
        for chunk in chunks + chunks[:5]:
            compare(tokenizer, chunk)
        compare(tokenizer, TEXTS)


def test_memory_is_bounded(rank_file, monkeypatch):  # noqa: F811
    monkeypatch.setattr(words, "MOST_BYTES", 50_000)
    tokenizer = build_tokenizer("TikTokenizer", str(rank_file))
    for i in range(0, 30_000, 100):
        compare(tokenizer, [" ".join(f"w{n}" for n in range(i, i + 100))])
        assert tokenizer.encode_many._bytes + 4 * tokenizer.encode_many._used < 50_000


def constructed(name):
    """The arguments of one of tiktoken's own encodings, without its ranks, which would be fetched."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "load_tiktoken_bpe", lambda *given, **more: {})
        return public.ENCODING_CONSTRUCTORS[name]()


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_tiktokens_own(rank_file, name):  # noqa: F811
    """The patterns of the package, with other ranks: those of GPT-4 have to be fetched."""
    made, ranks = constructed(name), {bytes([i]): i for i in range(256)}
    made["explicit_n_vocab"] = None
    merged = [*(token for token in read_ranks(rank_file) if len(token) > 1), b"\n/"]  # shows where it is cut
    made["mergeable_ranks"] = ranks | {token: 256 + i for i, token in enumerate(merged)}
    encoding = tiktoken.Encoding(**made)
    tokenizer = build_tokenizer("TikTokenizer", str(rank_file))
    tokenizer._use(encoding, encoding.eot_token, {"type": "TikTokenizer", "model": name})
    assert tokenizer.encode_many and CUTS[name] is words.GPT4_CUTS
    draw = random.Random(2)
    for i in range(400):
        parts = PARTS + SCRIPTS[: (0, 9, 99)[i % 3]]
        compare(tokenizer, ["".join(draw.choices(parts, k=draw.randrange(25))) for _ in range(i % 8 + 1)])


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "unigram"},
        {"byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"treat_whitespace_as_suffix": True},
    ],
    ids=str,
)
def test_other_pieces_are_the_librarys_alone(corpus, tmp_path, settings):  # noqa: F811
    tokenizer = pieces(corpus, tmp_path, **settings)
    assert tokenizer._words is None
    compare(tokenizer, [*TEXTS, "a  b\n c", ""])


def test_how_pieces_are_cut():
    """Between characters that are beside each other in no piece, and never inside a character."""
    cuts = piece_cuts(["\u2581", "\u2581a", "ab", "b\u2581", "a\u00e9"])
    text = b"\xff aba b\xc3\xa9c\xff"
    starts = np.flatnonzero(cuts(np.frombuffer(text, np.uint8)))
    found = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)])]
    assert found == [b"\xff ab", b"a", b" ", b"b", b"\xc3\xa9", b"c", b"\xff"]
    assert piece_cuts(["\u2581", "\x01a"]) is None


def test_other_splits_are_the_librarys_alone(corpus, tmp_path):  # noqa: F811
    library = pytest.importorskip("tokenizers")
    pre, normal = library.pre_tokenizers, library.normalizers
    byte_level = pre.ByteLevel(add_prefix_space=False)
    for splitter, normalizer in (
        (pre.ByteLevel(add_prefix_space=True), None),
        (byte_level, normal.NFKC()),
        (byte_level, normal.Lowercase()),
        (split(r"\s+|\S+"), None),
        (pre.Sequence([pre.Digits(), byte_level]), None),
    ):
        tokenizer = trained(corpus[:300], tmp_path, splitter, normalizer)
        assert tokenizer._words is None
        compare(tokenizer, [*TEXTS, "12345'S don't\n\n  x", ""])


@pytest.mark.parametrize("kind", ["ByteTokenizer", "TikTokenizer"])
def test_no_texts(kind, rank_file):  # noqa: F811
    ids, lengths = encode_batch(build_tokenizer(kind, str(rank_file)), [])
    assert len(ids) == len(lengths) == 0 and np.issubdtype(lengths.dtype, np.integer)
