"""The results of measure.py: a row for each case in its JSON, and tables to print.

python -m benchmarks.report tp.json dp.json                    the tables again
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import Case

SPEEDS = ("tokens_per_s", "tflops_per_gpu", "mfu")
LAST, POINTS = 50, 200  # steps that a final loss is the mean of; points of a curve
FINALS = {"valid_loss": "validation loss", "train_loss": f"training loss, last {LAST} steps"}


def facts(case: Case, turns: list[dict]) -> dict[str, Any]:
    """What both kinds of rows begin with."""
    row = {"name": case.name, "program": case.program, "flags": case.flags, "gpus": case.gpus}
    row["problems"] = [turn["problem"] for turn in turns if "problem" in turn]
    return row | {"left_out": next((turn["left_out"] for turn in turns if "left_out" in turn), "")}


def summary(cases: list[Case], turns: dict[str, list[dict]]) -> list[dict[str, Any]]:
    """A row a case: speeds over its repetitions, memory, and whether its first loss is as it must be."""
    rows: dict[str, dict] = {}
    for case in cases:
        row = rows[case.name] = facts(case, turns[case.name])
        good = [turn for turn in turns[case.name] if "step_ms" in turn]
        if not good:
            continue
        row |= {key: [turn[key] for turn in good] for key in ("step_ms", "loss", "used_gib")}
        row["median_ms"] = statistics.median(ms for turn in good for ms in turn["step_ms"])
        medians = [statistics.median(turn["step_ms"]) for turn in good]
        for key in SPEEDS:  # the work of a step over median_ms
            work = [turn[key] * ms for turn, ms in zip(good, medians, strict=True) if turn[key] is not None]
            row[key] = statistics.median(work) / row["median_ms"] if work else None
        for key in ("peak_gib", "predicted_gib", "imbalance"):
            values = [turn[key] for turn in good if turn.get(key) is not None]
            row[key] = statistics.median(values) if values else None
        row["tokens_per_s_per_gpu"] = row["tokens_per_s"] / case.gpus
        if bubbles := [turn["bubble_percent"] for turn in good if "bubble_percent" in turn]:
            row["bubble_percent"] = bubbles[-1]
        if profiles := [turn["profile"] for turn in good if "profile" in turn]:
            row["profile"] = profiles[-1]
        if case.like in rows and "loss" in rows[case.like]:
            first = float(rows[case.like]["loss"][0][0])
            changes = [abs(float(losses[0]) / first - 1) for losses in row["loss"]]
            row["loss_change"] = finite(np.max(changes))
            if not float(row["loss_change"]) <= case.tolerance:  # NaN is no match either
                row["problems"].append(f"first loss is not that of {case.like}")
    return list(rows.values())


def losses_of(steps: list[dict]) -> dict[str, Any]:
    """The curves of a whole run, in at most POINTS means, and its training loss at the end."""
    losses = np.array([float(step["lm_loss"]) for step in steps])
    found = {"steps": len(steps), "train_loss": finite(losses[-LAST:].mean()), "curve": means(losses)}
    found["skipped"] = sum(step["skipped"] for step in steps)
    busy = np.array([step.get("moe_load_imbalance", np.nan) for step in steps])
    if np.isfinite(busy).all():
        found |= {"busiest": means(busy), "busiest_last": finite(busy[-LAST:].mean())}
    return found


def means(values: np.ndarray) -> list[float | str]:
    """Of neighbouring steps, in at most POINTS parts."""
    return [finite(part.mean()) for part in np.array_split(values, min(POINTS, len(values)))]


def finite(x: float) -> float | str:
    """A number of JSON, which has no NaN: that is a word which float() reads."""
    return round(float(x), 6) if math.isfinite(x) else str(x)


def losses_summary(cases: list[Case], turns: dict[str, list[dict]]) -> list[dict[str, Any]]:
    """A row a case: every seed's run, the means, and how far they are from the first case's of these seeds.

    within: whether the mean lies between the smallest and the largest of the first case's seeds.
    """
    rows, base = [], cases[0].name
    first = {turn["seed"]: turn for turn in turns[base] if "valid_loss" in turn}
    for case in cases:
        row, runs = facts(case, turns[case.name]), [t for t in turns[case.name] if "valid_loss" in t]
        rows.append(row | {"runs": runs})
        for key in FINALS if runs else ():
            values = {run["seed"]: float(run[key]) for run in runs}
            stats = {"mean": finite(np.mean([*values.values()])), "each": [run[key] for run in runs]}
            if case.name != base and (both := values.keys() & first.keys()):
                gaps = [values[seed] - float(first[seed][key]) for seed in sorted(both)]
                stats |= {"difference": finite(np.mean(gaps)), "differences": [finite(gap) for gap in gaps]}
            if case.name != base and len(first) > 1:
                others = [float(run[key]) for run in first.values()]
                stats["within"] = min(others) <= float(stats["mean"]) <= max(others)
            rows[-1][key] = stats
    return rows


def write(path: Path, result: dict[str, Any]) -> None:
    """The JSON, with a line for each case."""
    top = {key: value for key, value in result.items() if key != "cases"}
    lines = [f' "{key}": {json.dumps(value, allow_nan=False)},' for key, value in top.items()]
    rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in result.get("cases", []))
    path.write_text("\n".join(["{", *lines, ' "cases": [', rows, " ]", "}", ""]))


def tables(result: dict[str, Any]) -> str:
    """All that is known, the table last."""
    lines = [f"{row['name']}: {problem}" for row in result["cases"] for problem in row["problems"]]
    for row in result["cases"]:
        if bubble := row.get("bubble_percent"):
            words = ", ".join(f"{percent} % {kind}" for kind, percent in bubble.items())
            lines.append(f"{row['name']}: a bubble of {words}")
        if profile := row.get("profile"):
            lines.append(f"{row['name']}: milliseconds of a step {profile['ms']}")
    small = ", small" * result["small"]
    lines += [
        "",
        f"{result['date']}  torch {result['torch']}  {result['device']}{small}",
        result["command"],
        "",
    ]
    losses = any("runs" in row for row in result["cases"])
    return "\n".join(lines + (losses_lines if losses else speed_lines)(result["cases"]))


def speed_lines(rows: list[dict]) -> list[str]:
    """Markdown: a line a case."""
    head = (
        "case | GPUs | ms a step | tokens/s/GPU | MFU | of one GPU | peak GiB (plan) | loss | new/old | check"
    )
    lines = [f"| {head} |", "|---|" + "--:|" * 8 + "---|"]
    one = next((row.get("mfu") for row in rows if row["name"] == "one gpu"), None)
    for row in rows:
        start = f"| {row['name']} | {row['gpus']} |"
        if "median_ms" not in row:
            why = row["left_out"] or ("FAILED" if row["problems"] else "not run")
            lines.append(f"{start} {why} | | | | | | | |")
            continue
        mfu = f"{100 * row['mfu']:.1f} %" if row["mfu"] else "-"
        share = f"{row['mfu'] / one:.3f}" if one and row["mfu"] else "-"
        ratio = row.get("against_old", {}).get("ratio")
        plan = f" ({row['predicted_gib']:.1f})" if row["predicted_gib"] else ""
        loss = f"{float(row['loss'][-1][0]):.4f} to {float(row['loss'][-1][-1]):.4f}"
        check = f"loss {float(row['loss_change']):.0e}" if "loss_change" in row else "-"
        check += "; ".join(["", *row["problems"], *row.get("against_old", {}).get("problems", [])])
        lines.append(
            f"{start} {row['median_ms']:.1f} | {row['tokens_per_s_per_gpu']:.0f} | {mfu} | {share} | "
            f"{row['peak_gib']:.1f}{plan} | {loss} | "
            f"{f'{ratio:.3f}' if ratio else '-'} | {check} |"
        )
    return lines


def losses_lines(rows: list[dict]) -> list[str]:
    """Markdown: a line a case and kind of loss."""
    head = (
        "case | loss | each seed | mean | against the first, same seeds | within its seeds | busiest expert"
    )
    lines = [f"| {head} |", "|---|---|--:|--:|--:|---|--:|"]
    for key, words in FINALS.items():
        for row in rows:
            if key not in row:
                lines.append(
                    f"| {row['name']} | {words} | {'FAILED' if row['problems'] else 'not run'} | | | | |"
                )
                continue
            stats, gap = row[key], row[key].get("difference")
            each = ", ".join(f"{float(x):.4f}" for x in stats["each"])
            within = {True: "yes", False: "no", None: "-"}[stats.get("within")]
            busy = ", ".join(f"{run['busiest_last']:.2f}" for run in row["runs"] if "busiest_last" in run)
            against = "-" if gap is None else f"{float(gap):+.4f}"
            lines.append(
                f"| {row['name']} | {words} | {each} | {float(stats['mean']):.4f} | {against} | {within} | "
                f"{busy or '-'} |"
            )
    return lines


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of measure.py")
    args = parser.parse_args(words)
    for path in args.results:
        print(tables(json.loads(path.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
