// Casts to FP8 with a scale for each row of each output: row-major with scales of rows, transposed with those
// of columns, or both.
//
//     q [m, k] = fp8(x * scale), saturating, to nearest even; NaN stays NaN      flip [k, m]: the same of x^T
//     scale = limit / amax of the row, within 2^-126 ... 2^126, rounded down to a power of two; 1 where the
//     amax is zero or not finite
//     inverse [m, 1] and [k, 1] = 1 / scale, so that x ~ q * inverse
//
// x may be FP8 itself, with an inverse of each row or block: then x * inverse is cast.
//
// The naive loop of q, in fp32:  for r:  amax = max over c of |x[r][c]|;  s = scale of amax
//                                        inverse[r] = 1 / s;  for c:  q[r][c] = fp8(x[r][c] * s)
//
// Bytes an element of 16 bits: q 3, flip 5, both 6; flip of FP8 3. For q alone a block has a row, which it
// reads a second time from the cache. For flip all is read twice, in the tiles of fp8_cast.cu: the first pass
// finds the largest of each row and column, by atomics whose order does not matter, the second casts.

#include "fp8.cuh"

namespace {

struct Rows {  // what x [m, k] gives, null where not wanted
    uint8_t *row, *flip;
    float *row_inverse, *flip_inverse;
    unsigned *row_amax, *flip_amax;  // zeros, or null for row alone
    int64_t m, k;
    float limit;

    __device__ __forceinline__ float scale(unsigned amax) const {
        return scale_for(__uint_as_float(amax), limit, true, 1.0f);
    }
};

constexpr int BATCH = 2;  // loads of one row that a thread has in flight

template <int FORMAT, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : 6) fp8_row(const Source x, const Rows to) {
    wait_for_previous_kernel();
    const int64_t row = blockIdx.x;
    auto over_row = [&](auto use) {
        for (int64_t c = threadIdx.x * 8ll; c < to.k; c += BATCH * THREADS * 8) {
            Eight<T> some[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                some[u] = load_eight<WHOLE, T>(x, row, c + u * THREADS * 8, row + 1, to.k);
            }
#pragma unroll
            for (int u = 0; u < BATCH; ++u) use(some[u], c + u * THREADS * 8);
        }
    };
    unsigned largest = 0;
    over_row([&](const Eight<T>& some, int64_t) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = max(largest, bits_of(some[i]));
    });
    const float s = to.scale(largest_of_block(largest));
    if (threadIdx.x == 0) to.row_inverse[row] = 1.0f / s;
    over_row([&](const Eight<T>& some, int64_t c) {
        if (c < to.k) store_bytes<WHOLE>(to.row + row * to.k + c, cast_eight<FORMAT>(some, s), to.k - c);
    });
}

template <bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 2 : 4)
    fp8_row_amaxes(const Source from, const Rows to, unsigned per_row) {
    wait_for_previous_kernel();
    const int64_t row = blockIdx.x / per_row * static_cast<int64_t>(TILE);
    const int64_t column = blockIdx.x % per_row * static_cast<int64_t>(TILE);
    const int across = threadIdx.x % PIECES, thread = threadIdx.x;
    const int64_t first = row + thread / PIECES * 8, place = column + across * 8;
    Eight<T> x[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) x[r] = load_eight<WHOLE, T>(from, first + r, place, to.m, to.k);
    if (to.row) {
        unsigned mine = 0;
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const unsigned largest = largest_of_row(x[r]);
            if (across == r) mine = largest;
        }
        if (across < 8 && first + across < to.m) atomicMax(to.row_amax + first + across, mine);
    }
    const unsigned largest = largest_of_column(x);
    if (thread < TILE && column + thread < to.k) atomicMax(to.flip_amax + column + thread, largest);
}

// From the last tile to the first: of what the pass before has read, the end is still in the cache.
template <int FORMAT, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4   ? 2
                                           : sizeof(T) == 2 ? 3
                                                            : 4)
    fp8_row_tiles(const Source from, const Rows to, unsigned per_row) {
    wait_for_previous_kernel();
    __shared__ __align__(16) uint2 tile[TILE * PIECES];
    __shared__ float scales[2][TILE];  // of rows, of columns
    const unsigned number = gridDim.x - 1 - blockIdx.x;
    const int64_t row = number / per_row * static_cast<int64_t>(TILE);
    const int64_t column = number % per_row * static_cast<int64_t>(TILE);
    const int across = threadIdx.x % PIECES, down = threadIdx.x / PIECES * 8;
    const int64_t first = row + down, place = column + across * 8;
    Eight<T> x[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) x[r] = load_eight<WHOLE, T>(from, first + r, place, to.m, to.k);

    const int i = threadIdx.x % TILE;
    if (threadIdx.x >= TILE) {
        if (column + i < to.k) {
            scales[1][i] = to.scale(to.flip_amax[column + i]);
            if (row == 0) to.flip_inverse[column + i] = 1.0f / scales[1][i];
        }
    } else if (to.row && row + i < to.m) {
        scales[0][i] = to.scale(to.row_amax[row + i]);
        if (column == 0) to.row_inverse[row + i] = 1.0f / scales[0][i];
    }
    __syncthreads();
    float s[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) s[c] = scales[1][across * 8 + c];
    uint2 q[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        q[r] = make_uint2(four<FORMAT>(x[r][0] * s[0], x[r][1] * s[1], x[r][2] * s[2], x[r][3] * s[3]),
                          four<FORMAT>(x[r][4] * s[4], x[r][5] * s[5], x[r][6] * s[6], x[r][7] * s[7]));
        if (!to.row || first + r >= to.m || place >= to.k) continue;
        const uint2 bytes = cast_eight<FORMAT>(x[r], scales[0][down + r]);
        store_bytes<WHOLE>(to.row + (first + r) * to.k + place, bytes, to.k - place);
    }
    store_flipped<WHOLE>(to.flip, q, tile, row, column, to.m, to.k);
}

template <int FORMAT>
void launch_rows(const Source& x, const Rows& to, bool whole, Address stream) {
    with_source<FORMAT>(x, whole, [&](auto element, auto packs) {
        using T = decltype(element);
        constexpr bool WHOLE = decltype(packs)::value;
        if (to.flip == nullptr) {
            if (to.m > 0x7fffffff) throw std::runtime_error("fp8_cast_rows: more than 2^31 rows");
            launch(fp8_row<FORMAT, WHOLE, T>, static_cast<unsigned>(to.m), THREADS, 0, stream, x, to);
            return;
        }
        const Tiles tiles(to.m, to.k);
        launch(fp8_row_amaxes<WHOLE, T>, tiles.count, THREADS, 0, stream, x, to, tiles.per_row);
        launch(fp8_row_tiles<FORMAT, WHOLE, T>, tiles.count, THREADS, 0, stream, x, to, tiles.per_row);
    });
}

}  // namespace

void fp8_cast_rows(Address x, Address inverse, int64_t down, int64_t across, Address row, Address row_inverse,
                   Address flip, Address flip_inverse, Address amax, int64_t m, int64_t k, float limit,
                   int type, int format, Address stream) {
    if (m * k == 0) return;
    unsigned* amaxes = amax;  // of rows, of columns
    const Rows to = {row, flip, row_inverse, flip_inverse, amaxes, amaxes + m, m, k, limit};
    const Source from = {x, type, inverse, down, across};
    const bool whole = whole_rows(x.value | row.value | flip.value, m, k, flip.value != 0);
    if (format == E4M3) {
        launch_rows<E4M3>(from, to, whole, stream);
    } else {
        launch_rows<E5M2>(from, to, whole, stream);
    }
    check_launch("fp8_cast_rows");
}
