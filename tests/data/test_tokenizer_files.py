"""Malformed files of tokenizers: each is an error that names the file, soon, and never a traceback."""

import base64
import json
import re
import time

import pytest

from nanomegatron.data.tokenizer import EOD, build_tokenizer, byte_alphabet, tokenizer_from_spec

BYTES = [f"{base64.b64encode(bytes([b])).decode()} {b}" for b in range(256)]
HUGE, DEEP = "9" * 5000, "[" * 50000 + "]" * 50000
# Lines of a rank file behind those of the 256 bytes | what the message must hold
RANKS = {
    "YWI= 1000000000": "",  # only large
    "YWI= -1": "the id -1 of b'ab'",
    f"YWI= {2**40}": f"the id {2**40} of b'ab'",
    f"YWI= {HUGE}": ":257: b'YWI= 9",
    "YWI= 1.5": ":257: b'YWI= 1.5' is not",
    "YWI= x": ":257: b'YWI= x' is not",
    "YWI=": ":257: b'YWI=' is not",
    "YWI 256": ":257: b'YWI 256' is not",
    "Y\xff= 256": ":257:",
    "YWI= 256 3": ":257:",
    "YWI= 7": "have the same id 7",
    "YWI= 256\nYWI= 257": ":258: the token b'ab' stands there twice",
    "YQ== 256": ":257: the token b'a' stands there twice",
}


def answer(build) -> str:
    """The message of the ValueError; "" where the file is taken. In less than a second."""
    start = time.process_time()
    try:
        build()
    except ValueError as error:
        return str(error)
    finally:
        assert time.process_time() - start < 1
    return ""


def check(said: str, part: str, file: str) -> None:
    assert (file in said and part in said and len(said) < 400) if part else not said, said


@pytest.mark.parametrize("line, part", RANKS.items(), ids=[line[:20] for line in RANKS])
@pytest.mark.parametrize("kind", ["TikTokenizer", "Llama3Tokenizer"])
def test_rank_files(kind, line, part, tmp_path):
    path = tmp_path / "ranks"
    path.write_text("\n".join([*BYTES, line]), encoding="latin-1")
    check(answer(lambda: build_tokenizer(kind, str(path))), part, str(path))


@pytest.mark.parametrize(
    "change, part",
    [
        ("list", "must be a JSON object"),
        ("deep", "nested too deeply"),
        ({"ab": "x"}, "the id x of 'ab'"),
        ({"ab": -1}, "the id -1 of 'ab'"),
        ({"ab": 2**40}, f"the id {2**40} of 'ab'"),
        ({EOD: 97}, f"{EOD!r} and 'a' have the same id 97"),
        ({EOD: None}, "the id None of"),
    ],
    ids=str,
)
def test_gpt2s_vocabulary(change, part, tmp_path):
    entries = byte_alphabet() | {"ab": 256, EOD: 257}
    text = {"list": "[]", "deep": DEEP}[change] if isinstance(change, str) else json.dumps(entries | change)
    (tmp_path / "encoder.json").write_text(text)
    (tmp_path / "vocab.bpe").write_text("#version\na b\n")
    files = dict(vocab_file=str(tmp_path / "encoder.json"), merge_file=str(tmp_path / "vocab.bpe"))
    check(answer(lambda: build_tokenizer("GPT2BPETokenizer", **files)), part, "encoder.json")


@pytest.mark.parametrize("text", ["[]", "{", DEEP, '{"eos_token": 3}', '{"eos_token": {"content": ["x"]}}'])
def test_hugging_faces_settings(text, tmp_path):
    library = pytest.importorskip("tokenizers")
    model = library.models.BPE({"a": 0, EOD: 1}, [])
    library.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(text)
    said = answer(lambda: build_tokenizer("HuggingFaceTokenizer", str(tmp_path)))
    check(said, "tokenizer_config.json", str(tmp_path))


@pytest.mark.parametrize("text", ["[]", "3", DEEP, '{"model": {"type": "BPE", "vocab": [], "merges": {}}}'])
def test_hugging_faces_vocabulary(text, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(text)
    check(
        answer(lambda: build_tokenizer("HuggingFaceTokenizer", str(tmp_path))),
        "not a tokenizer.json",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    "spec",
    [{"type": 3}, {"type": "TikTokenizer", "model": 3}, {"type": "NullTokenizer", "vocab_size": "9"}, {}],
)
def test_descriptions_in_datasets_and_checkpoints(spec):
    assert re.search("not the description of a tokenizer", answer(lambda: tokenizer_from_spec(spec)))
