"""Input by columns, from folders and from standard input; what cannot be read is refused with the way out."""

import importlib
import io
import json
import sys
from types import SimpleNamespace

import pytest

from nanomegatron.data import reading
from nanomegatron.data.columns import column_rows
from tests.data.test_preprocess import BYTES, TEXTS, decoded, jsonl, read, run

DOCUMENTS = [*TEXTS, *(f"row {i} \u00e9 \u4f60" * (i % 40) for i in range(400))]


@pytest.fixture(scope="module")
def arrow():
    return pytest.importorskip("pyarrow")


def write(path, texts, rows_each=70, **columns):
    """A table of texts in the kind of file that the name says."""
    arrow = pytest.importorskip("pyarrow")

    table = arrow.table({"id": [*range(len(texts))], "text": texts, **columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        importlib.import_module("pyarrow.parquet").write_table(table, path, row_group_size=rows_each)
        return path
    new = arrow.ipc.new_stream if path.name.startswith("data-") else arrow.ipc.new_file
    with arrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_each)
    return path


def files(prefix, key="text"):
    return [prefix.with_name(f"{prefix.name}_{key}_document.{end}").read_bytes() for end in ("bin", "idx")]


@pytest.mark.parametrize("name", ["a.parquet", "data-0.arrow", "file.arrow"])
@pytest.mark.parametrize("chunk, workers", [(1 << 19, 1), (3000, 1), (9000, 2)])
def test_rows_are_documents(arrow, tmp_path, monkeypatch, name, chunk, workers):
    """The bytes that the same documents give as JSON Lines, in blocks of any size."""
    if workers > 1 and name != "a.parquet":
        pytest.skip("one kind is enough, processes take a second")
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
    source = write(tmp_path / name, DOCUMENTS)
    flags = [*BYTES, "--append-eod", "--workers", workers]
    assert run("--input", source, "--output-prefix", tmp_path / "x", *flags) == 0
    lines = jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    assert run("--input", lines, "--output-prefix", tmp_path / "y", *BYTES, "--append-eod") == 0
    assert files(tmp_path / "x") == files(tmp_path / "y")


@pytest.mark.parametrize("name", ["a.parquet", "data-0.arrow", "file.arrow"])
def test_reading_goes_on_at_any_row(arrow, tmp_path, name):
    """In a batch, at its end and behind all rows; rows come with their numbers, from 1 on."""
    texts = [f"text {i}" for i in range(1, 13)]
    source = str(write(tmp_path / name, texts, rows_each=5))
    for first in (1, 2, 5, 6, 11, 12, 13):
        found = [row for rows, _ in column_rows(source, ("text",), first, 20) for row in rows]
        assert [(row.number, row.values) for row in found] == [(i, [f"text {i}"]) for i in range(first, 13)]


def test_every_type_of_string_and_two_columns(arrow, tmp_path):
    texts = ["one", "two", "one"]
    types = arrow.large_string(), arrow.dictionary(arrow.int8(), arrow.string()), arrow.string_view()
    for i, kind in enumerate(types):
        column = arrow.array(texts).dictionary_encode() if i == 1 else arrow.array(texts, kind)
        source = write(tmp_path / f"{i}.arrow", texts, title=column)
        flags = ["--json-keys", "title", "text"]
        assert run("--input", source, "--output-prefix", tmp_path / f"x{i}", *BYTES, *flags) == 0
        assert decoded(tmp_path / f"x{i}", "title") == texts


def test_nulls_and_other_columns(arrow, tmp_path, capsys):
    source = write(tmp_path / "a.parquet", ["a", None, "b"])
    out = ["--output-prefix", tmp_path / "x", *BYTES]
    assert run("--input", source, *out) == 2
    assert f"{source}:2: no string under 'text', it is null" in capsys.readouterr().err
    assert run("--input", source, *out, "--skip-bad-lines", 1) == 0 and decoded(tmp_path / "x") == ["a", "b"]
    for key, reason in (
        ("content", "no column 'content'; it has id, text: give --json-keys"),
        ("id", "column 'id' is of int64"),
    ):
        assert run("--input", source, *out, "--json-keys", key) == 2
        assert f"nanomegatron preprocess: {source}: " in (said := capsys.readouterr().err) and reason in said


@pytest.mark.parametrize("name", ["a.parquet", "data-0.arrow", "b.arrow"])
def test_damaged_files(arrow, tmp_path, capsys, name):
    source = write(tmp_path / name, DOCUMENTS)
    whole = source.read_bytes()
    for data in (b"", b"no such format", whole[: len(whole) // 2]):
        source.write_bytes(data)
        assert run("--input", source, "--output-prefix", tmp_path / "x", *BYTES) == 2
        assert f"nanomegatron preprocess: {source}: damaged behind row " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_saved_data_set(arrow, tmp_path, capsys):
    """The files that state.json names, in its order; `save_to_disk` of datasets 4 writes these keys."""
    folder = tmp_path / "set" / "train"
    for i in (1, 0):
        write(folder / f"data-{i:05}-of-00002.arrow", [f"file {i}"])
    write(folder / "data-of-another.arrow", ["not named"])
    named = [{"filename": f"data-{i:05}-of-00002.arrow"} for i in (0, 1)]
    (folder / "state.json").write_text(json.dumps({"_data_files": named, "_split": "train"}))
    out = ["--output-prefix", tmp_path / "x", *BYTES]
    assert run("--input", folder, *out) == 0 and decoded(tmp_path / "x") == ["file 0", "file 1"]
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert run("--input", folder.parent, *out) == 2
    assert f"has the splits train: give one, as {folder.parent}/NAME" in capsys.readouterr().err
    (folder / "data-00001-of-00002.arrow").unlink()
    assert run("--input", folder, *out) == 2
    assert "data-00001-of-00002.arrow, which is not there" in capsys.readouterr().err
    (folder / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}')
    assert run("--input", folder, *out) == 2 and "flatten_indices()" in capsys.readouterr().err
    (folder / "state.json").write_text("{}")
    assert run("--input", folder, *out) == 2 and "save_to_disk" in capsys.readouterr().err


@pytest.mark.full
def test_what_datasets_itself_saves(tmp_path):
    """Its own folders, several files each, as it writes them."""
    library = pytest.importorskip("datasets")
    library.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(str(tmp_path / "set"), num_shards=3)
    assert run("--input", tmp_path / "set", "--output-prefix", tmp_path / "x", *BYTES) == 0
    assert decoded(tmp_path / "x") == [text for text in DOCUMENTS if text]


def test_a_folder_of_the_hub(arrow, tmp_path, capsys):
    """data/*.parquet of one split; a part of a download and two splits are refused."""
    for i in range(2):
        write(tmp_path / "set" / "data" / f"train-{i:05}-of-00003.parquet", [f"file {i}"])
    out = ["--output-prefix", tmp_path / "x", "--overwrite", *BYTES]
    assert run("--input", tmp_path / "set", *out) == 2
    assert "has 2 of the 3 files of train" in capsys.readouterr().err
    write(tmp_path / "set" / "data" / "train-00002-of-00003.parquet", ["file 2"])
    assert run("--input", tmp_path / "set", *out) == 0
    assert decoded(tmp_path / "x") == ["file 0", "file 1", "file 2"]
    write(tmp_path / "set" / "data" / "test-00000-of-00001.parquet", ["test"])
    assert run("--input", tmp_path / "set", *out) == 2
    said = capsys.readouterr().err
    assert "has the splits test, train: give one" in said
    pattern = said.split("'")[1]
    assert run("--input", pattern, *out) == 0 and len(read(tmp_path / "x")) == 3
    (tmp_path / "empty").mkdir()
    assert run("--input", tmp_path / "empty", *out) == 2 and "a folder; give" in capsys.readouterr().err


def test_without_pyarrow(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert run("--input", tmp_path / "a.parquet", "--output-prefix", tmp_path / "x", *BYTES) == 2
    assert "needs the pyarrow library: pip install pyarrow" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
def test_standard_input(tmp_path, monkeypatch, capsys, workers):
    """JSON Lines, as from a pipe: no size, no name, read once."""
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in ["one", "two"])
    out = [
        "--output-prefix",
        tmp_path / "x",
        "--overwrite",
        *BYTES,
        "--workers",
        workers,
        "--log-interval",
        1,
    ]

    def give(data):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        return run("--input", "-", *out)

    assert give(lines) == 0 and decoded(tmp_path / "x") == ["one", "two"]
    shown = capsys.readouterr().err
    assert "2 documents" in shown and "ETA" not in shown and "%" not in shown
    assert give(lines + b"[]\n") == 2 and "standard input:3: a JSON list" in capsys.readouterr().err
    assert run("--input", "-", "-", *out) == 2 and "can be read once" in capsys.readouterr().err
    assert run("--input", "-", *out, "--resume") == 2 and "cannot be read again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["s3://bucket/c.jsonl", "https://example.com/c.jsonl", "hf://datasets/a/b"]
)
def test_addresses_are_refused(tmp_path, capsys, address):
    assert run("--input", address, "--output-prefix", tmp_path / "x", *BYTES) == 2
    said = capsys.readouterr().err
    assert f"--input {address}: an address, and only files of this machine" in said and "aws s3 cp" in said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.arrow.zst", "a.csv"])
def test_other_endings_are_refused(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"x")
    assert run("--input", tmp_path / name, "--output-prefix", tmp_path / "x", *BYTES) == 2
    assert ".parquet or .arrow" in capsys.readouterr().err
