"""What a start of train.py takes: seconds from the process's start to the end of the first step, by part.

    python tools/startup.py --repeat 3 --config gpt2-124m --bf16 --mock-data --vocab-size 50257

The flags are those of a run in one process. It ends after the first step and saves nothing. The first start
also reads torch's libraries from the disk; later ones find them in memory. The host waits for the GPU at the
end of each part, which a run does not.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUN = "startup"  # its folder in runs/
HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton", "matplotlib", "torch.distributed.tensor")
# What train.py calls -> the part that ends with it, in order. Of several calls the last counts.
PARTS = {
    "train.settings": "settings",
    "nanomegatron.launch.rank.claim": "CUDA context, ranks",
    "nanomegatron.launch.data.choose_tokenizer": "tokenizer",
    "nanomegatron.launch.data.build_datasets": "data",
    "train.data_lines": "first lines of the log",
    "train.install": "model",
    "train.build_optimizer": "optimizer",
    "train.load_checkpoint": "checkpoint",
}


@dataclass
class Mark:
    """The end of a part: seconds since the process was started, and of its CPU time."""

    part: str
    seconds: float
    cpu: float


def main(argv: list[str]) -> int:
    """Start the run several times and print a table; return the exit code of a start that fails."""
    parser = argparse.ArgumentParser("startup.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeat", type=int, default=3, help="starts, one after the other")
    own, flags = parser.parse_known_args(argv)
    starts = []
    for _ in range(own.repeat):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "marks.json"
            command = [sys.executable, __file__, "--child", str(path), str(time.time())]
            done = subprocess.run([*command, *flags, "--run-name", RUN], stdout=subprocess.PIPE, text=True)
            if done.returncode or not path.exists():
                print(done.stdout, end="")
                return done.returncode or 1
            starts.append(json.loads(path.read_text()))
    print(table(starts))
    return 0


def table(starts: list[dict]) -> str:
    """Seconds of each part in each start, those of the last up to its end, and of the CPU."""
    rows = [["", *(f"start {i + 1}" for i in range(len(starts))), "up to here", "CPU"]]
    marks = [[Mark(**mark) for mark in start["marks"]] for start in starts]
    for i, last in enumerate(marks[-1]):
        took = [start[i].seconds - (start[i - 1].seconds if i else 0.0) for start in marks]
        cpu = last.cpu - (marks[-1][i - 1].cpu if i else 0.0)
        rows.append([last.part, *(f"{s:.2f}" for s in took), f"{last.seconds:.2f}", f"{cpu:.2f}"])
    totals = [*(start[-1].seconds for start in marks), marks[-1][-1].seconds, marks[-1][-1].cpu]
    rows.append(["all", *(f"{s:.2f}" for s in totals)])
    lines = [f"{row[0]:<24}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
    heavy = ", ".join(starts[-1]["heavy"]) or f"none of {', '.join(HEAVY)}"
    return "\n".join([*lines, f"{starts[-1]['modules']} modules, of those that take long: {heavy}"])


def child(path: Path, started: float, argv: list[str]) -> int:
    """Run train.py up to the end of its first step, and write its marks; return its exit code if it ends."""
    marks: dict[str, Mark] = {}

    def mark(part: str) -> None:
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            sys.modules["torch"].cuda.synchronize()
        marks.pop(part, None)
        marks[part] = Mark(part, time.time() - started, time.process_time())

    mark("Python")
    import torch  # noqa: F401, a part of its own

    mark("import torch")
    sys.path.insert(0, str(ROOT))
    import train

    mark("import train")
    for place, part in PARTS.items():
        module, name = place.rsplit(".", 1)
        module = importlib.import_module(module)
        setattr(module, name, marked(getattr(module, name), part, mark))
    launch_step = train.train_step

    def first_step(*given: Any) -> None:
        marks["set-up"] = Mark("rest of the set-up", time.time() - started, time.process_time())
        launch_step(*given)
        marks["launch"] = Mark("first step launched", time.time() - started, time.process_time())
        mark("first step done")
        heavy = [name for name in HEAVY if name in sys.modules]
        found = dict(marks=[asdict(m) for m in marks.values()], modules=len(sys.modules), heavy=heavy)
        path.write_text(json.dumps(found))
        os._exit(0)  # nothing is saved

    train.train_step = first_step
    return train.main(train.with_processes(argv))


def marked(function: Callable, part: str, mark: Callable[[str], None]) -> Callable:
    """The function, and a mark at its end."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        mark(part)
        return result

    return call


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
    sys.exit(main(sys.argv[1:]))
