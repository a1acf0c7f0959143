// Attention of a new token to those before it and to itself; its key and value are put behind theirs.
//
//     q [b, n, d]   k, v [b, g, d]   keys, values [t, b, g, d]   p: the token's position, in device memory
//     keys[p] = k, values[p] = v;    query head h reads key head h / R, where n = R g
//     z[j] = scale q . keys[j], or cap tanh(that / cap), for max(p - window, 0) <= j <= p
//     out [b, n, d] = sum_j exp(z[j] - m) values[j] / sum_j exp(z[j] - m),    m = max_j z[j]
//
// The naive loop, in fp32, for each row and h:  for j: w = exp(z[j] - m), l += w, out += w values[j]
//
// Keys and values up to p are read once, for all R heads that share them, and little else. L threads share a
// key, in packs of 16 bytes; a block has the keys of a head, or `chunk` of them, and each group of L threads
// every GROUPS-th. Maxima are taken out as they are found (arXiv 1805.02867) and the groups joined: in
// a warp, then in the block, then, where there are several chunks, by another kernel.

#include "common.cuh"

namespace {

constexpr int WARPS = 8, AHEAD = 4;  // of a block; keys, and values, that a thread loads before it uses them
constexpr float LOWEST = -1e30f;     // in place of -inf, of which a difference would be NaN

struct Problem {
    const int64_t* position;
    float* parts;  // [b, n, chunks, d + 2]: a sum that is not divided, its maximum and its divisor; or null
    int64_t b, g, chunk, window, q_b, k_b, v_b;  // window -1: none; strides of q, k and v over rows
    float scale, cap;                            // cap 0: none
};

// Joins x, relative to `top`, with another sum; both are relative to the new top then.
struct Joined {
    float mine, other, top;
    __device__ __forceinline__ Joined(float a, float b)
        : mine(expf(a - fmaxf(a, b))), other(expf(b - fmaxf(a, b))), top(fmaxf(a, b)) {}
};

template <typename T, int R, int L>
__global__ void __launch_bounds__(32 * WARPS, 1)
    attend_one_keys(T* out, const T* q, const T* k, const T* v, T* keys, T* values, Problem a) {
    wait_for_previous_kernel();
    using P = Pack<T>;
    constexpr int N = P::size, D = L * N, GROUPS = 32 * WARPS / L;
    __shared__ float tops[WARPS][R], sums[WARPS][R], rows[WARPS][D];
    const int column = threadIdx.x % L * N, group = threadIdx.x / L, warp = threadIdx.x / 32;
    const int64_t row = blockIdx.y / a.g, head = blockIdx.y % a.g, p = *a.position;
    const int64_t first = blockIdx.x * a.chunk, seen = a.window < 0 || p < a.window ? 0 : p - a.window;
    const int64_t begin = first > seen ? first : seen, end = first + a.chunk <= p ? first + a.chunk : p + 1;
    float query[R][N], total[R][N] = {}, top[R], sum[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const P pack = load_pack(reinterpret_cast<const P*>(q + row * a.q_b + (head * R + r) * D + column));
#pragma unroll
        for (int i = 0; i < N; ++i) query[r][i] = pack[i] * a.scale;
        top[r] = LOWEST;
    }
    for (int64_t base = begin; base < end; base += GROUPS * AHEAD) {
        P key[AHEAD], value[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int64_t j = base + i * GROUPS + group, at = (j * a.b + row) * a.g * D + head * D + column;
            key[i] = value[i] = P{};
            if (j < end && j < p) {
                key[i] = load_pack(reinterpret_cast<const P*>(keys + at));
                value[i] = load_pack(reinterpret_cast<const P*>(values + at));
            } else if (j < end) {
                key[i] = load_pack(reinterpret_cast<const P*>(k + row * a.k_b + head * D + column));
                value[i] = load_pack(reinterpret_cast<const P*>(v + row * a.v_b + head * D + column));
                *reinterpret_cast<P*>(keys + at) = key[i];
                *reinterpret_cast<P*>(values + at) = value[i];
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const bool there = base + i * GROUPS + group < end;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float z = 0.0f;
#pragma unroll
                for (int c = 0; c < N; ++c) z += query[r][c] * key[i][c];
#pragma unroll
                for (int step = L / 2; step > 0; step /= 2) z += __shfl_xor_sync(0xffffffff, z, step);
                if (a.cap > 0.0f) z = a.cap * tanhf(z / a.cap);
                const Joined by(top[r], there ? z : -INFINITY);
                const float weight = there ? expf(z - by.top) : 0.0f;  // keeps a NaN, as by.top does not
                top[r] = by.top;
                sum[r] = sum[r] * by.mine + weight;
#pragma unroll
                for (int c = 0; c < N; ++c) total[r][c] = total[r][c] * by.mine + weight * value[i][c];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int step = L; step < 32; step *= 2) {
            const Joined by(top[r], __shfl_xor_sync(0xffffffff, top[r], step));
            top[r] = by.top;
            sum[r] = sum[r] * by.mine + __shfl_xor_sync(0xffffffff, sum[r], step) * by.other;
#pragma unroll
            for (int c = 0; c < N; ++c)
                total[r][c] =
                    total[r][c] * by.mine + __shfl_xor_sync(0xffffffff, total[r][c], step) * by.other;
        }
        if (threadIdx.x % 32 == 0) tops[warp][r] = top[r], sums[warp][r] = sum[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float most = LOWEST, divisor = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, tops[w][r]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) divisor += sums[w][r] * expf(tops[w][r] - most);
        if (threadIdx.x % 32 < L) {
#pragma unroll
            for (int c = 0; c < N; ++c) rows[warp][column + c] = total[r][c] * expf(top[r] - most);
        }
        __syncthreads();
        const int64_t place = blockIdx.y * R + r;
        for (int c = threadIdx.x; c < D; c += 32 * WARPS) {
            float x = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) x += rows[w][c];
            if (a.parts == nullptr) {
                out[place * D + c] = from_float<T>(x / divisor);
                continue;
            }
            float* part = a.parts + (place * gridDim.x + blockIdx.x) * (D + 2);
            part[c] = x;
            if (c == 0) part[D] = most, part[D + 1] = divisor;
        }
        __syncthreads();
    }
}

// A block has a row of a head, a thread one of its columns.
template <typename T>
__global__ void attend_one_join(T* out, const float* parts, int chunks) {
    wait_for_previous_kernel();
    const int d = blockDim.x;
    const float* part = parts + static_cast<int64_t>(blockIdx.x) * chunks * (d + 2);
    float most = LOWEST, x = 0.0f, divisor = 0.0f;
    for (int i = 0; i < chunks; ++i) most = fmaxf(most, part[i * (d + 2) + d]);
    for (int i = 0; i < chunks; ++i) {
        const float factor = expf(part[i * (d + 2) + d] - most);
        x += part[i * (d + 2) + threadIdx.x] * factor;
        divisor += part[i * (d + 2) + d + 1] * factor;
    }
    out[static_cast<int64_t>(blockIdx.x) * d + threadIdx.x] = from_float<T>(x / divisor);
}

// Runs body(integral_constant) of the one of these values that `value` is.
template <int... VALUES, typename Body>
void with_value(int64_t value, const char* what, Body body) {
    const bool found = ((value == VALUES && (body(std::integral_constant<int, VALUES>{}), true)) || ...);
    if (!found) throw std::runtime_error("attend_one: " + std::to_string(value) + what);
}

}  // namespace

// chunks: of the first `span` keys, which cover p; parts may be null if it is 1.
void attend_one(Address out, Address parts, Address q, Address k, Address v, Address keys, Address values,
                Address position, int64_t q_b, int64_t k_b, int64_t v_b, int64_t b, int64_t n, int64_t g,
                int64_t d, int64_t span, int64_t chunks, int64_t window, double scale, double cap, int type,
                Address stream) {
    if (b * n * d == 0) return;
    if (b * g > 65535) throw std::runtime_error("attend_one: more than 65535 rows of key heads");
    const Problem a{position,
                    chunks > 1 ? static_cast<float*>(parts) : nullptr,
                    b,
                    g,
                    (span + chunks - 1) / chunks,
                    window,
                    q_b,
                    k_b,
                    v_b,
                    static_cast<float>(scale),
                    static_cast<float>(cap)};
    const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(b * g));
    with_type(type, [&](auto element) {
        using T = decltype(element);
        with_value<1, 2, 4, 8>(n / g, " query heads of a key head", [&](auto shared) {
            with_value<8, 16, 32>(d / Pack<T>::size, " packs of a head", [&](auto lanes) {
                launch(attend_one_keys<T, shared(), lanes()>, grid, 32 * WARPS, 0, stream, out, q, k, v, keys,
                       values, a);
            });
        });
        if (chunks > 1) {
            launch(attend_one_join<T>, static_cast<unsigned>(b * n), static_cast<unsigned>(d), 0, stream, out,
                   parts, static_cast<int>(chunks));
        }
    });
    check_launch("attend_one");
}
