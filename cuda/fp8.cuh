// FP8 for kernels: values to bytes and back, maxima of |x|, a scale from such a maximum; eight neighbours at
// once, and tiles whose columns are turned into rows.
//
// A maximum of |x| is taken over its bits as integers: the same in any order, also between blocks by atomics,
// and NaN is the largest.

#pragma once
#include <type_traits>

#include "common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int TILE = 128, PIECES = TILE / 8;  // a tile is 128 x 128, 8 x 8 a thread

__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Over a block of THREADS; every thread gets the result. Called once a kernel.
__device__ __forceinline__ unsigned largest_of_block(unsigned bits) {
    __shared__ unsigned warps[THREADS / 32];
    bits = __reduce_max_sync(0xffffffff, bits);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
    return __reduce_max_sync(0xffffffff, warps[threadIdx.x % (THREADS / 32)]);
}

// Raises *amax, which is at least +0, to a block's largest. Most blocks need no update, and a read that shows
// this is cheaper than an atomic.
__device__ __forceinline__ void raise_to(unsigned* amax, unsigned largest) {
    if (threadIdx.x == 0 && largest > *static_cast<volatile unsigned*>(amax)) atomicMax(amax, largest);
}

__device__ __forceinline__ float scale_for(float amax, float limit, bool power_of_two, float otherwise) {
    if (!(amax > 0.0f && amax < INFINITY)) return otherwise;
    const float scale = fminf(fmaxf(limit / amax, 0x1p-126f), 0x1p126f);
    return power_of_two ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u) : scale;
}

// Hopper and Ada have an instruction for it; before them it is a long function, called and not copied.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define FP8_CONVERSION __noinline__
#else
#define FP8_CONVERSION __forceinline__
#endif

template <int FORMAT>
__device__ FP8_CONVERSION unsigned two(float a, float b) {  // a in the low byte
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE,
                                    FORMAT == E4M3 ? __NV_E4M3 : __NV_E5M2);
}

template <int FORMAT>
__device__ __forceinline__ unsigned four(float a, float b, float c, float d) {
    return two<FORMAT>(a, b) | two<FORMAT>(c, d) << 16;
}

template <int FORMAT>
__device__ FP8_CONVERSION unsigned two_halves(unsigned pair) {  // fp16 of two bytes, that of the low one low
    const auto bytes = static_cast<__nv_fp8x2_storage_t>(pair);
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(bytes, FORMAT == E4M3 ? __NV_E4M3 : __NV_E5M2);
    return halves.x | static_cast<unsigned>(halves.y) << 16;
}

// Eight neighbours.

template <typename T>
struct Eight {  // neighbours of one row, as they lie in memory
    unsigned words[2 * sizeof(T)];

    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (sizeof(T) == 4) return __uint_as_float(words[i]);
        const unsigned word = words[i / 2];
        if constexpr (std::is_same_v<T, __nv_bfloat16>)
            return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
        return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 ? word >> 16 : word)));
    }
};

template <int FORMAT>
struct Coded {  // FP8 that stands for itself times an inverse
    uint8_t byte;
};

template <int FORMAT>
struct Eight<Coded<FORMAT>> {
    uint2 bytes;
    float inverse;

    __device__ __forceinline__ float operator[](int i) const {
        const unsigned word = i < 4 ? bytes.x : bytes.y;
        const unsigned halves = two_halves<FORMAT>(i / 2 % 2 ? word >> 16 : word & 0xffffu);
        const unsigned half = i % 2 ? halves >> 16 : halves & 0xffffu;
        return __half2float(__ushort_as_half(static_cast<unsigned short>(half))) * inverse;
    }
};

// Whole: loads of 16 bytes. Else elements one by one, of the type that `type` names, into floats.
template <bool WHOLE, typename T>
__device__ __forceinline__ Eight<T> load_eight(const void* from, int type, int64_t at, int64_t inside) {
    Eight<T> eight = {};
    if (inside <= 0) return eight;
    if constexpr (WHOLE) {
#pragma unroll
        for (int p = 0; p < static_cast<int>(sizeof(T)) / 2; ++p) {
            const uint4 four =
                load_pack(reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at) + p);
            eight.words[4 * p] = four.x, eight.words[4 * p + 1] = four.y;
            eight.words[4 * p + 2] = four.z, eight.words[4 * p + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= inside) continue;
            const float x = type == FP32   ? static_cast<const float*>(from)[at + i]
                            : type == BF16 ? to_float(static_cast<const __nv_bfloat16*>(from)[at + i])
                                           : to_float(static_cast<const __half*>(from)[at + i]);
            eight.words[i] = __float_as_uint(x);
        }
    }
    return eight;
}

// The first `count` of eight bytes, or all of them at once where they are aligned.
template <bool WHOLE>
__device__ __forceinline__ uint2 load_bytes(const uint8_t* from, int64_t count) {
    if constexpr (WHOLE) return count > 0 ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
    unsigned words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < count) words[i / 4] |= static_cast<unsigned>(from[i]) << (i % 4 * 8);
    }
    return make_uint2(words[0], words[1]);
}

template <typename T>
__device__ __forceinline__ unsigned two_of(float low, float high) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    }
}

// To the type that a tensor has: T, or where that is only float for all, the one that is named. A kernel that
// makes FP8 rounds what it has computed first, as another kernel would have stored it.
template <bool WHOLE, typename T>
__device__ __forceinline__ Eight<T> rounded(const float (&y)[8], int type) {
    Eight<T> eight;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if constexpr (sizeof(T) == 4) {
            const float x = WHOLE || type == FP32 ? y[i]
                            : type == BF16        ? to_float(from_float<__nv_bfloat16>(y[i]))
                                                  : to_float(from_float<__half>(y[i]));
            eight.words[i] = __float_as_uint(x);
        } else if (i % 2 == 0) {
            eight.words[i / 2] = two_of<T>(y[i], y[i + 1]);
        }
    }
    return eight;
}

struct Source {  // a matrix; of FP8 with an inverse for 128 neighbours of a row, `down` and `across` apart
    const void* data;
    int type;
    const float* inverse;  // null where it is not FP8
    int64_t down, across;
};

// Of a matrix [m, k], zeros outside it.
template <bool WHOLE, typename T>
__device__ __forceinline__ Eight<T> load_eight(const Source& from, int64_t row, int64_t column, int64_t m,
                                               int64_t k) {
    const int64_t at = row * k + column, inside = row < m ? k - column : 0;
    if constexpr (sizeof(T) == 1) {
        Eight<T> eight = {};
        eight.bytes = load_bytes<WHOLE>(static_cast<const uint8_t*>(from.data) + at, inside);
        if (inside > 0) eight.inverse = from.inverse[row * from.down + column / TILE * from.across];
        return eight;
    } else {
        return load_eight<WHOLE, T>(from.data, from.type, at, inside);
    }
}

// The first `count` of N bytes, or all of them at once where they are aligned.
template <bool WHOLE, typename V>
__device__ __forceinline__ void store_bytes(uint8_t* to, V bytes, int64_t count) {
    if constexpr (WHOLE) {
        *reinterpret_cast<V*>(to) = bytes;
    } else {
        const unsigned* words = reinterpret_cast<const unsigned*>(&bytes);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(V)); ++i) {
            if (i < count) to[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
        }
    }
}

template <int FORMAT, typename T>
__device__ __forceinline__ uint2 cast_eight(const Eight<T>& x, float s) {
    return make_uint2(four<FORMAT>(x[0] * s, x[1] * s, x[2] * s, x[3] * s),
                      four<FORMAT>(x[4] * s, x[5] * s, x[6] * s, x[7] * s));
}

// And raises `largest` to their maximum.
template <int FORMAT, typename T>
__device__ __forceinline__ uint2 cast_eight(const Eight<T>& x, float s, unsigned& largest) {
    if constexpr (sizeof(T) == 2) {  // of two at once, as integers
        unsigned both = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) both = __vmaxu2(both, x.words[i] & 0x7fff7fffu);
        const Eight<T> one = {{max(both >> 16, both & 0xffffu)}};
        largest = max(largest, bits_of(one[0]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = max(largest, bits_of(x[i]));
    }
    return cast_eight<FORMAT>(x, s);
}

// Tiles.

// The maximum of a row of the tile, for all 16 threads that have pieces of it.
template <typename T>
__device__ __forceinline__ unsigned largest_of_row(const Eight<T>& x) {
    unsigned largest = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) largest = max(largest, bits_of(x[c]));
#pragma unroll
    for (int step = PIECES / 2; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
    }
    return largest;
}

// The maximum of each column of the tile: thread i < 128 gets that of column i. Called once per kernel.
template <typename T>
__device__ __forceinline__ unsigned largest_of_column(const Eight<T> (&x)[8]) {
    __shared__ unsigned largest_of[THREADS / 32][TILE];
    const int across = threadIdx.x % PIECES, thread = threadIdx.x;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        unsigned largest = 0;
#pragma unroll
        for (int r = 0; r < 8; ++r) largest = max(largest, bits_of(x[r][c]));
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, PIECES));
        if (thread % 32 < PIECES) largest_of[thread / 32][across * 8 + c] = largest;
    }
    __syncthreads();
    unsigned largest = 0;
    if (thread < TILE) {
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; ++warp) largest = max(largest, largest_of[warp][thread]);
    }
    return largest;
}

// rows[i] holds four bytes of row i, turned in place: then of column i.
__device__ __forceinline__ void turn(unsigned (&rows)[4]) {
    const unsigned a = __byte_perm(rows[0], rows[1], 0x5140), b = __byte_perm(rows[0], rows[1], 0x7362);
    const unsigned c = __byte_perm(rows[2], rows[3], 0x5140), d = __byte_perm(rows[2], rows[3], 0x7362);
    rows[0] = __byte_perm(a, c, 0x5410), rows[1] = __byte_perm(a, c, 0x7632);
    rows[2] = __byte_perm(b, d, 0x5410), rows[3] = __byte_perm(b, d, 0x7632);
}

// q[r] is row r of a thread's 8 x 8, columns 8 * across ..., rows 8 * down ... of the tile that begins at
// (row, column); flip gets the tile's columns, 128 bytes each. The piece of 8 rows `down` of a column lies at
// down ^ across.
template <bool WHOLE>
__device__ __forceinline__ void store_flipped(uint8_t* flip, const uint2 (&q)[8], uint2* tile, int64_t row,
                                              int64_t column, int64_t m, int64_t k) {
    const int across = threadIdx.x % PIECES, down = threadIdx.x / PIECES;
    unsigned words[4][4] = {{q[0].x, q[1].x, q[2].x, q[3].x},
                            {q[4].x, q[5].x, q[6].x, q[7].x},
                            {q[0].y, q[1].y, q[2].y, q[3].y},
                            {q[4].y, q[5].y, q[6].y, q[7].y}};
#pragma unroll
    for (int i = 0; i < 4; ++i) turn(words[i]);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const uint2 piece = make_uint2(words[c / 4 * 2][c % 4], words[c / 4 * 2 + 1][c % 4]);
        tile[(across * 8 + c) * PIECES + (down ^ across)] = piece;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE * PIECES / 2 / THREADS; ++i) {  // 16 bytes at a time, two pieces
        const int number = i * THREADS + threadIdx.x, part = number % (PIECES / 2), c = number / (PIECES / 2);
        uint4 bytes = reinterpret_cast<const uint4*>(tile)[c * (PIECES / 2) + (part ^ (c / 8 / 2))];
        if (c / 8 % 2) bytes = make_uint4(bytes.z, bytes.w, bytes.x, bytes.y);
        const int64_t r = row + part * 16;
        if (column + c < k && r < m) store_bytes<WHOLE>(flip + (column + c) * m + r, bytes, m - r);
    }
}

// Launches.

// Calls body(element, whole) with the type of what a thread loads, and whether it loads packs. FORMAT: of x
// where that is FP8, 0 if it never is.
template <int FORMAT, typename Body>
void with_source(const Source& x, bool whole, Body body) {
    if constexpr (FORMAT != 0) {
        if (x.inverse && whole) return body(Coded<FORMAT>{}, std::true_type{});
        if (x.inverse) return body(Coded<FORMAT>{}, std::false_type{});
    }
    if (!whole) return body(float{}, std::false_type{});
    with_type(x.type, [&](auto element) { body(element, std::true_type{}); });
}

struct Tiles {  // of a matrix [m, k]
    unsigned count, per_row;

    Tiles(int64_t m, int64_t k) {
        const int64_t across = (k + TILE - 1) / TILE, all = (m + TILE - 1) / TILE * across;
        if (all > 0x7fffffff) throw std::runtime_error("FP8: more than 2^31 tiles");
        count = static_cast<unsigned>(all), per_row = static_cast<unsigned>(across);
    }
};

// Whether rows of [m, k], and of the transposed output if there is one, are packs at these addresses.
inline bool whole_rows(std::uintptr_t places, int64_t m, int64_t k, bool flip) {
    return aligned(places) && k % 8 == 0 && (!flip || m % 16 == 0);
}

}  // namespace
