"""GPT-2 in plain torch modules, as nanoGPT trains it: a program like train.py.

    python benchmarks/peers_gpt2.py KIND FLAGS          FLAGS of train.py

    compile             the whole model and its loss under torch.compile
    reduce-overhead     the same in the mode that replays CUDA graphs

Parameters, gradients and AdamW's moments are fp32; autocast computes in bf16. The vocabulary is padded, its
output layer is the embedding's weight, dropout is 0, AdamW is torch's fused one. It begins with the weights
of train.py and reads its batches. (https://github.com/karpathy/nanoGPT)
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peers
from benchmarks.peer_program import main
from benchmarks.peers import Peer, fill, our_model
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel

NAMES = {  # of a layer's modules, in this project
    "norm_1": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "norm_2": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}


class Block(nn.Module):
    """One layer. `[b, s, h] -> [b, s, h]`"""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        h, self.heads = config.hidden_size, config.num_attention_heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(h, eps=config.norm_epsilon) for _ in range(2))
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, config.ffn_size), nn.Linear(config.ffn_size, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The model and its loss. tokens `[b, s + 1]` -> `[]`"""

    def __init__(self, config: Config, chunk: GPTModel, vocab_size: int) -> None:
        super().__init__()
        model, h = config.model, config.model.hidden_size
        self.words = nn.Embedding(vocab_size, h)
        self.positions = nn.Embedding(model.max_position_embeddings, h)
        self.blocks = nn.ModuleList(Block(model) for _ in chunk.layers)
        self.norm = nn.LayerNorm(h, eps=model.norm_epsilon)
        weights = {name: weight.detach() for name, weight in chunk.named_parameters()}
        nn.init.zeros_(self.words.weight)
        fill(self.words.weight, weights["embedding.word_embeddings.weight"], 0)
        fill(self.positions.weight, weights["embedding.position_embeddings"], 0)
        places = {"norm": "final_layernorm"}
        for i in range(len(self.blocks)):
            places |= {f"blocks.{i}.{theirs}": f"layers.{i}.{ours}" for theirs, ours in NAMES.items()}
        for theirs, ours in places.items():
            for kind, param in self.get_submodule(theirs).named_parameters():
                fill(param, weights[f"{ours}.{kind}"], 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens, labels = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Gpt2Peer(Peer):
    """The compiled model, whose output is its loss."""

    def microbatch_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return self.model(tokens)


def gpt2(config: Config, mesh: Mesh, mode: str) -> Gpt2Peer:
    """The peer, with torch.compile in this mode."""
    (chunk,) = our_model(config, mesh)
    padded = padded_vocab_size(config.data.vocab_size, config.data.make_vocab_size_divisible_by, mesh.tp.size)
    with mesh.device:
        model = GPT2(config, chunk, padded)
    half = getattr(torch, config.dtype_name)
    context = partial(torch.autocast, mesh.device.type, half, enabled=half != torch.float32)
    return Gpt2Peer(peers.compiled(model, mesh, mode=mode), config.optimizer, None, context)


KINDS = {
    mode: partial(gpt2, mode=kind)
    for mode, kind in (("compile", "default"), ("reduce-overhead", "reduce-overhead"))
}


if __name__ == "__main__":
    sys.exit(main(KINDS, sys.argv[1:]))
