"""Sampling against brute force; cache, batches and tensor parallelism against the model run whole."""

import io
import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.checkpoint.checkpoint import save, training_pieces
from nanomegatron.checkpoint.source import check_tokenizer
from nanomegatron.commands.generate import load_model, pieces_of_text
from nanomegatron.commands.generate_args import main, parse_args
from nanomegatron.config.cli import ConfigError, to_toml
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import CheckpointConfig, Config, DataConfig, ParallelConfig
from nanomegatron.data.tokenizer import ByteTokenizer
from nanomegatron.data.vocabulary import write_ranks
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pick_variants import pick_variants
from nanomegatron.pp import ModelChunks
from nanomegatron.report.generate import KVCache, Sampling, generate, next_logits, stream, truncated
from nanomegatron.report.generate import sample as draw_tokens
from tests.spmd import run_spmd

VOCAB, PADDED, LONGEST = 61, 64, 32
GPT = {"position_embedding_type": "learned_absolute"}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
ALONE = Mesh()
PROMPTS = [[5, 9, 2, 40, 7, 7, 1], [3], [12, 50, 8], [60, 0, 17, 4, 33]]


def build(family: dict, mesh=ALONE) -> ModelChunks:
    """Large weights, so that the likeliest token is likelier than rounding; dropout, which must stay off."""
    config = TransformerConfig(
        *(2, 32, 4),
        max_position_embeddings=LONGEST,
        init_method_std=0.3,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        **family,
    )
    sizes = dict(vocab_size=VOCAB, max_sequence_length=LONGEST, padded_vocab_size=PADDED)
    model = GPTModel(config, **sizes, mesh=mesh)
    pick_variants(model, Axis.single("cp"))
    return ModelChunks([model])


def full_logits(model: ModelChunks, tokens: list[int]) -> torch.Tensor:
    """Logits `[s, V]` of all positions from one forward without a cache."""
    with torch.no_grad():
        ids = torch.tensor([tokens])
        return model[0](Batch(ids, torch.arange(len(tokens))))[:, 0, :VOCAB]


@pytest.fixture(params=[GPT, LLAMA], ids=["learned", "rope"])
def model(request) -> ModelChunks:
    return build(request.param)


@pytest.mark.parametrize("cuts", [[1] * 20, [7] + [1] * 13, [4, 6, 1, 9]], ids=str)
def test_cached_logits_equal_full(model, cuts):
    """One by one, after a prefill, and in pieces of any length."""
    tokens = torch.randint(VOCAB, (20,)).tolist()
    expected, cache = full_logits(model, tokens), KVCache(20)
    with torch.no_grad():
        for stop, size in zip(itertools.accumulate(cuts), cuts):
            logits = next_logits(model, [tokens[stop - size : stop]], cache)
            torch.testing.assert_close(logits[0], expected[stop - 1], atol=1e-5, rtol=1e-5)
    assert cache.length == 20
    with pytest.raises(ValueError, match="21 positions in a cache for 20"):
        next_logits(model, [[1]], cache)


def test_greedy_equals_naive_loop(model):
    for prompt in PROMPTS:
        naive = list(prompt)
        for _ in range(12):
            naive.append(full_logits(model, naive)[-1].argmax().item())
        assert generate(model, [prompt], 12, Sampling(temperature=0)) == [naive]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_batch_equals_singles(model, temperature):
    together = generate(model, PROMPTS, 15, Sampling(temperature=temperature, top_k=20, seed=3))
    alone = [
        generate(model, [p], 15, Sampling(temperature=temperature, top_k=20, seed=3 + i))
        for i, p in enumerate(PROMPTS)
    ]
    assert together == [text for [text] in alone]
    assert [len(text) - len(p) for text, p in zip(together, PROMPTS)] == [15] * 4


def test_seed_decides(model):
    first, again = (generate(model, [[1, 2]] * 3, 20, Sampling(seed=5)) for _ in range(2))
    assert first == again
    assert len(set(map(tuple, first))) == 3, "samples of one prompt differ"
    assert generate(model, [[1, 2]], 20, Sampling(seed=6)) == first[1:2]


def test_random_numbers_are_left_alone(model):
    state = torch.get_rng_state()
    generate(model, PROMPTS, 3, Sampling())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_in_training_stays_there(model):
    for training in (True, False):
        model.train(training)
        generate(model, PROMPTS, 3, Sampling())
        assert {module.training for module in model.modules()} == {training}


def test_a_stop_ends_one_text_only(model):
    free = generate(model, PROMPTS, 20, Sampling(temperature=0))
    eod, other = free[0][len(PROMPTS[0]) + 4], free[2][len(PROMPTS[2]) + 2]

    def cut(text: list[int], prompt: list[int]) -> list[int]:
        new = text[len(prompt) :]
        return prompt + new[: min([new.index(stop) for stop in (eod, other) if stop in new], default=None)]

    stopped = generate(model, PROMPTS, 20, Sampling(temperature=0, stops={eod, other}))
    assert stopped == [cut(text, prompt) for text, prompt in zip(free, PROMPTS)]
    assert len(stopped[0]) < len(free[0])
    assert generate(model, [[eod, 1]], 1, Sampling(temperature=0, stops={eod}))[0][:2] == [eod, 1], (
        "in a prompt it is a token"
    )


def test_stops_at_longest_sequence(model):
    prompts = [[1] * LONGEST, [2] * (LONGEST - 2), [3]]
    texts = generate(model, prompts, 100, Sampling())
    assert [len(text) for text in texts] == [LONGEST] * 3
    assert generate(model, prompts, 0, Sampling()) == prompts
    assert generate(model, [], 5, Sampling()) == []


@pytest.mark.parametrize(
    "prompts, settings, message",
    [
        (
            [[1], [1] * (LONGEST + 1)],
            {},
            f"prompt 2 of 2 has 33 tokens; the model takes 1 to {LONGEST}: shorten it",
        ),
        ([[]], {}, "prompt 1 of 1 has 0 tokens"),
        ([[1]], {"temperature": -0.5}, "temperature -0.5"),
        ([[1]], {"temperature": math.nan}, "temperature nan"),
        ([[1]], {"top_k": -1}, "top-k -1"),
        ([[1]], {"top_p": 0.0}, "top-p 0.0"),
        ([[1]], {"top_p": 1.5}, "top-p 1.5"),
    ],
)
def test_bad_requests(prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(build(GPT), prompts, 5, Sampling(**settings))


def test_stream_steps_make_the_text(model):
    texts = [list(p) for p in PROMPTS]
    steps = list(stream(model, PROMPTS, 10, Sampling(0.7, 0, 0.9, seed=2)))
    for step in steps:
        for row, token in step.items():
            texts[row].append(token)
    assert texts == generate(model, PROMPTS, 10, Sampling(temperature=0.7, top_p=0.9, seed=2))
    assert [sorted(step) for step in steps[:5]] == [[1], [1], [1, 2], [1, 2], [1, 2, 3]], (
        "shortest prompt first"
    )


def texts(model: ModelChunks) -> list[list[list[int]]]:
    """The likeliest, and drawn ones."""
    how = dict(top_k=30, top_p=0.95, seed=1)
    return [generate(model, PROMPTS, 8, Sampling(temperature=temperature, **how)) for temperature in (0, 0.9)]


def rank_text(mesh, family: dict) -> list[list[list[int]]]:
    return texts(build(family, mesh))


def test_tensor_parallel_equals_one_process(model, full):
    family, one = LLAMA if model.config.swiglu else GPT, texts(model)
    if full or family is GPT:
        assert run_spmd(rank_text, 2, family, tp=2) == [one] * 2
    cut = family | {"sequence_parallel": True}  # as it is trained; four ranks share two key/value heads
    if full or family is LLAMA:
        assert run_spmd(rank_text, 4, cut, tp=4) == [one] * 4


def brute_force(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities by the definitions, one token at a time."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or None]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(weights))]


CASES = list(itertools.product([0.3, 1.0, 2.0], [0, 1, 5, 100], [0.1, 0.6, 0.95, 1.0]))


@pytest.mark.parametrize("temperature, top_k, top_p", CASES)
def test_truncated_equals_brute_force(temperature, top_k, top_p):
    logits = torch.randn(4, 23) * 2
    weights, ids = truncated(logits, Sampling(temperature, top_k, top_p))
    probabilities = torch.zeros(4, 23).double().scatter(1, ids, weights / weights.sum(1, keepdim=True))
    expected = [brute_force(row, temperature, top_k, top_p) for row in logits.tolist()]
    torch.testing.assert_close(probabilities, torch.tensor(expected).double(), atol=1e-12, rtol=1e-6)


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (4, 1.0), (0, 0.7), (5, 0.8)])
def test_samples_have_the_distribution(top_k, top_p):
    n, logits = 20_000, torch.randn(11) * 1.5
    generator = torch.Generator().manual_seed(0)
    ids = draw_tokens(logits.expand(n, -1), Sampling(0.8, top_k, top_p), [generator] * n)
    found = torch.bincount(ids, minlength=11).double() / n
    expected = torch.tensor(brute_force(logits.tolist(), 0.8, top_k, top_p)).double()
    assert torch.equal(found > 0, expected > 0)
    # Five standard deviations of a frequency.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt()).all()


def test_temperature_zero_and_near_zero():
    logits = torch.randn(8, 40)
    generators = [torch.Generator().manual_seed(i) for i in range(8)]
    assert torch.equal(draw_tokens(logits, Sampling(0), generators), logits.argmax(-1))
    assert torch.equal(draw_tokens(logits, Sampling(1e-4), generators), logits.argmax(-1))


def test_padding_is_never_sampled():
    """Made likely on purpose: the rows of the padding are not zero here."""
    model = build(LLAMA)
    with torch.no_grad():
        weight = model[0].output_layer.weight
        weight[VOCAB:] = 100 * weight[: PADDED - VOCAB]
    prompts = [[random.Random(i).randrange(VOCAB)] for i in range(20)]
    texts = generate(model, prompts, 31, Sampling(temperature=5.0))
    assert max(map(max, texts)) < VOCAB


CONFIG = Config(
    model=TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=64, init_method_std=0.3
    ),
    data=DataConfig(make_vocab_size_divisible_by=8),
)


def save_model(root: Path, iteration: int, /, seed: int, **state) -> ModelChunks:
    """A checkpoint as training writes it, of a model that has learned nothing; returns the model."""
    mesh = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))
    sizes = dict(vocab_size=257, max_sequence_length=64, padded_vocab_size=264)
    model = ModelChunks([GPTModel(CONFIG.model, **sizes, init=Init(seed))])
    pieces = training_pieces(model.parameters(), {}, mesh)
    save(root, iteration, pieces, {"tokenizer": ByteTokenizer().spec, **state}, to_toml(CONFIG), mesh)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[int, ModelChunks]]:
    root = tmp_path_factory.mktemp("run") / "ckpt"
    return root, {iteration: save_model(root, iteration, seed=iteration) for iteration in (10, 20)}


def rank_loaded(mesh, root: str, step: int | None) -> list:
    model, tokenizer, config = load_model(root, mesh, step)
    assert config == CONFIG
    return generate(model, [tokenizer.encode("def ")], 20, Sampling(temperature=0))


@pytest.mark.parametrize("tp", [1, 2])
def test_load_model_at_any_tp(trained, tp):
    root, models = trained
    for step, iteration in ((None, 20), (10, 10)):
        expected = generate(models[iteration], [list(b"def ")], 20, Sampling(temperature=0))
        assert run_spmd(rank_loaded, tp, str(root), step, tp=tp) == [expected] * tp


def test_load_model_refuses_another_tokenizer(tmp_path):
    save_model(tmp_path, 1, seed=0, tokenizer_fingerprint="of another")
    mesh = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))
    with pytest.raises(ValueError, match="gives other ids now"):
        load_model(tmp_path, mesh)


@pytest.mark.parametrize("change", [{}, {"finetune": True}, {"allow_data_change": True}])
def test_a_run_resumes_with_its_tokenizer(tmp_path, change):
    data = {"train": [{"prefix": "first_text_document"}]}
    save_model(tmp_path, 1, seed=0, iteration=1, tokenizer_fingerprint="of another", data=data)
    mesh = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))
    config = replace(
        CONFIG, checkpoint=CheckpointConfig(load=str(tmp_path), save=str(tmp_path / "new"), **change)
    )
    if change:
        check_tokenizer(config, mesh, ByteTokenizer())
        return
    with pytest.raises(
        ConfigError,
        match="was trained on first_text_document, with tokenizer .* gives other ids: give that data",
    ):
        check_tokenizer(config, mesh, ByteTokenizer())


def continued(model: ModelChunks, prompts: list[str], tokens: int = 20, **settings) -> list[str]:
    """What the program must print for the prompts."""
    tokenizer = ByteTokenizer()
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "stops": {tokenizer.eod}} | settings
    ids = [tokenizer.encode(p) or [tokenizer.eod] for p in prompts]
    texts = generate(model, ids, tokens, Sampling(**settings))
    return [tokenizer.decode(t[not p :]) for t, p in zip(texts, prompts)]


def test_program_on_two_processes(trained):
    root, models = trained
    flags = f"generate --tp 2 --device cpu --max-new-tokens 20 --load {root}".split()
    command = [sys.executable, "-m", "nanomegatron", *flags, "--prompt", "def ", "--prompt", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    expected = "\n---\n".join(continued(models[20], ["def ", ""])) + "\n"
    assert (done.returncode, done.stdout, done.stderr.split()[2:4]) == (0, expected, ["40", "tokens"])


def run_main(monkeypatch, capsys, *flags, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program, run in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    try:
        code = main(["--device", "cpu", *map(str, flags)])
    except SystemExit as leaving:
        code = leaving.code
    return code, *capsys.readouterr()


def test_flags(trained, monkeypatch, capsys):
    root, models = trained
    flags = "--max-new-tokens 9 --temperature 1.3 --top-k 0 --top-p 0.9 --seed 4 --num-samples 2"
    flags += " --ckpt-step 10"
    where = ("--load", root, "--prompt", "a", "--prompt", "class A:\n")
    code, out, err = run_main(monkeypatch, capsys, *where, *flags.split())
    assert err.split()[2:4] == ["36", "tokens"]
    prompts = ["a", "a", "class A:\n", "class A:\n"]
    expected = continued(models[10], prompts, 9, temperature=1.3, top_k=0, top_p=0.9, seed=4)
    assert (code, out) == (0, "\n---\n".join(expected) + "\n")


@pytest.mark.parametrize(
    "flags, sizes",
    [("", (1, 1, 1)), ("--tp 2 --pp 2", (4, 2, 2)), ("--nproc 4 --pp 2", (4, 2, 2)), ("--pp 2", (2, 1, 2))],
)
def test_processes_follow_from_the_sizes(flags, sizes):
    args = parse_args(["--load", "x", "--prompt", "y", *flags.split()])
    assert (args.nproc, args.tp, args.pp) == sizes


def test_a_tokenizer_by_flags_and_special_tokens(trained, tmp_path, monkeypatch, capsys):
    """Instead of the checkpoint's; tokens such as <|endoftext|> are text, or themselves."""
    root, models = trained
    write_ranks(tmp_path / "bytes.tiktoken", [bytes([i]) for i in range(256)])
    flags = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", tmp_path / "bytes.tiktoken"]
    prompt, tokenizer = "<|endoftext|>ab", ByteTokenizer()
    for more, ids in ((), [*prompt.encode()]), (("--parse-special-tokens",), [256, 97, 98]):
        words = ["--load", root, "--max-new-tokens", 9, *flags, *more]
        made = generate(models[20], [ids], 9, Sampling(0.8, 40, 0.95, stops={tokenizer.eod}))
        for given in dict(stdin=f"{prompt}\n"), {}:
            found = run_main(monkeypatch, capsys, *words, *[] if given else ["--prompt", prompt], **given)
            assert found[:2] == (0, tokenizer.decode(made[0]) + "\n")


def test_interactive_continues_each_line(trained, monkeypatch, capsys):
    """The second prompt is too long: said, and the next one is read."""
    root, models = trained
    lines = ["def f", "x" * 65, "", "import"]
    flags = ("--load", root, "--max-new-tokens", 30)
    code, out, err = run_main(monkeypatch, capsys, *flags, stdin="\n".join(lines))
    expected = [continued(models[20], [line], 30, seed=i)[0] for i, line in enumerate(lines) if i != 1]
    expected.insert(1, "x" * 65)
    assert (code, out) == (0, "\n---\n".join(expected) + "\n")
    assert err == "nanomegatron generate: prompt 1 of 1 has 65 tokens; the model takes 1 to 64: shorten it\n"


class Terminal(io.StringIO):
    """One where a line was typed, and Ctrl-D."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_what_is_waited_for(trained, monkeypatch, capsys):
    """And a small model computes with one thread, unless OMP_NUM_THREADS is set."""
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", Terminal("a\n"))
        assert main(["--load", str(trained[0]), "--max-new-tokens", "1", "--device", "cpu"]) == 0
        out, err = capsys.readouterr()
        assert out.count("> ") == 2 and threads == [1]
        assert err == "prompts, one a line, end with Ctrl-D; or give --prompt TEXT\n"
        monkeypatch.setenv("OMP_NUM_THREADS", "2")


def test_text_comes_in_whole_characters():
    data = list("a\u20ac\u00e9z".encode())
    steps = iter([{0: token} for token in data[2:]])
    pieces = list(pieces_of_text(ByteTokenizer(), data[:2], 0, steps))
    assert [piece for piece in pieces if piece] == ["a\u20ac", "\u00e9", "z"]
    cut = list(pieces_of_text(ByteTokenizer(), [256, 97], 1, iter([{0: 0xE2}, {}])))
    assert "".join(cut) == "a\ufffd", (
        "the end of the document before is hidden, an unfinished character is not"
    )


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (["--prompt", "x" * 65], 2, "prompt 1 of 1 has 65 tokens; the model takes 1 to 64"),
        (["--temperature", -1], 2, "temperature -1.0"),
        (["--tokenizer-type", "TikTokenizer"], 2, "--tokenizer-type TikTokenizer needs --tokenizer-model"),
        (["--tokenizer-model", "x"], 2, "--tokenizer-model x: give --tokenizer-type"),
        (["--parse-special-tokens"], 2, "--parse-special-tokens: ByteTokenizer has none in a text"),
        (["--num-samples", 0], 2, "--num-samples 0: give 1 or more"),
        (["--max-new-tokens", 0], 2, "--max-new-tokens 0: give 1 or more"),
        (["--prompt", "x", "--max-new-tokens", 99], 0, "; the model's 64 positions are full\n"),
        (["--prompt", "x", "--tp", 2, "--nproc", 4], 2, "--tp 2 --pp 1 on 4 processes"),
        (["--tp", 2], 2, "give --prompt"),
        ([], 2, "no prompt came from stdin: write one a line, or give --prompt TEXT"),
        (["--prompt", ""], 0, "an empty prompt: the text begins as a document does"),
        (["--what"], 2, "unrecognized arguments: --what"),
        (["--prompt", "x", "--ckpt-step", 15], 3, "no iteration 15; it has [10, 20]"),
        (["--prompt", "x", "--load", "nowhere"], 3, "no checkpoint in nowhere"),
    ],
)
def test_program_errors(trained, monkeypatch, capsys, flags, code, message):
    found, out, err = run_main(monkeypatch, capsys, "--load", trained[0], *flags)
    assert (found, bool(out)) == (code, code == 0)
    assert message in err


def test_the_folder_of_a_run_stands_for_its_checkpoints(trained, tmp_path, monkeypatch, capsys):
    """And where there is none of that name, the runs that are there are named."""
    (tmp_path / "runs/python").mkdir(parents=True)
    (tmp_path / "runs/python/ckpt").symlink_to(trained[0])
    monkeypatch.chdir(tmp_path)
    flags = ("--prompt", "a", "--max-new-tokens", 3)
    code, out, _ = run_main(monkeypatch, capsys, "--load", "runs/python", *flags)
    assert (code, out) == run_main(monkeypatch, capsys, "--load", "runs/python/ckpt", *flags)[:2]
    assert code == 0
    code, _, err = run_main(monkeypatch, capsys, "--load", "runs/nothere", *flags)
    assert (code, err) == (3, "nanomegatron generate: no checkpoint in runs/nothere; runs/ has python\n")


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    args = parse_args(["--load", "x"])
    for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "num_samples", "device"):
        text = said.rpartition(f" --{name.replace('_', '-')} ")[2].partition(" --")[0]
        assert f"default {getattr(args, name)}" in text, name


def test_damaged_checkpoint_is_passed_over_loudly(tmp_path, monkeypatch, capsys):
    models = [save_model(tmp_path, iteration, seed=iteration) for iteration in (1, 2)]
    shard = tmp_path / "iter_0000002" / "rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    flags = ("--load", tmp_path, "--prompt", "a", "--max-new-tokens", 5)
    code, out, err = run_main(monkeypatch, capsys, *flags)
    assert (code, out) == (0, continued(models[0], ["a"], 5)[0] + "\n")
    assert "loading iteration 1 instead" in err
    assert run_main(monkeypatch, capsys, *flags, "--ckpt-step", 2)[0] == 3
