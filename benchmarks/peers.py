"""The same transformer in plain torch modules, made parallel by PyTorch's own means, for bench_parallel.py.

    tensor_parallel     parallelize_module (DTensor): column and row cuts, norms cut along the sequence, loss
                        on cut logits; each block and the loss under torch.compile. With `async_tp` inductor
                        turns gathers and reduce-scatters beside matmuls into pipelined copies (symmetric
                        memory). Parameters, gradients and AdamW's moments are bf16.
    fully_sharded       fully_shard (FSDP2) of each block: parameters and moments fp32, cut; gathered and
                        computed in bf16, gradients reduced in fp32. With `keep` parameters stay whole between
                        forward and backward. Gradients of all but the last microbatch are not reduced.
    on_one_gpu          no parallelism: each block and the loss under torch.compile, all in bf16.

The arithmetic is that of our Llama: RMSNorm, fused QKV, rotary halves, grouped queries through torch's scaled
dot product attention, SwiGLU, AdamW without decay of norms, global norm clipped. QKV and gate+up are one
matrix each, as ours are; on a tp rank its rows are its own [q; k; v], so a cut of the matrix is a rank's
part. Activations are [b, s, h]. (Recipes: torchtitan's parallelize for Llama; arXiv 2410.06511)
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, OptimizerConfig

OURS = {  # what this project calls a block's weights
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
    """Tokens `[b, s]` to logits. `place` gets every block as soon as it exists and gives it back parallel."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype, tp: int, place: Callable):
        super().__init__()
        model, vocab = config.model, config.data.vocab_size
        with device:
            pairs = torch.arange(0, model.head_dim, 2).float() / model.head_dim
            angles = torch.arange(config.data.seq_length)[:, None] / model.rotary_base**pairs
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
            self.embedding = nn.Embedding(vocab, model.hidden_size, dtype=dtype)
            self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon, dtype=dtype)
            self.output = nn.Linear(model.hidden_size, vocab, bias=False, dtype=dtype)
            for matrix in (self.embedding, self.output):
                nn.init.normal_(matrix.weight, std=model.init_method_std)
            self.blocks = nn.ModuleList()
            for _ in range(model.num_layers):
                block = Block(model, tp).to(dtype)
                for weight in (p for p in block.parameters() if p.dim() == 2):
                    nn.init.normal_(weight, std=model.init_method_std)
                self.blocks.append(place(block))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, 0-d fp32. logits `[b, s, V]`, labels `[b, s]`"""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def compiled(what: Callable, backend: str | None, options: dict | None = None) -> Callable:
    """A module or function under torch.compile, as it is without a backend."""
    return torch.compile(what, backend=backend, options=options) if backend else what


class Peer:
    """A model and its optimizer; `step` is one iteration over this rank's microbatches."""

    def __init__(
        self, model: Transformer, config: OptimizerConfig, loss: Callable, context: Callable
    ) -> None:
        self.model, self.loss, self.context, self.clip = model, loss, context, config.clip_grad
        matrices = [p for p in model.parameters() if p.dim() > 1]
        norms = [p for p in model.parameters() if p.dim() == 1]
        groups = [dict(params=matrices), dict(params=norms, weight_decay=0.0)]
        betas = (config.adam_beta1, config.adam_beta2)
        rest = dict(betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, **rest)
        self.sharded = hasattr(model, "set_requires_gradient_sync")

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """batches: tokens and one more, `[b, s + 1]` each. Returns this rank's mean loss, 0-d."""
        total = 0.0
        for i, tokens in enumerate(batches, 1):
            if self.sharded:
                self.model.set_requires_gradient_sync(i == len(batches))
            with self.context():
                logits = self.model(tokens[:, :-1])
                loss = self.loss(logits, tokens[:, 1:]) / len(batches)
                loss.backward()
            total += (loss.to_local() if isinstance(loss, DTensor) else loss).detach()
        if self.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def as_it_is(block: nn.Module) -> nn.Module:
    """A block that is not converted."""
    return block


def on_one_gpu(
    config: Config,
    device: torch.device,
    backend: str | None,
    compile_loss: bool = True,
    convert: Callable[[nn.Module], nn.Module] = as_it_is,
) -> Peer:
    """The model by itself, every block, converted, and the loss compiled by `backend`."""
    dtype = getattr(torch, config.dtype_name)
    model = Transformer(config, device, dtype, 1, lambda block: compiled(convert(block), backend))
    loss = compiled(token_loss, backend if compile_loss else None)
    return Peer(model, config.optimizer, loss, nullcontext)


def tensor_parallel(
    config: Config, device: torch.device, async_tp: bool, backend: str | None, compile_loss: bool = True
) -> Peer:
    """tp over all ranks of the world, sequence parallel, every block and the loss compiled by `backend`."""
    size = config.parallel.tensor_model_parallel_size
    mesh: DeviceMesh = init_device_mesh(device.type, (size,))
    options = {"_micro_pipeline_tp": True} if async_tp and backend == "inductor" else None
    if async_tp:
        with warnings.catch_warnings():  # newer torch enables all groups, and says that this is needless
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)

    def place(block: Block) -> nn.Module:
        parallel = parallelize_module(block, mesh, BLOCK_PLAN, src_data_rank=None)
        return compiled(parallel, backend, options)

    model = Transformer(config, device, getattr(torch, config.dtype_name), size, place)
    parallelize_module(model, mesh, END_PLAN, src_data_rank=None)
    # A collective's result that has not been waited for loses its gradient in a compiled block (torch 2.13).
    model.embedding.register_forward_hook(lambda module, inputs, output: output.clone())
    loss = compiled(token_loss, backend if compile_loss else None)
    return Peer(model, config.optimizer, loss, loss_parallel)


def fully_sharded(
    config: Config,
    device: torch.device,
    keep: bool,
    backend: str | None,
    compile_loss: bool = True,
    convert: Callable[[nn.Module], nn.Module] = as_it_is,
    runner: type[Peer] = Peer,
) -> Peer:
    """FSDP2 over all ranks of the world, every block, converted, and the loss compiled by `backend`."""
    mesh = init_device_mesh(device.type, (config.parallel.data_parallel_size,))
    policy = MixedPrecisionPolicy(getattr(torch, config.dtype_name), torch.float32)
    cut = dict(mesh=mesh, mp_policy=policy)

    def place(block: Block) -> nn.Module:
        return fully_shard(compiled(convert(block), backend), reshard_after_forward=not keep, **cut)

    model = Transformer(config, device, torch.float32, 1, place)
    fully_shard(model.embedding, reshard_after_forward=not keep, **cut)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **cut)
    fully_shard(model, **cut)
    loss = compiled(token_loss, backend if compile_loss else None)
    return runner(model, config.optimizer, loss, nullcontext)
