"""Encodes many texts at once by looking up their words: the ids of the tokenizer's library, but sooner.

A library takes 300 ns and more for a word, and most words have occurred before. Where a text can be cut so
that each part has the ids that it has in the text, half a megabyte is cut and looked up at once, in numpy:

    text     | I t ' s _ a _ _ t e s t . |           texts, bytes 255 around each
    class    Z L L Q L B L B B L L L L P Z           letter, quote, blank, punctuation ...
    start    * *       *   * *         * *           by pairs of classes, and a blank before a word
    key      the up to 24 bytes of each word as three integers
    ids      looked up in a table by the key; the library encodes the words that are missing, once

A cut between two bytes is safe if no word of the tokenizer can hold both. There are three kinds:

    GPT2_CUTS    words by GPT-2's pattern: letters, numbers or punctuation, with the blank before them
    GPT4_CUTS    as cl100k_base's: letters keep a sign before them, and newlines the signs before them
    PieceCuts    SentencePiece's byte pairs: characters that no piece has beside each other never merge

Ids can depend on what is beside a word: one that ends in blanks is encoded with a word behind it, and one of
SentencePiece with a word before it, unless the text ends or begins there. Bytes of other scripts are never
cut from their neighbours, as they may be blanks too.
(GPT-2's pattern: Radford et al. 2019)
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

# Of each byte: separator, letter, number, sign, quote, slash, blank, newline, other space, other script
SEPARATOR, LETTER, NUMBER, SIGN, QUOTE, SLASH, BLANK, NEWLINE, SPACE, OTHER = range(10)
CLASSES = np.full(256, SIGN, np.uint8)
CLASSES[128:], CLASSES[255] = OTHER, SEPARATOR
CLASSES[[*range(65, 91), *range(97, 123)]] = LETTER
CLASSES[48:58], CLASSES[ord("'")], CLASSES[ord("/")] = NUMBER, QUOTE, SLASH
CLASSES[32], CLASSES[[10, 13]], CLASSES[[9, 11, 12]] = BLANK, NEWLINE, SPACE
_SPACE_BYTES = frozenset(b" \n\r\t\v\f")
SIGNS, SPACES = (SIGN, QUOTE, SLASH), (BLANK, NEWLINE, SPACE)
WORD = (LETTER, NUMBER, *SIGNS)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Megatron's two patterns for its JSON vocabularies: Mistral's tekken uses v2.
MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
END, CONTEXT = b"\xff", b"\x01"  # CONTEXT: before a word of PieceCuts
LONGEST = 24  # bytes of a word that the table can hold
BITS = 20  # the table has 2^BITS rows, one for each value of a hash
MOST_BYTES = 1 << 26  # of words and of their ids, until all are forgotten
MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


class Cuts:
    """Where words start. pairs: classes (before, after) between which it is; last: classes of a last blank.

    The last of several blanks starts a word if its class is in `last` and a word follows.
    """

    pieces = False

    def __init__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], last: Sequence[int]) -> None:
        self._pairs = np.zeros(16 * 16, bool)
        for before, after in pairs:
            for b in before:
                self._pairs[[16 * b + a for a in after]] = True
        self._last, self._space, self._word = (np.zeros(16, bool) for _ in range(3))
        self._last[[*last]], self._space[[*SPACES]], self._word[[*WORD]] = True, True, True

    def __call__(self, text: np.ndarray) -> np.ndarray:
        """Bool `[n]`: whether a word starts at each byte of text uint8 `[n]`."""
        kind = CLASSES[text]
        start = np.ones(len(text), bool)
        start[1:] = self._pairs[(kind[:-1] << 4) + kind[1:]]
        start[1:-1] |= self._space[kind[:-2]] & self._last[kind[1:-1]] & self._word[kind[2:]]
        return start


_ALL = (LETTER, NUMBER, *SIGNS, *SPACES, OTHER)
_PATTERN = [
    ((LETTER,), (NUMBER, SIGN, SLASH, *SPACES)),
    ((NUMBER,), (LETTER, *SIGNS, *SPACES)),
    (SIGNS, (NUMBER, BLANK, SPACE)),
    ((SEPARATOR,), (SEPARATOR, *_ALL)),
    ((*WORD, OTHER), (SEPARATOR,)),  # blanks at the end keep the separator: the text ends there
]
GPT2_CUTS = Cuts(
    [*_PATTERN, ((SIGN, SLASH), (LETTER,)), (SIGNS, (NEWLINE,)), ((NEWLINE, SPACE), WORD)], last=SPACES
)
GPT4_CUTS = Cuts([*_PATTERN, ((NEWLINE,), (LETTER, NUMBER, SIGN, QUOTE))], last=(BLANK, SPACE))


class PieceCuts:
    """Where words start for byte pairs of whole texts: between characters that meet in no piece."""

    pieces = True

    def __init__(self, pieces: Iterable[str]) -> None:
        """pieces: with U+2581 for a blank."""
        self._cut = np.ones((256, 256), bool)
        for piece in pieces:
            raw = np.frombuffer(piece.replace("\u2581", " ").encode(), np.uint8)
            self._cut[raw[:-1], raw[1:]] = False
        self._cut[:, 128:192] = False  # inside a character
        self._cut[255, :], self._cut[:, 255] = False, True
        self.safe = bool(self._cut[CONTEXT[0], :128].all())
        self._cut = self._cut.reshape(-1)

    def __call__(self, text: np.ndarray) -> np.ndarray:
        """Bool `[n]`: whether a word starts at each byte of text uint8 `[n]`."""
        start = np.ones(len(text), bool)
        start[1:] = self._cut[(text[:-1].astype(np.uint16) << 8) + text[1:]]
        return start


class WordEncoder:
    """Encodes texts; `encode` is the library on a list of texts, whose special tokens are text as well.

    cuts: how it splits. without: a text that holds one of these strings is left to the library.
    """

    def __init__(
        self,
        cuts: Cuts | PieceCuts,
        encode: Callable[[list[str]], list[list[int]]],
        without: Sequence[str] = (),
    ) -> None:
        self._cuts, self._encode, self._without = cuts, encode, ("\0", *without)
        self._context = len(encode([CONTEXT.decode() if cuts.pieces else " x"])[0])
        self._forget()

    def _forget(self) -> None:
        """Empty the tables, so that memory stays bounded."""
        self._numbers: dict[bytes, int] = {}  # of the words so far
        self._bytes = 0
        self._places = np.zeros((1 << 16, 2), np.uint64)  # (start in the pool, count) of each word's ids
        self._pool, self._used = np.zeros(1 << 16, np.uint32), 0
        self._table = np.zeros((1 << BITS, 5), np.uint64)  # row hash(word): the word's key, place and count

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts -> ids of all texts uint32, and the number of ids of each."""
        raw, rest = [], []
        for i, text in enumerate(texts):
            try:
                if any(string in text for string in self._without):
                    raise ValueError
                raw.append(text.encode())
            except ValueError:  # half of a surrogate pair too
                raw.append(b"")
                rest.append(i)
        ids, counts = self._look_up_texts(raw)
        if not rest:
            return ids, counts
        return insert_lists(ids, counts, dict(zip(rest, self._encode([texts[i] for i in rest]))))

    def _look_up_texts(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        joined = END + END.join(texts) + END
        text = np.frombuffer(joined + bytes(LONGEST), np.uint8)
        starts = np.flatnonzero(self._cuts(text[: len(joined)]))
        lengths = np.diff(starts, append=len(joined))
        keys, slots = _keys(text, starts, lengths)

        def look_up(which: np.ndarray) -> np.ndarray:
            places = zip(starts[which].tolist(), lengths[which].tolist())
            return self._look_up([joined[a : a + n] for a, n in places])

        rows, short = self._table[slots], lengths <= LONGEST
        new = np.flatnonzero((rows[:, :3] != keys).any(axis=1) | ~short)
        if new.size:
            once = new[np.unique(slots[new], return_index=True)[1]]  # most words occur several times
            once = once[short[once]]
            self._table[slots[once]] = np.concatenate((keys[once], look_up(once)), axis=1)
            rows[new] = self._table[slots[new]]
            rest = new[(rows[new, :3] != keys[new]).any(axis=1) | ~short[new]]  # of the same hash, or long
            rows[rest, 3:] = look_up(rest)
        place, count = rows[:, 3].astype(np.int64), rows[:, 4].astype(np.int64)
        ends = np.cumsum(count)
        ids = self._pool[np.arange(ends[-1]) + np.repeat(place - (ends - count), count)]
        if self._bytes + 4 * self._used > MOST_BYTES:
            self._forget()
        # A text begins behind a separator, or with it in PieceCuts.
        begins = np.cumsum([0, *(len(each) + 1 for each in texts)]) + (not self._cuts.pieces)
        before = np.concatenate(([0], ends))[np.searchsorted(starts, begins)]
        return ids, np.diff(before)

    def _look_up(self, words: list[bytes]) -> np.ndarray:
        """Return (place, count) `[words, 2]` of words not in the table; the library encodes new ones."""
        numbers = list(map(self._numbers.get, words))
        new = list(dict.fromkeys(word for word, number in zip(words, numbers) if number is None))
        if new:
            lists = self._alone(new)
            counts = np.array([*map(len, lists)], np.int64)
            places = np.stack((self._used + np.cumsum(counts) - counts, counts), axis=1)
            self._places = _written(self._places, len(self._numbers), places)
            ids = np.fromiter(chain.from_iterable(lists), np.uint32, counts.sum())
            self._pool = _written(self._pool, self._used, ids)
            self._used += len(ids)
            self._bytes += sum(map(len, new)) + 100 * len(new)
            self._numbers |= zip(new, range(len(self._numbers), len(self._numbers) + len(new)))
            numbers = list(map(self._numbers.get, words))
        return self._places[numbers]

    def _alone(self, words: list[bytes]) -> list[list[int]]:
        """The ids of each word as in a text: by the library, with a word beside it where it needs one."""
        pieces, texts, drop = self._cuts.pieces, list(words), [0] * len(words)
        for i, word in enumerate(words):
            if word[0] == 255 or word[-1] == 255:
                texts[i] = word.replace(END, b"")
            elif pieces or word[-1] in _SPACE_BYTES:
                texts[i], drop[i] = (CONTEXT + word if pieces else word + b" x"), self._context
        lists = self._encode(b"\0".join(texts).decode().split("\0"))
        for i, n in enumerate(drop):
            if n:
                lists[i] = lists[i][n:] if pieces else lists[i][:-n]
        return lists


def _keys(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first LONGEST bytes of each word as three integers `[words, 3]`, and their row of the table."""
    # The eight bytes from each offset on as one integer: a view of the text with a stride of one byte.
    eight = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))
    keys = np.zeros((len(starts), 3), np.uint64)
    keys[:, 0] = eight[starts] & MASKS[np.minimum(lengths, 8)]
    for i in (1, 2):
        long = np.flatnonzero(lengths > 8 * i)
        keys[long, i] = eight[starts[long] + 8 * i] & MASKS[np.minimum(lengths[long] - 8 * i, 8)]
    mixed = keys[:, 0] * FACTORS[0] ^ keys[:, 1] * FACTORS[1] ^ keys[:, 2] * FACTORS[2]
    return keys, (mixed >> np.uint64(64 - BITS)).astype(np.int64)


def insert_lists(
    ids: np.ndarray, counts: np.ndarray, found: dict[int, Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Put the ids of some texts, found[i] those of text i, where these have none in `ids` yet."""
    if not found:
        return ids, counts
    own = [*map(len, found.values())]
    places = np.repeat(np.cumsum(counts)[[*found]], own)
    counts = counts.copy()
    counts[[*found]] = own
    return np.insert(ids, places, np.fromiter(chain.from_iterable(found.values()), ids.dtype)), counts


def _written(array: np.ndarray, at: int, rows: np.ndarray) -> np.ndarray:
    """Write `rows` at `at` and return the array; one that is too short is at least doubled first."""
    if at + len(rows) > len(array):
        array = np.concatenate(
            (array, np.zeros_like(array, shape=(len(array) + len(rows), *array.shape[1:])))
        )
    array[at : at + len(rows)] = rows
    return array
