"""The picture of a plan, for a slide: a bar for each layout, what its memory holds, and the end of a GPU's.

What microbatches hold is one group: activations and, in a zero-bubble schedule between B and W, the inputs of
matmuls and the gradients of their outputs. A rank of zb-v may have its peak when every B is done, and then it
holds these alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanomegatron.plan.search import FILLED, Candidate
from nanomegatron.report.plots import MARK, PALETTE
from nanomegatron.report.schedule_draw import canvas

BLUE, VERMILION, GREEN, _, ORANGE, SKY = PALETTE
MEMORY_GROUPS = {  # of the parts of plan.memory; all others are "other"
    "weights": ("weights", "FP8 weights"),
    "gradients": ("gradients",),
    "optimizer states": ("main weights", "Adam moments"),
    "activations": ("activations", "logits and loss", "backward of a layer", "deferred weight gradients"),
    "other": (),
}
FILLS = dict(zip(MEMORY_GROUPS, (BLUE, SKY, GREEN, ORANGE, "#a6a6a6"), strict=True))
DARK = (BLUE, GREEN)  # fills on which a number is white
WIDE = 0.05  # the least share of the axis for a number in a bar
FONT_SIZE = 14  # points of most words, on a slide 13.33 inches wide


def memory_groups(candidate: Candidate) -> dict[str, float]:
    """Return the GiB of each of MEMORY_GROUPS, in their order."""
    group_of = {part: group for group, parts in MEMORY_GROUPS.items() for part in parts}
    found = dict.fromkeys(MEMORY_GROUPS, 0.0)
    for part, size in candidate.memory.items():
        found[group_of.get(part, "other")] += size / 2**30
    return found


def draw_plan(candidates: Sequence[Candidate], card: str, room: float, title: str, path: Path) -> Any:
    """Draw layouts in this order, from above -> the matplotlib Figure. room: GiB of a GPU, called `card`.

    Layouts without a step do not fit. Raises ImportError without matplotlib.
    """
    figure = canvas(f"--plot {path}", (13.333, 7.5), dpi=144)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    end = 1.02 * max(room, *(candidate.need / 2**30 for candidate in candidates))
    axes.set(xlim=(0, end), ylim=(len(candidates) - 0.5, -0.5))
    shown = _bars(axes, candidates, end)
    shown.append(_limits(axes, card, room))
    axes.set_yticks(range(len(candidates)), [f"{each.word}\nmicro {each.micro}" for each in candidates])
    axes.set_xlabel("GiB of the GPU that needs most, at the peak of a step", fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _columns(beside, candidates)
    figure.suptitle(title, fontsize=FONT_SIZE + 6, weight="bold", x=0.01, ha="left")
    place = dict(loc="outside lower center", ncols=len(shown), frameon=False)
    figure.legend(handles=shown, fontsize=FONT_SIZE, **place)
    figure.savefig(path)
    return figure


def _bars(axes: Any, candidates: Sequence[Candidate], end: float) -> list[Any]:
    """Draw the bars, those that do not fit pale and hatched; return the legend's entries."""
    from matplotlib.patches import Patch

    groups = [memory_groups(candidate) for candidate in candidates]
    left, shown = [0.0] * len(groups), []
    for name, fill in FILLS.items():
        sizes = [group[name] for group in groups]
        drawn = axes.barh(range(len(sizes)), sizes, 0.66, left, label=name, color=fill, edgecolor="white")
        texts = [f"{size:.1f}" if size > WIDE * end else "" for size in sizes]
        numbers = axes.bar_label(drawn, texts, label_type="center", fontsize=FONT_SIZE - 2)
        for bar, number, candidate in zip(drawn, numbers, candidates, strict=True):
            number.set_color("white" if candidate.step and fill in DARK else "black")
            if candidate.step is None:
                bar.set(alpha=0.35, hatch="//")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
        if any(sizes):
            shown.append(Patch(color=fill, label=name))
    return shown


def _limits(axes: Any, card: str, room: float) -> Any:
    """Draw the memory of a GPU, and dashed how much of it a layout may use; return that line."""
    used = FILLED * room
    line = axes.axvline(used, color=MARK, lw=1.5, linestyle="--", label=f"used at most: {used:.0f} GiB")
    axes.axvline(room, color="black", linewidth=2.5, label=card)
    look = dict(
        transform=axes.get_xaxis_transform(), fontsize=FONT_SIZE - 1, weight="bold"
    )  # y: 1 is the top
    axes.text(room, 1.01, f"{card}: {room:.0f} GiB", ha="center", va="bottom", **look)
    return line


def _columns(axes: Any, candidates: Sequence[Candidate]) -> None:
    """Write beside each bar its GiB, and a step's time and MFU, or that it does not fit."""
    axes.set(xlim=(0, 1))
    axes.axis("off")
    ends = (0.36, 0.7, 1.0)
    for head, place in zip(("total", "step", "MFU"), ends, strict=True):
        look = dict(transform=axes.get_xaxis_transform(), va="bottom", fontsize=FONT_SIZE - 1, color=MARK)
        axes.text(place, 1.01, head, ha="right", **look)
    for row, candidate in enumerate(candidates):
        step = candidate.step
        texts = [f"{candidate.need / 2**30:.1f} GiB", "", "does not fit"]
        if step is not None:
            time = f"{step.total:,.1f} s" if step.total >= 1 else f"{step.total * 1e3:.0f} ms"
            texts[1:] = [time, f"{step.mfu:.1%}"]
        look = dict(color="black" if step else VERMILION, weight="bold", fontsize=FONT_SIZE)
        for text, place in zip(texts, ends, strict=True):
            axes.text(place, row, text, ha="right", va="center", **look)
