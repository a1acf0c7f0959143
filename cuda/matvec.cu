// A matrix times one vector: a linear layer of a single token.
//
//     weight [m, k], x [k]   out[i] = sum_j weight[i][j] x[j]
//
// The naive loop, in fp32:  for i, j: out[i] += weight[i][j] * x[j]
//
// Each weight is read once, 2 bytes in 16 bits, and that takes as long as the memory needs. A warp has a row,
// with eight loads of 512 bytes in flight; x, which all warps read, comes from the caches. Sums are fp32 and
// always added in the same order.

#include "common.cuh"

namespace {

constexpr int WARPS = 8, DEEP = 8;  // of a block; packs that a thread loads before it uses the first

template <typename T, typename P>
__global__ void __launch_bounds__(32 * WARPS)
    matvec_rows(T* out, const P* weight, const P* x, int64_t m, int64_t packs) {
    wait_for_previous_kernel();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= m) return;
    const P* mine = weight + row * packs;
    float sums[P::size] = {};
    const auto add = [&](const P& weights, int64_t at) {
        const P values = load_pack(x + at);
#pragma unroll
        for (int i = 0; i < P::size; ++i) sums[i] += weights[i] * values[i];
    };
    int64_t at = threadIdx.x % 32;
    for (; at + 32 * (DEEP - 1) < packs; at += 32 * DEEP) {
        P loaded[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; ++i) loaded[i] = load_pack(mine + at + 32 * i);
#pragma unroll
        for (int i = 0; i < DEEP; ++i) add(loaded[i], at + 32 * i);
    }
    for (; at < packs; at += 32) add(load_pack(mine + at), at);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < P::size; ++i) sum += sums[i];
    sum = over_warp<Sum>(sum);
    if (threadIdx.x % 32 == 0) out[row] = from_float<T>(sum);
}

}  // namespace

void matvec(Address out, Address weight, Address x, int64_t m, int64_t k, int type, Address stream) {
    if (m == 0) return;
    const int64_t blocks = (m + WARPS - 1) / WARPS;
    if (blocks > INT32_MAX) throw std::runtime_error("matvec: more than 2^34 rows");
    with_type(type, [&](auto element) {
        using T = decltype(element);
        const bool whole = k % Pack<T>::size == 0 && aligned(weight.value) && aligned(x.value);
        const auto run = [&](auto pack) {
            using P = decltype(pack);
            launch(matvec_rows<T, P>, static_cast<unsigned>(blocks), 32 * WARPS, 0, stream, out, weight, x, m,
                   k / P::size);
        };
        whole ? run(Pack<T>{}) : run(Pack<T, 1>{});
    });
    check_launch("matvec");
}
