"""Pictures of a schedule in time: coloured text for the terminal, PNG or SVG for a page.

rank 0  F0 F1 F2 .. .. .. .. BW0=== BW1=== BW2===        time runs to the right, a row is a rank
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanomegatron.schedules import Timeline

# After Okabe and Ito: distinct for colour-blind readers. Later chunks are paler.
COLOURS = {"F": (0, 114, 178), "B": (230, 159, 0), "W": (0, 158, 115), "BW": (213, 94, 0)}
TERMINAL = {  # colours of the paper and the ink, of 256
    "F": "48;5;25;38;5;231",
    "B": "48;5;214;38;5;16",
    "W": "48;5;36;38;5;16",
    "BW": "48;5;166;38;5;16",
}
IDLE = "#ebebeb"
HEIGHT = 0.84  # of a bar; the distance of rows is 1
MEANING = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}


def shade(kind: str, chunk: int, chunks: int) -> tuple[int, ...]:
    """Return red, green, blue (0 - 255) of an op: later chunks are paler, by at most three quarters."""
    share = 0.75 * chunk / max(chunks, 1)
    return tuple(round(part + (255 - part) * share) for part in COLOURS[kind])


def text_rows(timeline: Timeline, colour: bool = False) -> list[str]:
    """Draw a timeline as a row of text per rank, a cell per unit of time (the shortest op).

    An op has its kind, its microbatch and, if there are several chunks, its chunk (a, b ...).
    """
    events = timeline.events
    unit = min(event.end - event.start for event in events)
    several = any(event.op.chunk for event in events)
    names = [f"{e.op.kind}{e.op.microbatch}{chr(ord('a') + e.op.chunk) * several}" for e in events]
    width = 1 + max(map(len, names))
    rows = [""] * len(timeline.bubbles)
    for event, name in zip(events, names, strict=True):
        begin, end = (int(time / unit + 0.5) for time in (event.start, event.end))
        idle = begin - len(rows[event.rank]) // width
        size = width * (end - begin)
        bar = name.ljust(size - 1, "=") if end - begin > 1 else name
        rows[event.rank] += ".".ljust(width) * idle + bar.ljust(size)
    rows = [row.rstrip() for row in rows]
    if colour:
        rows = [re.sub(r"(BW|[FBW])\d+[a-z]?=*", _painted, row) for row in rows]
    return [f"rank {rank}  {row}" for rank, row in enumerate(rows)]


def _painted(op: re.Match) -> str:
    return f"\x1b[{TERMINAL[op[1]]}m{op[0]}\x1b[0m"


def timeline_summary(timeline: Timeline) -> str:
    """Return total time, in forwards of a rank's layers, bubble and peak activations in words."""
    peaks = [" ".join(map(str, peak)) for peak in (timeline.peak_until_backward, timeline.peak_until_weight)]
    kept = f"{peaks[0]} until B, {peaks[1]} until W" if peaks[0] != peaks[1] else peaks[0]
    return (
        f"total {timeline.total:g} forwards, bubble {100 * timeline.bubble:.1f} % of ideal time; "
        f"peak activations, in chunks, of each rank: {kept}"
    )


def canvas(what: str | Path, size: tuple[float, float], dpi: int = 120) -> Any:
    """Return an empty matplotlib figure, size in inches. Raises ImportError that `what` needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _chunks(timeline: Timeline) -> int:
    return 1 + max(event.op.chunk for event in timeline.events)


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Draw a timeline as bars, a row per rank, to a file whose suffix is its format (.png, .svg, .pdf).

    Raises ImportError without matplotlib, ValueError for a format that it cannot write.
    """
    figure = canvas(path, (14, 1.6 + 0.4 * len(timeline.bubbles)))
    axes = figure.add_subplot()
    bars(axes, timeline)
    axes.set_xlabel("time in units of one forward (of a microbatch through the layers of a rank)")
    legend(axes, timeline)
    figure.suptitle(f"{title}\n{timeline_summary(timeline)}".strip(), fontsize=10, x=0.01, ha="left")
    figure.savefig(path)


def bars(axes: Any, timeline: Timeline, span: float = 0.0) -> None:
    """Draw the bars on matplotlib axes, for speed those of one rank and colour as one object; idle is grey.

    span: the time that the axes show, if more than the timeline's. Numbers that do not fit are left out.
    """
    ranks = len(timeline.bubbles)
    chunks = _chunks(timeline)
    span = max(span, timeline.total)
    points = 72 * 0.92 * axes.figure.get_figwidth() / span  # of a unit of time
    axes.barh(range(ranks), timeline.total, HEIGHT, color=IDLE, zorder=0.3)
    spans: dict[tuple, list] = {}
    for event in timeline.events:
        rgb = shade(event.op.kind, event.op.chunk, chunks)
        length = event.end - event.start
        spans.setdefault((event.rank, f"#{bytes(rgb).hex()}"), []).append((event.start, length))
        words = str(event.op.microbatch)
        size = min(7, (points * length - 2) / (0.65 * len(words)))  # in points; a digit is 0.64 wide
        if size >= 5:
            bright = 0.3 * rgb[0] + 0.6 * rgb[1] + 0.1 * rgb[2] > 130
            ink = "black" if bright else "white"
            style = dict(ha="center", va="center", fontsize=size, color=ink, in_layout=False)
            axes.text(event.start + length / 2, event.rank, words, **style)
    for (rank, colour), pieces in spans.items():
        axes.broken_barh(pieces, (rank - HEIGHT / 2, HEIGHT), color=colour, ec="white", lw=0.5)
    axes.set(xlim=(0, span), ylim=(ranks - 0.5, -0.5), yticks=range(ranks), ylabel="rank")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#c8c8c8", linewidth=0.6)


def legend(axes: Any, timeline: Timeline, more: Sequence[Any] = ()) -> None:
    """Draw the legend in a line above the axes: a swatch for each shade, for idle, and the handles `more`."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    chunks = _chunks(timeline)
    kinds = [kind for kind in COLOURS if any(event.op.kind == kind for event in timeline.events)]
    paints = [[shade(kind, chunk, chunks) for chunk in range(chunks)] for kind in kinds]
    shades = [tuple(Patch(color=f"#{bytes(rgb).hex()}") for rgb in paint) for paint in paints]
    each = f", chunks 0-{chunks - 1}" * (chunks > 1)
    labels = [*(MEANING[k] + each for k in kinds), "idle", *(handle.get_label() for handle in more)]
    place = dict(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(labels), borderaxespad=0)
    look = dict(handlelength=1 + chunks, fontsize=8, handler_map={tuple: HandlerTuple(None, pad=0)})
    axes.legend([*shades, Patch(color=IDLE), *more], labels, frameon=False, **place, **look)
