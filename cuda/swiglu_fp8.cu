// The gated unit of swiglu.cu with its result, or its gradient, in FP8: row-major, transposed, or both.
//
//     x [rows, 2f] = [gate; up]        y [rows, f] = act(gate) * up        dx [rows, 2f] = [dgate; dup]
//     act(g) = g s, s = 1 / (1 + exp(-z))        silu: z = g        gelu: z = 2 sqrt(2/pi) (g + c g^3)
//     act'(g) = s + g s (1 - s) z'(g)            dgate = dy * up * act'(gate)     dup = dy * act(gate)
//     forward    row [rows, f] = fp8(y * scale), flip [f, rows] = row^T, amax = max(amax, |y|)
//     backward   row [rows, 2f] = fp8(dx * scale), flip [2f, rows] = row^T, amax = max(amax, |dx|)
//
// y and dx are rounded to the type of x first, then to FP8, as by swiglu.cu and fp8_cast.cu.
//
// The naive loop, in fp32:  for r, c:  y = act(x[r][c]) * x[r][f + c], rounded
//                           row[r][c] = flip[c][r] = fp8(y * scale);  amax = max(amax, |y|)
//
// Bytes in 16 bits a value of y: forward 5, or 6 with both outputs (four read); backward 8 or 10 (six read).
//
// Tiles are those of fp8_cast.cu: 128 x 128, a thread has 8 x 8, and columns are turned in registers and pass
// shared memory.

#include "fp8.cuh"

namespace {

struct Gated {
    uint8_t *row, *flip;  // null where not wanted, as amax
    const void *grad, *x;
    const float* scale;
    unsigned* amax;
    int64_t rows, f;
    int type;
    bool gelu;
};

__device__ __forceinline__ float sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }

constexpr float LINE = 1.5957691216057308f, CUBE = LINE * 0.044715f;  // z of gelu

__device__ __forceinline__ float gate_of(float g, bool gelu) {
    return sigmoid(gelu ? g * (LINE + CUBE * g * g) : g);
}

// The place of a thread's 8 x 8 and how much of it is inside.
struct Place {
    int64_t row, column, first, place;  // of the tile, of the thread

    __device__ __forceinline__ Place(unsigned per_row) {
        row = blockIdx.x / per_row * static_cast<int64_t>(TILE);
        column = blockIdx.x % per_row * static_cast<int64_t>(TILE);
        first = row + threadIdx.x / PIECES * 8, place = column + threadIdx.x % PIECES * 8;
    }
};

__device__ __forceinline__ void note_largest(unsigned* amax, unsigned largest) {
    if (amax == nullptr) return;
    raise_to(amax, largest_of_block(largest));
}

template <int FORMAT, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 2 : 3)
    gated_fp8_forward(const Gated a, unsigned per_row) {
    wait_for_previous_kernel();
    constexpr int BATCH = 4;  // rows that are read at once
    __shared__ __align__(16) uint2 tile[TILE * PIECES];
    const Place at(per_row);
    const float s = *a.scale;
    unsigned largest = 0;
    uint2 q[8];
#pragma unroll
    for (int begin = 0; begin < 8; begin += BATCH) {
        Eight<T> gate[BATCH], up[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = at.first + begin + b, from = 2 * r * a.f + at.place;
            const int64_t inside = r < a.rows ? a.f - at.place : 0;
            gate[b] = load_eight<WHOLE, T>(a.x, a.type, from, inside);
            up[b] = load_eight<WHOLE, T>(a.x, a.type, from + a.f, inside);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = at.first + begin + b;
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) y[i] = gate[b][i] * gate_of(gate[b][i], a.gelu) * up[b][i];
            q[begin + b] = cast_eight<FORMAT>(rounded<WHOLE, T>(y, a.type), s, largest);
            if (!a.row || r >= a.rows || at.place >= a.f) continue;
            store_bytes<WHOLE>(a.row + r * a.f + at.place, q[begin + b], a.f - at.place);
        }
    }
    if (a.flip) store_flipped<WHOLE>(a.flip, q, tile, at.row, at.column, a.rows, a.f);
    note_largest(a.amax, largest);
}

template <int FORMAT, bool WHOLE, typename T>
__global__ void __launch_bounds__(THREADS, 2) gated_fp8_backward(const Gated a, unsigned per_row) {
    wait_for_previous_kernel();
    constexpr int BATCH = 8 / sizeof(T);
    __shared__ __align__(16) uint2 tile[TILE * PIECES];
    const Place at(per_row);
    const float s = *a.scale;
    unsigned largest = 0;
    uint2 dgate[8], dup[8];
#pragma unroll
    for (int begin = 0; begin < 8; begin += BATCH) {
        Eight<T> gate[BATCH], up[BATCH], grad[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = at.first + begin + b, from = 2 * r * a.f + at.place;
            const int64_t inside = r < a.rows ? a.f - at.place : 0;
            gate[b] = load_eight<WHOLE, T>(a.x, a.type, from, inside);
            up[b] = load_eight<WHOLE, T>(a.x, a.type, from + a.f, inside);
            grad[b] = load_eight<WHOLE, T>(a.grad, a.type, r * a.f + at.place, inside);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t r = at.first + begin + b;
            float d[8], u[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float g = gate[b][i], open = gate_of(g, a.gelu), value = g * open;
                const float rise = a.gelu ? LINE + 3.0f * CUBE * g * g : 1.0f;
                d[i] = grad[b][i] * up[b][i] * (open + value * (1.0f - open) * rise);
                u[i] = grad[b][i] * value;
            }
            dgate[begin + b] = cast_eight<FORMAT>(rounded<WHOLE, T>(d, a.type), s, largest);
            dup[begin + b] = cast_eight<FORMAT>(rounded<WHOLE, T>(u, a.type), s, largest);
            if (!a.row || r >= a.rows || at.place >= a.f) continue;
            uint8_t* to = a.row + 2 * r * a.f + at.place;
            store_bytes<WHOLE>(to, dgate[begin + b], a.f - at.place);
            store_bytes<WHOLE>(to + a.f, dup[begin + b], a.f - at.place);
        }
    }
    if (a.flip) {
        store_flipped<WHOLE>(a.flip, dgate, tile, at.row, at.column, a.rows, a.f);
        __syncthreads();
        store_flipped<WHOLE>(a.flip + a.f * a.rows, dup, tile, at.row, at.column, a.rows, a.f);
    }
    note_largest(a.amax, largest);
}

// Runs body(format, element, per_row, blocks): T is float where rows are not whole, and x of any type.
template <typename Body>
void with_tiles(const Gated& a, int format, bool whole, Body body) {
    const int64_t per_row = (a.f + TILE - 1) / TILE, blocks = (a.rows + TILE - 1) / TILE * per_row;
    if (blocks > 0x7fffffff) throw std::runtime_error("swiglu_fp8: more than 2^31 tiles");
    auto run = [&](auto constant) {
        const auto across = static_cast<unsigned>(per_row), all = static_cast<unsigned>(blocks);
        if (!whole) return body(constant, std::false_type{}, float{}, across, all);
        with_type(a.type, [&](auto element) { body(constant, std::true_type{}, element, across, all); });
    };
    format == E4M3 ? run(std::integral_constant<int, E4M3>{}) : run(std::integral_constant<int, E5M2>{});
}

bool whole_tiles(std::uintptr_t places, const Gated& a) {
    return aligned(places) && a.f % 8 == 0 && (a.flip == nullptr || a.rows % 16 == 0);
}

}  // namespace

void swiglu_fp8_forward(Address x, Address row, Address flip, Address scale, Address amax, int64_t rows,
                        int64_t f, int gated, int type, int format, Address stream) {
    if (rows * f == 0) return;
    const Gated a{row, flip, nullptr, x, scale, amax, rows, f, type, gated != 0};
    const bool whole = whole_tiles(row.value | flip.value | x.value, a);
    with_tiles(
        a, format, whole, [&](auto constant, auto whole_, auto element, unsigned per_row, unsigned blocks) {
            auto* kernel =
                &gated_fp8_forward<decltype(constant)::value, decltype(whole_)::value, decltype(element)>;
            launch(kernel, blocks, THREADS, 0, stream, a, per_row);
        });
    check_launch("swiglu_fp8_forward");
}

void swiglu_fp8_backward(Address grad, Address x, Address row, Address flip, Address scale, Address amax,
                         int64_t rows, int64_t f, int gated, int type, int format, Address stream) {
    if (rows * f == 0) return;
    const Gated a{row, flip, grad, x, scale, amax, rows, f, type, gated != 0};
    const bool whole = whole_tiles(row.value | flip.value | grad.value | x.value, a);
    with_tiles(
        a, format, whole, [&](auto constant, auto whole_, auto element, unsigned per_row, unsigned blocks) {
            auto* kernel =
                &gated_fp8_backward<decltype(constant)::value, decltype(whole_)::value, decltype(element)>;
            launch(kernel, blocks, THREADS, 0, stream, a, per_row);
        });
    check_launch("swiglu_fp8_backward");
}
