"""Generate text with a trained model: sample token by token, with a cache of keys and values.

Each step runs the model on one new token (`next_logits`), which attends to those in the cache. Prompts of a
batch step together, at the same position, and need neither padding nor mask (past the end of the shortest,
longer prompts are read token by token; generate long ones separately):

    prompts  a b c d        first forward   a b        logits -> c  is known: taken from the prompt
             x y                            x y                  z  is sampled
                            second          c          logits -> d  is known
                                            z                    w  is sampled       and so on

Each prompt has a random generator of its own, on the CPU, whose numbers depend on neither the rest of the
batch nor the device. Under tensor parallelism all ranks gather the same logits and choose the same tokens;
under pipeline parallelism the last stage broadcasts them. On one GPU fast/decode.py runs the steps.
`nanomegatron generate` is the command.
(Nucleus sampling: arXiv 1904.09751)
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from nanomegatron import comm
from nanomegatron.batch import Batch
from nanomegatron.config.sampling import DEFAULT, Sampling
from nanomegatron.data.tokenizer import Tokenizer, prompt_ids
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.ops.attention import core_attention
from nanomegatron.pp import ModelChunks, run_schedule
from nanomegatron.report.log import RunLog

SAMPLE_LINES = 3  # of text, at the end of a run
PYTHON = re.compile(r"^[ \t]*((?:def|class) \w+[(:])", re.M)


class KVCache:
    """The `Cache` of generation: keys and values of all positions so far, `[2, max_length, b, g, d]` a layer.

    A token's keys and values never change once they are computed. It returns views.
    """

    attend = staticmethod(core_attention)

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0  # positions held, including those of the current forward
        self.buffers: dict[int, torch.Tensor] = {}

    def extend(self, count: int) -> None:
        """Begin a forward over `count` new positions. Raises ValueError if there is no room for them."""
        self.length += count
        if self.length > self.max_length:
            raise ValueError(f"{self.length} positions in a cache for {self.max_length}")

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.buffers:
            self.buffers[layer] = k.new_empty((2, self.max_length, *k.shape[1:]))
        keys, values = self.buffers[layer][:, : self.length]
        keys[-len(k) :] = k
        values[-len(k) :] = v
        return keys, values


def next_logits(
    model: ModelChunks, columns: Sequence[Sequence[int]] | torch.Tensor, cache: KVCache
) -> torch.Tensor:
    """Return the next token's logits after `columns` `[b, s]`, which follow the cache -> `[b, V]`, unpadded.

    Sends activations between stages, broadcasts the logits over pp and all-gathers them over tp: every rank
    has the whole batch, and returns the same logits.
    """
    tokens = torch.as_tensor(columns, device=model.device)
    b, s = tokens.shape
    batch = Batch(tokens, torch.arange(cache.length, cache.length + s, device=model.device))
    cache.extend(s)
    logits = torch.empty(
        b, model[0].padded_vocab_size // model.tp.size, dtype=model.dtype, device=model.device
    )

    def step(chunk: GPTModel, _: int) -> torch.Tensor:
        x = chunk(batch, cache=cache)
        if chunk.post_process:
            logits.copy_(x[-1])
        return x

    training = model.training
    model.eval()  # without sequence parallelism: the sequence may have any length
    run_schedule(model, step, 1, model.shape(s, b), forward_only=True)
    model.train(training)
    comm.broadcast_(logits, model.pipeline.axis, model.pipeline.last_rank)
    return comm.all_gather(logits, model.tp, dim=-1)[:, : model.vocab_size]


def truncated(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights to sample with and their token ids, likeliest first. logits `[b, V]` -> 2 x `[b, k]`

    k: top-k, or all V. Tokens outside top-p weigh 0. Both are on the CPU; the weights are fp64 and need no
    sum of 1.
    """
    ids = likeliest(logits, min(sampling.top_k or logits.shape[-1], logits.shape[-1]))
    weights = (logits.gather(-1, ids).double() / sampling.temperature).softmax(-1).cpu()
    cumulative = weights.cumsum(-1)  # on a GPU sums take no fixed order
    return weights * (cumulative - weights < sampling.top_p * cumulative[:, -1:]), ids.cpu()


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the largest logits, of equal ones the lower id first. logits `[b, V]` -> `[b, count]`"""
    bits = (logits.float() + 0.0).view(torch.int32)  # ordered as the numbers are, if both are positive
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32
    return (order - torch.arange(logits.shape[-1], device=logits.device)).topk(count).indices


def sample(logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Sample a token for each row of logits `[b, V]` -> ids `[b]`

    `generators`: one on the CPU for each row, whose next number is looked up in the row's cumulative weights.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    weights, ids = truncated(logits, sampling)
    cumulative = weights.cumsum(-1)
    uniform = torch.cat([torch.rand(1, 1, dtype=torch.float64, generator=g) for g in generators])
    return ids.gather(-1, torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True))[:, 0]


def generate(
    model: ModelChunks, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling
) -> list[list[int]]:
    """Return each prompt with its continuation, up to `max_new_tokens`, the longest sequence, or a stop.

    Every rank of tp, pp and ep calls this with the same arguments and gets the same tokens. Raises ValueError
    for an empty prompt and for one longer than the model's sequences.
    """
    texts = [list(prompt) for prompt in prompts]
    for step in stream(model, prompts, max_new_tokens, sampling):
        for row, token in step.items():
            texts[row].append(token)
    return texts


@torch.no_grad()
def stream(
    model: ModelChunks, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling
) -> Iterator[dict[int, int]]:
    """`generate` step by step: yields {prompt's index: new token} for the prompts that get one."""
    sampling.check()
    limit = model.config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= limit:
            raise ValueError(
                f"prompt {i + 1} of {len(prompts)} has {len(prompt)} tokens; "
                f"the model takes 1 to {limit}: shorten it"
            )
    if not prompts:
        return
    ends = [min(len(prompt) + max_new_tokens, limit) for prompt in prompts]
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    position = min(map(len, prompts))
    columns = [prompt[:position] for prompt in prompts]  # the tokens of the next forward
    fast = model.decoder and model.decoder(model, max(ends))
    if fast and sampling.temperature == 0:
        yield from fast.greedy(prompts, ends, sampling.stops)
        return
    forward = fast or partial(next_logits, model, cache=KVCache(max(ends)))
    while position < max(ends):
        logits = forward(columns)
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) <= position < ends[i]]
        chosen = sample(logits[rows], sampling, [generators[i] for i in rows]).tolist() if rows else []
        step = dict(zip(rows, chosen, strict=True))
        for i in [i for i, token in step.items() if token in sampling.stops]:
            ends[i] = 0
            del step[i]
        yield step
        columns = [  # an ended prompt reads zeros
            [step.get(i, prompt[position] if position < len(prompt) else 0)]
            for i, prompt in enumerate(prompts)
        ]
        position += 1


def prompts_of(tokenizer: Tokenizer, dataset: Any, length: int) -> list[str]:
    """Return a prompt of at most `length` tokens, if there is text: how a function or class of Python begins.

    In other text the first six words of the first whole line. Samples begin anywhere, so that is the line
    after the first; where there is only one, it is taken.
    """
    words: list[str] = []
    for i in range(min(len(dataset), 20)):
        ids = [token for token in dataset[i][:length].tolist() if token not in tokenizer.prefix_ids]
        text = tokenizer.decode(ids[: ids.index(tokenizer.eod)] if tokenizer.eod in ids else ids)
        if python := PYTHON.search(text):
            return [python[1]]
        lines = [line.split() for line in text.splitlines() if line.strip()]
        words += [" ".join(line[:6]) for line in lines[1:2] or lines]
    return words[:1]


def all_ranks_arrive(mesh: Mesh, seconds: float = 20) -> bool:
    """Wait until all ranks call this; False after a timeout. Works if a collective hangs."""
    store = mesh.connect_store()
    keys = [f"sample/{rank}" for rank in range(mesh.world.size)]
    store.set(keys[mesh.rank], "")
    with suppress(RuntimeError):  # torch's DistStoreError: timed out
        store.wait(keys, datetime.timedelta(seconds=seconds))
        return True
    return False


def show_sample(
    model: ModelChunks, tokenizer: Tokenizer, dataset: Any, mesh: Mesh, log: RunLog
) -> str | None:
    """Continue a prompt of a dataset and log SAMPLE_LINES, at the end of a run; return the prompt.

    `nanomegatron generate` with that prompt begins with the same tokens. Every rank must call it. An error on
    all ranks is only a warning. One on some ranks is raised, since the others wait in a collective.
    """
    prompts, ids = [], []
    limit = model.config.max_position_embeddings
    with log.attempt("sample"):
        prompts = prompts_of(tokenizer, dataset, limit // 2)
        ids = [prompt_ids(tokenizer, tokenizer.encode(prompt)) for prompt in prompts]
    if comm.any_rank(not ids or not 0 < len(ids[0]) < limit, mesh.world, mesh.device):
        return None
    apart = mesh.tp.size * mesh.pp.size * mesh.etp_ep.size == 1  # no collectives
    with log.attempt("sample", alike=lambda: apart or all_ranks_arrive(mesh)):
        (text,) = generate(model, ids, 80, DEFAULT._replace(stops=frozenset([tokenizer.eod])))
        shown = tokenizer.decode(  # the model may have more ids than the tokenizer
            [token for token in text[len(tokenizer.prefix_ids) :] if token < tokenizer.vocab_size]
        )
        lines = [line for line in shown.splitlines() if line.strip()]
        log.line("sample  " + "\n        ".join(lines[:SAMPLE_LINES]))
    return prompts[0]
