"""Records transformers' model of a folder under our names, as the reference of a run that has loaded it.

The table of checkpoint/hf.py says which module is which: `model.layers.3.self_attn.q_proj` has the output
`decoder.layers.3.self_attention.linear_qkv.q`. What lies between (rotary embedding, core attention) shows in
the next input that both have. Not compared: experts, routers, and the embedding's output where ours adds
positions or theirs scales elsewhere. One step, since its update is not ours.
"""

from typing import Any

import torch

from nanomegatron.checkpoint.hf import places
from nanomegatron.config.hf import read_folder
from nanomegatron.config.model import TransformerConfig
from nanomegatron.data.vocabulary import import_extra
from nanomegatron.debug.compare import INITIAL, UNREDUCED
from nanomegatron.debug.gather import Recorded
from nanomegatron.debug.record import watched
from nanomegatron.step import Training

OTHERS = ("experts", "router", "position_embeddings")  # whose activations have no counterpart


class HfRecorder:
    """Records the forward and backward of transformers' model on the batches of our run, as `pieces`."""

    def __init__(self, run: Training, folder: str) -> None:
        """Raises ValueError without transformers."""
        config = run.config
        self.run, self.pieces, self.samples = run, [], torch.arange(0)
        transformers = import_extra("transformers", "--reference hf")
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config.dtype_name), attn_implementation="eager"
        )
        self.parts = [part for p in run.model.parameters() for part in p.spec.parts]
        shapes = {part.name: part.shape for part in self.parts}
        self.places = places(shapes, read_folder(folder)[0], self.model.state_dict())
        modules = dict(self.model.named_modules())
        for name, place in self.places.items():
            ours, kind = name.rsplit(".", 1)
            if kind == "weight" and compared(ours, config.model, shapes):
                module = modules[place.name.removesuffix(".weight")]
                self._hook(module, ours, place.rows if len(place.rows) > 1 else (), place.index)

    def _hook(self, module: torch.nn.Module, ours: str, rows: tuple[int, ...], index: int) -> None:
        """Record a module of theirs; rows, index: of which part of its output ours is the counterpart."""
        owner = owner_of(ours)
        first = ours == owner or ours.endswith((".q", ".gate"))  # of the layers that read one input

        def own(x: torch.Tensor) -> torch.Tensor:
            return x.split(rows, -1)[index] if rows else x

        def before(_: Any, args: tuple) -> tuple | None:
            if "norm" in owner or owner.startswith("embedding"):  # our norms' is the residual stream
                return None
            if first:
                self._add(owner, "input", args[0])
            if index:  # of a fused layer, whose first part is watched
                return None
            return (watched(args[0], lambda grad: self._add(owner, "input gradient", grad)), *args[1:])

        def after(_: Any, args: tuple, output: torch.Tensor) -> None:
            if owner == "output_layer":
                return
            self._add(ours, "output", own(output))
            if output.requires_grad:
                output.register_hook(lambda grad: self._add(ours, "output gradient", own(grad)))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _add(self, name: str, kind: str, x: torch.Tensor) -> None:
        """Record x `[b, s, ...]`."""
        x = x.flatten(2)
        place = [self.samples, *(torch.arange(n) for n in x.shape[1:])]
        self.pieces.append(Recorded(0, kind, name, 0, (), place, [], x.detach().clone()))

    def record(self) -> list[Recorded]:
        """Run the global batch of the first step -> all pieces."""
        for part in self.parts:
            self._add_param(INITIAL, part.name, self.model.state_dict())
        batch = self.run.next_global_batch()
        batches = self.run.read(batch)
        tokens = sum(each.loss_mask.sum() for each in batches)
        for each in batches:
            self.samples = each.sample_ids - batch.first
            logits = self.model(each.tokens).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.mT, each.labels, reduction="none")
            self._add("output_layer", "output", loss[..., None])
            ((loss * each.loss_mask).sum() / tokens).backward()
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for part in self.parts:
            self._add_param(UNREDUCED, part.name, grads)
        return self.pieces

    def _add_param(self, kind: str, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if (place := self.places[name]).name in tensors:
            ours = place.ours(tensors[place.name].detach())
            self.pieces.append(
                Recorded(
                    step=0,
                    kind=kind,
                    name=name,
                    rank=0,
                    copy=(),
                    place=[torch.arange(ours.numel())],
                    shape=list(ours.shape),
                    data=ours.flatten().clone(),
                )
            )


def owner_of(name: str) -> str:
    """Our module of a layer that may be a part of a fused one: linear_qkv of linear_qkv.q."""
    stem, _, last = name.rpartition(".")
    return stem if last in ("q", "k", "v", "gate", "up") else name


def compared(name: str, config: TransformerConfig, shapes: dict) -> bool:
    """Whether activations of our module have a counterpart."""
    if name == "embedding.word_embeddings":
        positions = "embedding.position_embeddings.weight" in shapes
        return not positions and config.embedding_multiplier == 1
    return not any(word in name for word in OTHERS) and not name.endswith("shared_experts")
