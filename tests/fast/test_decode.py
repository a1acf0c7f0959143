"""Generation by graphs, fast/decode.py, beside the plain form, on CPUs by test_cuda_graphs.py's recorder.

fp32, large weights: the same tokens and, within rounding, the same logits. tests/gpu has real graphs.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.commands.generate import batch
from nanomegatron.fast.decode import Decoder, attend_one, decoder, plain_reason
from nanomegatron.ops.attention import Mask
from nanomegatron.pp import ModelChunks
from nanomegatron.report.generate import KVCache, Sampling, generate, likeliest, next_logits, stream
from tests.fast.test_cuda_graphs import Recorder
from tests.report.test_generate import GPT, LLAMA, PROMPTS, VOCAB, build

FAMILIES = {
    "gpt": GPT,
    "llama": LLAMA,
    "windows": LLAMA | {"window_size": (6, 0), "window_attn_skip_freq": "2", "rotary_base_local": 100.0},
    "gemma": LLAMA
    | {
        "window_size": (3, 0),
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "softmax_scale": 0.2,
        "norm_placement": "both",
        "embedding_multiplier": 3.0,
        "apply_layernorm_1p": True,
    },
    "qwen": LLAMA | {"qk_layernorm": True, "rotary_percent": 0.5, "masked_softmax_fusion": False},
    "olmo": LLAMA | {"qk_layernorm": True, "qk_layernorm_all_heads": True, "rotary_interleaved": True},
}


def recorded(run, pool):
    """The capture of a graph: the recorder also runs the step, which only repeats itself when replayed."""
    with Recorder() as recorder:
        run()
    return recorder.replay


def graphed(model: ModelChunks, block: int = 8) -> list[Decoder]:
    """Let a model generate by graphs; returns the list of its decoders."""
    made: list[Decoder] = []

    def make(model: ModelChunks, length: int) -> Decoder:
        made.append(Decoder(model, length, block, recorded))
        return made[-1]

    model.decoder = make
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_plain_ones(family):
    """A prefill of 5 and 20 single tokens, in 4 graphs, each used after keys of other spans were added."""
    model = build(FAMILIES[family])
    tokens = torch.randint(VOCAB, (3, 25))
    fast, cache = Decoder(model, 25, 8, recorded), KVCache(25)
    with torch.no_grad():
        for start, stop in [(0, 5), *((i, i + 1) for i in range(5, 25))]:
            expected = next_logits(model, tokens[:, start:stop].tolist(), cache)
            torch.testing.assert_close(fast(tokens[:, start:stop]), expected, atol=1e-5, rtol=1e-5)
    assert sorted(fast.graphs) == [8, 16, 24, 32]
    with pytest.raises(ValueError, match="1 tokens after 25 of 25"):
        fast([[1]] * 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(0.9, 20, 0.95, 3)], ids=["0", "0.9"])
def test_same_tokens(family, sampling):
    """Prompts of unequal length, step by step."""
    model = build(FAMILIES[family])
    plain = list(stream(model, PROMPTS, 20, sampling))
    made = graphed(model)
    assert list(stream(model, PROMPTS, 20, sampling)) == plain
    assert len(made) == 1 and len(made[0].graphs) == 4 and made[0].position == 26


def test_an_end_of_text_is_seen_one_step_late():
    """Each text, and all of them; what was launched meanwhile changes nothing."""
    model, plain = build(LLAMA), build(LLAMA)
    plain.load_state_dict(model.state_dict())
    made = graphed(model)
    free = generate(plain, PROMPTS, 20, Sampling(temperature=0))
    for prompts in (PROMPTS, PROMPTS[:1]):
        ends = {free[0][len(PROMPTS[0]) + 4], *free[2][len(PROMPTS[2]) :]}
        for stops in [*({end} for end in ends), {free[0][len(PROMPTS[0]) + 4], free[2][len(PROMPTS[2]) + 2]}]:
            how = Sampling(temperature=0, stops=stops)
            assert list(stream(model, prompts, 20, how)) == list(stream(plain, prompts, 20, how)), stops
    first = Sampling(temperature=0, stops={free[0][len(PROMPTS[0])]})
    assert list(stream(plain, PROMPTS[:1], 20, first)) == [{}]
    list(stream(model, PROMPTS[:1], 20, first))
    assert made[-1].position == len(PROMPTS[0]) + 1  # the step in flight, and no other


def test_ends_and_one_token_prompts():
    model = build(GPT)
    graphed(model)
    texts = generate(model, [[1] * 32, [2] * 30, [3]], 100, Sampling(temperature=0))
    assert [len(text) for text in texts] == [32] * 3
    assert generate(model, PROMPTS, 0, Sampling(temperature=0)) == PROMPTS
    assert generate(model, [], 5, Sampling(temperature=0)) == []
    with pytest.raises(ValueError, match="prompt 1 of 1 has 0 tokens"):
        generate(model, [[]], 5, Sampling(temperature=0))
    fast = Decoder(model, 9, 8, recorded)
    fast([[1, 2]])
    with pytest.raises(ValueError, match="2 tokens after 2 of 9"):
        fast([[1, 2]])


@pytest.mark.parametrize("n, g", [(4, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("window, cap", [(None, None), (40, None), (None, 3.0), (0, 2.0)])
def test_one_token_attends_to_those_up_to_it(n, g, window, cap):
    """Against float64; what lies behind the position would be seen in the result."""
    mask = Mask(window=window, cap=cap)
    for position, t in ((0, 8), (7, 8), (5, 300), (299, 300), (100, 600)):
        packed = torch.randn(1, 2, (n + 2 * g) * 32)
        q, k, v = (x.unflatten(-1, (-1, 32)) for x in packed.split([n * 32, g * 32, g * 32], -1))
        cache = torch.randn(2, t, 2, g, 32)
        cache[:, position + 1 :] = 1e4
        before = cache.clone()
        before[:, position] = torch.stack((k[0], v[0]))
        found = attend_one(q, (k, v), tuple(cache), torch.tensor([position]), mask)
        assert torch.equal(cache, before)  # the new row, and no other

        first = 0 if mask.window is None else max(position - mask.window, 0)
        keys, values = cache[:, first : position + 1].double().repeat_interleave(n // g, 3)
        scores = torch.einsum("bnd,tbnd->bnt", q[0].double(), keys) * 32**-0.5
        if mask.cap:
            scores = mask.cap * torch.tanh(scores / mask.cap)
        expected = torch.einsum("bnt,tbnd->bnd", scores.softmax(-1), values).flatten(1)[None]
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_runs_without_graphs():
    model = build(LLAMA)
    assert decoder(model, 9) is None and plain_reason(model) == "on cpu"
    model.device = torch.device("cuda")  # says where it is; nothing is computed
    assert plain_reason(model) == ""
    hook = model[0].layers[1].register_forward_hook(lambda *_: None)
    assert plain_reason(model) == "module 0.layers.1 has a hook"
    hook.remove()
    model.scales = object()
    assert plain_reason(model) == "FP8 layers"
    model.scales, model.tp = None, replace(model.tp, size=2)
    assert plain_reason(model) == "several ranks or stages"
    experts = build(GPT | {"num_experts": 4, "moe_router_topk": 2})
    experts.device = torch.device("cuda")
    assert plain_reason(experts) == "the shapes of experts' tokens vary"


@pytest.mark.parametrize("count", [1, 7, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_likeliest_equals_a_stable_sort(dtype, count):
    """With equal logits, zeros of both signs, infinite and tiny ones."""
    logits = (torch.randn(5, 200) * 3).round().to(dtype)
    logits[:, 50:54] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    logits[:, 60:64] = torch.tensor([1e-7, -1e-7, 3e4, -3e4]).to(dtype)
    expected = logits.sort(descending=True, stable=True).indices[:, :count]
    assert torch.equal(likeliest(logits, count), expected)


def test_speed_is_said(capsys):
    """And why there are no graphs, beside the text on stdout."""
    tokenizer = SimpleNamespace(
        decode=lambda ids: " ".join(map(str, ids)), eod=None, prefix_ids=(), suffix_ids=()
    )
    args = SimpleNamespace(prompt=["1 2", "3"], num_samples=2, max_new_tokens=4, sampling=Sampling(0))
    args.encode = lambda prompt: [int(word) for word in prompt.split()]
    for show in (False, True):
        batch(build(GPT), tokenizer, args, show)
    out, err = capsys.readouterr()
    assert out.count("---") == 3 and out.startswith("1 2 ")
    assert re.fullmatch(
        r"nanomegatron generate: 16 tokens in \d+\.\d s, \d+ tokens/s \(without CUDA graphs: on cpu\)\n", err
    )
