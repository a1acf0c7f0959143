"""Draw docs/loss.png and docs/moe-load.png from benchmarks/results/: `python tools/pictures.py [FOLDER]`.

    2026-11-28-make-train.json     loss.png, the run of `make train` that the README shows
    2026-11-22-moe-training.json   moe-load.png, the first and the last layer of three runs

The results become the files of a run in a temporary folder, and the functions that draw at a run's end draw
those: the pictures in the documents are as a reader's own. Plots in SVG: `python -m benchmarks.table`; traces
of pipelines: docs/pipeline.md.
"""

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nanomegatron.config.cli import parse
from nanomegatron.lr_schedule import Schedule
from nanomegatron.report.plots import plot_experts, plot_loss

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
SUMMED = 3  # steps whose loads the results of experts have in one sum


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Write a .jsonl file."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def loss_run(folder: Path) -> None:
    """Write the series of the run of `make train`; its learning rates follow from its preset."""
    results = json.loads((RESULTS / "2026-11-28-make-train.json").read_text())
    config = parse(["--config", "tiny-cpu"]).config
    losses, batch = results["lm_loss"], config.data.global_batch_size
    before = [batch * i for i in range(len(losses) + 1)]
    rates = Schedule.from_config(config, before)
    write_lines(
        folder / "metrics.jsonl",
        (dict(iteration=i + 1, lm_loss=loss, lr=rates.at(i * batch)) for i, loss in enumerate(losses)),
    )
    write_lines(folder / "evals.jsonl", results["validation"])


def expert_runs(folder: Path) -> None:
    """Write the tokens of experts of three runs as if they were layers of one."""
    runs = json.loads((RESULTS / "2026-11-22-moe-training.json").read_text())["runs"]
    loads = {run["run"]: run["load"] for run in runs if "load" in run}
    series = {
        f"{name}\nlayers.{layer}/tokens": loads[name][f"decoder.layers.{layer}/tokens"]
        for name in ("no balancing", "aux loss", "expert bias")
        for layer in (0, 3)
    }
    rows = (dict(zip(series, row, strict=True)) for row in zip(*series.values(), strict=True))
    records = (dict(iteration=SUMMED * i + 2) | row for i, row in enumerate(rows))  # 2: the middle of 1, 2, 3
    write_lines(folder / "experts.jsonl", records)


def main(argv: list[str]) -> int:
    """Draw the pictures into docs/, or into the folder given."""
    target = Path(argv[0]) if argv else ROOT / "docs"
    drawn = {"loss.png": ("python", loss_run, plot_loss)}
    drawn["moe-load.png"] = ("tiny-moe-cpu", expert_runs, plot_experts)
    for name, (run, fill, draw) in drawn.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / run  # its name is the picture's title
            folder.mkdir()
            fill(folder)
            if (picture := draw(folder)) is None:
                return 1
            (target / name).write_bytes(picture.read_bytes())
        print(target / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
