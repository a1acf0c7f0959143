"""Pictures of a run: the loss curve in loss.png, and the load of each expert in experts.png."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanomegatron.report.log import RunLog
from nanomegatron.report.schedule_draw import canvas
from nanomegatron.report.writers import read_jsonl

# After Okabe and Ito: distinct for colour-blind readers, and by their brightness in grey.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SMOOTH, VALIDATION = PALETTE[:2]
RAW, MARK = "#9ad0f0", "#555555"
LOADS = ("#2f7fb8", "#4393c3", "white", "#a50f25", "#4d0010")  # the first and the last: beyond the scale
DEAD = dict(facecolor="black", edgecolor="#8c8c8c", hatch="////", linewidth=0)  # an expert without a token
LABELS = 25  # at most beside experts.png


def plot_loss(folder: Path, say: Callable[[str], None] = print) -> Path | None:
    """Draw RUN/loss.png: training loss, thin for each step and smoothed; validation; below the learning rate.

    Returns its path; None, with a line to `say`, if there is nothing to draw. Raises ImportError without
    matplotlib.
    """
    figure = canvas("loss.png", (8, 5.2), dpi=100)
    steps, losses, rates = _series(folder / "metrics.jsonl", "lm_loss", "lr")
    if not np.isfinite(losses).any():
        say(f"loss.png not drawn: no finite loss in {folder / 'metrics.jsonl'}")
        return None
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    label = "training"
    if reach := smoothing_reach(len(steps)):
        axes.plot(steps, losses, color=RAW, linewidth=0.8, label="training, each step")
        losses, label = smoothed(losses), f"training, mean of {2 * reach + 1} steps"
    axes.plot(steps, losses, "o" if len(steps) == 1 else "-", color=SMOOTH, linewidth=2, label=label)
    evaluated, values = _series(folder / "evals.jsonl", "lm_loss", split="validation")
    if len(evaluated):
        axes.plot(evaluated, values, "o", color=VALIDATION, mec="black", markersize=7, label="validation")
    _end_values(axes, (steps, losses, SMOOTH), (evaluated, values, VALIDATION))
    _mark_checkpoints(axes, folder / "log.txt")
    axes.set(title=folder.resolve().name, ylabel="loss (nats per token)")
    axes.legend(frameon=False, loc="upper right")
    below.plot(steps, rates, color=SMOOTH, linewidth=1.5)
    below.set(xlabel="iteration", ylabel="learning rate", ylim=(0, None))
    below.yaxis.set_major_formatter("{x:.4g}")
    below.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for each in (axes, below):
        each.grid(color="#dddddd", linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.savefig(folder / "loss.png")
    return folder / "loss.png"


def draw_pictures(log: RunLog) -> None:
    """Draw a run's pictures and log where they are; rank 0 only."""
    pictures = {"loss.png": plot_loss}
    if log.config.run.moe_per_layer_logging:
        pictures["experts.png"] = plot_experts
    for name, draw in pictures.items() if log.is_main else ():
        with log.attempt(name):
            try:
                if picture := draw(log.folder, log.line):
                    log.line(f"picture {picture}")
            except ImportError as error:
                log.line(str(error))


def _end_values(axes: Any, *curves: tuple[np.ndarray, np.ndarray, str]) -> None:
    """Write the last finite value of each of two curves beside it, that of the higher one on top."""
    ends = [(y[finite][-1], x[finite][-1], c) for x, y, c in curves if (finite := np.isfinite(y)).any()]
    for (y, x, c), place in zip(sorted(ends, reverse=True), ("bottom", "top")):
        axes.annotate(
            f"{y:.3f}", (x, y), (7, 0), textcoords="offset points", va=place, color=c, weight="bold"
        )


def _mark_checkpoints(axes: Any, log: Path) -> None:
    """Draw triangles for the checkpoints of log.txt, without those of dropped steps, and resumes dashed."""
    saved, resumed = set(), set()
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    for what, step in re.findall(r"^(saved|resumed) .*, step (\d+)$", text, re.MULTILINE):
        (saved if what == "saved" else resumed).add(int(step))
        saved = {each for each in saved if what == "saved" or each <= int(step)}
    look = dict(color=MARK, transform=axes.get_xaxis_transform())  # y: 0 is the bottom of the axes, 1 the top
    if resumed:
        axes.vlines(sorted(resumed), 0, 1, linestyles="--", linewidth=1, label="resumed", **look)
    if saved:
        axes.plot(sorted(saved), [0.02] * len(saved), "^", markersize=5, label="checkpoint", **look)


def plot_experts(folder: Path, say: Callable[[str], None] = print) -> Path | None:
    """Draw RUN/experts.png from experts.jsonl: a row for each expert of each layer, tokens as colour.

    White is an even share of the layer's tokens, red is up to four times more, blue up to four times less,
    hatched black no token at all. Returns the path; None, with a line to `say`, and raises ImportError, as
    `plot_loss`.
    """
    records = read_jsonl(folder / "experts.jsonl")
    keys = [key for key in (records[0] if records else ()) if key.endswith("/tokens")]
    if not keys:
        say(f"experts.png not drawn: no tokens of experts in {folder / 'experts.jsonl'}")
        return None
    figure = canvas("experts.png", (8, 6), dpi=100)
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Patch

    tokens = np.array([[record[key] for key in keys] for record in records], dtype=np.float64)
    load = tokens / np.maximum(tokens.mean(axis=2, keepdims=True), 1e-9)  # [steps, layers, experts]
    rows = np.ma.masked_equal(load.reshape(len(records), -1).T, 0)
    fewer, *between, more = LOADS
    colours = LinearSegmentedColormap.from_list("load", between).with_extremes(under=fewer, over=more)
    axes = figure.add_subplot()
    axes.patch.set(**DEAD)  # seen where the image is masked
    place = (records[0]["iteration"] - 0.5, records[-1]["iteration"] + 0.5, len(keys), 0)
    image = axes.imshow(np.ma.log2(rows), cmap=colours, vmin=-2, vmax=2, aspect="auto", extent=place)
    axes.set(title=f"{folder.resolve().name}: tokens of each expert", xlabel="iteration")
    names = [key.removesuffix("/tokens").removeprefix("decoder.").replace("s.", " ") for key in keys]
    shown = slice(None, None, 1 + len(names) // LABELS)
    axes.set_yticks(np.arange(len(names))[shown], names[shown], va="top", fontsize=8)
    axes.grid(axis="y", color=MARK, linewidth=0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(
        handles=[Patch(**DEAD, label="no token")], loc="lower right", bbox_to_anchor=(1, 1), frameon=False
    )
    bar = figure.colorbar(
        image, ticks=range(-2, 3), extend="both", label="tokens of an expert, as a multiple of an even share"
    )
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    figure.savefig(folder / "experts.png")
    return folder / "experts.png"


def _series(path: Path, *keys: str, split: str | None = None) -> list[np.ndarray]:
    """Read iterations and `keys` of a .jsonl file, of one split if given; empty if there is no file."""
    records = [record for record in read_jsonl(path) if split in (None, record.get("split"))]
    records = [record for record in records if "eval_only" not in record]
    return [np.array([float(record[key]) for record in records]) for key in ("iteration", *keys)]


def smoothing_reach(steps: int) -> int:
    """Steps to either side over which the loss is averaged: a fortieth of the run; of a short run none."""
    return min(steps // 40, 250) if steps >= 100 else 0


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over `smoothing_reach` steps to either side, over finite values only.

    At the first steps, where the loss falls steeply, it reaches less far on both sides; at the last ones only
    to the right, so that the curve ends with a mean of many steps, not with one step's own loss.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(smoothing_reach(len(values)), index)
    start, stop = index - half, np.minimum(index + half + 1, len(values))
    number = counts[stop] - counts[start]
    return np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)
