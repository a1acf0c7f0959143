// GELU (tanh form or exact) and squared ReLU with the bias before them, between the two matrices of an MLP.
//
//     y [rows, f] = act(x + b)        x [rows, f], b [f]           gelu: x Phi(x); tanh form: activations.cuh
//     dx = dy act'(x + b)             db [f] = sum over rows of dx, or db += that sum
//
// The naive loop, in fp32:  for r, c:  y[r][c] = act(x[r][c] + b[c])
//                           for r, c:  dx[r][c] = dy[r][c] act'(x[r][c] + b[c]);  db[c] += dx[r][c]
//
// Bytes in 16 bits a value: forward 4, backward 6, and 4 f a block for db. Nothing is kept but x. x + b is
// not rounded, nor is dx before it is added to db; the order of that, and the second launch: column_sums.cuh.

#include "activations.cuh"
#include "column_sums.cuh"

namespace {

template <typename P>
__device__ __forceinline__ void load_bias(float (&b)[P::size], const P* bias, int64_t pack) {
    if (bias == nullptr) return;
    const P values = load_pack(bias + pack);
#pragma unroll
    for (int i = 0; i < P::size; ++i) b[i] = values[i];
}

constexpr int AT_ONCE = 2;  // rows of a thread in the forward, which has blocks for all of them

template <typename Act, typename P>
__global__ void __launch_bounds__(ROW_THREADS, 4)
    gelu_forward_rows(P* __restrict__ out, const P* __restrict__ x, const P* __restrict__ bias, int64_t rows,
                      int64_t packs) {
    wait_for_previous_kernel();
    const int64_t pack = pack_of_thread();
    if (pack >= packs) return;
    float b[P::size] = {};
    load_bias(b, bias, pack);
    walk_rows<AT_ONCE>(
        rows, [&](int64_t row) { return load_pack(x + row * packs + pack); },
        [&](int64_t row, const P& values) {
            float y[P::size];
#pragma unroll
            for (int i = 0; i < P::size; ++i) y[i] = Act::value(values[i] + b[i]);
            P result;
            result.set(y);
            out[row * packs + pack] = result;
        });
}

template <typename P>
struct Given {
    P x, grad;
};

template <typename Act, typename P>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS)
    gelu_backward_rows(P* __restrict__ dx, float* __restrict__ workspace, const P* __restrict__ grad,
                       const P* __restrict__ x, const P* __restrict__ bias, int64_t rows, int64_t packs) {
    wait_for_previous_kernel();
    const int64_t pack = pack_of_thread();
    float b[P::size] = {}, sums[P::size] = {};
    if (pack < packs) {
        load_bias(b, bias, pack);
        walk_rows<4>(
            rows,
            [&](int64_t row) {
                const int64_t at = row * packs + pack;
                return Given<P>{load_pack(x + at), load_pack(grad + at)};
            },
            [&](int64_t row, const Given<P>& given) {
                float d[P::size];
#pragma unroll
                for (int i = 0; i < P::size; ++i) {
                    d[i] = Act::grad(given.grad[i], given.x[i] + b[i]);
                    sums[i] += d[i];
                }
                P result;
                result.set(d);
                dx[row * packs + pack] = result;
            });
    }
    if (workspace != nullptr) write_part(sums, workspace, packs * P::size);
}

}  // namespace

void gelu_forward(Address out, Address x, Address bias, int64_t rows, int64_t f, int act, int type,
                  Address stream) {
    if (rows * f == 0) return;
    const bool whole = aligned(out.value | x.value | bias.value);
    with_packs(f, type, whole, [&](auto pack, int64_t packs) {
        const int64_t needed = (rows + ROWS * AT_ONCE - 1) / (ROWS * AT_ONCE),
                      down = needed < 65535 ? needed : 65535;
        with_act(act, [&](auto function) {
            launch(gelu_forward_rows<decltype(function), decltype(pack)>, over_rows(packs, down), ROW_THREADS,
                   0, stream, out, x, bias, rows, packs);
        });
    });
    check_launch("gelu_forward");
}

void gelu_backward(Address dx, Address dbias, Address workspace, Address grad, Address x, Address bias,
                   int64_t rows, int64_t f, int64_t parts, int add, int act, int type, int dbias_type,
                   Address stream) {
    if (f == 0) return;
    if (rows > 0) {
        const bool whole = aligned(dx.value | grad.value | x.value | bias.value);
        with_packs(f, type, whole, [&](auto pack, int64_t packs) {
            with_act(act, [&](auto function) {
                launch(gelu_backward_rows<decltype(function), decltype(pack)>, over_rows(packs, parts),
                       ROW_THREADS, 0, stream, dx, workspace, grad, x, bias, rows, packs);
            });
        });
        check_launch("gelu_backward");
    }
    if (dbias.value == 0) return;
    add_parts({dbias}, workspace, parts, rows > 0 ? parts : 0, f, add, dbias_type, stream);
}
