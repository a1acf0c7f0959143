"""Records a rank's tensors: inputs and outputs of every module, their gradients, and all of its parameters.

    module hooks          input, output             a view of each input is passed on, so that its gradient is
                                                    that of this module, not of all that read the tensor
    tensor hooks          input gradient, output gradient
    ParamAndGradBuckets   weight gradient, before ranks sum it; reduced gradient, after
    Optimizer             updated weight

A row is identified by its sample's number in the run and its position there, whichever microbatch, dp, cp or
sequence-parallel rank has it; features by the slices of the layer's weight. Names are those of checkpoints;
outputs of a fused layer are recorded part by part (linear_qkv.q). Gradients are divided by the loss scale.
Experts' rows are in the order of routing, so of these only the whole layer and the router are recorded.
A layer with hooks runs in the plain form (`fast/fused_layer.py`), which calls every module.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from nanomegatron.attention import SelfAttention
from nanomegatron.batch import Batch
from nanomegatron.checkpoint.checkpoint import module_states
from nanomegatron.debug.compare import INITIAL, NORM, REDUCED, UNREDUCED, UPDATED
from nanomegatron.debug.gather import Copy, Order, Recorded
from nanomegatron.dp import Bucket
from nanomegatron.model import GPTModel
from nanomegatron.moe import GroupedExperts
from nanomegatron.param import Part
from nanomegatron.pp import NoTracer
from nanomegatron.router import Router
from nanomegatron.schedules import Op
from nanomegatron.step import GlobalBatch, LocalNumbers, Numbers, Observer, Training
from nanomegatron.tp import ColumnParallelLinear, RowParallelLinear


def module_names(chunk: GPTModel) -> dict[nn.Module, str]:
    """The global name of each module of a chunk: `layers.0` of the second stage is `decoder.layers.2`."""
    names = {}
    for path, module in chunk.named_modules():
        path = re.sub(r"^layers\.(\d+)", lambda m: f"decoder.layers.{chunk.layers[int(m[1])].layer}", path)
        path = re.sub(r"^final_", "decoder.final_", path)
        if path and not isinstance(module, nn.ModuleList | nn.Identity):
            names[module] = re.sub(r"\.([qk])_norm$", r".\1_layernorm", path)
    return names


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The activations in a module's arguments or result: floating point, not parameters."""
    if isinstance(value, tuple):
        return [x for each in value for x in tensors_of(each)]
    wanted = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return [value] if wanted and value.is_floating_point() and value.dim() > 1 else []


def watched(x: torch.Tensor, look: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """A view of x `[...]`; look(gradient) sees only the gradient of this view -> `[...]`"""
    if not x.requires_grad:
        return x
    view = x.view_as(x)
    view.register_hook(look)
    return view


class Recorder(NoTracer, Observer):
    """What this rank computes, as `pieces`; `order`: the place of each input and output in the forward."""

    def __init__(self, run: Training) -> None:
        self.run, self.mesh, self.step = run, run.mesh, 0
        self.pieces: list[Recorded] = []
        self.order: Order = {}
        self.seen: set[tuple] = set()
        self.inside = ["batch"]  # the phase of the step, and the modules whose forward has begun
        self.heads: dict[nn.Module, Part] = {}
        self.unreduced: dict[nn.Parameter, torch.Tensor] = {}
        for chunk in run.model:
            for module, name in module_names(chunk).items():
                if isinstance(module, SelfAttention) and module.q_norm is not None:
                    q, k, _ = module.linear_qkv.weight.spec.parts
                    self.heads |= {module.q_norm: q, module.k_norm: k}
                if not isinstance(module, GroupedExperts):
                    module.register_forward_pre_hook(partial(self._before, name))
                    module.register_forward_hook(partial(self._after, name))
        run.buckets.before_reduce["record"] = self._before_reduce

    def before_step(self, batch: GlobalBatch, microbatches: list[Batch]) -> None:
        """Record this step from here on."""
        self.batches = microbatches
        self.first_sample = batch.first
        self.step = batch.iteration - 1
        self.seen.clear()
        self.inside = ["decoder"]

    def before_sync(self) -> LocalNumbers:
        self.inside = ["dp"]
        return {}

    def before_update(self) -> Numbers:
        self.add_gradients()
        self.inside = ["optimizer"]
        return {}

    def finish(self, numbers: Numbers) -> None:
        """Record what the update has made. numbers: those of `train_step`."""
        self._add_whole(NORM, "optimizer", numbers["grad_norm"])
        self.add_weights(UPDATED)
        self.inside = ["batch"]

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """As of NoTracer: what is computed inside belongs to this microbatch."""
        self.op_now, batch, chunk = op, self.batches[op.microbatch], self.run.model[op.chunk]
        if op.kind == "F":
            kinds = ("tokens", "positions", "position_ids") * chunk.pre_process
            for kind in kinds + ("labels", "loss_mask") * chunk.post_process:
                if (x := getattr(batch, kind)) is not None:
                    self.order.setdefault((kind, "batch"), (-1, len(self.order)))
                    self._add("batch", kind, x.expand(len(batch.sample_ids), -1).t()[..., None])
        yield

    def _before(self, name: str, module: nn.Module, args: tuple) -> tuple:
        args, found = list(args), 0
        self.inside.append(name)
        least = 2 if isinstance(module, Router) else 3  # dimensions; weights of the losses have 2
        for i, x in enumerate(args):
            if isinstance(x, torch.Tensor) and tensors_of(x) and x.dim() >= least:
                args[i] = self._watch(name, f"input{found or ''}", module, x, x)
                found += 1
        return tuple(args)

    def _after(self, name: str, module: nn.Module, args: tuple, output: Any) -> Any:
        self.inside.remove(name)
        found = list(output) if isinstance(output, tuple) else [output]
        value = found[0]
        if getattr(module, "skip_bias_add", False) and output[1] is not None:
            value = value.detach() + output[1].detach()
        found[0] = self._watch(name, "output", module, found[0], value)
        return tuple(found) if isinstance(output, tuple) else found[0]

    def _watch(
        self, name: str, kind: str, module: nn.Module, x: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Record value `[s, b, ...]`, once a microbatch: the second time it is recomputed -> a view of x

        The view's gradient is recorded, without what other readers of x return.
        """
        place = self.op_now.chunk, self.op_now.microbatch
        if (place, kind, name) not in self.seen:
            self.seen.add((place, kind, name))
            stage = self.run.model.pipeline.placed[self.mesh.pp.rank][self.op_now.chunk]
            self.order.setdefault((kind, name), (stage, len(self.order)))
            self._add_parts(name, kind, module, value)
        scale = self.run.optimizer.scaler.scale * self.run.buckets.loss_factor
        return watched(x, lambda grad: self._add_parts(name, f"{kind} gradient", module, grad / scale))

    def _add_parts(self, name: str, kind: str, module: nn.Module, x: torch.Tensor) -> None:
        """Record x `[s, b, ...]`: part by part if features are sharded over tp, else whole."""
        x = x.detach()
        if isinstance(module, Router):
            x = x.unflatten(0, (-1, len(self.batches[self.op_now.microbatch].sample_ids)))
        elif x.dim() == 2:  # losses [b, s]
            x = x.t()[..., None]
        x, head = x.flatten(2), self.heads.get(module)
        sharded = {RowParallelLinear: "input", ColumnParallelLinear: "output"}.get(type(module))
        parts = () if head is None else (head,)
        if sharded and kind.startswith(sharded):
            parts = module.weight.spec.parts
        if not parts:
            self._add(name, kind, x)
        begin = 0
        for part in parts:
            count = part.stop - part.start
            own = name if len(parts) == 1 else part.name.removesuffix(".weight")
            summed = part.replicas == 1 or "gradient" in kind  # heads that ranks share: partial gradients
            copy = () if summed else (("tp", part.axis.rank % part.replicas),)
            self._add(own, kind, x[..., begin : begin + count], copy, part.start)
            begin += count

    def _add(self, name: str, kind: str, x: torch.Tensor, copy: Copy | None = None, first: int = 0) -> None:
        """Record x `[s, b, f]`, or `[s/tp, b, f]`; first: the number of its first feature.

        copy: None if x has all features; every tp rank then holds it, unless the sequence is cut over tp.
        """
        batch, tp = self.batches[self.op_now.microbatch], self.mesh.tp
        places = batch.positions.cpu() if batch.shard is None else torch.from_numpy(batch.shard.positions)
        cut = len(x) * tp.size == len(places)
        if cut:
            places = places.chunk(tp.size)[tp.rank]
        if len(x) != len(places):
            return  # half a microbatch: its layer is recorded whole
        if copy is None:
            copy = () if cut else (("tp", tp.rank),)
        samples = batch.sample_ids.cpu() - self.first_sample
        place = [samples, places, torch.arange(first, first + x.shape[2])]
        self._record(kind, name, copy, place, [], x.transpose(0, 1))

    def _record(
        self, kind: str, name: str, copy: Copy, place: list[torch.Tensor], shape: list[int], x: torch.Tensor
    ) -> None:
        """Keep x `[...]` as a piece; the other arguments as of `Recorded`."""
        data = x.detach().cpu().clone()
        self.pieces.append(Recorded(self.step, kind, name, self.mesh.rank, copy, place, shape, data))

    # Parameters.

    def _before_reduce(self, bucket: Bucket) -> None:
        for param, grad in zip(bucket.params, bucket.views(bucket.grads), strict=True):
            kept = None if bucket.keeps_grads else self.unreduced.get(param)
            self.unreduced[param] = grad.clone() if kept is None else kept + grad

    def add_gradients(self) -> None:
        """Record the gradients of a step, after `finish_grad_sync`: before and after the sum over ranks."""
        scale = self.run.optimizer.scaler.scale
        for param, grad in self.unreduced.items():
            for part in param.spec.parts:
                copy = _copies(part) if part.partial is None else ()
                grads = part.local_view(grad) / (scale * self.run.buckets.loss_factor)
                self._add_param(UNREDUCED, part, 0, grads, copy)
        self.unreduced.clear()
        self._add_shards(REDUCED, lambda bucket: bucket.grad_shard / scale)

    def _add_shards(self, kind: str, shard: Callable[[Bucket], torch.Tensor]) -> None:
        """Record what this rank's shards of all buckets hold: shard(bucket) `[size/ranks]`."""
        for bucket, piece in self.run.buckets.slices():
            axis, own = bucket.axis, _copies(piece.part)
            if bucket.shard_axis.size < axis.size:
                own = (*own, (axis.name, axis.rank))
            self._add_param(kind, piece.part, piece.at, piece.shard_view(shard(bucket)), own)

    def add_weights(self, kind: str) -> None:
        """Record all parameters; those in flight to other ranks by the shard that this rank has updated.

        The routers' biases, too, which are moved without a gradient.
        """
        for name, bias in module_states(self.run.model).items():
            self._add_whole(kind, name.removeprefix("model/"), bias)
        if kind != INITIAL and self.run.buckets.overlap_gather:
            self._add_shards(kind, lambda bucket: bucket.gathered.shard)
            return
        self.run.buckets.wait_params()
        for param in self.run.buckets.params:
            axis = param.bucket.axis
            own = ((axis.name, axis.rank),) if axis.size > 1 else ()
            for part in param.spec.parts:
                self._add_param(kind, part, 0, part.local_view(param), (*_copies(part), *own))

    def _add_whole(self, kind: str, name: str, x: torch.Tensor) -> None:
        """Record x `[n]` or `[]`, which every rank has."""
        copy = (("world", self.mesh.rank),)
        self._record(kind, name, copy, [torch.arange(x.numel())], [x.numel()], x.flatten())

    def _add_param(self, kind: str, part: Part, at: int, x: torch.Tensor, copy: Copy) -> None:
        """Record x `[...]`, elements of the flattened slice of a part from `at` on."""
        numbers = part.global_view(torch.arange(torch.Size(part.shape).numel()).view(part.shape)).flatten()
        place = [numbers[at : at + x.numel()]]
        self._record(kind, part.name, copy, place, list(part.shape), x.flatten())


def _copies(part: Part) -> Copy:
    """The copy of a part that this rank holds."""
    if part.replicas > 1:
        return ((part.axis.name, part.axis.rank % part.replicas),)
    return () if part.partial is None else ((part.partial.name, part.partial.rank),)
