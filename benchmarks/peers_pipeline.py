"""The plain torch transformer of peers.py cut into stages and run by torch.distributed.pipelining.

    torchrun benchmarks/peers_pipeline.py KIND FLAGS OF train.py

    our chunks of this rank --weights--> Transformer, Transformer ... --PipelineStage--> 1f1b, interleaved,
                                                                        interleaved-zero-bubble, zb-v

Layers are cut as ours are and begin with our weights, so that losses can be compared. Everything else is
torch's: autograd's weight gradients, its schedules, their messages over the group of the pipeline. As for the
tensor-parallel peer, parameters, gradients and AdamW's moments have the type of the run (bf16). Blocks and
loss are compiled in 1f1b and interleaved, unless the kind ends in -eager; torch does not allow it where a
backward is split in two. (arXiv 2410.06511)
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peer_program import main
from benchmarks.peers import Peer, Transformer, compiled, our_model, token_loss, unchanged
from nanomegatron.comm import all_reduce_
from nanomegatron.config.settings import Config
from nanomegatron.mesh import Mesh


class PipelinePeer(Peer):
    """This rank's stages, their optimizer, and torch's schedule for them."""

    def __init__(self, config: Config, mesh: Mesh, kind: type, compile: bool) -> None:
        """The stages are where the schedule of the config has them."""
        dtype, ours = getattr(torch, config.dtype_name), our_model(config, mesh)
        place = partial(compiled, mesh=mesh) if compile else unchanged
        stages = nn.ModuleList(Transformer(config, chunk, mesh, dtype, place) for chunk in ours)
        super().__init__(stages, config.optimizer, place(token_loss), nullcontext)
        self.config, self.mesh = config, mesh
        self.kind, self.dtype = kind, dtype
        self.mine, self.count = ours.pipeline.placed[mesh.pp.rank], len(ours) * mesh.pp.size
        self.schedule, self.microbatches = None, 0
        self._warm_up()

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """batches: tokens and one more, `[b, s + 1]` each. Returns the mean loss on every rank, 0-d."""
        if self.microbatches != len(batches):
            self.schedule, self.microbatches = None, len(batches)  # frees its buffers before the new ones
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

        group, stages = self.mesh.pp.group, []
        for module, stage in zip(self.model, self.mine, strict=True):
            shapes = self._like(stage, first=True), self._like(stage, first=False)
            stages.append(PipelineStage(module, stage, self.count, self.mesh.device, *shapes, group=group))
        what = stages[0] if self.kind is Schedule1F1B else stages
        return self.kind(what, microbatches, loss, scale_grads=False)

    def _warm_up(self) -> None:
        """Every stage once, forward and backward, by itself.

        What is compiled and loaded then needs no message, nor does it delay one: until a message in flight to
        a GPU has arrived, no kernel can be loaded there. And what fails, fails before others wait.
        """
        for module, stage in zip(self.model, self.mine, strict=True):
            x = torch.zeros_like(self._like(stage, first=True), device=self.mesh.device)
            y = module(x.requires_grad_(x.is_floating_point()))
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


KINDS = {
    "1f1b": partial(PipelinePeer, kind=Schedule1F1B, compile=True),
    "interleaved": partial(PipelinePeer, kind=ScheduleInterleaved1F1B, compile=True),
    "interleaved-eager": partial(PipelinePeer, kind=ScheduleInterleaved1F1B, compile=False),
    "interleaved-zero-bubble": partial(PipelinePeer, kind=ScheduleInterleavedZeroBubble, compile=False),
    "zb-v": partial(PipelinePeer, kind=ScheduleZBVZeroBubble, compile=False),
}

if __name__ == "__main__":
    sys.exit(main(KINDS, sys.argv[1:]))
