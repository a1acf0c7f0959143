// Mixture of experts: tokens to the order of experts and back, and the tables that say where each copy goes.
//
//     x [tokens, h], each token in topk copies     out [rows, h], the copies of expert 0, of expert 1, ...
//     position [tokens, topk]: the row of out that a copy has, -1 where it is dropped
//     source [rows]: the number of the copy in a row, token * topk + j, -1 where the row is padding
//
//     permute      out[position[t][j]] = x[t] * prob[t][j], padding 0        dx = unpermute(dout), same prob
//     unpermute    y[t] = sum over j of z[position[t][j]] * prob[t][j]       dz = permute(dy), same prob
//     both         dprob[t][j] = <x[t], dout[position[t][j]]> = <dy[t], z[position[t][j]]>, 0 if dropped
//
// So each one is the backward of the other, and either can give dprob beside it: <x[t], z[position[t][j]]>,
// of the rows that it reads or is given. fp32 arithmetic, copies added in the order of j. Without prob: 1.
//
// The naive loops:  for t, j, c:  out[position[t][j]][c] = x[t][c] * prob[t][j]
//                   for t, j, c:  y[t][c] += z[position[t][j]][c] * prob[t][j]
//
// Bytes a token in 16 bits an element: 2 h (topk + 1) for either, and for permute with dprob 2 h (2 topk +
// 1): a block has a token, reads it once and writes or reads its copies.
//
// The tables are a stable counting sort: copies of an expert stand in the order of their numbers. Blocks of
// COPIES count, one block adds up, each block then places its own. An id that is no expert's is dropped.
// Where rows are padded to a multiple above 1, an expert without a copy has that many rows too.

#include "common.cuh"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / 32, CHUNK = 4;
constexpr int COPIES = 1024, EXPERTS = 1024, PER_WARP = COPIES / WARPS;

// Tables. work [blocks, experts]: first the count of each block, then how many stand before them.

__global__ void __launch_bounds__(THREADS)
    moe_count_kernel(const int* __restrict__ ids, int* __restrict__ work, int64_t copies, int experts) {
    wait_for_previous_kernel();
    __shared__ int counts[EXPERTS];
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[e] = 0;
    __syncthreads();
    const int64_t first = blockIdx.x * static_cast<int64_t>(COPIES);
    for (int i = threadIdx.x; i < COPIES && first + i < copies; i += THREADS) {
        const int id = ids[first + i];
        if (id >= 0 && id < experts) atomicAdd(counts + id, 1);  // of integers: the same in any order
    }
    __syncthreads();
    work += blockIdx.x * static_cast<int64_t>(experts);
    for (int e = threadIdx.x; e < experts; e += THREADS) work[e] = counts[e];
}

// One block, a thread an expert: from counts to where each block's copies of it begin.
__global__ void __launch_bounds__(EXPERTS)
    moe_offset_kernel(int* __restrict__ work, int* __restrict__ offsets, int* __restrict__ counts, int blocks,
                      int experts, int multiple) {
    wait_for_previous_kernel();
    __shared__ int ends[EXPERTS];
    const int e = threadIdx.x;
    int count = 0;
    if (e < experts) {
#pragma unroll 8
        for (int b = 0; b < blocks; ++b) count += work[static_cast<int64_t>(b) * experts + e];
    }
    const int least = multiple > 1, padded = (max(count, least) + multiple - 1) / multiple * multiple;
    ends[e] = padded;
    __syncthreads();
    for (int step = 1; step < EXPERTS; step *= 2) {
        const int before = e >= step ? ends[e - step] : 0;
        __syncthreads();
        ends[e] += before;
        __syncthreads();
    }
    if (e >= experts) return;
    counts[e] = count;
    offsets[e + 1] = ends[e];
    if (e == 0) offsets[0] = 0;
    int begin = ends[e] - padded;
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
        const int64_t at = static_cast<int64_t>(b) * experts + e;
        const int here = work[at];
        work[at] = begin;
        begin += here;
    }
}

// A warp has PER_WARP neighbouring copies and a row of `next`: the place of its next copy of each expert.
__global__ void __launch_bounds__(THREADS)
    moe_place_kernel(const int* __restrict__ ids, const int* __restrict__ work, int* __restrict__ position,
                     int* __restrict__ source, int64_t copies, int experts) {
    wait_for_previous_kernel();
    extern __shared__ int next[];  // [WARPS, experts]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = blockIdx.x * static_cast<int64_t>(COPIES) + warp * PER_WARP;
    int mine[PER_WARP / 32];
#pragma unroll
    for (int i = 0; i < PER_WARP / 32; ++i) {
        const int64_t copy = first + i * 32 + lane;
        const int id = copy < copies ? ids[copy] : -1;
        mine[i] = id >= 0 && id < experts ? id : -1;
    }
    for (int e = threadIdx.x; e < WARPS * experts; e += THREADS) next[e] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER_WARP / 32; ++i) {
        if (mine[i] >= 0) atomicAdd(next + warp * experts + mine[i], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int begin = work[blockIdx.x * static_cast<int64_t>(experts) + e];
        for (int w = 0; w < WARPS; ++w) {
            const int here = next[w * experts + e];
            next[w * experts + e] = begin;
            begin += here;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER_WARP / 32; ++i) {
        const int64_t copy = first + i * 32 + lane;
        const unsigned same = __match_any_sync(0xffffffff, mine[i]);
        const int before = __popc(same & ((1u << lane) - 1));
        const int place = mine[i] < 0 ? -1 : next[warp * experts + mine[i]] + before;
        __syncwarp();
        if (mine[i] >= 0 && before == 0) next[warp * experts + mine[i]] += __popc(same);
        __syncwarp();
        if (copy < copies) position[copy] = place;
        if (place >= 0) source[place] = static_cast<int>(copy);
    }
}

// Rows.

__device__ __forceinline__ float prob_of(const float* probs, int64_t copy) {
    return probs ? probs[copy] : 1.0f;
}

template <typename P>
__device__ __forceinline__ float part_of_dot(const P* x, const P* z, int64_t packs) {
    float dot = 0.0f;
    for (int64_t i = threadIdx.x; i < packs; i += THREADS) {
        const P a = x[i], b = z[i];
#pragma unroll
        for (int c = 0; c < P::size; ++c) dot = fmaf(a[c], b[c], dot);
    }
    return dot;
}

// <x, z[at[j]]> of CHUNK copies, over the block, to dprobs[0 .. count).
__device__ __forceinline__ void store_dots(float (&dots)[CHUNK], float* dprobs, int count, float* shared) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
        const float dot = over_block<Sum>(dots[j], shared);
        if (threadIdx.x == 0 && j < count) dprobs[j] = dot;
    }
}

template <bool DOTS, typename P>
__global__ void __launch_bounds__(THREADS, DOTS ? 3 : 4)
    moe_permute_kernel(const P* __restrict__ x, P* __restrict__ out, const float* __restrict__ probs,
                       const int* __restrict__ position, const P* __restrict__ z, float* __restrict__ dprobs,
                       int topk, int64_t packs) {
    wait_for_previous_kernel();
    __shared__ float shared[32];
    x += blockIdx.x * packs;
    for (int first = 0; first < topk; first += CHUNK) {
        const int64_t copy = blockIdx.x * static_cast<int64_t>(topk) + first;
        int64_t at[CHUNK];
        float prob[CHUNK], dots[CHUNK] = {};
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            at[j] = first + j < topk ? position[copy + j] * packs : -1;  // -packs where it is dropped
            prob[j] = at[j] >= 0 ? prob_of(probs, copy + j) : 0.0f;
        }
        for (int64_t i = threadIdx.x; i < packs; i += THREADS) {
            const P from = x[i];
            P grad[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                if (DOTS && at[j] >= 0) grad[j] = load_pack(z + at[j] + i);
            }
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                if (at[j] < 0) continue;
                P to;
#pragma unroll
                for (int c = 0; c < P::size; ++c) {
                    to.set(c, from[c] * prob[j]);
                    if (DOTS) dots[j] = fmaf(from[c], grad[j][c], dots[j]);
                }
                out[at[j] + i] = to;
            }
        }
        if constexpr (DOTS) store_dots(dots, dprobs + copy, topk - first, shared);
    }
}

// A warp looks at 32 rows at once and zeroes those that no copy has.
template <typename P>
__global__ void __launch_bounds__(THREADS)
    moe_padding_kernel(P* __restrict__ out, const int* __restrict__ source, int64_t rows, int64_t packs) {
    wait_for_previous_kernel();
    const int lane = threadIdx.x % 32;
    const int64_t first = (blockIdx.x * static_cast<int64_t>(WARPS) + threadIdx.x / 32) * 32;
    unsigned empty = __ballot_sync(0xffffffff, first + lane < rows && source[first + lane] < 0);
    P zero;
#pragma unroll
    for (int c = 0; c < P::size; ++c) zero.set(c, 0.0f);
    for (; empty; empty &= empty - 1) {
        P* row = out + (first + __ffs(empty) - 1) * packs;
        for (int64_t i = lane; i < packs; i += 32) row[i] = zero;
    }
}

// The second pass, for dprobs, finds z in the cache.
template <bool DOTS, typename P>
__global__ void __launch_bounds__(THREADS, DOTS ? 3 : 4)
    moe_unpermute_kernel(const P* __restrict__ z, P* __restrict__ y, const float* __restrict__ probs,
                         const int* __restrict__ position, const P* __restrict__ x,
                         float* __restrict__ dprobs, int topk, int64_t packs) {
    wait_for_previous_kernel();
    const int64_t copy = blockIdx.x * static_cast<int64_t>(topk);
    y += blockIdx.x * packs;
    for (int64_t i = threadIdx.x; i < packs; i += THREADS) {
        float sum[P::size] = {};
        for (int first = 0; first < topk; first += CHUNK) {
            P from[CHUNK];
            float prob[CHUNK];
            bool here[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const int64_t at = first + j < topk ? position[copy + first + j] : -1;
                here[j] = at >= 0;
                if (here[j]) from[j] = z[at * packs + i];
                prob[j] = here[j] ? prob_of(probs, copy + first + j) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                if (!here[j]) continue;
#pragma unroll
                for (int c = 0; c < P::size; ++c) sum[c] = fmaf(from[j][c], prob[j], sum[c]);
            }
        }
        P to;
#pragma unroll
        for (int c = 0; c < P::size; ++c) to.set(c, sum[c]);
        y[i] = to;
    }
    if constexpr (DOTS) {
        __shared__ float shared[32];
        for (int first = 0; first < topk; first += CHUNK) {
            float dots[CHUNK] = {};
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const int at = first + j < topk ? position[copy + first + j] : -1;
                if (at >= 0) dots[j] = part_of_dot(x + blockIdx.x * packs, z + at * packs, packs);
            }
            store_dots(dots, dprobs + copy + first, topk - first, shared);
        }
    }
}

// Runs body(P{}, packs of a row): packs of 16 bytes where rows and addresses allow them.
template <typename Body>
void with_packs(std::uintptr_t addresses, int64_t h, int type, Body body) {
    with_type(type, [&](auto element) {
        using T = decltype(element);
        if (aligned(addresses) && h % Pack<T>::size == 0) {
            body(Pack<T>{}, h / Pack<T>::size);
        } else {
            body(Pack<T, 1>{}, h);
        }
    });
}

unsigned grid(int64_t blocks) {
    if (blocks > 0x7fffffff) throw std::runtime_error("permute: more than 2^31 blocks");
    return static_cast<unsigned>(blocks);
}

}  // namespace

void moe_route(Address ids, Address position, Address source, Address offsets, Address counts, Address work,
               int64_t copies, int64_t experts, int64_t multiple, int64_t rows, Address stream) {
    const int count = static_cast<int>(experts);
    const unsigned blocks = grid((copies + COPIES - 1) / COPIES);
    if (rows) cudaMemsetAsync(source, 0xff, rows * sizeof(int), stream);
    if (blocks) launch(moe_count_kernel, blocks, THREADS, 0, stream, ids, work, copies, count);
    launch(moe_offset_kernel, 1, EXPERTS, 0, stream, work, offsets, counts, static_cast<int>(blocks), count,
           static_cast<int>(multiple));
    if (blocks) {
        const size_t bytes = WARPS * experts * sizeof(int);  // 32 KB at most
        launch(moe_place_kernel, blocks, THREADS, bytes, stream, ids, work, position, source, copies, count);
    }
    check_launch("moe_route");
}

void moe_permute(Address x, Address out, Address probs, Address position, Address source, Address z,
                 Address dprobs, int64_t tokens, int64_t topk, int64_t rows, int64_t h, int type,
                 Address stream) {
    with_packs(x.value | out.value | z.value, h, type, [&](auto pack, int64_t packs) {
        using P = decltype(pack);
        const int k = static_cast<int>(topk);
        if (rows) {
            const unsigned blocks = grid((rows + THREADS - 1) / THREADS);
            launch(moe_padding_kernel<P>, blocks, THREADS, 0, stream, out, source, rows, packs);
        }
        if (tokens * topk == 0) return;
        auto* kernel = dprobs.value ? moe_permute_kernel<true, P> : moe_permute_kernel<false, P>;
        launch(kernel, grid(tokens), THREADS, 0, stream, x, out, probs, position, z, dprobs, k, packs);
    });
    check_launch("moe_permute");
}

void moe_unpermute(Address z, Address y, Address probs, Address position, Address x, Address dprobs,
                   int64_t tokens, int64_t topk, int64_t h, int type, Address stream) {
    if (tokens == 0) return;
    with_packs(z.value | y.value | x.value, h, type, [&](auto pack, int64_t packs) {
        using P = decltype(pack);
        auto* kernel = dprobs.value ? moe_unpermute_kernel<true, P> : moe_unpermute_kernel<false, P>;
        launch(kernel, grid(tokens), THREADS, 0, stream, z, y, probs, position, x, dprobs,
               static_cast<int>(topk), packs);
    });
    check_launch("moe_unpermute");
}
