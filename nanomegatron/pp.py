"""Pipeline parallelism: the model cut into stages, and one executor that runs any schedule.

    schedules.py   what each rank does, op by op, and which messages follow          (pure data)
    pp.py          receives, computes and sends, op by op                            (the executor)

    rank 0 of 3   [F0][F1][F2]        [B0]    ...      1f1b; a row is the loop of a rank
    rank 1 of 3       [F0][F1]    [B0][F2]    ...      messages travel over links (`mesh.py`)
    rank 2 of 3           [F0][B0][F1][B1]    ...

Messages travel beside the computation: sends are asynchronous, and at most one receive a link is in flight
ahead of the op that uses it. All have the shape of the residual stream, `[s, b, h]`, known beforehand.

A forward leaves only the autograd graph for its backward. Its output is sent and freed: the graph ends in
`InjectOutputGrad`, whose 0-d output is the root of the backward and returns the gradient that was received;
and begins in `CaptureInputGrad`, which stores the gradient of the input. (Megatron-LM replaces the data of
outputs for the same end, deallocate_pipeline_outputs.) In a schedule with W ops, B queues the weight
gradients of linear layers, embedding, experts and routers, and W computes them.

Each rank handles the microbatches of a chunk in their order, so gradients are those of one process to the
bit; except those of tied embeddings, whose two uses are added in another order.
(arXiv 1811.06965, 2006.09503, 2104.04473; zero bubble 2401.10241)
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
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
from nanomegatron.schedules import STEP, Exchange, Message, Op, embedding_ranks, most_open

Plan = tuple[list[list[Op]], list[list[Exchange]]]  # by rank
Links = dict[tuple[int, int], Link]  # by sender and receiver


class Stages(nn.ModuleList):
    """The chunks of the model that this rank holds, in the order of the model, and how they are run.

    Without the other arguments the whole model on one rank. `reads_tokens`: this rank has the first or the
    last stage; `has_loss`: the last one; `is_loss_rank`: the loss of this rank of its tp x pp group counts.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        mesh: Mesh = Mesh(),  # noqa: B008 (frozen)
        name: str = "1f1b",
        group: int | None = None,
    ) -> None:
        """name, group: the schedule, as `schedules.schedule` takes them."""
        super().__init__(chunks)
        self.pp, self.cp, self.links = mesh.pp, mesh.cp, mesh.p2p_links
        self.config, self.tp, self.vocab_size = chunks[0].config, chunks[0].tp, chunks[0].vocab_size
        self.name, self.group = name, group
        self.scales: Scales | None = None  # where linear layers are FP8
        self.placed = schedules.placement(name, self.pp.size, len(chunks))
        self.plans: dict[tuple[int, bool], Plan] = {}
        first_rank, self.last_rank = embedding_ranks(self.placed)
        self.reads_tokens = self.pp.rank in (first_rank, self.last_rank)
        self.has_loss = self.pp.rank == self.last_rank
        self.is_loss_rank = self.has_loss and self.tp.rank == 0
        weight = next(self.parameters())
        self.dtype, self.device, self.on_gpu = weight.dtype, weight.device, weight.is_cuda
        self.wgrad_store = WeightGradStore()
        for param in self.parameters():
            param.wgrad_store = self.wgrad_store

    def plan(self, microbatches: int, forward_only: bool = False) -> Plan:
        """The ops of every rank, and their messages."""
        if (microbatches, forward_only) not in self.plans:
            lists = schedules.schedule(self.name, self.pp.size, microbatches, len(self), self.group)
            if forward_only:
                lists = [[op for op in ops if op.kind == "F"] for ops in lists]
            self.plans[microbatches, forward_only] = lists, schedules.messages(lists, self.placed)
        return self.plans[microbatches, forward_only]

    def shape(self, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
        """Of every message; seq_length: the tokens of a row that this cp rank has."""
        cut = self.tp.size if self.config.sequence_parallel and self.training else 1
        return seq_length // cut, micro_batch_size, self.config.hidden_size


class InjectOutputGrad(torch.autograd.Function):
    """The end of a stage's graph. x `[s, b, h]` -> `[]`; backward from here starts from `received`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: list) -> torch.Tensor:
        ctx.received = received
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.received.pop(), None


class ForwardState(NamedTuple):
    """What a forward leaves: where to call backward, and lists for the gradients of output and input."""

    root: torch.Tensor
    output_grad: list
    input_grad: list


class NoTracer:
    """Called at every op and message of a rank, and does nothing; report/trace.py has one that records."""

    def op(self, op: Op) -> AbstractContextManager:
        """Around the computation of an op whose message has arrived."""
        return nullcontext()

    def receive(self, message: Message, pending: Pending) -> None:
        """Before this rank waits for a message."""

    def received(self, message: Message) -> None:
        """After the wait."""


class Inbox:
    """Receives messages, on each link in the order in which they are sent.

    On a CPU, where the host computes, the next receive is posted as soon as a message has arrived (`ahead`).
    On a GPU the host runs ahead of the stream anyway and posts it when it reaches the op: then the message
    depends only on launched ops.
    """

    def __init__(self, links: Links, exchanges: list[Exchange], empty: Callable, ahead: bool) -> None:
        self.links, self.empty, self.ahead = links, empty, ahead
        self.left = Counter(message[:2] for exchange in exchanges for message in exchange.receives)
        self.posted = {link: self._post(link) for link in self.left} if ahead else {}

    def _post(self, link: tuple[int, int]) -> Pending:
        return start_receive(self.empty, self.links[link])

    def receive(self, message: Message, tracer: NoTracer) -> torch.Tensor:
        """Wait for this message, the next one of its link -> `[s, b, h]` or `[s/tp, b, h]`"""
        link = message[:2]
        pending = self.posted.pop(link, None) or self._post(link)
        tracer.receive(message, pending)
        x = pending.wait()
        tracer.received(message)
        self.left[link] -= 1
        if self.ahead and self.left[link]:
            self.posted[link] = self._post(link)
        return x


class Outbox:
    """Sends messages; each holds its tensor until it has been sent.

    Gloo says only to a waiter that a send is done. So wait for the oldest when a link has more sends in
    flight than this rank ever has forwards without their backward: its receiver has taken it by then.
    """

    def __init__(self, links: Links, most: int) -> None:
        self.links, self.most, self.in_flight = links, most, defaultdict(deque)

    def send(self, x: torch.Tensor, message: Message) -> None:
        """Send x `[s, b, h]` or `[s/tp, b, h]`, and free what has arrived."""
        in_flight = self.in_flight[message[:2]]
        in_flight.append(start_send(x, self.links[message[:2]]))
        while in_flight and (in_flight[0].done or len(in_flight) > self.most):
            in_flight.popleft().wait()

    def close(self) -> None:
        """Return when everything has been sent; on a GPU, let the stream wait for it."""
        for pending in chain(*self.in_flight.values()):
            pending.wait()


class OpRunner:
    """Computes the ops of a rank, and keeps what one op leaves for a later one."""

    def __init__(self, stages: Stages, step: Callable[[GPTModel, int], torch.Tensor]) -> None:
        self.stages, self.step = stages, step
        self.states: dict[tuple[int, int], ForwardState] = {}  # by chunk and microbatch
        self.works: dict[tuple[int, int], list] = {}

    def run(self, op: Op, received: torch.Tensor | None) -> torch.Tensor | None:
        """One op: on activations for F, on their gradients for B, BW. received `[s, b, h]` -> `[s, b, h]`"""
        place = op.chunk, op.microbatch
        if op.kind == "F":
            return self._forward(place, received)
        if op.kind == "W":
            return self.stages.wgrad_store.run(self.works.pop(place))
        state = self.states.pop(place)
        state.output_grad.append(received)
        if op.kind == "BW":
            state.root.backward()
        else:
            with self.stages.wgrad_store.collect() as works:
                state.root.backward()
            self.works[place] = works
        return state.input_grad[0] if state.input_grad else None

    def _forward(self, place: tuple[int, int], received: torch.Tensor | None) -> torch.Tensor | None:
        chunk = self.stages[place[0]]
        output_grad, input_grad = [], []
        if received is not None:
            leaf = torch.empty(0, requires_grad=True)  # makes autograd follow
            chunk.set_input_tensor(CaptureInputGrad.apply(received, leaf, input_grad))
        y = self.step(chunk, place[1])
        if torch.is_grad_enabled():
            root = y if chunk.post_process else InjectOutputGrad.apply(y, output_grad)
            self.states[place] = ForwardState(root, output_grad, input_grad)
        return None if chunk.post_process else y.detach()


def execute(
    stages: Stages,
    step: Callable[[GPTModel, int], torch.Tensor],
    microbatches: int,
    shape: tuple[int, int, int],
    forward_only: bool = False,
    tracer: NoTracer | None = None,
) -> None:
    """Forward and backward of all microbatches, as the schedule of `stages` has it.

    step(chunk, i): the forward of microbatch i through a chunk, whose input it has. Gives what the chunk
    gives, `shape` `[s, b, h]`, or of the last stage the 0-d loss whose gradient is wanted. Every rank of pp
    calls this alike. Communicates a message of `shape` for each microbatch, direction and pair of ranks with
    neighbouring stages.
    """
    lists, exchanges = stages.plan(microbatches, forward_only)
    rank, runner, tracer = stages.pp.rank, OpRunner(stages, step), tracer or NoTracer()
    empty = partial(torch.empty, shape, dtype=stages.dtype, device=stages.device)
    inbox = Inbox(stages.links, exchanges[rank], empty, ahead=not stages.on_gpu)
    outbox = Outbox(stages.links, most_open(lists[rank]))
    arrived: dict[tuple[str, int, int], torch.Tensor] = {}  # by kind, stage and microbatch
    with torch.set_grad_enabled(not forward_only):
        for op, exchange in zip(lists[rank], exchanges[rank], strict=True):
            for message in exchange.receives:
                arrived[message[2:]] = inbox.receive(message, tracer)
            stage = stages.placed[rank][op.chunk]
            with tracer.op(op):
                output = runner.run(op, arrived.pop((op.kind[0], stage, op.microbatch), None))
            if exchange.sends is not None:
                outbox.send(output, exchange.sends)
            elif output is not None:  # the next stage is on this rank, too
                arrived[op.kind[0], stage + STEP[op.kind], op.microbatch] = output
    outbox.close()


def warm_up(
    stages: Stages, step: Callable[[GPTModel, int], torch.Tensor], shape: tuple[int, int, int]
) -> None:
    """This rank's ops of a schedule of one microbatch, with zeros for messages; nothing is communicated.

    For GPUs, before the first `execute`. A message in flight there is a kernel that waits for the other rank,
    and whatever synchronizes the GPU waits with it: two ranks that do so can deadlock. Loading a kernel for
    its first use synchronizes, hence this function. (So does cudaFree, when the caching allocator runs out:
    leave memory unused.) Gradients are added and reported as by `execute`.
    """
    runner = OpRunner(stages, step)
    zeros = partial(torch.zeros, shape, dtype=stages.dtype, device=stages.device)
    for op in stages.plan(1)[0][stages.pp.rank]:
        chunk = stages[op.chunk]
        at_end = chunk.pre_process if op.kind == "F" else chunk.post_process  # no message arrives
        runner.run(op, None if at_end else zeros())


def forward_backward(
    *,
    forward_step_func: Callable[[Iterator, GPTModel], tuple[torch.Tensor, Callable]],
    data_iterator: Iterator | list[Iterator] | None,
    model: Stages,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[Any]:
    """As the function that Megatron's `get_forward_backward_func()` gives, for a forward step written for it.

    forward_step_func(iterator, chunk) -> (output, loss_func); loss_func(output) -> (loss, what to report), or
    (loss, tokens, what to report) for a loss that is a sum. The loss is divided by the number of microbatches
    (and of tokens). data_iterator: one, or one for each chunk, from which each forward takes its microbatch.
    seq_length: of whole rows, which cp cuts. Gradients are added to `dp.Buckets`, between its `zero` and
    `grad_sync`, or without buckets to `.grad`. Returns what each microbatch reports on the last stage's rank,
    on others an empty list.
    """
    several = isinstance(data_iterator, list | tuple)
    if len(model) > 1 and not several and data_iterator is not None:
        raise ValueError(f"data_iterator: one for each of the {len(model)} chunks of this rank is needed")
    iterators = dict(zip(model, data_iterator if several else [data_iterator] * len(model)))
    reports = []

    def step(chunk: GPTModel, _: int) -> torch.Tensor:
        output, loss_func = forward_step_func(iterators[chunk], chunk)
        if not chunk.post_process:
            return output
        loss, *tokens, report = loss_func(output)
        reports.append(report)
        return loss / (num_microbatches * (tokens[0].clamp(min=1) if tokens else 1))

    shape = model.shape(seq_length // model.cp.size, micro_batch_size)
    execute(model, step, num_microbatches, shape, forward_only)
    return reports
