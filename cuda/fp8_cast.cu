// Casts to FP8, row-major, transposed, or both from one read, with scales a tensor or a block.
//
//     q [m, k] = fp8(x * scale), saturating, to nearest even; NaN stays NaN     flip [k, m] = q^T
//     scale = limit / amax, limit = largest value of the format / 2^margin
//     inverse = 1 / scale, so that x ~ q * inverse
//     scales are within 2^-126 ... 2^126, both normal numbers; rounded down to a power of two on request
//
// The naive loop, in fp32:  for r, c:  q[r][c] = flip[c][r] = fp8(x[r][c] * scale)
//                           amax = max(amax, |x[r][c]|)
//
// A block's scale comes from its own amax, 1 if that is zero or not finite (arXiv 2412.19437, section 3.3):
//     lines      1 x 128 along the contracted dim: along k for q, along m for flip, which are cast apart;
//                inverse [k/128, m] and [m/128, k] in memory, as cuBLASLt has them (outer dim contiguous)
//     squares    128 x 128, one for both; inverse [m/128, k/128] and [k/128, m/128], rows a `stride` apart
//
// x may be FP8 itself, with an inverse of each row or block: then x * inverse is cast; if it has a single
// scale, its bytes are transposed unchanged.
//
// Bytes an element of 16 bits: amax 2, cast 3, cast with its transpose 4; an FP8 one transposed 2.
//
// A tile is 128 x 128 in registers, a thread has 8 x 8. Rows leave from there, 128 bytes each; columns are
// turned in registers 8 x 8 and pass shared memory in pieces of 8 bytes, whose place is XORed so that no
// banks conflict.

#include "fp8.cuh"

namespace {

enum Scales { TENSOR = 0, LINES = 1, SQUARES = 2 };

// One scale, one row-major output or none (FORMAT 0: amax alone): x is a line of n elements.

template <int FORMAT>
constexpr int UNROLL = FORMAT == 0 ? 4 : 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 890
constexpr int RESIDENT = 6;  // blocks of a multiprocessor: 1536 threads
#else
constexpr int RESIDENT = 8;
#endif

template <int FORMAT, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : RESIDENT)
    fp8_line(uint8_t* __restrict__ out, const void* from, int type, const float* __restrict__ scale,
             unsigned* amax, int64_t n) {
    wait_for_previous_kernel();
    constexpr int BATCH = UNROLL<FORMAT>;
    const float s = FORMAT == 0 ? 1.0f : *scale;
    const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS * BATCH, end = WHOLE ? n / 8 * 8 : n;
    unsigned largest = 0;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) * BATCH + threadIdx.x; i * 8 < end;
         i += step) {
        Eight<T> x[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int64_t at = (i + u * THREADS) * 8;
            x[u] = load_eight<WHOLE, T>(from, type, at, end - at);
        }
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int64_t at = (i + u * THREADS) * 8;
#pragma unroll
            for (int j = 0; j < 8; ++j) largest = max(largest, bits_of(x[u][j]));
            if constexpr (FORMAT != 0) {
                if (at < end) store_bytes<WHOLE>(out + at, cast_eight<FORMAT>(x[u], s), end - at);
            }
        }
    }
    if (WHOLE && end < n && blockIdx.x == 0 && threadIdx.x == 0) {  // the last seven at most
        const Eight<float> x = load_eight<false, float>(from, type, end, n - end);
        for (int j = 0; j < 8; ++j) largest = max(largest, bits_of(x[j]));
        if constexpr (FORMAT != 0) store_bytes<false>(out + end, cast_eight<FORMAT>(x, s), n - end);
    }
    if (amax == nullptr) return;
    raise_to(amax, largest_of_block(largest));
}

// Tiles.

struct Cast {  // what a tile gives, null where not wanted
    uint8_t *row, *flip;
    float *row_inverse, *flip_inverse;
    int64_t row_stride, flip_stride;  // of the inverses of squares
    const float* scale;
    unsigned* amax;
    int64_t m, k;
    float limit;
    bool power_of_two;
};

// 1 x 128: the scale of each row of the tile, then the row.
template <int FORMAT, bool WHOLE, typename T>
__device__ __forceinline__ void cast_rows(const Cast& to, const Eight<T> (&x)[8], int64_t row,
                                          int64_t column) {
    const int across = threadIdx.x % PIECES;
    const int64_t first = row + threadIdx.x / PIECES * 8, place = column + across * 8;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const float amax = __uint_as_float(largest_of_row(x[r]));
        const float s = scale_for(amax, to.limit, to.power_of_two, 1.0f);
        if (first + r >= to.m) continue;
        if (across == r) to.row_inverse[column / TILE * to.m + first + r] = 1.0f / s;
        const uint2 q = cast_eight<FORMAT>(x[r], s);
        if (place < to.k) store_bytes<WHOLE>(to.row + (first + r) * to.k + place, q, to.k - place);
    }
}

// 128 x 1: the scale of each column of the tile, in s[8] those of this thread.
template <typename T>
__device__ __forceinline__ void column_scales(const Cast& to, const Eight<T> (&x)[8], int64_t row,
                                              int64_t column, float (&s)[8]) {
    __shared__ float scales[TILE];
    const int across = threadIdx.x % PIECES, thread = threadIdx.x;
    const float amax = __uint_as_float(largest_of_column(x));
    if (thread < TILE) {
        scales[thread] = scale_for(amax, to.limit, to.power_of_two, 1.0f);
        if (column + thread < to.k)
            to.flip_inverse[row / TILE * to.k + column + thread] = 1.0f / scales[thread];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; ++c) s[c] = scales[across * 8 + c];
}

// The scale of the whole tile, given or of its amax.
template <int SCALES, typename T>
__device__ __forceinline__ float tile_scale(const Cast& to, const Eight<T> (&x)[8], int64_t row,
                                            int64_t column) {
    const float given = SCALES == TENSOR ? *to.scale : 1.0f;
    if (SCALES == TENSOR && to.amax == nullptr) return given;
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) largest = max(largest, bits_of(x[i / 8][i % 8]));
    largest = largest_of_block(largest);
    if constexpr (SCALES == TENSOR) {
        raise_to(to.amax, largest);
        return given;
    }
    const float s = scale_for(__uint_as_float(largest), to.limit, to.power_of_two, 1.0f);
    const int64_t down = row / TILE, across = column / TILE;
    if (threadIdx.x == 0 && to.row_inverse) to.row_inverse[down * to.row_stride + across] = 1.0f / s;
    if (threadIdx.x == 0 && to.flip_inverse) to.flip_inverse[across * to.flip_stride + down] = 1.0f / s;
    return s;
}

constexpr int blocks_of(int scales, int bytes) {
    return bytes == 4 ? 2 : scales == LINES && bytes == 2 ? 3 : 4;
}

template <int SCALES, int FORMAT, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, blocks_of(SCALES, sizeof(T)))
    fp8_tiles(const Source from, const Cast to, unsigned per_row) {
    wait_for_previous_kernel();
    __shared__ __align__(16) uint2 tile[TILE * PIECES];
    const int64_t row = blockIdx.x / per_row * static_cast<int64_t>(TILE);
    const int64_t column = blockIdx.x % per_row * static_cast<int64_t>(TILE);
    const int64_t first = row + threadIdx.x / PIECES * 8, place = column + threadIdx.x % PIECES * 8;
    Eight<T> x[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) x[r] = load_eight<WHOLE, T>(from, first + r, place, to.m, to.k);

    float s[8];
    if constexpr (SCALES == LINES) {
        if (to.row) cast_rows<FORMAT, WHOLE>(to, x, row, column);
        if (to.flip == nullptr) return;
        column_scales(to, x, row, column, s);
    } else {
        s[0] = tile_scale<SCALES>(to, x, row, column);
#pragma unroll
        for (int c = 1; c < 8; ++c) s[c] = s[0];
    }
    uint2 q[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        q[r] = make_uint2(four<FORMAT>(x[r][0] * s[0], x[r][1] * s[1], x[r][2] * s[2], x[r][3] * s[3]),
                          four<FORMAT>(x[r][4] * s[4], x[r][5] * s[5], x[r][6] * s[6], x[r][7] * s[7]));
        const bool inside = first + r < to.m && place < to.k;
        if (SCALES != LINES && to.row && inside) {
            store_bytes<WHOLE>(to.row + (first + r) * to.k + place, q[r], to.k - place);
        }
    }
    if (to.flip) store_flipped<WHOLE>(to.flip, q, tile, row, column, to.m, to.k);
}

template <bool WHOLE>
__global__ void __launch_bounds__(THREADS, 6)
    fp8_transposed(uint8_t* flip, const uint8_t* x, int64_t m, int64_t k, unsigned per_row) {
    wait_for_previous_kernel();
    __shared__ __align__(16) uint2 tile[TILE * PIECES];
    const int64_t row = blockIdx.x / per_row * static_cast<int64_t>(TILE);
    const int64_t column = blockIdx.x % per_row * static_cast<int64_t>(TILE);
    const int64_t first = row + threadIdx.x / PIECES * 8, place = column + threadIdx.x % PIECES * 8;
    uint2 q[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        q[r] = load_bytes<WHOLE>(x + (first + r) * k + place, first + r < m ? k - place : 0);
    }
    store_flipped<WHOLE>(flip, q, tile, row, column, m, k);
}

// Launches.

// For the amax only, few blocks, with fewer atomics; for a cast as many as there are batches.
template <int FORMAT>
void launch_line(Address out, Address x, Address scale, Address amax, int64_t n, int type, Address stream) {
    constexpr int64_t BATCH = 8 * THREADS * UNROLL<FORMAT>;
    const unsigned blocks = blocks_for((n + BATCH - 1) / BATCH, FORMAT == 0 ? 8 : INT32_MAX / 1024);
    auto run = [&](auto* kernel) {
        launch(kernel, blocks, THREADS, 0, stream, out, x, type, scale, amax, n);
    };
    if (!aligned(x.value | out.value)) return run(fp8_line<FORMAT, false, float>);
    with_type(type, [&](auto element) { run(fp8_line<FORMAT, true, decltype(element)>); });
}

template <int SCALES, int FORMAT>
void launch_tiles(const Source& x, const Cast& to, bool whole, Address stream) {
    const Tiles tiles(to.m, to.k);
    with_source<SCALES == TENSOR ? 0 : FORMAT>(x, whole, [&](auto element, auto packs) {
        auto* kernel = fp8_tiles<SCALES, FORMAT, decltype(packs)::value, decltype(element)>;
        launch(kernel, tiles.count, THREADS, 0, stream, x, to, tiles.per_row);
    });
}

template <int SCALES>
void launch_tiles(const Source& x, const Cast& to, int format, bool whole, Address stream) {
    if (format == E4M3) {
        launch_tiles<SCALES, E4M3>(x, to, whole, stream);
    } else {
        launch_tiles<SCALES, E5M2>(x, to, whole, stream);
    }
}

}  // namespace

void fp8_amax(Address x, Address amax, int64_t n, int type, Address stream) {
    if (n == 0) return;
    launch_line<0>({}, x, {}, amax, n, type, stream);
    check_launch("fp8_amax");
}

void fp8_cast(Address x, Address row, Address flip, Address scale, Address amax, int64_t m, int64_t k,
              int type, int format, Address stream) {
    if (m * k == 0) return;
    if (flip.value) {
        const Cast to = {row, flip, nullptr, nullptr, 0, 0, scale, amax, m, k, 0.0f, false};
        const bool whole = whole_rows(x.value | row.value | flip.value, m, k, true);
        launch_tiles<TENSOR>({x, type, nullptr, 0, 0}, to, format, whole, stream);
    } else if (format == E4M3) {
        launch_line<E4M3>(row, x, scale, amax, m * k, type, stream);
    } else {
        launch_line<E5M2>(row, x, scale, amax, m * k, type, stream);
    }
    check_launch("fp8_cast");
}

void fp8_cast_blocks(Address x, Address inverse, int64_t down, int64_t across, Address row,
                     Address row_inverse, Address flip, Address flip_inverse, int64_t m, int64_t k,
                     int64_t row_stride, int64_t flip_stride, int squares, int power_of_two, int type,
                     int format, Address stream) {
    if (m * k == 0) return;
    const Cast to = {row,
                     flip,
                     row_inverse,
                     flip_inverse,
                     row_stride,
                     flip_stride,
                     nullptr,
                     nullptr,
                     m,
                     k,
                     format == E4M3 ? 448.0f : 57344.0f,
                     power_of_two != 0};
    const Source from = {x, type, inverse, down, across};
    const bool whole = whole_rows(x.value | row.value | flip.value, m, k, flip.value != 0);
    if (squares) {
        launch_tiles<SQUARES>(from, to, format, whole, stream);
    } else {
        launch_tiles<LINES>(from, to, format, whole, stream);
    }
    check_launch("fp8_cast_blocks");
}

void fp8_transpose(Address x, Address flip, int64_t m, int64_t k, Address stream) {
    if (m * k == 0) return;
    const Tiles tiles(m, k);
    const bool whole = whole_rows(x.value | flip.value, m, k, true);
    auto* kernel = whole ? fp8_transposed<true> : fp8_transposed<false>;
    launch(kernel, tiles.count, THREADS, 0, stream, flip, x, m, k, tiles.per_row);
    check_launch("fp8_transpose");
}
