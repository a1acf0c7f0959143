"""Results that were kept: losses, gradient norms and hashes (with the first gradients) of 24 layouts.

    python -m tests.golden --write      run them and renew tests/goldens/layouts.json; `make goldens` does
    python -m tests.golden --add        add the hashes of this machine, if losses and norms are those kept

test_layouts.py and test_fp8_layouts.py call `check` with what they have run anyway. Losses and norms must be
those that were kept: to 1e-6 and 1e-5 in fp32, to 1 % in FP8, where another processor rounds some numbers to
the other side. On a processor and torch of which hashes are kept, the bits must be the same.

**When they may be renewed**: in a commit that means to change results, and says in its message which and why.
Hashes of another processor may be added from a checkout whose results are trusted.
"""

import hashlib
import json
import platform
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from nanomegatron.fp8 import RECIPES
from tests.layouts import TWO_STEPS, flags_of, fp8
from tests.spmd import run_spmd
from tests.training import Task, arguments, train_on_a_rank, write_sources

FILE = Path(__file__).parent / "goldens/layouts.json"
RULE = "docs/testing.md says when `make goldens` may renew the kept results"
LAYOUTS = [  # layout, model, FP8 recipe
    ("tp2spfp", "gpt", ""),
    ("tp4spfp", "qwen", ""),
    ("tp2spovfp", "llama", ""),
    ("dp2z1ovbkfp", "gpt", ""),
    ("dp4z2ovbkfp", "llama", ""),
    ("tp2dp2z2spovcercfp", "qwen", ""),
    ("tp2cersfp", "llama", ""),
    ("pp2v2fp", "gpt", ""),
    ("pp2zbfp", "qwen", ""),
    ("pp4zbvunevenfp", "llama", ""),
    ("tp2pp2zbvdp2z1sprsfp", "llama", ""),
    ("cp2fp", "documents", ""),
    ("cp4fp", "qwen", ""),
    ("cp4hifp", "documents", ""),
    ("cp2agfp", "window", ""),
    ("tp2cp2a2aspovfp", "llama", ""),
    ("dp2ep2fp", "moe", ""),
    ("tp2spep2etfp", "deep", ""),
    ("dp2ep2eofp", "deep", ""),
    ("pp2v2dp2ep2ovbkfp", "moe", ""),
    ("cp2ep2fp", "moe-documents", ""),
    ("tp2spfp", "llama", "delayed"),
    ("pp2zbfp", "llama", "tensorwise"),
    ("tp2dp2z2spcefp", "llama", "rowwise"),
]


def machine() -> str:
    """What the bits depend on: torch, and the processor, by which its libraries choose their code."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    processor = name[1] if name else platform.processor()
    return f"torch {torch.__version__}, {processor}, {torch.backends.cpu.get_cpu_capability()}"


def numbers(ranks: list[dict]) -> dict[str, list[float]]:
    """Losses and norms of the steps."""
    return {key: [step[key] for step in ranks[0]["steps"]] for key in ("lm_loss", "grad_norm")}


def digest(ranks: list[dict]) -> str:
    """Of the numbers and of every rank's first gradients."""
    total = hashlib.sha256(json.dumps(numbers(ranks)).encode())
    for rank in ranks:
        for name, offset, shape, at, values in rank["gradients"]:
            total.update(repr((name, tuple(offset), shape, at)).encode() + values.numpy().tobytes())
    return total.hexdigest()[:16]


def check(layout: str, model: str, recipe: str, ranks: list[dict]) -> None:
    """Compare two steps of all ranks with what was kept of this layout, if anything was.

    The plain forms are held to the numbers of the fast paths.
    """
    fast = layout if layout.endswith("fp") else f"{layout}fp"
    if (fast, model, recipe) in LAYOUTS:
        kept, name = json.loads(FILE.read_text()), name_of(fast, model, recipe)
        check_numbers(name, ranks, kept["numbers"][name])
        if layout == fast and (bits := kept["bits"].get(machine(), {}).get(name)):
            assert digest(ranks) == bits, f"{name}: not the same bits; {RULE}"


def check_numbers(name: str, ranks: list[dict], kept: dict[str, list[float]]) -> None:
    """Losses and norms of a layout, within the rounding of another processor."""
    in_fp8 = name.endswith(tuple(RECIPES))
    for key, fp32 in (("lm_loss", 1e-6), ("grad_norm", 1e-5)):
        tolerance = 1e-2 if in_fp8 else fp32
        np.testing.assert_allclose(numbers(ranks)[key], kept[key], rtol=tolerance, err_msg=f"{name}; {RULE}")


def name_of(layout: str, model: str, recipe: str) -> str:
    """Under which a result is kept."""
    return "-".join(filter(None, (layout, model, recipe)))


def run_all() -> dict[str, list[dict]]:
    """Two steps of every layout: name -> what each rank found."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
        write_sources(f"{folder}/sources")
        for layout, model, recipe in LAYOUTS:
            size, flags = flags_of(layout)
            argv = arguments(Task(f"{folder}/sources", TWO_STEPS), model, flags, fp8(recipe))
            found[name_of(layout, model, recipe)] = run_spmd(train_on_a_rank, size, argv, folder, timeout=120)
    return found


def main(argv: list[str]) -> None:
    """Renew the file, or add to it."""
    if argv not in (["--write"], ["--add"]):
        sys.exit(__doc__)
    torch.set_num_threads(1)
    found = run_all()
    if argv == ["--add"]:
        kept = json.loads(FILE.read_text())
        for name, ranks in found.items():
            check_numbers(name, ranks, kept["numbers"][name])
    else:
        kept = {"numbers": {name: numbers(ranks) for name, ranks in found.items()}, "bits": {}}
    kept["bits"][machine()] = {name: digest(ranks) for name, ranks in found.items()}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{len(found)} layouts kept in {FILE} for {machine()}")


if __name__ == "__main__":
    main(sys.argv[1:])
