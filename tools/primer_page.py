"""docs/primer.md: what each rank holds, drawn from the model that the package builds for it.

python tools/primer_page.py            is the page current? exit code 1 if not
python tools/primer_page.py --write    write it
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, it finds the package of its own checkout

from nanomegatron.build import buckets_class, build  # noqa: E402
from nanomegatron.config.check import resolve  # noqa: E402
from nanomegatron.config.cli import parse  # noqa: E402
from nanomegatron.config.settings import Config, padded_vocab_size  # noqa: E402
from nanomegatron.dp import ParamAndGradBuckets  # noqa: E402
from nanomegatron.mesh import Axis, Mesh, axis_groups  # noqa: E402
from nanomegatron.param import Init, Part  # noqa: E402
from nanomegatron.pp import ModelChunks  # noqa: E402

PAGE = ROOT / "docs/primer.md"
VOCAB = 4096
MODEL = "--config tiny-cpu --vocab-size 4096 --ddp-bucket-size 300000"
EXPERTS = "--config tiny-moe-cpu --vocab-size 4096"
LAYOUT = "--tp 2 --sequence-parallel --pp 2 --use-distributed-optimizer"


class Rank:
    """What one rank of a layout holds; built without processes, on the meta device."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        axes = {}
        for name, groups in axis_groups(config.parallel, world).items():
            for ranks in groups:
                if rank in ranks:
                    axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks)
        self.mesh = Mesh(rank=rank, **axes)
        padded = padded_vocab_size(VOCAB, config.data.make_vocab_size_divisible_by, self.mesh.tp.size)
        self.model: ModelChunks = build(config, self.mesh, VOCAB, padded, Init(device=torch.device("meta")))
        make_buckets = buckets_class(config.parallel)
        self.buckets: ParamAndGradBuckets = make_buckets(self.model, config.parallel, self.mesh)

    @property
    def layers(self) -> list[int]:
        return [layer.layer for chunk in self.model for layer in chunk.layers]

    @property
    def updated(self) -> int:
        """The number of values of this rank's shards, without the padding of buckets."""
        return sum(piece.stop - piece.start for _, piece in self.buckets.slices())


def ranks_of(flags: str, world: int) -> list[Rank]:
    """Every rank of a layout."""
    config = resolve(parse(flags.split()).config, world)
    return [Rank(config, rank, world) for rank in range(world)]


def whole(parts: list[Part]) -> str:
    """The shapes of the global tensors that a parameter holds parts of: 3 x [2, 3]"""
    shapes = Counter(str(list(part.shape)) for part in parts)
    return " + ".join(f"{n} x {shape}" if n > 1 else shape for shape, n in shapes.items())


def grid(ranks: list[Rank]) -> str:
    """Where each rank stands: a column for each stage and replica, a row for each tp rank."""
    places = {(r.mesh.tp.rank, r.mesh.pp.rank, r.mesh.dp.rank): r.mesh.rank for r in ranks}
    mesh = ranks[0].mesh
    columns = [(stage, replica) for stage in range(mesh.pp.size) for replica in range(mesh.dp.size)]
    lines = [" " * 8 + "".join(f"pp {stage} dp {replica}".ljust(14) for stage, replica in columns)]
    for tp in range(mesh.tp.size):
        cells = "".join(f"rank {places[tp, stage, replica]}".ljust(14) for stage, replica in columns)
        lines.append(f"tp {tp}    {cells}")
    return "\n".join(line.rstrip() for line in lines)


def groups(ranks: list[Rank], *names: str) -> str:
    """The groups of axes: tp {0,1} {2,3}"""
    lines = []
    for name in names:
        found = sorted({getattr(r.mesh, name).ranks for r in ranks})
        lines.append(f"{name:6}" + " ".join("{" + ",".join(map(str, each)) + "}" for each in found))
    return "\n".join(lines)


def weights(ranks: list[Rank], layer: int) -> str:
    """The parameters of a layer and those outside layers: whole, and on the ranks of the first replica."""
    rows: dict[str, tuple[str, list[str]]] = {}
    for r in ranks:
        for param in r.model.parameters() if r.mesh.dp.rank == 0 else ():
            name = param.spec.name
            if ".layers." not in name or f".layers.{layer}." in name:
                sizes = f"{whole(param.spec.parts)} | {list(param.shape)}"
                rows.setdefault(name, (sizes, []))[1].append(str(r.mesh.rank))
    lines = ["| parameter | whole | on a rank | ranks |", "|---|---|---|---|"]
    return "\n".join(
        lines + [f"| `{name}` | {sizes} | {' '.join(on)} |" for name, (sizes, on) in rows.items()]
    )


def memory(ranks: list[Rank]) -> str:
    """Values that each rank holds and updates."""
    head = "| rank | tp, pp, dp | layers | parameters | gradients | main parameters, two moments |"
    lines = [head, "|--:|---|---|--:|--:|--:|"]
    for r in ranks:
        place = f"{r.mesh.tp.rank}, {r.mesh.pp.rank}, {r.mesh.dp.rank}"
        held = sum(param.numel() for param in r.model.parameters())
        layers = " ".join(map(str, r.layers))
        lines.append(f"| {r.mesh.rank} | {place} | {layers} | {held:,} | {held:,} | 3 x {r.updated:,} |")
    return "\n".join(lines)


def page() -> str:
    """The text of docs/primer.md."""
    alone = ranks_of(MODEL, 1)
    ranks = ranks_of(f"{MODEL} {LAYOUT}", 8)
    long = ranks_of(f"{MODEL} --cp 2 --sequence-parallel --tp 2", 4)
    experts = ranks_of(f"{EXPERTS} --ep 2 --use-distributed-optimizer", 4)
    return f"""# What each rank holds

Ten minutes, for those who know one GPU. A *rank* is a process with a GPU of its own. A *layout* says how a
model, its batch and its optimizer are cut over ranks; each way to cut is an *axis*. All layouts train the
same model: only where things stand changes. The tables are of what the package builds, for the model of `make
train` (`python tools/primer_page.py --write` makes this page).

## One rank

Everything: 4 layers, and for each parameter its gradient, an fp32 copy that AdamW updates (the *main*
parameter), and two moments.

{memory(alone)}

With bf16 that is 2 bytes for a parameter, 4 for its gradient and 12 for the last column. 18 bytes for each of
8 billion parameters are more than an H100 or H200 has: hence the axes.

## Eight ranks: `{LAYOUT}`

```
{grid(ranks)}

{groups(ranks, "tp", "pp", "dp")}
```

A rank is in one group of each axis. The groups of tp are neighbours: it sends most, in every layer, so it
stays inside a machine.

**Tensor parallel (tp)** cuts matrices. Ranks 0 and 1 have half of the heads and half of the MLP of each
layer; norms, which are small, are whole on both. They add up their results in every layer. **Sequence
parallel** (`--sequence-parallel`) is the same two ranks: between the matrices each has half of the tokens of
a row. **Pipeline parallel (pp)** cuts between layers: ranks 0 to 3 have layers 0 and 1, ranks 4 to 7 layers 2
and 3; activations go on, gradients come back.

{weights(ranks, 0)}

q, k and v are one parameter, and so are the two halves of a gated MLP; each is cut by itself. The word
embeddings are also the output layer, so the last stage has a copy; both add up their gradients
([parallel](parallel.md)).

**Data parallel (dp)** cuts the batch. Ranks 0 and 2 have the same parameters and read other samples; before
the update their gradients are added up. `--use-distributed-optimizer` (ZeRO-1) then cuts the update: each of
the two has the main parameters and moments of half of the values, updates these, and both gather the result.

{memory(ranks)}

Parameters and gradients of a rank are a fourth of the model and its part of the embedding; the last column is
half of that, cut by length in flat *buckets*, which is why ranks differ by a few values. ZeRO-2
(`--data-parallel-sharding-strategy optim_grads`) keeps only that half of the gradients as well.

## Long rows: context parallel (cp)

Each rank has every parameter and a part of the tokens of every row. Only attention needs the others' keys and
values, which go round in a ring ([context](context.md)). Gradients are added up over dp and cp, and the
optimizer is cut over both.

```
{groups(long, "tp", "cp", "dp_cp")}
```

## Experts: expert parallel (ep)

In a mixture of experts a token goes to a few of many MLPs. With `--ep 2` each of two dp ranks has half of
them, and tokens travel to their experts and back ([moe](moe.md)). So experts have fewer replicas (the axis
edp) than the rest has (dp):

```
{groups(experts, "dp", "ep", "edp")}
```

{weights(experts, 1)}

Rank 0 holds 8 of the 16 experts, two matrices each in the first layer of their MLPs, which are gated.

{memory(experts)}

## Next

[The life of a step](life-of-a-step.md) follows one step through the code on the eight ranks above. [Choosing
a layout](guides/layout.md) says which axes to take. `nanomegatron plan --config llama3-8b --gpus 8` counts
bytes and time.
"""


def main(argv: list[str]) -> int:
    """Exit code 0 where the page is current, or was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args(argv).write:
        PAGE.write_text(page(), encoding="utf-8")
    return int(PAGE.read_text(encoding="utf-8") != page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
