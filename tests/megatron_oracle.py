"""megatron-core itself, on CPU: small models that it saves, loads and computes, in processes of their own.

    with Oracle(tp=2) as oracle:
        logits = oracle("save", "llama", folder)       # what Megatron's dist_checkpointing.save has written
        logits = oracle("load", "llama", folder)       # what its load makes of a folder of ours

To import it takes seconds, so one process answers all calls.
"""

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.megatron_models import LENGTH, VOCAB, OnCpu, build, patch, pattern, tokens


class Oracle:
    """A process of megatron-core for each rank; calling it has all ranks do something, rank 0 answers."""

    def __init__(self, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
        context, self.ranks = multiprocessing.get_context("spawn"), []
        self.store = tempfile.TemporaryDirectory()
        for rank in range(tp * pp * ep):
            here, there = context.Pipe()
            args = (there, rank, (tp, pp, ep), self.store.name)
            process = context.Process(target=serve, args=args, daemon=False)
            process.start()
            there.close()
            self.ranks.append((process, here))

    def __call__(self, what: str, *args: Any) -> Any:
        for _, pipe in self.ranks:
            pipe.send((what, args))
        answers: dict[Any, Any] = {}
        while waiting := [pipe for _, pipe in self.ranks if pipe not in answers]:
            ready = multiprocessing.connection.wait(waiting, timeout=120)
            answers |= {pipe: pipe.recv() for pipe in ready}
            failed = [answer for answer in answers.values() if isinstance(answer, str)]
            if failed or not ready:  # the other ranks may wait for one that has failed
                self.close()
                raise RuntimeError(failed[0] if failed else f"megatron-core does not answer {what}")
        return answers[self.ranks[0][1]]

    def close(self) -> None:
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
            process.join()
        self.store.cleanup()

    def __enter__(self) -> "Oracle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(pipe: Any, rank: int, sizes: tuple[int, int, int], store: str) -> None:
    """What a rank does: answers calls until the pipe is closed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    tp, pp, ep = sizes
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=tp * pp * ep
    )
    patch()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    with contextlib.suppress(EOFError):
        while True:
            what, args = pipe.recv()
            try:
                pipe.send(CALLS[what](*args))
            except Exception as error:
                import traceback

                pipe.send(f"{error!r}: {traceback.format_exc()[-1500:]}")


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor | None:
    """Logits `[b, s, V]`; None if the model is spread over ranks."""
    if torch.distributed.get_world_size() > 1:
        return None
    mask = torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5
    found = model(tokens(), torch.arange(LENGTH).expand(2, -1), mask)
    return found[..., :VOCAB].clone()


def saved(name: str, folder: str, args: dict | None = None, seed: int = 1) -> torch.Tensor | None:
    """Save a model as Megatron-LM does, `args` among its state; returns its logits."""
    from megatron.core import dist_checkpointing

    model = build(name, seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"model": model.sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 7}
    if args:
        state["args"] = argparse.Namespace(**args)
    dist_checkpointing.save(state, str(folder))
    return logits(model)


def loaded(name: str, folder: str, seed: int = 2) -> torch.Tensor | None:
    """Load a folder into a model with other weights, and return its logits.

    Nothing is left over in the folder, which Megatron would not say, but what it has under two names or
    beside a model.
    """
    from megatron.core import dist_checkpointing

    model = build(name, seed)
    wanted = {"model": model.sharded_state_dict()}
    state, left, missing = dist_checkpointing.load(wanted, str(folder), strict="return_all")
    beside = ("optimizer.", "chained_", "_extra_state", "layernorm.", "layer_norm_")
    left = [key for key in left if not any(word in key for word in beside)]
    if left or missing:
        raise ValueError(f"not in the model: {left}, not in the folder: {missing}")
    model.load_state_dict(state["model"])
    return logits(model)


def saved_legacy(name: str, folder: str, args: dict, seed: int = 1) -> torch.Tensor | None:
    """Save a model as Megatron-LM does with --ckpt-format torch, a file for each rank; returns its logits."""
    model = build(name, seed)
    path = legacy_file(folder, args)
    whole = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 7}
    whole |= {"model": model.state_dict_for_save_checkpoint(), "rng_state": [{"np": (1, 2.5)}]}
    torch.save(whole, path)
    return logits(model)


def legacy_file(folder: str, args: dict) -> Path:
    """The path of this rank's file; `args` get the layout."""
    from megatron.core import parallel_state as state

    tp, pp = state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
    stage = f"_{state.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    ep = state.get_expert_model_parallel_world_size()
    stage += f"_{state.get_expert_model_parallel_rank():03d}" if ep > 1 else ""
    path = Path(folder) / f"mp_rank_{state.get_tensor_model_parallel_rank():02d}{stage}"
    path.mkdir(parents=True)
    args |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args |= {"expert_model_parallel_size": ep}
    args |= {"params_dtype": torch.float32, "rank": torch.distributed.get_rank()}
    return path / "model_optim_rng.pt"


def train_steps(model: torch.nn.Module, adam: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of steps on the batch of `pattern`, the mean over its tokens."""
    losses, mask = [], torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5
    for _ in range(steps):
        tokens = pattern()[None]
        found = model(tokens, torch.arange(LENGTH)[None], mask)
        loss = torch.nn.functional.cross_entropy(found[0], tokens[0].roll(-1))
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def trained(name: str, folder: str, args: dict, before: int, after: int) -> list[float]:
    """Save a model with its optimizer after some steps, as Megatron-LM does; losses of the next ones."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.optimizer import FP32Optimizer

    model = build(name, 1)
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    train_steps(model, adam, before)
    optimizer = FP32Optimizer.__new__(FP32Optimizer)  # its __init__ needs a GPU
    optimizer.optimizer, optimizer.is_stub_optimizer = adam, False
    weights = model.sharded_state_dict()
    state = {"args": argparse.Namespace(**args), "iteration": before, "model": weights}
    state["optimizer"] = optimizer.sharded_state_dict(weights)
    Path(folder).mkdir(parents=True)
    dist_checkpointing.save(state, str(folder))
    return train_steps(model, adam, after)


def wrapped(model: torch.nn.Module, config: dict, distributed: bool) -> tuple[torch.nn.Module, Any]:
    """The model in Megatron's data parallelism, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    how = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    ddp = DistributedDataParallel(model.config, how, model)
    given = OptimizerConfig(**config, use_distributed_optimizer=distributed)
    optimizer = get_megatron_optimizer(given, [ddp])
    for group in optimizer.param_groups:  # what a scheduler does
        group["weight_decay"] *= group["wd_mult"]
    return ddp, optimizer


def wrapped_steps(ddp: torch.nn.Module, optimizer: Any, steps: int, scheduler: Any = None) -> list[float]:
    """What `train_steps` does, with what `wrapped` returns; a step is of 2 samples."""
    losses, mask = [], torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5
    for _ in range(steps):
        tokens = pattern()[None]
        found = ddp(tokens, torch.arange(LENGTH)[None], mask)
        loss = torch.nn.functional.cross_entropy(found[0], tokens[0].roll(-1))
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        if scheduler:
            scheduler.step(increment=2)
        losses.append(loss.item())
    return losses


@OnCpu()
def resumed(name: str, folder: str, config: dict, schedule: dict, steps: int) -> list[float] | None:
    """Load model, distributed optimizer and scheduler of a folder; the losses of the next steps on `pattern`.

    No steps: they are saved again, to FOLDER-again, as Megatron-LM does it.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model = build(name, 2)
    ddp, optimizer = wrapped(model, config, True)
    # Without a flag the scheduler asserts that the checkpoint has its settings.
    scheduler = OptimizerParamScheduler(optimizer, use_checkpoint_opt_param_scheduler=False, **schedule)
    form = dist_checkpointing.load_content_metadata(str(folder))
    weights = model.sharded_state_dict(metadata=form)
    state = {"model": weights}
    state["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=True, metadata=form)
    state = dist_checkpointing.load(state, str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["opt_param_scheduler"])
    if not steps:
        weights = model.sharded_state_dict(metadata=form)
        state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, metadata=form)}
        Path(f"{folder}-again").mkdir(exist_ok=True)
        dist_checkpointing.save(state, f"{folder}-again", content_metadata=form)
    return wrapped_steps(ddp, optimizer, steps, scheduler)


@OnCpu()
def saved_legacy_states(
    name: str, folder: str, args: dict, config: dict, bf16: bool, distributed: bool
) -> list[float]:
    """`saved_legacy` with an optimizer after 3 steps, beside FOLDER-dist as torch_dist; losses of the next 3.

    If the model is spread over ranks or in bf16 each gradient is the parameter, and there are no losses.
    """
    from megatron.core import dist_checkpointing

    model = build(name, 1).bfloat16() if bf16 else build(name, 1)
    ddp, optimizer = wrapped(model, config | {"bf16": bf16}, distributed)
    simple = bf16 or torch.distributed.get_world_size() > 1
    for _ in range(3 if simple else 0):
        for param in model.parameters():
            param.main_grad.copy_(param.data)
        optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
    wrapped_steps(ddp, optimizer, 0 if simple else 3)
    path = legacy_file(folder, args)
    whole = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 3}
    whole |= {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
    torch.save(whole, path)
    if distributed:
        optimizer.save_parameter_state(str(path.with_name("distrib_optim.pt")))
    weights = model.sharded_state_dict()
    Path(f"{folder}-dist").mkdir(exist_ok=True)
    form = {"distrib_optim_sharding_type": "dp_reshardable"}  # what Megatron-LM does unless a flag says other
    state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, metadata=form)}
    dist_checkpointing.save(state, f"{folder}-dist")
    return wrapped_steps(ddp, optimizer, 0 if simple else 3)


def routed(config: dict, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's router in a training step of one microbatch: its choice, gradients, and the moved bias.

    tensors: x `[s, b, h]`, weight `[E, h]`, the gradient of the probs `[s * b, E]`, perhaps bias and
    expert_bias `[E]`. config: of its TransformerConfig.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
    from megatron.core.transformer.moe.router import TopKRouter

    given = TransformerConfig(**config, params_dtype=dtype, perform_initialization=False)
    router = TopKRouter(config=given, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    names = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]}
    router.load_state_dict({name: value for name, value in tensors.items() if name in names})
    x = tensors["x"].clone().requires_grad_()
    probs, chosen = router(x)
    (probs * tensors["grad"]).sum().backward()
    found = {"probs": probs.detach(), "chosen": chosen, "x.grad": x.grad}
    found |= {f"{name}.grad": param.grad for name, param in router.named_parameters()}
    if router.expert_bias is not None:
        moved = get_updated_expert_bias(
            router.local_tokens_per_expert, router.expert_bias, given.moe_router_bias_update_rate
        )
        found |= {"expert_bias": moved}
    return found


CALLS = {"train": trained, "legacy": saved_legacy, "save": saved, "load": loaded, "resume": resumed}
CALLS |= {"legacy-states": saved_legacy_states, "route": routed}
