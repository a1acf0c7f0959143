"""Every layout trains the model that one process trains: the guard of all parallel code.

A layout is a word, `tp2dp2z1sp`: sizes of axes, then what is switched on.

    tp2 dp2      processes that share a layer, and replicas      sp   sequence parallel
    z1 z2        optimizer states, and gradients too, cut        ov   all overlaps there are
    ce           loss fused with the output projection           rc   layers recomputed; rs: parts of them
    bk           small buckets, so that there are many           av   averaged by the collective
    co           optimizer states on the host (bf16 alone)
    pp2 pp4      pipeline stages; behind them v2, v4 for chunks that take turns (interleaved), zb and zbv for
                 weight gradients put off (zb-h1, zb-v), gp for gpipe, uneven for a split by cost
    cp2 cp4      processes that share each row, in a ring; a2a, ag (all-gather), hi (a2a between two, a ring
                 of these), mx (another way in each layer)

Data are real: Python sources, as bytes. One process and the layout take five AdamW steps from the same seed.
"""

import os
import random
import re
import sysconfig
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from nanomegatron.comm import all_gather
from nanomegatron.data_indexed import IndexedDatasetBuilder
from nanomegatron.mesh import Mesh, World
from nanomegatron.metrics_log import RunLog
from tests.spmd import run_spmd

COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 2e-3 --min-lr 1e-3 --train-iters 5 --eval-iters 0 --device cpu "
    "--run-name test --make-vocab-size-divisible-by 4 --tokenizer-type ByteTokenizer --split 1 "
    "--log-num-zeros-in-grad --adam-eps 1e-6"  # else AdamW makes full steps of gradients that are rounding
)
ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
MODELS = {  # 257 tokens: not divisible by any tp
    "gpt": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "llama": f"{ROPE} --untie-embeddings-and-output-weights --num-query-groups 2 --ffn-hidden-size 96",
    "qwen": f"{ROPE} --num-query-groups 1 --qk-layernorm --add-qkv-bias --hidden-dropout 0.2",
    "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss --hidden-dropout 0.1",
    "window": f"{ROPE} --num-query-groups 2 --window-size 9 0 --window-attn-skip-freq 3",
}
FLAGS = {
    "tp": "--tp {}",
    "dp": "--dp {}",
    "z1": "--use-distributed-optimizer",
    "z2": "--data-parallel-sharding-strategy optim_grads",
    "sp": "--sequence-parallel",
    "ce": "--cross-entropy-loss-fusion",
    "rc": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "rs": "--recompute-activations --recompute-modules core_attn mlp_act layernorm",
    "bk": "--ddp-bucket-size 4000",
    "av": "--ddp-average-in-collective",
    "co": "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
    "pp": "--pp {}",
    "v": "--vpp {}",
    "zb": "--pipeline-schedule zb-h1",
    "zbv": "--pipeline-schedule zb-v",
    "gp": "--pipeline-schedule gpipe",
    "uneven": "--pipeline-split flops",
    "cp": "--context-parallel-size {}",
    "a2a": "--cp-comm-type a2a",
    "ag": "--cp-comm-type allgather",
    "hi": "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "mx": "--cp-comm-type p2p a2a allgather p2p",
}


def flags_of(layout: str) -> tuple[int, str]:
    """Processes, and the flags of train.py."""
    words = re.findall(r"[tdpc]p\d+|v\d|z\d|zbv|uneven|a2a|[a-z]{2}", layout)
    assert "".join(words) == layout, layout
    size, flags = 1, []
    for word in words:
        if word[:2] in ("tp", "dp", "pp", "cp"):
            size *= int(word[2:])
            flags.append(FLAGS[word[:2]].format(word[2:]))
        elif word[0] == "v":
            flags.append(FLAGS["v"].format(word[1:]))
        elif word == "ov":
            flags += ["--overlap-grad-reduce"]
            sharded = "z1" in words or "z2" in words
            flags += ["--overlap-param-gather"] * sharded + ["--tp-comm-overlap"] * ("sp" in words)
        else:
            flags.append(FLAGS[word])
    return size, " ".join(flags)


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


NAMED = [
    ("dp2", "gpt"),
    ("dp4", "llama"),
    ("tp2", "gpt"),
    ("tp2", "qwen"),
    ("tp4", "llama"),
    ("tp2sp", "gpt"),
    ("tp4sp", "qwen"),
    ("tp2spov", "llama"),
    ("dp2z1", "llama"),
    ("dp2z1ovbk", "gpt"),
    ("dp2z2bk", "gpt"),
    ("dp4z2ovbk", "llama"),
    ("tp2dp2", "qwen"),
    ("tp2dp2z1sp", "gpt"),
    ("tp2dp2z1spovbk", "llama"),
    ("tp2dp2z2spovcerc", "qwen"),
    ("tp4spce", "gpt"),
    ("tp2cers", "llama"),
    ("pp2", "gpt"),
    ("pp4", "llama"),
    ("pp2v2", "gpt"),
    ("pp2v2gp", "llama"),
    ("pp2zb", "qwen"),
    ("pp2zbv", "gpt"),
    ("pp4zb", "gpt"),
    ("pp4zbvuneven", "llama"),
    ("pp2uneven", "llama"),
    ("pp2dp2z1", "gpt"),
    ("pp2zbdp2z2bk", "gpt"),
    ("pp2v2dp2z1ovbk", "llama"),
    ("tp2pp2sp", "llama"),
    ("tp2pp2zbspovce", "llama"),
    ("tp2pp2zbvsprc", "qwen"),
    ("tp2pp2v2ce", "gpt"),
    ("tp2pp2dp2z1sp", "gpt"),
    ("tp2pp2zbvdp2z1sprs", "llama"),
    ("cp2", "llama"),
    ("cp2", "documents"),
    ("cp2", "window"),
    ("cp4", "qwen"),
    ("cp4", "documents"),
    ("cp2a2a", "qwen"),
    ("cp4a2a", "documents"),
    ("cp2ag", "window"),
    ("cp4ag", "documents"),
    ("cp4hi", "llama"),
    ("cp4hi", "documents"),
    ("cp4hi", "window"),
    ("cp2mx", "documents"),
    ("tp2cp2sp", "qwen"),
    ("tp2cp2a2aspov", "llama"),
    ("tp2cp2ag", "documents"),
    ("cp2pp2", "documents"),
    ("cp2pp2v2cers", "llama"),
    ("pp2zbcp2mx", "qwen"),
    ("cp2dp2z1", "documents"),
    ("cp2dp2z2ovbkrc", "qwen"),
    ("tp2cp2dp2z1spce", "documents"),
    ("tp2cp2pp2zbvsp", "llama"),
]


DRAWN = NAMED + draws(10, 4, FLAT) + draws(12, 5, PIPELINES) + draws(12, 6, CONTEXT)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> str:
    """Prefix of a data set of modules of the Python standard library, a document each; "-lines": a line."""
    prefix = str(tmp_path_factory.mktemp("data") / "sources")
    texts = [p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))[:12]]
    lines = [line for text in texts for line in text.splitlines()]
    for name, documents in ((prefix, texts), (f"{prefix}-lines", lines)):
        with IndexedDatasetBuilder(name, np.uint16) as builder:
            for text in documents:
                builder.add_document(np.append(np.frombuffer(text, np.uint8), 256).astype(np.uint16))
            builder.finalize()
    return prefix


def train_on_a_rank(world: World, argv: list[str], folder: str) -> dict:
    """Five steps of this rank: loss and norm of each, its pieces of the first gradients and last weights."""
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(config.parallel, world, torch.device("cpu"), config.model.num_kv_heads)
    run = train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank))
    steps, gradients, update = [], [], run.optimizer.step

    def keep(loss: torch.Tensor):  # before the update, which may scale them
        gradients.append([piece_of(s, s.of(b.grad_shard)) for b, s in run.grads.slices()])
        return update(loss)

    run.optimizer.step = keep
    for _ in range(config.run.train_iters):
        told = train.train_step(run).read()[1]
        steps.append({name: told[name] for name in ("lm_loss", "grad_norm", "num_zeros")})
        if len(gradients) == 1:
            run.grads.wait_params()
            weights = weights_of(run)
        run.iteration += 1
    run.grads.wait_params()
    result = {"steps": steps, "gradients": gradients[0], "weights": weights, "last weights": weights_of(run)}
    return result | {"alike": alike(run)}


def piece_of(piece, data: torch.Tensor) -> tuple:
    """(name, offset and shape of the rank's slice of the tensor, place in the flattened slice, values)."""
    shape = piece.part.view(piece.param.detach()).shape
    return piece.part.name, piece.part.offset, tuple(shape), piece.at, data.float().clone()


def weights_of(run) -> list[tuple]:
    """Every part that this rank holds, as `piece_of` has it."""
    pairs = [(part, part.view(p.detach())) for p in run.optimizer.params for part in p.spec.parts]
    return [(part.name, part.offset, tuple(x.shape), 0, x.float().flatten()) for part, x in pairs]


def alike(run) -> bool:
    """Whether replicas are equal to the bit: all weights over dp x cp, whole ones over tp too."""
    mesh, same = run.mesh, True
    for param in run.optimizer.params:
        copies = all_gather(param.detach()[None], mesh.dp_cp)
        same &= all(torch.equal(copies[0], copy) for copy in copies)
        for part in param.spec.parts:
            if part.replicas > 1:
                copies = all_gather(part.view(param.detach())[None], part.axis)
                groups = copies.split(part.replicas)
                same &= all(torch.equal(group[0], copy) for group in groups for copy in group)
            if param.spec.tied:
                copies = all_gather(param.detach()[None], mesh.embed)
                same &= torch.equal(copies[0], copies[-1])
    return bool(same)


def arguments(sources: str, model: str, *more: str) -> list[str]:
    path = sources + "-lines" * (model == "documents")
    return " ".join((COMMON, MODELS[model], "--data-path", path, *more)).split()


@pytest.fixture(scope="module")
def alone(sources, tmp_path_factory):
    """What one process does with a model, computed once each."""
    results = {}

    def result(model: str, *more: str) -> dict:
        key = (model, *more)
        if key not in results:
            folder = str(tmp_path_factory.mktemp("alone"))
            results[key] = run_spmd(train_on_a_rank, 1, arguments(sources, model, *more), folder)[0]
        return results[key]

    return result


def compare(found: list[tuple], whole: list[tuple], tolerance: float, but: Collection[str] = ()) -> None:
    """Every piece against the same place of one process's tensor; together they are the whole model."""
    tensors = {name: values.view(shape) for name, _, shape, _, values in whole}
    seen = dict.fromkeys(tensors, 0)
    for name, offset, shape, at, values in found:
        window = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        expected = tensors[name][window].flatten()[at : at + len(values)]
        if name not in but:
            assert (values - expected).norm() <= tolerance * expected.norm(), name
        seen[name] += len(values)
    assert all(seen[name] >= tensor.numel() for name, tensor in tensors.items())


KINDS = ("gradients", "weights", "last weights")


def without_gradient(gradients: list[tuple]) -> set[str]:
    """Key biases without a key norm: softmax does not see them. Theirs are rounding, as are their steps."""
    keys = {name for name, *_ in gradients if name.endswith("linear_qkv.k.bias")}
    if any("k_layernorm" in name for name, *_ in gradients):
        return set()
    assert all(values.norm() < 1e-5 for name, *_, values in gradients if name in keys)
    return keys


@pytest.mark.parametrize("layout, model", DRAWN)
def test_layout_trains_like_one_process(layout, model, alone, sources, tmp_path):
    """fp32: only the order of additions differs."""
    size, flags = flags_of(layout)
    expected = alone(model)
    ranks = run_spmd(train_on_a_rank, size, arguments(sources, model, flags), str(tmp_path), timeout=120)
    for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5)):
        ours, theirs = ([step[key] for step in run["steps"]] for run in (ranks[0], expected))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    assert expected["steps"][-1]["lm_loss"] < expected["steps"][0]["lm_loss"] - 0.1
    assert all(rank["alike"] for rank in ranks)
    nothing = without_gradient([piece for rank in ranks for piece in rank["gradients"]])
    for kind in KINDS:
        compare([piece for rank in ranks for piece in rank[kind]], expected[kind], 1e-5, nothing)
    if not nothing:  # rounding may be zero, or not
        assert ranks[0]["steps"][0]["num_zeros"] == expected["steps"][0]["num_zeros"]


@pytest.mark.parametrize(
    "layout, model",
    [
        ("tp2spov", "llama"),
        ("tp2dp2z1spovce", "gpt"),
        ("dp2z2rc", "qwen"),
        ("dp4z1bk", "gpt"),
        ("tp2dp2z1ovbkco", "llama"),
        ("pp2zbvdp2z1ovbk", "llama"),
        ("tp2pp2v2spovco", "gpt"),
        ("cp4", "documents"),
        ("tp2cp2a2aspov", "llama"),
        ("cp2dp2z1mx", "window"),
    ],
)
def test_bf16_stays_near_one_process(layout, model, alone, sources, tmp_path):
    """bf16 rounds what is sent, 8 bits at a time: losses to 0.3 %, norms to 2 %, gradients to 5 %."""
    size, flags = flags_of(layout)
    expected = alone(model, "--bf16")
    argv = arguments(sources, model, flags, "--bf16")
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    for key, tolerance in (("lm_loss", 3e-3), ("grad_norm", 2e-2)):
        ours, theirs = ([step[key] for step in run["steps"]] for run in (ranks[0], expected))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    assert all(rank["alike"] for rank in ranks)
    gradients = [piece for rank in ranks for piece in rank["gradients"]]
    keys = {name for name, *_ in gradients if name.endswith("linear_qkv.k.bias")}
    compare(gradients, expected["gradients"], 5e-2, keys)


def initial_weights(world: World, argv: list[str], folder: str) -> list[tuple]:
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(config.parallel, world, torch.device("cpu"), config.model.num_kv_heads)
    return weights_of(train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank)))


@pytest.mark.parametrize("layout", ["tp2", "tp4sp", "tp2dp2z1", "dp4z2", "pp2v2", "tp2pp2zbv"])
@pytest.mark.parametrize("model", UNCUT)
def test_initial_weights_of_any_layout_are_one_processs(layout, model, sources, tmp_path):
    """To the bit; and what must differ does: slices of different ranks, layers, and parts."""
    size, flags = flags_of(layout)
    whole = run_spmd(initial_weights, 1, arguments(sources, model), str(tmp_path))[0]
    ranks = run_spmd(initial_weights, size, arguments(sources, model, flags), str(tmp_path))
    compare([piece for rank in ranks for piece in rank], whole, 0.0)
    drawn = {}
    for name, offset, _, _, values in (piece for rank in ranks for piece in rank):
        if values.numel() and values.std() > 0:
            same_place = drawn.setdefault(values.sum().item(), (name, offset))
            assert same_place == (name, offset), f"{name} {offset} has the values of {same_place}"
    assert len({name for name, _ in drawn.values()}) == sum(v.std() > 0 for *_, v in whole)
