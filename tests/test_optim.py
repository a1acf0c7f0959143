"""Schedules, loss scaling, clipping and AdamW against Megatron's and torch's own."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanomegatron.batch import Batch
from nanomegatron.checkpoint.optimizer_state import (
    load_optimizer_scalars,
    optimizer_scalars,
    optimizer_states,
    reset_main,
)
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, OptimizerConfig, ParallelConfig, PrecisionConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.lr_schedule import LossScaler, Schedule
from nanomegatron.mesh import Axis
from nanomegatron.model import GPTModel
from nanomegatron.optim import Optimizer
from nanomegatron.param import Init, ParamSpec, new_parameter, replica
from nanomegatron.pick_variants import LR_STYLES
from nanomegatron.variants.lr_styles import WarmupStableDecay
from tests.checkpoints import ALONE
from tests.spmd import run_spmd

STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WSD = ["exponential", "linear", "cosine", "minus_sqrt"]


# Schedules


def test_schedule_goldens():
    """Warm-up 10, decay 100, 1e-3 to 1e-5, at steps 10, 20 .. 100: printed by Megatron's scheduler."""
    steps = range(10, 101, 10)
    cosine = Schedule("cosine", 1e-3, 1e-5, 0.0, 10, 100)
    expected = [1e-3, 0.000970148, 0.000884192, 0.0007525, 0.000590956]
    expected += [0.000419044, 0.0002575, 0.000125808, 3.9852e-05, 1e-5]
    assert [cosine.at(n) for n in steps] == pytest.approx(expected, abs=5e-10)
    wsd = WarmupStableDecay("WSD", 1e-3, 1e-5, 0.0, 10, 100, "minus_sqrt", 20)
    assert [wsd.at(n) for n in steps] == pytest.approx([1e-3] * 8 + [0.000299964, 1e-5], abs=5e-10)


@pytest.mark.parametrize(
    "style, wsd_style", [*((s, "linear") for s in STYLES[:-1]), *(("WSD", w) for w in WSD)]
)
def test_schedule_is_megatrons(style, wsd_style):
    """At every sample up to and past the end of the decay."""
    theirs = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    lengths = (0, 1, 10, 10.6), (11, 40), (0, 7, 40)
    for warmup, decay, wsd, init, least in itertools.product(*lengths, (0.0, 1e-4), (1e-5, 7e-4)):
        lengths = (warmup, decay, wsd_style, wsd) if style == "WSD" else (warmup, decay)
        ours = LR_STYLES.get(style, Schedule)(style, 1e-3, least, init, *lengths)
        optimizer = SimpleNamespace(param_groups=[])
        rates, no_decay = (init, 1e-3, least, warmup, decay, style), (0.0, 0.0, 1, "constant")
        other = theirs(optimizer, *rates, *no_decay, True, False, wsd, wsd_style)
        for samples in range(decay + 5):
            other.num_steps = samples
            where = (warmup, decay, wsd, samples)
            assert ours.at(samples) == pytest.approx(other.get_lr({}), rel=1e-12), where


def test_schedule_lengths_are_counted_in_samples():
    table = [*range(0, 808, 8)]

    def of(**settings):
        found = WarmupStableDecay.from_config(Config(optimizer=OptimizerConfig(**settings)), table)
        return found.warmup, found.decay, found.wsd_decay

    assert of() == (0, 800, 0)
    assert of(lr_warmup_iters=5, lr_decay_iters=50, lr_wsd_decay_iters=10) == (40, 400, 80)
    assert of(lr_decay_iters=120) == (0, 960, 0)  # the run ends before the decay does
    assert of(lr_warmup_samples=5, lr_decay_samples=50, lr_wsd_decay_samples=10) == (5, 50, 10)
    assert of(lr_warmup_fraction=0.1) == (80, 800, 0)
    assert of(lr_warmup_fraction=0.1, lr_decay_samples=55) == (5.5, 55, 0)  # Megatron keeps the fraction


# Loss scale


@pytest.mark.parametrize("hysteresis, window", [(1, 3), (2, 4), (3, 2)])
def test_loss_scaler_is_megatrons(hysteresis, window, monkeypatch):
    module = pytest.importorskip("megatron.core.optimizer.grad_scaler")
    on_cpu = SimpleNamespace(
        tensor=lambda *a, device, **k: torch.tensor(*a, **k), max=torch.max, float=torch.float
    )
    monkeypatch.setattr(module, "torch", on_cpu)  # it puts its numbers on a GPU
    theirs = module.DynamicGradScaler(2.0**5, 1.0, 2.0, 0.5, window, hysteresis)
    precision = PrecisionConfig(
        fp16=True, initial_loss_scale=2.0**5, loss_scale_window=window, hysteresis=hysteresis
    )
    ours = LossScaler(precision, torch.device("cpu"))
    good = torch.rand(300) < torch.linspace(0.3, 0.95, 300)  # down to the minimum, then up
    scales = []
    for finite in good.tolist():
        theirs.update(not finite)
        ours.update(torch.tensor(float(finite)))
        assert ours.scale == theirs.scale
        scales.append(ours.scale.item())
    assert min(scales) == 1.0 and max(scales) > 2.0**5 and len(set(scales)) > 5


def test_loss_scaler_sequence():
    """Hysteresis 2, window 3: the first bad step is forgiven, every one after it halves, until a doubling."""
    precision = PrecisionConfig(fp16=True, initial_loss_scale=8.0, loss_scale_window=3, hysteresis=2)
    scaler, scales = LossScaler(precision, torch.device("cpu")), []
    for finite in "0", "0", "0", "1", "1", "0", "1", "1", "1", "0", "0":
        scaler.update(torch.tensor(float(finite)))
        scales.append(scaler.scale.item())
    assert scales == [8, 4, 2, 2, 2, 1, 1, 1, 2, 2, 1]


@pytest.mark.parametrize(
    "precision, scale",
    [
        (PrecisionConfig(), 1.0),
        (PrecisionConfig(bf16=True), 1.0),
        (PrecisionConfig(fp16=True, loss_scale=128.0), 128.0),
    ],
)
def test_constant_loss_scale(precision, scale):
    scaler = LossScaler(precision, torch.device("cpu"))
    for finite in [0.0] * 5 + [1.0] * 2000:
        scaler.update(torch.tensor(finite))
    assert scaler.scale == scale


# Steps

CONFIG = OptimizerConfig(weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0)
RATES = [0.05 / (n + 1) for n in range(20)]
GOOD = torch.tensor(1.0)


def make(dtype=torch.float32, config=CONFIG, precision=None, grad_dtype=torch.float32):
    """Two matrices and two vectors, the vectors without weight decay, and an optimizer over them."""
    params = []
    for name, shape in {"a": (4, 6), "b": (6,), "c": (5, 4), "d": (3,)}.items():
        part = replica(name, shape, Axis.single())
        params.append(new_parameter(ParamSpec((part,), shape, decay=len(shape) > 1), Init(dtype=dtype), 1.0))
    buckets = ParamAndGradBuckets(nn.ParameterList(params), ParallelConfig(), ALONE, grad_dtype)
    return params, Optimizer(buckets, config, precision or PrecisionConfig(), [RATES] * 3)


def of_params(params, optimizer, kind):
    """A kind of state, in the shape of each parameter."""
    found = {id(piece.param): flat for piece, flat in optimizer_states(optimizer)[kind]}
    return [found[id(p)].view(p.shape) for p in params]


def put(params, grads, scale=1.0):
    for param, grad in zip(params, grads, strict=True):
        param.main_grad.copy_(grad * scale)


def random_grads(params, size=1.0):
    return [size * torch.randn(p.shape) for p in params]


def torchs(params):
    """Leaves with the same values and torch's AdamW over them, in two weight-decay groups."""
    twins = [nn.Parameter(p.detach().float().clone()) for p in params]
    groups = [
        {"params": [t for t in twins if t.dim() > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [t for t in twins if t.dim() == 1], "weight_decay": 0.0},
    ]
    return twins, torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=CONFIG.adam_eps, foreach=False)


def torch_step(twins, adamw, grads, lr):
    """Clip and update; returns the norm before clipping."""
    for twin, grad in zip(twins, grads, strict=True):
        twin.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_(twins, CONFIG.clip_grad)
    for group in adamw.param_groups:
        group["lr"] = lr
    adamw.step()
    return norm


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_ten_steps_are_torchs(loss_scale):
    """Norms above and below the limit; with a loss scale, the gradients come multiplied by it."""
    precision = PrecisionConfig(fp16=loss_scale is not None, loss_scale=loss_scale)
    params, optimizer = make(precision=precision)
    twins, adamw = torchs(params)
    for step in range(10):
        grads = random_grads(params, 3.0 if step % 2 else 0.01)
        put(params, grads, loss_scale or 1.0)
        stats = optimizer.step(GOOD)
        norm = torch_step(twins, adamw, grads, RATES[step])
        torch.testing.assert_close(stats.grad_norm, norm)
        assert (norm > 1.0) == bool(step % 2)
        assert stats.lr.item() == RATES[step] and stats.good == 1 and stats.loss_scale == (loss_scale or 1.0)
        torch.testing.assert_close([*params], [*twins], rtol=1e-5, atol=1e-6)


def test_moments_are_of_gradients_without_the_loss_scale():
    """Which AdamW's parameters hide, but for eps: it divides by the root of the second moment."""
    params, optimizer = make(precision=PrecisionConfig(fp16=True, loss_scale=1024.0))
    twins, adamw = torchs(params)
    grads = random_grads(params, 3.0)
    put(params, grads, 1024.0)
    optimizer.step(GOOD)
    torch_step(twins, adamw, grads, RATES[0])
    for kind in ("exp_avg", "exp_avg_sq"):
        theirs = [adamw.state[twin][kind] for twin in twins]
        torch.testing.assert_close(of_params(params, optimizer, kind), theirs, rtol=1e-5, atol=0)


def test_clipping_off():
    params, optimizer = make(config=OptimizerConfig(clip_grad=0.0, adam_eps=1.0))
    grads = random_grads(params, 10.0)
    put(params, grads)
    assert optimizer.step(GOOD).grad_norm > 10
    for m, grad in zip(of_params(params, optimizer, "exp_avg"), grads, strict=True):
        torch.testing.assert_close(m, 0.1 * grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_fp32_main_parameters(dtype):
    """Steps too small for bf16 add up in the main parameters; the model's are their rounding, to the bit."""
    params, optimizer = make(dtype)
    optimizer.lr_table.fill_(1e-4)
    twins, adamw = torchs(params)
    before = [p.detach().clone() for p in params]
    for _ in range(20):
        grads = [torch.ones(p.shape) for p in params]
        put(params, grads)
        optimizer.step(GOOD)
        torch_step(twins, adamw, grads, 1e-4)
    mains = of_params(params, optimizer, "main")
    torch.testing.assert_close(mains, [t.detach() for t in twins], rtol=1e-5, atol=1e-6)
    for p, main, old in zip(params, mains, before, strict=True):
        assert torch.equal(p, main.to(dtype)) and p.dtype == dtype and main.dtype == torch.float32
        assert (main != old.float()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_states_are_rounded_after_steps_in_fp32(dtype):
    """To the bit those of an fp32 optimizer whose moments and gradients are rounded by hand."""
    low = replace(CONFIG, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    (params, optimizer), (twins, twin) = make(dtype, low, grad_dtype=torch.bfloat16), make(dtype)
    for _ in range(5):
        grads = random_grads(params)
        put(params, grads)
        put(twins, [grad.bfloat16() for grad in grads])
        assert optimizer.step(GOOD).grad_norm == twin.step(GOOD).grad_norm
        for shard in twin.shards:
            shard.exp_avg.copy_(shard.exp_avg.bfloat16())
            shard.exp_avg_sq.copy_(shard.exp_avg_sq.bfloat16())
        assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    for kind in "exp_avg", "exp_avg_sq":
        ours, theirs = of_params(params, optimizer, kind), of_params(twins, twin, kind)
        assert all(m.dtype == torch.bfloat16 for m in ours)
        assert all(torch.equal(m.float(), n) for m, n in zip(ours, theirs, strict=True))


def state(params, optimizer):
    states = [flat for ranges in optimizer_states(optimizer).values() for _, flat in ranges]
    return [t.detach().clone() for t in (*params, *states, optimizer.good_steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", ["nan gradient", "inf gradient", "nan loss", "inf loss"])
def test_bad_step_changes_nothing_and_the_next_goes_on(dtype, bad):
    (params, optimizer), (twins, twin) = make(dtype), make(dtype)
    first, second, value = random_grads(params), random_grads(params), float(bad[:3])
    put(params, first)
    optimizer.step(GOOD)
    before = state(params, optimizer)

    grads = random_grads(params)
    if "gradient" in bad:
        grads[2][1, 2] = value
    put(params, grads)
    stats = optimizer.step(torch.tensor(value) if "loss" in bad else GOOD)
    assert stats.good == 0 and stats.lr == RATES[1]
    assert all(torch.equal(a, b) for a, b in zip(before, state(params, optimizer), strict=True))

    put(params, second)
    assert optimizer.step(GOOD).lr == RATES[1], "the schedule waited"
    for grads in first, second:
        put(twins, grads)
        twin.step(GOOD)
    assert all(torch.equal(a, b) for a, b in zip(state(params, optimizer), state(twins, twin), strict=True))


def test_fp16_overflow_halves_the_scale():
    precision = PrecisionConfig(fp16=True, initial_loss_scale=64.0, hysteresis=1)
    params, optimizer = make(torch.float16, precision=precision)
    put(params, [torch.full(p.shape, torch.inf) for p in params])
    stats = optimizer.step(GOOD)
    assert stats.loss_scale == 64 and optimizer.scaler.scale == 32 and stats.good == 0


def test_step_waits_for_nothing():
    """No operation that brings a number to the host: on a GPU each would stall the stream."""

    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return func(*args, **(kwargs or {}))

    params, optimizer = make(torch.float16, precision=PrecisionConfig(fp16=True))
    put(params, random_grads(params))
    with NoSync():
        optimizer.step(GOOD)


def test_part_norms_are_named():
    params, optimizer = make()
    grads = random_grads(params)
    put(params, grads)
    norms = dict(zip(optimizer.part_names, optimizer.step(GOOD).part_norms, strict=True))
    assert list(norms) == ["a", "b", "c", "d"]
    torch.testing.assert_close(
        torch.stack([*norms.values()]), torch.stack([g.norm() for g in grads]), check_dtype=False
    )


def test_saved_numbers_are_taken_up_again():
    (params, optimizer), (_, other) = make(), make()
    put(params, random_grads(params))
    optimizer.step(GOOD)
    assert optimizer_scalars(optimizer) == {"good_steps": 1, "loss_scaler": [1.0, 0.0, 2.0]}
    load_optimizer_scalars(other, {"good_steps": 7, "loss_scaler": [4.0, 2.0, 1.0]})
    assert optimizer_scalars(other) == {"good_steps": 7, "loss_scaler": [4.0, 2.0, 1.0]}
    assert other.scaler.scale == 4.0


def test_main_parameters_can_be_taken_from_loaded_weights():
    params, optimizer = make(torch.bfloat16)
    with torch.no_grad():
        params[0].fill_(3.0)
    reset_main(optimizer)
    assert (of_params(params, optimizer, "main")[0] == 3).all()
    assert list(optimizer_states(optimizer)) == ["main", "exp_avg", "exp_avg_sq"]


# Several ranks

LLAMA = TransformerConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    position_embedding_type="rope",
    qk_layernorm=True,
)


def train(mesh, dtype=torch.float32):
    """Norms of three steps and the final weights of the shards."""
    model = GPTModel(
        LLAMA, vocab_size=29, max_sequence_length=8, padded_vocab_size=32, mesh=mesh, init=Init(dtype=dtype)
    )
    grads = ParamAndGradBuckets(model, ParallelConfig(), mesh)
    optimizer = Optimizer(grads, OptimizerConfig(), PrecisionConfig(), [[1e-2] * 3] * 3)
    data, norms = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(2)), []
    for _ in range(3):
        grads.zero_grad_buffer()
        loss = model(Batch(data[:, :-1], torch.arange(8)), data[:, 1:]).mean()
        loss.backward()
        grads.finish_grad_sync()
        norms.append(optimizer.step(loss.detach()).grad_norm.item())
    names = [name for name, n in zip(optimizer.part_names, optimizer.counted, strict=True) if n]
    return norms, names, model


def train_on_tp(mesh):
    norms, names, model = train(mesh)
    table = model.embedding.word_embeddings.weight
    assert (table[29 - 16 * mesh.tp.rank :] == 0).all() or mesh.tp.rank == 0, "padding stays zero"
    return norms, names


def test_norm_over_tp_counts_every_part_once():
    """Tied embedding, padded vocabulary and replicated norms: the norm of one process, step by step."""
    norms, names, _ = train(ALONE)
    (first, owned), (second, others) = run_spmd(train_on_tp, 2, tp=2)
    assert first == second == pytest.approx(norms, rel=1e-5)
    assert sorted(owned) == sorted(names)
    assert not any("layernorm" in name or name.endswith("linear_fc2.bias") for name in others)


def test_norm_is_exact_however_large_the_tensors():
    """An fp32 sum of a million squares is off by 1e-5, and by another 1e-5 in the halves that tp 2 has."""
    grad = torch.rand(1_000_000, generator=torch.Generator().manual_seed(1)) * 1e-3
    norms = []
    for pieces in (1, 2, 7):
        params = []
        for i, piece in enumerate(grad.tensor_split(pieces)):
            spec = ParamSpec((replica(f"w{i}", piece.shape, Axis.single()),), tuple(piece.shape))
            params.append(new_parameter(spec, Init(), fill=0.0))
        buckets = ParamAndGradBuckets(nn.ParameterList(params), ParallelConfig(), ALONE)
        put(params, grad.tensor_split(pieces))
        optimizer = Optimizer(buckets, OptimizerConfig(clip_grad=0), PrecisionConfig(), [[0.0]] * 3)
        norms.append(optimizer.step(torch.tensor(0.0)).grad_norm.item())
    assert norms == pytest.approx([grad.double().norm().item()] * 3, rel=1e-7)
