"""Tokenizers that a library runs: Hugging Face's tokenizer.json, SentencePiece's tokenizer.model.

Where it is sure how the library splits text, many texts are encoded at once by their words (words.py); else
by one call of the library. Either way the ids are the library's.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from nanomegatron.data.vocabulary import EOD, existing_file, import_extra, read_table, sha256_of
from nanomegatron.data.words import (
    GPT2_CUTS,
    GPT4_CUTS,
    LLAMA3_PATTERN,
    MEGATRON_PATTERNS,
    Cuts,
    PieceCuts,
    WordEncoder,
)

# End-of-document tokens of Hugging Face vocabularies without a tokenizer_config.json.
_HF_EODS = (EOD, "<|end_of_text|>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>")
_BLANK = "\u2581"  # how pieces write a blank
_BPE, _USER_DEFINED = 2, 4  # values in a SentencePiece model: a type of model, and of a piece


class HuggingFaceTokenizer:
    """A tokenizer.json, run by the tokenizers library; no code from a model repository is executed."""

    def __init__(self, model: str) -> None:
        library = import_extra("tokenizers", "HuggingFaceTokenizer")
        path = Path(model) / "tokenizer.json" if Path(model).is_dir() else Path(model)
        data = existing_file(str(path), "--tokenizer-model").read_bytes()
        try:
            self._tokenizer = library.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises no narrower class
            raise ValueError(
                f"{path}: not a tokenizer.json that the tokenizers library reads ({error})"
            ) from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.eod = self._find_eod(path, vocab)
        self.spec = {"type": "HuggingFaceTokenizer", "model": str(path.absolute())}
        self.fingerprint = sha256_of("HuggingFace", data, self.eod)
        settings = json.loads(data)
        special = [token["content"] for token in settings.get("added_tokens") or [] if token["special"]]
        self.special_tokens = sorted(special, key=len, reverse=True)
        added = [token["content"] for token in settings.get("added_tokens") or [] if not token["special"]]
        cuts = _hugging_face_cuts(settings) if all(map(str.isascii, added)) else None
        self._words = WordEncoder(cuts, self._encode_each, [_BLANK, *added]) if cuts else None

    @staticmethod
    def _find_eod(path: Path, vocab: dict[str, int]) -> int:
        config = path.with_name("tokenizer_config.json")
        token = read_table(config).get("eos_token") if config.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise ValueError(f"{config}: eos_token {token!r:.60}: must be a string")
        names = [token] if token else _HF_EODS
        for name in names:
            if name in vocab:
                return vocab[name]
        raise ValueError(
            f"{path}: no end-of-document token ({', '.join(names)}); "
            'put a tokenizer_config.json with {"eos_token": "..."} beside it'
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ValueError if it has half of a surrogate pair."""
        text.encode()
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_special(self, text: str) -> list[int]:
        """The same, but special tokens in it are those tokens."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_many(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts -> all ids, and how many each text has."""
        return self._words(texts) if self._words else flat(self._encode_each(list(texts)))

    def _encode_each(self, texts: list[str]) -> list[list[int]]:
        for text in texts:
            text.encode()
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def flat(ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids, and how many there are of each text."""
    counts = np.array([*map(len, ids)], np.int64)
    return np.fromiter(chain.from_iterable(ids), np.int64, counts.sum()), counts


def _hugging_face_cuts(settings: dict[str, Any]) -> Cuts | PieceCuts | None:
    """How a tokenizer.json splits text; None if it is not one of the usual ways."""
    model, normalizer, splitter = (settings.get(name) for name in ("model", "normalizer", "pre_tokenizer"))
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    parts = splitter["pretokenizers"] if (splitter or {}).get("type") == "Sequence" else [splitter]
    names = [part["type"] for part in parts if part]
    if names in (["ByteLevel"], ["Split", "ByteLevel"]):
        if parts[-1].get("add_prefix_space", True) or (normalizer or {"type": "NFC"})["type"] != "NFC":
            return None
        if len(parts) == 1:
            return GPT2_CUTS if parts[0].get("use_regex", True) else None
        split = (parts[0]["behavior"], parts[0]["invert"], parts[1].get("use_regex", True))
        known = _without_options(LLAMA3_PATTERN), _without_options(MEGATRON_PATTERNS["v2"])
        same = _without_options(str(parts[0]["pattern"].get("Regex"))) in known
        return GPT4_CUTS if same and split == ("Isolated", False, False) else None
    if not model.get("byte_fallback"):  # neighbours that are unknown would be one id
        return None
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    steps = normalizer["normalizers"] if (normalizer or {}).get("type") == "Sequence" else [normalizer]
    steps = [step for step in steps if step and step != {"type": "Prepend", "prepend": _BLANK}]
    by_normalizer = not names and steps == [blanks]
    by_splitter = names == ["Metaspace"] and not steps and parts[0]["replacement"] == _BLANK
    return piece_cuts(model["vocab"]) if by_normalizer or by_splitter else None


def _without_options(pattern: str) -> str:
    """A pattern for words without what changes no cut: how many digits are one, contractions behind words."""
    return pattern.replace(r"\p{N}{1,3}", r"\p{N}").replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")


def piece_cuts(pieces: Iterable[str]) -> PieceCuts | None:
    """How text is cut for byte pairs of whole texts; None if a piece holds what is put before words."""
    cuts = PieceCuts(pieces)
    return cuts if cuts.safe else None


class SentencePieceTokenizer:
    """A SentencePiece tokenizer.model; </s> ends a document."""

    def __init__(self, model: str) -> None:
        library = import_extra("sentencepiece", "SentencePieceTokenizer")
        path = existing_file(model, "--tokenizer-model")
        data = path.read_bytes()
        try:
            self._processor = library.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ValueError(f"{path}: not a SentencePiece model ({error})") from None
        self.vocab_size, self.eod = self._processor.vocab_size(), self._processor.eos_id()
        if self.eod < 0:
            raise ValueError(f"{path}: the model has no </s>; train it with an eos_id")
        self.spec = {"type": "SentencePieceTokenizer", "model": str(path.absolute())}
        self.fingerprint = sha256_of("SentencePiece", data)
        cuts = _sentencepiece_cuts(data)
        self._words = WordEncoder(cuts, self._encode_each, [_BLANK]) if cuts else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ValueError if it has half of a surrogate pair."""
        text.encode()
        return self._processor.encode(text)

    def encode_many(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts -> all ids, and how many each text has."""
        return self._words(texts) if self._words else flat(self._encode_each(list(texts)))

    def _encode_each(self, texts: list[str]) -> list[list[int]]:
        for text in texts:
            text.encode()
        return self._processor.encode(texts, num_threads=1) if texts else []

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(list(ids))


def _sentencepiece_cuts(data: bytes) -> Cuts | PieceCuts | None:
    """How a model splits text: only byte pairs of text as it is, without blanks that are left out."""
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((bytes(piece[1]).decode(), piece.get(3, 1)))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(value))
    # model_type, treat_whitespace_as_suffix, byte_fallback; precompiled_charsmap, remove_extra_whitespaces,
    # escape_whitespaces
    plain = (trainer.get(3, 1), trainer.get(24, 0), trainer.get(35, 0)) == (_BPE, 0, 1)
    plain &= (len(normalizer.get(2, b"")), normalizer.get(4, 1), normalizer.get(5, 1)) == (0, 0, 1)
    return piece_cuts(piece for piece, kind in pieces if kind in (1, _USER_DEFINED)) if plain else None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a protobuf message: numbers, and bytes of what is longer."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            yield number, data[at : at + size]
            at += size
