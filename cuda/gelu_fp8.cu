// The activation of gelu.cu, with the bias before it, with its result or its gradient in FP8.
//
//     y [rows, f] = act(x + b)                x [rows, f], b [f]
//     dx [rows, f] = dy act'(x + b)           db [f] = sum over rows of dx, or db += that sum
//     forward    row [rows, f] = fp8(y * scale), flip [f, rows] = row^T, amax = max(amax, |y|)
//     backward   the same of dx
//
// y and dx are rounded to the type of x first, then to FP8, as by gelu.cu and fp8_cast.cu; db adds fp32.
//
// The naive loop, in fp32:  for r, c:  y = act(x[r][c] + b[c]), rounded
//                           row[r][c] = flip[c][r] = fp8(y * scale);  amax = max(amax, |y|)
//
// Bytes in 16 bits a value: forward 3, or 4 with both outputs (two read); backward 5 or 6 (four read), and
// 4 f for every 128 rows: the parts of db, a row of a workspace [rows / 128, f] for each row of tiles.
//
// Tiles are those of fp8_cast.cu: 128 x 128, a thread has 8 x 8.

#include "activations.cuh"
#include "column_sums.cuh"
#include "fp8.cuh"

namespace {

struct Biased {
    uint8_t *row, *flip;  // null where not wanted, as amax and workspace
    const void *grad, *x, *bias;
    const float* scale;
    unsigned* amax;
    float* workspace;
    int64_t rows, f;
    int type;
};

struct AnyAct {  // for the variant that is rare, and long
    int which;

    __device__ __forceinline__ float value(float x) const {
        return which == 0 ? GeluTanh::value(x) : which == 1 ? GeluExact::value(x) : SquaredRelu::value(x);
    }
    __device__ __forceinline__ float grad(float dy, float x) const {
        return which == 0   ? GeluTanh::grad(dy, x)
               : which == 1 ? GeluExact::grad(dy, x)
                            : SquaredRelu::grad(dy, x);
    }
};

// Writes the sums of this tile's columns, `sums` of this thread's 8 x 8, to its place in the workspace.
__device__ __forceinline__ void write_tile_sums(float (&sums)[8], float* workspace, int64_t down,
                                                int64_t column, int64_t f) {
    __shared__ float shared[THREADS / 32][TILE];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sums[i] += __shfl_xor_sync(0xffffffff, sums[i], PIECES);
        if (threadIdx.x % 32 < PIECES) shared[threadIdx.x / 32][threadIdx.x % PIECES * 8 + i] = sums[i];
    }
    __syncthreads();
    if (threadIdx.x >= TILE || column + threadIdx.x >= f) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += shared[warp][threadIdx.x];
    workspace[down * f + column + threadIdx.x] = sum;
}

template <typename Act, int FORMAT, bool BACKWARD, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, BACKWARD || !std::is_same_v<T, __nv_bfloat16> ? 2 : 3)
    gelu_fp8_tile(const Biased a, const Act act, unsigned per_row) {
    wait_for_previous_kernel();
    constexpr int BATCH = sizeof(T) == 4 && BACKWARD ? 2 : 4;  // rows that are read at once
    __shared__ __align__(16) uint2 tile[TILE * PIECES];
    const int64_t down = blockIdx.x / per_row, column = blockIdx.x % per_row * static_cast<int64_t>(TILE);
    const int64_t first = down * TILE + threadIdx.x / PIECES * 8, place = column + threadIdx.x % PIECES * 8;
    const float s = *a.scale;
    Eight<T> bias = {};
    if (a.bias != nullptr) bias = load_eight<WHOLE, T>(a.bias, a.type, place, a.f - place);
    unsigned largest = 0;
    float sums[8] = {};
    uint2 q[8];
#pragma unroll
    for (int begin = 0; begin < 8; begin += BATCH) {
        Eight<T> x[BATCH], grad[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = first + begin + b, inside = r < a.rows ? a.f - place : 0;
            x[b] = load_eight<WHOLE, T>(a.x, a.type, r * a.f + place, inside);
            if constexpr (BACKWARD) grad[b] = load_eight<WHOLE, T>(a.grad, a.type, r * a.f + place, inside);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = first + begin + b;
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float at = x[b][i] + bias[i];
                if constexpr (BACKWARD) {
                    y[i] = act.grad(grad[b][i], at);
                } else {
                    y[i] = act.value(at);
                }
                if (r >= a.rows) y[i] = 0.0f;  // act(b) is not
                sums[i] += y[i];
            }
            q[begin + b] = cast_eight<FORMAT>(rounded<WHOLE, T>(y, a.type), s, largest);
            if (!a.row || r >= a.rows || place >= a.f) continue;
            store_bytes<WHOLE>(a.row + r * a.f + place, q[begin + b], a.f - place);
        }
    }
    if (a.flip) store_flipped<WHOLE>(a.flip, q, tile, down * TILE, column, a.rows, a.f);
    if constexpr (BACKWARD) {
        if (a.workspace != nullptr) write_tile_sums(sums, a.workspace, down, column, a.f);
    }
    if (a.amax == nullptr) return;
    raise_to(a.amax, largest_of_block(largest));
}

template <bool BACKWARD>
void launch_tiles(const Biased& a, int act, int format, std::uintptr_t places, cudaStream_t stream) {
    const Tiles tiles(a.rows, a.f);
    const bool whole = whole_rows(places, a.rows, a.f, a.flip != nullptr);
    auto run = [&](auto element, auto packs, auto function) {
        auto with_format = [&](auto constant) {
            auto* kernel = &gelu_fp8_tile<decltype(function), decltype(constant)::value, BACKWARD,
                                          decltype(packs)::value, decltype(element)>;
            launch(kernel, tiles.count, THREADS, 0, stream, a, function, tiles.per_row);
        };
        format == E4M3 ? with_format(std::integral_constant<int, E4M3>{})
                       : with_format(std::integral_constant<int, E5M2>{});
    };
    if (!whole) return run(float{}, std::false_type{}, AnyAct{act});
    with_type(a.type, [&](auto element) {
        with_act(act, [&](auto function) { run(element, std::true_type{}, function); });
    });
}

}  // namespace

void gelu_fp8_forward(Address x, Address bias, Address row, Address flip, Address scale, Address amax,
                      int64_t rows, int64_t f, int act, int type, int format, Address stream) {
    if (rows * f == 0) return;
    const Biased a{row, flip, nullptr, x, bias, scale, amax, nullptr, rows, f, type};
    launch_tiles<false>(a, act, format, row.value | flip.value | x.value | bias.value, stream);
    check_launch("gelu_fp8_forward");
}

void gelu_fp8_backward(Address grad, Address x, Address bias, Address row, Address flip, Address scale,
                       Address amax, Address dbias, Address workspace, int64_t rows, int64_t f, int add,
                       int act, int type, int format, int dbias_type, Address stream) {
    if (f == 0) return;
    if (rows > 0) {
        const Biased a{row, flip, grad, x, bias, scale, amax, workspace, rows, f, type};
        const std::uintptr_t places = row.value | flip.value | grad.value | x.value | bias.value;
        launch_tiles<true>(a, act, format, places, stream);
        check_launch("gelu_fp8_backward");
    }
    if (dbias.value == 0) return;
    const int64_t parts = (rows + TILE - 1) / TILE;
    add_parts({dbias}, workspace, parts, parts, f, add, dbias_type, stream);
}
