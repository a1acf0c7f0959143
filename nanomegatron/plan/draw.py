"""Bars of a plan: the parts of a GPU's memory and of a step's time, as text or as a picture.

    memory  72 of 80 GiB WWWWWWWGGGGGGGGGGAAAAAAAAAAAA....    weights 15, gradients 22, activations 31, free 8
    time        11.52 s  MMMMMMMMMMMMMMMMMMMMMMMAAAAAAAoBB    matmuls 62 %, attention 21 %, bubble 4 %

A sign is the first free letter of a part's name; a part below a sign's width is not drawn.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanomegatron.plan.search import Candidate

BAR_WIDTH = 60  # signs of a bar
FREE = "free"

# What a picture shows of the parts: few groups, in the order of a bar; the last one takes the rest.
# What zero bubble keeps for deferred weight gradients are activations too.
MEMORY = {
    "weights": ("weights", "FP8 weights"),
    "gradients": ("gradients",),
    "optimizer": ("main weights", "Adam moments"),
    "activations": ("activations", "logits and loss", "backward of a layer", "deferred weight gradients"),
    "buffers": (),
}
TIME = {
    "matmuls": ("matmuls",),
    "attention": ("attention",),
    "communication": tuple(f"{axis} communication" for axis in ("tp", "cp", "ep", "dp")) + ("pp messages",),
    "bubble": ("bubble",),
    "other kernels": ("other kernels", "launches"),
}
# After Okabe and Ito: distinct for colour-blind readers, and by their brightness in grey.
GROUP_COLORS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#9a9a9a",
    "activations": "#e69f00",
    "buffers": "#d9d9d9",
    "matmuls": "#00664b",
    "attention": "#4fc3a1",
    "communication": "#d55e00",
    "bubble": "#ffffff",
    "other kernels": "#c9c9c9",
}
AT_THE_LINE = dict(
    xycoords=("data", "axes fraction"), textcoords="offset points", ha="right", va="top", fontsize=12
)


def memory_parts(candidate: Candidate, room: float) -> dict[str, float]:
    """GiB by part, the largest first, and what is free of `room` GiB."""
    parts = {name: size / 2**30 for name, size in candidate.memory.items()}
    parts = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return parts | {FREE: max(0.0, room - sum(parts.values()))}


def signs(parts: dict[str, float]) -> dict[str, str]:
    """A sign for each part: a letter of its name that no other has; free memory is a dot."""
    taken = {FREE: "."}
    for name in parts:
        letters = [c for c in name.upper() + name if c.isalpha()]
        taken.setdefault(name, next((c for c in letters if c not in taken.values()), "?"))
    return taken


def bar(parts: dict[str, float]) -> str:
    """A line of BAR_WIDTH signs, divided as the parts are."""
    total, by_name = sum(parts.values()), signs(parts)
    end, drawn = 0.0, ""
    for name, size in parts.items():
        end += size
        drawn += by_name[name] * (round(BAR_WIDTH * end / total) - len(drawn))
    return drawn


def text_bars(candidate: Candidate, room: float) -> Iterator[str]:
    """Yield the lines of both bars, each with a key. room: GiB of a GPU."""
    memory = memory_parts(candidate, room)
    yield f"memory  {candidate.need / 2**30:5.1f} of {room:.0f} GiB  {bar(memory)}"
    yield from key(memory, "{:.1f}")
    step = candidate.step
    time = {name: 100 * part / step.total for name, part in step.parts.items()}
    yield f"time    {step.total * 1e3:11,.1f} ms  {bar(time)}"
    yield from key(time, "{:.1f} %")


def key(parts: dict[str, float], form: str) -> Iterator[str]:
    """Yield lines that say what the signs of a bar mean, of the parts that are seen in it."""
    by_name, seen = signs(parts), {*bar(parts)}
    words = [f"{by_name[name]} {name} {form.format(parts[name])}" for name in parts if by_name[name] in seen]
    for i in range(0, len(words), 4):
        yield " " * 8 + ", ".join(words[i : i + 4])


def groups(parts: dict[str, float], known: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Sum the parts of each group of a table; the last group takes all that no group names."""
    of_part = {part: group for group, names in known.items() for part in names}
    sums = dict.fromkeys(known, 0.0)
    for name, size in parts.items():
        sums[of_part.get(name, next(reversed(known)))] += size
    return sums


def draw_bars(candidates: list[Candidate], room: float, path: Path, title: str = "") -> Any:
    """Draw memory and time of some layouts, the best on top, for a slide -> the matplotlib Figure.

    room: GiB of a GPU, drawn as a line. Raises ImportError without matplotlib.
    """
    try:
        library = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(f"--plot {path} needs matplotlib: pip install matplotlib") from error
    figure = library.Figure(figsize=(12.8, 7.2), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    gib = [{name: size / 2**30 for name, size in c.memory.items()} for c in candidates]
    _stack(memory, [groups(parts, MEMORY) for parts in gib], [f"{sum(parts.values()):.0f}" for parts in gib])
    memory.axvline(room, color="black", linestyle="--", linewidth=1.5)
    memory.annotate(f"{room:.0f} GiB: the card", (room, 1), (-6, -4), **AT_THE_LINE)
    memory.set(title="memory of the fullest GPU, GiB", xlim=(0, 1.12 * room))
    seconds = [c.step for c in candidates]
    ends = [f"{s.total:,.{1 if s.total >= 10 else 2}f} s, {s.mfu:.0%} MFU" for s in seconds]
    _stack(time, [groups(step.parts, TIME) for step in seconds], ends)
    time.set(title="a step, seconds", xlim=(0, 1.42 * max(step.total for step in seconds)))
    rows = [f"{c.word}\nmicro batch {c.micro}" for c in candidates]
    memory.set_yticks(range(len(rows)), rows, fontsize=13)
    memory.set_ylim(len(rows) - 0.4, -0.6 - 0.12 * len(rows) ** 0.5)
    figure.suptitle(title or "layouts, the best on top", fontsize=18, x=0.01, ha="left", weight="bold")
    figure.savefig(path, dpi=150)
    return figure


def _stack(axes: Any, rows: list[dict[str, float]], ends: list[str]) -> None:
    """Draw bars of groups, one after another, with a text at the end of each bar and a key below."""
    left = [0.0] * len(rows)
    for name in rows[0]:
        sizes = [row[name] for row in rows]
        bars = axes.barh(
            range(len(rows)), sizes, left=left, label=name, color=GROUP_COLORS[name], height=0.62
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
        if name == "bubble":
            for patch in bars:
                patch.set(hatch="///", edgecolor="#777777", linewidth=0)
    for i, (end, text) in enumerate(zip(left, ends, strict=True)):
        axes.annotate(text, (end, i), (6, 0), textcoords="offset points", va="center", fontsize=13)
    axes.title.set_size(15)
    axes.tick_params(labelsize=12, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    below = dict(loc="upper center", bbox_to_anchor=(0.5, -0.06), frameon=False, handlelength=1.2)
    axes.legend(ncols=3, fontsize=12, **below)
