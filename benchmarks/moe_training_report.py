"""The runs of moe_training.py, dense beside those with experts: as numbers, as a table, as pictures."""

import json
import shutil
import tempfile
import textwrap
from itertools import cycle
from pathlib import Path

import numpy as np

from nanomegatron.report.plots import plot_experts

LAST, POINTS = 50, 200  # steps that the last numbers are the mean of; points of a curve
COLUMNS = 100  # points of an expert's load
COLOURS = ("#000000", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's


def pieces(values: np.ndarray, most: int = POINTS) -> list[np.ndarray]:
    """Values of all steps in so many parts at most, in order."""
    return np.array_split(values, min(most, len(values)))


def places(run: dict, most: int = POINTS) -> np.ndarray:
    """The steps that the points of a run's curves are the means of."""
    return np.array([part.mean() for part in pieces(np.arange(1, run["steps"] + 1), most)])


def by_name(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs that have not failed, in order."""
    good = [run for run in runs if "failed" not in run]
    return {name: [r for r in good if r["run"] == name] for name in dict.fromkeys(r["run"] for r in good)}


def summary(runs: list[dict]) -> dict[str, dict]:
    """By run: seeds, means over these, and the validation loss against dense's of the same seeds."""
    found: dict[str, dict] = {}
    names = by_name(runs)
    dense = {run["seed"]: run["valid_loss"] for run in names.get("dense", [])}
    for name, mine in names.items():
        row = found[name] = {"seeds": sorted(run["seed"] for run in mine), "model": mine[0]["model"]}
        for key in ("valid_loss", "bits_per_byte", "train_loss", "tflop_a_step", "busiest_last"):
            if mine[0].get(key) is not None:
                row[key] = float(np.mean([run[key] for run in mine]))
        both = {run["seed"]: run["valid_loss"] - dense[run["seed"]] for run in mine if run["seed"] in dense}
        if name != "dense" and both:
            row["against_dense"] = both
    return found


def table(runs: list[dict]) -> str:
    """Markdown: a line a run, of all its seeds."""
    head = "run | parameters | TFLOP a step | validation loss, by seed | against dense | bits per byte"
    lines = [f"| {head} | busiest expert, last {LAST} steps |", "|---|--:|--:|--:|--:|--:|--:|"]
    names = by_name(runs)
    for name, row in summary(runs).items():
        each = sorted(names[name], key=lambda run: run["seed"])
        losses = ", ".join(f"{run['valid_loss']:.3f}" for run in each)
        by = ", ".join(f"{gap:+.3f}" for _, gap in sorted(row.get("against_dense", {}).items())) or "-"
        busy = ", ".join(f"{run['busiest_last']:.2f}" for run in each if "busiest_last" in run) or "-"
        size = row["model"].removesuffix(" params, float32")
        bits = f"{row['bits_per_byte']:.3f}" if "bits_per_byte" in row else "-"
        cells = (name, size, f"{row['tflop_a_step']:.4f}", losses, by, bits, busy)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(result: dict) -> None:
    """Print what went wrong, and the table last."""
    for run in result["runs"]:
        if "failed" in run:
            print(f"{run['run']}, seed {run['seed']} FAILED with exit code {run['exit_code']}; its end:")
            print("\n".join(f"    {line}" for line in run["failed"]))
    text = ", ".join(f"{count / 1e6:.2f} M tokens {name}" for name, count in result["tokens"].items())
    print(f"\n{result['date']}  torch {result['torch']}  {result['device']}  {result['flags']}\n{text}")
    print(table(result["runs"]))


def draw(path: Path, result: dict) -> None:
    """Training losses, and how busy the busiest expert is, over the steps. Raises ImportError."""
    import matplotlib
    from matplotlib.figure import Figure

    names = by_name(result["runs"])
    steps = max(run["steps"] for mine in names.values() for run in mine)
    with matplotlib.rc_context({"svg.hashsalt": "moe", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9.5, 3.7), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2)
        for (name, mine), colour in zip(names.items(), cycle(COLOURS)):
            for axes, key in ((left, "curve"), (right, "busiest")):
                if key in mine[0]:
                    curve = smooth(np.mean([run[key] for run in mine], axis=0))
                    style = dict(color=colour, linewidth=1.2, label=textwrap.fill(name, 24))
                    axes.plot(places(mine[0]), curve, **style)
        seeds = max(len(mine) for mine in names.values())
        device = f"{result['device']}, {seeds} seed{'s' * (seeds > 1)}"
        left.set(title=f"training loss, {device}", ylabel="nats per token", xlim=(steps / 20, steps))
        ends = [y for line in left.get_lines() for y in line.get_ydata()[len(line.get_ydata()) // 20 :]]
        left.set_ylim(min(ends) - 0.1, max(ends) + 0.1)
        right.set(title="tokens of the busiest expert", ylabel="times an even share", xlim=(0, steps))
        right.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.grid(color="#eeeeee", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize="small")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def smooth(values: np.ndarray, reach: int = 3) -> np.ndarray:
    """Of each the mean with up to `reach` neighbours on either side."""
    near = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return np.array([part.mean() for part in near])


def heat(path: Path, result: dict) -> None:
    """The heat map of a run (`report/plots.py`), of each one's first and last layer. Raises ImportError."""
    import matplotlib  # noqa: F401

    runs = [run for run in result["runs"] if "load" in run]
    shown = {}
    for run in runs:
        for key in (next(iter(run["load"])), next(reversed(run["load"]))):
            layer = key.removeprefix("decoder.layers.").removesuffix("/tokens")
            shown[f"{run['run']}\nlayer {layer}/tokens"] = run["load"][key]
    at = min((places(run, COLUMNS) for run in runs), key=len).tolist()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "tiny-moe-cpu"
        home.mkdir()
        lines = ({"iteration": x} | {key: each[i] for key, each in shown.items()} for i, x in enumerate(at))
        (home / "experts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        shutil.copyfile(plot_experts(home), path)
