"""The loss curve as a picture, loss.png."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from nanomegatron.metrics_writers import read_jsonl

# After Okabe and Ito: told apart by colour-blind readers, and by their brightness in grey.
RAW, SMOOTH, VALIDATION = "#9ad0f0", "#0072b2", "#d55e00"


def plot_loss(run_folder: str | Path, say: Callable[[str], None] = print) -> Path | None:
    """Draw RUN/loss.png: training loss of each step, thin, and smoothed; validation as dots.

    None, with a line to `say`, when there is nothing to draw or no matplotlib.
    """
    folder = Path(run_folder)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        say('loss.png needs matplotlib: pip install -e ".[viz]"')
        return None
    steps, losses = _series(folder / "metrics.jsonl")
    if not np.isfinite(losses).any():
        say(f"loss.png not drawn: no finite loss in {folder / 'metrics.jsonl'}")
        return None
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
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


def _series(path: Path, split: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and losses of a .jsonl file, of one split if given; empty without the file."""
    rows = [
        (r["iteration"], float(r["lm_loss"])) for r in read_jsonl(path) if split in (None, r.get("split"))
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a fortieth of the run, shorter at the ends, over finite values alone."""
    reach = min(len(values) // 80, 250)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(reach, np.minimum(index, len(values) - 1 - index))
    start, stop = index - half, index + half + 1
    number = counts[stop] - counts[start]
    return np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)
