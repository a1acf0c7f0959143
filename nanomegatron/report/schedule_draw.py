"""Pictures of a schedule in time: coloured text for the terminal, PNG or SVG for a page.

rank 0  F0 F1 F2 .. .. .. .. BW0=== BW1=== BW2===        time runs to the right, a row is a rank
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanomegatron.schedules import Op, Timeline

# After Okabe and Ito: distinct for colour-blind readers. Later chunks are paler.
COLOURS = {"F": (0, 114, 178), "B": (230, 159, 0), "W": (0, 158, 115), "BW": (213, 94, 0)}
HEIGHT = 0.84  # of a bar; the distance of rows is 1
MEANING = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}


def shade(kind: str, chunk: int, chunks: int) -> tuple[int, ...]:
    """Return red, green, blue (0 - 255) of an op: later chunks are paler, by at most three quarters."""
    share = 0.75 * chunk / max(chunks, 1)
    return tuple(round(part + (255 - part) * share) for part in COLOURS[kind])


def text(timeline: Timeline, colour: bool = False) -> str:
    """Draw a timeline as text: a row per rank, a cell per unit of time (the shortest op), then a summary.

    Without colour a cell has the op's kind, microbatch and, if there are several, chunk (a, b ...).
    """
    events, (chunks, label) = timeline.events, _labels(timeline, colour)
    unit = min(event.end - event.start for event in events)
    width = max(len(label(event.op)) for event in events) + (not colour)
    lines = []
    for rank in range(len(timeline.bubbles)):
        cells, now = [], 0
        for event in (event for event in events if event.rank == rank):
            begin, end = int(event.start / unit + 0.5), int(event.end / unit + 0.5)
            size = width * (end - begin)
            cells.append(" " * (width * (begin - now)) if colour else ".".ljust(width) * (begin - now))
            filled = label(event.op).ljust(size - 1, " " if colour or end - begin == 1 else "=").ljust(size)
            cells.append(_painted(filled, shade(event.op.kind, event.op.chunk, chunks)) if colour else filled)
            now = end
        lines.append(f"rank {rank}  " + "".join(cells).rstrip(" "))
    if colour:
        kinds = [kind for kind in COLOURS if any(event.op.kind == kind for event in events)]
        lines.append("        " + " ".join(_painted(f" {MEANING[k]} ", shade(k, 0, 1)) for k in kinds))
    return "\n".join([*lines, timeline_summary(timeline)])


def timeline_summary(timeline: Timeline) -> str:
    """Return total time, bubble and peak activations in words."""
    peaks = [" ".join(map(str, peak)) for peak in (timeline.peak_until_backward, timeline.peak_until_weight)]
    kept = f"{peaks[0]} until B, {peaks[1]} until W" if peaks[0] != peaks[1] else peaks[0]
    return (
        f"total {timeline.total:g}, bubble {100 * timeline.bubble:.1f} % of ideal time; "
        f"peak activations, in chunks, of each rank: {kept}"
    )


def _labels(timeline: Timeline, short: bool) -> tuple[int, Callable[[Op], str]]:
    """Return the number of chunks, and a function that names an op."""
    chunks = 1 + max(event.op.chunk for event in timeline.events)

    def label(op: Op) -> str:
        piece = chr(ord("a") + op.chunk) if chunks > 1 else ""
        return str(op.microbatch) if short else f"{op.kind}{op.microbatch}{piece}"

    return chunks, label


def _painted(words: str, rgb: tuple[int, ...]) -> str:
    """Return `words` on the nearest of the terminal's 216 colours, in black or white letters."""
    red, green, blue = (round(part / 51) for part in rgb)
    letters = 16 if _ink(rgb) == "black" else 231
    return f"\x1b[48;5;{16 + 36 * red + 6 * green + blue};38;5;{letters}m{words}\x1b[0m"


def _ink(rgb: tuple[int, ...]) -> str:
    return "black" if 0.3 * rgb[0] + 0.6 * rgb[1] + 0.1 * rgb[2] > 130 else "white"


def canvas(what: str | Path, size: tuple[float, float], dpi: int = 120) -> Any:
    """Return an empty matplotlib figure, size in inches. Raises ImportError that `what` needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'{what} needs matplotlib: pip install -e ".[viz]"') from error
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Draw a timeline as bars, a row per rank, to a file whose suffix is its format (.png, .svg, .pdf).

    Raises ImportError without matplotlib, ValueError for a format that it cannot write.
    """
    figure = canvas(path, (14, 1.6 + 0.4 * len(timeline.bubbles)))
    axes = figure.add_subplot()
    bars(axes, timeline)
    legend(axes, timeline)
    axes.set_title(f"{title}\n{timeline_summary(timeline)}".strip(), fontsize=9)
    figure.savefig(path)


def bars(axes: Any, timeline: Timeline) -> None:
    """Draw the bars on matplotlib axes; for speed those of one rank and colour are one object."""
    ranks, (chunks, label) = len(timeline.bubbles), _labels(timeline, short=True)
    spans: dict[tuple, list] = {}
    for event in timeline.events:
        rgb, length = shade(event.op.kind, event.op.chunk, chunks), event.end - event.start
        spans.setdefault((event.rank, rgb), []).append((event.start, length))
        words = label(event.op)
        size = min(7, 1400 * length / timeline.total / len(words))  # points, to fit the bar
        if size > 4:
            style = dict(ha="center", va="center", fontsize=size, color=_ink(rgb), in_layout=False)
            axes.text(event.start + length / 2, event.rank, words, **style)
    for (rank, rgb), pieces in spans.items():
        axes.broken_barh(pieces, (rank - HEIGHT / 2, HEIGHT), color=_face(rgb), ec="white", lw=0.5)
    axes.set(xlim=(0, timeline.total), xlabel="time")
    axes.set(ylim=(ranks - 0.5, -0.5), yticks=range(ranks), ylabel="rank")
    axes.spines[["top", "right", "left"]].set_visible(False)


def legend(axes: Any, timeline: Timeline, above: bool = False) -> None:
    """Draw the legend of the colours to the right of the axes, or in a line above them."""
    from matplotlib.patches import Patch

    kinds = [kind for kind in COLOURS if any(event.op.kind == kind for event in timeline.events)]
    patches = [Patch(color=_face(shade(kind, 0, 1)), label=MEANING[kind]) for kind in kinds]
    if any(event.op.chunk for event in timeline.events):
        patches.append(Patch(color="none", label="paler: later chunks"))
    place = dict(loc="upper left", bbox_to_anchor=(1, 1))
    if above:
        place = dict(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), borderaxespad=0)
    axes.legend(handles=patches, fontsize=8, frameon=False, **place)


def _face(rgb: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(part / 255 for part in rgb)
