// The mask of nanomegatron/ops/dropout.py, bit for bit: a hash of counters, computed wherever it is needed.
//
//     mix(i)     splitmix64's finalizer: i *= c1; i = (i ^ i >> 30) c2; i = (i ^ i >> 27) c3; i ^ i >> 31
//     row r of [s, b]     hash = mix(position[r / b] + mix(sample[r % b] + key))      key: of seed and site
//     column c            kept if bits 20 to 43 of mix(hash + c) are at least `least` = p 2^24
//
// A row's part costs two mixes, once a row and thread; a column's one, some 25 integer instructions a value.

#pragma once
#include "common.cuh"

struct Dropout {
    const int64_t *positions, *samples;  // [s], [b]; null: nothing is dropped
    int64_t batch;                       // b
    uint64_t key;
    unsigned least;
    float scale;  // of what is kept, 1 / (1 - p)
};

inline Dropout dropout_of(Address positions, Address samples, int64_t batch, int64_t key, int64_t least,
                          double scale) {
    return {positions,
            samples,
            batch,
            static_cast<uint64_t>(key),
            static_cast<unsigned>(least),
            static_cast<float>(scale)};
}

namespace {

constexpr uint64_t MIX_1 = 0x9E3779B97F4A7C15, MIX_2 = 0xBF58476D1CE4E5B9, MIX_3 = 0x94D049BB133111EB;

// The finalizer after its first product, and but for its last shift.
__device__ __forceinline__ uint64_t mix_inside(uint64_t x) {
    x = (x ^ (x >> 30)) * MIX_2;
    return (x ^ (x >> 27)) * MIX_3;
}

__device__ __forceinline__ uint64_t mix(uint64_t x) {
    x = mix_inside(x * MIX_1);
    return x ^ (x >> 31);
}

__device__ __forceinline__ uint64_t row_hash(const Dropout& d, int64_t row) {
    const uint64_t sample = d.samples[row % d.batch], position = d.positions[row / d.batch];
    return mix(position + mix(sample + d.key));
}

// x times `scale` or 0, for N neighbours from `column` on. A product, so that NaN and infinity stay NaN; and
// rounded by itself, so that a sum after it has the same bits in every kernel.
template <int N>
__device__ __forceinline__ void drop(float (&x)[N], const Dropout& d, uint64_t hash, int64_t column) {
    const uint64_t first = (hash + static_cast<uint64_t>(column)) * MIX_1;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint64_t mixed = mix_inside(first + i * MIX_1);
        const auto bits = static_cast<unsigned>(mixed >> 20) ^ static_cast<unsigned>(mixed >> 51);
        x[i] = __fmul_rn(x[i], (bits & 0xffffff) >= d.least ? d.scale : 0.0f);
    }
}

}  // namespace
