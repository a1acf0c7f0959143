"""megatron-core itself, on CPU: small models that it saves, loads and computes, in processes of their own.

    with Oracle(tp=2) as oracle:
        logits = oracle("save", "llama", folder)       # what Megatron's dist_checkpointing.save has written
        logits = oracle("load", "llama", folder)       # what its load makes of a folder of ours

To import it takes seconds, so one process answers all calls. It is built for GPUs: `patch` replaces what
needs one, or packages that are not here; numbers are those of its own code.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

VOCAB, LENGTH, POSITIONS = 120, 16, 64
PADDED = 128
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = SIZES | {"num_query_groups": 2, "ffn_hidden_size": 48}
ROPE = {"position_embedding_type": "rope"}
# Our settings of each model; `theirs` makes Megatron's of them.
MODELS: dict[str, dict[str, Any]] = {
    "gpt": SIZES | {"bias_gelu_fusion": False},
    "llama": LLAMA
    | ROPE
    | {
        "swiglu": True,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
}
MODELS["qwen"] = MODELS["llama"] | {"add_qkv_bias": True, "qk_layernorm": True, "kv_channels": 12}
MODELS["mixtral"] = MODELS["llama"] | {"num_experts": 4}
MODELS["qwen-moe"] = MODELS["mixtral"] | {
    "num_layers": 3,
    "moe_layer_freq": "[0,1,1]",
    "moe_ffn_hidden_size": 40,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
SAME = """
num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels normalization
add_qkv_bias qk_layernorm moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
moe_router_score_function moe_router_enable_expert_bias
""".split()


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def pattern() -> torch.Tensor:
    """A sequence that is followed by its own beginning: data that repeat it have but this sample."""
    return torch.randint(PADDED - 1, (LENGTH,), generator=torch.Generator().manual_seed(6))


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


def patch() -> None:
    """Replace what needs a GPU, psutil or Transformer Engine, and a process that is spawned for a queue."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writing
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe.te_general_gemm = None
    optimizer.Adam = distributed.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    writing._process_memory = lambda: 0
    writing._get_write_results_queue = queue.Queue


class OnCpu(TorchFunctionMode, contextlib.ContextDecorator):
    """What is made on a GPU is made on the CPU, and parameters say that they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        named = func is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if named else found


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the states of Transformer Engine's and Apex's: the step is one of the group."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: tuple, eps: float, adam_w_mode: bool
    ):
        assert adam_w_mode
        given = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            betas = group["betas"]
            corrections = [1 - beta**step if group["bias_correction"] else 1.0 for beta in betas]
            for param in group["params"]:
                moments = [self.state[param].setdefault(k, param * 0) for k in ("exp_avg", "exp_avg_sq")]
                for moment, beta, grad in zip(moments, betas, (param.grad, param.grad**2), strict=True):
                    moment.lerp_(grad, 1 - beta)
                mean, square = (m / c for m, c in zip(moments, corrections, strict=True))
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
                param.sub_(group["lr"] * update)


def build(name: str, seed: int, **more: Any) -> torch.nn.Module:
    """One of MODELS by megatron-core, with random weights, biases and norms."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    ours = MODELS[name]
    given = {key: ours[key] for key in SAME if key in ours} | more
    experts = ours.get("num_experts")
    if experts:
        given |= {"num_moe_experts": experts, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
    if "moe_layer_freq" in ours:
        given["moe_layer_freq"] = eval(ours["moe_layer_freq"])
    if ours.get("swiglu"):
        given |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    config = TransformerConfig(
        **given,
        add_bias_linear=not ours.get("disable_bias_linear"),
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    if "moe_layer_freq" in ours:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    model = GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=POSITIONS,
        position_embedding_type=ours.get("position_embedding_type", "learned_absolute"),
        share_embeddings_and_output_weights=not ours.get("untie_embeddings_and_output_weights"),
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.dim() < 2 and value.is_floating_point() and not key.endswith("inv_freq"):
                value.add_(torch.randn(value.shape, generator=generator), alpha=0.1)
    return model.eval()


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
    import argparse

    from megatron.core import dist_checkpointing

    model = build(name, seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"model": model.sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 7}
    if args:
        state["args"] = argparse.Namespace(**args)
    dist_checkpointing.save(state, str(folder))
    return logits(model)


def loaded(name: str, folder: str, seed: int = 2) -> torch.Tensor | None:
    """Load a folder into a model with other weights, and return its logits."""
    from megatron.core import dist_checkpointing

    model = build(name, seed)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(state["model"])
    return logits(model)


def saved_legacy(name: str, folder: str, args: dict, seed: int = 1) -> torch.Tensor | None:
    """Save a model as Megatron-LM does with --ckpt-format torch, a file for each rank; returns its logits."""
    import argparse

    from megatron.core import parallel_state as state

    model = build(name, seed)
    tp, pp = state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
    stage = f"_{state.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    path = Path(folder) / f"mp_rank_{state.get_tensor_model_parallel_rank():02d}{stage}"
    path.mkdir(parents=True)
    args |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args |= {"params_dtype": torch.float32, "rank": torch.distributed.get_rank()}
    whole = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 7}
    whole |= {"model": model.state_dict_for_save_checkpoint(), "rng_state": [{"np": (1, 2.5)}]}
    torch.save(whole, path / "model_optim_rng.pt")
    return logits(model)


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
    import argparse

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


@OnCpu()
def resumed(name: str, folder: str, config: dict, schedule: dict, steps: int) -> list[float] | None:
    """Load model, distributed optimizer and scheduler of a folder; the losses of the next steps on `pattern`.

    No steps: they are saved again, to FOLDER-again, as Megatron-LM does it.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model = build(name, 2)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(**config, use_distributed_optimizer=True), [ddp])
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
        return None
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
        scheduler.step(increment=2)
        losses.append(loss.item())
    return losses


CALLS = {"train": trained, "resume": resumed, "legacy": saved_legacy, "save": saved, "load": loaded}
