// Softmax of rows that do not fit in registers; softmax.cu says what the letters are.
//
//     forward     one read for maximum and sum: each thread has a maximum so far, and a sum that fits it
//     both        a second read, of what the L2 still has, for the result

#pragma once
#include "softmax.cuh"

namespace {

constexpr int ONLINE_THREADS = 512, UNROLL = 4;

// Runs body(pack, its place among UNROLL) for the packs begin <= pack < end, UNROLL of a thread at a time.
template <typename Load, typename Body>
__device__ __forceinline__ void for_packs(int begin, int end, Load load, Body body) {
    for (int pack = begin + threadIdx.x; pack < end; pack += UNROLL * ONLINE_THREADS) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (pack + u * ONLINE_THREADS < end) load(pack + u * ONLINE_THREADS, u);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (pack + u * ONLINE_THREADS < end) body(pack + u * ONLINE_THREADS, u);
        }
    }
}

template <typename P, bool MASKED>
__global__ void __launch_bounds__(ONLINE_THREADS)
    softmax_forward_online(P* out, float* lse, const P* x, Problem a) {
    wait_for_previous_kernel();
    constexpr int N = P::size;
    __shared__ float shared[32];
    for_rows(a, [&](const Row& row) {
        const P* from = x + row.index * (a.t / N);
        P* to = out + row.index * (a.t / N);
        float mine = LOWEST, sum = 0.0f;  // of this thread: the maximum so far, and the sum of exp(z - mine)
        P packs[UNROLL];
        unsigned seen[UNROLL] = {};
        const auto scaled = [&](int u, int i) {
            return seen[u] >> i & 1 ? packs[u][i] * a.scale : -INFINITY;
        };
        for_packs(
            row.first / N, (row.last + N - 1) / N,
            [&](int pack, int u) {
                packs[u] = from[pack];
                seen[u] = seen_of<N, MASKED>(row, pack * N);
            },
            [&](int, int u) {
                float top = mine;
#pragma unroll
                for (int i = 0; i < N; ++i) top = Top::of(top, scaled(u, i));
                sum *= exp_of(mine - top);
#pragma unroll
                for (int i = 0; i < N; ++i) sum += exp_of(scaled(u, i) - top);
                mine = top;
            });
        const float top = over_block<Top>(mine, shared);
        sum = over_block<Sum>(sum * exp_of(mine - top), shared);
        const float inverse = 1.0f / sum;
        if (threadIdx.x == 0) lse[row.index] = top == INFINITY ? top : top + logf(sum);
        for_packs(
            0, a.t / N,
            [&](int pack, int u) {
                seen[u] = seen_of<N, MASKED>(row, pack * N);
                if (row.reaches(pack * N, N)) packs[u] = load_pack(from + pack);
            },
            [&](int pack, int u) {
                P y;
#pragma unroll
                for (int i = 0; i < N; ++i) y.set(i, exp_of(scaled(u, i) - top) * inverse);
                to[pack] = y;
            });
    });
}

template <typename P, bool MASKED>
__global__ void __launch_bounds__(ONLINE_THREADS)
    softmax_backward_online(P* dx, const P* grad, const P* y, Problem a) {
    wait_for_previous_kernel();
    constexpr int N = P::size;
    __shared__ float shared[32];
    for_rows(a, [&](const Row& row) {
        const int64_t start = row.index * (a.t / N);
        float sum = 0.0f;
        P dys[UNROLL], ys[UNROLL];
        unsigned seen[UNROLL] = {};
        const auto load = [&](int pack, int u) {
            seen[u] = seen_of<N, MASKED>(row, pack * N);
            if (row.reaches(pack * N, N)) {
                dys[u] = grad[start + pack];
                ys[u] = y[start + pack];
            }
        };
        for_packs(row.first / N, (row.last + N - 1) / N, load, [&](int, int u) {
#pragma unroll
            for (int i = 0; i < N; ++i) sum += seen[u] >> i & 1 ? dys[u][i] * ys[u][i] : 0.0f;
        });
        sum = over_block<Sum>(sum, shared);
        for_packs(0, a.t / N, load, [&](int pack, int u) {
            P dz;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                dz.set(i, seen[u] >> i & 1 ? a.scale * ys[u][i] * (dys[u][i] - sum) : 0.0f);
            }
            dx[start + pack] = dz;
        });
    });
}

}  // namespace
