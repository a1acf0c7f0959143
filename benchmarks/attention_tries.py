"""What else computes causal attention on Hopper: layouts, cuDNN's module, flex, Triton, Gluon, FA3.

    python -m benchmarks.attention_tries --out tries.json               all, at most two and a half minutes
    python -m benchmarks.attention_tries triton gluon --out tries.json  these groups
    python -m benchmarks.attention_tries layouts --small --out x.json   tiny, on a CPU

Each group is a process with a time limit, since a kernel that is tried may hang or end the process. There
each try is timed beside `ours` (ops/attention.py as the model calls it, on views of the packed projection),
forward and backward by themselves, interleaved (session.py). `error` is against attention in fp32. A try that
fails is a line that says why. One sequence of 8192, 32 query and 8 key heads of 128, bf16.

    layouts    q, k, v apart; heads first; keys repeated for each query head; no log-sum-exp; torch's flash
    gluon      attention_kernels.py: a producer and two consumers by hand; forward
    triton     attention_kernels.py: TMA, the compiler's pipeline or warp specialization; forward
    frontend   cuDNN's own Python module, plan by plan of its heuristics; forward
    fa         FlashAttention 3 and 4, where torch finds them
    flex       FlexAttention, compiled, by kernel options
"""

import argparse
import functools
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch import config as functorch
from torch.nn import attention
from torch.nn.attention import flex_attention as flex

from benchmarks.session import Case, Run, Session
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import World
from nanomegatron.ops.attention import Block, attend, attend_backward, choose_backend, one_per_query

Tensors = tuple[torch.Tensor, ...]
CAUSAL = Block(causal=True)
LIMITS = dict(layouts=25, gluon=20, triton=30, frontend=15, fa=15, flex=45)  # seconds; in this order
FLEX = {
    "as it is": {},
    "128 x 128": dict(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
    "128 x 64": dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
    "TMA": dict(USE_TMA=True, BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
    "flash": dict(BACKEND="FLASH"),
}
TRITON = {  # rows, keys, warps, stages, whether warps are specialized
    "128 x 128": (128, 128, 8, 2, False),
    "128 x 64": (128, 64, 8, 3, False),
    "128 x 64, 4 stages": (128, 64, 8, 4, False),
    "128 x 128, specialized": (128, 128, 4, 2, True),
    "128 x 64, specialized": (128, 64, 4, 3, True),
}


class Problem:
    """Inputs, and what is expected of them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, small: bool) -> None:
        self.s, self.n, self.g, self.d = (64, 4, 2, 16) if small else (8192, 32, 8, 128)
        self.backend = choose_backend("auto", device, dtype)
        torch.manual_seed(1)
        packed = torch.randn(self.s, 1, (self.n + 2 * self.g) * self.d, device=device).to(dtype)
        parts = packed.split([self.n * self.d, self.g * self.d, self.g * self.d], dim=-1)
        self.packed = tuple(part.unflatten(-1, (-1, self.d)) for part in parts)
        self.dout = torch.randn(self.s, 1, self.n, self.d, device=device).to(dtype)
        self.flops = 4 * self.s * self.s * self.n * self.d / 2  # of the forward, masked scores not counted

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, Tensors]:
        """The output and the gradients, in fp32 but for the dtype they have; a key head at a time."""
        rows, repeat = [], self.n // self.g
        hidden = CAUSAL.hidden(self.s, self.s, self.dout.device)
        for i in range(self.g):
            heads = slice(i * repeat, (i + 1) * repeat)
            ends = slice(i, i + 1)
            q, k, v = (x[:, 0, at].float() for x, at in zip(self.packed, (heads, ends, ends)))
            leaves = [x.transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
            scores = leaves[0] @ leaves[1].transpose(1, 2) / math.sqrt(self.d)
            out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
            dout = self.dout[:, 0, heads].float().transpose(0, 1)
            rows.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
            del scores, out
        out, *grads = (torch.cat(some).transpose(0, 1)[:, None] for some in zip(*rows, strict=True))
        return out, tuple(grads)

    def cases(self, name: str, forward: Callable | None, backward: Callable | None) -> Iterator[Case]:
        """A try beside ours; forward, backward: build its Run, whose results are `[s, 1, heads, d]`."""
        if forward:
            forms = {"ours": lambda: self.forward(*self.packed), name: forward}
            expected = lambda: self.expected[:1]  # noqa: E731
            yield Case(f"{name}, forward", forms, flops=self.flops, expected=expected)
        if backward:
            forms = {"ours": lambda: self.backward(*self.packed), name: backward}
            yield Case(f"{name}, backward", forms, flops=2.5 * self.flops, expected=lambda: self.expected[1])

    def forward(self, *qkv: torch.Tensor, backend: str | None = None) -> Run:
        return Run(lambda: attend(*qkv, CAUSAL, backend or self.backend), finish=lambda out, lse: (out,))

    def backward(self, *qkv: torch.Tensor, backend: str | None = None) -> Run:
        backend = backend or self.backend
        results = attend(*qkv, CAUSAL, backend)

        def finish(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Tensors:
            grouped = (x.unflatten(2, (self.g, -1)).sum(3) for x in (dk, dv))  # of repeated heads
            return dq, *grouped

        return Run(lambda: attend_backward(self.dout, *qkv, *results, CAUSAL, backend), finish=finish)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """`[s, 1, heads, d] -> [1, heads, s, d]`, a view"""
    return x.permute(1, 2, 0, 3)


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """`[1, heads, s, d] -> [s, 1, heads, d]`, a view"""
    return x.permute(2, 0, 1, 3)


# The groups


def layouts(p: Problem) -> Iterator[Case]:
    """Our own calls on other tensors, and torch's flash attention."""
    q, k, v = p.packed
    apart = tuple(x.contiguous() for x in p.packed)
    first = tuple(tokens_first(heads_first(x).contiguous()) for x in p.packed)
    repeated = (apart[0], *(tokens_first(one_per_query(heads_first(x), p.n)).contiguous() for x in (k, v)))
    for name, some in (("apart", apart), ("heads first", first), ("heads repeated", repeated)):
        forms = (functools.partial(pass_, *some) for pass_ in (p.forward, p.backward))
        yield from p.cases(name, *forms)

    def without_lse() -> Run:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        given = *map(heads_first, p.packed), None, False, 0.0, True, False
        return Run(lambda: op(*given)[0], finish=lambda out: (tokens_first(out),))

    yield from p.cases("no log-sum-exp", without_lse, None)
    flash = (functools.partial(pass_, *p.packed, backend="flash") for pass_ in (p.forward, p.backward))
    yield from p.cases("torch flash", *flash)


def frontend(p: Problem) -> Iterator[Case]:
    """The plans that cuDNN's heuristics name for the forward, one by one; none of its backward."""
    for index in range(3):
        yield from p.cases(f"cuDNN plan {index}", functools.partial(frontend_run, p, index), None)


def frontend_run(p: Problem, index: int) -> Run:
    """A plan of cuDNN. Raises ImportError without its Python module."""
    cudnn = importlib.import_module("cudnn")
    half, single = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    types = dict(io_data_type=half, intermediate_data_type=single, compute_data_type=single)
    graph, given = cudnn.pygraph(**types), [heads_first(x) for x in p.packed]
    q, k, v = map(graph.tensor_like, given)
    settings = dict(is_inference=False, attn_scale=p.d**-0.5, use_causal_mask=True)
    o, stats = graph.sdpa(name="sdpa", q=q, k=k, v=v, **settings)
    out = torch.empty_like(heads_first(p.dout))
    lse = torch.empty(1, p.n, p.s, 1, device=out.device)
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    stats.set_output(True).set_data_type(single)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.ALL)
    if index >= graph.get_execution_plan_count():
        raise ValueError(f"there are {graph.get_execution_plan_count()} plans")
    space = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=out.device)
    places = dict(zip((q, k, v, o, stats), (*given, out, lse), strict=True))

    def call() -> torch.Tensor:
        graph.execute_plan_at_index(places, space, index)
        return out

    facts = {"cudnn_frontend": cudnn.__version__, "cudnn_backend": cudnn.backend_version()}
    return Run(call, finish=lambda out: (tokens_first(out),), facts=facts)


def flexes(p: Problem) -> Iterator[Case]:
    """FlexAttention; backward for the first and the last options, where others differ in the forward only."""
    device, options = p.dout.device.type, {"dynamic": False}
    functorch.donated_buffer = False  # a backward is called more than once

    def built(kernel: dict[str, Any], train: bool) -> tuple[Callable, list[torch.Tensor]]:
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, p.s, p.s, device=device)
        call = torch.compile(flex.flex_attention, **options)
        given = [heads_first(x).detach().requires_grad_(train) for x in p.packed]
        return lambda: call(*given, block_mask=mask, enable_gqa=True, kernel_options=kernel), given

    def forward(kernel: dict[str, Any]) -> Run:
        return Run(built(kernel, False)[0], finish=lambda out: (tokens_first(out),))

    def backward(kernel: dict[str, Any]) -> Run:
        call, given = built(kernel, True)
        out, dout = call(), heads_first(p.dout)
        grads = functools.partial(torch.autograd.grad, retain_graph=True)
        return Run(lambda: grads(out, given, dout), finish=lambda *each: tuple(map(tokens_first, each)))

    for name, kernel in FLEX.items():
        both = not kernel or "BACKEND" in kernel
        passes = (functools.partial(pass_, kernel) for pass_ in (forward, backward)[: 1 + both])
        yield from p.cases(f"flex {name}", *passes, *([] if both else [None]))


def flat(x: torch.Tensor) -> torch.Tensor:
    """`[s, 1, heads, d] -> [s, heads d]`, a view"""
    return x[:, 0].flatten(1)


def outputs(p: Problem) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Room for the output and the log-sum-exp, and the scale of scores with exponents of 2."""
    lse = torch.empty(p.n, p.s, device=p.dout.device)
    return torch.empty_like(p.dout), lse, math.log2(math.e) * p.d**-0.5


def tritons(p: Problem) -> Iterator[Case]:
    """The Triton kernel, by the size of blocks, warps and stages."""
    for name, setting in TRITON.items():
        yield from p.cases(f"triton {name}", functools.partial(triton_run, p, *setting), None)


def triton_run(p: Problem, rows: int, keys: int, warps: int, stages: int, specialized: bool) -> Run:
    kernels = importlib.import_module("benchmarks.attention_kernels")
    describe = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    out, lse, scale = outputs(p)
    q, k, v = (describe(flat(x), [block, p.d]) for x, block in zip(p.packed, (rows, keys, keys)))
    sizes = dict(H=p.n, G=p.g, D=p.d, BM=rows, BN=keys, WS=specialized)

    def call() -> torch.Tensor:
        grid = (p.s // rows * p.n,)
        kernels.triton_forward[grid](
            q, k, v, out, lse, p.s, scale, **sizes, num_warps=warps, num_stages=stages
        )
        return out

    return checked(p, call, lse)


def gluons(p: Problem) -> Iterator[Case]:
    """The Gluon kernel, by blocks of keys in shared memory and whether consumers alternate."""
    for name, setting in {"2 stages": (2, False), "turns": (2, True), "3 stages": (3, False)}.items():
        yield from p.cases(f"gluon {name}", functools.partial(gluon_run, p, *setting), None)


def gluon_run(p: Problem, stages: int, turns: bool) -> Run:
    kernels = importlib.import_module("benchmarks.attention_kernels")
    describe = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    shared = kernels.gl.NVMMASharedLayout
    out, lse, scale = outputs(p)

    def described(x: torch.Tensor, rows: int) -> Any:
        layout = shared.get_default_for([rows, p.d], kernels.gl.bfloat16)
        return describe.from_tensor(flat(x), [rows, p.d], layout)

    q, k, v, o = map(described, (*p.packed, out), (64, p.d, p.d, 64))
    sizes = dict(H=p.n, G=p.g, D=p.d, BN=p.d, STAGES=stages, TURNS=turns)

    def call() -> torch.Tensor:
        grid = (p.s // 128 * p.n,)
        kernels.gluon_forward[grid](q, k, v, o, lse, p.s, scale, **sizes, num_warps=4)
        return out

    return checked(p, call, lse)


def checked(p: Problem, call: Callable[[], torch.Tensor], lse: torch.Tensor) -> Run:
    """The Run of a forward that writes lse; raises ValueError where that is not ours."""
    call()
    error = (lse - attend(*p.packed, CAUSAL, p.backend)[1][0]).abs().max().item()
    if not error < 1e-2:
        raise ValueError(f"the log-sum-exp differs by {error}")
    return Run(call, finish=lambda out: (out,), facts={"lse_error": error})


def flash_attentions(p: Problem) -> Iterator[Case]:
    """Forward and backward of FlashAttention 3 and 4, which torch imports if they are installed."""

    def forward(name: str) -> Run:
        attention.activate_flash_attention_impl(name)
        given = [heads_first(x) for x in p.packed]

        def call() -> torch.Tensor:
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)

        return Run(call, finish=lambda out: (tokens_first(out),))

    def backward(name: str) -> Run:
        attention.activate_flash_attention_impl(name)
        given = [heads_first(x).detach().requires_grad_() for x in p.packed]
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        grads = functools.partial(torch.autograd.grad, retain_graph=True)
        call = functools.partial(grads, out, given, heads_first(p.dout))
        return Run(call, finish=lambda *each: tuple(map(tokens_first, each)))

    for name in ("FA3", "FA4"):
        yield from p.cases(name, functools.partial(forward, name), functools.partial(backward, name))


GROUPS = dict(
    layouts=layouts, gluon=gluons, triton=tritons, frontend=frontend, fa=flash_attentions, flex=flexes
)


# The processes


def measure(args: argparse.Namespace) -> None:
    """One group, in this process; the JSON after each case."""
    session = Session(args, World.from_environment(), ParallelConfig())
    with_triton = importlib.util.find_spec("triton")
    session.result["triton"] = importlib.import_module("triton").__version__ if with_triton else None
    problem = Problem(session.device, session.dtype, args.small)
    session.run(GROUPS[args.groups[0]](problem))


def run_group(args: argparse.Namespace, group: str, folder: Path) -> dict[str, Any]:
    """One group in a process of its own: its result, and why it ended early."""
    out, begin = folder / f"{group}.json", time.monotonic()
    words = [sys.executable, "-m", "benchmarks.attention_tries", group, "--here", "--out", str(out)]
    ended = ""
    with (folder / f"{group}.err").open("w") as errors:
        try:
            words += ["--small"] * args.small
            code = subprocess.run(words, timeout=LIMITS[group], stderr=errors).returncode
            ended = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"over {LIMITS[group]} s"
    if ended:
        print(f"{group}: {ended}; {(folder / f'{group}.err').read_text()[-300:].strip()!r}", flush=True)
    result = json.loads(out.read_text()) if out.exists() else {"cases": {}}
    return result | {"ended": ended, "seconds": round(time.monotonic() - begin, 1)}


def main(words: list[str]) -> int:
    """The groups one after another; the JSON holds each one's result under its name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--small", action="store_true", help="tiny, on CPUs too")
    parser.add_argument("--here", action="store_true", help="one group, in this process")
    args = parser.parse_args(words)
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"{', '.join(sorted(unknown))}: the groups are {', '.join(GROUPS)}")
    args.names, args.form, args.command = [], [], " ".join(words)
    args.samples, args.sample_ms = (2, 0.1) if args.small else (15, 5.0)
    if args.here:
        measure(args)
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="attention-tries-", ignore_cleanup_errors=True) as folder:
        for group in args.groups or GROUPS:
            found[group] = run_group(args, group, Path(folder))
            args.out.write_text(json.dumps({"command": args.command, "groups": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
