"""Upcycling: a dense model's checkpoint makes a model with experts that begins as the dense one."""

import os

import pytest
import torch

import train
from nanomegatron.checkpoint.upcycle import dense_source, sum_of_weights
from nanomegatron.config.cli import parse
from nanomegatron.config.hf import read_folder
from nanomegatron.mesh import Mesh, World
from nanomegatron.report.generate import KVCache, next_logits
from nanomegatron.report.log import RunLog
from nanomegatron.report.traffic import Traffic
from tests.layouts import ROPE, flags_of
from tests.spmd import run_spmd
from tests.training import Task, numbers_of, save_checkpoint

RUN = (
    "--seq-length 32 --global-batch-size 4 --lr 2e-3 --train-iters 4 --eval-iters 1 --device cpu "
    "--make-vocab-size-divisible-by 4 --split 8,1,1 --tokenizer-type ByteTokenizer"
)
COMMON = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 {RUN}"
TEXT = [[*b"def __init__(self"]]
DENSE = {"llama": f"{ROPE} --num-query-groups 2 --ffn-hidden-size 48", "gpt": "--ffn-hidden-size 48"}
EXPERTS = "--num-experts 4 --moe-use-upcycling"


def on_rank(world: World, argv: list[str], folder: str, steps: int) -> dict:
    """Logits behind a text and held-out loss, then losses of `iters` steps; saved if there were any."""
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(
        config.parallel, world, torch.device("cpu"), config.model.num_kv_heads, observer=Traffic()
    )
    log, lines = RunLog(f"{folder}/runs/{config.run.run_name}", config, mesh.rank), []
    log.line = lines.append
    run = train.set_up(parsed, config, mesh, log)
    shards = run.optimizer.shards if run.optimizer else ()  # there is none with --eval-only
    moments = sum(float(shard.exp_avg.abs().sum()) for shard in shards)
    found = {"iteration": run.progress.iteration, "moments": moments, "losses": [], "lines": lines}
    found["logits"] = next_logits(run.model, TEXT, KVCache(32))
    log.evaluation = lambda _, __, loss, *more: found.update({"held out": loss})
    train.evaluate(run, lambda: False)
    for _ in range(steps):
        found["losses"].append(numbers_of(train.train_step(run))["lm_loss"])
        run.progress.iteration += 1
    if steps:
        save_checkpoint(run)
    log.close()
    return found


@pytest.fixture(scope="module")
def dense(sources, tmp_path_factory):
    """name -> the folder of a dense model, trained by two ranks that share its layers, and what it says."""
    root, made = tmp_path_factory.mktemp("dense"), {}

    def result(name: str) -> tuple[str, dict]:
        if name not in made:
            save = f"{root}/{name}"
            argv = command(sources, name, f"--run-name {name} --save {save} --tp 2")
            run_spmd(on_rank, 2, argv, str(root), 4)
            argv = command(sources, name, f"--run-name {name}-2 --save {root}/none --load {save} --finetune")
            made[name] = save, run_spmd(on_rank, 1, argv, str(root), 0)[0]
        return made[name]

    return result


def command(sources: Task, name: str, more: str) -> list[str]:
    return f"{COMMON} {DENSE[name]} --data-path {sources.prefix} {more}".split()


def upcycled(sources, load, name, layout, more, folder, steps=0) -> list[dict]:
    """Of every rank of a run that takes `load` for its experts, and has the folder to itself."""
    size, flags = (1, "") if layout == "one" else flags_of(layout)
    more = f"{EXPERTS} --load {load} --save {folder}/save --run-name experts {flags} {more}"
    return run_spmd(on_rank, size, command(sources, name, more), str(folder), steps, timeout=120)


SIGMOID = "--moe-router-score-function sigmoid"
LAYOUTS = [
    ("one", "llama", ""),
    ("one", "gpt", f"{SIGMOID} --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias"),
    ("one", "llama", "--moe-router-topk 4 --moe-router-pre-softmax"),
    ("dp2ep2", "llama", "--moe-token-dispatcher-type alltoall"),
    ("tp2spep2et", "llama", "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-layer-freq [0,1]"),
    ("tp2sppp2ep2etz1", "gpt", "--moe-router-topk-scaling-factor 0.5"),
]
MORE = [("one", "gpt", "--moe-router-topk 3"), ("tp2sp", "gpt", "")]


@pytest.mark.parametrize(
    "layout, name, more", LAYOUTS + [pytest.param(*case, marks=pytest.mark.full) for case in MORE]
)
def test_begins_as_the_dense_model(layout, name, more, dense, sources, tmp_path):
    """Logits and loss to 1e-6 where the weights of a token's experts have a known sum; else it is said."""
    load, expected = dense(name)
    ranks = upcycled(sources, load, name, layout, more, tmp_path)
    exact = "topk 1" not in more
    for rank in ranks:
        assert rank["iteration"] == 0 and rank["moments"] == 0
        torch.testing.assert_close(rank["logits"], expected["logits"], rtol=0, atol=1e-6 if exact else 0.5)
    assert ranks[0]["held out"] == pytest.approx(expected["held out"], rel=1e-6 if exact else 0.05)
    text = "\n".join(ranks[0]["lines"])
    assert f"resumed {load}, step 4 (weights only), each expert as the MLP" in text
    assert ("begins near the dense one" in text) != exact
    assert ("fc2 of experts divided by" in text) == ("factor" in more or not exact)


def test_goes_on_from_its_own_checkpoint(dense, sources, tmp_path):
    """The same command a second time does not begin again, whatever iteration of the dense model it names."""
    load, expected = dense("llama")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
    how = sources, load, "llama", "dp2ep2", "--ckpt-step 4"
    (whole, _) = upcycled(*how, straight, 4)
    (first, _), (second, _) = upcycled(*how, stopped, 2), upcycled(*how, stopped, 2)
    assert first["iteration"] == 0 and second["iteration"] == 2 and second["moments"] > 0
    assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert whole["losses"][-1] < expected["held out"] and second["held out"] != first["held out"]
    (third, *_) = upcycled(sources, load, "llama", "one", "--eval-only", stopped)
    assert third["held out"] == pytest.approx(expected["held out"], rel=1e-6), "of what --load names"


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama-biases"])
def test_a_hugging_face_folder(name, sources, full, tmp_path):
    """Its weights lie as in its family, perhaps transposed and side by side."""
    pytest.importorskip("transformers")
    from tests import hf_models

    save, model = tmp_path / "hf", hf_models.hugging_face(name, vocab_size=257)
    hf_models.save(model, save)
    table = read_folder(save)[1]
    flags = " ".join(
        f"--{key.replace('_', '-')} {value}" for key, value in table.items() if value not in (True, False)
    )
    flags += "".join(f" --{key.replace('_', '-')}" for key, value in table.items() if value is True)
    expected = model(torch.tensor(TEXT)).logits[:, -1]
    for layout in ("one", "dp2ep2") if full else ("dp2ep2",):
        folder = tmp_path / layout
        folder.mkdir()
        size, cut = (1, "") if layout == "one" else flags_of(layout)
        more = f"{flags} {EXPERTS} --load {save} --save {folder}/save --run-name experts {cut}"
        argv = f"{RUN} --data-path {sources.prefix} {more}".split()
        for rank in run_spmd(on_rank, size, argv, str(folder), 0, timeout=120):
            torch.testing.assert_close(rank["logits"], expected, rtol=1e-5, atol=1e-5)


def failure(sources, name, more, folder) -> str:
    with pytest.raises(BaseException) as caught:
        run_spmd(on_rank, 1, command(sources, name, more), str(folder), 0)
    return str(caught.value)


def test_what_cannot_be_upcycled_is_said(dense, sources, tmp_path):
    load, _ = dense("llama")
    own = f"--save {tmp_path}/own --run-name own"
    assert "no checkpoint there" in failure(sources, "llama", f"{EXPERTS} --load {tmp_path} {own}", tmp_path)
    wide = failure(sources, "llama", f"{EXPERTS} --ffn-hidden-size 64 --load {load} {own}", tmp_path)
    assert "--ffn-hidden-size 64: saved with 48" in wide
    plain = failure(sources, "llama", f"--num-experts 4 --load {load} --finetune {own}", tmp_path)
    assert "--num-experts 4: saved with None; --moe-use-upcycling makes experts" in plain
    (tmp_path / "run").mkdir()
    upcycled(sources, load, "llama", "one", "", tmp_path / "run", 1)
    sparse = f"--load {tmp_path}/run/save"
    for flags in (EXPERTS, "--finetune"):
        said = failure(sources, "llama", f"{flags} {sparse} {own}", tmp_path)
        assert "--num-experts None: saved with 4" in said


def test_which_tensor_of_the_dense_model():
    layer = "decoder.layers.7.mlp"
    assert dense_source(f"{layer}.experts.12.linear_fc1.gate.weight") == (
        f"{layer}.linear_fc1.gate.weight",
        False,
    )
    assert dense_source(f"{layer}.experts.12.linear_fc2.weight_t") == (f"{layer}.linear_fc2.weight", True)
    assert dense_source(f"{layer}.experts.0.linear_fc2.bias") == (f"{layer}.linear_fc2.bias", False)
    assert dense_source(f"{layer}.linear_fc1.weight") == (f"{layer}.linear_fc1.weight", False)
    assert dense_source(f"{layer}.router.weight") is None


@pytest.mark.parametrize(
    "settings, expected",
    [
        ("", (1.0, True)),
        ("topk_scaling_factor 2.5", (2.5, True)),
        ("pre_softmax", (0.25, False)),
        ("topk 8 --moe-router-pre-softmax", (1.0, True)),
        ("score_function sigmoid", (1.0, True)),
        ("score_function sigmoid --moe-router-topk 1", (0.5, False)),
        ("load_balancing_type sinkhorn --moe-router-topk-scaling-factor 2", (0.25, False)),
        ("topk 2 --moe-expert-capacity-factor 1", (1.0, False)),
    ],
)
def test_what_weights_sum_to(settings, expected):
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --num-experts 8"
    first = settings and f"--moe-router-{settings.replace('_', '-')}"
    assert sum_of_weights(parse(f"{shape} {first}".split()).config.model) == expected
