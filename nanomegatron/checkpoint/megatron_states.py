"""The optimizer's states of a checkpoint of ours, as Megatron-LM's distributed optimizer loads them.

    optimizer.state.param.NAME         fp32 main parameters, of the parameter's shape: at any layout
    optimizer.state.exp_avg.NAME       first moments, and exp_avg_sq: second
    common.pt                          optimizer: groups of parameters with rate, betas and step
                                       opt_param_scheduler: the schedule, and the samples it has seen
                                       content_metadata: that of --dist-ckpt-optim-fully-reshardable

Megatron's optimizers that are not distributed have other names for them.
"""

import copy
from typing import Any

import torch

from nanomegatron.build import build_schedule, pick_schedules
from nanomegatron.config.batch import samples_before
from nanomegatron.config.settings import Config

PREFIXES = {"model": "", "main": "optimizer.state.param."}
PREFIXES |= {kind: f"optimizer.state.{kind}." for kind in ("exp_avg", "exp_avg_sq")}
FORM = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
FORM |= {"distrib_optim_fully_reshardable_mem_efficient": False, "singleton_local_shards": False}
# What groups have besides: Megatron's marks, and settings of torch's AdamW that Transformer Engine ignores.
MARKS = {"bias_correction": True, "lr_mult": 1.0, "is_decoupled_lr": False, "default_config": True}
MARKS |= dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
MARKS |= {"foreach": None, "fused": None, "decoupled_weight_decay": True}


def lacking(config: Config, state: dict[str, Any], kinds: set[str]) -> str:
    """Return why states of these kinds cannot be written, or "". state: what a checkpoint of ours says."""
    if not {"exp_avg", "exp_avg_sq"} <= kinds or not state.get("optimizer"):
        return "the source has no optimizer states of a run of nanomegatron"
    if (config.precision.bf16 or config.precision.fp16) and "main" not in kinds:
        return "the source has no fp32 main parameters"
    if config.optimizer.decoupled_lr is not None:
        return "versions of Megatron tell the groups of --decoupled-lr apart by different marks"
    return ""


def common_states(config: Config, state: dict[str, Any]) -> dict[str, Any]:
    """Return what common.pt has of an optimizer. state: what a checkpoint of ours says."""
    optimizer, table = config.optimizer, samples_before(config, 1)
    schedule = build_schedule(config, table)
    rate_at, _, decay_at = pick_schedules(config, table)
    steps = state["optimizer"]["good_steps"]
    samples = table[min(steps, len(table) - 1)]
    rates = {"max_lr": schedule.lr, "min_lr": schedule.min_lr}
    decay = decay_at(samples)
    betas = (optimizer.adam_beta1, optimizer.adam_beta2)
    alike = MARKS | rates | {"betas": betas, "eps": optimizer.adam_eps, "step": steps}
    alike["lr"] = rate_at(samples)
    groups = [
        alike | {"wd_mult": share, "weight_decay": share * decay, "is_expert_parallel": expert}
        for expert in (False, True)
        for share in (1.0, 0.0)
    ]
    form = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    if config.precision.fp16 and config.precision.loss_scale is None:
        scale, good, left = state["optimizer"]["loss_scaler"]
        form["grad_scaler"] = {"scale": torch.tensor([scale]), "growth_tracker": int(good)}
        form["grad_scaler"]["hysteresis_tracker"] = int(left)
    # With expert ranks Megatron has a second optimizer, for experts.
    apart = config.model.num_experts and config.parallel.expert_model_parallel_size > 1
    constant = optimizer.weight_decay_incr_style == "constant"
    scheduler = rates | {
        "lr_warmup_steps": schedule.warmup,
        "num_steps": samples,
        "lr_decay_style": schedule.style,
        "lr_decay_steps": schedule.decay,
        "start_wd": optimizer.weight_decay if constant else optimizer.start_weight_decay,
        "end_wd": optimizer.weight_decay if constant else optimizer.end_weight_decay,
        "wd_incr_style": optimizer.weight_decay_incr_style,
        "wd_incr_steps": config.run.train_samples or table[-1],
    }
    form = {0: form, 1: copy.deepcopy(form)} if apart else form
    return {"optimizer": form, "opt_param_scheduler": scheduler, "content_metadata": FORM}
