"""Pictures of a run: the loss curve in loss.png, and the load of each expert in experts.png."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanomegatron.report.schedule_draw import canvas
from nanomegatron.report.writers import read_jsonl

# After Okabe and Ito: distinct for colour-blind readers, and by their brightness in grey.
RAW, SMOOTH, VALIDATION = "#9ad0f0", "#0072b2", "#d55e00"
LAYERS, COLUMNS = 12, 400  # at most in experts.png: panels, and columns over which steps are averaged


def plot_loss(run_folder: str | Path, say: Callable[[str], None] = print) -> Path | None:
    """Draw RUN/loss.png: training loss of each step, thin, and smoothed; validation as dots.

    Returns its path; None, with a line to `say`, if there is nothing to draw or no matplotlib.
    """
    folder = Path(run_folder)
    if (figure := _figure("loss.png", 4.5, say)) is None:
        return None
    steps, losses = _series(folder / "metrics.jsonl")
    if not np.isfinite(losses).any():
        say(f"loss.png not drawn: no finite loss in {folder / 'metrics.jsonl'}")
        return None
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=RAW, linewidth=0.8, label="training, each step")
    axes.plot(steps, smoothed(losses), color=SMOOTH, linewidth=2, label="training, smoothed")
    steps, losses = _series(folder / "evals.jsonl", split="validation")
    if len(steps):
        label = f"validation, last {losses[-1]:.3f}"
        axes.plot(steps, losses, "o", color=VALIDATION, markeredgecolor="black", markersize=7, label=label)
    axes.set(title=folder.resolve().name, xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(folder / "loss.png")
    return folder / "loss.png"


def plot_experts(run_folder: str | Path, say: Callable[[str], None] = print) -> Path | None:
    """Draw RUN/experts.png from experts.jsonl: a panel per layer, experts over steps, tokens as colour.

    White is an even share of tokens, red is up to four times more, blue up to four times less. Of many layers
    a selection at equal distances is shown. Returns the path; None, with a line to `say`, as `plot_loss`.
    """
    folder = Path(run_folder)
    records = read_jsonl(folder / "experts.jsonl")
    found = [key for key in (records[0] if records else ()) if key.endswith("/tokens")]
    if not found:
        say(f"experts.png not drawn: no tokens of experts in {folder / 'experts.jsonl'}")
        return None
    shown = [found[i] for i in np.unique(np.linspace(0, len(found) - 1, LAYERS).round().astype(int))]
    if (figure := _figure("experts.png", 1.2 + 1.3 * len(shown), say)) is None:
        return None
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    ends = records[0]["iteration"] - 0.5, records[-1]["iteration"] + 0.5
    for axes, key in zip(panels, shown, strict=True):
        tokens = np.array([record[key] for record in records], dtype=np.float64)
        columns = np.array_split(tokens, min(COLUMNS, len(tokens)))
        load = np.stack([each.sum(0) / max(each.sum() / tokens.shape[1], 1e-9) for each in columns], axis=1)
        place = (*ends, tokens.shape[1] - 0.5, -0.5)
        scale = dict(cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto", interpolation="nearest")
        image = axes.imshow(np.log2(np.maximum(load, 2.0**-9)), extent=place, **scale)
        axes.set_ylabel(key.removesuffix("/tokens").removeprefix("decoder.").replace("s.", " "), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.yaxis.get_major_locator().set_params(integer=True)
    panels[0].set_title(f"{folder.resolve().name}: tokens of each expert", fontsize=10)
    panels[-1].set_xlabel("iteration")
    bar = figure.colorbar(image, ax=panels, ticks=range(-2, 3), label="share of the tokens, over an even one")
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    figure.savefig(folder / "experts.png")
    return folder / "experts.png"


def _figure(name: str, height: float, say: Callable[[str], None]) -> Any:
    """Return an empty figure of 8 by `height` inches; None, with a line to `say`, without matplotlib."""
    try:
        return canvas(name, (8, height), dpi=100)
    except ImportError as error:
        say(str(error))
        return None


def _series(path: Path, split: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Read iterations and losses of a .jsonl file, of one split if given; empty if there is no file."""
    records = [record for record in read_jsonl(path) if split in (None, record.get("split"))]
    rows = [(record["iteration"], float(record["lm_loss"])) for record in records]
    table = np.array(rows, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a fortieth of the run, shorter at the ends, over finite values only."""
    reach = min(len(values) // 80, 250)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(reach, np.minimum(index, len(values) - 1 - index))
    start, stop = index - half, index + half + 1
    number = counts[stop] - counts[start]
    return np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)
