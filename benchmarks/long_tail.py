"""Documents of very different lengths: a collection to measure with, and a model of how long ranks take.

    python -m benchmarks.long_tail write FOLDER         lengths.txt, documents.bin and .idx, and statistics
    python -m benchmarks.long_tail simulate --config llama3-8b --cp 4 --batch 64

Lengths are log-normal with a median of 1,024 tokens and a sigma of 1.7 (about as sources and web pages have
it), from 16 to --longest; what is drawn outside is drawn again. The tokens are the bytes of Python's standard
library, end to end and over again, cut to these lengths; 256 ends a document.

`simulate` plans batches as a run does (`data/packing.py`), prints how much more the busiest rank has to do
than the mean, by the costs of the plan, and how long a batch takes by a simple model of a GPU, whose rates
can be given:

    a layer of a pack on n ranks    matmuls + sum over n steps of max(attention + merge, message)
    attention                       in tiles of 128 x 128 scores, however short a piece of a document is
    message                         none in the last step; keys and values in 16 bits, and in the backward
                                    their gradients in 32 bits
    merge                           with n > 1: bytes for each feature of a query that are moved to choose
                                    queries and to add up what the steps have found

The batch takes as long as its busiest rank. It is no measurement: `measure.py dynamic` is.
"""

import argparse
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanomegatron.config.cli import parse  # noqa: E402
from nanomegatron.config.model import TransformerConfig  # noqa: E402
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder  # noqa: E402
from nanomegatron.data.packing import Pack, Ranks, cost, plan  # noqa: E402
from nanomegatron.flops import flops_per_iteration  # noqa: E402

MEDIAN, SIGMA, SHORTEST, LONGEST, EOD = 1024, 1.7, 16, 131072, 256
TILE = 128


def draw_lengths(count: int, longest: int = LONGEST, seed: int = 1234) -> np.ndarray:
    """Tokens of each document, int64 [count]; the first of more are the same, in every version of numpy."""
    random, lengths = np.random.RandomState(seed), np.empty(0, np.int64)
    while len(lengths) < count:
        drawn = np.rint(np.exp(random.normal(np.log(MEDIAN), SIGMA, 4096))).astype(np.int64)
        lengths = np.append(lengths, drawn[(drawn >= SHORTEST) & (drawn <= longest)])
    return lengths[:count]


def statistics_of(lengths: np.ndarray) -> str:
    """A few lines about lengths."""
    lengths, total = np.sort(lengths), int(lengths.sum())
    said = [f"{len(lengths):,} documents, {total:,} tokens, mean {total / len(lengths):,.0f}"]
    quantiles = {f"{q} %": int(np.quantile(lengths, q / 100)) for q in (10, 50, 90, 99)}
    said.append(
        ", ".join(f"{name} {value:,}" for name, value in quantiles.items()) + f", max {lengths[-1]:,}"
    )
    for limit in (4096, 32768):
        long = lengths[lengths > limit]
        share = long.sum() / total
        said.append(f"over {limit:,}: {len(long) / len(lengths):.1%} of documents, {share:.0%} of tokens")
    return "\n".join(said)


def documents(lengths: Sequence[int]) -> Iterator[np.ndarray]:
    """Their tokens, uint16; each has one more than its length, the end, which is only a label."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text, at = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8), 0
    for length in lengths:
        yield np.append(np.take(text, np.arange(at, at + length), mode="wrap"), EOD).astype(np.uint16)
        at += length


def write(folder: Path, lengths: np.ndarray) -> None:
    """lengths.txt, and documents.bin, .idx for --data-path FOLDER/documents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    with IndexedDatasetBuilder(folder / "documents", np.uint16) as builder:
        for document in documents(lengths):
            builder.add_document(document)
        builder.finalize()


def shares(packs: Sequence[Pack], costs: Sequence[float], ranks: Ranks) -> np.ndarray:
    """What each rank has to do, `[dp * cp]`, where n ranks have an n-th of a document each."""
    busy = np.zeros(ranks.dp * ranks.cp)
    for pack in packs:
        busy[pack.first : pack.first + pack.size] += sum(costs[i] for i in pack.documents) / pack.size
    return busy


def tiles(length: int, n: int) -> np.ndarray:
    """Scores that a rank computes in each of n steps for a document: `[n]`, in whole tiles."""
    m, half = -(-length // (n * TILE)), -(-length // (2 * n * TILE))
    return np.array([m * (m + 1) / 2] + [m * half] * (n - 1)) * TILE**2


def seconds(pack: Pack, lengths: Sequence[int], model: TransformerConfig, rates: argparse.Namespace) -> float:
    """How long a pack takes by the model of the module's docstring."""
    n, layers, width = pack.size, model.num_layers, model.num_attention_heads * model.head_dim
    tokens = sum(lengths[i] for i in pack.documents) / n  # of a rank
    weights = flops_per_iteration(model, rates.vocab, 1, 1) - 6 * layers * width  # less attention to itself
    total = tokens * weights / (rates.matmuls * 1e12)
    scores = sum((tiles(lengths[i], n) for i in pack.documents), np.zeros(n))
    values = 2 * tokens * model.num_kv_heads * model.head_dim  # of keys and values
    merge = (n > 1) * rates.merge * tokens * width / (rates.memory * 1e9)
    for flops, size in ((4 * width, 2), (10 * width, 2 + 4)):  # forward, backward
        message = np.append(np.full(n - 1, values * size / (rates.link * 1e9)), 0.0)
        total += layers * np.maximum(scores * flops / (rates.attention * 1e12) + merge, message).sum()
    return total


def simulate(args: argparse.Namespace) -> None:
    """Fixed and dynamic, batch by batch."""
    model = parse(["--config", args.config]).config.model
    batches = draw_lengths(args.batches * args.batch, args.longest).reshape(args.batches, args.batch)
    print(statistics_of(batches.reshape(-1)), end="\n\n")
    limit = args.limit or -(-args.longest // args.cp)
    ways = {"fixed": -(-args.longest // args.cp), "dynamic": limit}
    times: dict[str, list[float]] = {}
    for name, room in ways.items():
        ranks = Ranks(args.dp, args.cp, room, 2, dynamic=name == "dynamic")
        times[name], uneven, packs_of_rank = [], [], []
        groups = dict.fromkeys(ranks.sizes, 0)
        for lengths in batches.tolist():
            costs = [cost(model, args.vocab, length) for length in lengths]
            packs = plan(lengths, costs, ranks)
            load = shares(packs, costs, ranks)
            uneven.append(load.max() / load.mean())
            took = [seconds(pack, lengths, model, args) for pack in packs]
            every = range(args.dp * args.cp)
            times[name].append(max(sum(t for t, p in zip(took, packs) if p.has(rank)) for rank in every))
            packs_of_rank.append(statistics.mean(sum(pack.has(rank) for pack in packs) for rank in every))
            for pack in packs:
                groups[pack.size] += len(pack.documents)
        on, packs = ", ".join(f"{n}: {k}" for n, k in groups.items()), statistics.mean(packs_of_rank)
        print(
            f"{name:8} {statistics.mean(times[name]):7.2f} s a batch | {packs:.1f} packs a rank | "
            f"busiest rank over mean {statistics.mean(uneven):.4f}, at most {max(uneven):.3f} | "
            f"documents by ranks {on}"
        )
    print(f"fixed / dynamic {sum(times['fixed']) / sum(times['dynamic']):.3f}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    write_parser, sim = modes.add_parser("write"), modes.add_parser("simulate")
    write_parser.add_argument("folder", type=Path)
    write_parser.add_argument("--documents", type=int, default=4096)
    sim.add_argument("--config", default="llama3-8b", help="preset of the model")
    sim.add_argument("--vocab", type=int, default=128256)
    for name, default, what in (
        ("dp", 1, "replicas"),
        ("cp", 4, "ranks of a replica"),
        ("batch", 64, "documents"),
        ("batches", 50, "how many"),
        ("limit", None, "tokens of a rank in a pack, dynamic; --longest / cp"),
    ):
        sim.add_argument(f"--{name}", type=int, default=default, help=what)
    for name, default, what in (
        ("matmuls", 650, "TFLOP/s"),
        ("attention", 290, "TFLOP/s"),
        ("link", 300, "GB/s of a message"),
        ("memory", 3500, "GB/s"),
        ("merge", 32, "bytes"),
    ):
        sim.add_argument(f"--{name}", type=float, default=default, help=what)
    for mode in (write_parser, sim):
        mode.add_argument("--longest", type=int, default=LONGEST, help="tokens")
    args = parser.parse_args(argv)
    if args.mode == "simulate":
        simulate(args)
        return
    lengths = draw_lengths(args.documents, args.longest)
    write(args.folder, lengths)
    print(f"{statistics_of(lengths)}\n--data-path {args.folder}/documents --tokenizer-type ByteTokenizer")


if __name__ == "__main__":
    main(sys.argv[1:])
