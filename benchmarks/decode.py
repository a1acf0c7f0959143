"""Tokens a second of generation on one GPU: prompts are read, then each step adds a token to each of them.

    python -m benchmarks.decode --out FILE.json                            llama3-8b in bf16, random weights
    python -m benchmarks.decode --forms graphs --batches 1 --profile --out FILE.json      times of its kernels
    python -m benchmarks.decode --config qwen3-8b --prompt 1024 --new 512 --out FILE.json
    python -m benchmarks.decode --small --out FILE.json                    a tiny model on a CPU, to test it

    graphs         nanomegatron generate on a GPU: fast/decode.py
    plain          the plain form, generate.next_logits
    transformers   the same shape as a model of transformers, static cache as large as the text; steps under
                   torch.compile(mode="reduce-overhead"), prompts without; skipped where it is not installed

All take the likeliest token, and the host reads it; in all but `plain` one step late. A text is
generated --repetitions times and once before, which compiles. `prefill_ms` is the whole time for one new
token. `decode_ms` is of a step, from the token number WARM to the last; `whole_tokens_per_s` counts all new
tokens over the whole time, with prompts, caches and captures. Medians of the repetitions.

`share` is the least time of a step over its time: all weights but the embedding's rows are read once, at the
bandwidth of a copy of 1 GiB (`copy_gb_per_s`, bytes read and written); `share_with_cache` counts the keys and
values of the text so far, too. Forms in the file that are not asked for stay.
"""

import argparse
import datetime
import importlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from nanomegatron.commands.generate import new_model
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import parse
from nanomegatron.config.hf import to_hf
from nanomegatron.config.sampling import Sampling
from nanomegatron.config.settings import Config
from nanomegatron.fast.decode import plain_reason
from nanomegatron.fast.host_copy import AsyncHostCopy
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.report.generate import stream
from tools.gpu_gate import build_kernels, commit_of
from tools.kernel_times import table

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "--config llama --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 96 --no-bf16 --device cpu"
)
WARM = 16  # tokens of a text that are not timed
PROFILED = 10  # steps
Text = Callable[[list[list[int]], int], Iterator[object]]  # prompts, number of new tokens: an item a step


def settings(args: argparse.Namespace) -> Config:
    """The model's. Raises SystemExit if it cannot be."""
    length = args.prompt + args.new
    words = f"{SMALL} --seq-length {length}" if args.small else ""
    words = words or f"--config {args.config} --bf16"
    parsed = parse([*words.split(), *"--mock-data --micro-batch-size 1 --train-iters 1".split()])
    if errors := [*parsed.errors, *validate(parsed.config, 1, "cpu" if args.small else "cuda")]:
        raise SystemExit("\n".join(errors))
    return resolve(parsed.config, 1)


def ours(config: Config, mesh: Mesh, graphs: bool) -> tuple[nn.Module, Text]:
    """The project's own model. Raises SystemExit if it is to run as graphs and does not."""
    model = new_model(config, mesh, config.data.vocab_size)
    if graphs and mesh.device.type == "cuda" and (why := plain_reason(model)):
        raise SystemExit(f"no graphs: {why}")
    model.decoder = model.decoder if graphs else None

    def text(prompts: list[list[int]], new: int) -> Iterator[object]:
        return stream(model, prompts, new, Sampling(temperature=0))

    return model, text


def theirs(config: Config, mesh: Mesh) -> tuple[nn.Module, Text]:
    """The model of transformers of this shape."""
    library, device = importlib.import_module("transformers"), mesh.device
    table = to_hf(config)
    dtype = getattr(torch, config.dtype_name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with device:
        model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**table)).eval()
    torch.set_default_dtype(before)
    old = "cache_position" in inspect.signature(type(model).forward).parameters  # before transformers 5
    caches: dict[tuple[int, int], object] = {}  # by batch and length; compiled steps are bound to theirs

    def step(tokens: torch.Tensor, places: torch.Tensor, cache: object) -> torch.Tensor:
        how = dict(past_key_values=cache, use_cache=True, position_ids=places[None], logits_to_keep=1)
        how |= dict(cache_position=places) if old else {}
        return model(tokens, **how).logits[:, -1].argmax(-1, keepdim=True)

    how = dict(backend="aot_eager") if device.type == "cpu" else dict(mode="reduce-overhead", fullgraph=True)
    compiled = torch.compile(step, dynamic=False, **how)

    @torch.no_grad()
    def text(prompts: list[list[int]], new: int) -> Iterator[object]:
        (b, s), length = (len(prompts), len(prompts[0])), len(prompts[0]) + new
        if (b, length) not in caches:
            sizes = dict(max_batch_size=b, device=device, dtype=dtype) if old else {}
            caches[b, length] = library.StaticCache(config=model.config, max_cache_len=length, **sizes)
        cache = caches[b, length]
        cache.reset()
        tokens = step(torch.tensor(prompts, device=device), torch.arange(s, device=device), cache)
        read = AsyncHostCopy(tokens[:, 0]).read
        for place in range(s, s + new - 1):
            at = torch.full((1,), place, device=device)
            tokens = compiled(tokens, at, cache).clone()
            before, read = read, AsyncHostCopy(tokens[:, 0]).read
            yield before()
        yield read()

    return model, text


FORMS = {
    "graphs": partial(ours, graphs=True),
    "plain": partial(ours, graphs=False),
    "transformers": theirs,
}


def timed(text: Text, prompts: list[list[int]], new: int) -> list[float]:
    """Seconds from the start to each token."""
    start = time.perf_counter()
    return [time.perf_counter() - start for _ in text(prompts, new)]


def measure(text: Text, b: int, config: Config, args: argparse.Namespace) -> dict[str, float]:
    """Times of a batch of b prompts."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.data.vocab_size, (b, args.prompt), generator=random).tolist()
    warm = min(WARM, args.new // 2)
    firsts, wholes, steps = [], [], []
    for repetition in range(args.repetitions + 1):
        first, times = timed(text, prompts, 1)[-1], timed(text, prompts, args.new)
        if len(times) != args.new:
            raise RuntimeError(f"{len(times)} steps for {args.new} tokens")
        if repetition:
            firsts.append(first)
            wholes.append(times[-1])
            steps.append((times[-1] - times[warm - 1]) / (args.new - warm))
    prefill, whole, decode = map(statistics.median, (firsts, wholes, steps))
    return {
        "prefill_ms": prefill * 1e3,
        "prefill_tokens_per_s": b * args.prompt / prefill,
        "decode_ms": decode * 1e3,
        "decode_ms_of_each": [step * 1e3 for step in steps],
        "decode_tokens_per_s": b / decode,
        "whole_tokens_per_s": b * args.new / whole,
    }


def least(model: nn.Module, b: int, config: Config, args: argparse.Namespace) -> tuple[int, int]:
    """Bytes that a step must read: of the weights, of the cache (at half of the new tokens)."""
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    total, size, shape = sum(weights.values()), next(model.parameters()).element_size(), config.model
    if shape.untie_embeddings_and_output_weights:
        total -= config.data.vocab_size * shape.hidden_size * size
    row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size
    return total, b * (args.prompt + args.new // 2) * row


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    x = torch.empty(2**30, dtype=torch.uint8, device=device)
    y, times = torch.empty_like(x), []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * x.numel() / statistics.median(times)


def profiled(text: Text, b: int, late: bool, args: argparse.Namespace) -> dict:
    """Milliseconds of the last steps together, by class of kernels and by kernel.

    late: a step is in flight when the host has a token, which is not among them.
    """
    count, steps = min(PROFILED, args.new // 2), text([[1] * args.prompt] * b, args.new)
    for _ in range(args.new - count - late):
        next(steps)
    if not args.small:
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        with torch.profiler.profile() as profile:
            for _ in steps:
                pass
        profile.export_chrome_trace(str(Path(folder) / "trace.json"))
        return {"steps": count} | (table(Path(folder) / "trace.json", count) or {})


def form_results(name: str, config: Config, mesh: Mesh, args: argparse.Namespace, copy: float) -> dict:
    """Build a form's model and measure it at each batch."""
    model, text = FORMS[name](config, mesh)
    found: dict = {"version": version("transformers")} if name == "transformers" else {}
    for b in args.batches:
        found[str(b)] = row = measure(text, b, config, args)
        weights, cache = least(model, b, config, args)
        row |= {"weight_bytes": weights, "cache_bytes": cache}
        if copy:
            row["share"] = weights / copy / row["decode_ms"] * 1e3
            row["share_with_cache"] = (weights + cache) / copy / row["decode_ms"] * 1e3
        row |= {"kernels": profiled(text, b, name != "plain", args)} if args.profile else {}
        print(name, b, {k: round(v, 3) for k, v in row.items() if isinstance(v, float | int)}, flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure the forms and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="llama3-8b", help="preset of the model")
    parser.add_argument("--forms", default=",".join(FORMS), help="which, in this order")
    parser.add_argument("--batches", default="1,8,64", help="numbers of prompts")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each")
    parser.add_argument("--repetitions", type=int, default=3, help="that are timed")
    parser.add_argument("--profile", action="store_true", help="also profile some steps")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    args.batches = [int(word) for word in args.batches.split(",")]
    config, device = settings(args), pick_device("cpu" if args.small else "cuda", World())
    build_kernels({"new": ROOT, "old": ROOT})
    mesh = Mesh.build(config.parallel, World(), device)
    copy = copy_bandwidth(device) if device.type == "cuda" else 0.0
    result = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    result |= {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.decode", *(sys.argv[1:] if argv is None else argv)]),
        "commit": commit_of(ROOT),
        "torch": version("torch"),
        "device": torch.cuda.get_device_name() if copy else "cpu",
        "copy_gb_per_s": copy / 1e9,
    }
    for name in args.forms.split(","):
        if name == "transformers" and not find_spec("transformers"):
            print("transformers is not installed: left out (pip install transformers)")
            continue
        result[name] = form_results(name, config, mesh, args, copy)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        if copy:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
