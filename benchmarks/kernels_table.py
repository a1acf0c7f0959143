"""The results of kernels.py as a Markdown table, and what they must reach: the gates."""

from collections.abc import Iterator

SHARES = {  # of a copy's bandwidth: gate and goal; the first name that a case begins with counts
    "rms norm fwd": (0.85, 0.90),
    "layer norm fwd": (0.85, 0.90),
    "add+rms norm fwd": (0.85, 0.90),
    "rms norm bwd": (0.75, 0.85),
    "layer norm bwd": (0.75, 0.85),
    "add+rms norm bwd": (0.75, 0.85),
    "softmax fwd": (0.85, 0.90),
    "softmax bwd": (0.80, 0.88),
    "rope": (0.80, 0.88),
    "swiglu fwd": (0.88, 0.92),
    "swiglu bwd": (0.80, 0.88),
    "cross entropy": (0.80, 0.88),
    "fp8 cast+transpose": (0.75, 0.85),
    "fp8 cast": (0.85, 0.90),
    "adamw": (0.88, 0.92),
}
FACTORS = {  # how much faster than a peer
    "rms norm bwd": ("compile", 2.0),
    "layer norm bwd": ("compile", 2.0),
    "add+rms norm bwd": ("compile", 2.0),
    "cross entropy fwd+bwd": ("liger", 3.0),
    "swiglu bwd": ("liger", 1.4),
    "rope": ("liger", 1.7),
}


def table(result: dict) -> str:
    """Markdown: a line a way, and for ours the factor against the best of the others."""
    copy = result["copy_bytes_per_s"] / 1e12
    lines = [
        f"{result['device']}, torch {result['torch']}; a copy moves {copy:.2f} TB/s.",
        "",
        "| case | way | us | GB/s | of a copy | error | best other / ours |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        for way, told in row["ways"].items():
            if "us" not in told:
                lines.append(f"| {row['case']} | {way} | failed | | | | |")
                continue
            numbers = f"{told['us']:.1f} | {told['gb_per_s']:.0f} | {100 * told['share']:.1f} %"
            best = best_other(row) if way == "kernel" else None
            against = f"{best[1] / told['us']:.2f} ({best[0]})" if best else ""
            lines.append(f"| {row['case']} | {way} | {numbers} | {told['error']:.1e} | {against} |")
    return "\n".join(lines) + "\n"


def best_other(row: dict) -> tuple[str, float] | None:
    """Name and microseconds of the fastest way that is not ours."""
    times = [(told["us"], way) for way, told in row["ways"].items() if way != "kernel" and "us" in told]
    return min(times)[::-1] if times else None


def gates(rows: list[dict]) -> Iterator[str]:
    """Per case a line with all that it must reach, each met or missed."""
    for row in rows:
        ours, words = row["ways"].get("kernel", {}), []
        if "us" not in ours:
            yield f"{row['case']:<30} FAILED or not measured"
            continue
        share = next((SHARES[name] for name in SHARES if row["case"].startswith(name)), None)
        if share:
            words.append(f"{100 * ours['share']:5.1f} %")
            words += [
                f"{what} {100 * needed:.0f} {verdict(ours['share'] >= needed)}"
                for what, needed in zip(("gate", "goal"), share)
            ]
        peer, factor = next((FACTORS[n] for n in FACTORS if row["case"].startswith(n)), (None, 0))
        if "us" in row["ways"].get(peer, {}):
            found = row["ways"][peer]["us"] / ours["us"]
            words.append(f"{found:.2f} x {peer}, {factor} {verdict(found >= factor)}")
        if best := best_other(row):
            found = best[1] / ours["us"]
            words.append(f"{found:.2f} x the best other ({best[0]}) {verdict(found >= 1)}")
        yield f"{row['case']:<30} " + " | ".join(words)


def verdict(met: bool) -> str:
    """One word."""
    return "met" if met else "MISSED"
