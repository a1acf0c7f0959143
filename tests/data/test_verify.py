"""preprocess.py --verify-data: what has changed since a pair was written is found, and its place."""

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import preprocess
from nanomegatron.commands import verbs
from nanomegatron.data import indexed_dataset, verify
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.data.verify import verify_pair
from tests.data.test_preprocess import BYTES, jsonl, run
from tests.megatron_data import random_documents, write

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=127)
ABOUT = dict(fingerprint=TOKENIZER.fingerprint, max_token=99, tokenizer=TOKENIZER.spec)


@pytest.fixture
def pair(tmp_path, monkeypatch) -> Path:
    """A pair of ten blocks of hashes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(indexed_dataset, "HASHED_BYTES", 100)
    write("d", random_documents(0, 50, 20), sidecar=ABOUT)
    return tmp_path / "d"


def check(prefix: str = "d") -> tuple[list[str], str]:
    return verify_pair(prefix, 2, print)


def test_blocks_of_hashes_do_not_depend_on_how_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "HASHED_BYTES", 16)
    draw = random.Random(0)
    for size in (1, 15, 16, 17, 32, 100):
        data = draw.randbytes(size)
        expected = [hashlib.sha256(data[at : at + 16]).hexdigest() for at in range(0, size, 16)]
        for _ in range(9):
            with IndexedDatasetBuilder(tmp_path / "x", np.uint8) as builder:
                at = 0
                while at < size:
                    step = draw.randint(1, 40)
                    builder.add_document(np.frombuffer(data[at : at + step], np.uint8))
                    at += step
                builder.finalize({})
            assert json.loads((tmp_path / "x.json").read_text())["bin_sha256"].split() == expected


def test_a_pair_of_preprocess_is_whole(tmp_path, capsys):
    """Its hashes are those of the files; the command says so, and so does `nanomegatron preprocess`."""
    source = jsonl(tmp_path / "in.jsonl", ["some text", "", "more of it"] * 40)
    assert run("--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--append-eod") == 0
    prefix, hashes = f"{tmp_path}/x_text_document", {}
    for end in ("bin", "idx"):
        hashes[f"{end}_sha256"] = hashlib.sha256(Path(f"{prefix}.{end}").read_bytes()).hexdigest()
    facts = json.loads(Path(f"{prefix}.json").read_text())
    assert hashes.items() <= facts.items()
    capsys.readouterr()
    assert run("--verify-data", prefix) == 0
    assert capsys.readouterr().out == f"{prefix}: whole, 0.0 MB in 0.0 s\n"


def test_a_hundred_flipped_bits(pair, capsys, full):
    """Each is named: the file, and in .bin the block. In .idx a number that does not fit, or the hash."""
    good = {end: Path(f"d.{end}").read_bytes() for end in ("bin", "idx")}
    draw = random.Random(0)
    assert check()[0] == [] and len(good["bin"]) > 900
    for _ in range(1000 if full else 100):
        end = draw.choice(["bin", "bin", "idx"])
        data = bytearray(good[end])
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
        Path(f"d.{end}").write_bytes(data)
        (line,), text = check()
        block = at // 100 * 100
        where = f": damaged in bytes {block}..{min(len(data), block + 100)}: " if end == "bin" else ""
        assert f"d.{end}{where}" in line and text == "damaged"
        Path(f"d.{end}").write_bytes(good[end])
    assert preprocess.main(["--verify-data", "d"]) == 0
    Path("d.bin").write_bytes(good["bin"][:-1] + b"\1")
    shutil.copy("d.bin", "e.bin")
    shutil.copy("d.idx", "e.idx")
    capsys.readouterr()
    assert preprocess.main(["--verify-data", "e", "d", "gone"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("e: index and sizes are right; no hashes of tokens in e.json")
    assert out.splitlines()[1:] == ["d: damaged", "gone: damaged"]
    assert len(err.splitlines()) == 2 and "nanomegatron preprocess: d.bin: damaged in bytes " in err


def test_neighbours_are_one_line(pair):
    data = bytearray(Path("d.bin").read_bytes())
    for at in (0, 150, 250, 500):
        data[at] ^= 1
    Path("d.bin").write_bytes(data)
    lines, _ = check()
    assert [line.split(": ")[1] for line in lines] == ["damaged in bytes 0..300", "damaged in bytes 500..600"]


def test_what_has_no_hashes_is_checked_in_structure(pair):
    """Megatron's pairs, and those of an earlier version of preprocess.py."""
    facts = json.loads(Path("d.json").read_text())
    del facts["bin_sha256"]
    Path("d.json").write_text(json.dumps(facts))
    damage, text = check()
    assert damage == [] and "no hashes of tokens in d.json, they are unchecked" in text
    Path("d.json").unlink()
    assert check() == (damage, text)
    data = Path("d.bin").read_bytes()
    Path("d.bin").write_bytes(data[:-2])
    assert "d.bin: " in check()[0][0] and "the last sequence" in check()[0][0]


@pytest.mark.parametrize(
    "change", ["{", "[]", {"bin_sha256": "ab"}, {"bin_block_bytes": 0}, {"idx_sha256": 3}]
)
def test_a_damaged_json_is_named(pair, change):
    text = Path("d.json").read_text()
    Path("d.json").write_text(change if isinstance(change, str) else json.dumps(json.loads(text) | change))
    (line,), _ = check()
    assert line.startswith("d.json: ")


def test_progress_of_what_takes_long(pair, monkeypatch):
    monkeypatch.setattr(verify, "SHOW_EVERY", -1.0)
    lines = []
    verify_pair("d", 2, lines.append)
    assert len(lines) == 10 and all(line.startswith("d.bin: ") and "% of " in line for line in lines)


def test_the_command_of_the_package(pair, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as left:
        verbs.main(["preprocess", "--verify-data", "d"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("d: whole, ")


def test_a_document_larger_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "HASHED_BYTES", 10)
    prefix = str(tmp_path / "d")
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        builder.add_document(np.arange(40))
        builder.finalize(ABOUT)
    assert verify_pair(prefix, 1, print)[0] == []
