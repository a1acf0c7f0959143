"""The same transformer in plain torch modules, made parallel by PyTorch's own means: programs like train.py.

    python benchmarks/peers.py KIND FLAGS        torchrun benchmarks/peers.py KIND FLAGS    FLAGS of train.py

    compile              no parallelism: each block and the loss under torch.compile, all in bf16
    torchao-tensorwise   the same with torchao's FP8 in the linear layers of the blocks: one scale a tensor
    torchao-rowwise      the same with one scale a row
    dtensor              parallelize_module (DTensor): column and row cuts, norms cut along the sequence, loss
                         on cut logits. Parameters, gradients and AdamW's moments are bf16
    dtensor-async        inductor also turns gathers and reduce-scatters beside matmuls into pipelined copies
                         (symmetric memory)
    fsdp                 fully_shard (FSDP2) of each block: parameters and moments fp32, cut; gathered and
                         computed in bf16, gradients reduced in fp32, after the last microbatch
    fsdp-kept            the same, parameters whole between forward and backward
    fsdp-torchao         the same as fsdp with FP8 in the blocks, whose weights are gathered in FP8
    no-kernels           train.py itself, by torch's operations in place of the kernels of cuda/

They begin with the weights of train.py, read its batches and write its metrics.jsonl, but for what only our
own model has. The arithmetic is that of our Llama: RMSNorm, fused QKV, rotary halves, grouped queries through
torch's scaled dot product attention, SwiGLU, AdamW without decay of norms, global norm clipped. QKV and
gate+up are one matrix each, as ours are; on a tp rank its rows are its own [q; k; v]. Activations are
[b, s, h]. On CPUs blocks are compiled by "aot_eager". (Recipes: torchtitan's parallelize for Llama, arXiv
2410.06511; https://github.com/pytorch/ao, float8. torchao is no requirement: only its kinds import it.)
"""

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from benchmarks.peer_program import main, on_gpu
from nanomegatron.build import build
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, OptimizerConfig
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.ops.kernels import without_kernels
from nanomegatron.param import Init
from nanomegatron.pp import ModelChunks

NAMES = {  # of a block's weights, in this project
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "qkv": ColwiseParallel(input_layouts=Shard(1)),
    "proj": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "fc1": ColwiseParallel(input_layouts=Shard(1)),
    "fc2": RowwiseParallel(output_layouts=Shard(1)),
}
END_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


# The model


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x `[b, n, s, d]`; cos, sin: `[s, d/2]`, fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Block(nn.Module):
    """One layer; `tp` ranks share its heads and features. `[b, s/tp, h] -> [b, s/tp, h]`"""

    def __init__(self, config: TransformerConfig, tp: int) -> None:
        super().__init__()
        h, f, self.head_dim = config.hidden_size, config.ffn_size, config.head_dim
        query, key = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.widths = [query // tp, key // tp, key // tp]
        self.attention_norm = nn.RMSNorm(h, eps=config.norm_epsilon)
        self.qkv = nn.Linear(h, query + 2 * key, bias=False)
        self.proj = nn.Linear(query, h, bias=False)
        self.mlp_norm = nn.RMSNorm(h, eps=config.norm_epsilon)
        self.fc1 = nn.Linear(h, 2 * f, bias=False)
        self.fc2 = nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(x)).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.fc1(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


class Transformer(nn.Module):
    """A stage with the weights of `chunk`, the same one of our model, in `dtype`.

    Tokens `[b, s]` or activations `[b, s, h]` in, activations or logits `[b, s, V]` out. `place` gets every
    block as soon as it has its weights, and returns it compiled and parallel.
    """

    def __init__(self, config: Config, chunk: GPTModel, mesh: Mesh, dtype: torch.dtype, place: Callable):
        super().__init__()
        model, vocab, h = config.model, config.data.vocab_size, config.model.hidden_size
        weights = {name: weight.detach() for name, weight in chunk.named_parameters()}

        def take(module: nn.Module, name: str) -> nn.Module:
            fill(module.to(dtype).weight, weights[f"{name}.weight"], mesh.tp.rank)
            return module

        with mesh.device:
            pairs = torch.arange(0, model.head_dim, 2).float() / model.head_dim
            angles = torch.arange(config.data.seq_length)[:, None] / model.rotary_base**pairs
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
            self.embedding = self.norm = self.output = None
            if chunk.pre_process:
                self.embedding = take(nn.Embedding(vocab, h), "embedding.word_embeddings")
            if chunk.post_process:
                self.norm = take(nn.RMSNorm(h, eps=model.norm_epsilon), "final_layernorm")
                self.output = take(nn.Linear(h, vocab, bias=False), "output_layer")
            self.blocks = nn.ModuleList()
            for i in range(len(chunk.layers)):
                block = Block(model, mesh.tp.size)
                for theirs, ours in NAMES.items():
                    take(getattr(block, theirs), f"layers.{i}.{ours}")
                self.blocks.append(place(block))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.output is None else self.output(self.norm(x))


@torch.no_grad()
def fill(param: torch.Tensor, value: torch.Tensor, rank: int) -> None:
    """Copy a tp rank's slice, or all, into its place in the whole matrix."""
    for dim, (whole, local) in enumerate(zip(param.shape, value.shape)):
        param = param.narrow(dim, rank * local if local < whole else 0, local)
    param.copy_(value)


def our_model(config: Config, mesh: Mesh) -> ModelChunks:
    """The model as train.py begins with it, its vocabulary without padding."""
    vocab, dtype = config.data.vocab_size, getattr(torch, config.dtype_name)
    if vocab % mesh.tp.size:
        raise ValueError(f"a vocabulary of {vocab} tokens cannot be cut over {mesh.tp.size} ranks")
    return build(config, mesh, vocab, vocab, Init(config.run.seed, dtype, mesh.device))


# Its training


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, 0-d fp32. logits `[b, s, V]`, labels `[b, s]`"""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def compiled(what: Callable, mesh: Mesh, options: dict | None = None, mode: str | None = None) -> Callable:
    """A module or function under torch.compile; mode: one of its own, on GPUs."""
    if not on_gpu(mesh):
        return torch.compile(what, backend="aot_eager")
    return torch.compile(what, options=options, mode=mode)


class Peer:
    """A model and its optimizer; `step` is one iteration over this rank's microbatches."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, loss: Callable, context: Callable) -> None:
        self.model, self.loss, self.context = model, loss, context
        self.clip = config.clip_grad
        matrices = [p for p in model.parameters() if p.dim() > 1]
        norms = [p for p in model.parameters() if p.dim() == 1]
        groups = [dict(params=matrices), dict(params=norms, weight_decay=0.0)]
        betas = (config.adam_beta1, config.adam_beta2)
        rest = dict(betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True)
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, **rest)
        self.sharded = hasattr(model, "set_requires_gradient_sync")
        self.after_step: Callable[[nn.Module], object] = lambda model: None

    def microbatch_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of tokens `[b, s + 1]` -> `[]`"""
        return self.loss(self.model(tokens[:, :-1]), tokens[:, 1:])

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """batches: tokens and one more, `[b, s + 1]` each. Returns this rank's mean loss, 0-d."""
        total = 0.0
        for i, tokens in enumerate(batches, 1):
            if self.sharded:
                self.model.set_requires_gradient_sync(i == len(batches))
            with self.context():
                loss = self.microbatch_loss(tokens) / len(batches)
                loss.backward()
            total += (loss.to_local() if isinstance(loss, DTensor) else loss).detach()
        if self.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step(self.model)
        return total


def unchanged(block: nn.Module) -> nn.Module:
    return block


def in_fp8(block: nn.Module, recipe: str, gather: bool = False) -> nn.Module:
    """All linear layers of a block in FP8; gather: FSDP2 is to gather their weights in FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if gather:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)  # tensorwise, as it is by default
    return convert_to_float8_training(block, config=config)


def share_scales(model: nn.Module) -> None:
    """One all-reduce behind the optimizer's step agrees on the scales of all weights."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def on_one_gpu(config: Config, mesh: Mesh, convert: Callable = unchanged) -> Peer:
    """The model by itself, every block converted and compiled."""
    (chunk,), dtype = our_model(config, mesh), getattr(torch, config.dtype_name)
    model = Transformer(config, chunk, mesh, dtype, lambda block: compiled(convert(block), mesh))
    return Peer(model, config.optimizer, compiled(token_loss, mesh), nullcontext)


def tensor_parallel(config: Config, mesh: Mesh, async_tp: bool) -> Peer:
    """tp over all ranks of the world, sequence parallel."""
    cut = init_device_mesh(mesh.device.type, (mesh.tp.size,))
    options = {"_micro_pipeline_tp": True} if async_tp and on_gpu(mesh) else None
    if async_tp:
        with warnings.catch_warnings():  # newer torch enables all groups, and says that this is needless
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(cut.get_group().group_name)

    def place(block: Block) -> nn.Module:
        return compiled(parallelize_module(block, cut, BLOCK_PLAN, src_data_rank=None), mesh, options)

    (chunk,), dtype = our_model(config, mesh), getattr(torch, config.dtype_name)
    model = Transformer(config, chunk, mesh, dtype, place)
    parallelize_module(model, cut, END_PLAN, src_data_rank=None)
    # A collective's result that has not been waited for loses its gradient in a compiled block (torch 2.13).
    model.embedding.register_forward_hook(lambda module, inputs, output: output.clone())
    return Peer(model, config.optimizer, compiled(token_loss, mesh), loss_parallel)


def fully_sharded(config: Config, mesh: Mesh, keep: bool = False, convert: Callable = unchanged) -> Peer:
    """FSDP2 over all ranks of the world, every block converted and compiled."""
    ranks = init_device_mesh(mesh.device.type, (mesh.world.size,))
    policy = MixedPrecisionPolicy(getattr(torch, config.dtype_name), torch.float32)
    cut = dict(mesh=ranks, mp_policy=policy)

    def place(block: Block) -> nn.Module:
        return fully_shard(compiled(convert(block), mesh), reshard_after_forward=not keep, **cut)

    (chunk,) = our_model(config, mesh)
    model = Transformer(config, chunk, mesh, torch.float32, place)
    fully_shard(model.embedding, reshard_after_forward=not keep, **cut)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **cut)
    fully_shard(model, **cut)
    return Peer(model, config.optimizer, compiled(token_loss, mesh), nullcontext)


def fully_sharded_fp8(config: Config, mesh: Mesh) -> Peer:
    """The same, with weights that are gathered in FP8."""
    peer = fully_sharded(config, mesh, convert=partial(in_fp8, recipe="tensorwise", gather=True))
    peer.after_step = share_scales
    return peer


KINDS: dict[str, Callable[[Config, Mesh], Peer]] = {
    "compile": on_one_gpu,
    "torchao-tensorwise": partial(on_one_gpu, convert=partial(in_fp8, recipe="tensorwise")),
    "torchao-rowwise": partial(on_one_gpu, convert=partial(in_fp8, recipe="rowwise")),
    "dtensor": partial(tensor_parallel, async_tp=False),
    "dtensor-async": partial(tensor_parallel, async_tp=True),
    "fsdp": fully_sharded,
    "fsdp-kept": partial(fully_sharded, keep=True),
    "fsdp-torchao": fully_sharded_fp8,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["no-kernels"]:
        with without_kernels():
            sys.exit(train.main(sys.argv[2:]))
    sys.exit(main(KINDS, sys.argv[1:]))
