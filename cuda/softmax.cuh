// What softmax.cu and softmax_online.cuh share: which keys a row sees, exponentials, the order of rows.

#pragma once
#include <cfloat>

#include "common.cuh"

namespace {

constexpr float LOWEST = -FLT_MAX;  // finite, so that exp(-inf - LOWEST) is 0 where nothing is seen

// The greater, or NaN.
struct Top {
    __device__ static float zero() { return LOWEST; }
    __device__ static float of(float a, float b) {
#ifdef __CUDA_ARCH__
        float top;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(top) : "f"(a), "f"(b));
        return top;
#else
        return a > b || a != a ? a : b;  // the same, where kernels are tried without a GPU
#endif
    }
};

struct Problem {
    int64_t s, outer;  // outer: of the blocks' two dimensions the second, which a grid may be too small for
    int t, n, pairs;   // pairs of sample and head
    float scale;
    int causal, heads_first;
    int64_t window;               // of keys before the query; -1: no limit
    const unsigned char* hidden;  // null: nothing more
    int64_t hidden_b, hidden_n, hidden_s;
};

struct Row {
    int64_t index;    // among all [b, n, s]
    int first, last;  // keys seen are among first <= j < last
    const unsigned char* hidden;

    __device__ __forceinline__ bool reaches(int column, int size) const {
        return column < last && column + size > first;
    }
};

__device__ __forceinline__ Row row_of(const Problem& a, int64_t query, int pair) {
    const int64_t place = query + a.t - a.s, t = a.t;  // of the query among the keys, below t
    const int64_t last = a.causal ? max(place + 1, int64_t{0}) : t;
    const int64_t first = a.window < 0 ? 0 : min(max(place - a.window, int64_t{0}), last);
    Row row{pair * a.s + query, static_cast<int>(first), static_cast<int>(last), a.hidden};
    if (a.hidden) row.hidden += (pair / a.n) * a.hidden_b + (pair % a.n) * a.hidden_n + query * a.hidden_s;
    return row;
}

// N flags, bytes of 0 or 1, as bits. The product has those of a word side by side from bit 24 on.
template <int N>
__device__ __forceinline__ unsigned hidden_of(const unsigned char* flags) {
    if constexpr (N == 1) return *flags ? 1 : 0;
    unsigned bits = 0;
#pragma unroll
    for (int word = 0; word < N / 4; ++word) {
        bits |= (reinterpret_cast<const unsigned*>(flags)[word] * 0x01020408u >> 24 & 15) << 4 * word;
    }
    return bits;
}

// Which of the N keys from `column` on are seen, a bit each.
template <int N, bool MASKED>
__device__ __forceinline__ unsigned seen_of(const Row& row, int column) {
    if (!row.reaches(column, N)) return 0;
    unsigned seen = (1u << min(row.last - column, N)) - (1u << max(row.first - column, 0));
    if constexpr (MASKED) {
        seen &= ~hidden_of<N>(row.hidden + column);
    }
    return seen;
}

// Runs body(row) for all rows of a block: one, or one a warp.
template <typename Body>
__device__ __forceinline__ void for_rows(const Problem& a, Body body) {
    for (int64_t y = blockIdx.y; y < a.outer; y += gridDim.y) {
        const int64_t block = a.heads_first ? y : blockIdx.x;
        const int pair = static_cast<int>(a.heads_first ? blockIdx.x : y);
        const int64_t query = a.s - 1 - (block * blockDim.y + threadIdx.y);  // the longest causal rows first
        if (query >= 0) body(row_of(a, query, pair));
    }
}

// e^x, below 2^-126 as 0: three instructions, where __expf has six.
__device__ __forceinline__ float exp_of(float x) {
    constexpr float LOG2_E = 1.4426950408889634f;
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2_E));
    return y;
#else
    return exp2f(x * LOG2_E);
#endif
}

}  // namespace
