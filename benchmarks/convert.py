"""Memory and rate of `convert.py` for a large model, with fewer layers and weights of zero.

    python -m benchmarks.convert --config llama3-70b --num-layers 4 --folder /tmp/convert --out FILE.json

A Hugging Face folder in bf16, whose weight file is a hole that takes no disk, is converted to a checkpoint of
this program, that one to a Hugging Face folder and to Megatron-LM's torch_dist and this back, each by a
process of its own.
`peak_gb` is the largest resident memory of the process, pages of mapped files included; it does not depend on
the number of layers. The folder holds three copies of the model at most.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from nanomegatron.checkpoint.convert_source import SourceModel
from nanomegatron.checkpoint.convert_target import by_their_names
from nanomegatron.checkpoint.hf import model_parts
from nanomegatron.checkpoint.streams import Stream, safetensors_header
from nanomegatron.config.cli import parse
from nanomegatron.config.hf import to_hf
from tools.gpu_gate import commit_of

ROOT = Path(__file__).resolve().parent.parent
WAYS = [
    ("hf", "nanomegatron"),
    ("nanomegatron", "hf"),
    ("nanomegatron", "megatron-core"),
    ("megatron-core", "hf"),
]


def make_folder(folder: Path, flags: list[str]) -> int:
    """Make the Hugging Face folder of a model -> bytes of its weights."""
    config = parse([*flags, "--bf16"]).config
    model = replace(config.model, max_position_embeddings=config.data.seq_length)
    config = replace(config, model=model)
    size = config.data.vocab_size
    parts = model_parts(config.model, size)
    empty = {
        f"model/{p.name}": Stream(tuple(p.shape), torch.bfloat16, lambda begin, end: torch.empty(0))
        for p in parts
    }
    table = to_hf(config)
    header = safetensors_header(by_their_names(SourceModel(folder, config, empty), table["model_type"], ()))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(table))
    nbytes = sum(stream.nbytes for stream in empty.values())
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + nbytes)
    return nbytes


def converted(source: str, target: str, here: Path, there: Path, nbytes: int) -> dict:
    """Run a conversion -> its row of the result."""
    words = [str(ROOT / "convert.py"), "--source", source, "--target", target]
    begin = time.monotonic()
    child = subprocess.Popen([sys.executable, *words, "--input-path", str(here), "--output-path", str(there)])
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - begin
    assert os.waitstatus_to_exitcode(status) == 0, f"{source} to {target} failed"
    rates = {"seconds": round(seconds, 1), "gb_per_s": round(nbytes / 1e9 / seconds, 3)}
    return {"name": f"{source} to {target}", "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2)} | rates


def main() -> int:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="made, and removed at the end")
    parser.add_argument("--out", type=Path, required=True)
    args, flags = parser.parse_known_args()
    about = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "commit": commit_of(ROOT)}
    about |= {"torch": torch.__version__, "cores": os.cpu_count(), "flags": " ".join(flags)}
    folders = {kind: args.folder / kind for kind in ("hf", "nanomegatron", "megatron-core")}
    try:
        nbytes = make_folder(folders["hf"], flags)
        rows = []
        for source, target in WAYS:
            there = args.folder / f"new-{target}" if target == "hf" else folders[target]
            rows.append(converted(source, target, folders[source], there, nbytes))
            print(rows[-1], flush=True)
            if target == "hf":
                shutil.rmtree(there)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    result = about | {"gb": round(nbytes / 1e9, 2), "cases": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
