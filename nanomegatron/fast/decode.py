"""Same result as `model.GPTModel` with a cache, within rounding: a new token by one launch of a CUDA graph.

A step of one token reads every weight once and computes little with each: at best it takes as long as the
memory needs for that. The plain form launches hundreds of kernels from Python and waits for each token before
it begins the next step. Here keys and values lie in a cache of fixed size, and where the new ones belong is a
number on the device, so that all steps run the same kernels on the same addresses:

    position  [p]                        written by the host before each launch
    cache     [2, T, b, g, d] a layer    row p is written, the first `span` are read, those after p hidden

`span` is p + 1 rounded up to a multiple of 256 and each span has a graph of its own: a short text does not
read the whole cache. The first forward, of the prompts, and the second, which loads the kernels, are launched
as usual. With temperature 0 the device also chooses the tokens, and the host reads each one a step later:

    GPU     step t | step t+1 | step t+2 |
    host           | token t  | token t+1         an end of text is seen one step late; that step is dropped

Llama-3-8B, one text, one H200: 5.00 ms a token (benchmarks/results/2026-11-29-decode-h200.json). Kernels for
the attention and the linear layers of a single token gained 8 %, too little for their reading.
(Grouped queries: arXiv 2305.13245)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nanomegatron.batch import Batch
from nanomegatron.fast.cuda_graphs import capture_graph, has_hooks
from nanomegatron.fast.host_copy import AsyncHostCopy
from nanomegatron.ops.attention import Mask, core_attention
from nanomegatron.ops.softmax import scaled_softmax
from nanomegatron.pp import ModelChunks


def plain_reason(model: ModelChunks) -> str:
    """Why graphs cannot run this model's steps; "" if they can."""
    if model.device.type != "cuda":
        return f"on {model.device.type}"
    if model.tp.size * model.pipeline.axis.size * len(model) > 1:
        return "several ranks or stages"
    if model.config.num_experts:
        return "the shapes of experts' tokens vary"
    if model.scales is not None:
        return "FP8 layers"
    hooked = next((name for name, module in model.named_modules() if has_hooks(module)), "")
    return f"module {hooked} has a hook" if hooked else ""


def decoder(model: ModelChunks, length: int) -> "Decoder | None":
    """A Decoder of texts of up to `length` tokens; None if graphs cannot run this model."""
    return None if plain_reason(model) else Decoder(model, length)


def attend_one(
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    cached: tuple[torch.Tensor, torch.Tensor],
    position: torch.Tensor,
    mask: Mask,
) -> torch.Tensor:
    """Put a token's key and value at its position into a cache; attend to those up to it. -> `[1, b, n*d]`

    q `[1, b, n, d]`, new `[1, b, g, d]`, cached `[t, b, g, d]`, position int64 `[1]`, on the device, below t.
    Two batched matmuls over the key heads; keys behind the position are hidden.
    """
    for rows, row in zip(cached, new, strict=True):
        rows.index_copy_(0, position, row)
    _, b, n, d = q.shape
    t, _, g, _ = cached[0].shape
    key = torch.arange(t, device=q.device)
    hidden = key > position
    if mask.window is not None:
        hidden = hidden | (key < position - mask.window)
    k, v = (x.flatten(1, 2).transpose(0, 1) for x in cached)  # [b*g, t, d]
    scores = torch.bmm(q.reshape(b * g, n // g, d), k.transpose(1, 2)).view(b, n, 1, t)
    scale = d**-0.5
    if mask.cap:
        scores = torch.tanh(scores * (scale / mask.cap))
        scale = mask.cap
    probs, _ = scaled_softmax(scores, scale, hidden[None, None, None])
    return torch.bmm(probs.view(b * g, n // g, t), v).view(1, b, n * d)


class StaticCache:
    """Keys and values at fixed addresses, `[2, T, b, g, d]` a layer; an `attention.Cache`.

    position: int64 `[1]`, that of the one token of a forward. span: how many rows such a forward reads; 0:
    the forward is of the first tokens, which attend to themselves.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.length, self.span = length, 0
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.buffers: dict[int, torch.Tensor] = {}
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None  # of the layer that asked last

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As an `attention.Cache`. k, v `[s, b, g, d]` -> `[t, b, g, d]`, `[t, b, g, d]`"""
        if layer not in self.buffers:
            self.buffers[layer] = k.new_zeros(2, self.length, *k.shape[1:])
        keys, values = self.buffers[layer]
        if not self.span:
            keys[: len(k)], values[: len(k)] = k, v
            return k, v
        self.new = k, v  # which attend puts there
        return keys[: self.span], values[: self.span]

    def attend(
        self, q, k, v, backend: str, mask: Mask, *how: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`core_attention` of the forward's queries; how: dropout, drop, whether softmax is fused.

        q `[s, b, n, d]`, k, v `[t, b, g, d]` -> `[s, b, n*d]`
        """
        if not self.span:
            return core_attention(q, k, v, backend, mask, *how)
        return attend_one(q, self.new, (k, v), self.position, mask), None


@dataclass
class Decoder:
    """Logits of the next token, for texts that step together. length: the tokens of the longest text."""

    model: ModelChunks
    length: int
    block: int = 256  # keys; a graph reads a multiple
    capture: Callable[[Callable[[], None], Any], Callable[[], None]] = capture_graph
    position: int = 0  # tokens so far
    steps: int = 0  # forwards of one token
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict)  # by span

    def __post_init__(self) -> None:
        self.cache = StaticCache(self.spanning(self.length), self.model.device)
        self.pool = torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None

    def spanning(self, count: int) -> int:
        """`count` rounded up to whole blocks."""
        return -(-count // self.block) * self.block

    @torch.no_grad()
    def __call__(self, columns: Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
        """Return the next token's logits after `columns` `[b, s]`, which follow those before -> `[b, V]`

        The next call overwrites them. Raises ValueError if there is no room for the tokens, and for several
        tokens a row after the first call.
        """
        tokens = torch.as_tensor(columns, device=self.model.device)
        b, s = tokens.shape
        if self.position + s > self.length or (self.position and s > 1):
            raise ValueError(f"{s} tokens after {self.position} of {self.length}: one a step, up to these")
        if not self.position:
            self.tokens = tokens.new_empty(b, 1)
            sizes = b, self.model[0].padded_vocab_size
            self.logits = torch.empty(sizes, dtype=self.model.dtype, device=self.model.device)
            self.forward(tokens, torch.arange(s, device=self.model.device), 0)
        else:
            self.tokens.copy_(tokens)
            self.cache.position.fill_(self.position)
            self.step(self.spanning(self.position + 1))
        self.position += s
        return self.logits[:, : self.model.vocab_size]

    def step(self, span: int) -> None:
        """Launch a forward of one token, by the graph for `span`, which is captured if there is none yet."""
        run = partial(self.forward, self.tokens, self.cache.position, span)
        self.steps += 1
        if self.steps == 1:
            return run()
        if span not in self.graphs:
            self.graphs[span] = self.capture(run, self.pool)
        self.graphs[span]()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        """Compute logits of tokens `[b, s]` at positions `[s]`; span as in `StaticCache`."""
        chunk, training = self.model[0], self.model.training
        self.cache.span = span
        self.model.eval()
        self.logits.copy_(chunk(Batch(tokens, positions), cache=self.cache)[-1])
        self.model.train(training)

    def greedy(
        self, prompts: list[list[int]], ends: list[int], stops: frozenset[int]
    ) -> Iterator[dict[int, int]]:
        """Yield {prompt's index: likeliest token} a step, as `report.generate.stream` does.

        ends: the length at which each text ends; stops: the tokens that end one before.
        """
        device, ends, counts = self.model.device, list(ends), [len(prompt) for prompt in prompts]
        start, longest, last = min(counts), max(counts), max(ends)
        given = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
        lengths, tokens, read = torch.tensor(counts, device=device), given[:, :start], None
        for position in range(start, last + 1):
            before, read = read, None
            if position < last:
                chosen = self(tokens).argmax(-1)
                read = AsyncHostCopy(chosen).read
                if position < longest:
                    chosen = torch.where(lengths > position, given[:, position], chosen)
                tokens = chosen[:, None]
            if before is None:
                continue
            found = {i: token for i, token in enumerate(before()) if counts[i] < position <= ends[i]}
            for i in [i for i, token in found.items() if token in stops]:
                ends[i] = 0
                del found[i]
            yield found
            if position >= max(ends):
                return
