"""A damaged PREFIX.json beside data: exit code 2 and a line that names the file, or nothing is otherwise."""

import copy
import json

import pytest

import train
from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.data.tokenizer import ByteTokenizer
from nanomegatron.data.verify import verify_pair
from nanomegatron.faults.exit import BAD_CONFIG
from nanomegatron.plan.flops import bits_per_byte
from tests.megatron_data import random_documents, write
from tests.test_train import MODEL

BYTES = ByteTokenizer()
STRANGE = [None, True, -1, 0.5, float("nan"), 10**400, "", "x\x1b]0;", [], [1], {}, {"type": 3}]
KEYS = ("idx_sha256", "fingerprint", "max_token", "tokenizer", "bin_sha256", "bin_block_bytes", "text_bytes")
KEYS += ("text_bytes_before",)
PLACES = ["5", "0 5 x", "0 -5", "9 3", "0 0", "0 " + "9" * 30, "0 1e3", " ".join(map(str, range(99)))]


@pytest.fixture
def sidecar(tmp_path, monkeypatch) -> dict:
    """What preprocess.py writes beside d.bin and d.idx, in the current folder."""
    monkeypatch.chdir(tmp_path)
    about = dict(fingerprint=BYTES.fingerprint, max_token=99, tokenizer=BYTES.spec, text_bytes=600)
    about["text_bytes_before"] = "0 250 600"
    write("d", random_documents(2, 30, 40), sidecar=about)
    return json.loads((tmp_path / "d.json").read_text())


def damages(good: dict) -> dict[str, bytes]:
    """Names and contents of damaged files."""
    text = json.dumps(good)
    found = {}
    for key in KEYS:
        found[f"without {key}"] = json.dumps({k: v for k, v in good.items() if k != key}).encode()
        found[f"{key} twice"] = f'{{"{key}": 1, {text[1:]}'.encode()
        for value in STRANGE:
            found[f"{key} {str(value)[:20]!r}"] = json.dumps(good | {key: value}).encode()
    for places in PLACES:
        found[f"text_bytes_before {places[:20]}"] = json.dumps(good | {"text_bytes_before": places}).encode()
    for part in [*range(0, len(text), len(text) // 12), -1]:
        found[f"cut at {part}"] = text[:part].encode()
    wrong = copy.deepcopy(good)
    wrong["tokenizer"] = {"type": "HuggingFaceTokenizer", "model": "/dev/zero"}
    for name, value in {
        "a list": [good],
        "a text": text,
        "a number": 3,
        "nothing": None,
        "no file": wrong,
    }.items():
        found[name] = json.dumps(value).encode()
    for name, kind in {"an unknown kind": "Nope", "more than a kind": "ByteTokenizer\nx"}.items():
        found[name] = json.dumps(good | {"tokenizer": {"type": kind}}).encode()
    found["deep lists"] = b"[" * 100_000
    found["deep objects"] = b'{"tokenizer": ' * 100_000
    found["deep inside"] = text[:-1].encode() + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    found["not UTF-8"] = text.encode().replace(b"ByteTokenizer", b"\xff\xfe")
    found["UTF-16"] = text.encode("utf-16")
    found["NUL"] = text.encode() + b"\x00"
    found["a long number"] = text.replace("99", "9" * 5000).encode()
    found["Infinity"] = text.replace(": 99", ": Infinity").encode()
    found["two objects"] = (text + text).encode()
    return found


def as_a_run_reads_it() -> list:
    """The tokenizer of the data, and every sample."""
    data = DataConfig(data_path=("d",), split="1", seq_length=8)
    tokenizer = choose_tokenizer(data)
    samples = build_datasets(data, (60, 0, 0), 1, tokenizer)[0]
    length = samples.bytes_per_token()
    assert length is None or bits_per_byte(2.0, 1, length) > 0
    return [tokenizer.spec, *(samples[i].tolist() for i in range(60))]


def test_every_damage_is_named_or_changes_nothing(sidecar, tmp_path):
    right, fine = as_a_run_reads_it(), []
    every = damages(sidecar)
    for name, contents in every.items():
        (tmp_path / "d.json").write_bytes(contents)
        try:
            assert as_a_run_reads_it() == right, name
            fine.append(name)
        except ValueError as error:
            text = str(error)
            assert "d.json" in text and "\n" not in text and len(text) < 700, (name, text)
        damage, _ = verify_pair("d", 1, print)
        assert all("d.json" in line and "\n" not in line for line in damage), (name, damage)
    # Some places of a text may be left out: an evaluation then has no bits per byte.
    assert len(every) >= 79 and len(fine) < len(every) / 3
    allowed = ("without", "text_bytes", "text_bytes_before", "bin_sha256", "bin_block_bytes")
    assert all(name.split(" ")[0] in allowed for name in fine), fine


@pytest.mark.parametrize(
    "name", ["without max_token", "deep inside", "not UTF-8", "an unknown kind", "a list"]
)
def test_a_run_ends_with_code_2_and_one_line(name, sidecar, tmp_path, capsys):
    (tmp_path / "d.json").write_bytes(damages(sidecar)[name])
    flags = f"{MODEL} --train-iters 9 --data-path d --split 1 --eval-iters 0"
    assert train.main(flags.split()) == BAD_CONFIG
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if line.startswith("! ")]
    assert "Traceback" not in said.out + said.err and len(lines) == 1 and "d.json" in lines[0], said
