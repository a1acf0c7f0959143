"""How fast data comes up and comes in: a billion tokens, made in a temporary folder, beside megatron-core.

    python benchmarks/bench_data.py --documents 1000000

Prints a table, writes benchmarks/results/DATE-data-DOCUMENTS.json. Times are seconds, rates million tokens a
second of one process. What start-up adds to the memory is MiB of its own and of mapped files, which all
processes share and the system may take back. Rates of our loader are by threads, Megatron's by processes of
torch's DataLoader, as its training reads; microbatches have 8192 tokens.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanomegatron.config.settings import DataConfig  # noqa: E402
from nanomegatron.data.blended_dataset import blend_index  # noqa: E402
from nanomegatron.data.gpt_dataset import build_datasets  # noqa: E402
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder  # noqa: E402
from nanomegatron.data.loader import BatchLoader  # noqa: E402
from nanomegatron.data.tokenizer import build_tokenizer  # noqa: E402

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=50257)
FLAGS = dict(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


def make(prefix: str, tokens: int, documents: int) -> None:
    """Documents of exponentially distributed length; the last makes up the sum."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.exponential(tokens / documents * 0.99, documents)).astype(np.int64)
    lengths[-1] += max(0, tokens - lengths.sum())
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for part in np.array_split(lengths, max(1, documents // 10_000)):
            builder.add_documents(random.integers(0, 50256, part.sum(), dtype=np.uint16), part)
        builder.finalize(
            dict(fingerprint=TOKENIZER.fingerprint, max_token=50255, tokenizer=TOKENIZER.spec, tokens=tokens)
        )


def memory() -> dict[str, float]:
    """MiB of this process now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {k: int(lines[n].split()[0]) / 1024 for k, n in (("own", "RssAnon"), ("mapped", "RssFile"))}


def start(prefix: str, tokens: int, seq_length: int) -> tuple:
    """The dataset of one epoch; seconds and MiB it took."""
    before, begin = memory(), time.perf_counter()
    data = DataConfig(data_path=(prefix,), split="1", seq_length=seq_length)
    dataset = build_datasets(data, (tokens // seq_length - 1, 0, 0), 1234, TOKENIZER)[0]
    seconds, after = time.perf_counter() - begin, memory()
    return dataset, {"seconds": seconds, **{f"mib_{k}": after[k] - before[k] for k in after}}


def rate(items, tokens: int) -> float:
    """Million tokens a second, of items of so many tokens; the first, which starts things, is left out."""
    next(items)
    begin = time.perf_counter()
    count = sum(1 for _ in items)
    return count * tokens / (time.perf_counter() - begin) / 1e6


def ours(dataset, seq_length: int, count: int) -> dict[str, float]:
    """Rates through the loader, by threads, without and with document masks."""
    found, micro = {"dataset": rate(map(dataset.__getitem__, range(count)), seq_length)}, 8192 // seq_length
    for workers in (0, 1, 2):
        for name, flags in (("", {}), (" documents", FLAGS)):
            data = DataConfig(seq_length=seq_length, micro_batch_size=micro, num_workers=workers, **flags)
            loader = BatchLoader(dataset, data, TOKENIZER.eod, SimpleNamespace(rank=0, size=1), "cpu")
            found[f"{workers} threads{name}"] = rate(map(loader.get, range(0, count, micro)), 8192)
            loader.close()
    return found


def megatron(prefix: str, tokens: int, seq_length: int, count: int) -> dict[str, float]:
    """The same of megatron-core."""
    import torch
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

    tokenizer = SimpleNamespace(vocab_size=50257, eod=50256, unique_identifiers={}, pad=-1)
    tokenizer.special_tokens_dict = {}
    plain = dict(
        random_seed=1234, sequence_length=seq_length, blend=([prefix], None), split="1", tokenizer=tokenizer
    )
    flags = dict(dict.fromkeys(FLAGS, False), create_attention_mask=False)
    config = gpt_dataset.GPTDatasetConfig(**plain, **flags, path_to_cache=f"{prefix}-megatron")
    sizes, found = [tokens // seq_length - 1, 0, 0], {}
    for name in ("cold start", "warm start"):
        begin = time.perf_counter()
        builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
        dataset = builder(gpt_dataset.GPTDataset, sizes, lambda: True, config).build()[0]
        found[name] = time.perf_counter() - begin
    found["dataset"] = rate(map(dataset.__getitem__, range(count)), seq_length)
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(dataset, 8192 // seq_length, num_workers=workers)
        found[f"{workers} processes"] = rate(islice(loader, count * seq_length // 8192), 8192)
    return found


def main() -> None:
    """Everything once; megatron-core only where it is installed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--read", type=int, default=40_000_000, help="tokens a rate is measured over")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    result = {**vars(args), "commit": commit.strip(), "cpus": os.cpu_count(), "machine": platform.machine()}
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        make(prefix, args.tokens, args.documents)
        for seq_length in (1024, 8192):
            count = args.read // seq_length
            cold = start(prefix, args.tokens, seq_length)[1]
            dataset, warm = start(prefix, args.tokens, seq_length)
            rates = ours(dataset, seq_length, count)
            result[f"seq {seq_length}"] = {"cold start": cold, "warm start": warm, "ours": rates}
            try:
                result[f"seq {seq_length}"]["megatron"] = megatron(prefix, args.tokens, seq_length, count)
            except ImportError as error:
                print(f"without megatron-core: {error}")
    begin = time.perf_counter()
    blend_index([0.31, 0.27, 0.2, 0.13, 0.09], 10_000_000)
    result["blend of 1e7, 5 datasets"] = time.perf_counter() - begin
    for name, value in result.items():
        for key, numbers in value.items() if isinstance(value, dict) else [("", {"": value})]:
            for what, number in numbers.items():
                shown = round(number, 3) if isinstance(number, float) else number
                print(f"{name:<26}{key:<12}{what:<24}{shown}")
    day = datetime.date.today().isoformat()
    path = ROOT / f"benchmarks/results/{day}-data-{args.documents}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
