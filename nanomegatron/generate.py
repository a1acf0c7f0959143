"""Text from a trained model: sampling token by token with a cache of keys and values.

    python -m nanomegatron.generate --load runs/NAME/ckpt --prompt "def "
    python -m nanomegatron.generate --load runs/NAME/ckpt            reads a prompt a line, answers as it goes
    python -m nanomegatron.generate --load runs/NAME/ckpt --prompt "def " --nproc 2          tensor parallel
    python -m nanomegatron.generate --load runs/NAME/ckpt --prompt "def " --nproc 2 --pp 2   in two stages

A token's keys and values never change once they are computed, so they are kept, and each step runs the model
on one new token. Prompts of a batch step together, at the same position, and need neither padding nor mask
(beyond the end of the shortest, a longer prompt is read token by token; give long ones by themselves):

    prompts  a b c d        first forward   a b        logits -> c  is known: taken from the prompt
             x y                            x y                  z  is sampled
                            second          c          logits -> d  is known
                                            z                    w  is sampled       and so on

Each prompt has a random generator of its own, on the CPU, whose numbers depend on neither the rest of the
batch nor the device. Under tensor parallelism all ranks gather the same logits and choose the same tokens;
under pipeline parallelism the last stage broadcasts them. (Nucleus sampling: arXiv 1904.09751)

Exit codes: 0 done, 2 bad arguments, 3 no usable checkpoint, 130 Ctrl-C.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from nanomegatron import comm
from nanomegatron.batch import Batch
from nanomegatron.build import build
from nanomegatron.checkpoint.checkpoint import load, module_states, state_pieces, training_pieces
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.config.cli import from_toml
from nanomegatron.config.settings import Config, ParallelConfig, padded_vocab_size
from nanomegatron.data.tokenizer import Tokenizer, tokenizer_from_spec
from nanomegatron.launch import launch
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pp import Stages, execute
from nanomegatron.report.log import RunLog

DONE, BAD_ARGUMENTS, NO_CHECKPOINT, INTERRUPTED = 0, 2, 3, 130


class Sampling(NamedTuple):
    """How tokens are chosen: first the `top_k` likeliest, then of these the fewest that reach `top_p`."""

    temperature: float = 1.0  # 0: the likeliest
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0  # of the first prompt; each has the next one
    eod: int | None = None  # ends a text

    def check(self) -> "Sampling":
        """Raises ValueError where a setting makes no sense."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature}: give 0 (the likeliest token) or more")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k}: give the number of tokens to choose from, 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p}: give a probability above 0, at most 1")
        return self


class KVCache:
    """Keys and values of all positions so far, of this rank's heads: `[max_length, b, g, d]` each, a layer.

    A `model.Cache`: takes the new ones of a layer, `[s, b, g, d]`, and returns views of all, `[t, b, g, d]`.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0  # positions held, counting those of the forward that runs
        self.buffers: dict[int, torch.Tensor] = {}

    def extend(self, count: int) -> None:
        """Begin a forward over `count` new positions. Raises ValueError where there is no room for them."""
        self.length += count
        if self.length > self.max_length:
            raise ValueError(f"{self.length} positions in a cache for {self.max_length}")

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.buffers:
            self.buffers[layer] = k.new_empty(2, self.max_length, *k.shape[1:])
        buffer = self.buffers[layer][:, : self.length]
        buffer[0, -len(k) :], buffer[1, -len(k) :] = k, v
        return buffer[0], buffer[1]


def truncated(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the tokens to draw from, likeliest first, and their ids. logits `[b, V]` -> 2 x `[b, V]`

    Tokens that are left out weigh 0. Both are on the CPU; the weights are fp64 and do not sum to 1.
    """
    weights, ids = (logits.double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    weights, ids = weights.cpu(), ids.cpu()  # sums on a GPU take no fixed order
    if sampling.top_k:
        weights[:, sampling.top_k :] = 0
    cumulative = weights.cumsum(-1)
    return weights * (cumulative - weights < sampling.top_p * cumulative[:, -1:]), ids


def sample(logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """A token for each row of logits `[b, V]`: ids `[b]`.

    `generators`: one on the CPU for each row, whose next number is looked up in the row's cumulative weights.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    weights, ids = truncated(logits, sampling)
    cumulative = weights.cumsum(-1)
    uniform = torch.cat([torch.rand(1, 1, dtype=torch.float64, generator=g) for g in generators])
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return ids.gather(-1, place)[:, 0]


def generate(
    model: Stages, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling
) -> list[list[int]]:
    """Each prompt and its continuation, up to `max_new_tokens`, the model's longest sequence, or `eod`.

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
    model: Stages, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling
) -> Iterator[dict[int, int]]:
    """`generate` step by step: the new token of each prompt that gets one, by the prompt's number."""
    sampling.check()
    limit = model.config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= limit:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens; this model takes 1 to {limit}")
    if not prompts:
        return
    ends = [min(len(prompt) + max_new_tokens, limit) for prompt in prompts]
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    start = min(map(len, prompts))
    columns = [prompt[:start] for prompt in prompts]  # what the next forward reads
    cache = KVCache(max(ends))
    for position in range(start, max(ends)):
        logits = next_logits(model, columns, cache)
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) <= position < ends[i]]
        chosen = sample(logits[rows], sampling, [generators[i] for i in rows]).tolist() if rows else []
        step = dict(zip(rows, chosen, strict=True))
        for i in [i for i, token in step.items() if token == sampling.eod]:
            ends[i] = 0
            del step[i]
        yield step
        if position + 1 >= max(ends):
            return
        known = (prompt[position] if position < len(prompt) else 0 for prompt in prompts)
        columns = [[step.get(i, token)] for i, token in enumerate(known)]  # an ended prompt reads zeros


def next_logits(model: Stages, columns: list[list[int]], cache: KVCache) -> torch.Tensor:
    """Logits of the token after `columns`, which follow the cached ones: `[b][s]` -> `[b, V]`, unpadded.

    Communicates the activations between stages, a broadcast of the logits over pp, and their all-gather over
    tp: every rank has the whole batch, and gets the same.
    """
    tokens = torch.tensor(columns, device=model.device)
    (b, s), vocab = tokens.shape, model[0].padded_vocab_size
    batch = Batch(tokens, torch.arange(cache.length, cache.length + s, device=model.device))
    cache.extend(s)
    logits = torch.empty(b, vocab // model.tp.size, dtype=model.dtype, device=model.device)

    def step(chunk: GPTModel, _: int) -> torch.Tensor:
        x = chunk(batch, cache=cache)
        if chunk.post_process:
            logits.copy_(x[-1])
        return x

    training = model.training
    model.eval()  # nothing is cut along the sequence, which may have any length
    execute(model, step, 1, model.shape(s, b), forward_only=True)
    model.train(training)
    comm.broadcast_(logits, model.pp, model.last_rank)
    return comm.all_gather(logits, model.tp, dim=-1)[:, : model.vocab_size]


def prompts_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """Two beginnings that a tokenizer takes: of Python, or, where it has no text, ids."""
    return ("0", "1") if tokenizer.spec["type"] == "NullTokenizer" else ("def", "    def test")


def show_sample(model: Stages, tokenizer: Tokenizer, seed: int, mesh: Mesh, log: RunLog) -> None:
    """Continue two prompts and log them, at the end of a run; every rank takes part.

    A run can do without: what fails on all ranks alike is a warning. Raises what has failed on some while
    the others wait in a collective.
    """
    ids, texts, limit = [], [], model.config.max_position_embeddings
    with log.attempt("sample"):
        ids = [tokenizer.encode(prompt) for prompt in prompts_of(tokenizer)]
    fit = ids and all(0 < len(prompt) < limit for prompt in ids)
    if comm.any_rank(not fit, mesh.world, mesh.device):
        return
    apart = mesh.tp.size * mesh.pp.size * mesh.etp_ep.size == 1  # each rank by itself
    with log.attempt("sample", alike=lambda: apart or Mesh.meet("sample")):
        length = min(120, limit - max(map(len, ids)))
        texts = generate(model, ids, length, Sampling(temperature=0.6, top_k=40, seed=seed))
    with log.attempt("sample"):
        for text in texts:
            known = [token for token in text if token < tokenizer.vocab_size]  # the model may have more
            log.line("sample  " + tokenizer.decode(known).replace("\n", "\n        "))


def load_model(
    root: str | Path, mesh: Mesh, step: int | None = None, say: Callable[[str], None] = lambda note: None
) -> tuple[Stages, Tokenizer, Config]:
    """The model of a training checkpoint below `root`, the newest or of iteration `step`, at any tp and pp.

    Of the optimizer nothing is read. `say` is called with what is wrong with a checkpoint that was passed
    over. Raises CheckpointError, and ValueError where the tokenizer's file is missing or the model does not
    divide by tp.
    """
    found = load(root, [], mesh, step)  # which it is, without the weights: they need a model first
    if found is None:
        raise CheckpointError(f"no checkpoint in {root}")
    for note in found.notes:
        say(note)
    config = from_toml(found.config_toml)
    if "tokenizer" not in found.state:
        raise CheckpointError(f"iteration {found.iteration} in {root} does not name its tokenizer")
    tokenizer = tokenizer_from_spec(found.state["tokenizer"], beside=root)
    if tokenizer.fingerprint != found.state.get("tokenizer_fingerprint", tokenizer.fingerprint):
        raise ValueError(f"the tokenizer {tokenizer.spec} gives other ids now than when {root} was trained")
    vocab_size = config.data.vocab_size or tokenizer.vocab_size
    padded = padded_vocab_size(vocab_size, config.data.make_vocab_size_divisible_by, mesh.tp.size)
    here = replace(
        config,
        model=replace(config.model, attention_backend="auto"),  # the one of the training may not run here
        parallel=ParallelConfig(pipeline_model_parallel_size=mesh.pp.size, pipeline_split="flops"),
        precision=replace(config.precision, fp8_format=None),  # one scale would tie prompts together
    )
    init = Init(dtype=getattr(torch, config.dtype_name), device=mesh.device)
    model = build(here, mesh, vocab_size, padded, init)
    pieces = training_pieces(model.parameters(), {}, mesh) + state_pieces(module_states(model), mesh)
    load(root, pieces, mesh, found.iteration, cast=True)
    return model, tokenizer, config


# The program.


def main(argv: list[str]) -> int:
    """Generate here or on `--nproc` processes of this machine; returns the exit code."""
    world = World.from_environment()
    args = parse(argv, world.size)
    if world.size > 1 or args.nproc == 1:
        return run_rank(world, args)
    codes = launch(run_rank, args.nproc, (args,))
    return max(codes, key=lambda code: (code in (BAD_ARGUMENTS, NO_CHECKPOINT), abs(code)))


def parse(argv: list[str], world_size: int = 1) -> argparse.Namespace:
    """The command line; leaves with exit code 2 where it is wrong. `world_size`: processes of torchrun."""
    parser = argparse.ArgumentParser(prog="python -m nanomegatron.generate", description="Continue a text.")
    add = parser.add_argument
    add("--load", required=True, help="folder of checkpoints, runs/NAME/ckpt")
    add("--ckpt-step", type=int, help="iteration to load; the newest")
    add("--prompt", action="append", default=[], help="text to continue, may be repeated; none: read stdin")
    add("--prompt-file", action="append", default=[], help="file whose text is a prompt")
    add("--max-new-tokens", type=int, default=200, help="longest continuation, in tokens")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top-k", type=int, default=40, help="choose among the K likeliest tokens; 0: all")
    add("--top-p", type=float, default=0.95, help="choose among the likeliest tokens of this share")
    add("--seed", type=int, default=0, help="of the random choices")
    add("--num-samples", type=int, default=1, help="continuations of each prompt")
    add("--nproc", type=int, help="processes to start on this machine; --tp x --pp")
    tp, pp = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    add("--tp", tp, type=int, help="processes that share each layer; --nproc / --pp")
    add("--pp", pp, type=int, default=1, help="pipeline stages")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    args = parser.parse_args(argv)
    args.nproc = world_size if world_size > 1 else args.nproc or (args.tp or 1) * args.pp
    args.tp = args.tp or args.nproc // max(args.pp, 1)
    try:
        args.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed).check()
        for flag, value in (("max-new-tokens", args.max_new_tokens), ("num-samples", args.num_samples)):
            if value < 1:
                raise ValueError(f"--{flag} {value}: give 1 or more")
        if args.tp * args.pp != args.nproc or min(args.tp, args.pp) < 1:
            raise ValueError(
                f"--tp {args.tp} --pp {args.pp} on {args.nproc} processes: their product must be that number"
            )
        args.prompt += [Path(name).read_text(encoding="utf-8") for name in args.prompt_file]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not args.prompt and args.nproc > 1:
        parser.error("prompts are read from stdin by one process alone: give --prompt")
    return args


def run_rank(world: World, args: argparse.Namespace) -> int:
    """One process: load, generate, and on rank 0 print; returns the exit code."""

    def say(text: str) -> None:
        if world.rank == 0:
            print(f"generate: {text}", file=sys.stderr)

    code = DONE
    try:
        device = pick_device(args.device, world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        sizes = {"tensor_model_parallel_size": args.tp, "pipeline_model_parallel_size": args.pp}
        mesh = Mesh.build(ParallelConfig(**sizes), world, device)
        model, tokenizer, _ = load_model(args.load, mesh, args.ckpt_step, say)
        args.sampling = args.sampling._replace(eod=tokenizer.eod)
        if args.prompt:
            batch(model, tokenizer, args, mesh.rank == 0)
        else:
            interact(model, tokenizer, args)
    except (CheckpointError, ValueError) as error:
        code = NO_CHECKPOINT if isinstance(error, CheckpointError) else BAD_ARGUMENTS
        say(str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    Mesh.close()
    return code


def batch(model: Stages, tokenizer: Tokenizer, args: argparse.Namespace, show: bool) -> None:
    """Continue all prompts of the command line together and print them, a rule between two."""
    prompts = [prompt for prompt in args.prompt for _ in range(args.num_samples)]
    ids = [tokenizer.encode(prompt) or [tokenizer.eod] for prompt in prompts]
    texts = generate(model, ids, args.max_new_tokens, args.sampling)
    if show:
        # An empty prompt was the end of the document before, which is not part of the text.
        shown = (tokenizer.decode(text[not prompt :]) for text, prompt in zip(texts, prompts, strict=True))
        print("\n---\n".join(shown))


def interact(model: Stages, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Continue each line of stdin, printing tokens as they are chosen; on a terminal behind a prompt sign."""
    sign = "> " if sys.stdin.isatty() else ""
    seeds = itertools.count(args.seed)
    while True:
        print(sign, end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        prompt = line.rstrip("\n")
        ids = tokenizer.encode(prompt) or [tokenizer.eod]
        for _ in range(args.num_samples):
            steps = stream(model, [ids], args.max_new_tokens, args.sampling._replace(seed=next(seeds)))
            try:
                for piece in pieces_of_text(tokenizer, ids, int(not prompt), steps):
                    print(piece, end="", flush=True)
            except ValueError as error:
                print(f"generate: {error}", file=sys.stderr)
            print()


def pieces_of_text(
    tokenizer: Tokenizer, ids: list[int], hidden: int, steps: Iterator[dict[int, int]]
) -> Iterator[str]:
    """The text of ids (but the first `hidden`) and of what `steps` adds, by whole characters."""
    ids, shown = list(ids), ""
    for step in itertools.chain([{}], steps):
        ids += step.values()
        text = tokenizer.decode(ids[hidden:])
        if not text.endswith("\ufffd"):  # some of a character's bytes are still to come
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids[hidden:])[len(shown) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
