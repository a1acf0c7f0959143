"""Small models by megatron-core, which is built for GPUs: what has to be replaced to have them on a CPU.

Numbers are those of its own code, but for the update of the optimizer: torch's AdamW has its steps elsewhere.
"""

import contextlib
import queue
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
MODELS["gpt-moe"] = MODELS["gpt"] | {"num_experts": 4}
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
