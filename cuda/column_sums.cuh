// Sums over the rows of a matrix, as a bias's gradient is: each block adds some rows, then `add_parts` the
// blocks' parts, always in the same order.
//
// A block has 32 packs of columns and walks down the rows, a warp a row: a thread has one pack of columns and
// keeps its sums in registers. The parts, a small workspace [parts, n], stay in the cache.

#pragma once
#include "common.cuh"

struct Targets {  // null where there is none
    Address first, second = {}, third = {};
};

// to.first[c] = sum of sums[part][c] over the first `blocks` of `parts` rows; with `add` it is added. The
// others likewise, each from another [parts, n] behind the one before. `type` is of all.
void add_parts(Targets to, const float* sums, int64_t parts, int64_t blocks, int64_t n, bool add, int type,
               Address stream);

namespace {

constexpr int ROWS = 8, ROW_THREADS = 32 * ROWS;  // of a block, at once
constexpr int BLOCKS = 2;                         // a multiprocessor: fewer have fewer parts to add up

// Calls use(row, load(row)) for the rows of this warp; AT_ONCE rows are loaded before the first is used, but
// for the last few.
template <int AT_ONCE, typename Load, typename Use>
__device__ __forceinline__ void walk_rows(int64_t rows, Load load, Use use) {
    const int64_t step = static_cast<int64_t>(gridDim.y) * ROWS;
    int64_t row = static_cast<int64_t>(blockIdx.y) * ROWS + threadIdx.x / 32;
    for (; row + (AT_ONCE - 1) * step < rows; row += AT_ONCE * step) {
        decltype(load(row)) loaded[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) loaded[i] = load(row + i * step);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) use(row + i * step, loaded[i]);
    }
    for (; row < rows; row += step) use(row, load(row));
}

// The column of packs of this thread.
__device__ __forceinline__ int64_t pack_of_thread() {
    return static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
}

// Writes the sums of this block, over its warps, to row blockIdx.y of the workspace. All threads call it.
template <int N>
__device__ __forceinline__ void write_part(const float (&sums)[N], float* workspace, int64_t n) {
    __shared__ float shared[ROWS][32 * N];
#pragma unroll
    for (int i = 0; i < N; ++i) shared[threadIdx.x / 32][i * 32 + threadIdx.x % 32] = sums[i];
    __syncthreads();
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * 32 * N;
    for (int c = threadIdx.x; c < 32 * N && begin + c < n; c += ROW_THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) sum += shared[row][c % N * 32 + c / N];
        workspace[blockIdx.y * n + begin + c] = sum;
    }
}

// Blocks of ROW_THREADS for `packs` columns of packs, and `down` of them down the rows.
inline dim3 over_rows(int64_t packs, int64_t down) {
    return dim3(static_cast<unsigned>((packs + 31) / 32), static_cast<unsigned>(down));
}

// How many blocks to put down the rows, `resident` of all a multiprocessor and at most `most`.
inline int64_t blocks_down(int64_t rows, int64_t packs, int resident, int64_t most) {
    const int64_t fit = static_cast<int64_t>(multiprocessors()) * resident / ((packs + 31) / 32);
    const int64_t needed = (rows + ROWS - 1) / ROWS, down = fit < needed ? fit : needed;
    return down < 1 ? 1 : down < most ? down : most;
}

// Runs body(P{}, packs of a row): packs of 16 bytes where rows and addresses allow them, else of one element.
template <typename Body>
void with_packs(int64_t n, int type, bool whole, Body body) {
    with_type(type, [&](auto element) {
        using T = decltype(element);
        if (whole && n % Pack<T>::size == 0) {
            body(Pack<T>{}, n / Pack<T>::size);
        } else {
            body(Pack<T, 1>{}, n);
        }
    });
}

}  // namespace
