// What the kernels of the norms share: how a row is split over threads, sums over it, weights.

#pragma once
#include "common.cuh"

namespace {

constexpr int MOST = 512;   // threads of a block, and of a row
constexpr int PLAIN = 256;  // threads of a block of the plain kernels
constexpr int WARPS = MOST / 32;

// How rows are split: `group` threads a row, `per` packs each; `threads` a block. per 0: the plain kernel.
struct Split {
    int per = 0, group = PLAIN, threads = PLAIN;
};

// Up to 128 packs: part of a warp a row, `teams` threads a block; then a block a row, `per` packs a thread.
inline Split split(int64_t packs, int teams, int per) {
    if (packs <= 128) {
        Split s{packs <= 64 ? 2 : 4, 1, teams};
        while (s.group * s.per < packs) s.group *= 2;
        return s;
    }
    const int64_t group = (packs + per * 32 - 1) / (per * 32) * 32;
    return group <= MOST ? Split{per, static_cast<int>(group), static_cast<int>(group)} : Split{};
}

// Sums over the threads of a row; all threads of the block call it together. One barrier: what the last call
// left in `shared` is not overwritten before all threads have passed the next one.
template <int N>
__device__ __forceinline__ void over_group(float (&x)[N], int group, float (*shared)[N * WARPS], int& turn) {
    const auto over_lanes = [&](int lanes) {
        for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(0xffffffff, x[i], step);
        }
    };
    over_lanes(group < 32 ? group : 32);
    if (group <= 32) return;
    float* mine = shared[turn];
    turn ^= 1;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) mine[threadIdx.x / 32 * N + i] = x[i];
    }
    __syncthreads();
    const int warp = threadIdx.x % WARPS;
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = warp < group / 32 ? mine[warp * N + i] : 0.0f;
    over_lanes(WARPS);
}

// Weights or biases as fp32: one, and those of a pack.
template <typename T>
__device__ __forceinline__ float parameter(const void* from, bool wide, int64_t i) {
    return wide ? static_cast<const float*>(from)[i] : to_float(static_cast<const T*>(from)[i]);
}

template <typename T, int N>
__device__ __forceinline__ void parameters(float (&w)[N], const void* from, bool wide, int pack) {
    if (wide) {
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
            const float4 four = static_cast<const float4*>(from)[pack * (N / 4) + j];
            w[4 * j] = four.x, w[4 * j + 1] = four.y, w[4 * j + 2] = four.z, w[4 * j + 3] = four.w;
        }
    } else {
        Pack<T> some;
        *reinterpret_cast<uint4*>(&some) = static_cast<const uint4*>(from)[pack];
#pragma unroll
        for (int i = 0; i < N; ++i) w[i] = some[i];
    }
}

}  // namespace
