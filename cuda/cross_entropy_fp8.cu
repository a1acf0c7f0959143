// The gradient of cross_entropy.cu in FP8: row-major, transposed, or both.
//
//     x [rows, width], of which the first `columns` count; labels, lse, grad [rows]
//     d [rows, width] = grad[r] (exp(x[r][c] - lse[r]) - (c == label[r]))        0 behind `columns`
//     row [rows, width] = fp8(d * scale), flip [width, rows] = row^T, amax = max(amax, |d|)
//
// d is rounded to the type of x first, then to FP8, as by cross_entropy.cu and fp8_cast.cu. A label outside
// 0..columns-1 belongs to another rank.
//
// The naive loop, in fp32:  for r, c:  d = grad[r] * (exp(x[r][c] - lse[r]) - (c == label[r])), rounded
//                           row[r][c] = flip[c][r] = fp8(d * scale);  amax = max(amax, |d|)
//
// Bytes in 16 bits a logit: 3, or 4 with both outputs (two read). A gradient in 16 bits and its cast: 8.
//
// Tiles are those of fp8_cast.cu: 128 x 128, a thread has 8 x 8.

#include "fp8.cuh"

namespace {

struct Logits {
    uint8_t *row, *flip;  // null where not wanted, as amax
    const void* x;
    const int64_t* labels;
    const float *lse, *grad, *scale;
    unsigned* amax;
    int64_t rows;
    int columns, width, type;  // below 2^30
};

template <int FORMAT, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 2 : 3)
    cross_entropy_fp8_tile(const Logits a, unsigned per_row) {
    wait_for_previous_kernel();
    constexpr int BATCH = 4;  // rows that are read at once
    __shared__ __align__(16) uint2 tile[TILE * PIECES];
    const int64_t down = blockIdx.x / per_row * static_cast<int64_t>(TILE);
    const int column = static_cast<int>(blockIdx.x % per_row) * TILE;
    const int64_t first = down + threadIdx.x / PIECES * 8;
    const int place = column + static_cast<int>(threadIdx.x) % PIECES * 8;
    const float s = *a.scale;
    unsigned largest = 0;
    uint2 q[8];
#pragma unroll
    for (int begin = 0; begin < 8; begin += BATCH) {
        Eight<T> x[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = first + begin + b;
            x[b] = load_eight<WHOLE, T>(a.x, a.type, r * a.width + place, r < a.rows ? a.width - place : 0);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = first + begin + b;
            const bool inside = r < a.rows;
            const float lse = inside ? a.lse[r] : 0.0f, grad = inside ? a.grad[r] : 0.0f;
            const int64_t label = inside ? a.labels[r] - place : -1;  // its place in these eight
            const int here = label >= 0 && label < 8 ? static_cast<int>(label) : -1;
            float d[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float share = __expf(x[b][i] - lse) - (i == here ? 1.0f : 0.0f);
                d[i] = inside && place + i < a.columns ? grad * share : 0.0f;
            }
            q[begin + b] = cast_eight<FORMAT>(rounded<WHOLE, T>(d, a.type), s, largest);
            if (!a.row || !inside || place >= a.width) continue;
            store_bytes<WHOLE>(a.row + r * a.width + place, q[begin + b], a.width - place);
        }
    }
    if (a.flip) store_flipped<WHOLE>(a.flip, q, tile, down, column, a.rows, a.width);
    if (a.amax == nullptr) return;
    raise_to(a.amax, largest_of_block(largest));
}

}  // namespace

void cross_entropy_fp8(Address logits, Address labels, Address lse, Address grad, Address row, Address flip,
                       Address scale, Address amax, int64_t rows, int64_t columns, int64_t width, int type,
                       int format, Address stream) {
    if (rows * width == 0) return;
    const auto counted = static_cast<int>(columns), across = static_cast<int>(width);
    const Logits a{row, flip, logits, labels, lse, grad, scale, amax, rows, counted, across, type};
    const Tiles tiles(rows, width);
    const bool whole = whole_rows(row.value | flip.value | logits.value, rows, width, a.flip != nullptr);
    with_source<0>(Source{logits, type, nullptr, 0, 0}, whole, [&](auto element, auto packs) {
        using T = decltype(element);
        constexpr bool WHOLE = decltype(packs)::value;
        auto* kernel = format == E4M3 ? &cross_entropy_fp8_tile<E4M3, WHOLE, T>
                                      : &cross_entropy_fp8_tile<E5M2, WHOLE, T>;
        launch(kernel, tiles.count, THREADS, 0, stream, a, tiles.per_row);
    });
    check_launch("cross_entropy_fp8");
}
