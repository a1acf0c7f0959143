"""What FP8 gives in each linear layer of a Llama-3-8B block: matmuls, sums of weight gradients, casts, all.

    python benchmarks/bench_fp8.py --out fp8.json [--only matmul] [--only qkv] [--small]

    matmul    y = x W^T, dx = g W and dW = g^T x by themselves, of tensors that have been cast: with a scale a
              tensor, fast and exact sums; a row; a block. TFLOP/s, beside bf16
    sum       dW of the first microbatch, written into main_grad (fp32), and of a later one: added by a pass
              over what the matmul wrote, or by the matmul (bf16, and FP8 with a scale a tensor). TFLOP/s
    cast      a bf16 matrix x, W or g, each way a recipe does it; `turned`: the columnwise copy is made of
              the rowwise one. GB/s of what must be read and written, and of the pass that an amax takes
    layer     forward and backward of a layer as in training, between casts of its weight. TFLOP/s

Rows are two sequences of 8192. All ways of a line take turns (kernels.py). What is multiplied is random: of
zeros a GPU would be faster, since it takes less power. `bf16` is the first way of all lines but casts, and
what others are compared with. A way that fails says why. `--small` runs all of it in seconds, on CPUs too.
"""

import argparse
import datetime
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import milliseconds  # noqa: E402
from nanomegatron.batch import Batch  # noqa: E402
from nanomegatron.build import quantize_early  # noqa: E402
from nanomegatron.config.cli import parse  # noqa: E402
from nanomegatron.fp8 import RECIPES, Fp8Linear, Quantized, Recipe, Scales  # noqa: E402
from nanomegatron.fp8_linear import use_fp8  # noqa: E402
from nanomegatron.mesh import Axis  # noqa: E402
from nanomegatron.model import TransformerLayer  # noqa: E402
from nanomegatron.ops.fp8_cast import Fp8Matrix  # noqa: E402
from nanomegatron.ops.fp8_matmul import add_fp8_product_, fp8_matmul  # noqa: E402
from nanomegatron.ops.kernels import usable  # noqa: E402
from nanomegatron.ops.merge import add_  # noqa: E402
from nanomegatron.ops.rope import rope_angles  # noqa: E402
from nanomegatron.param import Init, add_product  # noqa: E402
from nanomegatron.tp import ColumnParallelLinear, RowParallelLinear  # noqa: E402

KINDS = ("matmul", "sum", "cast", "layer")
ONE = Axis.single("tp")
Ways = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Layer:
    """A linear layer and its rows: x `[t, i]`, W `[o, i]`, g `[t, o]`."""

    name: str
    kind: type
    i: int
    o: int
    t: int
    device: torch.device

    @property
    def flops(self) -> int:
        """Of one of its three matmuls."""
        return 2 * self.t * self.i * self.o

    def tensors(self) -> dict[str, torch.Tensor]:
        """x, w and g, random, bf16."""
        shapes = {"x": (self.t, self.i), "w": (self.o, self.i), "g": (self.t, self.o)}
        scales = {"x": 1.0, "w": 0.02, "g": 1e-3}
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device=self.device)
        return {role: make(shape) * scales[role] for role, shape in shapes.items()}

    def main_grad(self) -> torch.Tensor:
        """Where the weight gradient is summed, fp32."""
        return torch.zeros(self.o, self.i, device=self.device)

    def fp8(self, recipe: str) -> Fp8Linear:
        """Its FP8 state. Delayed scaling as in later steps, but its scales are 1."""
        scales = Scales(Recipe(recipe), self.device)
        scales.no_history_yet = False
        return scales.add_layer(self.name)


@dataclass(frozen=True)
class Line:
    """One thing to do, and the ways to do it; `work`: FLOPs, or the bytes of each way."""

    name: str
    layer: str
    work: int | dict[str, int]
    ways: Ways


def layers(small: bool, device: torch.device) -> list[Layer]:
    """Those of a block of Llama-3-8B."""
    h, kv, ffn, t = (128, 64, 256, 128) if small else (4096, 1024, 14336, 16384)
    column, row = ColumnParallelLinear, RowParallelLinear
    sizes = (
        ("qkv", column, h, h + 2 * kv),
        ("proj", row, h, h),
        ("fc1", column, h, 2 * ffn),
        ("fc2", row, ffn, h),
    )
    return [Layer(*size, t, device) for size in sizes]


def matmuls(layer: Layer) -> Iterator[Line]:
    """The three by themselves; dW of FP8 in fp32, as main_grad is."""
    x, w, g = (values := layer.tensors()).values()
    bf16 = {"y": lambda: x @ w.t(), "dx": lambda: g @ w, "dW": lambda: g.t() @ x}
    casts = {
        recipe: {role: layer.fp8(recipe).cast(value, role) for role, value in values.items()}
        for recipe in ("tensorwise", "rowwise", "blockwise")
    }
    kinds = (
        ("tensor, fast", "tensorwise", True),
        ("tensor, exact", "tensorwise", False),
        ("row, fast", "rowwise", True),
        ("row, exact", "rowwise", False),
        ("block", "blockwise", False),
    )
    for product, run in bf16.items():
        ways: Ways = {"bf16": run}
        dtype = torch.float32 if product == "dW" else torch.bfloat16
        for name, recipe, fast in kinds:
            a, b = operands(casts[recipe], product)
            ways[name] = functools.partial(fp8_matmul, a, b, dtype, fast)
        yield Line(f"matmul {product}", layer.name, layer.flops, ways)


def operands(cast: dict[str, Quantized], product: str) -> tuple[Fp8Matrix, Fp8Matrix]:
    """What y, dx or dW is a product of."""
    x, w, g = cast.values()
    return {"y": (x.rowwise, w.rowwise), "dx": (g.rowwise, w.columnwise), "dW": (g.columnwise, x.columnwise)}[
        product
    ]


def sums(layer: Layer) -> Iterator[Line]:
    """dW of the first microbatch, and of a later one."""
    x, w, g = (values := layer.tensors()).values()
    main, temporary = layer.main_grad(), torch.empty(layer.o, layer.i, device=layer.device)
    casts = {
        recipe: operands({role: layer.fp8(recipe).cast(value, role) for role, value in values.items()}, "dW")
        for recipe in ("tensorwise", "blockwise")
    }
    a, b = casts["tensorwise"]

    def into(out: torch.Tensor) -> torch.Tensor:
        inverses = a.inverse, b.inverse
        return torch._scaled_mm(a.data, b.data.t(), *inverses, out_dtype=out.dtype, out=out)

    ways: Ways = {
        "bf16": lambda: add_product(main, g, x),
        "first": lambda: into(main),
        "add fp32": lambda: main.add_(fp8_matmul(a, b, torch.float32)),
        "add bf16": lambda: main.add_(fp8_matmul(a, b, torch.bfloat16)),
        "add bf16, fast": lambda: main.add_(fp8_matmul(a, b, torch.bfloat16, fast=True)),
        "block, add fp32": lambda: main.add_(fp8_matmul(*casts["blockwise"], torch.float32)),
        "block, add bf16": lambda: main.add_(fp8_matmul(*casts["blockwise"], torch.bfloat16)),
        "add alone": lambda: main.add_(temporary),
        "add in the matmul": lambda: add_fp8_product_(main, a, b),
    }
    yield Line("sum", layer.name, layer.flops, ways)


def casts(layer: Layer) -> Iterator[Line]:
    """x, W and g, each way."""
    for role, x in layer.tensors().items():
        known = cast_ways(layer, role, x)
        size = {name: count * x.numel() for name, (count, _) in known.items()}
        yield Line(f"cast {role}", layer.name, size, {name: run for name, (_, run) in known.items()})


def cast_ways(layer: Layer, role: str, x: torch.Tensor) -> dict[str, tuple[int, Callable]]:
    """By name the bytes a value, scales left out, and what is run."""
    delayed, tensor, rows, blocks = (layer.fp8(recipe) for recipe in RECIPES)
    made = [fp8.cast(x, role, "rowwise").rowwise for fp8 in (tensor, rows, blocks)]
    return {
        "copy": (4, x.clone),
        "row": (3, lambda: delayed.cast(x, role, "rowwise")),
        "both": (4, lambda: delayed.cast(x, role)),
        "amax, both": (6, lambda: tensor.cast(x, role)),
        "turned bytes": (2, lambda: tensor.requantize_transposed(made[0], role)),
        "rows, row": (3, lambda: rows.cast(x, role, "rowwise")),
        "rows, both": (6, lambda: rows.cast(x, role)),
        "rows, turned": (3, lambda: rows.requantize_transposed(made[1], role)),
        "blocks, row": (3, lambda: blocks.cast(x, role, "rowwise")),
        "blocks, both": (4, lambda: blocks.cast(x, role)),
        "blocks, turned": (2, lambda: blocks.requantize_transposed(made[2], role)),
    }


class Bucket:
    """As much of one as a layer needs to add to `main_grad`."""

    def alloc_grads(self) -> None:
        """The memory is there."""

    def add(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        add_(param.main_grad, grad)

    def ready(self, param: torch.Tensor) -> None:
        """Nobody waits for it."""


def whole_layers(layer: Layer) -> Iterator[Line]:
    """Forward and backward of a microbatch that is not the step's first."""
    x, _, g = layer.tensors().values()
    x, g = x[:, None].requires_grad_(), g[:, None]  # [s, b, h]
    main, ways = layer.main_grad(), {}
    for name in ("bf16", *RECIPES):
        init = Init(dtype=torch.bfloat16, device=layer.device, name=layer.name)
        linear = layer.kind(layer.i, layer.o, ONE, init, bias=False)
        linear.weight.bucket, linear.weight.main_grad = Bucket(), main
        if name != "bf16":
            use_fp8(linear, layer.fp8(name))

        def run(linear: torch.nn.Module = linear) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(linear(x), x, g)

        ways[name] = run
        if name == "delayed":  # a step, so that its scales are those of such tensors
            run()
            linear.fp8.scales.end_step()
    yield Line("layer", layer.name, 3 * layer.flops, ways)


def kept(small: bool, device: torch.device) -> dict[str, float]:
    """Bytes a token that a transformer layer keeps for its backward, its casts of weights not counted."""
    flags = "--config llama3-8b --mock-data --tokenizer-type NullTokenizer --num-layers 1 --bf16"
    flags += " --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2" * small
    config, tokens, found = parse(flags.split()).config.model, 256 if small else 8192, {}
    x = torch.randn(tokens, 1, config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True)
    positions = torch.arange(tokens, device=device)
    batch = Batch(torch.zeros(1, tokens, dtype=torch.long, device=device), positions)
    rotary = rope_angles(positions, config)
    for name in ("bf16", *RECIPES):
        init = Init(dtype=torch.bfloat16, device=device, name="layer")
        layer, scales = TransformerLayer(config, 0, ONE, init), Scales(Recipe("delayed"), device)
        if name != "bf16":
            scales = Scales(Recipe(name), device)
            for linear in layer.modules():
                if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                    use_fp8(linear, scales.add_layer(linear.weight.spec.name))
            quantize_early(layer)
        layer(x, batch, rotary).sum().backward()
        scales.end_step()
        with torch.no_grad():
            layer(x, batch, rotary)  # casts the weights
        gc.collect()  # the casts of the layer before
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        y = layer(x, batch, rotary)
        after = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            found[name] = (after - before - 2 * y.numel()) / tokens
        del y  # and all that it keeps
    return found


MAKE = dict(zip(KINDS, (matmuls, sums, casts, whole_layers), strict=True))


def on_cpu(ways: Ways) -> dict[str, float]:
    """In place of `milliseconds`: one run, to see that it works."""
    found = {}
    for name, run in ways.items():
        began = time.perf_counter()
        run()
        found[name] = 1e3 * (time.perf_counter() - began)
    return found


def measured(kind: str, layer: Layer) -> Iterator[dict]:
    """All lines of a kind. What fails before there are ways to measure is a row of its own."""
    try:
        for line in MAKE[kind](layer):
            yield measure(line)
    except Exception as problem:  # the other kinds and layers are still to be measured
        yield {"name": kind, "layer": layer.name, "ways": {"all": failure(problem)}}


def failure(problem: Exception) -> dict:
    """What the JSON says of it."""
    return {"failed": f"{type(problem).__name__}: {problem}"[:300]}


def measure(line: Line) -> dict:
    """Milliseconds of each way, and TFLOP/s or GB/s; a way that fails tells why."""
    row, working = {"name": line.name, "layer": line.layer, "ways": {}}, {}
    for name, run in line.ways.items():
        try:
            run()
            working[name] = run
            row["ways"][name] = {}
        except Exception as problem:  # one way that does not run here must not end the rest
            row["ways"][name] = failure(problem)
    gpu = torch.cuda.is_available()
    for name, ms in (milliseconds if gpu else on_cpu)(working).items():
        bytes_moved = line.work[name] if isinstance(line.work, dict) else 0
        rate = {"gb_per_s": bytes_moved / ms / 1e6} if bytes_moved else {"tflops": line.work / ms / 1e9}
        row["ways"][name] = {"ms": ms, **rate}
    return row


def together(rows: list[dict]) -> list[dict]:
    """Per name the milliseconds of all layers together: of the ways that ran in each of them."""
    found = []
    for name in dict.fromkeys(row["name"] for row in rows):
        alike = [row["ways"] for row in rows if row["name"] == name]
        ways = [way for way in alike[0] if all("ms" in told.get(way, {}) for told in alike)]
        ms = {way: {"ms": sum(told[way]["ms"] for told in alike)} for way in ways}
        found.append({"name": name, "layer": "all", "ways": ms})
    return found


def table(rows: list[dict]) -> str:
    """Markdown: a line a way."""
    lines = ["| what | layer | way | ms | TFLOP/s | GB/s | times as fast as bf16 |"]
    lines.append("|---|---|---|--:|--:|--:|--:|")
    for row in [*rows, *together(rows)]:
        for way, told in row["ways"].items():
            begin = f"| {row['name']} | {row['layer']} | {way} |"
            if "ms" not in told:
                lines.append(f"{begin} failed | | | |")
                continue
            rates = (f"{told[key]:.0f}" if key in told else "" for key in ("tflops", "gb_per_s"))
            bf16 = row["ways"].get("bf16", {}).get("ms")
            factor = f"{bf16 / told['ms']:.2f}" if bf16 else ""
            lines.append(f"{begin} {told['ms']:.3f} | {' | '.join(rates)} | {factor} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measure, write the JSON after each line, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument(
        "--only", action="append", default=[], help="of the kinds and layers; may be repeated"
    )
    parser.add_argument("--small", action="store_true", help="tiny layers")
    args = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    every = layers(args.small, torch.device("cuda" if gpu else "cpu"))
    if unknown := set(args.only) - {*KINDS, *(layer.name for layer in every)}:
        parser.error(f"--only {', '.join(sorted(unknown))}: there is no such kind or layer")
    kinds = [kind for kind in KINDS if kind in args.only] or KINDS
    chosen = [layer for layer in every if layer.name in args.only] or every
    result = dict(
        date=datetime.datetime.now().isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name() if gpu else "cpu",
        torch=torch.__version__,
        kernels=usable(torch.empty(1, device=every[0].device), "fp8_cast"),  # ours, else plain torch casts
        rows=[],
    )
    torch.manual_seed(1)
    for kind in kinds:
        for layer in chosen:
            for row in measured(kind, layer):
                result["rows"].append(row)
                for way, told in row["ways"].items():
                    if "failed" in told:
                        print(f"{row['name']} {layer.name} {way}: {told['failed']}", file=sys.stderr)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    if not args.only:
        result["kept_bytes_a_token"] = kept(args.small, every[0].device)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    casts_by = "our kernels" if result["kernels"] else "plain torch"
    print(f"{result['date']}  torch {result['torch']}  {result['device']}  casts by {casts_by}")
    print(table(result["rows"]))
    for name, size in result.get("kept_bytes_a_token", {}).items():
        print(f"a layer keeps {size:.0f} bytes a token, {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
