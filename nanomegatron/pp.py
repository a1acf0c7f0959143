"""Pipeline parallelism: the model cut into stages, and one loop that runs any schedule.

Tests: tests/test_pp.py. Page: docs/pipeline.md.

    schedules.py   what each rank does, op by op, and which messages follow          (pure data)
    pp.py          receives, computes and sends, op by op                            (`run_schedule`)

    rank 0 of 3   [F0][F1][F2]        [B0]    ...      1f1b; a row is what the loop below does on a rank
    rank 1 of 3       [F0][F1]    [B0][F2]    ...      messages go over links (`mesh.py`)
    rank 2 of 3           [F0][B0][F1][B1]    ...

1f1b written out, to be read once. `schedules.one_f_one_b` is the same as a list of ops, which `run_schedule`
runs as it runs those of the other schedules:

        ahead = min(stages - 1 - rank, microbatches)

        for i in range(ahead):  # warm-up: one forward for each later rank
            x = receive_forward()  # from rank - 1; the first rank has the tokens
            y = forward(i, x)  # keeps what its backward needs
            send_forward(y)  # to rank + 1; the last rank has the loss

        for i in range(ahead, microbatches):  # steady: a forward, and the backward of the oldest one
            x = receive_forward()
            y = forward(i, x)
            send_forward(y)
            dy = receive_backward()  # from rank + 1
            dx = backward(i - ahead, dy)  # frees it: at most ahead + 1 are kept
            send_backward(dx)  # to rank - 1

        for i in range(microbatches - ahead, microbatches):  # cool-down: the other backwards
            dy = receive_backward()
            dx = backward(i, dy)
            send_backward(dx)

Messages overlap with the computation: sends are asynchronous, and each link has at most one receive in flight
ahead of the op that uses it. All have the shape of the residual stream, `[s, b, h]`, known in advance.

A forward keeps only the autograd graph for its backward; its output is sent and freed. The graph begins in
`CaptureInputGrad`, which stores the gradient of the input, and ends in `InjectOutputGrad`: its 0-d output is
the root of the backward, and its own backward returns the received gradient. (Megatron-LM replaces the data
of outputs for the same purpose, deallocate_pipeline_outputs.) In a schedule with W ops, B queues the weight
gradients of linear layers, embedding, experts and routers, and W computes them.

Each rank runs the microbatches of a chunk in order, so gradients are bitwise those of one process; except
those of tied embeddings, whose two uses are added in another order.
(arXiv 1811.06965, 2006.09503, 2104.04473; zero bubble 2401.10241)
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from nanomegatron import schedules
from nanomegatron.comm import Pending, start_receive, start_send
from nanomegatron.fp8 import Scales
from nanomegatron.mesh import Link, Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import WeightGradStore
from nanomegatron.recompute import CaptureInputGrad
from nanomegatron.router import Router, kept_tokens, move_expert_biases
from nanomegatron.schedules import Exchange, Message, Op, embedding_ranks, most_open

Plan = tuple[list[list[Op]], list[list[Exchange]]]  # by rank
Links = dict[tuple[int, int], Link]  # by sender and receiver


def run_schedule(
    stages: "ModelChunks",
    step: Callable[[GPTModel, int], torch.Tensor],
    microbatches: int,
    shape: tuple[int, int, int],
    forward_only: bool = False,
    tracer: "NoTracer | None" = None,
) -> None:
    """Run forward and backward of all microbatches in the order of the schedule of `stages`.

    step(chunk, i): runs the forward of microbatch i through a chunk, whose input is set already. It returns
    the chunk's output, of `shape` `[s, b, h]`, or for the last stage the 0-d loss to differentiate. All ranks
    of pp call this. Communicates a message of `shape` for each microbatch, direction and pair of ranks with
    neighbouring stages.
    """
    pipeline = stages.pipeline
    rank = pipeline.axis.rank
    lists, exchanges = pipeline.plan(microbatches, forward_only)
    runner = OpRunner(stages, step)
    tracer = tracer or NoTracer()
    empty = partial(torch.empty, shape, dtype=stages.dtype, device=stages.device)
    inbox = Inbox(pipeline.links, exchanges[rank], empty, ahead=stages.device.type == "cpu")
    outbox = Outbox(pipeline.links, max_in_flight=most_open(lists[rank]))
    arrived: dict[Message, torch.Tensor] = {}  # which no op has used yet
    with torch.set_grad_enabled(not forward_only):
        for op, exchange in zip(lists[rank], exchanges[rank], strict=True):
            for message in exchange.receives:
                arrived[message] = inbox.receive(message, tracer)
            received = arrived.pop(exchange.uses) if exchange.uses else None
            with tracer.op(op):
                result = runner.run(op, received)
            if exchange.sends and exchange.sends.is_local:
                arrived[exchange.sends] = result
            elif exchange.sends:
                outbox.send(result, exchange.sends)
    outbox.close()


class OpRunner:
    """Computes the ops of a rank, and keeps what a later op needs of an earlier one."""

    def __init__(self, stages: "ModelChunks", step: Callable[[GPTModel, int], torch.Tensor]) -> None:
        self.stages = stages
        self.step = step
        self.states: dict[tuple[int, int], ForwardState] = {}  # by chunk and microbatch
        self.works: dict[tuple[int, int], list] = {}  # deferred weight gradients

    def run(self, op: Op, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run an op on activations (F) or gradients (B, BW). received `[s, b, h]` -> `[s, b, h]` to send

        received is not read by the first stage's F and the last stage's B, nor by W.
        """
        if op.kind == "F":
            return self._forward(op, received)
        if op.kind == "BW":
            return self._backward(op, received)
        if op.kind == "B":
            with self.stages.wgrad_store.collect() as works:
                input_grad = self._backward(op, received)
            self.works[op.chunk, op.microbatch] = works
            return input_grad
        self.stages.wgrad_store.run(self.works.pop((op.chunk, op.microbatch)))
        return None

    def _forward(self, op: Op, received: torch.Tensor | None) -> torch.Tensor | None:
        chunk = self.stages[op.chunk]
        output_grad = []
        input_grad = []
        if not chunk.pre_process:
            leaf = torch.empty(0, requires_grad=True)  # makes autograd record
            chunk.set_input_tensor(CaptureInputGrad.apply(received, leaf, input_grad))
        y = self.step(chunk, op.microbatch)
        if torch.is_grad_enabled():
            root = y if chunk.post_process else InjectOutputGrad.apply(y, output_grad)
            self.states[op.chunk, op.microbatch] = ForwardState(root, output_grad, input_grad)
        return None if chunk.post_process else y.detach()

    def _backward(self, op: Op, received: torch.Tensor | None) -> torch.Tensor | None:
        chunk = self.stages[op.chunk]
        state = self.states.pop((op.chunk, op.microbatch))
        if not chunk.post_process:  # the last stage begins with its loss
            state.output_grad.append(received)
        state.root.backward()
        return None if chunk.pre_process else state.input_grad[0]


class ForwardState(NamedTuple):
    """What a backward needs of its forward: its root, and lists to hold the gradients of output and input."""

    root: torch.Tensor
    output_grad: list
    input_grad: list


class InjectOutputGrad(torch.autograd.Function):
    """The end of a stage's graph. x `[s, b, h]` -> `[]`; its backward returns the gradient in `received`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: list) -> torch.Tensor:
        ctx.received = received
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.received.pop(), None


class Inbox:
    """Receives messages, on each link in the order in which they are sent.

    On a CPU, where the host computes, the next receive is posted as soon as a message has arrived (`ahead`).
    On a GPU the host runs ahead of the stream anyway, and posts a receive when it reaches the op that needs
    it: then the message depends only on ops that are already launched.
    """

    def __init__(self, links: Links, exchanges: list[Exchange], empty: Callable, ahead: bool) -> None:
        self.links = links
        self.empty = empty
        self.ahead = ahead
        self.left = Counter(message.link for exchange in exchanges for message in exchange.receives)
        self.posted = {link: self._post(link) for link in self.left} if ahead else {}

    def _post(self, link: tuple[int, int]) -> Pending:
        return start_receive(self.empty, self.links[link])

    def receive(self, message: Message, tracer: "NoTracer") -> torch.Tensor:
        """Wait for this message, the next one of its link -> `[s, b, h]` or `[s/tp, b, h]`"""
        link = message.link
        pending = self.posted.pop(link, None) or self._post(link)
        tracer.receive(message, pending)
        x = pending.wait()
        tracer.received(message)
        self.left[link] -= 1
        if self.ahead and self.left[link]:
            self.posted[link] = self._post(link)
        return x


class Outbox:
    """Sends messages, and keeps each tensor until it has been sent.

    Gloo reports only through `wait` that a send is done. So `send` waits for the oldest if a link has more
    than `max_in_flight`, the most forwards without backward on this rank: by then the oldest has arrived, or
    its receive has been posted.
    """

    def __init__(self, links: Links, max_in_flight: int) -> None:
        self.links = links
        self.max_in_flight = max_in_flight  # of each link
        self.in_flight = defaultdict(deque)

    def send(self, x: torch.Tensor, message: Message) -> None:
        """Send x `[s, b, h]` or `[s/tp, b, h]`, and free the tensors that have been sent."""
        in_flight = self.in_flight[message.link]
        in_flight.append(start_send(x, self.links[message.link]))
        while in_flight and (in_flight[0].done or len(in_flight) > self.max_in_flight):
            in_flight.popleft().wait()

    def close(self) -> None:
        """Wait until everything has been sent; on a GPU the stream waits, not the host."""
        for pending in chain(*self.in_flight.values()):
            pending.wait()


class NoTracer:
    """A tracer that does nothing; called at each op and message (report/trace.py records)."""

    watches = False  # whether it needs these calls in this step

    def op(self, op: Op) -> AbstractContextManager:
        """Entered for the computation of an op, after its message has arrived."""
        return nullcontext()

    def receive(self, message: Message, pending: Pending) -> None:
        """Called before this rank waits for a message."""

    def received(self, message: Message) -> None:
        """Called after the wait."""


class Pipeline:
    """The schedule of a model: which stages are on which rank, and what each rank does in which order."""

    def __init__(self, mesh: Mesh, chunks: int, name: str, group: int | None) -> None:
        """chunks: of the model on each rank; name, group: as for `schedules.schedule`."""
        self.axis = mesh.pp
        self.links = mesh.p2p_links
        self.chunks = chunks
        self.name = name
        self.group = group
        self.placed = schedules.placement(name, self.axis.size, chunks)
        _, self.last_rank = embedding_ranks(self.placed)
        self.plans: dict[tuple[int, bool], Plan] = {}

    def plan(self, microbatches: int, forward_only: bool = False) -> Plan:
        """Return the ops of every rank and their messages (cached); forward_only: without backwards."""
        if (microbatches, forward_only) not in self.plans:
            lists = schedules.schedule(self.name, self.axis.size, microbatches, self.chunks, self.group)
            if forward_only:
                lists = [[op for op in ops if op.kind == "F"] for ops in lists]
            self.plans[microbatches, forward_only] = lists, schedules.messages(lists, self.placed)
        return self.plans[microbatches, forward_only]


class ModelChunks(nn.ModuleList):
    """The model chunks that this rank holds, in the order of the model.

    With `chunks` only: the whole model on one rank. `reads_tokens`: this rank has the first or the last
    stage; `has_loss`: the last one; `is_loss_rank`: it is the rank of its tp x pp group whose loss counts.
    decoder: (stages, longest text) -> what generates instead of `generate.next_logits`, or None.
    """

    decoder: Callable[["ModelChunks", int], Any] | None = None

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        mesh: Mesh = Mesh(),  # noqa: B008 (frozen)
        name: str = "1f1b",
        group: int | None = None,
    ) -> None:
        """name, group: as for `schedules.schedule`."""
        super().__init__(chunks)
        self.pipeline = Pipeline(mesh, len(chunks), name, group)
        self.cp = mesh.cp
        self.config = chunks[0].config
        self.tp = chunks[0].tp
        self.vocab_size = chunks[0].vocab_size
        self.scales: Scales | None = None  # where linear layers are FP8
        self.reads_tokens = any(chunk.pre_process or chunk.post_process for chunk in chunks)
        self.has_loss = any(chunk.post_process for chunk in chunks)
        self.is_loss_rank = self.has_loss and self.tp.rank == 0
        weight = next(self.parameters())
        self.dtype = weight.dtype
        self.device = weight.device
        self.routers = [module for module in self.modules() if isinstance(module, Router)]
        self.wgrad_store = WeightGradStore()
        for param in self.parameters():
            param.wgrad_store = self.wgrad_store

    def begin_step(self) -> None:
        """Zero what the routers count, before the first microbatch of a step."""
        for router in self.routers:
            router.begin_step()

    def end_step(self) -> None:
        """Move what follows from a step without a gradient: FP8 scales, biases of experts.

        Before the update, which casts with the new scales. All-reduces what the recipe agrees on, and for the
        biases `[routers, E]` over dp_cp, with sequence parallelism also over tp.
        """
        if self.scales is not None:
            self.scales.end_step()
        if self.routers and self.config.moe_router_enable_expert_bias:
            move_expert_biases(self.routers, kept_tokens(self.routers))

    def shape(self, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
        """Return the shape of every message; seq_length: the number of tokens of a row on this cp rank."""
        slices = self.tp.size if self.config.sequence_parallel and self.training else 1
        return seq_length // slices, micro_batch_size, self.config.hidden_size


def warm_up(
    stages: ModelChunks, step: Callable[[GPTModel, int], torch.Tensor], shape: tuple[int, int, int]
) -> None:
    """Run this rank's ops of a schedule of one microbatch, with zeros for messages; no message is sent.

    Call it on GPUs before the first `run_schedule`. A message in flight on a GPU is a kernel that waits for
    the other rank, and a call that synchronizes the GPU waits for that kernel: two ranks that do so can
    deadlock. Loading a kernel for its first use synchronizes, hence this function. (So does cudaFree, when
    the caching allocator runs out: leave memory unused.) Gradients are added and reported as by
    `run_schedule`.
    """
    runner = OpRunner(stages, step)
    zeros = partial(torch.zeros, shape, dtype=stages.dtype, device=stages.device)
    lists, _ = stages.pipeline.plan(1)
    for op in lists[stages.pipeline.axis.rank]:
        runner.run(op, zeros())
