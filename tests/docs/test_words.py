"""The words of the code and its documents: those that readers of the field use, and search for."""

import re
from pathlib import Path

import pytest

from tests.house.test_style import KERNELS, PYTHON, ROOT, SOURCES, none

# Names of the first version, each with a term of the field for it.
NAMES = """
Journey TokenDispatch | OnTheWay AsyncHostCopy | Trip AsyncExchange | under_way pending
set_out prefetch | Soon OverlappedWgrads | Deferred WeightGradStore | when_due accumulate
now_or accumulate | puts_off is_deferred | contribute accumulate | made_again recompute
stand_in fp8_placeholder | casts_of Quantized | kept_of saved_form | fp8_turn fp8_transpose
_agree_ all_reduce_amax_ | knows_scales has_scale | takes_casts reads_only_fp8 | Inlet CaptureInputGrad
Outlet InjectOutputGrad | wires p2p_links | WIRE_CTAS P2P_MAX_CTAS | Leg Transfer | Legs TransferPlan
start_shift start_ring_exchange | ring_shift start_ring_exchange | start_swap start_all_to_all
Round RingRound | _meet overlap | _sides query_key_rows | travelling ring_kv
by_heads ulysses_attention | line_up barrier_before_copies | obstacle PeerAccess
why_not kernels_unavailable | settle flush_report | flying in_flight | Ferry HostStaging | sailing copying
_landed _wait_copy | tells_loss is_loss_rank | wishes stop_flags | rehearse warm_up
take_up restore_progress | contradictions config_mismatches | put_away drop_alternatives
unmet missing_companions | remarks notes | must_match resume_conflicts | Way CPMode
put_off deferred_wgrad_values | shared_out assign_documents | forgiven hysteresis_left
"""
NAMES = dict(pair.split() for pair in re.split(r"[|\n]", NAMES) if pair.strip())

# Phrases, each with the usual words for it.
PHRASES = {
    "so many": "a number, by its name",
    "anew": "again, from zero",
    "let go of": "free",
    "what has come": "received",
    "has come": "arrived",
    "what comes": "the input, later tokens",
    "made again": "recomputed, rebuilt",
    "whoever": "the caller, the rank",
    "on the way": "in flight",
    "under way": "in flight",
    "put off": "deferred",
    "puts off": "defers",
    "put away": "dropped",
    "told": "given, configured",
    "tells": "returns, says",
    "nobody": "no rank",
    "goes on": "continues, resumes",
    "take turns": "alternate, interleaved",
    "takes turns": "alternates",
    "in its turn": "then",
    "what there is": "the list of",
    "looked for": "searched",
    "looked after": "managed",
    "handed out": "returned",
    "hands out": "returns",
    "hand over": "pass",
    "for good": "permanently",
    "of itself": "automatically",
    "of one's own": "your own",
    "travelling": "in flight",
    "travels": "is sent",
    "all the same": "nevertheless",
    "in the meantime": "meanwhile",
    "lies in": "is in",
    "of old": "of earlier versions",
    "of late": "recent",
    "is spent": "takes",
    "let there be": "allocate",
    "shared out": "divided, distributed",
    "taken up": "resumed",
    "take up": "resume",
    "sets out": "starts",
    "next to nothing": "little",
    "here and there": "in places",
}
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("nanomegatron/presets/*.toml")),
]


def texts() -> list[tuple[str, str]]:
    """(name, text) of every Python file but this one, every kernel and every document."""
    python = [(s.name, s.text) for s in PYTHON if s.path != Path(__file__).resolve()]
    others = [*KERNELS, *DOCUMENTS]
    return python + [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in others]


def uses(text: str, words: dict[str, str]) -> list[tuple[int, str]]:
    """(line, word) of each use of one of the words, which may be split over two lines."""
    pattern = "|".join(re.escape(word).replace(r"\ ", r"[\s#]+") for word in words)
    found = re.finditer(rf"(?<![\w-])({pattern})(?![\w-])", text)
    return [(text.count("\n", 0, match.start()) + 1, " ".join(match[1].split())) for match in found]


def test_the_lists_are_long_enough():
    assert len(PHRASES) >= 40 and len(NAMES) >= 40


def test_no_name_of_the_first_version_is_left():
    none(f"{s.name}:{line} {name}: {NAMES[name]}" for s in SOURCES for line, name in uses(s.text, NAMES))


def test_usual_words_are_used():
    none(
        f"{name}:{line} {phrase!r}: {PHRASES[phrase]}"
        for name, text in texts()
        for line, phrase in uses(text.lower(), PHRASES)
    )


@pytest.mark.parametrize("text", ["in so many\n    parts", "# in so many\n# parts", "So many parts"])
def test_a_phrase_is_found_over_lines(text):
    assert [phrase for _, phrase in uses(text.lower(), PHRASES)] == ["so many"]
