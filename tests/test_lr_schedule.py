"""What changes from step to step, against Megatron's scheduler and torch's AdamW; the logged norms."""

import math
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.build import buckets_class
from nanomegatron.config.batch import samples_before
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import (
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel
from nanomegatron.optim import Optimizer
from nanomegatron.param import Init, ParamSpec, new_parameter, replica
from nanomegatron.pick_variants import pick_schedules
from nanomegatron.variants.weight_decay import decay_by_rates
from tests.checkpoints import ALONE
from tests.spmd import run_spmd

RAMP = DataConfig(global_batch_size=16, rampup_batch_size=(4, 4, 48))
CASES = {
    "iterations": (RAMP, RunConfig(train_iters=30), {}),
    "samples": (RAMP, RunConfig(train_iters=24, train_samples=300), {}),
    "fraction": (RAMP, RunConfig(train_iters=30), dict(lr_warmup_fraction=0.144, lr_warmup_iters=0)),
    "decoupled": (RAMP, RunConfig(train_iters=30), dict(decoupled_lr=3e-3, decoupled_min_lr=2e-5)),
    "decoupled, one minimum": (RAMP, RunConfig(train_iters=30), dict(decoupled_lr=3e-3)),
}


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_megatrons(case, style):
    """Its scheduler, stepped by each batch of a ramp: the rate of both groups, and the weight decay."""
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    data, run, more = CASES[case]
    if style != "constant":
        more = more | dict(start_weight_decay=0.01, end_weight_decay=0.1)
    unit = "samples" if run.train_samples else "iters"
    # By iterations batches are 4 4 4 4 8 8 12 12 16 ...: 3 have 12 samples, 25 have 328, 30 have 408.
    settings = {f"lr_warmup_{unit}": 3, f"lr_decay_{unit}": 290 if unit == "samples" else 25}
    more = dict(lr=1e-3, min_lr=1e-5, weight_decay_incr_style=style) | settings | more
    opt = OptimizerConfig(**more)
    table = samples_before(Config(data=data, run=run), 1)
    values = step_values(pick_schedules(Config(optimizer=opt, data=data, run=run), table), table)

    warmup, decay, length = (3, 290, 300) if unit == "samples" else (12, 328, 408)
    groups: list[dict] = [{}, {}]
    if opt.decoupled_lr:
        groups[1]["max_lr"] = opt.decoupled_lr
    if opt.decoupled_min_lr:
        groups[1]["min_lr"] = opt.decoupled_min_lr
    theirs = scheduler(
        SimpleNamespace(param_groups=groups),
        init_lr=0.0,
        max_lr=opt.lr,
        min_lr=opt.min_lr,
        lr_warmup_steps=warmup if opt.lr_warmup_fraction is None else 0.144 * decay,
        lr_decay_steps=decay,
        lr_decay_style="cosine",
        start_wd=opt.weight_decay if opt.start_weight_decay is None else opt.start_weight_decay,
        end_wd=opt.weight_decay if opt.end_weight_decay is None else opt.end_weight_decay,
        wd_incr_steps=length,
        wd_incr_style=style,
    )
    for i, step in enumerate(zip(*values, strict=True)):
        expected = (groups[0]["lr"], groups[1]["lr"], groups[0]["weight_decay"])
        assert step == pytest.approx(expected, rel=1e-12), i
        theirs.step(0 if i + 1 == len(table) else table[i + 1] - table[i])
    assert len(values[0]) == len(table)  # that of the step after the last one is logged
    assert (len(set(values[2])) == 1) == (style == "constant")


@pytest.mark.parametrize("style, wsd", [("linear", None), ("cosine", None), ("WSD", 3)])
@pytest.mark.parametrize("data", [RAMP, DataConfig(step_batch_size_schedule="0:4 1K:16", seq_length=32)])
def test_iterations_of_growing_batches(data, style, wsd):
    """5 of 34 iterations warm up, WSD decays in the last 3; both rates and weight decay reach their end."""
    lengths = dict(lr_warmup_iters=5, lr_decay_style=style, lr_wsd_decay_iters=wsd)
    ramp = dict(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.5)
    opt = OptimizerConfig(lr=1e-3, min_lr=1e-5, **lengths, **ramp)
    config = Config(optimizer=opt, data=data, run=RunConfig(train_iters=34))
    table = samples_before(config, 1)
    rates, _, decays = step_values(pick_schedules(config, table), table)
    assert len(rates) == 35 and rates.index(max(rates)) == 5
    assert rates[5] == 1e-3 and rates[-1] == pytest.approx(1e-5)
    assert decays[0] == 0.0 and decays[-1] == 0.5
    assert rates.count(1e-3) == (27 if wsd else 1)


def parameters(config: OptimizerConfig, values: list[list[float]], dtype=torch.float32):
    """The embedding, another matrix and a norm."""
    params = []
    for name, shape in {"embedding.word_embeddings.weight": (6, 4), "w": (4, 4), "norm": (4,)}.items():
        spec = ParamSpec((replica(name, shape, Axis.single()),), shape, decay=len(shape) > 1)
        params.append(new_parameter(spec, Init(dtype=dtype), 1.0))
    buckets = ParamAndGradBuckets(torch.nn.ParameterList(params), ParallelConfig(), ALONE)
    optimizer = Optimizer(buckets, config, PrecisionConfig(), values)
    if config.weight_decay_incr_style != "constant":
        for shard in optimizer.shards:
            decay_by_rates(shard)
    return params, optimizer


@pytest.mark.parametrize("style", ["constant", "linear"])
def test_groups_step_like_torchs(style):
    """Each group has its rate, and matrices the weight decay of the step; a bad step holds all of it."""
    config = OptimizerConfig(weight_decay=0.3, weight_decay_incr_style=style, clip_grad=0.0)
    values = [
        [0.01 * (i + 1) for i in range(8)],
        [0.05 / (i + 1) for i in range(8)],
        [0.1 * i for i in range(8)],
    ]
    params, optimizer = parameters(config, values)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    adamw = torch.optim.AdamW([{"params": [twin]} for twin in twins], betas=(0.9, 0.999))
    for i in range(8):
        grads = [torch.randn(p.shape) for p in params]
        for p in params:
            p.main_grad.fill_(math.nan)
        before = [p.detach().clone() for p in params]
        assert optimizer.step(torch.tensor(1.0)).good == 0
        assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))

        for p, twin, grad in zip(params, twins, grads, strict=True):
            p.main_grad.copy_(grad)
            twin.grad = grad
        for group, rates, decays in zip(adamw.param_groups, (1, 0, 0), (True, True, False), strict=True):
            decay = values[2][i] if style == "linear" else config.weight_decay
            group.update(lr=values[rates][i], weight_decay=decay * decays)
        assert optimizer.step(torch.tensor(1.0)).lr == values[0][i]
        adamw.step()
        torch.testing.assert_close([*params], [*twins], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_parameters_and_zeros_in_gradients(dtype):
    params, optimizer = parameters(OptimizerConfig(), [[1e-3]] * 3, dtype)
    for p in params:
        p.main_grad.fill_(1.0)
    assert optimizer.num_zeros() == 0
    params[0].main_grad[2:4] = 0
    params[2].main_grad[1] = 0
    assert optimizer.num_zeros() == 2 * 4 + 1
    optimizer.step(torch.tensor(1.0))
    mains = [shard.main for shard in optimizer.shards]
    expected = torch.cat(mains).double().norm()
    assert optimizer.params_norm() == pytest.approx(expected.item(), rel=1e-12)


MODEL = TransformerConfig(1, 16, 4, untie_embeddings_and_output_weights=True, disable_bias_linear=True)


def numbers(mesh: Mesh, strategy: str = "no_shard") -> tuple[float, int]:
    """Norm of the parameters and zero gradients of a model that has seen the tokens 0 to 4 of 29."""
    sizes = dict(vocab_size=29, max_sequence_length=8, padded_vocab_size=32, mesh=mesh)
    model = GPTModel(MODEL, **sizes)
    flags = ParallelConfig(data_parallel_sharding_strategy=strategy, ddp_bucket_size=1000)
    grads = buckets_class(flags)(model, flags, mesh)
    optimizer = Optimizer(grads, OptimizerConfig(), PrecisionConfig(), [[0.1]] * 3)
    tokens = torch.arange(5)[None]
    loss = model(Batch(tokens, torch.arange(5)), tokens).sum()
    loss.backward()
    grads.finish_grad_sync()
    zeros = optimizer.num_zeros().item()
    optimizer.step(loss.detach())
    return optimizer.params_norm().item(), zeros


def test_norm_and_zeros_count_every_part_once():
    """Over tp; over dp where each rank has a shard; and over both."""
    norm, zeros = numbers(ALONE)
    assert zeros == (24 + 3) * 16  # of the tokens and the positions that were not seen; padding is no part
    first, second = run_spmd(numbers, 2, tp=2)
    assert first == second == (pytest.approx(norm, rel=1e-6), zeros)
    for world, tp, strategy in ((2, 1, "no_shard"), (3, 1, "optim"), (4, 2, "optim_grads")):
        for found in run_spmd(numbers, world, strategy, tp=tp):
            assert found == (pytest.approx(norm, rel=1e-6), zeros), strategy
