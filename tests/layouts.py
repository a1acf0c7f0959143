"""The layouts that tests train, as words, and the models that they train.

nanomegatron/debug/layouts.py says what the words of a layout mean.
"""

import random

from nanomegatron.config.check import validate
from nanomegatron.config.cli import parse
from nanomegatron.debug.layouts import flags_of

FIVE_STEPS, TWO_STEPS = "--global-batch-size 8 --train-iters 5", "--global-batch-size 4 --train-iters 2"
COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--lr 2e-3 --min-lr 1e-3 --eval-iters 0 --device cpu "
    "--run-name test --make-vocab-size-divisible-by 4 --tokenizer-type ByteTokenizer --split 1 "
    "--log-num-zeros-in-grad --adam-eps 1e-4"  # else AdamW makes full steps of gradients that are rounding
)
ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
MODELS = {  # 257 tokens: not divisible by any tp
    "gpt": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "llama": f"{ROPE} --untie-embeddings-and-output-weights --num-query-groups 2 --ffn-hidden-size 96",
    "qwen": f"{ROPE} --num-query-groups 1 --qk-layernorm --add-qkv-bias --hidden-dropout 0.2",
    "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss --hidden-dropout 0.1",
    "reset-documents": f"{ROPE} --reset-position-ids",  # attention continues across them
    "moe": f"{ROPE} --num-query-groups 2 --num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0]+[1]*3 "
    "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3 --hidden-dropout 0.1",
    "moe-documents": f"{ROPE} --num-experts 4 --moe-ffn-hidden-size 48 --reset-attention-mask "
    "--reset-position-ids --eod-mask-loss --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3",
    # Drops are of a rank's tokens; by probs, which repeated text has alike, rounding would decide on some.
    "full": f"{ROPE} --num-experts 4 --moe-ffn-hidden-size 48 --moe-expert-capacity-factor 0.75 "
    "--moe-token-drop-policy position --moe-pad-expert-input-to-capacity --moe-aux-loss-coeff 0.05",
    "deep": f"{ROPE} --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 24 --qk-layernorm "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 1.5 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
    "sinkhorn": f"{ROPE} --num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0]+[1]*3 "
    "--moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 1e-3 --micro-batch-size 2",
    "groups": f"{ROPE} --num-experts 8 --moe-ffn-hidden-size 24 --no-disable-bias-linear "
    "--moe-router-pre-softmax --moe-router-num-groups 4 --moe-router-group-topk 2 --micro-batch-size 2 "
    "--moe-input-jitter-eps 0.02 "
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.02 0.01",
    "window": f"{ROPE} --num-query-groups 2 --window-size 9 0 --window-attn-skip-freq 3",
    "olmo": f"{ROPE} --num-query-groups 2 --norm-placement post --qk-layernorm --qk-layernorm-all-heads "
    "--rotary-percent 0.5 --no-rope-freq 3 --residual-multiplier 0.5 --hidden-dropout 0.1",
    "gemma": "--position-embedding-type rope --normalization RMSNorm --geglu --disable-bias-linear "
    "--norm-placement both --apply-layernorm-1p --qk-layernorm --num-query-groups 1 --softmax-scale 0.25 "
    "--embedding-multiplier 5.7 --logits-scaling 2 --window-size 9 0 --window-attn-skip-freq 2 "
    "--rotary-base-local 100",
    "softcap": f"{ROPE} --attn-logit-softcapping 2 --final-logit-softcapping 4",
}
DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max"


def fp8(recipe: str) -> str:
    """The flags of a recipe, or none; blocks of 128 need sizes that the other models do not have."""
    if not recipe:
        return ""
    flags = "--bf16 --fp8-format hybrid " + (DELAYED if recipe == "delayed" else f"--fp8-recipe {recipe}")
    if recipe == "blockwise":
        flags += " --hidden-size 128 --ffn-hidden-size 256 --num-query-groups 4 --seq-length 128"
    return flags


FLAT = [(1, 1, 2), (2, 1, 1), (1, 1, 4), (2, 1, 2), (2, 1, 2), (4, 1, 1)]  # tp, pp, dp
PIPELINES = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]
SCHEDULES = ["", "v2", "v2gp", "gp", "zb", "zbv", "v4uneven", "zbuneven"]
UNCUT = ["gpt", "llama", "qwen"]


CONTEXT = [(1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)]  # and cp


def draws(count: int, seed: int, sizes: list[tuple[int, ...]]) -> list[tuple[str, str]]:
    """Layouts on two and four processes as chance would have them, with a model each; always the same."""
    chance, found = random.Random(seed), []
    while len(found) < count:
        tp, pp, dp, *cp = chance.choice(sizes)
        layout = f"tp{tp}" * (tp > 1) + f"pp{pp}" * (pp > 1)
        if pp > 1:
            layout += chance.choice(SCHEDULES)
            layout += "uneven" * (pp == 4 and "v" in layout and "uneven" not in layout)
        layout += f"dp{dp}" * (dp > 1)
        for size in cp:
            layout += f"cp{size}" + chance.choice(["", "a2a", "ag", "mx"])
        layout += chance.choice(["", "z1", "z2"]) * (dp > 1)
        for word in ("sp" * (tp > 1), "ov", "ce", chance.choice(["rc", "rs"]), "bk", "av"):
            layout += word * (chance.random() < 0.5)
        found.append((layout, chance.choice(["llama", "qwen", "documents", "window"] if cp else UNCUT)))
    return found


MIXTURES = [(1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 2, 1), (2, 1, 2, 1), (1, 1, 2, 2), (1, 1, 4, 1), (2, 1, 1, 2)]


def mixtures(count: int, seed: int) -> list[tuple[str, str]]:
    """The same with experts, on two or four processes of which some share them; tp, pp, dp, cp."""
    chance, found = random.Random(seed), []
    while len(found) < count:
        tp, pp, dp, cp = chance.choice(MIXTURES)
        etp = chance.choice([1, tp])
        ep = chance.choice([n for n in (1, 2, 4) if tp * dp * cp % (n * etp) == 0])
        layout = f"tp{tp}sp" * (tp > 1) + f"pp{pp}" * (pp > 1)
        layout += chance.choice(["", "v2", "zb", "zbv"]) * (pp > 1)
        layout += f"dp{dp}" * (dp > 1) + f"cp{cp}" * (cp > 1) + f"ep{ep}" * (ep > 1) + "et" * (etp < tp)
        layout += chance.choice(["", "z1", "z2"]) * (dp > 1)
        for word in ("ov", "ce", chance.choice(["rc", "rm", "ra", "rh"]), "bk", "av", "eo", "so"):
            layout += word * (chance.random() < 0.5)
        found.append((layout, "deep"))
    return found


WAYS = {
    "tp": ["", "sp", "sp"],
    "pp": ["", "v2", "v2gp", "gp", "zb", "zbv", "uneven", "v2uneven", "zbuneven"],
    "cp": ["", "a2a", "ag", "mx", "hi"],
    "dp": ["", "z1", "z2", "av"],
    "ep": ["", "et", "eo", "so"],
}
SWITCHES = [["", word] for word in ("ov", "ce", "bk")] + [["", "rc", "rs", "rm", "ra", "rh"]]


def sweep(count: int, seed: int) -> list[tuple[str, str]]:
    """Of every axis, way and switch anything, on two to four processes; each model once.

    What goes together is for `validate` to say. Drops of "full" depend on the layout, so it takes no part.
    """
    chance, found = random.Random(seed), []
    models = [name for name in MODELS if name != "full"]
    while len(found) < count:
        model, layout = models[len(found) % len(models)], ""
        for axis, ways in WAYS.items():
            size = chance.choice([1, 1, 2, 2, 4])
            layout += f"{axis}{size}{chance.choice(ways)}" * (size > 1)
        layout += "".join(chance.choice(words) for words in SWITCHES)
        size, flags = flags_of(layout)
        if not 1 < size <= 4:
            continue
        run = parse(" ".join((COMMON, FIVE_STEPS, MODELS[model], "--mock-data", flags)).split())
        if (layout, model) not in found and not validate(run.config, size):
            found.append((layout, model))
    return found


NAMED = [
    ("dp2fp", "gpt"),
    ("tp2", "gpt"),
    ("tp2fp", "qwen"),
    ("tp2spfp", "gpt"),
    ("tp4spfp", "qwen"),
    ("tp2spovfp", "llama"),
    ("dp2z1", "llama"),
    ("dp2z1ovbkfp", "gpt"),
    ("dp2z2bkfp", "gpt"),
    ("dp4z2ovbkfp", "llama"),
    ("tp2dp2z1spovbkfp", "llama"),
    ("tp2dp2z2spovcercfp", "qwen"),
    ("tp4spcefp", "gpt"),
    ("tp2cersfp", "llama"),
    ("pp2", "gpt"),
    ("pp4", "llama"),
    ("pp2v2fp", "gpt"),
    ("pp2v2gp", "llama"),
    ("pp2zbfp", "qwen"),
    ("pp2zbv", "gpt"),
    ("pp4zb", "gpt"),
    ("pp4zbvunevenfp", "llama"),
    ("pp2uneven", "llama"),
    ("pp2ly", "gpt"),
    ("pp2dp2z1", "gpt"),
    ("pp2zbdp2z2bkfp", "gpt"),
    ("pp2v2dp2z1ovbk", "llama"),
    ("tp2pp2v2ce", "gpt"),
    ("tp2pp2zbvdp2z1sprsfp", "llama"),
    ("cp2fp", "llama"),
    ("cp2", "documents"),
    ("cp2fp", "documents"),
    ("cp2fp", "window"),
    ("cp2", "reset-documents"),
    ("cp4fp", "qwen"),
    ("cp2a2a", "qwen"),
    ("cp4a2a", "documents"),
    ("cp2agfp", "window"),
    ("cp4ag", "documents"),
    ("cp4hi", "llama"),
    ("cp4hifp", "documents"),
    ("cp2mxfp", "documents"),
    ("tp2cp2sp", "qwen"),
    ("tp2cp2a2aspovfp", "llama"),
    ("cp2pp2v2cers", "llama"),
    ("pp2zbcp2mx", "qwen"),
    ("cp2dp2z2ovbkrcfp", "qwen"),
    ("tp2cp2pp2zbvspfp", "llama"),
    ("dp2ep2", "moe"),
    ("dp2ep2fp", "moe"),
    ("dp2ep2fp", "deep"),
    ("dp4ep2z1", "moe"),
    ("dp4ep4z2bkfp", "deep"),
    ("tp2sp", "moe"),
    ("tp2spetfp", "deep"),
    ("tp2spep2etfp", "deep"),
    ("tp2spdp2ep2fp", "moe"),
    ("cp2pp2ep2fp", "moe"),
    ("pp2zbdp2ep2z1", "deep"),
    ("pp2v2dp2ep2ovbkfp", "moe"),
    ("pp2zbvdp2ep2avfp", "deep"),
    ("tp2spdp2ep4etz1ovav", "moe"),
    ("dp4ep4rmfp", "moe"),
    ("dp2ep2eofp", "deep"),
    ("dp2ep2fp", "full"),
    ("cp2ep2fp", "moe-documents"),
    ("dp2ep2rafp", "moe-documents"),
    ("cp2", "sinkhorn"),
    ("tp2spep2et", "groups"),
    ("tp4sprsfp", "olmo"),
    ("cp2fp", "gemma"),
    ("tp2cp2a2asprs", "softcap"),
]


# For five steps: what only shows after the first updates. Of tp and dp test_train.py has more.
FIVE = [
    ("pp2zbv", "gpt"),
    ("cp2", "documents"),
    ("dp2ep2", "moe"),
]


def other_form(layout: str) -> str:
    """The same with plain forms for fast paths, or fast paths for plain forms."""
    return layout.removesuffix("fp") if layout.endswith("fp") else f"{layout}fp"


# Combinations of what NAMED has, and other forms of it: in the full tier alone.
SECOND = [
    ("dp4", "llama"),
    ("tp4", "llama"),
    ("tp2dp2", "qwen"),
    ("tp2dp2z1sp", "gpt"),
    ("tp2pp2sp", "llama"),
    ("tp2pp2zbspovcefp", "llama"),
    ("tp2pp2zbvsprc", "qwen"),
    ("tp2pp2dp2z1sp", "gpt"),
    ("cp2", "window"),
    ("cp4", "qwen"),
    ("cp4fp", "documents"),
    ("cp4hi", "documents"),
    ("cp4hifp", "window"),
    ("tp2cp2ag", "documents"),
    ("cp2pp2fp", "documents"),
    ("cp2dp2z1", "documents"),
    ("tp2cp2dp2z1spce", "documents"),
    ("dp2", "moe"),
    ("dp2ep2", "deep"),
    ("dp4ep4z2bk", "deep"),
    ("tp2spep2et", "deep"),
    ("cp2ep2", "deep"),
    ("cp2ep2", "moe-documents"),
    ("tp2spdp2ep2rm", "sinkhorn"),
    ("dp2ep2", "full"),
    ("tp2pp2v2sprc", "gemma"),
]

DRAWN = SECOND + draws(10, 4, FLAT) + draws(12, 5, PIPELINES) + draws(12, 6, CONTEXT) + mixtures(8, 7)
DRAWN += [case for case in sweep(40, 8) if case not in NAMED + DRAWN]
OTHERS = [(other_form(layout), model) for layout, model in NAMED + DRAWN]
DRAWN += [case for case in OTHERS if case not in NAMED + SECOND]

# What enters each file of fast/ in the fast tier: a layout, its model, and an FP8 recipe or "bf16".
FP8_OVERLAP = [("tp2spovfp", "llama", recipe) for recipe in ("delayed", "tensorwise", "rowwise")]
OVERLAP = [("tp2spovfp", "llama", ""), ("tp2dp2z1spovbkfp", "llama", ""), ("tp2cp2a2aspovfp", "llama", "")]
DISPATCH = [("dp2ep2fp", "moe", ""), ("tp2spep2etfp", "deep", ""), ("cp2ep2fp", "moe-documents", "")]
ENTERED = {
    "tp_overlap": OVERLAP,
    "pieces": OVERLAP,
    "peer_access": OVERLAP,
    "fused_loss": [("tp4spcefp", "gpt", ""), ("tp2cersfp", "llama", ""), ("tp2dp2z2spovcercfp", "qwen", "")],
    "ring": [("cp2fp", "llama", ""), ("cp2fp", "documents", ""), ("cp4fp", "qwen", "")],
    "host_copy": DISPATCH,
    "moe_dispatch": DISPATCH,
    "moe_pieces": DISPATCH,
    "fused_layer": [("tp2spfp", "gpt", ""), ("dp2z1ovbkfp", "gpt", ""), ("pp2zbfp", "qwen", "")],
    "discard_output": [
        ("tp2cersfp", "llama", ""),
        ("dp2ep2rafp", "moe-documents", ""),
        ("pp2zbvrsfp", "gpt", "delayed"),
    ],
    "fp8_producers": [
        ("pp2zbvfp", "llama", "delayed"),
        ("tp2spfp", "llama", "delayed"),
        ("tp2dp2z2spcefp", "llama", "rowwise"),
    ],
    "fp8_gather": [
        ("pp2zbvfp", "llama", "delayed"),
        ("tp2spfp", "llama", "delayed"),
        ("pp2zbvrsfp", "gpt", "delayed"),
    ],
    "fp8_overlap": FP8_OVERLAP,
    "offload": [
        ("tp2dp2z1ovbkcofp", "llama", "bf16"),
        ("dp2z1cofp", "gpt", "bf16"),
        ("pp2cofp", "llama", "bf16"),
    ],
    "transfers": [("cp2fp", "llama", ""), ("cp2fp", "documents", ""), ("cp4fp", "qwen", "")],
    "split_gate": DISPATCH,
    "fp8_experts": [
        ("dp2ep2fp", "moe", "rowwise"),
        ("tp2spdp2ep2fp", "moe", "rowwise"),
        ("dp2ep2z1fp", "moe", "rowwise"),
    ],
}
