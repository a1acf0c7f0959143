"""The results of bench_cp.py as tables and as a picture."""

import statistics
from pathlib import Path

COLOURS = ("#0072b2", "#009e73", "#d55e00")  # Okabe and Ito's
HEADS = {
    "attention": "| row | who | ms forward | and backward | TFLOP/s a GPU | both | of one GPU | both "
    "| MiB sent | GiB beside | host ms | error |",
    "train": "| run | tokens | layers | ms a step | tokens/s/GPU | MFU | peak GiB (predicted) | loss |",
}
HEADS["memory"] = HEADS["dynamic"] = HEADS["train"]


def attention_lines(rows: list[dict]) -> list[str]:
    """Lines of the table for contenders of one case."""
    one = next((row for row in rows if row["name"] == "one gpu"), {})
    lines = []
    for row in rows:
        if "both_ms" not in row:
            lines.append(f"| {row['case']} | {row['name']} | failed: {failure(row)}{' |' * 10}")
            continue
        times = [f"{statistics.median(row[f'{part}_ms']):.3f}" for part in ("forward", "both")]
        rates = [f"{row[f'{part}_tflops']:.0f}" for part in ("forward", "both")]
        of_one = [
            f"{row[key] / one[key]:.3f}" if key in one else "-" for key in ("forward_tflops", "both_tflops")
        ]
        rest = [f"{sum(row['sent_bytes'].values()) / 2**20:.1f}", f"{row['peak_gib']:.2f}"]
        rest += [f"{row['host_ms']:.1f}", f"{row['error']:.1e}" if "error" in row else ""]
        lines.append(f"| {' | '.join([row['case'], row['name'], *times, *rates, *of_one, *rest])} |")
    return lines


def run_line(row: dict) -> str:
    """A line on a run."""
    predicted = row.get("predicted_gib", {}).get("sum", float("nan"))
    start = f"| {row['name']} | {row['seq_length']} | {row['layers']} |"
    if "mfu" not in row:
        why = row.get("left_out") or f"failed: {failure(row)}"
        return f"{start} {why} | | | ({predicted:.1f}) | |"
    mfu = f"{100 * row['mfu']:.1f} %" if row["mfu"] else "-"
    return (
        f"{start} {statistics.median(row['step_ms']):.1f} | {row['tokens_per_s_per_gpu']:.0f} | {mfu} | "
        f"{row['peak_gib']:.1f} ({predicted:.1f}) | {row['loss'][-1]:.3f} |"
    )


def failure(row: dict) -> str:
    """What went wrong last, in a few words."""
    texts = list(row.get("errors", {}).values())
    return in_short(texts[-1])[-160:].replace("|", "/") if texts else "not measured"


def in_short(traceback: str) -> str:
    """Its lines that are not indented, without the first."""
    lines = [line for line in traceback.splitlines() if line[:1].strip()]
    return " ".join(lines[1:])[:400] or traceback


def preamble(result: dict, script: str) -> None:
    """Print failures, profiles, what was left out, where it was measured."""
    for row in result["rows"]:
        for how, text in row.get("errors", {}).items():
            print(f"{row.get('case', '')} {row['name']} failed ({how}): {in_short(text)}")
        if profile := row.get("profile"):
            what = f"{profile['turns']} turns" if "turns" in profile else "a step"
            print(f"{row.get('case', '')} {row['name']}: milliseconds of {what} {profile['ms']}")
            for kernel, ms in list(profile["longest_ms"].items())[:12]:
                print(f"{ms:10.3f}  {kernel}")
    for left in result["skipped"]:
        print(f"no time was left for {left}")
    small = ", small" if result["small"] else ""
    print(f"\n{result['date']}  torch {result['torch']}  {result['ranks']} x {result['device']}{small}")
    print(f"{script} {result['command']}: {result['seconds']} s")


def report(result: dict) -> None:
    """Print all that is known, the table, and what it comes to last."""
    rows, part = result["rows"], result["part"]
    preamble(result, "bench_cp.py")
    if part == "attention":
        by_case = [[r for r in rows if r["case"] == case] for case in dict.fromkeys(r["case"] for r in rows)]
        lines = [line for some in by_case for line in attention_lines(some)]
    else:
        lines = [run_line(row) for row in rows]
    head = HEADS[part]
    print("\n".join([head, "|---|---|" + "--:|" * (head.count("|") - 3), *lines]))
    for line in {"memory": lengths, "dynamic": ratio}.get(part, lambda _: [])(result):
        print(line)


def lengths(result: dict) -> list[str]:
    """The longest rows: measured, and by plan/memory.py."""
    lines = []
    for again in dict.fromkeys(row["again"] for row in result["rows"]):
        done = [row["seq_length"] for row in result["rows"] if row["again"] == again and "mfu" in row]
        told = f"{again}: trained on rows of {max(done, default=0)} tokens"
        if again in result["longest"]:
            told += f", predicted up to {1024 * result['longest'][again]} in {result['capacity_gib']} GiB"
        lines.append(told)
    return lines


def ratio(result: dict) -> list[str]:
    """How much faster dynamic context parallelism is."""
    found = {row["name"]: row for row in result["rows"] if "mfu" in row}
    if len(found) < 2:
        return []
    fixed, dynamic = found["fixed"], found["dynamic"]
    steps = zip(fixed["step_ms"], dynamic["step_ms"], strict=True)
    each = ", ".join(f"{a / b:.2f}" for a, b in steps)
    gain = dynamic["tokens_per_s"] / fixed["tokens_per_s"]
    return [
        f"tokens a step {dynamic['tokens']}; largest difference of losses "
        f"{max(abs(a - b) for a, b in zip(fixed['loss'], dynamic['loss'], strict=True)):.1e}",
        f"dynamic is {gain:.3f} times as fast as fixed; step by step {each}",
    ]


def draw(path: Path, results: list[dict]) -> None:
    """Memory of a GPU by length of the row, measured and, by the first result that has a length, predicted.

    Raises ImportError without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for result in results if result["part"] == "memory" for row in result["rows"]]
    first = next(result for result in results if result["part"] == "memory")
    with matplotlib.rc_context({"svg.hashsalt": "cp", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.5, 4), dpi=120, layout="constrained")
        axes = figure.subplots()
        for again, colour in zip(
            dict.fromkeys(row["again"] for row in rows), ("#0072b2", "#009e73", "#d55e00")
        ):
            mine = sorted((r for r in rows if r["again"] == again), key=lambda row: row["seq_length"])
            told = {r["seq_length"]: r["predicted_gib"]["sum"] for r in mine[::-1] if "predicted_gib" in r}
            seen = [(r["seq_length"], r["peak_gib"]) for r in mine if "mfu" in r]
            axes.plot(*zip(*sorted(told.items()), strict=True), color=colour, linewidth=1, linestyle="--")
            points = zip(*seen, strict=True) if seen else ([], [])
            axes.plot(*points, color=colour, marker="o", linestyle="none", label=again)
        if first["capacity_gib"]:
            axes.axhline(first["capacity_gib"], color="#999999", linewidth=0.8)
        axes.set_xscale("log", base=2)
        ticks = sorted({row["seq_length"] for row in rows})
        axes.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
        top = 1.15 * (first["capacity_gib"] or max(row["peak_gib"] for row in rows if "mfu" in row))
        axes.set(ylim=(0, top), xlabel="tokens of the row", ylabel="peak GiB of a GPU")
        axes.set_title(f"{rows[0]['layers']} layers, {first['ranks']} x {first['device']}; dashed: predicted")
        axes.grid(color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
