"""Encodes many texts at once by looking up their words: the ids of the tokenizer's library, but sooner.

A library takes 300 ns and more for a word, and most words have occurred before. Where a text can be cut so
that each part has the ids that it has in the text, half a megabyte is cut and looked up at once, in numpy:

    text     | I t ' s _ a _ _ t e s t . |           texts, bytes 255 around each
    class    Z L L Q L B L B B L L L L P Z           letter, quote, blank, punctuation ...
    start    * *       *   * *         * *           by pairs of classes, and a blank before a word
    key      the up to 24 bytes of each word as three integers
    ids      looked up in a table by the key; the library encodes the words that are missing, each once,
             all in a text where a word that they do not hold is between them: "0", or the byte 1. A word
             takes the place of another with the same hash, which is then missing

A cut between two bytes is safe if no word of the tokenizer can hold both. There are three kinds:

    GPT2_CUTS    words by GPT-2's pattern: letters, numbers or punctuation, with the blank before them
    GPT4_CUTS    as cl100k_base's: letters keep a sign before them, but not one behind a blank or another
                 sign; newlines keep the signs before them
    PieceCuts    SentencePiece's byte pairs: characters that no piece has beside each other never merge

Ids can depend on what is beside a word: one that ends in blanks is encoded with a word behind it, and one of
SentencePiece with a word before it, unless the text ends or begins there. Bytes of other scripts are never
cut from their neighbours, as they may be blanks too.
(GPT-2's pattern: Radford et al. 2019)
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress

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
BITS = 21  # the table has 2^BITS rows, one for each value of a hash
JOINED = 128  # new words of PieceCuts in one text
MOST_BYTES = 1 << 27  # of words and of their ids, until all are forgotten
MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


class Cuts:
    """Where words start. pairs: classes (before, after) between which it is; last: classes of a last blank.

    The last of several blanks starts a word if its class is in `last` and a word follows; letters start one
    behind two signs, or a blank and a sign.
    """

    pieces = False

    def __init__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], last: Sequence[int]) -> None:
        # Of (before, after): 1 a cut. Of two pairs, 2 and 4: a cut in the first; 8 and 16: in the second.
        flags = np.zeros((16, 16), np.uint8)
        for before, after in pairs:
            flags[np.ix_(before, after)] = 1
        flags[np.ix_(SPACES, last)] |= 2
        flags[np.ix_(last, WORD)] |= 4
        flags[np.ix_((SIGN, QUOTE, BLANK), SIGNS)] |= 8
        flags[np.ix_(SIGNS, (LETTER,))] |= 16
        self._flags = flags[CLASSES[None, :], CLASSES[:, None]].reshape(-1)  # of after * 256 + before

    def __call__(self, text: bytes) -> np.ndarray:
        """Bool `[n]`: whether a word starts at each byte of a text."""
        flags = self._flags[np.ndarray(len(text) - 1, "<u2", text, strides=(1,))]
        start = np.ones(len(text), np.uint8)
        start[1:] = flags & 1
        start[1:-1] |= (flags[:-1] >> 1) & (flags[1:] >> 2) & 1
        start[2:] |= (flags[:-1] >> 3) & (flags[1:] >> 4)
        return start.view(bool)


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
        cut = np.ones((256, 256), bool)  # of (after, before)
        for piece in pieces:
            raw = np.frombuffer(piece.replace("\u2581", " ").encode(), np.uint8)
            cut[raw[1:], raw[:-1]] = False
        cut[128:192] = False  # inside a character
        cut[:, 255], cut[255] = False, True
        self.safe = bool(cut[:128, CONTEXT[0]].all())
        self._cut = cut.reshape(-1)

    def __call__(self, text: bytes) -> np.ndarray:
        """Bool `[n]`: whether a word starts at each byte of a text."""
        start = np.ones(len(text), bool)
        start[1:] = self._cut[np.ndarray(len(text) - 1, "<u2", text, strides=(1,))]
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
        self._cuts, self._encode = cuts, encode
        self._without = [string.encode() for string in ("\0", *without)]
        self._context = len(encode([CONTEXT.decode() if cuts.pieces else " x"])[0])
        joiners = (CONTEXT,) if cuts.pieces else (b"0", b"x")
        self._joiners = [(joiner, ids[-1]) for joiner in joiners if (ids := encode([joiner.decode()])[0])]
        self._forget()

    def _forget(self) -> None:
        """Empty the tables, so that memory stays bounded."""
        # A word's value: where its ids begin in the pool << 32, and how many they are.
        self._long: dict[bytes, int] = {}  # of words that the table cannot hold
        self._bytes = 0
        self._pool, self._used = np.zeros(1 << 16, np.uint32), 0
        self._table = np.zeros((1 << BITS, 4), np.uint64)  # row hash(word): the word's key and value
        self._last = np.zeros(1 << BITS, np.int32)  # row hash(word): the last new one of a call

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts -> ids of all texts uint32, and the number of ids of each."""
        try:
            raw, rest = [*map(str.encode, texts)], []
            clean = not self._holds(END.join(raw))
        except UnicodeEncodeError:  # half of a surrogate pair
            clean = False
        if not clean:
            rest = [i for i, text in enumerate(texts) if self._is_left(text)]
            left = {*rest}
            raw = [b"" if i in left else text.encode() for i, text in enumerate(texts)]
        ids, counts = self._look_up_texts(raw)
        if not rest:
            return ids, counts
        return insert_lists(ids, counts, dict(zip(rest, self._encode([texts[i] for i in rest]))))

    def _holds(self, text: bytes) -> bool:
        return any(string in text for string in self._without)

    def _is_left(self, text: str) -> bool:
        """Whether a text is left to the library."""
        try:
            return self._holds(text.encode())
        except UnicodeEncodeError:
            return True

    def _look_up_texts(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        joined = END + END.join(texts) + END
        starts = np.flatnonzero(self._cuts(joined))
        lengths = np.diff(starts, append=len(joined))
        values = self._look_up(joined, starts, lengths)
        count = (values & MASKS[4]).astype(np.int64)
        ends = np.cumsum(count)
        first = (values >> np.uint64(32)).astype(np.int64) - ends + count
        ids = self._pool.take(np.arange(ends[-1]) + np.repeat(first, count))
        if self._bytes + 4 * self._used > MOST_BYTES:
            self._forget()
        # A text begins behind a separator, or with it in PieceCuts.
        begins = np.cumsum([0, *map(len, texts)]) + np.arange(len(texts) + 1) + (not self._cuts.pieces)
        before = np.concatenate(([0], ends))[np.searchsorted(starts, begins)]
        return ids, np.diff(before)

    def _look_up(self, joined: bytes, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The values of the words that start there, from the table; words that are too long for it apart."""
        keys, slots = _keys(joined, starts, lengths)
        rows = self._table.take(slots, axis=0)
        long = lengths > LONGEST
        new = np.flatnonzero(_differ(rows, keys) & ~long)
        while new.size:
            at, order = slots[new], np.arange(len(new))
            self._last[at] = order
            some = new[self._last[at] == order]  # one word for each row, the last
            values = self._learn(_words(joined, starts[some], lengths[some]))
            self._table[slots[some]] = np.stack((*(key[some] for key in keys), values), axis=1)
            rows[new] = self._table.take(at, axis=0)
            new = new[_differ(rows[new], [key[new] for key in keys])]
        if (long := np.flatnonzero(long)).size:
            words = _words(joined, starts[long], lengths[long])
            if missing := [word for word in dict.fromkeys(words) if word not in self._long]:
                self._long |= zip(missing, self._learn(missing).tolist())
                self._bytes += sum(map(len, missing)) + 100 * len(missing)
            rows[long, 3] = [*map(self._long.get, words)]
        return rows[:, 3]

    def _learn(self, words: list[bytes]) -> np.ndarray:
        """Encode new words as in a text -> their values; most by one call, with a joiner between them."""
        values, left = np.zeros(len(words), np.uint64), np.arange(len(words))
        for joiner, number in self._joiners:
            if len(left):
                left = self._learn_joined(words, left, values, joiner, number)
        lists = self._each([words[i] for i in left.tolist()])
        counts = np.array([*map(len, lists)], np.int64)
        ids = np.fromiter(chain.from_iterable(lists), np.uint32)
        values[left] = self._keep(ids, np.cumsum(counts) - counts, counts)
        return values

    def _learn_joined(
        self, all_words: list[bytes], left: np.ndarray, values: np.ndarray, joiner: bytes, number: int
    ) -> np.ndarray:
        """Encode those of `left` beside which the joiner, of id `number`, is a word; returns the others."""
        words = all_words if len(left) == len(all_words) else [all_words[i] for i in left.tolist()]
        text = np.frombuffer(joined := joiner + joiner.join(words) + joiner, np.uint8)
        ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)) + 1)  # the joiner behind each
        begins, cut = np.append(1, ends[:-1] + 1), self._cuts(joined)
        bad = (text == joiner[0]) | (text == END[0])
        bad[ends] = ~cut[ends] | ~cut[begins]
        if not self._cuts.pieces:
            bad[ends] |= np.isin(CLASSES[text[ends - 1]], SPACES)
        bad = np.logical_or.reduceat(bad, begins)
        some = list(compress(words, ~bad))
        n = JOINED if self._cuts.pieces else len(words)
        texts = [joiner + joiner.join(some[i : i + n]) + joiner for i in range(0, len(some), n)]
        if any(map(self._holds, texts)):
            return left
        ids = np.fromiter(chain.from_iterable(self._encode([text.decode() for text in texts])), np.uint32)
        at = np.flatnonzero(ids == number)
        if len(at) != len(some) + len(texts):
            return left
        inside = np.arange(len(at)) % (n + 1) < n  # not from the end of a text to the next
        inside[-1:] = False
        values[left[~bad]] = self._keep(ids, at[inside] + 1, np.diff(at, append=0)[inside] - 1)
        return left[bad]

    def _keep(self, ids: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Keep the ids of new words, which begin there in `ids` -> their values."""
        if self._used + len(ids) > len(self._pool):
            self._pool = np.concatenate((self._pool, np.zeros(len(self._pool) + len(ids), np.uint32)))
        self._pool[self._used : self._used + len(ids)] = ids
        self._used += len(ids)
        return (self._used - len(ids) + begins << 32 | counts).astype(np.uint64)

    def _each(self, words: list[bytes]) -> list[list[int]]:
        """The ids of each word as in a text: by the library, with a word beside it where it needs one."""
        pieces, texts, drop = self._cuts.pieces, list(words), [0] * len(words)
        for i, word in enumerate(words):
            if word[0] == 255 or word[-1] == 255:
                texts[i] = word.replace(END, b"")
            elif pieces or word[-1] in _SPACE_BYTES:
                texts[i], drop[i] = (CONTEXT + word if pieces else word + b" x"), self._context
        lists = self._encode(b"\0".join(texts).decode().split("\0")) if words else []
        for i, n in enumerate(drop):
            if n:
                lists[i] = lists[i][n:] if pieces else lists[i][:-n]
        return lists


def _keys(joined: bytes, starts: np.ndarray, lengths: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The first LONGEST bytes of each word as three integers, `[words]` each, and its row of the table."""
    # The eight bytes from each offset on as one integer: a view of the text with a stride of one byte.
    eight = np.ndarray(len(joined) + LONGEST - 7, "<u8", joined + bytes(LONGEST), strides=(1,))
    keys = [eight[starts] & MASKS[np.minimum(lengths, 8)]]
    for i in (1, 2):
        long = np.flatnonzero(lengths > 8 * i)
        keys.append(np.zeros(len(starts), np.uint64))
        keys[i][long] = eight[starts[long] + 8 * i] & MASKS[np.minimum(lengths[long] - 8 * i, 8)]
    mixed = keys[0] * FACTORS[0] ^ keys[1] * FACTORS[1] ^ keys[2] * FACTORS[2]
    return keys, (mixed >> np.uint64(64 - BITS)).astype(np.int64)


def _words(joined: bytes, starts: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    return [joined[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist())]


def _differ(rows: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    """Whether rows of the table have other keys."""
    return (rows[:, 0] != keys[0]) | (rows[:, 1] != keys[1]) | (rows[:, 2] != keys[2])


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
