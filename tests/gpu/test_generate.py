"""Generation on a GPU: real graphs against the same steps without, to the bit; and against the plain form."""

import functools

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.decode import Decoder, decoder, plain_reason
from nanomegatron.mesh import Axis
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pick_variants import pick_variants
from nanomegatron.pp import ModelChunks
from nanomegatron.report.generate import KVCache, Sampling, generate, likeliest, next_logits, stream
from tests.fast.test_decode import FAMILIES

CUDA, VOCAB, LONGEST = torch.device("cuda", 0), 500, 96
PROMPTS = [[5, 9, 2, 40, 7, 7, 1], [3], [12, 50, 8], [60, 0, 17, 4, 33]]
BLOCK = 16  # keys: a text crosses several


@functools.cache
def build(family: str, dtype: torch.dtype = torch.bfloat16, std=0.3) -> ModelChunks:
    """Large weights, so that the likeliest token is likelier than rounding."""
    config = TransformerConfig(
        *(2, 512, 8), max_position_embeddings=LONGEST, init_method_std=std, **FAMILIES[family]
    )
    sizes = dict(vocab_size=VOCAB, max_sequence_length=LONGEST, padded_vocab_size=512)
    chunk = GPTModel(config, **sizes, init=Init(dtype=dtype, device=CUDA))
    pick_variants(chunk, Axis.single("cp"))
    return ModelChunks([chunk])


def eager(run, pool):
    """In place of a capture: the step's kernels, launched from Python each time."""
    return run


@torch.no_grad()
def logits(make, family: str, dtype: torch.dtype, b: int) -> torch.Tensor:
    """Of a prefill of 5 tokens and 60 single ones, `[61, b, V]`; make: model -> a decoder."""
    torch.manual_seed(0)
    tokens, model = torch.randint(VOCAB, (b, 65), device=CUDA), build(family, dtype, 0.05)
    forward = make(model)
    pieces = [tokens[:, :5], *tokens[:, 5:].split(1, dim=1)]
    return torch.stack([forward(piece).clone() for piece in pieces])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_equal_their_steps_to_the_bit(family, b, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    made = []

    def graphs(model: ModelChunks) -> Decoder:
        made.append(Decoder(model, LONGEST, BLOCK))
        return made[-1]

    found = logits(graphs, family, torch.bfloat16, b)
    assert len(made[0].graphs) == 5 and made[0].steps == 60
    assert torch.equal(found, logits(lambda m: Decoder(m, LONGEST, BLOCK, eager), family, torch.bfloat16, b))


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 4e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_plain_form(family, dtype, bound, b):
    """And, in fp32, of one forward without a cache."""
    how = family, dtype, b
    plain = logits(lambda m: functools.partial(next_logits, m, cache=KVCache(LONGEST)), *how)
    found = logits(lambda m: Decoder(m, LONGEST, BLOCK), *how)
    assert relative(found, plain) < bound
    if dtype == torch.float32:
        torch.manual_seed(0)
        tokens = torch.randint(VOCAB, (b, 65), device=CUDA)
        with torch.no_grad():
            batch = Batch(tokens, torch.arange(65, device=CUDA))
            whole = build(family, dtype, std=0.05)[0](batch)[4:, :, :VOCAB]
        assert relative(found, whole) < bound


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(0.5, 20, 0.95, 3)], ids=["0", "0.5"])
def test_same_tokens_in_fp32(family, sampling):
    """Prompts of unequal length, step by step, and with two tokens that end one of them each."""
    model = build(family, torch.float32)
    model.decoder = None
    plain = list(stream(model, PROMPTS, 80, sampling))
    stops = {plain[12][2], plain[20][0]}
    ended = list(stream(model, PROMPTS, 80, sampling._replace(stops=stops)))
    for make in (lambda m, length: Decoder(m, length, BLOCK), decoder):
        model.decoder = make
        assert list(stream(model, PROMPTS, 80, sampling)) == plain
        assert list(stream(model, PROMPTS, 80, sampling._replace(stops=stops))) == ended


def test_a_text_again_and_again():
    """Each generation has its own cache and graphs; memory is given back."""
    model = build("llama")
    assert plain_reason(model) == ""
    model.decoder = decoder
    first = generate(model, PROMPTS, 60, Sampling(temperature=0))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        assert generate(model, PROMPTS, 60, Sampling(temperature=0)) == first
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_the_host_does_not_wait():
    """With temperature 0 the host is ahead of the device by a step: no launch waits for one."""
    model = build("llama")
    torch.manual_seed(0)
    fast = Decoder(model, LONGEST)
    with torch.no_grad():
        tokens = fast(torch.randint(VOCAB, (3, 5), device=CUDA)).argmax(-1, keepdim=True)
        for _ in range(3):
            tokens = fast(tokens).argmax(-1, keepdim=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                tokens = fast(tokens).argmax(-1, keepdim=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_equals_a_stable_sort(dtype):
    values = (torch.randn(3, 128256, device=CUDA) * 3).to(dtype)
    for count in (1, 40, 5000, 128256):
        expected = values.sort(descending=True, stable=True).indices[:, :count]
        assert torch.equal(likeliest(values, count), expected)
