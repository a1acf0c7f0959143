"""What benchmarks share that start train.py many times: children in turn, and a file with a line a run."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


def in_slots(todo: Iterable, jobs: int, start: Callable[[Any, int], Any]) -> Iterator[Any]:
    """Every child as it ends, closed afterwards; `start(what, slot)` makes one, so many jobs at a time.

    A child has a `process` and a `close()`, which also ends it.
    """
    left, slots = list(todo), [None] * jobs
    try:
        while left or any(slots):
            for i, child in enumerate(slots):
                if child and child.process.poll() is not None:
                    yield child
                    child.close()
                    slots[i] = child = None
                if child is None and left:
                    slots[i] = start(left.pop(0), i)
            time.sleep(0.1)
    finally:
        for child in filter(None, slots):
            child.close()


def write_runs(path: Path, result: dict, summary: Any) -> None:
    """The JSON, with a line for each of its `runs`, and what they come to."""
    facts = {key: value for key, value in result.items() if key != "runs"} | {"summary": summary}
    lines = [f' "{key}": {json.dumps(strict(value), allow_nan=False)},' for key, value in facts.items()]
    runs = ",\n".join(f"  {json.dumps(strict(run), allow_nan=False)}" for run in result["runs"])
    path.write_text("\n".join(["{", *lines, ' "runs": [', runs, " ]", "}", ""]))


def strict(x: Any) -> Any:
    """Numbers that JSON has not as words: "nan", "inf", which float() reads."""
    if isinstance(x, dict):
        return {key: strict(value) for key, value in x.items()}
    if isinstance(x, list):
        return [strict(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
