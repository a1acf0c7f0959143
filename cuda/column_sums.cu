// Sums over the rows of a matrix, in fp32: the gradient of a bias.
//
//     out [n] = sum over rows of x [rows, n], or with `add` out += that sum
//
// The naive loop, in fp32:  for r, c:  out[c] += x[r][c]
//
// Bytes in 16 bits a value: 2. Two launches: column_sums.cuh.

#include "column_sums.cuh"

namespace {

template <typename P>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS)
    sum_rows(float* __restrict__ workspace, const P* __restrict__ x, int64_t rows, int64_t packs) {
    wait_for_previous_kernel();
    const int64_t pack = pack_of_thread();
    float sums[P::size] = {};
    if (pack < packs) {
        walk_rows<8>(
            rows, [&](int64_t row) { return load_pack(x + row * packs + pack); },
            [&](int64_t, const P& values) {
#pragma unroll
                for (int i = 0; i < P::size; ++i) sums[i] += values[i];
            });
    }
    write_part(sums, workspace, packs * P::size);
}

// 32 columns a block of 32 x 32 threads.
template <typename T>
__global__ void __launch_bounds__(1024) add_up_parts(T* first, T* second, T* third, const float* sums,
                                                     int64_t parts, int64_t blocks, int64_t n, int add) {
    wait_for_previous_kernel();
    __shared__ float shared[32][33];
    const int x = threadIdx.x % 32, y = threadIdx.x / 32;
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * 32;
    float sum = 0.0f;
    if (begin + x < n) {
        const float* from = sums + blockIdx.y * parts * n + begin + x;
#pragma unroll 8
        for (int part = y; part < blocks; part += 32) sum += from[part * n];
    }
    shared[y][x] = sum;
    __syncthreads();
    sum = over_warp<Sum>(shared[x][y]);
    if (x == 0 && begin + y < n) {
        T* to = (blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third) + begin + y;
        *to = from_float<T>(add ? to_float(*to) + sum : sum);
    }
}

}  // namespace

void add_parts(Targets to, const float* sums, int64_t parts, int64_t blocks, int64_t n, bool add, int type,
               Address stream) {
    const dim3 grid(static_cast<unsigned>((n + 31) / 32), to.third.value ? 3 : to.second.value ? 2 : 1);
    with_type(type, [&](auto element) {
        using T = decltype(element);
        launch(add_up_parts<T>, grid, 1024, 0, stream, to.first, to.second, to.third, sums, parts, blocks, n,
               add);
    });
    check_launch("add_parts");
}

void column_sums(Address out, Address workspace, Address x, int64_t rows, int64_t n, int64_t parts, int add,
                 int type, int out_type, Address stream) {
    if (n == 0) return;
    if (rows > 0) {
        with_packs(n, type, aligned(x.value), [&](auto pack, int64_t packs) {
            launch(sum_rows<decltype(pack)>, over_rows(packs, parts), ROW_THREADS, 0, stream, workspace, x,
                   rows, packs);
        });
        check_launch("column_sums");
    }
    add_parts({out}, workspace, parts, rows > 0 ? parts : 0, n, add, out_type, stream);
}
