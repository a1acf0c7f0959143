"""The runs of fp8_losses.py, recipe by recipe beside bf16: as numbers, as a table, as a picture."""

import itertools
import textwrap
from pathlib import Path

import numpy as np

from nanomegatron.fp8 import RECIPES

LAST, POINTS = 50, 200  # steps that the final loss is the mean of; points of a curve
NAMES = ("bf16", *RECIPES)
COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")  # Okabe and Ito's
FINALS = {"train_loss": "training loss", "valid_loss": "validation loss"}


def pieces(values: np.ndarray) -> list[np.ndarray]:
    """Values of all steps in at most POINTS parts, in order."""
    return np.array_split(values, min(POINTS, len(values)))


def compared(runs: list[dict]) -> dict[str, dict]:
    """By recipe and final loss: mean, least and most over its seeds, and beside them bf16's.

    difference: over the seeds that both have. Where bf16 has several, within: of the mean; seeds_within: of
    how many of the seeds.
    """
    found: dict[str, dict] = {}
    good = [run for run in runs if "failed" not in run]
    for recipe in dict.fromkeys(run["recipe"] for run in good):
        mine = [run for run in good if run["recipe"] == recipe]
        row = found[recipe] = {"seeds": sorted(run["seed"] for run in mine)}
        row["tokens_per_s"] = sum(run["tokens_per_s"] for run in mine) / len(mine)
        for key in FINALS:
            values = {run["seed"]: float(run[key]) for run in mine}
            bf16 = {run["seed"]: float(run[key]) for run in good if run["recipe"] == "bf16"}
            row[key] = told = spread(list(values.values()))
            both = values.keys() & bf16.keys()
            if recipe != "bf16" and both:
                told["difference"] = spread([values[seed] - bf16[seed] for seed in both])
            if recipe != "bf16" and len(bf16) > 1:
                told["within"] = within(told["mean"], list(bf16.values()))
                told["seeds_within"] = sum(within(x, list(bf16.values())) == "yes" for x in values.values())
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Mean, least and most; NaN where one of them is."""
    return {"mean": float(np.mean(values)), "min": float(np.min(values)), "max": float(np.max(values))}


def within(loss: float, bf16: list[float]) -> str:
    """Where a loss lies beside those of bf16: "yes", "below" or "above"; "no" if a NaN is among them."""
    low, high = np.min(bf16), np.max(bf16)
    if low <= loss <= high:
        return "yes"
    return "below" if loss < low else "above" if loss > high else "no"


def table(runs: list[dict]) -> str:
    """Markdown: a line a recipe and final loss."""
    head = "recipe | loss | seeds | mean | min to max | difference to bf16, same seeds | mean within"
    lines = [f"| {head} | seeds within | k tokens/s |", "|---|---|--:|--:|--:|--:|---|--:|--:|"]
    rows = compared(runs)
    for key, words in FINALS.items():
        for recipe, row in rows.items():
            told, seeds, by, where = row[key], len(row["seeds"]), "-", "- | -"
            if d := told.get("difference"):
                by = f"{d['mean']:+.4f} ({d['min']:+.4f} to {d['max']:+.4f})"
            if "within" in told:
                where = f"{told['within']} | {told['seeds_within']} of {seeds}"
            lines.append(
                f"| {recipe} | {words} | {seeds} | {told['mean']:.4f} | {told['min']:.4f} to "
                f"{told['max']:.4f} | {by} | {where} | {row['tokens_per_s'] / 1e3:.1f} |"
            )
    return "\n".join(lines)


def report(result: dict) -> None:
    """Print what went wrong, and the table last."""
    for run in result["runs"]:
        if run.get("skipped"):
            print(f"{run['recipe']}, seed {run['seed']}: {run['skipped']} steps skipped, not finite")
        if "failed" in run:
            print(f"{run['recipe']}, seed {run['seed']} FAILED with exit code {run['exit_code']}; its end:")
            print("\n".join(f"    {line}" for line in run["failed"]))
    text = ", ".join(f"{count / 1e6:.2f} M tokens {name}" for name, count in result["tokens"].items())
    device = f"{result['device']}, {'our kernels' if result['kernels'] else 'plain torch'}"
    print(f"\n{result['date']}  torch {result['torch']}  {device}  --jobs {result['jobs']}")
    print(f"{result['model']}: {result['train_iters']} steps; {text}")
    print(table(result["runs"]))


def draw(path: Path, results: list[dict]) -> None:
    """A row a model: the losses, and their difference to bf16's of the same seeds. Raises ImportError."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "fp8", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9.5, 3.7 * len(results)), dpi=120, layout="constrained")
        for axes, result in zip(figure.subplots(len(results), 2, squeeze=False), results):
            draw_model(*axes, result)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_model(left, right, result: dict) -> None:
    """Of each recipe the mean over its seeds, smoothed, from a twentieth of the run on."""
    x = np.array([part.mean() for part in pieces(np.arange(1, result["train_iters"] + 1))])
    width = max(1, round(LAST * len(x) / result["train_iters"]))
    curves: dict[str, dict[int, np.ndarray]] = {}
    for run in result["runs"]:
        if "failed" not in run:
            curve = trailing(np.array(run["curve"], dtype=float), width)
            curves.setdefault(run["recipe"], {})[run["seed"]] = curve
    bf16, shown = curves.get("bf16", {}), x > result["train_iters"] / 20
    if len(bf16) > 1:
        rows = np.array(list(bf16.values()))
        low, high = (edge - rows.mean(axis=0) for edge in (rows.min(axis=0), rows.max(axis=0)))
        style = dict(color="#dddddd", linewidth=0, label="seeds of bf16, least to most")
        right.fill_between(x[shown], low[shown], high[shown], **style)
    for recipe, colour in zip(dict.fromkeys((*NAMES, *curves)), itertools.cycle(COLOURS)):
        mine = curves.get(recipe, {})
        if mine:
            mean = np.mean(list(mine.values()), axis=0)
            left.plot(x[shown], mean[shown], color=colour, linewidth=1.2, label=textwrap.fill(recipe, 24))
        if both := mine.keys() & bf16.keys():
            gap = np.mean([mine[seed] - bf16[seed] for seed in both], axis=0)
            right.plot(x[shown], gap[shown], color=colour, linewidth=1.2)
    count = max(map(len, curves.values()), default=0)
    left.set(
        title=f"{result['model']}, {result['device']}, {count} seed{'s' * (count > 1)}",
        ylabel="training loss",
    )
    right.set(title="difference to bf16 with the same seeds", ylabel="loss - loss of bf16")
    for axes in (left, right):
        axes.set_xlabel(f"step (means of up to {LAST})")
        axes.grid(color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")


def trailing(values: np.ndarray, width: int) -> np.ndarray:
    """Of each the mean with the up to width - 1 before it."""
    sums, stop = np.cumsum([0.0, *values]), np.arange(1, len(values) + 1)
    start = np.maximum(stop - width, 0)
    return (sums[stop] - sums[start]) / (stop - start)
