// Softmax of attention scores, scaled and masked, over the keys.
//
//     x [b, n, s, t]   z = scale x[j] where query i sees key j, else -inf    m = max z,  l = sum exp(z - m)
//     y [b, n, s, t]   y = exp(z - m) / l                                    lse [b, n, s] = m + log l
//     backward         dx = scale y (dy - sum(dy y)) where seen, else 0
//
//     seen: j <= i + t - s if causal,  j >= i + t - s - window if there is one,  and not hidden[b, n, i, j]
//
// The naive loop, in fp32, a row at a time:
//     for j: m = max(m, z[j]);   for j: l += exp(z[j] - m);   for j: y[j] = exp(z[j] - m) / l
//
// Bytes in 16 bits a score: forward 4 (one read, one written), backward 6 (two read, one written); what the
// causal mask and the window hide is not read, only written, as zeros: with s = t forward 3, backward 4 in
// the mean. `hidden` costs its own bytes, once where the heads share it (they run side by side and find it in
// the L2).
//
//     t <= 16384   a row stays in the registers of a warp or of a block (in fp32 forward to 8192; scores
//                  that are not whole packs of 16 bytes to 2048)
//     longer       online (arXiv 1805.02867): softmax_online.cuh
//
// Where torch has NaN there is NaN: in all of a row that sees no key, or a NaN, or +inf. exp is 2^(x log2 e)
// by the hardware: two units in the last place of fp32, and z - m = -80 to 1e-5. A row may be written over
// its own input.

#include "softmax.cuh"
#include "softmax_online.cuh"

namespace {

constexpr int MAX_THREADS = 512;                               // of a row
constexpr int WARPS = 4;                                       // of a block, where each has a row
constexpr int FORWARD = 4, BACKWARD = 8, BACKWARD_MASKED = 4;  // packs of a row that a thread keeps

// Of a row of several warps: the maximum, and the sum of exp(z - maximum), from those of each warp.
__device__ __forceinline__ void over_warps(float& top, float& sum, float (*shared)[32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (lane == 0) shared[0][warp] = top, shared[1][warp] = sum;
    __syncthreads();
    const float other = lane < warps ? shared[0][lane] : LOWEST;
    top = over_warp<Top>(other);
    sum = over_warp<Sum>(lane < warps ? shared[1][lane] * exp_of(other - top) : 0.0f);
}

// The packs threadIdx.x, threadIdx.x + threads, ... of a row, K of them, and which of their keys are seen.
// Nothing is done for packs without any.
template <typename P, int K, bool MASKED>
struct Share {
    static constexpr int N = P::size;
    unsigned seen[K];

    __device__ __forceinline__ explicit Share(const Row& row) {
#pragma unroll
        for (int k = 0; k < K; ++k) seen[k] = seen_of<N, MASKED>(row, (k * blockDim.x + threadIdx.x) * N);
    }

    // Zeros where nothing is seen.
    __device__ __forceinline__ void load(P (&packs)[K], const P* row) const {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            packs[k] = P{};
            if (seen[k]) packs[k] = load_pack(row + k * blockDim.x + threadIdx.x);
        }
    }

    // x[i] becomes `hidden` where key i of pack k is not seen.
    __device__ __forceinline__ void hide(int k, float (&x)[N], float hidden) const {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = seen[k] >> i & 1 ? x[i] : hidden;
    }
};

// All of a row in registers. Exponentials are relative to the warp's maximum, so that warps meet only once.
template <typename P, int K, bool MASKED>
__global__ void __launch_bounds__(MAX_THREADS)
    softmax_forward_resident(P* out, float* lse, const P* x, Problem a) {
    wait_for_previous_kernel();
    constexpr int N = P::size;
    __shared__ float shared[2][32];
    for_rows(a, [&](const Row& row) {
        const int64_t start = row.index * (a.t / N);
        const Share<P, K, MASKED> share(row);
        float z[K][N] = {}, top = LOWEST, sum = 0.0f;
        P packs[K];
        share.load(packs, x + start);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (share.seen[k] == 0) continue;
#pragma unroll
            for (int i = 0; i < N; ++i) z[k][i] = packs[k][i] * a.scale;
            share.hide(k, z[k], -INFINITY);
#pragma unroll
            for (int i = 0; i < N; ++i) top = Top::of(top, z[k][i]);
        }
        const float mine = over_warp<Top>(top);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (share.seen[k] == 0) continue;
#pragma unroll
            for (int i = 0; i < N; ++i) sum += z[k][i] = exp_of(z[k][i] - mine);
        }
        top = mine, sum = over_warp<Sum>(sum);
        if (blockDim.x > 32) over_warps(top, sum, shared);
        const float factor =
            exp_of(mine - top) / sum;  // a sum of 0 or NaN makes NaN of all, the hidden ones too
        if (threadIdx.x == 0) lse[row.index] = top == INFINITY ? top : top + logf(sum);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int pack = k * blockDim.x + threadIdx.x;
#pragma unroll
            for (int i = 0; i < N; ++i) z[k][i] *= factor;
            P y;
            y.set(z[k]);
            if (pack < a.t / N) out[start + pack] = y;
        }
        if (blockDim.x > 32 && a.outer > gridDim.y) __syncthreads();  // another row follows
    });
}

template <typename P, int K, bool MASKED>
__global__ void __launch_bounds__(MAX_THREADS)
    softmax_backward_resident(P* dx, const P* grad, const P* y, Problem a) {
    wait_for_previous_kernel();
    constexpr int N = P::size;
    __shared__ float shared[32];
    for_rows(a, [&](const Row& row) {
        const int64_t start = row.index * (a.t / N);
        const Share<P, K, MASKED> share(row);
        float sum = 0.0f;
        P dys[K], ys[K];
        share.load(dys, grad + start);
        share.load(ys, y + start);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (share.seen[k] == 0) continue;
            keep_packed(dys[k]);
            keep_packed(ys[k]);
            float part[N];
#pragma unroll
            for (int i = 0; i < N; ++i) part[i] = dys[k][i] * ys[k][i];
            share.hide(k, part, 0.0f);
#pragma unroll
            for (int i = 0; i < N; ++i) sum += part[i];
        }
        sum = blockDim.x == 32 ? over_warp<Sum>(sum) : over_block<Sum>(sum, shared);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int pack = k * blockDim.x + threadIdx.x;
            float part[N] = {};
            if (share.seen[k]) {
                keep_packed(dys[k]);
                keep_packed(ys[k]);
#pragma unroll
                for (int i = 0; i < N; ++i) part[i] = a.scale * ys[k][i] * (dys[k][i] - sum);
                share.hide(k, part, 0.0f);
            }
            P dz;
            dz.set(part);
            if (pack < a.t / N) dx[start + pack] = dz;
        }
    });
}

// Runs body(P{}, K, masked, grid, block): packs of 16 bytes where all is aligned to them, K = 0 for the
// online kernels.
template <int PLAIN, int MASKED, typename Body>
void with_rows(Problem& a, int type, bool whole, Body body) {
    const auto run = [&](auto pack, auto masked) {
        constexpr int N = decltype(pack)::size, K = decltype(masked)::value ? MASKED : PLAIN;
        const int packs = a.t / N, warps = (packs + 32 * K - 1) / (32 * K);  // of a row
        const bool resident = warps * 32 <= MAX_THREADS && a.t <= 16384;
        const dim3 block(resident ? warps * 32 : ONLINE_THREADS, resident && warps == 1 ? WARPS : 1);
        const int64_t queries = (a.s + block.y - 1) / block.y;
        a.heads_first = a.hidden && (a.hidden_n == 0 || a.hidden_b == 0);
        a.outer = a.heads_first ? queries : a.pairs;
        const int64_t inner = a.heads_first ? a.pairs : queries;
        const dim3 grid(static_cast<unsigned>(inner),
                        static_cast<unsigned>(a.outer < 65535 ? a.outer : 65535));
        if (resident) {
            body(pack, std::integral_constant<int, K>{}, masked, grid, block);
        } else {
            body(pack, std::integral_constant<int, 0>{}, masked, grid, block);
        }
    };
    with_type(type, [&](auto element) {
        using T = decltype(element);
        constexpr int N = Pack<T>::size;
        const bool flags = aligned(reinterpret_cast<std::uintptr_t>(a.hidden), N) && a.hidden_b % N == 0 &&
                           a.hidden_n % N == 0 && a.hidden_s % N == 0;
        const bool vectors = whole && a.t % N == 0 && (!a.hidden || flags);
        if (vectors && a.hidden) {
            run(Pack<T>{}, std::true_type{});
        } else if (vectors) {
            run(Pack<T>{}, std::false_type{});
        } else if (a.hidden) {
            run(Pack<T, 1>{}, std::true_type{});
        } else {
            run(Pack<T, 1>{}, std::false_type{});
        }
    });
}

Problem problem(float scale, int64_t b, int64_t n, int64_t s, int64_t t, int causal, int64_t window,
                Address hidden, int64_t hidden_b, int64_t hidden_n, int64_t hidden_s) {
    constexpr int64_t most =
        INT32_MAX / 2;  // columns, and the threads past their end, are counted in 32 bits
    if (s > most || t > most || b * n > most)
        throw std::runtime_error("softmax: more than 2^30 rows, keys or heads");
    Problem a{};
    a.s = s, a.t = static_cast<int>(t), a.n = static_cast<int>(n), a.pairs = static_cast<int>(b * n);
    a.scale = scale, a.causal = causal, a.window = window, a.hidden = hidden;
    a.hidden_b = hidden_b, a.hidden_n = hidden_n, a.hidden_s = hidden_s;
    return a;
}

}  // namespace

void softmax_forward(Address out, Address lse, Address x, float scale, int64_t b, int64_t n, int64_t s,
                     int64_t t, int causal, int64_t window, Address hidden, int64_t hidden_b,
                     int64_t hidden_n, int64_t hidden_s, int type, Address stream) {
    if (b * n * s * t == 0) return;
    Problem a = problem(scale, b, n, s, t, causal, window, hidden, hidden_b, hidden_n, hidden_s);
    const bool whole = aligned(out.value) && aligned(x.value);
    with_rows<FORWARD, FORWARD>(a, type, whole, [&](auto pack, auto k, auto masked, dim3 grid, dim3 block) {
        using P = decltype(pack);
        if constexpr (k() == 0) {
            launch(softmax_forward_online<P, masked()>, grid, block, 0, stream, out, lse, x, a);
        } else {
            launch(softmax_forward_resident<P, k(), masked()>, grid, block, 0, stream, out, lse, x, a);
        }
    });
    check_launch("softmax_forward");
}

void softmax_backward(Address dx, Address grad, Address y, float scale, int64_t b, int64_t n, int64_t s,
                      int64_t t, int causal, int64_t window, Address hidden, int64_t hidden_b,
                      int64_t hidden_n, int64_t hidden_s, int type, Address stream) {
    if (b * n * s * t == 0) return;
    Problem a = problem(scale, b, n, s, t, causal, window, hidden, hidden_b, hidden_n, hidden_s);
    const bool whole = aligned(dx.value) && aligned(grad.value) && aligned(y.value);
    with_rows<BACKWARD, BACKWARD_MASKED>(
        a, type, whole, [&](auto pack, auto k, auto masked, dim3 grid, dim3 block) {
            using P = decltype(pack);
            if constexpr (k() == 0) {
                launch(softmax_backward_online<P, masked()>, grid, block, 0, stream, dx, grad, y, a);
            } else {
                launch(softmax_backward_resident<P, k(), masked()>, grid, block, 0, stream, dx, grad, y, a);
            }
        });
    check_launch("softmax_backward");
}
