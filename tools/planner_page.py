"""docs/planner.md: what the planner predicts for every run that was measured, and for published ones.

python tools/planner_page.py            is the page current? exit code 1 if not
python tools/planner_page.py --write    write it
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, it finds the package of its own checkout

from nanomegatron.config.check import resolve  # noqa: E402
from nanomegatron.config.cli import parse  # noqa: E402
from nanomegatron.plan.cluster import load_cluster  # noqa: E402
from nanomegatron.plan.flops import flops_per_iteration  # noqa: E402
from nanomegatron.plan.layer import Machine  # noqa: E402
from nanomegatron.plan.room import Planned  # noqa: E402
from nanomegatron.plan.step_time import StepTime, padded_vocab, step_time  # noqa: E402
from tests.plan_rows import rows  # noqa: E402

PAGE = ROOT / "docs/planner.md"
PUBLISHED = ROOT / "benchmarks/results/published-layouts.json"
DIFFERS = {  # by the beginning of a row's name
    "llama3 405b": "failures and slow links, which no plan has; weights gathered by FSDP",
    "bridge llama3 8b": "optim_grads in the plan; eight GPUs at their limit of power",
    "bridge llama3 70b": "its tp sends FP8 beside matmuls; in the plan a part of it is exposed",
    "bridge llama3 405b": "the same",
    "bridge qwen3 30b": "experts are in bf16 in the plan; launches limit theirs",
    "bridge qwen3 235b": "experts are in bf16 in the plan; dispatch is the largest part",
    "bridge qwen3 8b": "fused norms, rotary, SwiGLU and loss in the plan",
    "automodel": "FSDP gathers weights in every microbatch, not so in the plan",
    "megatron 7.1b": "head count and micro batch are assumed",
    "megatron ci": "eight GPUs; fused loss and kernels in the plan",
    "megatron a100 selective": "rates of the A100 are those of data sheets",
    "megatron a100": "recomputes everything; its attention writes scores to memory",
    "kempnerforge": "recomputes whole layers in eager torch",
    "llmq": "rows of 1,024 tokens; the same limit of power",
    "torchtitan": "torch.compile and FSDP2",
}
HEAD = """\
# The planner

`nanomegatron plan` predicts the memory of every rank and the time of a step without a GPU, and chooses a
layout by them. Memory: `plan/memory.py`, `plan/layer.py`, `plan/gradients.py`. Time: `plan/step_time.py`,
from the seconds of single matmuls, attention, other kernels and collectives (`plan/layer_time.py`), at the
rates of a cluster (`plan/cluster.py`; files in `nanomegatron/presets/clusters`). H100 and H200 have the rates
that our runs reach, A100 and B200 shares of data sheets.

`python tools/planner_page.py --write` makes this page. `tests/plan/test_step_time.py` fails where a
prediction is off by more than 10 % in time or 3 % in memory; `tests/plan/test_peak.py` where a step of 19
layouts on CPU ranks, with models of three shapes, allocates 3 % more or less than planned. (One of 57 is left
out: ZeRO-2 without overlap, whose first bucket comes when the loss is done, where the loss has the peak: 6 %
too much.)

## What the memory counts

What torch's allocator gives out, at the peak of a step on each pipeline rank. A step has its peak with the
activations or, in a model that is large beside a microbatch, in the sums over replicas and the update, when
none are left (`plan/gradients.py`). Not counted, as the lines below the table say:

- torch itself and its libraries: about 0.3 GiB per process on a CPU, CUDA and NCCL on a GPU. So a CPU's
  `peak_mem_gib`, the memory of the process, is larger; gloo has 2 MiB of it, oneDNN copies of 16-bit weights;
- an uneven load of experts, as an untrained router makes it: the table says what it needs more at most, if
  all tokens choose the experts of one rank.

On CPU ranks torch's profiler does not see what gloo's threads free, and shows too high a peak.

## Against our own runs

Constants were fitted to the half "fit" of the rows, which was named before (`tests/plan_rows.toml`). The
other half showed what the model lacked: matmuls cut along k, the price of casts in small layers. Time of
{count} rows: off by {mean:.1f} % in the mean ({fit:.1f} % in the half "fit", {check:.1f} % in the other),
by {worst:.0f} % at most.

| run, in benchmarks/results | GPUs | half | measured, ms | planned, ms | off, % |
|---|---|---|--:|--:|--:|
"""
COLUMNS = """
## Against published runs

TFLOP/s of a GPU by Megatron's count (matmuls, causal attention at half). Published figures are converted to
it where their convention or the time of a step is known. What was not published is assumed
(`benchmarks/results/published-layouts.json` says what), and the software is another. The rates of networks
and of the A100 are those of data sheets.

| run | GPUs | published | planned | published / planned | what differs |
|---|---|--:|--:|--:|---|
"""


def measured_rows() -> Iterator[tuple[str, float, str]]:
    """(line, percent off, half) of every measured row."""
    for row in rows():
        if row.step_s:
            step = step_time(Planned(row.config, row.vocab, Machine(), row.world), load_cluster(row.gpu))
            off = 100 * (step.total / row.step_s - 1)
            name = f"{row.file.removesuffix('.json')}: {row.at.split('/', 1)[-1]}"
            numbers = f"{row.step_s * 1e3:,.1f} | {step.total * 1e3:,.1f} | {off:+.1f}"
            yield f"| {name} | {row.world} {row.gpu} | {row.half} | {numbers} |", off, row.half


def published_rate(row: dict, step: StepTime) -> float:
    """TFLOP/s of a GPU that were published, by Megatron's count as far as the row allows it."""
    found, data, run = row["published"], step.run.config.data, step.run
    shape = run.config.model, padded_vocab(run), data.seq_length, data.global_batch_size
    ours = flops_per_iteration(*shape)
    if "seconds" in found:
        return ours / found["seconds"] / row["gpus"] / 1e12
    if "tokens_per_s_per_gpu" in found:
        return ours / (data.global_batch_size * data.seq_length) * found["tokens_per_s_per_gpu"] / 1e12
    rate = found.get("tflops") or found["mfu"] * step.cluster.peak / 1e12
    again = (
        "with recomputation" in row["convention"]
    )  # four passes are counted, of which three are the model's
    count = "full-attention" if again else row["count"] or "megatron"
    return rate * (0.75 if again else 1) * ours / flops_per_iteration(*shape, count)


def published_lines() -> Iterator[str]:
    """A line for every published run that can be planned."""
    for name, row in json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"].items():
        if "flags" not in row:
            continue
        config = resolve(parse(shlex.split(row["flags"])).config, row["gpus"])
        run = Planned(config, config.data.vocab_size, Machine(), row["gpus"])
        step = step_time(run, load_cluster(row["gpu"]))
        rate, why = published_rate(row, step), next(DIFFERS[key] for key in DIFFERS if name.startswith(key))
        numbers = f"{rate:.0f} | {step.tflops_per_gpu:.0f} | {rate / step.tflops_per_gpu:.2f}"
        yield f"| {name} | {row['gpus']} {row['gpu']} | {numbers} | {why} |"


def page() -> str:
    """The text of docs/planner.md."""
    found = list(measured_rows())
    offs = {half: [abs(off) for _, off, h in found if half in (h, None)] for half in ("fit", "check", None)}
    means = {half: statistics.mean(values) for half, values in offs.items()}
    shares = dict(mean=means[None], fit=means["fit"], check=means["check"], worst=max(offs[None]))
    head = HEAD.format(count=len(found), **shares)
    tables = head + "\n".join(line for line, *_ in found), COLUMNS + "\n".join(published_lines()), ""
    return "\n".join(tables)


def main(argv: list[str]) -> int:
    """Exit code 1 where the page is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    args, text = parser.parse_args(argv), page()
    if args.write:
        PAGE.write_text(text, encoding="utf-8")
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/planner.md is not current: python tools/planner_page.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
