// SwiGLU and its kin: the gated unit between the two matrices of an MLP.
//
//     x [rows, 2f] = [gate; up]        y [rows, f] = act(gate) * up          silu(g) = g / (1 + exp(-g))
//     dgate = dy * up * act'(gate)     dup = dy * act(gate)                  gelu: its tanh form
//
// The naive loop, in fp32:  for r, c:  y[r][c] = act(x[r][c]) * x[r][f + c]
//
// Bytes in 16 bits a value of y: forward 6 (two read, one written), backward 10 (three read, two written).
// Nothing is kept but x; each value is read and written once, so the time is that of the memory.

#include "common.cuh"

namespace {

constexpr int THREADS = 128;

struct Silu {
    __device__ static float value(float g) { return g / (1.0f + __expf(-g)); }
    // silu' = s + silu (1 - s)
    __device__ static float slope(float g) {
        const float s = 1.0f / (1.0f + __expf(-g));
        return s * (1.0f + g * (1.0f - s));
    }
};

struct Gelu {
    static constexpr float ROOT = 0.7978845608028654f, CUBE = 0.044715f;
    __device__ static float value(float g) {
        return 0.5f * g * (1.0f + tanhf(ROOT * (g + CUBE * g * g * g)));
    }
    __device__ static float slope(float g) {
        const float t = tanhf(ROOT * (g + CUBE * g * g * g)),
                    most = fminf(fabsf(g), 32.0f);  // there 1 - t * t is 0
        return 0.5f * (1.0f + t) + 0.5f * g * (1.0f - t * t) * ROOT * (1.0f + 3.0f * CUBE * most * most);
    }
};

// A thread has one pack of a row; of row r the gates begin at 2 r `packs`.
template <typename Act, typename P>
__global__ void __launch_bounds__(THREADS)
    gated_forward(P* __restrict__ out, const P* __restrict__ x, int64_t rows, int64_t packs) {
    wait_for_previous_kernel();
    const int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
    if (i >= packs) return;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const P* from = x + 2 * row * packs + i;
        const P gate = load_pack(from), up = load_pack(from + packs);
        float values[P::size];
#pragma unroll
        for (int k = 0; k < P::size; ++k) values[k] = Act::value(gate[k]) * up[k];
        P y;
        y.set(values);
        out[row * packs + i] = y;
    }
}

template <typename Act, typename P>
__global__ void __launch_bounds__(THREADS)
    gated_backward(P* __restrict__ dx, const P* __restrict__ grad, const P* __restrict__ x, int64_t rows,
                   int64_t packs) {
    wait_for_previous_kernel();
    const int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
    if (i >= packs) return;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const int64_t at = 2 * row * packs + i;
        const P dy = load_pack(grad + row * packs + i), gate = load_pack(x + at),
                up = load_pack(x + at + packs);
        float gates[P::size], ups[P::size];
#pragma unroll
        for (int k = 0; k < P::size; ++k) {
            gates[k] = dy[k] * up[k] * Act::slope(gate[k]);
            ups[k] = dy[k] * Act::value(gate[k]);
        }
        P dgate, dup;
        dgate.set(gates), dup.set(ups);
        dx[at] = dgate;
        dx[at + packs] = dup;
    }
}

dim3 grid(int64_t rows, int64_t packs) {
    const int64_t across = (packs + THREADS - 1) / THREADS;
    return dim3(static_cast<unsigned>(across), static_cast<unsigned>(rows < 65535 ? rows : 65535));
}

// Runs body(Act{}, P{}, packs of a row): packs of 16 bytes where rows and addresses allow them.
template <typename Body>
void with_packs(int64_t f, int gated, int type, bool whole, Body body) {
    with_type(type, [&](auto element) {
        using T = decltype(element);
        auto run = [&](auto pack) {
            const int64_t packs = f / decltype(pack)::size;
            gated == 0 ? body(Silu{}, pack, packs) : body(Gelu{}, pack, packs);
        };
        if (whole && f % Pack<T>::size == 0) {
            run(Pack<T>{});
        } else {
            run(Pack<T, 1>{});
        }
    });
}

}  // namespace

void swiglu_forward(Address out, Address x, int64_t rows, int64_t f, int gated, int type, Address stream) {
    if (rows * f == 0) return;
    const bool whole = aligned(out.value) && aligned(x.value);
    with_packs(f, gated, type, whole, [&](auto act, auto pack, int64_t packs) {
        launch(gated_forward<decltype(act), decltype(pack)>, grid(rows, packs), THREADS, 0, stream, out, x,
               rows, packs);
    });
    check_launch("swiglu_forward");
}

void swiglu_backward(Address dx, Address grad, Address x, int64_t rows, int64_t f, int gated, int type,
                     Address stream) {
    if (rows * f == 0) return;
    const bool whole = aligned(dx.value) && aligned(grad.value) && aligned(x.value);
    with_packs(f, gated, type, whole, [&](auto act, auto pack, int64_t packs) {
        launch(gated_backward<decltype(act), decltype(pack)>, grid(rows, packs), THREADS, 0, stream, dx, grad,
               x, rows, packs);
    });
    check_launch("swiglu_backward");
}
