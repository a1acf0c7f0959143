// Rotary position embedding: each pair of features (x1, x2) of a query or key head is rotated by its token's
// angle.
//
//     y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        the backward is the turn by -angle, of dy
//     pairs of the first r features of a head: (i, i + r/2), or interleaved (2i, 2i + 1);   angle i of r/2
//
//     out            [s, b, n + g + values, d]   any strides, the last dim contiguous; heads side by side
//     q, k, v        [s, b, n, d], [s, b, g, d], [s, b, values, d], each with strides of its own
//     cos, sin       fp32 [s, table_b, r/2], table_b = 1 or b
//
// The naive loop, in fp32:  for token, head < n + g, i:  the two lines above
//                           features from r on, and v:  copied
//
// q, k and out may be the same memory, the packed projection [s, b, (n + 2g) d] rotated in place: then
// neither v nor the features from r on are touched (values = 0, and features already in place are not
// copied). Bytes in 16 bits a value that turns: 4 (one read, one written). A thread keeps the cos and sin of
// its token and loops over heads, so the tables cost r/2 * 8 bytes a token against 2 * 2 (n + g) r. (arXiv
// 2104.09864)

#include "common.cuh"

namespace {

constexpr int THREADS = 256, UNROLL = 4;  // heads of a thread at a time, two packs of each

struct Heads {
    const void* from;
    int64_t s, b, h;  // strides
};

struct Problem {
    Heads q, k, v, out;
    const float *cos, *sin;
    int tokens, b, n, turned, heads;  // query heads; with key heads; with value heads
    int d, half, lanes;               // half = r/2; lanes: threads of a head
    bool per_sample, inverse;
};

// `size` floats from an address aligned to as many, or to 16 bytes.
template <int size>
__device__ __forceinline__ void load_floats(float* to, const float* from) {
    constexpr int N = size < 4 ? size : 4;
#pragma unroll
    for (int i = 0; i < size; i += N) {
        const auto pack = *reinterpret_cast<const Pack<float, N>*>(from + i);
#pragma unroll
        for (int k = 0; k < N; ++k) to[i + k] = pack.values[k];
    }
}

// A lane's share of a head: two packs, and where they are. Packs of one number hold the two of a pair. Larger
// ones lie half the features apart: interleaved they hold whole pairs, otherwise the first and the second of
// as many.
template <typename P, bool INTERLEAVED>
struct Share {
    static constexpr int N = P::size, TABLE = INTERLEAVED && N > 1 ? N / 2 : N;  // angles that lie together
    int first, second;
    float cos[N], sin[N];

    __device__ __forceinline__ void load(const Problem& a, int64_t row, int lane) {
        constexpr bool apart = !(INTERLEAVED && N == 1);
        first = apart ? lane * N : 2 * lane;
        second = apart ? a.half + lane * N : 2 * lane + 1;
        const int64_t at = row * a.half + lane * TABLE;
        load_floats<TABLE>(cos, a.cos + at);
        load_floats<TABLE>(sin, a.sin + at);
        if constexpr (TABLE < N) {
            load_floats<TABLE>(cos + TABLE, a.cos + at + a.half / 2);
            load_floats<TABLE>(sin + TABLE, a.sin + at + a.half / 2);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sin[i] = a.inverse ? -sin[i] : sin[i];
    }

    __device__ __forceinline__ void turn(P& x1, P& x2) const {
        float y1[N], y2[N];
        if constexpr (TABLE == N) {
#pragma unroll
            for (int i = 0; i < N; ++i) pair(y1[i], y2[i], x1[i], x2[i], i);
        } else {
#pragma unroll
            for (int i = 0; i < TABLE; ++i) {
                pair(y1[2 * i], y1[2 * i + 1], x1[2 * i], x1[2 * i + 1], i);
                pair(y2[2 * i], y2[2 * i + 1], x2[2 * i], x2[2 * i + 1], TABLE + i);
            }
        }
        x1.set(y1), x2.set(y2);
    }

    __device__ __forceinline__ void pair(float& x, float& y, float a, float b, int angle) const {
        x = a * cos[angle] - b * sin[angle];
        y = b * cos[angle] + a * sin[angle];
    }
};

// Of head `h` of a token: query, key or value.
template <typename T>
__device__ __forceinline__ const T* head_of(const Problem& a, int64_t s, int64_t b, int h) {
    const Heads& heads = h < a.n ? a.q : h < a.turned ? a.k : a.v;
    h -= h < a.n ? 0 : h < a.turned ? a.n : a.turned;
    return static_cast<const T*>(heads.from) + s * heads.s + b * heads.b + h * heads.h;
}

// A block has blockDim.y tokens; threadIdx.x counts lanes within heads, and heads.
template <typename T, int N, bool INTERLEAVED>
__global__ void __launch_bounds__(THREADS, 2) rope_turn_heads(T* out, Problem a) {
    wait_for_previous_kernel();
    using P = Pack<T, N>;
    const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= a.tokens) return;
    const int s = static_cast<int>(token) / a.b, b = static_cast<int>(token) % a.b;
    const int columns = blockDim.x / a.lanes, column = threadIdx.x / a.lanes;
    T* const to = out + s * a.out.s + b * a.out.b;
    for (int lane = threadIdx.x % a.lanes; lane < a.half / N; lane += a.lanes) {
        Share<P, INTERLEAVED> share;
        share.load(a, a.per_sample ? token : s, lane);
        for (int h = column; h < a.heads; h += UNROLL * columns) {
            P x1[UNROLL] = {}, x2[UNROLL] = {};
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (h + u * columns < a.heads) {
                    const T* from = head_of<T>(a, s, b, h + u * columns);
                    x1[u] = load_pack(reinterpret_cast<const P*>(from + share.first));
                    x2[u] = load_pack(reinterpret_cast<const P*>(from + share.second));
                }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int head = h + u * columns;
                keep_packed(x1[u]);
                keep_packed(x2[u]);
                if (head < a.heads) {
                    if (head < a.turned) share.turn(x1[u], x2[u]);
                    *reinterpret_cast<P*>(to + head * a.out.h + share.first) = x1[u];
                    *reinterpret_cast<P*>(to + head * a.out.h + share.second) = x2[u];
                }
            }
        }
    }
    if (2 * a.half == a.d) return;
    for (int h = column; h < a.heads; h += columns) {  // what does not turn, unless it is there already
        const T* from = head_of<T>(a, s, b, h);
        if (from == to + h * a.out.h) continue;
        for (int i = 2 * a.half + threadIdx.x % a.lanes; i < a.d; i += a.lanes) to[h * a.out.h + i] = from[i];
    }
}

template <typename T, int N>
void launch_turn(T* out, Problem& a, bool interleaved, cudaStream_t stream) {
    const int packs = a.half / N;
    a.lanes = packs < 1 ? 32 : packs < THREADS ? packs : THREADS;
    const int wanted = (a.heads + UNROLL - 1) / UNROLL, most = THREADS / a.lanes;
    const int columns = wanted < most ? wanted : most;
    const dim3 block(a.lanes * columns, THREADS / (a.lanes * columns));
    const unsigned grid = (static_cast<unsigned>(a.tokens) + block.y - 1) / block.y;
    if (interleaved) {
        launch(rope_turn_heads<T, N, true>, grid, block, 0, stream, out, a);
    } else {
        launch(rope_turn_heads<T, N, false>, grid, block, 0, stream, out, a);
    }
}

bool fits(const Heads& heads, int64_t count, int size, int bytes) {
    return count == 0 || (aligned(reinterpret_cast<std::uintptr_t>(heads.from), bytes) &&
                          heads.s % size == 0 && heads.b % size == 0 && heads.h % size == 0);
}

}  // namespace

void rope(Address out, int64_t out_s, int64_t out_b, int64_t out_h, Address q, int64_t q_s, int64_t q_b,
          int64_t q_h, Address k, int64_t k_s, int64_t k_b, int64_t k_h, Address v, int64_t v_s, int64_t v_b,
          int64_t v_h, Address cos, Address sin, int64_t s, int64_t b, int64_t n, int64_t g, int64_t values,
          int64_t d, int64_t r, int64_t table_b, int interleaved, int inverse, int type, Address stream) {
    if (s * b * (n + g + values) * d == 0) return;
    constexpr int64_t most = INT32_MAX / 2;
    if (s * b > most || n + g + values > most / UNROLL || d > most) {
        throw std::runtime_error("rope: more than 2^30 tokens, or too many heads or features");
    }
    Problem a{};
    a.q = {q, q_s, q_b, q_h}, a.k = {k, k_s, k_b, k_h}, a.v = {v, v_s, v_b, v_h},
    a.out = {out, out_s, out_b, out_h};
    a.cos = cos, a.sin = sin, a.tokens = static_cast<int>(s * b), a.b = static_cast<int>(b);
    a.n = static_cast<int>(n), a.turned = static_cast<int>(n + g), a.heads = static_cast<int>(n + g + values);
    a.d = static_cast<int>(d), a.half = static_cast<int>(r / 2);
    a.per_sample = table_b > 1, a.inverse = inverse;
    with_type(type, [&](auto element) {
        using T = decltype(element);
        constexpr int N = Pack<T>::size;
        const bool vectors = a.half % N == 0 && aligned(cos.value) && aligned(sin.value) &&
                             fits(a.q, n, N, 16) && fits(a.k, g, N, 16) && fits(a.v, values, N, 16) &&
                             fits(a.out, 1, N, 16);
        if (vectors) {
            launch_turn<T, N>(out, a, interleaved, stream);
        } else {
            launch_turn<T, 1>(out, a, interleaved, stream);
        }
    });
    check_launch("rope");
}
