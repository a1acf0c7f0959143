"""Causal attention for Hopper in Triton and in Gluon, forward: kernels that attention_tries.py times.

    tile of queries   rows m BM .. m BM + BM of a head; the longest rows first
    keys              |full|full|full|diagonal|      only the last block is masked

q, o `[s, n d]`, k, v `[s, g d]` bf16, as views of `[s, 1, heads, d]`; query head i reads head i g / n. lse
`[n, s]` fp32. Exponents are of 2: scores are scaled by log2(e) / sqrt(d) once. (arXiv 2307.08691; Gluon's
form, with a producer warp, two consumers and the softmax between matmuls: 2407.08608)
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN2 = tl.constexpr(0.6931471805599453)


# Triton: the compiler pipelines the loop, or gives its parts to warps of their own


@triton.jit
def step(q, k_desc, v_desc, column, acc, total, m, rows, n, scale, BN: tl.constexpr, MASK: tl.constexpr):
    """A block of keys that begins at n."""
    k = k_desc.load([n, column])
    scores = tl.dot(q, k.T)
    if MASK:
        keys = n + tl.arange(0, BN)
        scores = tl.where(rows[:, None] >= keys[None, :], scores, float("-inf"))
    largest = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.math.exp2(scores * scale - largest[:, None])
    alpha = tl.math.exp2(m - largest)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v = v_desc.load([n, column])
    acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, total, largest


@triton.jit
def triton_forward(
    q_desc, k_desc, v_desc, o, lse, s, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WS: tl.constexpr,
):  # fmt: skip
    """One tile of queries of a head; the grid is [s / BM * H]."""
    head = tl.program_id(0) % H
    tile = s // BM - 1 - tl.program_id(0) // H
    column, begin = head // (H // G) * D, tile * BM
    rows = begin + tl.arange(0, BM)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    q = q_desc.load([begin, head * D])
    if WS:  # Triton 3.6 specializes neither two loops in a row nor a store by TMA on Hopper
        for n in tl.range(0, begin + BM, BN, warp_specialize=True):
            acc, total, m = step(q, k_desc, v_desc, column, acc, total, m, rows, n, scale, BN, True)
    else:
        for n in tl.range(0, begin, BN):
            acc, total, m = step(q, k_desc, v_desc, column, acc, total, m, rows, n, scale, BN, False)
        for n in tl.range(begin, begin + BM, BN):
            acc, total, m = step(q, k_desc, v_desc, column, acc, total, m, rows, n, scale, BN, True)
    places = rows[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(o + places, (acc / total[:, None]).to(o.dtype.element_ty))
    tl.store(lse + head * s + rows, (m + tl.math.log2(total)) * LN2)


# Gluon: wgmma and TMA by hand
#
#     producer (1 warp)      k0 v0 k1 v1 ...           blocks from the diagonal down to the first
#     two consumers, each with 64 rows:
#         tensor cores       S0 | S1, O += P0 V0 | S2, O += P1 V1 | ...
#         the rest              | softmax S0     | softmax S1     |


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, shared, begin, q_column, column, tiles,
):  # fmt: skip
    """Copy the queries, then block by block keys and values as soon as their places are free."""
    q, k, v, q_full, k_full, k_free, v_full, v_free = shared
    STAGES: gl.constexpr = k.shape[0]
    BN: gl.constexpr = k.shape[1]
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [begin, q_column], q_full, q.index(0))
    tma.async_copy_global_to_shared(q_desc, [begin + 64, q_column], q_full, q.index(1))
    for j in range(tiles):
        at = j % STAGES
        phase = ((j // STAGES) & 1) ^ 1
        row = (tiles - 1 - j) * BN
        mbarrier.wait(k_free.index(at), phase)
        mbarrier.expect(k_full.index(at), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, column], k_full.index(at), k.index(at))
        mbarrier.wait(v_free.index(at), phase)
        mbarrier.expect(v_full.index(at), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row, column], v_full.index(at), v.index(at))


@gluon.jit
def consume(
    o_desc, lse, shared, turn, begin, q_column, tiles, scale, part, TURNS: gl.constexpr,
):  # fmt: skip
    """The 64 rows of a consumer; lse: of the head."""
    q, k, v, q_full, k_full, k_free, v_full, v_free = shared
    STAGES: gl.constexpr = k.shape[0]
    BN: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    own = q.index(part)
    rows = begin + part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    keys = (tiles - 1) * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, MMA))
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    empty = gl.zeros([64, BN], gl.float32, MMA)
    acc = gl.zeros([64, D], gl.float32, MMA)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(own, k.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    mbarrier.arrive(k_free.index(0), count=1)
    scores = gl.where(rows[:, None] >= keys[None, :], scores, float("-inf"))
    m = gl.max(scores, 1) * scale
    p = gl.exp2(scores * scale - m[:, None])
    total = gl.sum(p, 1)
    weights = gl.convert_layout(p.to(gl.bfloat16), operand)
    for j in range(1, tiles):
        at = j % STAGES
        last = (j - 1) % STAGES
        mbarrier.wait(k_full.index(at), (j // STAGES) & 1)
        if TURNS:  # while this consumer's matmuls run, the other computes its softmax
            mbarrier.wait(turn.index(part), (j - part) & 1)
        scores = warpgroup_mma(own, k.index(at).permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), ((j - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, v.index(last), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turn.index(1 - part), count=1)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(k_free.index(at), count=1)
        largest = gl.maximum(m, gl.max(scores, 1) * scale)
        p = gl.exp2(scores * scale - largest[:, None])
        alpha = gl.exp2(m - largest)
        total = total * alpha + gl.sum(p, 1)
        m = largest
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(v_free.index(last), count=1)
        acc = acc * alpha[:, None]
        weights = gl.convert_layout(p.to(gl.bfloat16), operand)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    own.store((acc / total[:, None]).to(gl.bfloat16))  # the queries have been read
    gl.store(lse + rows, (m + gl.log2(total)) * 0.6931471805599453)
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [begin + part * 64, q_column], own)
    tma.store_wait(pendings=0)


@gluon.jit
def gluon_forward(
    q_desc, k_desc, v_desc, o_desc, lse, s, scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """128 rows of queries of a head; BN is D. The grid is [s / 128 * H]."""
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    head = gl.program_id(0) % H
    tile = s // 128 - 1 - gl.program_id(0) // H
    begin = tile * 128
    q_column = head * D
    column = head // (H // G) * D
    tiles = (begin + 128) // BN
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    fence_async_shared()
    shared = (q, k, v, q_full, k_full, k_free, v_full, v_free)
    head_lse = lse + head * s
    gl.warp_specialize(
        [
            (consume, (o_desc, head_lse, shared, turn, begin, q_column, tiles, scale, 0, TURNS)),
            (consume, (o_desc, head_lse, shared, turn, begin, q_column, tiles, scale, 1, TURNS)),
            (produce, (q_desc, k_desc, v_desc, shared, begin, q_column, column, tiles)),
        ],
        [4, 1],
        [240, 24],
    )
