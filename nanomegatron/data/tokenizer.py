"""Text to token ids and back: seven tokenizers with one small interface. No torch.

    ByteTokenizer            the 256 bytes and <|endoftext|>: no file, nothing to download
    NullTokenizer            "12 7 3" is [12, 7, 3]: data that was tokenized elsewhere
    TikTokenizer             a rank file, such as --train-tokenizer writes, or a name such as cl100k_base
    Llama3Tokenizer          Llama 3's tokenizer.model, which is a rank file too
    GPT2BPETokenizer         GPT-2's encoder.json and vocab.bpe
    HuggingFaceTokenizer     tokenizer.json, or the folder that holds it          (tokenizers library)
    SentencePieceTokenizer   tokenizer.model of Llama 2, Mistral 7B               (sentencepiece library)

Special tokens inside a text are encoded as ordinary text: a document cannot end itself. `spec` is JSON from
which the tokenizer can be rebuilt; equal `fingerprint`s mean equal ids of a text. Data and checkpoints store
both. `spec` also says whether the library's special tokens are put around a text (<s> of Llama 2 before it).

Byte pair encoding (arXiv:1508.07909) in tiktoken: a pattern splits the text into words; within a word the
neighbours whose concatenation has the lowest rank are merged repeatedly. The rank of a token is its id, so a
list of byte strings in order is the whole model.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path

import numpy as np
import tiktoken

from nanomegatron.config.user_files import MOST_VOCABULARY, read_json
from nanomegatron.data.library_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from nanomegatron.data.vocabulary import (
    EOD,
    Tokenizer,
    byte_alphabet,
    check_ids,
    existing_file,
    joined_ids,
    read_megatron_ranks,
    read_ranks,
    sha256_of,
)

# GPT-2's: contractions, words, numbers, punctuation, space. `++` does not backtrack, so that a megabyte of
# one letter needs no megabyte of stack.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id "
    "step_id start_header_id end_header_id eom_id eot_id python_tag image"
).split()
# Megatron's two patterns for its JSON vocabularies: Mistral's tekken uses v2.
MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
MEGATRON_SPECIAL = "<unk> <s> </s> <mask> <pad> <cls> <sep>".split()  # then <SPECIAL_7> and so on


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, and 256 for <|endoftext|>."""

    def __init__(self) -> None:
        self.vocab_size, self.eod = 257, 256
        self.spec = {"type": "ByteTokenizer"}
        self.fingerprint = sha256_of("ByteTokenizer")

    def encode_many(self, texts: Sequence[str], special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        raw = [text.encode() for text in texts]
        return np.frombuffer(b"".join(raw), np.uint8), np.array([*map(len, raw)], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(bytes([i]) if i < 256 else EOD.encode() for i in ids).decode(errors="replace")


class NullTokenizer(Tokenizer):
    """Text is decimal ids separated by blanks; `eod` ends a document (None: the last id)."""

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        last = vocab_size - 1
        if vocab_size < 2:
            raise ValueError(f"--vocab-size {vocab_size}: NullTokenizer needs 2 ids or more")
        if not 0 <= (last if eod is None else eod) <= last:
            raise ValueError(f"--null-tokenizer-eod-id {eod}: must be one of the ids 0..{last}")
        other = {} if eod in (None, last) else {"eod": eod}
        self.vocab_size, self.eod = vocab_size, other.get("eod", last)
        self.spec = {"type": "NullTokenizer", "vocab_size": vocab_size, **other}
        self.fingerprint = sha256_of(f"NullTokenizer {vocab_size}", *other.values())

    def encode(self, text: str) -> list[int]:
        """Return the numbers in a text. Raises ValueError for other words and ids outside the vocabulary."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"{text[:40]!r}: without a tokenizer text is ids, '5 7 9'; for words give that of the data "
                "with --tokenizer-type and --tokenizer-model"
            ) from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is outside 0..{self.vocab_size - 1}; raise --vocab-size")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)


class TikTokenizer(Tokenizer):
    """Byte pair encoding by tiktoken."""

    def __init__(self, encoding: tiktoken.Encoding, eod: int, spec: dict, pattern: str = "") -> None:
        """pattern: stands for its pattern in the fingerprint."""
        self._encoding, self.eod, self.spec = encoding, eod, spec
        self.vocab_size = encoding.n_vocab
        ranks = sorted(encoding._mergeable_ranks.items(), key=itemgetter(1))
        special = sorted(encoding._special_tokens.items())
        self.fingerprint = sha256_of("BPE", *[f"{r} {t.hex()}" for t, r in ranks], special, eod, pattern)

    @cached_property
    def _known(self) -> set[int]:
        return {*self._encoding._mergeable_ranks.values(), *self._encoding._special_tokens.values()}

    def encode_many(self, texts: Sequence[str], special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts, as every tokenizer does. Raises ValueError if one overflows tiktoken's stack."""
        with_special = partial(self._encoding.encode, allowed_special="all")
        try:
            return joined_ids(map(with_special if special else self._encoding.encode_ordinary, texts))
        except BaseException as error:
            # A Rust panic, whose class no module exports, or with `encode_to_numpy` a ValueError.
            if type(error).__name__ != "PanicException" and not str(error).startswith("Regex error"):
                raise
            raise ValueError("tiktoken cannot split it: hundreds of thousands of blanks in a row") from None

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([i for i in ids if i in self._known])


def tik_tokenizer(
    model: str,
    vocab_size: int | None = None,
    pattern: str | None = None,
    special: int | None = None,
) -> TikTokenizer:
    """Byte pair encoding by tiktoken, from a rank file or one of tiktoken's own by name.

    A rank file has a line `base64(token) rank` per token. Text is split as in GPT-2, the only special token
    is <|endoftext|>, after the ranks.

    A model FILE.json is Megatron's JSON vocabulary: ids are `special` special tokens, of which </s> ends a
    document, then the file's tokens up to `vocab_size`. pattern: a key of MEGATRON_PATTERNS.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".json":
        return _megatron_tokenizer(path, vocab_size or 2**17, pattern or "v2", special)
    if pattern or special is not None:
        given = f"--tiktoken-pattern {pattern}" if pattern else f"--tiktoken-num-special-tokens {special}"
        raise ValueError(f"{given}: is for Megatron's JSON vocabulary, --tokenizer-model FILE.json")
    if path.is_file():
        ranks = read_ranks(path)
        special_tokens = {EOD: max(ranks.values()) + 1}
        spec = {"type": "TikTokenizer", "model": str(path.absolute())}
        return _byte_pairs(ranks, special_tokens, EOD, spec)
    if model not in tiktoken.list_encoding_names():
        names = ", ".join(tiktoken.list_encoding_names())
        raise ValueError(f"--tokenizer-model {model}: no such file, and not one of {names}")
    try:
        encoding = tiktoken.get_encoding(model)
    except OSError as error:
        raise ValueError(
            f"--tokenizer-model {model}: tiktoken has no copy of it and cannot fetch one ({error}); "
            "set TIKTOKEN_CACHE_DIR to a folder that holds it, or give a rank file"
        ) from None
    return TikTokenizer(encoding, encoding.eot_token, {"type": "TikTokenizer", "model": model})


def _megatron_tokenizer(path: Path, vocab_size: int, pattern: str, special: int | None) -> TikTokenizer:
    special = 1000 if special is None else special
    if not len(MEGATRON_SPECIAL) <= special < vocab_size:
        raise ValueError(
            f"--tiktoken-num-special-tokens {special}: must be {len(MEGATRON_SPECIAL)} or more, and less "
            f"than --vocab-size {vocab_size}"
        )
    names = MEGATRON_SPECIAL + [f"<SPECIAL_{i}>" for i in range(len(MEGATRON_SPECIAL), special)]
    ranks = read_megatron_ranks(path, vocab_size - special, special)
    special_tokens = {name: i for i, name in enumerate(names)}
    spec = {
        "type": "TikTokenizer",
        "model": str(path.absolute()),
        "vocab_size": vocab_size,
        "pattern": pattern,
        "special": special,
    }
    return _byte_pairs(ranks, special_tokens, "</s>", spec, MEGATRON_PATTERNS[pattern], pattern)


def _byte_pairs(
    ranks: dict[bytes, int],
    special_tokens: dict[str, int],
    eod: str,
    spec: dict,
    pattern: str = GPT2_PATTERN,
    pattern_name: str = "",
) -> TikTokenizer:
    """Build the tokenizer of a table; pattern_name: what stands in the fingerprint for the pattern."""
    encoding = tiktoken.Encoding(
        spec["type"], pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
    )
    return TikTokenizer(encoding, special_tokens[eod], spec, pattern_name)


def gpt2_tokenizer(vocab_file: str, merge_file: str) -> TikTokenizer:
    """GPT-2's tokenizer from its two files."""
    vocab = existing_file(vocab_file, "--vocab-file")
    merges = existing_file(merge_file, "--merge-file")
    alphabet = byte_alphabet()
    try:
        entries = read_json(vocab, MOST_VOCABULARY)
        check_ids(vocab, entries)
        eod = entries.pop(EOD)
        ranks = {bytes(alphabet[c] for c in token): i for token, i in entries.items()}
        lines = merges.read_text(encoding="utf-8").split("\n")[1:]
        merged = [line.replace(" ", "", 1) for line in lines if line]
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{vocab}, {merges}: not GPT-2's encoder.json and vocab.bpe ({error!r})") from None
    if sorted(entries, key=entries.get)[256:] != merged:
        raise ValueError(
            f"{vocab} and {merges} do not belong together: ids are not in the order of the merges"
        )
    spec = {
        "type": "GPT2BPETokenizer",
        "vocab_file": str(vocab.absolute()),
        "merge_file": str(merges.absolute()),
    }
    return _byte_pairs(ranks, {EOD: eod}, EOD, spec)


def llama3_tokenizer(model: str) -> TikTokenizer:
    """Llama 3's tokenizer.model: a rank file, with its own pattern and 256 special tokens after the ranks."""
    path = existing_file(model, "--tokenizer-model")
    ranks = read_ranks(path)
    names = LLAMA3_SPECIAL + [f"reserved_special_token_{i}" for i in range(2, 258 - len(LLAMA3_SPECIAL))]
    first = max(ranks.values()) + 1
    special = {f"<|{name}|>": first + i for i, name in enumerate(names)}
    spec = {"type": "Llama3Tokenizer", "model": str(path.absolute())}
    return _byte_pairs(ranks, special, "<|end_of_text|>", spec, LLAMA3_PATTERN, LLAMA3_PATTERN)


def build_tokenizer(
    kind: str,
    model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    eod: int | None = None,
    pattern: str | None = None,
    special: int | None = None,
) -> Tokenizer:
    """Return the tokenizer of these flags; `kind` is a key of this table.

    eod is for NullTokenizer; pattern and special are for a TikTokenizer with Megatron's JSON vocabulary.

    Raises ValueError for an unknown kind, and a missing flag, file or library.
    """
    arguments = {
        "ByteTokenizer": (ByteTokenizer, {}),
        "NullTokenizer": (partial(NullTokenizer, eod=eod), {"--vocab-size": vocab_size}),
        "TikTokenizer": (
            partial(tik_tokenizer, vocab_size=vocab_size, pattern=pattern, special=special),
            {"--tokenizer-model": model},
        ),
        "Llama3Tokenizer": (llama3_tokenizer, {"--tokenizer-model": model}),
        "GPT2BPETokenizer": (gpt2_tokenizer, {"--vocab-file": vocab_file, "--merge-file": merge_file}),
        "HuggingFaceTokenizer": (HuggingFaceTokenizer, {"--tokenizer-model": model}),
        "SentencePieceTokenizer": (SentencePieceTokenizer, {"--tokenizer-model": model}),
        "Llama2Tokenizer": (SentencePieceTokenizer, {"--tokenizer-model": model}),  # Megatron's name
    }
    if kind not in arguments:
        raise ValueError(f"--tokenizer-type {kind}: must be one of {', '.join(arguments)}")
    cls, flags = arguments[kind]
    for flag, value in flags.items():
        if value is None:
            raise ValueError(f"--tokenizer-type {kind} needs {flag}")
    return cls(*flags.values())


def tokenizer_from_spec(spec: dict, beside: str | Path | None = None) -> Tokenizer:
    """Rebuild the tokenizer of a dataset or checkpoint; missing files are searched in `beside` and hf/.

    Without "include_special_tokens" there are none around a text: earlier versions put none there.
    """
    kinds = dict.fromkeys(("type", "model", "vocab_file", "merge_file", "pattern"), str)
    kinds |= dict.fromkeys(("vocab_size", "eod", "special"), int) | {"include_special_tokens": bool}
    if "type" not in spec or any(type(value) is not kinds.get(name) for name, value in spec.items()):
        raise ValueError(f"{str(spec):.200}: not the description of a tokenizer; give --tokenizer-type")
    found = {"include_special_tokens": False} | spec
    for name, value in spec.items():
        is_file = name.endswith("file") or (name == "model" and Path(value).is_absolute())
        if is_file and beside and not Path(value).exists():
            moved = (Path(beside) / folder / Path(value).name for folder in ("", "hf"))
            found[name] = next((str(path) for path in moved if path.exists()), value)
    include = found.pop("include_special_tokens")
    tokenizer = build_tokenizer(found.pop("type"), **found)
    tokenizer.include_special_tokens(include)
    if include and not (tokenizer.prefix_ids or tokenizer.suffix_ids):
        raise ValueError(f"{spec}: its files put no special tokens around a text now, other than before")
    return tokenizer


def prompt_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids of a text as the beginning of a longer one: without those that are put behind it."""
    return ids[: len(ids) - len(tokenizer.suffix_ids)]


def ends_of_text(tokenizer: Tokenizer) -> str:
    """What is put around a text: 'begins with <s> (id 1) and ends with </s> (id 2)'; "" if nothing is."""
    ends = ("begins with", tokenizer.prefix_ids), ("ends with", tokenizer.suffix_ids)
    return " and ".join(f"{verb} {named_ids(tokenizer, ids)}" for verb, ids in ends if ids)


def around_a_prompt(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield what is said of the special tokens that the tokenizer's library puts around a text."""
    if tokenizer.prefix_ids:
        yield f"each prompt begins with {named_ids(tokenizer, tokenizer.prefix_ids)}"
    if tokenizer.suffix_ids:
        ends = named_ids(tokenizer, tokenizer.suffix_ids)
        yield f"prompts are without {ends}, which the tokenizer puts behind a text: it is not at its end"


def named_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """'<s> (id 1)'; 'id 1' where the library shows no text for it."""
    return ", ".join(f"{text} (id {i})" if (text := tokenizer.decode([i])) else f"id {i}" for i in ids)
