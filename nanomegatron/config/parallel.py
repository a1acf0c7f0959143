"""How a run is laid out over its processes: the settings of every parallel dimension. See settings.py."""

import functools
import math
from dataclasses import dataclass

from nanomegatron.config.model import ALL_TO_ALL, moe
from nanomegatron.config.rules import common, setting
from nanomegatron.schedules import CHUNKS, NAMES

PP_ABOVE_1 = "--pipeline-model-parallel-size greater than 1"
ONE_SIZE = f"{PP_ABOVE_1}, whose messages are all of one size"
SIZE = "--num-layers-per-virtual-pipeline-stage; give the number of pieces with --vpp instead"
SHARDED = "--use-distributed-optimizer or --data-parallel-sharding-strategy optim or optim_grads"
COUNTED = "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split"
FLOPS, LAYOUT = "--pipeline-split flops", "--pipeline-model-parallel-layout"
ANOTHER_SPLIT = (SIZE, COUNTED, FLOPS, LAYOUT)
EQUALLY_MANY = "whose ranks need equally many microbatches"
pipeline = functools.partial(setting, part_of=PP_ABOVE_1)
context = functools.partial(setting, part_of="--context-parallel-size greater than 1")


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes are laid out. data parallel = world / (tp * cp * pp)."""

    tensor_model_parallel_size: int = common(1, "tensor parallelism: ranks that split each layer", "tp")
    pipeline_model_parallel_size: int = common(1, "pipeline parallelism: ranks that divide the layers", "pp")
    num_layers_per_virtual_pipeline_stage: int | None = pipeline(None, "layers in each virtual stage")
    num_virtual_stages_per_pipeline_rank: int | None = common(
        None, "virtual stages on each pipeline rank; default 1, or 2 with zb-v", "vpp", excludes=SIZE
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = pipeline(
        None,
        "interleaved: consecutive microbatches of a virtual stage; default --pp",
        at_least="--pipeline-model-parallel-size",
    )
    pipeline_schedule: str | None = pipeline(
        None,
        "pipeline schedule; default 1f1b, or interleaved with --vpp above 1",
        choices=NAMES,
        most_used=True,
    )
    pipeline_split: str = pipeline(
        "even",
        "give pipeline ranks equal numbers of layers, or equal FLOPs including the output layer",
        choices="even flops",
        excludes=(SIZE, LAYOUT),
    )
    decoder_first_pipeline_num_layers: int | None = pipeline(
        None, "layers on the first rank", excludes=ANOTHER_SPLIT
    )
    decoder_last_pipeline_num_layers: int | None = pipeline(
        None, "layers on the last rank", excludes=ANOTHER_SPLIT
    )
    account_for_embedding_in_pipeline_split: bool = pipeline(
        False, "count the embedding as a layer", excludes=(FLOPS, LAYOUT)
    )
    account_for_loss_in_pipeline_split: bool = pipeline(
        False, "count the output layer as a layer", excludes=(FLOPS, LAYOUT)
    )
    pipeline_model_parallel_layout: str | None = pipeline(
        None, 'layers in each stage: E embedding, t layer, L loss: "Ett|(ttt|)*2tL"', excludes=SIZE
    )
    context_parallel_size: int = common(1, "context parallelism: ranks that split each sequence", "cp")
    cp_comm_type: tuple[str, ...] = context(
        ("p2p",),
        "attention over cp: ring of keys, all-to-all of heads, all-gather of keys; one, or one per layer",
        choices="p2p a2a allgather a2a+p2p all_gather",  # the last: allgather, as Megatron's code spells it
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = context(
        (), "a2a+p2p: sizes of the a2a groups and of the p2p ring", count=2, needs="--cp-comm-type a2a+p2p"
    )
    dynamic_context_parallel: bool = context(
        False,
        "shard long documents over all cp ranks, shorter ones over fewer",
        needs="--variable-seq-lengths, documents of different lengths",
        excludes=(
            f"--data-parallel-sharding-strategy optim_grads, {EQUALLY_MANY}; use optim",
            f"--num-experts, {EQUALLY_MANY}",
            "--trace-dir, where all ranks do the same ops; use --profile",
            "--cp-comm-type a2a+p2p; use p2p, a2a or allgather",
            ONE_SIZE,
        ),
    )
    max_seqlen_per_dp_cp_rank: int | None = context(
        None,
        "maximum tokens of a microbatch on one cp rank; default --seq-length / cp",
        needs="--dynamic-context-parallel",
    )
    expert_model_parallel_size: int = moe(
        1, "expert parallelism: ranks that divide the experts", "ep", most_used=True
    )
    expert_tensor_parallel_size: int | None = common(
        None, "tensor parallelism of experts: ranks that split each; default --tp", "etp"
    )
    overlap_moe_expert_parallel_comm: bool = moe(
        False,
        "dispatch half of the tokens during the matmuls of the others",
        needs=ALL_TO_ALL,
        excludes="--moe-pad-expert-input-to-capacity, which would pad each half of the tokens to it",
        fast_path=True,
    )
    auto_layout: bool = setting(
        False, "choose sizes of all dimensions, micro batch and recomputation that no flag gives (planner)"
    )
    data_parallel_size: int | None = common(None, "number of replicas; checked, not needed", "dp")
    fast_paths: bool | None = setting(None, "use fast paths; default only on GPUs", names_run=False)
    tp_comm_overlap: bool = setting(False, "overlap tp communication with matmuls", fast_path=True)
    cuda_graph_impl: str | None = setting(
        None,
        "CUDA graphs, of a whole microbatch or of each layer (local); default the first that can be",
        choices="full_iteration local none",
        names_run=False,
    )
    cuda_graph_warmup_steps: int = setting(3, "steps before graphs are captured", at_least=1, names_run=False)
    use_distributed_optimizer: bool = common(
        False, "shard optimizer states over dp", excludes="--data-parallel-sharding-strategy no_shard"
    )
    data_parallel_sharding_strategy: str | None = setting(
        None,
        "shard nothing, optimizer states, or also gradients over dp (ZeRO 0, 1, 2); default no_shard",
        choices="no_shard optim optim_grads",
        refused={"optim_grads_params": "parameters are not sharded over dp; use optim_grads"},
    )
    overlap_grad_reduce: bool = setting(False, "reduce gradients over dp bucket by bucket in the backward")
    overlap_param_gather: bool = setting(
        False,
        "all-gather parameters bucket by bucket in the forward",
        needs=SHARDED,
        brings="--use-distributed-optimizer",
    )
    ddp_bucket_size: int | None = setting(
        None, "elements in a gradient bucket; default max(40M, 1M x dp) with overlap, else all"
    )
    ddp_average_in_collective: bool = setting(False, "divide by dp x cp in the collective, not after it")
    grad_reduce_in_bf16: bool = setting(False, "accumulate and reduce gradients in bf16", needs="--bf16")
    peer_memory: bool = setting(True, "overlap by copies between the GPUs of a machine, not by NCCL")
    distributed_backend: str | None = setting(
        None, "communication backend; default nccl on GPUs, else gloo", choices="nccl gloo", names_run=False
    )
    distributed_timeout_minutes: float = setting(10.0, "timeout of collectives", at_most=1e5, names_run=False)

    @property
    def sharding(self) -> str:
        """The sharding strategy over dp: no_shard, optim or optim_grads."""
        default = "optim" if self.use_distributed_optimizer else "no_shard"
        return self.data_parallel_sharding_strategy or default

    def bucket_size(self, ranks: int) -> float:
        """Elements per bucket over `ranks` ranks; infinite if none are set and no flag gains from several."""
        gains = [self.overlap_grad_reduce, self.overlap_param_gather, self.sharding == "optim_grads"]
        if any(gains) or self.ddp_bucket_size:
            return self.finite_bucket_size(ranks)
        return math.inf

    def finite_bucket_size(self, ranks: int) -> int:
        """Elements per bucket over `ranks` ranks: as set, or enough to use the network's bandwidth."""
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks)

    @property
    def schedule(self) -> str:
        """The name of the pipeline schedule."""
        several = (self.num_virtual_stages_per_pipeline_rank or 1) > 1
        return self.pipeline_schedule or ("interleaved" if several else "1f1b")

    @property
    def chunks(self) -> int:
        """Virtual stages on each pipeline rank; call it on a resolved config."""
        return self.num_virtual_stages_per_pipeline_rank or CHUNKS.get(self.pipeline_schedule, 1)

    @property
    def ranks_per_replica(self) -> int:
        """Processes that work on one microbatch: world / this is the number of data-parallel replicas."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return model * self.context_parallel_size

    def cp_types(self, num_layers: int) -> list[str]:
        """How each layer's attention communicates over cp; all_gather is Megatron code's allgather."""
        types = [name.replace("all_gather", "allgather") for name in self.cp_comm_type]
        return types * num_layers if len(types) == 1 else types
