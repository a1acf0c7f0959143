"""Megatron-LM's keywords that are no field here: taken where they change nothing, answered where they do.

    TransformerConfig(num_layers=2, ..., use_cpu_initialization=True)    taken: it always is so
    TransformerConfig(num_layers=2, ..., add_bias_linear=False)          TypeError: disable_bias_linear

So code from Megatron's examples runs, or says which word to change; none is dropped in silence.
"""

import difflib
from collections.abc import Iterable
from typing import Any

# keyword -> (value that changes nothing, what to write for another)
TRANSFORMER_CONFIG = {
    "add_bias_linear": (True, "disable_bias_linear=True"),
    "gated_linear_unit": (False, "swiglu=True"),
    "activation_func": (None, "swiglu=True or squared_relu=True; it is GELU without, see bias_gelu_fusion"),
    "bias_activation_fusion": (True, "bias_gelu_fusion=False for exact GELU, or bias_swiglu_fusion=False"),
    "layernorm_epsilon": (1e-5, "norm_epsilon"),
    "layernorm_zero_centered_gamma": (False, "apply_layernorm_1p=True"),
    "init_method": (None, "init_method_std, the standard deviation of a normal distribution"),
    "output_layer_init_method": (None, "init_method_std, which for these is divided by sqrt(2 * num_layers)"),
    "params_dtype": (None, "GPTModel(..., init=Init(dtype=...))"),
    "bf16": (False, "PrecisionConfig(bf16=True), and GPTModel(..., init=Init(dtype=torch.bfloat16))"),
    "fp16": (False, "PrecisionConfig(fp16=True), and GPTModel(..., init=Init(dtype=torch.float16))"),
    "fp8": (None, "PrecisionConfig(bf16=True, fp8_format='e4m3') or 'hybrid'"),
    "fp8_recipe": ("delayed", "PrecisionConfig(fp8_recipe=...)"),
    "fp8_quantizer_factory": (None, "PrecisionConfig(fp8_recipe=...); there are no others"),
    "fp8_margin": (0, "PrecisionConfig(fp8_margin=...)"),
    "fp8_amax_history_len": (1, "PrecisionConfig(fp8_amax_history_len=...)"),
    "fp8_amax_compute_algo": ("most_recent", "PrecisionConfig(fp8_amax_compute_algo=...)"),
    "fp8_wgrad": (True, "PrecisionConfig(fp8_wgrad=False)"),
    "fp8_param": (False, "PrecisionConfig(fp8_param_gather=True)"),
    "fp8_dot_product_attention": (False, "nothing; core attention stays in bf16"),
    "fp8_multi_head_attention": (False, "nothing; core attention stays in bf16"),
    "tp_only_amax_red": (False, "nothing; amaxes are those of all ranks, so that the layout changes none"),
    "first_last_layers_bf16": (False, "PrecisionConfig(first_last_layers_bf16=True)"),
    "num_layers_at_start_in_bf16": (1, "PrecisionConfig(num_layers_at_start_in_bf16=...)"),
    "num_layers_at_end_in_bf16": (1, "PrecisionConfig(num_layers_at_end_in_bf16=...)"),
    "tensor_model_parallel_size": (1, "ParallelConfig, and GPTModel(..., tp=mesh.tp)"),
    "pipeline_model_parallel_size": (
        1,
        "ParallelConfig, and GPTModel(..., stage=Stage(...))",
    ),
    "virtual_pipeline_model_parallel_size": (
        None,
        "ParallelConfig(num_virtual_stages_per_pipeline_rank=...)",
    ),
    "num_layers_in_first_pipeline_stage": (None, "ParallelConfig(decoder_first_pipeline_num_layers=...)"),
    "num_layers_in_last_pipeline_stage": (None, "ParallelConfig(decoder_last_pipeline_num_layers=...)"),
    "account_for_embedding_in_pipeline_split": (False, "ParallelConfig"),
    "account_for_loss_in_pipeline_split": (False, "ParallelConfig"),
    "microbatch_group_size_per_vp_stage": (
        None,
        "ParallelConfig(microbatch_group_size_per_virtual_pipeline_stage=...)",
    ),
    "pipeline_model_parallel_layout": (
        None,
        "ParallelConfig(decoder_first_pipeline_num_layers=..., decoder_last_pipeline_num_layers=...)",
    ),
    "delay_wgrad_compute": (False, "ParallelConfig(pipeline_schedule='zb-h1') or 'zb-v'"),
    "defer_embedding_wgrad_compute": (False, "ParallelConfig(pipeline_schedule='zb-h1') or 'zb-v'"),
    "context_parallel_size": (1, "ParallelConfig"),
    "cp_comm_type": ("p2p", "ParallelConfig(cp_comm_type=...)"),
    "hierarchical_context_parallel_sizes": (
        None,
        "ParallelConfig(hierarchical_context_parallel_sizes=...)",
    ),
    "hybrid_context_parallel": (False, "ParallelConfig(dynamic_context_parallel=True)"),
    "max_seqlen_per_dp_cp_rank": (None, "ParallelConfig(max_seqlen_per_dp_cp_rank=...)"),
    "tp_comm_overlap": (False, "ParallelConfig(tp_comm_overlap=True)"),
    "num_moe_experts": (None, "num_experts"),
    "expert_model_parallel_size": (1, "ParallelConfig(expert_model_parallel_size=...)"),
    "expert_tensor_parallel_size": (None, "ParallelConfig(expert_tensor_parallel_size=...)"),
    "overlap_moe_expert_parallel_comm": (False, "ParallelConfig(overlap_moe_expert_parallel_comm=True)"),
    "moe_per_layer_logging": (False, "RunConfig(moe_per_layer_logging=True)"),
    "moe_layer_recompute": (False, "recompute_granularity='selective', recompute_modules=('moe',)"),
    "moe_token_dropping": (False, "moe_expert_capacity_factor"),
    "moe_enable_deepep": (False, "moe_token_dispatcher_type='alltoall'"),
    "moe_router_topk_limited_devices": (None, "moe_router_num_groups and moe_router_group_topk"),
    "moe_apply_probs_on_input": (False, "nothing; the weights of experts are applied to what they give"),
}
GPT_MODEL = {
    "transformer_layer_spec": (None, "the fields of TransformerConfig; a layer has no other description"),
    "share_embeddings_and_output_weights": (
        None,
        "TransformerConfig(untie_embeddings_and_output_weights=...)",
    ),
    "position_embedding_type": (None, "TransformerConfig(position_embedding_type=...)"),
    "rotary_percent": (None, "TransformerConfig(rotary_percent=...)"),
    "rotary_base": (None, "TransformerConfig(rotary_base=...)"),
    "rope_scaling": (False, "TransformerConfig(use_rope_scaling=True)"),
    "rope_scaling_factor": (None, "TransformerConfig(rope_scaling_factor=...)"),
    "pre_process": (True, "stage=Stage(pre_process=False, ...)"),
    "post_process": (True, "stage=Stage(post_process=False, ...)"),
    "vp_stage": (None, "stage=Stage(layers=range(...), ...), the layers of this piece"),
    "seq_len_interpolation_factor": (None, "TransformerConfig(rotary_seq_len_interpolation_factor=...)"),
}
# What these ask for is always so, or would change no result.
TAKEN = """
use_cpu_initialization perform_initialization pipeline_dtype attention_softmax_in_fp32
bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion
deallocate_pipeline_outputs variable_seq_lengths batch_p2p_comm overlap_p2p_comm
overlap_p2p_comm_warmup_flush enable_autocast fp8_interval
calculate_per_token_loss fp16_lm_cross_entropy parallel_output
moe_router_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization
moe_use_legacy_grouped_gemm moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
""".split()


def answer(owner: str, table: dict[str, tuple[Any, str]], own: Iterable[str], given: dict[str, Any]) -> None:
    """Raise TypeError for keywords `given` that ask `owner` for something; `own` are the ones it has."""
    wrong = []
    for name, value in given.items():
        if name in table:
            neutral, instead = table[name]
            if value is not None and (type(value), value) != (type(neutral), neutral):
                wrong.append(f"{name}={value!r}: use {instead}")
        elif name not in TAKEN:
            near = difflib.get_close_matches(name, own, 1)
            wrong.append(f"{name}: unknown" + (f"; did you mean {near[0]}?" if near else ""))
    if wrong:
        raise TypeError(f"{owner}({'; '.join(wrong)})")
