"""The planned memory of experts against the real model: its parameters, and what autograd holds."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.plan.flops import parameter_count
from nanomegatron.plan.layer import Sizes
from nanomegatron.plan.memory import expert_weights, memory
from tests.plan.test_memory import CPU, CUDA, LLAMA, bytes_kept, config

SPARSE = TransformerConfig(
    2,
    64,
    8,
    160,
    num_query_groups=2,
    num_experts=8,
    moe_ffn_hidden_size=96,
    max_position_embeddings=32,
    **LLAMA,
)
SHARED = dict(moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True)
MODELS = {
    "plain": {},
    "four of 32": dict(num_experts=32, moe_router_topk=4),
    "losses": dict(moe_aux_loss_coeff=(0.1,), moe_z_loss_coeff=0.1),
    "shared": SHARED,
    "mixed": SHARED | dict(moe_layer_freq="[0]*1+[1]*1", num_layers=2),
    "alltoall": dict(moe_token_dispatcher_type="alltoall", moe_router_score_function="sigmoid"),
    "moe_act": dict(recompute_granularity="selective", recompute_modules=("moe_act",)),
    "moe": dict(recompute_granularity="selective", recompute_modules=("moe",)) | SHARED,
    "jitter": dict(moe_input_jitter_eps=0.1),
    "relu": dict(swiglu=False, squared_relu=True),
    "overlapped": SHARED | dict(moe_shared_expert_overlap=True),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_the_model_keeps(name, dtype):
    model = replace(SPARSE, **MODELS[name])
    run = config(model, 32, 4, dtype=dtype)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    kept = bytes_kept(model, 32, 4, kind)
    logits = 128 * 32 * 4 * kind.itemsize
    assert memory(run, 128, CPU)["activations"] + logits == pytest.approx(kept, rel=0.01)


def axes(ep: int, etp: int, tp: int = 1) -> Mesh:
    names = {"ep": ep, "etp": etp, "tp": tp}
    return Mesh(**{name: Axis(name, size, size - 1, tuple(range(size))) for name, size in names.items()})


@pytest.mark.parametrize("ep, etp, tp", [(1, 1, 1), (4, 1, 1), (2, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("changes", [{}, SHARED | {"moe_layer_freq": "2"}, {"disable_bias_linear": False}])
def test_parameters_are_those_of_the_model(changes, ep, etp, tp):
    model = replace(SPARSE, sequence_parallel=tp > 1, **changes)
    found = axes(ep, etp, tp)
    built = GPTModel(
        model,
        vocab_size=100,
        max_sequence_length=32,
        padded_vocab_size=128,
        mesh=found,
        init=Init(device=torch.device("meta")),
    )
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    run = replace(config(model, 32, 1), parallel=parallel)
    experts = sum(p.numel() for p in built.parameters() if p.spec.expert)
    assert experts == expert_weights(Sizes(run, CPU), [0, 1])
    rest = sum(p.numel() for p in built.parameters()) - experts
    assert rest == parameter_count(model, 128, tp, experts=0)
    if ep == etp == tp == 1:
        assert experts + rest == parameter_count(model, 128)


MIXTRAL = TransformerConfig(32, 4096, 32, 14336, num_query_groups=8, num_experts=8, **LLAMA)


def test_states_of_experts_are_shared_over_edp():
    """Mixtral on eight replicas: of each rank's experts there are eight, four, or one."""
    dense = parameter_count(MIXTRAL, 32000, experts=0)
    experts = parameter_count(MIXTRAL, 32000) - dense
    for ep in (1, 2, 8):
        kind = ParallelConfig(
            data_parallel_size=8, expert_model_parallel_size=ep, use_distributed_optimizer=True
        )
        parts = memory(replace(config(MIXTRAL, 4096, 1), parallel=kind), 32000, CUDA)
        assert parts["weights"] == 2 * (dense + experts / ep)
        assert parts["gradients"] == 4 * (dense + experts / ep)
        assert parts["Adam moments"] == 8 * (dense / 8 + experts / ep / (8 / ep))


def test_copies_follow_the_ranks_that_share_an_expert():
    """Under tp with sequence parallelism and etp alike, a rank's share of the layer is the tp-th part."""
    sizes = {}
    for tp, etp in ((1, 1), (2, 2), (2, 1)):
        kind = ParallelConfig(tensor_model_parallel_size=tp, expert_tensor_parallel_size=etp)
        run = replace(config(replace(MIXTRAL, sequence_parallel=tp > 1), 4096, 1), parallel=kind)
        of_rank = Sizes(run, CUDA)
        sizes[tp, etp] = of_rank.copies, of_rank.copies * of_rank.expert_ffn
    assert sizes == {(1, 1): (2, 28672), (2, 2): (2, 14336), (2, 1): (1, 14336)}
    padded = replace(MIXTRAL, moe_expert_capacity_factor=1.5, moe_pad_expert_input_to_capacity=True)
    assert Sizes(config(padded, 4096, 1), CUDA).copies == 3
    dropping = replace(MIXTRAL, moe_expert_capacity_factor=0.5)
    assert Sizes(config(dropping, 4096, 1), CUDA).copies == 1


def test_room_for_pieces():
    """Of tokens that are gathered, where GPUs have each other's memory; tokens of a rank: 4096 / tp."""
    allgather = config(MIXTRAL, 4096, 1)

    def room(run, device=CUDA, **parallel):
        return memory(replace(run, parallel=ParallelConfig(**parallel)), 32000, device)["room for pieces"]

    token, ep = 2 * 4096, dict(expert_model_parallel_size=4)
    assert room(allgather, **ep) == 2 * (1 + 4) * 4096 * token
    assert room(allgather) == room(allgather, CPU, **ep) == 0
    assert room(allgather, overlap_moe_expert_parallel_comm=True, **ep) == 0
    assert room(replace(allgather, model=replace(MIXTRAL, moe_token_dispatcher_type="alltoall")), **ep) == 0
    both = replace(allgather, model=replace(MIXTRAL, sequence_parallel=True))
    tp = dict(tensor_model_parallel_size=2, tp_comm_overlap=True)
    assert room(both, **tp, **ep) == 2 * (1 + 2) * 2048 * token + 2 * (1 + 8) * 2048 * token
