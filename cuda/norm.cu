// RMSNorm and LayerNorm over the last dimension, with an optional add before; back: norm_backward.cu.
//
//     x, residual, y, total [rows, h]     mean, rstd [rows] fp32
//     weight w, bias b [h], of the type of x or fp32
//     v = x, or total = x + residual rounded to their type       w counts from 0 or, with from_one, from 1
//         x_bias [h] of their type: total = m (x + x_bias) + residual, m of dropout (dropout.cuh) or 1
//     RMSNorm    y = v rstd w                 rstd = 1 / sqrt(mean(v^2) + eps)          (arXiv 1910.07467)
//     LayerNorm  y = (v - mean) rstd w + b    rstd = 1 / sqrt(mean((v - mean)^2) + eps) (arXiv 1607.06450)
//
// The naive loop, in fp32:  for r:     rstd[r] = rsqrt(sum_c x[r][c]^2 / h + eps)
//                           for r, c:  y[r][c] = x[r][c] rstd[r] w[c]
//
// Bytes in 16 bits a value: 4, with the add 8 (two read, two written). `group` threads hold a row in
// registers between its passes, so each value is read once: a few lanes when it is short, a block when it is
// long. The total is rounded before its statistics are taken, as the backward will read it. Rows that are not
// whole packs of 16 bytes, and those longer than 2048 packs, take the plain kernel, which reads them once a
// pass.

#include "dropout.cuh"
#include "norm.cuh"

namespace {

constexpr int TEAMS = 128;  // threads of a block that has several rows
constexpr int BLOCKS = 64;  // a multiprocessor; more rows than that: a loop

struct Forward {
    void *out, *total;
    float *rstd, *mean;  // no mean: RMSNorm
    const void *x, *residual, *weight, *bias;
    int64_t rows, width;  // of a row, in elements (plain) or packs
    float h, eps, from;   // `from` is added to the weight
    bool wide;            // weight and bias are fp32
    int group;            // threads of a row: a power of two up to 32, or all of the block
    const void* x_bias;
    Dropout dropout;
};

// The row in registers, packs lane, lane + group, ...; all loads are in flight before the first is used.
template <bool ADD, bool BRANCH, typename T, int PER>
__device__ __forceinline__ void load_row(Pack<T> (&x)[PER], const Forward& a, int64_t row, int packs,
                                         int lane) {
    using P = Pack<T>;
    const int64_t begin = row * a.width;
    const bool dropped = BRANCH && a.dropout.positions != nullptr;
    const P* from = static_cast<const P*>(a.x) + begin;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
        if (lane + k * a.group < packs) x[k] = load_pack(from + lane + k * a.group);
    }
    if constexpr (!ADD) return;
    P other[PER];
    from = static_cast<const P*>(a.residual) + begin;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
        if (lane + k * a.group < packs) other[k] = load_pack(from + lane + k * a.group);
    }
    P* total = static_cast<P*>(a.total) + begin;
    const uint64_t hash = dropped && packs > 0 ? row_hash(a.dropout, row) : 0;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
        const int pack = lane + k * a.group;
        if (pack >= packs) continue;
        float sum[P::size];
#pragma unroll
        for (int i = 0; i < P::size; ++i) sum[i] = x[k][i];
        if constexpr (BRANCH) {
            if (a.x_bias != nullptr) {
                const P bias = load_pack(static_cast<const P*>(a.x_bias) + pack);
#pragma unroll
                for (int i = 0; i < P::size; ++i) sum[i] += bias[i];
            }
            if (dropped) drop(sum, a.dropout, hash, pack * P::size);
        }
#pragma unroll
        for (int i = 0; i < P::size; ++i) sum[i] += other[k][i];
        x[k].set(sum);
        keep_packed(x[k]);
        total[pack] = x[k];
    }
}

// Weights of a thread's packs: in flight while the row is summed up, if registers suffice (RMSNorm) and they
// are of the type of x; else loaded when they are needed.
template <typename T, int PER, bool EARLY>
struct Weights {
    Pack<T> early[EARLY ? PER : 1];

    __device__ __forceinline__ void load(const Forward& a, int packs, int lane) {
        if constexpr (EARLY) {
            if (a.wide) return;
#pragma unroll
            for (int k = 0; k < PER; ++k) {
                const int pack = lane + k * a.group;
                if (pack < packs) early[k] = static_cast<const Pack<T>*>(a.weight)[pack];
            }
        }
    }

    // Of pack k of the thread, the row's number `pack`.
    template <int N>
    __device__ __forceinline__ void get(float (&to)[N], const Forward& a, int k, int pack) const {
        if constexpr (EARLY) {
            if (!a.wide) {
#pragma unroll
                for (int i = 0; i < N; ++i) to[i] = early[k][i];
                return;
            }
        }
        parameters<T>(to, a.weight, a.wide, pack);
    }
};

template <typename T, int PER, bool ADD, bool BRANCH, bool CENTRED>
__global__ void __launch_bounds__(MOST) norm_forward_rows(const Forward a) {
    wait_for_previous_kernel();
    using P = Pack<T>;
    __shared__ float shared[2][WARPS];
    int lane = threadIdx.x % a.group;
    const int group = a.group, team = threadIdx.x / group, teams = blockDim.x / group;
    int turn = 0;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * teams; first < a.rows;
         first += static_cast<int64_t>(gridDim.x) * teams) {
        const int64_t row = first + team, begin = row * a.width;
        const int packs =
            row < a.rows ? static_cast<int>(a.width) : 0;  // past the last row: none, but take part
        P x[PER];
        Weights<T, PER, !CENTRED> weights;
        load_row<ADD, BRANCH>(x, a, row, packs, lane);
        weights.load(a, packs, lane);
        float sum[1] = {0.0f}, mean = 0.0f;
        if constexpr (CENTRED) {
#pragma unroll
            for (int k = 0; k < PER; ++k) {
                if (lane + k * group >= packs) continue;
#pragma unroll
                for (int i = 0; i < P::size; ++i) sum[0] += x[k][i];
                keep_packed(x[k]);
            }
            over_group(sum, group, shared, turn);
            mean = sum[0] / a.h;
            sum[0] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < PER; ++k) {
            if (lane + k * group >= packs) continue;
#pragma unroll
            for (int i = 0; i < P::size; ++i) {
                const float d = CENTRED ? x[k][i] - mean : x[k][i];
                sum[0] += d * d;
            }
            keep_packed(x[k]);
        }
        over_group(sum, group, shared, turn);
        const float rstd = rsqrtf(sum[0] / a.h + a.eps);
        if (lane == 0 && packs > 0) {
            a.rstd[row] = rstd;
            if (CENTRED) a.mean[row] = mean;
        }
        asm("" : "+r"(lane));  // places are counted again, which costs less than keeping them
        P* out = static_cast<P*>(a.out) + begin;
#pragma unroll
        for (int k = 0; k < PER; ++k) {
            const int pack = lane + k * group;
            if (pack >= packs) continue;
            float w[P::size], b[P::size], y[P::size];
            weights.get(w, a, k, pack);
            if (CENTRED) parameters<T>(b, a.bias, a.wide, pack);
#pragma unroll
            for (int i = 0; i < P::size; ++i) {
                const float n = (CENTRED ? x[k][i] - mean : x[k][i]) * rstd * (w[i] + a.from);
                y[i] = CENTRED ? n + b[i] : n;
            }
            x[k].set(y);
            out[pack] = x[k];
        }
    }
}

// Any row, by single elements: read again for each pass, from the cache as long as it fits there.
template <typename T>
__global__ void __launch_bounds__(PLAIN) norm_forward_plain(const Forward a) {
    wait_for_previous_kernel();
    __shared__ float shared[2][WARPS];
    int turn = 0;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int64_t begin = row * a.width;
        const T* x = static_cast<const T*>(a.x) + begin;
        if (a.residual != nullptr) {
            T* total = static_cast<T*>(a.total) + begin;
            const T* other = static_cast<const T*>(a.residual) + begin;
            const bool dropped = a.dropout.positions != nullptr;
            const uint64_t hash = dropped ? row_hash(a.dropout, row) : 0;
            for (int64_t c = threadIdx.x; c < a.width; c += PLAIN) {
                float v[1] = {to_float(x[c])};
                if (a.x_bias != nullptr) v[0] += to_float(static_cast<const T*>(a.x_bias)[c]);
                if (dropped) drop(v, a.dropout, hash, c);
                total[c] = from_float<T>(v[0] + to_float(other[c]));
            }
            x = total;  // each thread reads what it wrote itself
        }
        float sum[1] = {0.0f}, mean = 0.0f;
        if (a.mean != nullptr) {
            for (int64_t c = threadIdx.x; c < a.width; c += PLAIN) sum[0] += to_float(x[c]);
            over_group(sum, PLAIN, shared, turn);
            mean = sum[0] / a.h;
            sum[0] = 0.0f;
        }
        for (int64_t c = threadIdx.x; c < a.width; c += PLAIN) {
            const float d = to_float(x[c]) - mean;
            sum[0] += d * d;
        }
        over_group(sum, PLAIN, shared, turn);
        const float rstd = rsqrtf(sum[0] / a.h + a.eps);
        if (threadIdx.x == 0) {
            a.rstd[row] = rstd;
            if (a.mean != nullptr) a.mean[row] = mean;
        }
        T* out = static_cast<T*>(a.out) + begin;
        for (int64_t c = threadIdx.x; c < a.width; c += PLAIN) {
            const float b = a.bias != nullptr ? parameter<T>(a.bias, a.wide, c) : 0.0f;
            out[c] = from_float<T>(
                (to_float(x[c]) - mean) * rstd * (parameter<T>(a.weight, a.wide, c) + a.from) + b);
        }
    }
}

// Split alike with the add and without: a sum that is normalized again gives the same bits.
template <typename T, bool ADD, bool BRANCH>
void launch_forward(Forward a, int64_t packs, cudaStream_t stream) {
    const Split s = packs == 0 ? Split{} : split(packs, TEAMS, 4);
    if (s.per == 0) {
        launch(norm_forward_plain<T>, blocks_for(a.rows, BLOCKS), PLAIN, 0, stream, a);
        return;
    }
    a.width = packs, a.group = s.group;
    const int64_t teams = s.threads / s.group;
    const unsigned blocks = blocks_for((a.rows + teams - 1) / teams, BLOCKS);
    const auto run = [&](auto per) {
        constexpr int PER = decltype(per)::value;
        auto* kernel = a.mean ? norm_forward_rows<T, PER, ADD, BRANCH, true>
                              : norm_forward_rows<T, PER, ADD, BRANCH, false>;
        launch(kernel, blocks, s.threads, 0, stream, a);
    };
    s.per == 2 ? run(std::integral_constant<int, 2>{}) : run(std::integral_constant<int, 4>{});
}

}  // namespace

void norm_forward(Address out, Address total, Address rstd, Address mean, Address x, Address residual,
                  Address weight, Address bias, Address x_bias, int64_t rows, int64_t h, double eps,
                  int from_one, int type, int weight_type, Address positions, Address samples, int64_t batch,
                  int64_t key, int64_t least, double scale, Address stream) {
    if (rows * h == 0) return;
    bool whole = true;
    for (const Address& a : {out, total, x, residual, weight, bias, x_bias})
        whole = whole && aligned(a.value);
    with_type(type, [&](auto element) {
        using T = decltype(element);
        whole = whole && h % Pack<T>::size == 0;
        Forward a{out,
                  total,
                  rstd,
                  mean,
                  x,
                  residual,
                  weight,
                  bias,
                  rows,
                  h,
                  static_cast<float>(h),
                  static_cast<float>(eps),
                  from_one ? 1.0f : 0.0f,
                  weight_type == FP32,
                  PLAIN,
                  x_bias,
                  dropout_of(positions, samples, batch, key, least, scale)};
        const int64_t packs = whole ? h / Pack<T>::size : 0;
        const bool branch = x_bias.value || positions.value;
        branch                  ? launch_forward<T, true, true>(a, packs, stream)
        : a.residual != nullptr ? launch_forward<T, true, false>(a, packs, stream)
                                : launch_forward<T, false, false>(a, packs, stream);
    });
    check_launch("norm_forward");
}
