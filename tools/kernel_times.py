"""What a step's time on the GPU goes into, of torch.profiler's trace: by class, and what is hidden.

    python train.py ... --profile --profile-step-start 5 --profile-step-end 8
    python tools/kernel_times.py runs/NAME/profile-rank0.json --steps 3

    stream 7     | gemm | gemm |  norm  |      gemm      |      compute: all but communication
    stream 20          |  reduce-scatter  |  all-gather          |
                                                          ^^^^^^^^   exposed: no compute beside it
    one period   from the last AdamW kernel of a step to that of the next, so that what a step leaves running
                 behind its end (gathers of parameters) is seen beside the forward that hides it

A communication kernel's time includes its waiting for other ranks. Copies between GPUs are communication:
those that the profiler calls PtoP, and device-to-device copies on streams other than the one with the most
matmul and attention time (symmetric memory looks like one's own).
"""

import argparse
import json
from collections import Counter
from pathlib import Path

# The first whose word is in the name, in lower case, holds. Inductor names kernels after their ops.
CLASSES = (
    ("communication", ("nccl", "ptop", "barrier_kernel", "put_signal", "wait_signal", "all_gather_kernel")),
    ("other", ("triton_poi", "triton_red", "triton_per", "triton_for")),
    ("optimizer", ("adam", "lpnorm", "sum_squares", "sum_totals")),
    ("norm", ("norm_forward", "norm_backward", "add_up_parts", "norm_fp8", "bias_dropout")),
    ("swiglu", ("gated_forward", "gated_backward", "gated_fp8")),
    ("gelu", ("gelu_forward", "gelu_backward", "gelu_fp8")),
    ("column sums", ("sum_rows", "add_up_parts")),  # of biases, and the last step of the norms' and GELU's
    ("rope", ("rope_turn_heads",)),
    ("loss", ("cross_entropy",)),
    ("attention", ("sdpa", "fmha", "flash", "attention")),
    ("gemm", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "triton_mm", "triton_tem")),
    ("casts", ("fp8_",)),  # by themselves: norms and units that cast are what they are
)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace that run on the GPU


def kind(name: str) -> str:
    """The class of a kernel: torch's own for norms, activations, loss and the like are `other`."""
    low = name.lower()
    return next((label for label, words in CLASSES if any(word in low for word in words)), "other")


def table(trace: Path, steps: int) -> dict | None:
    """Milliseconds of the last period of `steps`: by class, exposed communication, idle, longest kernels.

    trace: of Chrome's format, `ts` and `dur` in microseconds; None without a trace, or of a CPU.
    """
    events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
    events = [event for event in events if event.get("cat") in DEVICE]
    if not events:
        return None
    kinds = [kind(event["name"]) for event in events]
    streams = Counter()
    for event, label in zip(events, kinds, strict=True):
        streams[event.get("args", {}).get("stream")] += event["dur"] * (label in ("gemm", "attention"))
    main = streams.most_common(1)[0][0]
    begin, end = period([e for e in events if "adam" in e["name"].lower()], steps) or (
        min(e["ts"] for e in events),
        max(e["ts"] + e["dur"] for e in events),
    )
    sums, longest, spans = Counter(), Counter(), {"communication": [], "compute": []}
    for event, label in zip(events, kinds, strict=True):
        if "dtod" in event["name"].lower() and event.get("args", {}).get("stream") != main:
            label = "communication"
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if start < stop:
            sums[label] += stop - start
            longest[event["name"][:90]] += stop - start
            spans["communication" if label == "communication" else "compute"].append((start, stop))
    communication, compute = union(spans["communication"]), union(spans["compute"])
    together = length(union(communication + compute))
    exposed = together - length(compute)
    found = {"period": end - begin, **sums, "communication busy": length(communication)}
    found |= {"communication exposed": exposed, "idle": end - begin - together}
    return {
        "ms": {name: round(micro / 1e3, 3) for name, micro in found.items()},
        "longest_ms": {name: round(micro / 1e3, 3) for name, micro in longest.most_common(25)},
    }


def period(updates: list[dict], steps: int) -> tuple[float, float] | None:
    """(begin, end) of the last step, by the ends of the updates' kernels, of which each step has as many."""
    if steps < 2 or not updates or len(updates) % steps:
        return None
    ends = sorted(event["ts"] + event["dur"] for event in updates)
    each = len(ends) // steps
    return ends[-each - 1], ends[-1]


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def length(spans: list[tuple[float, float]]) -> float:
    """Of stretches that do not overlap."""
    return sum(stop - start for start, stop in spans)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, required=True, help="that were profiled")
    args = parser.parse_args()
    print(json.dumps(table(args.trace, args.steps), indent=1))
