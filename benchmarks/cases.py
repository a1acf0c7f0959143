"""The cases of measure.py: what is trained, with which flags of train.py, and by whom. Data, part by part.

    one         a slice of Llama-3-8B on one GPU: our kernels, torch's own operations, torch.compile
    gpt2        GPT-2 124M on one GPU, in small to large microbatches, beside a nanoGPT-like model
    1b          Llama of a billion parameters on one GPU
    fp8         the same slice in bf16, in every FP8 recipe, and by torchao
    tp dp pp    tensor, data and pipeline parallelism, beside DTensor, FSDP2 and torch.distributed.pipelining
    cp          long rows over all GPUs            long     the longest rows, by what is recomputed
    dynamic     documents of all lengths: fixed and dynamic context parallelism (long_tail.py)
    ep          mixtures of experts, beside transformers under FSDP2
    offload     all of Llama-3-8B on one GPU, the optimizer's state in host memory
    *-losses    the losses of whole runs, several seeds: FP8, state in 16 bits, experts beside dense layers

The number at the end of a name is that of the microbatches of a step. `one gpu` is eight layers of the same
model on a GPU by itself, the speed that could be reached at most.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tools.gpu_gate import COMMON, FP8, LLAMA, QWEN, ZERO1

PEERS, STAGES, EXPERTS, GPT2 = (f"benchmarks/peers{name}.py" for name in ("", "_pipeline", "_moe", "_gpt2"))
HEAD = "--fp8-output-proj"
LEAN = "--grad-reduce-in-bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise")
FUSED = "--cross-entropy-loss-fusion"
FLOPS = "--pipeline-split flops"
EVEN = "--moe-router-force-load-balancing"
FEW = "--recompute-granularity selective --recompute-modules mlp_act layernorm"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

Row = str | tuple[str, str]  # flags, and the program if it is not train.py
ONE: dict[str, Row] = {
    "kernels": "",
    "no kernels": ("", f"{PEERS} no-kernels"),
    "compile": ("", f"{PEERS} compile"),
    "kernels, fused loss": FUSED,
    "fp8": FP8,
}
PRECISIONS: dict[str, Row] = {
    "bf16": "",
    **{f"fp8 {recipe}": f"--fp8-format hybrid --fp8-recipe {recipe}" for recipe in RECIPES},
    "fp8 delayed, head too": f"{FP8} {HEAD}",
    "torchao tensorwise": ("", f"{PEERS} torchao-tensorwise"),
    "torchao rowwise": ("", f"{PEERS} torchao-rowwise"),
    "lean bf16": LEAN,  # gradients and moments in 16 bits
    "lean fp8": f"{LEAN} {FP8}",
    "lean fp8, head too": f"{LEAN} {FP8} {HEAD}",
}
STATES: dict[str, Row] = {  # of AdamW; a share of 0.001 is less than a moment in bf16 can change by
    "bf16": "",
    "lean bf16": LEAN,
    "bf16, beta2 0.999": "--adam-beta2 0.999",
    "lean bf16, beta2 0.999": f"{LEAN} --adam-beta2 0.999",
}
SMALL_MODEL: dict[str, Row] = {
    "bf16": "",
    "compile": ("", f"{GPT2} compile"),
    "reduce-overhead": ("", f"{GPT2} reduce-overhead"),
    "fp8": FP8,
}
BILLION: dict[str, Row] = {
    "bf16": "",
    "fp8": FP8,
    "fp8, head too": f"{FP8} {HEAD}",
    "lean bf16": LEAN,
    "lean fp8": f"{LEAN} {FP8}",
    "lean fp8, head too": f"{LEAN} {FP8} {HEAD}",
}
ONE_BILLION = f"{COMMON} --config llama3-8b --bf16 --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 "
ONE_BILLION += "--seq-length 4096 --micro-batch-size 4 --global-batch-size 4"  # the shape of Llama-3.2-1B
TENSOR: dict[str, Row] = {
    "tp": "",
    "tp overlap": "--tp-comm-overlap",
    "tp fused loss": FUSED,
    "dtensor": ("", f"{PEERS} dtensor"),
    "dtensor async": ("", f"{PEERS} dtensor-async"),
    "tp overlap, fused loss": f"--tp-comm-overlap {FUSED}",
    "tp fp8": FP8,
    "tp fp8 overlap": f"--tp-comm-overlap {FP8}",
}
DATA: dict[str, Row] = {
    "dp overlap": ZERO1,
    "dp": "--use-distributed-optimizer",
    "fsdp": ("", f"{PEERS} fsdp"),
    "dp overlap, fused loss": f"{ZERO1} {FUSED}",
    "dp fp8": f"{ZERO1} {FP8}",
    "dp fp8 gather": f"{ZERO1} {FP8} --fp8-param-gather",
    "fsdp kept": ("", f"{PEERS} fsdp-kept"),
    "fsdp torchao": ("", f"{PEERS} fsdp-torchao"),
    "dp optim_grads": f"{ZERO1} --data-parallel-sharding-strategy optim_grads",
}
PIPELINES: dict[str, Row] = {
    "interleaved 4": f"--vpp 4 {FLOPS}",
    "torch interleaved 4": (f"--vpp 4 {FLOPS}", f"{STAGES} interleaved"),
    "1f1b": "",
    "1f1b flops": FLOPS,
    "interleaved 2": f"--vpp 2 {FLOPS}",
    "zb-h1": f"--pipeline-schedule zb-h1 {FLOPS}",
    "zb-v": f"--pipeline-schedule zb-v {FLOPS}",
    "torch 1f1b": (FLOPS, f"{STAGES} 1f1b"),
    "torch zb-v": (f"--pipeline-schedule zb-v {FLOPS}", f"{STAGES} zb-v"),
    "torch interleaved 4, eager": (f"--vpp 4 {FLOPS}", f"{STAGES} interleaved-eager"),
    "torch interleaved zero bubble 4": (f"--vpp 4 {FLOPS}", f"{STAGES} interleaved-zero-bubble"),
}
ROWS = {  # thousands of tokens, layers, flags
    "32k": (32, 32, ""),
    "64k": (64, 32, FEW),
    "128k": (128, 16, ""),
    "32k a2a": (32, 32, "--cp-comm-type a2a"),
    "32k allgather": (32, 32, "--cp-comm-type allgather"),
    "32k fp8": (32, 32, FP8),
    "64k fp8": (64, 32, f"{FEW} {FP8}"),
    "128k a2a": (128, 16, "--cp-comm-type a2a"),
    "128k allgather": (128, 16, "--cp-comm-type allgather"),
    "128k all layers": (128, 32, WHOLE),
}
RECOMPUTED = {"nothing recomputed": "", "norms, SwiGLU recomputed": FEW, "layers recomputed": WHOLE}
MIXTRAL = f"{COMMON} --config mixtral-8x7b --bf16 --num-layers 4 --seq-length 4096 {FUSED} "
MODELS = {  # flags, sequences of a microbatch
    "mixtral": (MIXTRAL, 2),
    "qwen": (f"{QWEN} --num-layers 12 {FEW.replace('mlp_act', 'moe_act')}", 4),
}
MOE: dict[str, Row] = {
    "": "",
    " even": EVEN,
    " transformers": ("", f"{EXPERTS} grouped"),
    " allgather": "--moe-token-dispatcher-type allgather",
    " even allgather": f"{EVEN} --moe-token-dispatcher-type allgather",
    " halves": "--overlap-moe-expert-parallel-comm",
    " loop": "--no-moe-grouped-gemm",
    " fp8": "--fp8-format hybrid --fp8-recipe rowwise",
    " transformers, recomputed": ("", f"{EXPERTS} grouped-recomputed"),
    " transformers, loop": ("", f"{EXPERTS} loop-recomputed"),
}
NO_BALANCE = "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
BIAS += "--moe-router-bias-update-rate 1e-2"
ROUTERS = {
    "dense": "--config tiny-cpu --lr 2e-3 --min-lr 1e-4",  # the rate of tiny-moe-cpu
    "dense preset": "--config tiny-cpu",
    "no balancing": f"--config tiny-moe-cpu {NO_BALANCE}",
    "aux loss": "--config tiny-moe-cpu",
    "expert bias": f"--config tiny-moe-cpu {NO_BALANCE} {BIAS}",
}
WEIGHTS_ONLY = "--no-save-optim --eval-interval 100000 --save-interval 100000"
LOSSES = {  # flags of all runs: --hidden-size 256 because blocks of FP8 are of 128
    "fp8-losses": f"{WEIGHTS_ONLY} --config tiny-cpu --hidden-size 256 --device cpu --bf16",
    "fp8-losses-125m": f"{WEIGHTS_ONLY} --config gpt2-124m --bf16 --micro-batch-size 16 --train-iters 1000 "
    "--global-batch-size 16 --lr-warmup-fraction 0.1 --eval-iters 10",
    "fp8-head-losses": f"{WEIGHTS_ONLY} --config gpt2-124m --bf16 --micro-batch-size 16 --train-iters 1200 "
    "--global-batch-size 16 --lr-warmup-fraction 0.1 --eval-iters 10",
    "lean-losses": f"{WEIGHTS_ONLY} --config tiny-cpu --device cpu --bf16",
    "moe-losses": f"{WEIGHTS_ONLY} --device cpu",
}

TINY = "--device cpu --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 8 "
TINY += "--num-query-groups 4 --vocab-size 96 --seq-length 16 --make-vocab-size-divisible-by 8 "
TINY_LOSSES = "--num-layers 1 --hidden-size 128 --num-attention-heads 2 --ffn-hidden-size 256 "
TINY_LOSSES += "--seq-length 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --eval-iters 2"
ROWS_OF_16 = "--make-vocab-size-divisible-by 16"
SMALL = {  # flags behind those of a part's cases, with --small
    "tp": f"{TINY} --seq-length 32",
    "gpt2": f"{TINY} --num-query-groups 8 --micro-batch-size 2 --global-batch-size 2",
    "1b": f"{TINY} --hidden-size 128 --ffn-hidden-size 128 --seq-length 64 {ROWS_OF_16}",
    "fp8": f"{TINY} {ROWS_OF_16} --hidden-size 128 --ffn-hidden-size 128 --seq-length 64",
    "pp": f"{TINY} --num-layers 8",
    "cp": f"{TINY} --seq-length 64 --max-position-embeddings 64",
    "long": f"{TINY} --seq-length 64 --max-position-embeddings 64",
    "dynamic": f"{TINY} --seq-length 128 --max-position-embeddings 128 --vocab-size 264 "
    "--global-batch-size 6",
    "ep": f"{TINY} --seq-length 32 --moe-ffn-hidden-size 32 --num-experts 8 --kv-channels 16",
    "fp8-losses": TINY_LOSSES,
    "fp8-losses-125m": f"{TINY_LOSSES} --device cpu",
    "fp8-head-losses": f"{TINY_LOSSES} --device cpu",
    "lean-losses": TINY_LOSSES,
    "moe-losses": f"{TINY_LOSSES} --num-layers 2 --hidden-size 64 --ffn-hidden-size 512",
}


class Case(NamedTuple):
    """A training; `like` is the case whose first loss this one's must equal, to a relative `tolerance`.

    warm, timed: steps before those that count, and these. usual: it runs without being named by --only.
    """

    name: str
    flags: str
    gpus: int = 1
    program: str = "train.py"
    like: str = ""
    tolerance: float = 2e-3  # of bf16
    warm: int = 3
    timed: int = 10
    usual: bool = True


def cases(
    table: dict[str, Row], flags: str, usual: int | None = None, name: str = "{}", **settings
) -> list[Case]:
    """A case for each row, of which the first `usual` are; all others are like the first."""
    made, first = [], name.format(next(iter(table)))
    for number, (key, row) in enumerate(table.items()):
        more, program = (row, "train.py") if isinstance(row, str) else row
        rough = "fp8" in more or "torchao" in program
        case = Case(name.format(key), f"{flags} {more}", program=program, tolerance=1e-2 if rough else 2e-3)
        case = case._replace(usual=usual is None or number < usual, like=first if number else "")
        made.append(case._replace(**settings))
    return made


def by_microbatches(
    table: dict[str, Row], counts: tuple[int, ...], samples: int, flags: str, **settings
) -> list[Case]:
    """The table at several numbers of microbatches, each of `samples` sequences over all ranks."""
    batches = {count: f"{flags} --global-batch-size {count * samples}" for count in counts}
    return [
        case for n, words in batches.items() for case in cases(table, words, name=f"{{}}, {n}", **settings)
    ]


def slices(table: dict[str, Row], usual: int) -> list[Case]:
    """On one GPU, with two sequences in a microbatch."""
    return by_microbatches(table, (1, 4), 2, f"{LLAMA} --micro-batch-size 2", usual=usual)


def gpt2() -> list[Case]:
    """A microbatch a step, of 8, 32 and 64 sequences."""
    flags = f"{COMMON} --config gpt2-124m --bf16"
    batches = {n: f"{flags} --micro-batch-size {n} --global-batch-size {n}" for n in (8, 32, 64)}
    named = {"warm": 10, "timed": 20}
    return [
        case for n, words in batches.items() for case in cases(SMALL_MODEL, words, name=f"{{}}, {n}", **named)
    ]


def tensor(n: int) -> list[Case]:
    flags = f"{LLAMA} --num-layers 16 --tp {n} --sequence-parallel --micro-batch-size 1 --global-batch-size 2"
    return [ONE_GPU, *cases(TENSOR, flags, usual=5, gpus=n, timed=20)]


def data(n: int) -> list[Case]:
    flags = f"{LLAMA} --num-layers 32 --micro-batch-size 1"
    return [ONE_GPU, *by_microbatches(DATA, (1, 4), n, flags, usual=3, gpus=n)]


def pipelines(n: int) -> list[Case]:
    flags = f"{LLAMA} --num-layers 32 --micro-batch-size 1 --pp {n}"
    return [ONE_GPU, *by_microbatches(PIPELINES, (8, 16), 1, flags, gpus=n, timed=6)]


def row_flags(n: int, thousands: int, layers: int, flags: str) -> str:
    """One row of that many thousand tokens a step, over n ranks."""
    tokens = 1024 * thousands
    shape = f"--num-layers {layers} --seq-length {tokens} --max-position-embeddings {tokens}"
    return f"{LLAMA} {ZERO1} {FUSED} --cp {n} --micro-batch-size 1 --global-batch-size 1 {shape} {flags}"


def context(n: int) -> list[Case]:
    """Whatever the ranks send, the loss is that of the row."""
    rows = [Case(name, row_flags(n, *row), n, timed=5) for name, row in ROWS.items()]
    like = {case.name: case.name.split()[0] for case in rows[3:5] + rows[7:9]}
    rows = [c._replace(like=like.get(c.name, ""), usual=i < 3) for i, c in enumerate(rows)]
    return [ONE_GPU, *rows]


def long_rows(n: int) -> list[Case]:
    """All layers, longer and longer rows; what does not fit by the plan is left out."""
    return [
        Case(f"{how}, {k}k", row_flags(n, k, 32, flags), n, warm=1, timed=2)
        for how, flags in RECOMPUTED.items()
        for k in (16, 32, 64, 128, 256, 512)
    ]


def documents(n: int) -> list[Case]:
    """The same documents, in packs over all ranks or over as few as it takes."""
    flags = row_flags(n, 128, 8, "--data-path {documents} --split 1,0,0 --variable-seq-lengths")
    flags = f"{flags} --global-batch-size 64".replace("--mock-data", "")
    return cases({"fixed": "", "dynamic": "--dynamic-context-parallel"}, flags, gpus=n)


def experts(n: int) -> list[Case]:
    """Both models. transformers begins with weights of its own, and a forced choice changes the loss."""
    made = []
    for model, (flags, micro) in MODELS.items():
        words = f"{flags} {ZERO1} --ep {n} --micro-batch-size {micro} --global-batch-size {4 * micro * n}"
        for case in cases(MOE, words, usual=3, name=f"{model}{{}}", gpus=n, timed=5):
            even, other = "even" in case.name, case.name.endswith("even") or "transformers" in case.name
            like = "" if other else f"{model} even" if even else case.like
            made.append(case._replace(like=like))
    return made


def offload(n: int) -> list[Case]:
    host = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
    flags = f"{LLAMA} --num-layers 32 --micro-batch-size 1 --global-batch-size 1 {FUSED}"
    return [Case("offload", f"{flags} {host}")]


def whole_runs(part: str) -> list[Case]:
    """Runs of some hundred steps; their curves are kept."""
    heads = ["bf16", "fp8 delayed", "fp8 delayed, head too"]
    recipes = heads if part == "fp8-head-losses" else [k for k in PRECISIONS if k[:3] in ("bf1", "fp8")]
    other = {"moe-losses": ROUTERS, "lean-losses": STATES}
    table = other.get(part) or {k: PRECISIONS[k] for k in recipes}
    return [case._replace(like="") for case in cases(table, LOSSES[part], warm=0, timed=0)]


ONE_GPU = Case("one gpu", f"{LLAMA} --micro-batch-size 1 --global-batch-size 2")
PARTS: dict[str, Callable[[int], list[Case]]] = {
    "one": lambda n: slices(ONE, 3),
    "gpt2": lambda n: gpt2(),
    "1b": lambda n: cases(BILLION, ONE_BILLION),
    "fp8": lambda n: slices(PRECISIONS, 8),
    "tp": tensor,
    "dp": data,
    "pp": pipelines,
    "cp": context,
    "long": long_rows,
    "dynamic": documents,
    "ep": experts,
    "offload": offload,
    **{part: partial(lambda part, n: whole_runs(part), part) for part in LOSSES},
}


def cases_of(part: str, gpus: int, small: bool) -> list[Case]:
    """All cases of a part; gpus: of those that run on several. small: to test, on CPUs."""
    made = PARTS[part](gpus)
    if not small:
        return made
    tiny = {"warm": 1, "timed": 2} if part not in LOSSES else {}
    return [case._replace(flags=f"{case.flags} {SMALL.get(part, TINY)}", **tiny) for case in made]
