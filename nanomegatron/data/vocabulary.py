"""What tokenizers have in common, and their files: tiktoken's ranks, JSON vocabularies, ids."""

import base64
import binascii
import hashlib
import importlib
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from nanomegatron.config.user_files import MOST_VOCABULARY, check_file, read_bytes, read_json_value

EOD = "<|endoftext|>"
MOST_IDS = 2**31  # the limit of Megatron's .bin files


class Tokenizer:
    """The interface of all tokenizers. Each has an `encode` or an `encode_many` of its own."""

    vocab_size: int  # all ids are below it
    eod: int  # the id that ends a document
    spec: dict  # the argument of `tokenizer_from_spec`; file names are absolute
    fingerprint: str  # SHA-256 of everything that defines the ids of the text itself
    prefix_ids: Sequence[int] = ()  # that `encode` puts before each text, such as <s>
    suffix_ids: Sequence[int] = ()  # and behind it

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are encoded as ordinary text."""
        return self.encode_many([text])[0].tolist()

    def encode_many(self, texts: Sequence[str], special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts -> all ids, and how many each text has.

        special: special tokens in a text are those tokens, as Megatron's tokenizers have it.
        """
        return joined_ids(map(self.encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        raise NotImplementedError

    def include_special_tokens(self, include: bool) -> None:
        """Put the library's special tokens around each text, or leave them out; most have none."""

    def put_around(self, prefix_ids: Sequence[int], suffix_ids: Sequence[int]) -> None:
        """Note what `encode` puts around each text; `spec` says whether there is anything."""
        self.prefix_ids = prefix_ids
        self.suffix_ids = suffix_ids
        self.spec.pop("include_special_tokens", None)
        if prefix_ids or suffix_ids:
            self.spec["include_special_tokens"] = True


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken rank file -> {token: rank}. Raises ValueError with the invalid line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MOST_VOCABULARY).splitlines(), 1):
        if line.strip():
            try:
                word, rank = line.split()
                token, ranks_before = binascii.a2b_base64(word, strict_mode=True), len(ranks)
                ranks[token] = int(rank)
            except ValueError:
                raise ValueError(f"{path}:{number}: {line[:40]!r} is not `base64(token) rank`") from None
            if len(ranks) == ranks_before:
                raise ValueError(f"{path}:{number}: the token {token[:40]!r} stands there twice")
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise ValueError(f"{path}: not a rank file: {len(missing)} of the 256 bytes are missing")
    check_ids(path, ranks)
    return ranks


def read_megatron_ranks(path: Path, most: int, offset: int) -> dict[bytes, int]:
    """Read the first `most` tokens of Megatron's JSON vocabulary -> {token: id}, ids from `offset` on.

    The file is a list of {"rank": 0, "token_bytes": "AA==", "token_str": "..."}, the 256 bytes first, like
    "vocab" in Mistral's tekken.json. Raises ValueError with the invalid entry.
    """
    entries = read_json_value(path, MOST_VOCABULARY)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must be a JSON list of tokens, not a {type(entries).__name__}")
    ranks: dict[bytes, int] = {}
    for i, entry in enumerate(entries[:most]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            right = entry["rank"] == i and token not in ranks and (i >= 256 or token == bytes([i]))
        except (KeyError, TypeError, ValueError):
            right = False
        if not right:
            due = f'"rank" {i} and the "token_bytes" of ' + ("that byte" if i < 256 else "a new token")
            raise ValueError(f"{path}: entry {i}, {str(entry)[:60]}, must have {due}")
        ranks[token] = offset + i
    if len(ranks) < most:
        raise ValueError(f"{path}: has {len(ranks)} tokens; give --vocab-size {len(ranks) + offset} or less")
    return ranks


def write_ranks(path: Path, tokens: Iterable[bytes]) -> None:
    """Write a tiktoken rank file; tokens: in the order of their ids."""
    path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens)))


def byte_alphabet() -> dict[str, int]:
    """Return {printable character: byte}: how GPT-2's files write the 256 bytes.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on.
    """
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def check_ids(path: Path, table: dict[Any, int]) -> None:
    """Raise ValueError unless all ids in the table {token: id} are below MOST_IDS and differ."""
    owner: dict[int, Any] = {}
    for token, number in table.items():
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise ValueError(f"{path}: the id {str(number)[:40]} of {token!r:.60} must be in 0..2^31 - 1")
        if number in owner:
            raise ValueError(f"{path}: {token!r:.60} and {owner[number]!r:.60} have the same id {number}")
        owner[number] = token


def joined_ids(lists: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids, and how many there are in each list."""
    lists = list(lists)
    counts = np.array([*map(len, lists)], np.int64)
    return np.fromiter(chain.from_iterable(lists), np.int64, counts.sum()), counts


def import_extra(name: str, user: str) -> ModuleType:
    """Import an optional library. Raises ValueError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{user} needs the {name} library: pip install {name}") from None


def existing_file(name: str, flag: str) -> Path:
    """Return the path of a regular file that a flag names. Raises ValueError."""
    if not os.path.exists(name):
        raise ValueError(f"{flag} {name}: no such file")
    check_file(name, MOST_VOCABULARY)
    return Path(name)


def sha256_of(*parts: object) -> str:
    """SHA-256 of the parts, each preceded by its length, so that different lists have different hashes."""
    data = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return hashlib.sha256(b"".join([b"%d:%b" % (len(each), each) for each in data])).hexdigest()
