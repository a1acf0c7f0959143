"""Reads documents from Parquet and Arrow files, and from the folders of Hugging Face's data sets.

    FOLDER/data/train-00000-of-00002.parquet     as on the hub: all files, of one split, none missing
    FOLDER/state.json, data-*.arrow              as `Dataset.save_to_disk` writes it: the files it names
    FOLDER/dataset_dict.json, train/, test/      several of these: a split has to be chosen

A document is a row; the keys are names of columns of strings. pyarrow reads the files, a few rows at a time.
"""

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nanomegatron.config.check_model import plain_text_hint
from nanomegatron.config.user_files import read_json
from nanomegatron.data.vocabulary import import_extra

COLUMN_FILES = (".parquet", ".arrow")


class Row(NamedTuple):
    """One document: row `number` of a file, from 1 on, and its values of the keys."""

    path: str
    number: int
    values: list[str | None]

    def texts(self, keys: tuple[str, ...]) -> list[str]:
        """Return the text under each key. Raises ValueError with file, row and reason."""
        for key, value in zip(keys, self.values):
            if value is None:
                raise ValueError(f"{self}: no string under {key!r}, it is null")
        return list(self.values)

    @property
    def size(self) -> int:
        """Characters of its text."""
        return sum(len(value or "") for value in self.values)

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def folder_files(folder: Path) -> list[str]:
    """Return the files of a data set in a folder, in order. Raises ValueError if it is none, or not whole."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise ValueError(f"--input {folder}: has the splits {', '.join(splits)}: give one, as {folder}/NAME")
    if (folder / "state.json").is_file():
        return _saved(folder)
    found = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")])
    if not found:
        other = (
            f"a folder; give its files, such as '{folder}/*.jsonl'; only one of a Hugging "
            "Face data set is read by itself: *.parquet, data/*.parquet, or with a state.json"
        )
        raise ValueError(f"--input {folder}: {plain_text_hint(folder) or other}")
    parts = [re.fullmatch(r"(.+?)-\d+-of-(\d+)(-\w+)?", path.stem) for path in found]
    shards = Counter((part[1], part[2]) for part in parts if part)
    if len(shards) > 1:
        names = ", ".join(sorted({name for name, _ in shards}))
        one = f"{found[-1].parent}/{found[-1].name.split('-')[0]}-*.parquet"
        raise ValueError(f"--input {folder}: has the splits {names}: give one, such as '{one}'")
    for (name, count), there in shards.items():
        if there != int(count):
            raise ValueError(
                f"--input {folder}: has {there} of the {int(count)} files of {name}: fetch the others"
            )
    return [str(path) for path in found]


def _saved(folder: Path) -> list[str]:
    """The files that the state.json of save_to_disk names."""
    path = folder / "state.json"
    try:
        state = read_json(path)
        files = [str(folder / Path(entry["filename"]).name) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not of a data set that save_to_disk wrote ({error!r})") from None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(f"{path}: rows are chosen by an index: call flatten_indices() before save_to_disk")
    if missing := [file for file in files if not Path(file).is_file()]:
        raise ValueError(f"{path}: names {missing[0]}, which is not there")
    return files


def column_rows(path: str, keys: tuple[str, ...], first: int, size: int) -> Iterator[tuple[list[Row], float]]:
    """Yield lists of rows from row `first` on, of about `size` bytes, and the share of the file behind them.

    Raises ValueError if a column is missing or no column of strings, and for a damaged file.
    """
    arrow, number = import_extra("pyarrow", f"--input {path}"), 1
    read = _parquet if path.lower().endswith(".parquet") else _arrow
    try:
        for batch, share in read(arrow, path, keys, size):
            step = max(1, batch.num_rows * size // max(1, batch.nbytes))
            for at in range(max(0, first - number), batch.num_rows, step):
                values = zip(*(column.to_pylist() for column in batch.slice(at, step).columns))
                yield [Row(path, i, list(row)) for i, row in enumerate(values, number + at)], share
            number += batch.num_rows
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: damaged behind row {number - 1} ({error!r:.200})") from None


def _parquet(arrow: ModuleType, path: str, keys: tuple[str, ...], size: int) -> Iterator[tuple[Any, float]]:
    """(batch of rows, share of the file behind it) of all batches."""
    with importlib.import_module("pyarrow.parquet").ParquetFile(path) as file:
        _check(arrow, path, file.schema_arrow, keys)
        facts, done = file.metadata, 0
        heavy = sum(facts.row_group(group).total_byte_size for group in range(facts.num_row_groups))
        batch_size = min(1 << 14, max(1, size * facts.num_rows // max(1, heavy)))
        for batch in file.iter_batches(batch_size, columns=list(keys)):
            done += batch.num_rows
            yield batch.select(list(keys)), done / facts.num_rows


def _arrow(arrow: ModuleType, path: str, keys: tuple[str, ...], size: int) -> Iterator[tuple[Any, float]]:
    """The same of an Arrow file, or of a stream as Hugging Face's are."""
    with arrow.memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        _check(arrow, path, reader.schema, keys)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        for batch in batches:
            yield batch.select(list(keys)), source.tell() / source.size()


def _check(arrow: ModuleType, path: str, schema: Any, keys: tuple[str, ...]) -> None:
    """Raise ValueError unless each key is a column of strings."""
    types = arrow.types
    for key in keys:
        if key not in schema.names:
            raise ValueError(f"{path}: no column {key!r}; it has {', '.join(schema.names)}: give --json-keys")
        kind = schema.field(key).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise ValueError(f"{path}: the column {key!r} is of {kind}; text must be a column of strings")
