"""Tokenizers against the libraries themselves; GPT-2 against a vocabulary written in its own file format."""

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken

from nanomegatron.data.text import train_tokenizer
from nanomegatron.data.tokenizer import (
    EOD,
    GPT2_PATTERN,
    build_tokenizer,
    tokenizer_from_spec,
)
from nanomegatron.data.vocabulary import byte_alphabet, read_ranks, write_ranks

TEXTS = [
    "",
    "Hello world, hello there!  It's 12345 o'clock...\n\n\tdef f(x):\n        return x ** 2\r\n",
    "na\xefve \xc4rger, \u4f60\u597d\u4e16\u754c, \u0645\u0631\u062d\u0628\u0627, "
    "\U0001f917\U0001f469\u200d\U0001f469\u200d\U0001f467, e\u0301, \x00\x7f\u2028 \ufeff",
    f"ends here{EOD} or does it</s> <s>",
    "   ",
    " " * 50_000 + "x",
    "a" * 50_000,
]


@pytest.fixture(scope="module")
def corpus():
    source = "".join(Path(module.__file__).read_text() for module in (json, subprocess, pytest))
    return [*source.splitlines(keepends=True), *TEXTS[:3]]


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory, corpus):
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("ranks") / "bpe.tiktoken"
    train_tokenizer(corpus, 700, path)
    return path


def hugging_face(corpus, size):
    """The same training by the tokenizers library, kept as its own tokenizer."""
    library = pytest.importorskip("tokenizers")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        corpus, library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return model


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory, corpus):
    """encoder.json and vocab.bpe of a small vocabulary, in GPT-2's order: bytes, then merges."""
    model = json.loads(hugging_face(corpus, 600).to_str())["model"]
    folder = tmp_path_factory.mktemp("gpt2")
    tokens = [*byte_alphabet(), *("".join(pair) for pair in model["merges"]), EOD]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    return str(folder / "encoder.json"), str(folder / "vocab.bpe")


@pytest.fixture(params=["Byte", "TikTokenizer", "Llama3", "GPT2BPE", "HuggingFace", "SentencePiece"])
def tokenizer(request, tmp_path, corpus):
    if request.param == "Byte":
        return build_tokenizer("ByteTokenizer")
    if request.param == "TikTokenizer":
        return build_tokenizer("TikTokenizer", str(request.getfixturevalue("rank_file")))
    if request.param == "Llama3":
        return build_tokenizer("Llama3Tokenizer", str(request.getfixturevalue("rank_file")))
    if request.param == "GPT2BPE":
        vocab, merges = request.getfixturevalue("gpt2_files")
        return build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    if request.param == "HuggingFace":
        return build_tokenizer("HuggingFaceTokenizer", str(save_hugging_face(corpus, tmp_path)))
    return build_tokenizer("SentencePieceTokenizer", str(request.getfixturevalue("piece_model")))


def save_hugging_face(corpus, folder):
    model = hugging_face(corpus, 500)
    model.add_special_tokens([EOD, "</s>"])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EOD}}))
    return folder


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory, corpus):
    library = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("piece") / "tokenizer"
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[:2000]),
        model_prefix=str(prefix),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def test_texts_come_back_and_stay_in_the_vocabulary(tokenizer):
    """Special tokens in a text are text: the id that ends a document never comes out of one."""
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


def test_spec_builds_the_same(tokenizer):
    again = tokenizer_from_spec(json.loads(json.dumps(tokenizer.spec)))
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_bytes():
    tokenizer = build_tokenizer("ByteTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("\xe9!") == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([72, 256, 0xC3]) == f"H{EOD}\ufffd"


def test_null():
    """Megatron Core 0.19: 127 ids, the last of them ends a document."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=127)
    assert (tokenizer.vocab_size, tokenizer.eod) == (127, 126)
    assert tokenizer.encode("3 0\n126") == [3, 0, 126]
    assert tokenizer.decode([3, 0]) == "3 0"
    with pytest.raises(ValueError, match=r"id 127 is outside 0\.\.126"):
        tokenizer.encode("127")
    assert tokenizer.fingerprint != build_tokenizer("NullTokenizer", vocab_size=128).fingerprint


def test_null_as_megatron_up_to_016():
    """There N counts the ids without the one that ends a document: ours are N + 1."""
    library = pytest.importorskip("megatron.core.tokenizers.text.libraries.null_tokenizer")
    theirs, ours = library.NullTokenizer(126), build_tokenizer("NullTokenizer", vocab_size=127)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (127, 126)
    assert ours.encode("3 0 126") == theirs.text_to_ids("3 0 126")


def test_null_with_another_end_of_document():
    """Megatron 0.19's --null-tokenizer-eod-id: any of the ids. What is the default is written nowhere."""
    plain, first = (build_tokenizer("NullTokenizer", vocab_size=127, eod=eod) for eod in (None, 0))
    last = build_tokenizer("NullTokenizer", vocab_size=127, eod=126)
    assert (plain.eod, first.eod, last.eod) == (126, 0, 126) and first.vocab_size == 127
    assert plain.spec == last.spec == {"type": "NullTokenizer", "vocab_size": 127}
    assert plain.fingerprint == last.fingerprint == hashlib.sha256(b"17:NullTokenizer 127").hexdigest()
    assert plain.fingerprint != first.fingerprint
    again = tokenizer_from_spec(first.spec)
    assert (again.eod, again.fingerprint) == (0, first.fingerprint)
    for wrong in (-1, 127):
        with pytest.raises(ValueError, match=rf"--null-tokenizer-eod-id {wrong}: .* ids 0\.\.126"):
            build_tokenizer("NullTokenizer", vocab_size=127, eod=wrong)


def test_trained_ranks_equal_the_tokenizers_library(rank_file, corpus):
    """tiktoken on our rank file gives the ids of the library that trained it."""
    library = hugging_face(corpus, 699)
    ours = build_tokenizer("TikTokenizer", str(rank_file))
    assert (ours.vocab_size, ours.eod) == (700, 699)
    for text in ["".join(corpus), *TEXTS[:5]]:
        assert ours.encode(text) == library.encode(text).ids


def test_tiktoken_itself(rank_file):
    ranks = read_ranks(rank_file)
    plain = tiktoken.Encoding(
        "x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}
    )
    ours = build_tokenizer("TikTokenizer", str(rank_file))
    for text in TEXTS:
        assert ours.encode(text) == plain.encode(text, disallowed_special=())
    assert ours.decode([ours.eod]) == EOD


@pytest.fixture(scope="module")
def json_vocabulary(rank_file, tmp_path_factory):
    """Megatron's form of a vocabulary: the bytes, then the merged tokens, each an object."""
    merged = [token for token in read_ranks(Path(rank_file)) if len(token) > 1]
    tokens = [bytes([b]) for b in range(256)] + merged
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    path = tmp_path_factory.mktemp("json") / "vocabulary.json"
    path.write_text(json.dumps(entries))
    return path, len(tokens)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
@pytest.mark.parametrize("special, left_out", [(7, 0), (40, 30)])
def test_megatrons_json_vocabulary(json_vocabulary, pattern, special, left_out):
    """The ids, the size and the end of a document of Megatron Core's own TikTokenizer."""
    library = pytest.importorskip("megatron.core.tokenizers.text.libraries.tiktoken_tokenizer")
    path, count = json_vocabulary
    size = count + special - left_out
    theirs = library.TikTokenTokenizer(
        str(path), num_special_tokens=special, pattern=pattern, vocab_size=size
    )
    ours = build_tokenizer("TikTokenizer", str(path), vocab_size=size, pattern=pattern, special=special)
    assert (ours.vocab_size, ours.eod) == (size, theirs.eos_id)
    for text in TEXTS:
        assert ours.encode(text) == theirs.tokenizer.encode_ordinary(text)  # no special tokens in it
        assert ours.decode(ours.encode(text)) == text
    assert tokenizer_from_spec(json.loads(json.dumps(ours.spec))).fingerprint == ours.fingerprint


def test_wrong_json_vocabularies_are_refused(json_vocabulary, rank_file, tmp_path):
    path, count = json_vocabulary
    entries, bad = json.loads(path.read_text()), tmp_path / "bad.json"

    def message(change=None, model=bad, **flags) -> str:
        changed = json.loads(json.dumps(entries))
        bad.write_text(change if isinstance(change, str) else json.dumps(change(changed)))
        with pytest.raises(ValueError) as error:
            build_tokenizer("TikTokenizer", str(model), **{"vocab_size": count + 7, "special": 7} | flags)
        return str(error.value)

    assert "must be a JSON list" in message("{}") and "not JSON" in message("[" * 50000)
    assert "entry 3, " in message(lambda e: [*e[:3], {"token_bytes": "Aw=="}])
    assert 'must have "rank" 3 and the "token_bytes" of that byte' in message(lambda e: [*e[:3], e[4]])
    assert "entry 300" in message(lambda e: [*e[:300], e[299] | {"rank": 300}])
    assert "entry 0, 7" in message(lambda e: [7, *e[1:]])
    assert f"has {count} tokens; give --vocab-size {count + 7} or less" in message(list, vocab_size=count + 8)
    for few in (0, 6):
        assert f"--tiktoken-num-special-tokens {few}: must be 7 or more" in message(list, special=few)
    plain = {"model": rank_file, "vocab_size": None}
    assert "--tiktoken-pattern v1: is for Megatron's JSON" in message(list, pattern="v1", **plain)


def test_llama3_itself(tmp_path):
    """Ids by the pattern of Llama 3's reference code; its 256 special tokens, two of them by their place."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    rank_file = tmp_path / "tokenizer.model"
    write_ranks(rank_file, [*(bytes([b]) for b in range(256)), b"12", b"34", b"1234", b"(x", b"\n\n", b"  "])
    ranks = read_ranks(rank_file)
    theirs = tiktoken.Encoding("llama3", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = build_tokenizer("Llama3Tokenizer", str(rank_file))
    for text in [*TEXTS, "(x) 1234567 It'S\r\n\r\n  y\n", "a \n "]:
        assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.vocab_size == len(ranks) + 256 and ours.eod == len(ranks) + 1
    assert ours.decode([ours.eod, len(ranks) + 9]) == "<|end_of_text|><|eot_id|>"
    assert ours.encode("<|end_of_text|>")[0] < len(ranks)
    gpt2 = build_tokenizer("TikTokenizer", str(rank_file))
    assert (
        all(ours.encode(text) != gpt2.encode(text) for text in ("1234567", "(x"))
        and ours.fingerprint != gpt2.fingerprint
    )


def test_gpt2_files_equal_tiktokens_own_reading(gpt2_files):
    vocab, merges = gpt2_files
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ours = build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=vocab)
    plain = tiktoken.Encoding(
        "x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}
    )
    for text in TEXTS:
        assert ours.encode(text) == plain.encode(text, disallowed_special=())
    assert ours.eod == len(ranks)


def test_same_ids_same_fingerprint(gpt2_files, tmp_path):
    """However its files look: GPT-2's pair and the rank file made of it are one tokenizer."""
    vocab, merges = gpt2_files
    pair = build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    alphabet = byte_alphabet()
    entries = [
        bytes(alphabet[c] for c in token) for token in json.loads(Path(vocab).read_text()) if token != EOD
    ]
    write_ranks(tmp_path / "ranks", entries)
    assert build_tokenizer("TikTokenizer", str(tmp_path / "ranks")).fingerprint == pair.fingerprint
    entries[300], entries[301] = entries[301], entries[300]
    write_ranks(tmp_path / "ranks", entries)
    assert build_tokenizer("TikTokenizer", str(tmp_path / "ranks")).fingerprint != pair.fingerprint


def test_sentencepiece_itself(piece_model):
    library = pytest.importorskip("sentencepiece")
    plain = library.SentencePieceProcessor(model_file=str(piece_model))
    ours = build_tokenizer("SentencePieceTokenizer", str(piece_model))
    assert (ours.vocab_size, ours.eod) == (700, plain.piece_to_id("</s>"))
    assert all(ours.encode(text) == plain.encode(text) for text in TEXTS)


def test_hugging_face_end_of_document(corpus, tmp_path):
    """From tokenizer_config.json; without one, a known name; without that, an error that says what to do."""
    folder = save_hugging_face(corpus, tmp_path)
    assert build_tokenizer("HuggingFaceTokenizer", str(folder)).eod == 500
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert build_tokenizer("HuggingFaceTokenizer", str(folder / "tokenizer.json")).eod == 501
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(ValueError, match=r"no end-of-document token \(<gone>\)"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))


def test_moved_files_are_found_beside_the_data(rank_file, tmp_path):
    spec = {"type": "TikTokenizer", "model": "/gone/" + rank_file.name}
    assert tokenizer_from_spec(spec, rank_file.parent).vocab_size == 700
    with pytest.raises(ValueError, match="no such file"):
        tokenizer_from_spec(spec, tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(kind="Bert"), "--tokenizer-type Bert: must be one of ByteTokenizer"),
        (dict(kind="NullTokenizer"), "NullTokenizer needs --vocab-size"),
        (dict(kind="TikTokenizer"), "TikTokenizer needs --tokenizer-model"),
        (dict(kind="TikTokenizer", model="nowhere"), "nowhere: no such file, and not one of .*cl100k_base"),
        (dict(kind="GPT2BPETokenizer", vocab_file="a", merge_file="b"), "--vocab-file a: no such file"),
        (dict(kind="HuggingFaceTokenizer", model="gone"), "--tokenizer-model gone: no such file"),
        (dict(kind="SentencePieceTokenizer", model="gone"), "--tokenizer-model gone: no such file"),
    ],
)
def test_what_is_missing_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(**arguments)


@pytest.mark.parametrize("kind", ["TikTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"])
def test_wrong_files_are_refused(kind, tmp_path):
    path = tmp_path / "wrong"
    path.write_text("no tokenizer\n")
    with pytest.raises(ValueError, match="wrong"):
        build_tokenizer(kind, str(path))


def test_gpt2_files_that_do_not_belong_together(gpt2_files, tmp_path):
    lines = Path(gpt2_files[1]).read_text().splitlines(keepends=True)
    lines[1], lines[2] = lines[2], lines[1]
    (tmp_path / "vocab.bpe").write_text("".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match="do not belong together"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=str(tmp_path / "vocab.bpe"))


@pytest.mark.parametrize(
    "kind, library", [("HuggingFaceTokenizer", "tokenizers"), ("SentencePieceTokenizer", "sentencepiece")]
)
def test_a_missing_library_is_one_line(kind, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"needs the {library} library: pip install {library}$"):
        build_tokenizer(kind, "some file")


def test_no_torch():
    code = "import sys, preprocess; assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
