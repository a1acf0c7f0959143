"""Same result as `pp.run_schedule`, to the bit: each layer's forward, and its backward, as a CUDA graph.

The plain form launches some 40 kernels a layer from Python (--cuda-graph-impl local):

    host   embedding | F0 | F1 | loss, its backward | B1 | report | B0 | report | embedding's backward
    GPU                  |kkkkkkkk|kkkkkkkk|             |kkkkkkkkk|kkkkkkkkk|
    dp       [ gather 1 ]                                                [ reduce 1 ]

Python runs between the graphs: it waits for a layer's parameters before it launches the forward, and reports
its gradients behind the backward, so dp ranks communicate beside them, which they cannot inside the graph of
a whole microbatch (`cuda_graphs.py`).

The graphs are captured in the order in which they run, and share a memory pool: what a backward frees, the
next may use. A layer's graph reads the results of the graph before where they are; tensors from outside,
such as the output of the embedding, are copied to where they were at the capture. What passes between layers
stays reserved, up to two tensors of the residual stream per layer in the forward and two in the backward.

Gain, GPT-2 124M on two H100 with both overlaps, 8 sequences each: 17.9 ms a step, not 36.9, and in FP8 17.6,
not 72.5; eight microbatches 131.1 ms, not 323.8 (benchmarks/results/2026-11-27-gpt2-dp2-graphs-h100.json).
(Megatron-LM's CudaGraphManager; NVIDIA Transformer Engine, make_graphed_callables)
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from nanomegatron.batch import Batch
from nanomegatron.dp import wait_params
from nanomegatron.fast.cuda_graphs import GraphedSteps, missing_memory, shape_of
from nanomegatron.fast.fused_layer import Branch, FusedLayers
from nanomegatron.recompute import CaptureInputGrad

Address = tuple[int, tuple[int, ...]]


def address(x: torch.Tensor) -> Address:
    """Where the elements of x `[...]` are, and its shape."""
    return x.data_ptr(), tuple(x.shape)


@dataclass
class GraphedLayers(GraphedSteps):
    """GraphedSteps that launches layers: while a microbatch runs, `FusedLayers.run_layer` is its own."""

    what: ClassVar[str] = "forward and backward of each layer are launched as CUDA graphs"

    missing: Callable[[torch.device], int] = partial(missing_memory, activations=2.5)
    kind: Hashable = None  # of the microbatch that runs
    fused: FusedLayers = FusedLayers()  # whose layers are captured
    written: set[Address] = field(default_factory=set)  # tensors that graphs write and others read
    statics: dict[Hashable, list[torch.Tensor]] = field(default_factory=dict)  # by kind: copies for graphs
    copies: dict[Address, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def run(self, chunk: nn.Module, step: Any, i: int) -> None:
        """Run microbatch i, its layers as graphs, which are captured if there are none yet."""
        self.kind = shape_of(step, i), i == 0
        self.fused = chunk.run_layers
        chunk.run_layers = replace(self.fused, run_layer=self.run_layer)
        step(chunk, i).backward()
        chunk.run_layers = self.fused
        if (found := len(self.copies)) != (known := len(self.statics[self.kind])):
            raise RuntimeError(f"graphs of layers read {known} tensors of a microbatch, this one has {found}")
        self.copies.clear()

    def run_layer(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        branch: Branch | None,
        batch: Batch,
        rotary: tuple | None,
        cache: None,
    ) -> tuple[torch.Tensor, Branch]:
        """What runs in place of `FusedLayers.layer`. x `[s, b, h]` -> x `[s, b, h]` and a branch"""
        if (graph := self.graphs.get((self.kind, layer))) is None:
            graph = self.graphs[self.kind, layer] = LayerGraph(self, layer, branch)
        graph.batch, graph.rotary = batch.each(self.fixed), rotary and tuple(map(self.fixed, rotary))
        x, y = LayerFunction.apply(graph, x, *([] if branch is None else [branch.y]))
        return x, graph.branch._replace(y=y)

    def fixed(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that graphs read for x `[...]`: itself if a graph has written it, else a copy -> `[...]`

        Every microbatch of a kind asks for the same tensors in the same order.
        """
        at = address(x)
        if at in self.written:
            return x
        if at not in self.copies:
            statics, n = self.statics.setdefault(self.kind, []), len(self.copies)
            if n == len(statics):
                statics.append(x.clone())
            self.copies[at] = x, statics[n].copy_(x)  # x is kept: no other tensor may take its place
        return self.copies[at][1]


class LayerGraph:
    """Forward and backward of one layer in microbatches of one kind. before: the branch that enters it."""

    batch: Batch
    rotary: tuple | None
    launch_forward: Callable[[], None] | None = None
    launch_backward: Callable[[], None] | None = None

    def __init__(self, graphs: GraphedLayers, layer: nn.Module, before: Branch | None) -> None:
        self.graphs, self.layer, self.before = graphs, layer, before
        self.params = list(layer.parameters())

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """inputs `[s, b, h]`: x, and the y of a branch if one enters -> both as they leave, `[s, b, h]`"""
        wait_params(self.params)
        inputs = tuple(map(self.graphs.fixed, inputs))
        if self.launch_forward is None:
            self.launch_forward = self.graphs.captured(lambda: self.run_forward(*inputs))
            self.outputs = tuple(root.detach() for root in self.roots)
            self.graphs.written.update(map(address, self.outputs))
        self.launch_forward()
        return self.outputs

    @torch.enable_grad()
    def run_forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        """Run the layer; keep its results for autograd, and lists for the gradients of x, y `[s, b, h]`."""
        leaf = torch.empty(0, requires_grad=True)  # makes autograd record
        self.found: list[list] = [[], []]
        x = CaptureInputGrad.apply(x.detach(), leaf, self.found[0])
        branch = self.before
        if branch is not None:
            branch = branch._replace(y=CaptureInputGrad.apply(y.detach(), leaf, self.found[1]))
        x, branch = self.graphs.fused.layer(self.layer, x, branch, self.batch, self.rotary)
        self.roots, self.branch = (x, branch.y), branch._replace(y=branch.y.detach())

    def backward(self, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """grads of the results of `forward` -> of its arguments, `[s, b, h]` each"""
        grads = tuple(map(self.graphs.fixed, grads))
        if self.launch_backward is None:
            self.launch_backward = self.graphs.captured(lambda: torch.autograd.backward(self.roots, grads))
            self.grads = tuple(chain(*self.found))
            self.graphs.written.update(map(address, self.grads))
            del self.roots, self.found
        self.launch_backward()
        return self.grads


class LayerFunction(torch.autograd.Function):
    """What autograd sees of a layer: `LayerGraph.forward` and `LayerGraph.backward`."""

    @staticmethod
    def forward(ctx: Any, graph: LayerGraph, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """inputs `[s, b, h]` each -> `[s, b, h]`, `[s, b, h]`"""
        ctx.graph = graph
        return tuple(output.detach() for output in graph.forward(*inputs))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.graph.backward(*grads)
