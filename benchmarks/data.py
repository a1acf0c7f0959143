"""How fast data is read and made, beside megatron-core where that is installed.

    python -m benchmarks.data loader [--documents 1000000] --out FILE.json [--small]
    python -m benchmarks.data preprocess --corpus TEXT.jsonl [--times N] --tokenizer TYPE FILE... --out FILE

`loader`: a billion tokens, made in a temporary folder; seconds to open them, and million tokens a second: of
the dataset, of our loader by threads, of torch's DataLoader by processes, as Megatron reads. Microbatches
have 8192 tokens.

`preprocess`: CPU seconds of the tokenizer's library by itself, one thread, once; seconds of preprocess.py and
of a loop document by document, of the kind of Megatron's tools/preprocess_data.py: pool.imap over lines
in chunks of 32, json.loads and a tokenizer call a document, results pickled, one add_document each to
megatron-core's IndexedDatasetBuilder. These two are processes, start and end included; all are interleaved
--repeats times, and the CPU seconds of all processes of a case. "Start" is the loop without
documents, most of it imports of torch and megatron-core. All outputs have the same bytes, or the program
fails. --times reads the corpus several times over.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import build_datasets
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.data.loader import BatchLoader
from nanomegatron.data.tokenizer import build_tokenizer
from tools.gpu_gate import commit_of

MASKS = dict(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


def loader(args: argparse.Namespace) -> dict:
    """By sequence length; megatron-core's where it is installed."""
    tokens, read = (2_000_000, 80_000) if args.small else (1_000_000_000, 40_000_000)
    result = dict(tokens=tokens, documents=args.documents, tokens_read=read)
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        tokenizer = make(prefix, tokens, args.documents)
        for s in (1024, 8192):
            result[f"seq {s}"] = found = {}
            for start in ("cold start", "warm start"):
                begin, data = time.perf_counter(), DataConfig(data_path=(prefix,), split="1", seq_length=s)
                dataset = build_datasets(data, (tokens // s - 1, 0, 0), 1234, tokenizer)[0]
                found[start] = {"seconds": time.perf_counter() - begin}
            found["ours"] = ours(dataset, s, read // s, tokenizer.eod)
            try:
                found["megatron"] = megatron(prefix, tokens, s, read // s)
            except ImportError as error:
                found["megatron"] = {"failed": str(error)}
    return result


def make(prefix: str, tokens: int, documents: int):
    """Documents of exponentially distributed length, the last makes up the sum; their tokenizer."""
    tokenizer, random = build_tokenizer("NullTokenizer", vocab_size=50257), np.random.default_rng(0)
    lengths = np.maximum(1, random.exponential(tokens / documents * 0.99, documents)).astype(np.int64)
    lengths[-1] += max(0, tokens - lengths.sum())
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for part in np.array_split(lengths, max(1, documents // 10_000)):
            builder.add_documents(random.integers(0, 50256, part.sum(), dtype=np.uint16), part)
        builder.finalize()
    return tokenizer


def rate(items: Iterator, tokens: int) -> float:
    """Million tokens a second, of items of `tokens` each; the first, which starts things, is left out."""
    next(items)
    begin = time.perf_counter()
    return sum(1 for _ in items) * tokens / (time.perf_counter() - begin) / 1e6


def ours(dataset, s: int, count: int, eod: int) -> dict[str, float]:
    """Rates through the loader, by threads, without and with document masks."""
    found, micro = {"dataset": rate(map(dataset.__getitem__, range(count)), s)}, 8192 // s
    for workers in (0, 1):
        for name, flags in (("", {}), (" documents", MASKS)):
            data = DataConfig(seq_length=s, micro_batch_size=micro, num_workers=workers, **flags)
            reader = BatchLoader(dataset, data, eod, SimpleNamespace(rank=0, size=1), "cpu")
            found[f"{workers} threads{name}"] = rate(map(reader.get, range(0, count, micro)), 8192)
            reader.close()
    return found


def megatron(prefix: str, tokens: int, s: int, count: int) -> dict[str, float]:
    """The same of megatron-core."""
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

    tokenizer = dict(vocab_size=50257, eod=50256, unique_identifiers={}, pad=-1, special_tokens_dict={})
    config = gpt_dataset.GPTDatasetConfig(
        **dict(random_seed=1234, sequence_length=s, blend=([prefix], None), split="1"),
        **dict.fromkeys(MASKS, False),
        create_attention_mask=False,
        path_to_cache=f"{prefix}-megatron",
        tokenizer=SimpleNamespace(**tokenizer),
    )
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
    dataset = builder(gpt_dataset.GPTDataset, [tokens // s - 1, 0, 0], lambda: True, config).build()[0]
    found, batches = {"dataset": rate(map(dataset.__getitem__, range(count)), s)}, count * s // 8192
    for workers in (0, 2):
        reader = torch.utils.data.DataLoader(dataset, 8192 // s, num_workers=workers)
        found[f"{workers} processes"] = rate(islice(reader, batches), 8192)
    return found


@functools.cache
def tokenizer_of(kind: str, *files: str):
    """As preprocess.py makes it: of one file, or of a vocabulary and its merges."""
    return build_tokenizer(kind, *files) if len(files) < 2 else build_tokenizer(kind, None, *files)


def encode(flags: tuple[str, ...], line: str) -> list[int]:
    """A document with its end, as a process of the loop returns it."""
    tokenizer = tokenizer_of(*flags)
    ids = list(tokenizer.encode(json.loads(line)["text"]))
    return [*ids, tokenizer.eod] if ids else []


def per_document(corpora: list[str], flags: tuple[str, ...], workers: int, prefix: str) -> None:
    """The loop."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer_of(*flags).vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}_text_document.bin", dtype)
    pool = multiprocessing.get_context("fork").Pool(workers)
    with pool, contextlib.ExitStack() as stack:
        lines = chain.from_iterable(stack.enter_context(open(c, encoding="utf-8")) for c in corpora)
        for ids in pool.imap(functools.partial(encode, flags), lines, 32):
            builder.add_document(ids, [len(ids)] if ids else [])  # as Megatron: an empty one has no sequence
        pool.close()
        pool.join()  # so that its CPU time counts
    builder.finalize(f"{prefix}_text_document.idx")


def alone(tokenizer, texts: list[str]) -> float:
    """CPU seconds for texts that are in memory already; the result is thrown away."""
    begin = time.process_time()
    for text in texts:
        tokenizer.encode(text)
    return time.process_time() - begin


def preprocess(args: argparse.Namespace) -> dict:
    """All, interleaved. Raises ValueError where they differ."""
    with open(args.corpus, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    texts *= args.times
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    cases, hashes = [("ours", 1), ("per document", 1), ("ours", 2), ("per document", 2)], set()
    seconds = {f"{case}, {workers}": [] for case, workers in [("alone", 1), ("start", 1), *cases]}
    cpu = {name: [] for name in seconds}
    with tempfile.TemporaryDirectory() as folder:
        cpu["alone, 1"].append(alone(tokenizer_of(*args.tokenizer), texts))
        for case, workers in [("start", 1), *cases * args.repeats]:
            wall, busy = child(args, case, workers, f"{folder}/data")
            seconds[f"{case}, {workers}"].append(wall)
            cpu[f"{case}, {workers}"].append(busy)
            files = [Path(f"{folder}/data_text_document.{end}").read_bytes() for end in ("bin", "idx")]
            hashes |= {hashlib.sha256(b"".join(files)).hexdigest()} if case != "start" else set()
        if len(hashes) != 1:
            raise ValueError("the outputs have different bytes")
        tokens = json.loads(Path(f"{folder}/data_text_document.json").read_text())["tokens"]
    found = dict(tokenizer=args.tokenizer[0], text_mb=megabytes, documents=len(texts), tokens=tokens / 1e6)
    return found | dict(seconds=seconds, cpu_seconds=cpu, load=os.getloadavg())


def child(args: argparse.Namespace, case: str, workers: int, prefix: str) -> tuple[float, float]:
    """Seconds and CPU seconds of one case in a new process. Raises RuntimeError if it fails."""
    (kind, *files), begin, before = args.tokenizer, time.perf_counter(), os.times()
    corpora = [args.corpus] * args.times * (case != "start")
    if case == "ours":
        names = ["--vocab-file", "--merge-file"] if len(files) == 2 else ["--tokenizer-model"]
        words = ["preprocess.py", "--input", *corpora, "--output-prefix", prefix, "--tokenizer-type", kind]
        words += [word for pair in zip(names, files) for word in pair]
        words += ["--append-eod", "--overwrite", "--workers", str(workers)]
        failed = subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL).returncode
    else:
        given = corpora, tuple(args.tokenizer), workers, prefix
        process = multiprocessing.get_context("spawn").Process(target=per_document, args=given)
        process.start()
        process.join()
        failed = process.exitcode
    if failed:
        raise RuntimeError(f"{case}: exit code {failed}")
    after = os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, busy


def main(argv: list[str]) -> None:
    """Measure one part; print it and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("part", choices=("loader", "preprocess"))
    add("--out", type=Path, metavar="FILE.json")
    add("--documents", type=int, default=1_000_000, help="loader: of the billion tokens")
    add("--small", action="store_true", help="loader: two million tokens")
    add("--corpus", help="preprocess: a JSON object with a text a line")
    add("--tokenizer", nargs="+", help="preprocess: type and files")
    add("--times", type=int, default=1, help="preprocess: how often the corpus is read")
    add("--repeats", type=int, default=3, help="preprocess")
    args = parser.parse_args(argv)
    found = (loader if args.part == "loader" else preprocess)(args)
    facts = dict(date=str(datetime.date.today()), command=" ".join(argv), commit=commit_of(Path.cwd()))
    text = json.dumps(facts | dict(cpus=os.cpu_count()) | found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
