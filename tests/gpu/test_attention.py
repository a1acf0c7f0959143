"""Attention kernels of the GPU against float64, with every mask."""

import itertools

import pytest
import torch

from nanomegatron.ops.attention import Mask, core_attention

CUDA = torch.device("cuda", 0)
S, B = 256, 2
LENGTHS = (100, 156, 1, 2, 253)
BOUNDS = torch.tensor((0, *itertools.accumulate(LENGTHS)), dtype=torch.int32)
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=31),
    "documents": Mask(cu_seqlens=BOUNDS, max_seqlen=max(LENGTHS)),
    "documents, full": Mask(False, None, BOUNDS, max(LENGTHS)),
    "documents and a window": Mask(True, 31, BOUNDS, max(LENGTHS)),
}


@pytest.mark.parametrize("backend", ["fused", "flash", "unfused"])
@pytest.mark.parametrize("case", MASKS)
def test_attention_matches_float64(backend, case):
    mask = MASKS[case]
    if mask.cu_seqlens is not None:
        mask = Mask(mask.causal, mask.window, mask.cu_seqlens.to(CUDA), mask.max_seqlen)
    q, k, v = (torch.randn(S, B, heads, 64, device=CUDA) for heads in (8, 2, 2))
    grad = torch.randn(S, B, 512, device=CUDA)
    results = {}
    for dtype, kind in ((torch.float64, "unfused"), (torch.bfloat16, backend)):
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = core_attention(*inputs, kind, mask)
        out.backward(grad.bfloat16().to(dtype))
        results[dtype] = [out, lse, *(x.grad for x in inputs)]
    for ours, exact in zip(results[torch.bfloat16], results[torch.float64], strict=True):
        # bf16 has 8 bits; rounding of probabilities and outputs adds up to a few times 2^-9
        assert (ours.double() - exact.double()).norm() < 1e-2 * exact.double().norm()


@pytest.mark.parametrize("case", ["window", "documents"])
def test_no_mask_of_all_pairs(case):
    """32,768 tokens: scores of one head alone would take 2 GiB."""
    s = 32768
    bounds = torch.tensor([0, 20000, 30000, s], dtype=torch.int32, device=CUDA)
    mask = Mask(window=1023) if case == "window" else Mask(cu_seqlens=bounds, max_seqlen=20000)
    q = torch.randn(s, 1, 8, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    core_attention(q, q, q, "fused", mask)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
