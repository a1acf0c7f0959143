"""Preprocessing speed: tiktoken alone, preprocess.py, and a loop document by document as Megatron-LM has it.

    python benchmarks/make_corpus.py corpus
    python benchmarks/bench_preprocess.py [--corpus corpus] [--repeats 3] [--tokenizer Llama3Tokenizer FILE]

Each is a process of its own, start and end included, in turns, `--repeats` times; the table has medians. The
same tokenizer (GPT-2's vocabulary through tiktoken, or the one given) serves all. The loop is of the kind of
Megatron's tools/preprocess_data.py: pool.imap over lines in chunks of 32, json.loads and a tokenizer call a
document, ids and lengths pickled back in dictionaries, one add_document each to megatron-core's own
IndexedDatasetBuilder. Every output has the same bytes, or the script fails. Memory is that of the largest
process. Writes benchmarks/results/DATE-preprocess-TOKENIZER.json.
"""

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanomegatron.data.tokenizer import build_tokenizer  # noqa: E402


def start(flags: list[str]) -> None:
    global TOKENIZER
    kind, *files = flags
    TOKENIZER = build_tokenizer(kind, *files) if len(files) == 1 else build_tokenizer(kind, None, *files)


def encode(line: str) -> tuple[dict, dict, int]:
    document, ids, lengths = json.loads(line), {}, {}
    ids["text"] = list(TOKENIZER.encode(document["text"]))
    lengths["text"] = [len(ids["text"])]
    if ids["text"]:
        ids["text"].append(TOKENIZER.eod)
        lengths["text"][-1] += 1
    return ids, lengths, len(line)


def by_document(corpus: str, prefix: str, flags: list[str], workers: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    start(flags)
    dtype = DType.optimal_dtype(TOKENIZER.vocab_size)
    builders = {"text": IndexedDatasetBuilder(f"{prefix}_text_document.bin", dtype=dtype)}
    pool = multiprocessing.get_context("fork").Pool(workers, start, (flags,))
    with pool, open(corpus, encoding="utf-8") as lines:
        for ids, lengths, _ in pool.imap(encode, lines, 32):
            for key in ids:
                builders[key].add_document(ids[key], lengths[key])
    builders["text"].finalize(f"{prefix}_text_document.idx")


def alone(corpus: str, flags: list[str]) -> float:
    """Seconds of tiktoken on texts that are in memory already, one thread, the result thrown away."""
    start(flags)
    with open(corpus, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    begin = time.perf_counter()
    for text in texts:
        TOKENIZER.encode(text)
    return time.perf_counter() - begin


def measured(case: str, workers: int, corpus: str, flags: list[str], prefix: str) -> float:
    """Seconds of one case in a new process."""
    names = ("--tokenizer-type", "--vocab-file", "--merge-file")
    if len(flags) == 2:
        names = ("--tokenizer-type", "--tokenizer-model")
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--case",
        case,
        "--workers",
        str(workers),
        "--corpus",
        corpus,
    ]
    command += ["--prefix", prefix, "--flags", *flags]
    if case == "ours":
        given = [word for pair in zip(names, flags) for word in pair]
        command = [
            sys.executable,
            str(ROOT / "preprocess.py"),
            "--input",
            corpus,
            "--output-prefix",
            prefix,
            *given,
        ]
        command += ["--append-eod", "--workers", str(workers)]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    assert done.returncode == 0, done.stderr
    return float(done.stdout) if case == "alone" else seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="corpus", help="folder that make_corpus.py has filled")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", nargs="+", help="type and files; GPT2BPETokenizer and its two files")
    for name in ("--case", "--prefix"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--flags", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case == "alone":
        print(alone(args.corpus, args.flags))
    elif args.case:
        by_document(args.corpus, args.prefix, args.flags, args.workers)
    else:
        compare(Path(args.corpus), args.repeats, args.tokenizer)


def compare(folder: Path, repeats: int, tokenizer: list[str] | None) -> None:
    corpus, files = (
        str(folder / "corpus.jsonl"),
        [str(folder / name) for name in ("encoder.json", "vocab.bpe")],
    )
    flags = tokenizer or ["GPT2BPETokenizer", *files]
    with open(corpus, encoding="utf-8") as lines:
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
    cases = [("alone", 1), ("ours", 1), ("per document", 1), ("ours", 2), ("per document", 2)]
    seconds: dict[str, list[float]] = {}
    hashes = set()
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(repeats):
            for case, workers in cases:
                taken = measured(case, workers, corpus, flags, f"{temporary}/data")
                seconds.setdefault(f"{case}, {workers}", []).append(taken)
                if case != "alone":
                    data = [
                        Path(f"{temporary}/data_text_document{end}").read_bytes() for end in (".bin", ".idx")
                    ]
                    hashes.add(hashlib.sha256(b"".join(data)).hexdigest())
    assert len(hashes) == 1, "different bytes"
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name, value in median.items():
        print(f"{name:<16} {value:7.2f} s {megabytes / value:7.1f} MB/s")
    record = dict(date=str(datetime.date.today()), cpus=os.cpu_count(), tokenizer=flags[0])
    record |= dict(text_mb=round(megabytes, 2), seconds=seconds, median=median)
    record["peak_mib_of_a_process"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    name = f"{record['date']}-preprocess-{flags[0]}.json"
    (ROOT / "benchmarks" / "results" / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
