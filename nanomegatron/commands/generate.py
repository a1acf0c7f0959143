"""The command `generate`: continue texts with a trained model.

    nanomegatron generate --load runs/NAME/ckpt --prompt "def "
    nanomegatron generate --load runs/NAME/ckpt            reads one prompt per line of stdin
    nanomegatron generate --load runs/NAME/ckpt --prompt "def " --nproc 2          tensor parallel
    nanomegatron generate --load runs/NAME/ckpt --prompt "def " --nproc 2 --pp 2   in two stages

Exit codes: 0 done, 2 bad arguments, 3 no usable checkpoint, 130 Ctrl-C.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nanomegatron.build import build
from nanomegatron.checkpoint.checkpoint import (
    agreed,
    load,
    load_megatron,
    module_states,
    state_pieces,
    training_pieces,
)
from nanomegatron.checkpoint.hf import folder_tokenizer, load_weights, stops_of
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.checkpoint.megatron import open_megatron
from nanomegatron.config.cli import build_config, from_toml
from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.config.megatron_args import megatron_folder, megatron_settings, why_no_checkpoint
from nanomegatron.config.settings import Config, ParallelConfig, padded_vocab_size
from nanomegatron.config.user_files import escaped
from nanomegatron.data.library_tokenizers import HuggingFaceTokenizer
from nanomegatron.data.tokenizer import (
    TikTokenizer,
    Tokenizer,
    around_a_prompt,
    build_tokenizer,
    prompt_ids,
    tokenizer_from_spec,
)
from nanomegatron.fast.decode import decoder, plain_reason
from nanomegatron.faults.exit import BAD_CONFIG, DONE, NO_CHECKPOINT
from nanomegatron.faults.launch import launch, one_thread_if_small
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.param import Init
from nanomegatron.pick_fast_paths import Paths, install
from nanomegatron.pp import ModelChunks
from nanomegatron.report.generate import generate, stream

INTERRUPTED = 130  # as a shell reports Ctrl-C


def run(args: argparse.Namespace) -> int:
    """Generate here or on `--nproc` processes of this machine; returns the exit code."""
    world = World.from_environment()
    if world.size > 1 or args.nproc == 1:
        return generate_on_rank(world, args)
    codes = launch(generate_on_rank, args.nproc, (args,))
    return max(codes, key=lambda code: (code in (BAD_CONFIG, NO_CHECKPOINT), abs(code)))


def generate_on_rank(world: World, args: argparse.Namespace) -> int:
    """Load and generate in one process, print on rank 0; returns the exit code."""

    def say(text: str) -> None:
        if world.rank == 0:
            print(escaped(f"nanomegatron generate: {text}"), file=sys.stderr)

    code = DONE
    try:
        device = pick_device(args.device, world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        parallel = ParallelConfig(tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp)
        mesh = Mesh.build(parallel, world, device)
        flags = args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size
        given = build_tokenizer(args.tokenizer_type, *flags) if args.tokenizer_type else None
        model, tokenizer, _ = load_model(args.load, mesh, args.ckpt_step, say, given)
        one_thread_if_small(sum(p.numel() for p in model.parameters()))
        args.sampling = args.sampling._replace(stops=stops_of(args.load, tokenizer))
        if args.tokenizer_hf_no_include_special_tokens:
            tokenizer.include_special_tokens(False)
        if args.parse_special_tokens and not isinstance(tokenizer, TikTokenizer | HuggingFaceTokenizer):
            raise ValueError(
                f"--parse-special-tokens: {tokenizer.spec['type']} has none in a text; leave it out"
            )
        args.encode = lambda prompt: prompt_ids(
            tokenizer, tokenizer.encode_many([prompt], args.parse_special_tokens)[0].tolist()
        )
        for note in around_a_prompt(tokenizer):
            say(note)
        if "" in args.prompt:
            say("an empty prompt: the text begins as a document does")
        if args.prompt:
            batch(model, tokenizer, args, mesh.rank == 0)
        else:
            interact(model, tokenizer, args)
    except (CheckpointError, ValueError) as error:
        code = NO_CHECKPOINT if isinstance(error, CheckpointError) else BAD_CONFIG
        say(str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    Mesh.close()
    return code


def hidden_ids(tokenizer: Tokenizer, prompt: str) -> int:
    """How many ids before the text are not shown: the tokenizer's, or what replaced an empty prompt."""
    return len(tokenizer.prefix_ids) or int(not prompt)


def load_model(
    root: str | Path,
    mesh: Mesh,
    step: int | None = None,
    say: Callable[[str], None] = lambda note: None,
    given: Tokenizer | None = None,
) -> tuple[ModelChunks, Tokenizer, Config]:
    """Load the model of a checkpoint below `root`, the newest or that of iteration `step`, at any tp and pp.

    Optimizer states are not read. `say` gets a message for each damaged checkpoint that was skipped; `given`
    is a tokenizer instead of the checkpoint's. Raises CheckpointError without a checkpoint that loads,
    ValueError if the tokenizer's file is missing or the model's sizes are not divisible by tp.
    """
    if is_hf_folder(root):
        return load_hf_model(root, mesh, say, given)
    if theirs := megatron_folder(root, step):
        return load_megatron_model(theirs, mesh, say, given)
    found = load(root, [], mesh, step)  # which it is, without the weights: they need a model first
    if found is None:
        raise CheckpointError(f"no checkpoint in {root}{why_no_checkpoint(root, step)}")
    for note in found.notes:
        say(note)
    config = from_toml(found.config)
    if "tokenizer" not in found.state and given is None:
        raise CheckpointError(f"iteration {found.iteration} in {root} does not name its tokenizer")
    tokenizer = given or tokenizer_from_spec(found.state["tokenizer"], beside=root)
    if tokenizer.fingerprint != found.state.get("tokenizer_fingerprint", tokenizer.fingerprint):
        raise ValueError(f"the tokenizer {tokenizer.spec} gives other ids now than when {root} was trained")
    model = new_model(config, mesh, config.data.vocab_size or tokenizer.vocab_size)
    pieces = training_pieces(model.parameters(), {}, mesh) + state_pieces(module_states(model), mesh)
    load(root, pieces, mesh, found.iteration, cast=True)
    return model, tokenizer, config


def load_hf_model(
    root: str | Path, mesh: Mesh, say: Callable[[str], None], given: Tokenizer | None = None
) -> tuple[ModelChunks, Tokenizer, Config]:
    """The same for a Hugging Face folder, without conversion. Raises ValueError."""
    config = build_config(read_folder(root)[1])
    model = new_model(config, mesh, config.data.vocab_size)
    for note in load_weights(root, model.parameters(), config.model, config.data.vocab_size):
        say(note)
    return model, given or folder_tokenizer(Path(root), config.data.vocab_size), config


def load_megatron_model(
    folder: Path, mesh: Mesh, say: Callable[[str], None], given: Tokenizer | None = None
) -> tuple[ModelChunks, Tokenizer, Config]:
    """The same for a checkpoint of Megatron-LM that has args. Raises ValueError, CheckpointError."""
    settings = megatron_settings(folder)
    if not settings.get("vocab_size"):
        raise ValueError(
            f"{folder}: it has no args that say what the model is; nanomegatron convert takes that as flags"
        )
    config = build_config(settings)
    vocab_size = config.data.vocab_size
    model = new_model(config, mesh, vocab_size)
    pieces = training_pieces(model.parameters(), {}, mesh) + state_pieces(module_states(model), mesh)
    manifest = agreed(mesh, "", open_megatron, folder, config.model, vocab_size)
    for note in load_megatron(folder, manifest, pieces, mesh):
        say(note)
    return model, given or folder_tokenizer(folder.parent, vocab_size), config


def new_model(config: Config, mesh: Mesh, vocab_size: int) -> ModelChunks:
    """Build a model of these settings for sampling, with the tp and pp of `mesh`; loads no weights."""
    padded = padded_vocab_size(vocab_size, config.data.make_vocab_size_divisible_by, mesh.tp.size)
    here = replace(
        config,
        model=replace(config.model, attention_backend="auto"),  # that of training may not run here
        parallel=ParallelConfig(pipeline_model_parallel_size=mesh.pp.size, pipeline_split="flops"),
        precision=replace(config.precision, fp8_format=None),  # its scales would make prompts interact
    )
    init = Init(dtype=getattr(torch, config.dtype_name), device=mesh.device)
    return install(build(here, mesh, vocab_size, padded, init), Paths(decoder=decoder))


def batch(model: ModelChunks, tokenizer: Tokenizer, args: argparse.Namespace, show: bool) -> None:
    """Continue all prompts of the command line together and print them, with --- between; say how fast."""
    prompts = [prompt for prompt in args.prompt for _ in range(args.num_samples)]
    ids = [args.encode(prompt) or [tokenizer.eod] for prompt in prompts]
    start = time.perf_counter()
    texts = generate(model, ids, args.max_new_tokens, args.sampling)
    took = time.perf_counter() - start
    limit = model.config.max_position_embeddings
    if show:
        print(
            "\n---\n".join(
                readable(tokenizer.decode(text[hidden_ids(tokenizer, prompt) :]))
                for text, prompt in zip(texts, prompts, strict=True)
            )
        )
        new = sum(map(len, texts)) - sum(map(len, ids))
        why = f" (without CUDA graphs: {why})" if (why := plain_reason(model)) else ""
        full = f"; the model's {limit} positions are full" * (limit in map(len, texts))
        print(
            f"nanomegatron generate: {new} tokens in {took:.1f} s, {new / took:.0f} tokens/s{why}{full}",
            file=sys.stderr,
        )


def readable(text: str) -> str:
    """Return a text as a terminal may have it, without control characters; other readers get it as it is."""
    return escaped(text) if sys.stdout.isatty() else text


def interact(model: ModelChunks, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Continue each line of stdin, printing tokens as they are sampled, with --- between the continuations.

    A terminal shows a prompt sign. Raises ValueError if nothing comes.
    """
    sign, between = "> " * sys.stdin.isatty(), ""
    if sign:
        print("prompts, one a line, end with Ctrl-D; or give --prompt TEXT", file=sys.stderr)
    seeds = itertools.count(args.seed)
    while True:
        print(sign, end="", flush=True)
        if not (line := sys.stdin.readline()):
            if not (sign or between):
                raise ValueError("no prompt came from stdin: write one a line, or give --prompt TEXT")
            return
        prompt = line.rstrip("\n")
        ids = args.encode(prompt) or [tokenizer.eod]
        for _ in range(args.num_samples):
            print(between, end="")
            between = "---\n"
            steps = stream(model, [ids], args.max_new_tokens, args.sampling._replace(seed=next(seeds)))
            try:
                for piece in pieces_of_text(tokenizer, ids, hidden_ids(tokenizer, prompt), steps):
                    print(readable(piece), end="", flush=True)
            except ValueError as error:
                print(escaped(f"nanomegatron generate: {error}"), file=sys.stderr)
            print()


def pieces_of_text(
    tokenizer: Tokenizer, ids: list[int], hidden: int, steps: Iterator[dict[int, int]]
) -> Iterator[str]:
    """Yield the text of ids, but the first `hidden`, and of the tokens of `steps`, by whole characters."""
    ids, shown = list(ids), ""
    for step in itertools.chain([{}], steps):
        ids += step.values()
        text = tokenizer.decode(ids[hidden:])
        if not text.endswith("\ufffd"):  # some of a character's bytes are still to come
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids[hidden:])[len(shown) :]
