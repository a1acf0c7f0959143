"""The data of a run looked at before it starts: a part of `config/check.py`."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanomegatron.config.cli import flag
from nanomegatron.config.settings import Config


def data_errors(config: Config, *_: Any) -> Iterator[str]:
    """What is wrong with the data of a run: where it comes from, its split, its tokenizer."""
    data = config.data
    per_split = [n for n in ("train_data_path", "valid_data_path", "test_data_path") if getattr(data, n)]
    ways = [flag(n) for n in ("data_path", "data_args_path", "mock_data") if getattr(data, n)]
    sources = ways + ["--train-data-path"] * bool(per_split)
    if len(sources) > 1:
        yield f"{', '.join(sources)}: data from {len(sources)} places; give one"
    if per_split and not data.train_data_path:
        yield f"{flag(per_split[0])}: needs --train-data-path too"
    for name in ("data_path", *per_split):
        yield from _blend(flag(name), getattr(data, name))
    if path := data.data_args_path:
        words = Path(path).read_text().split() if Path(path).is_file() else None
        if not words:
            yield f"--data-args-path {path}: {'no such file' if words is None else 'has no data path in it'}"
        yield from _blend(f"--data-args-path {path}:", words or ())
    weights = [_number(word) for word in data.split.split(",")]
    if len(weights) > 3 or not all(w is not None and 0 <= w < math.inf for w in weights) or not weights[0]:
        yield f"--split {data.split}: must be up to three numbers, the first greater than 0, such as 99,1,0"
    if data.mock_data and not (data.vocab_size or data.tokenizer_type):
        yield "--mock-data: needs --vocab-size (with the NullTokenizer), or a --tokenizer-type"
    yield from _tokenizer(config)


def _blend(where: str, words: Sequence[str]) -> Iterator[str]:
    """What is wrong with prefixes, or with weights and prefixes in turn: an odd number is prefixes alone."""
    weights = [] if len(words) % 2 else [n for word in words[::2] if (n := _number(word)) is not None]
    if weights and (len(weights) < len(words) // 2 or not all(0 < n < math.inf for n in weights)):
        yield f"{where} {' '.join(words)}: give a weight above 0 before every prefix, or none"
        return
    prefixes = words[1::2] if weights else words
    for prefix in prefixes:
        if missing := [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(prefix + end).is_file()]:
            yield f"{where} {prefix}: no file {' and '.join(missing)}; make them with preprocess.py"


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _tokenizer(config: Config) -> Iterator[str]:
    data, kind = config.data, config.data.tokenizer_type
    needs = {
        None: (),
        "ByteTokenizer": (),
        "NullTokenizer": ("vocab_size",),
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    }.get(kind, ("tokenizer_model",))
    null = kind == "NullTokenizer" or (kind is None and data.mock_data)
    if data.null_tokenizer_eod_id is not None and not null:
        yield f"--null-tokenizer-eod-id {data.null_tokenizer_eod_id}: needs --tokenizer-type NullTokenizer"
    for name in needs:
        if not getattr(data, name):
            yield f"--tokenizer-type {kind}: needs {flag(name)}"
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        value = getattr(data, name)
        if value and kind is None:
            yield f"{flag(name)} {value}: needs --tokenizer-type"
        elif value and not Path(value).exists() and not (kind == "TikTokenizer" and "/" not in value):
            yield f"{flag(name)} {value}: no such file"
