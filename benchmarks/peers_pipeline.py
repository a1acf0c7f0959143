"""The plain torch transformer of peers.py cut into stages and run by torch.distributed.pipelining.

    our chunks of this rank --weights--> Piece, Piece ... --PipelineStage--> Schedule1F1B
                                                                             ScheduleInterleaved1F1B
                                                                             ScheduleInterleavedZeroBubble
                                                                             ScheduleZBVZeroBubble

Layers are cut as ours are and begin with our weights, so that losses can be compared. Everything else is
torch's: autograd's weight gradients, its schedules, their messages over the group of the pipeline. As for the
tensor-parallel peer, parameters, gradients and AdamW's moments have the type of the run (bf16), blocks and
loss are compiled where torch allows it: not where a backward is split in two. (arXiv 2410.06511)
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.peers import OURS, Block, Peer, compiled, token_loss
from nanomegatron.build import build
from nanomegatron.comm import all_reduce_
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pp import Stages

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class Piece(nn.Module):
    """What a stage has: `[b, s]` tokens or `[b, s, h]` in, `[b, s, h]` or logits `[b, s, V]` out."""

    def __init__(self, chunk: GPTModel, config: Config, backend: str | None) -> None:
        """chunk: the same stage of our model, whose weights become those of this one."""
        super().__init__()
        model, vocab, h = config.model, config.data.vocab_size, config.model.hidden_size
        with torch.device("meta"):
            self.embedding = nn.Embedding(vocab, h) if chunk.pre_process else None
            self.blocks = nn.ModuleList(Block(model, 1) for _ in chunk.layers)
            self.norm = nn.RMSNorm(h, eps=model.norm_epsilon) if chunk.post_process else None
            self.output = nn.Linear(h, vocab, bias=False) if chunk.post_process else None
        given = weights_of(chunk, vocab)
        device = next(iter(given.values())).device
        self.load_state_dict(given, assign=True)
        self.requires_grad_()
        pairs = torch.arange(0, model.head_dim, 2, device=device).float() / model.head_dim
        angles = torch.arange(config.data.seq_length, device=device)[:, None] / model.rotary_base**pairs
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.blocks = nn.ModuleList(compiled(block, backend) for block in self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.output is None else self.output(self.norm(x))


def weights_of(chunk: GPTModel, vocab: int) -> dict[str, torch.Tensor]:
    """The weights of one of our chunks by the names of a Piece, without the padding of the vocabulary."""
    found = {}
    if chunk.pre_process:
        found["embedding.weight"] = chunk.embedding.word_embeddings.weight[:vocab]
    for i, layer in enumerate(chunk.layers):
        for theirs, ours in OURS.items():
            found[f"blocks.{i}.{theirs}.weight"] = layer.get_submodule(ours).weight
    if chunk.post_process:
        found["norm.weight"] = chunk.final_layernorm.weight
        found["output.weight"] = chunk.output_layer.weight[:vocab]
    return {name: weight.detach() for name, weight in found.items()}


class PipelinePeer(Peer):
    """This rank's stages, their optimizer, and torch's schedule for them.

    schedule: of SCHEDULES; the stages are where the schedule of the config has them.
    """

    def __init__(self, config: Config, mesh: Mesh, schedule: str, backend: str | None) -> None:
        vocab, dtype = config.data.vocab_size, getattr(torch, config.dtype_name)
        padded = padded_vocab_size(vocab, config.data.make_vocab_size_divisible_by, 1)
        ours: Stages = build(config, mesh, vocab, padded, Init(config.run.seed, dtype, mesh.device))
        pieces = nn.ModuleList(Piece(chunk, config, backend) for chunk in ours)
        super().__init__(pieces, config.optimizer, compiled(token_loss, backend), nullcontext)
        self.config, self.mesh, self.kind, self.dtype = config, mesh, SCHEDULES[schedule], dtype
        self.mine, self.count = ours.placed[mesh.pp.rank], len(ours) * mesh.pp.size
        self.schedule, self.microbatches = None, 0
        self._warm_up()

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """batches: tokens and one more, `[b, s + 1]` each. Returns the mean loss on every rank, 0-d."""
        if self.microbatches != len(batches):
            self.schedule, self.microbatches = None, len(batches)  # its buffers go before the new ones come
            self.schedule = self._schedule(len(batches))
        tokens, losses = torch.cat(batches), []
        args = (tokens[:, :-1].contiguous(),) if 0 in self.mine else ()  # torch 2.11 looks at strides
        labels = {"target": tokens[:, 1:], "losses": losses} if self.count - 1 in self.mine else {}
        self.schedule.step(*args, **labels, return_outputs=False)
        total = sum(loss.detach() for loss in losses) if losses else torch.zeros((), device=tokens.device)
        if self.clip > 0:
            params = [p for p in self.model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm([p.grad for p in params], foreach=True).float()
            norm = all_reduce_(norm.square(), self.mesh.pp).sqrt()
            nn.utils.clip_grads_with_norm_(params, self.clip, norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return all_reduce_(total, self.mesh.pp)

    def _schedule(self, microbatches: int) -> object:
        """Torch's schedule, with new stages and their buffers for the messages of that many microbatches."""

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.loss(logits, labels) / microbatches

        group = self.mesh.pp.group
        stages = []
        for piece, stage in zip(self.model, self.mine, strict=True):
            shapes = self._like(stage, first=True), self._like(stage, first=False)
            stages.append(PipelineStage(piece, stage, self.count, self.mesh.device, *shapes, group=group))
        what = stages[0] if self.kind is Schedule1F1B else stages
        return self.kind(what, microbatches, loss, scale_grads=False)

    def _warm_up(self) -> None:
        """Every stage once, forward and backward, by itself.

        What is compiled and loaded then needs no message, nor does it hold one up: until a message on its
        way to a GPU has come, no kernel can be loaded there. And what fails, fails before others wait.
        """
        for piece, stage in zip(self.model, self.mine, strict=True):
            x = torch.zeros_like(self._like(stage, first=True), device=self.mesh.device)
            y = piece(x.requires_grad_(x.is_floating_point()))
            labels = torch.zeros(y.shape[:2], dtype=torch.int64, device=y.device)
            (self.loss(y, labels) if stage == self.count - 1 else y.sum()).backward()
        self.optimizer.zero_grad()

    def _like(self, stage: int, first: bool) -> torch.Tensor:
        """A tensor without data like what the stage takes (`first`) or gives, so that torch need not ask."""
        data, model = self.config.data, self.config.model
        shape = data.micro_batch_size, data.seq_length
        if stage == 0 and first:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        width = data.vocab_size if stage == self.count - 1 and not first else model.hidden_size
        return torch.empty(*shape, width, dtype=self.dtype, device="meta", requires_grad=True)
