// AdamW over one flat shard, and the sums of squares of its pieces.
//
//     g = grad / grad_scale       m = beta1 m + (1 - beta1) g       v = beta2 v + (1 - beta2) g^2
//     w = w (1 - lr decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
//     (arXiv 1711.05101)
//
// The naive loop, in fp32:  for each segment, for i in start..stop-1: the four assignments above
//
// main, params, grads, exp_avg, exp_avg_sq are flat and of one length. The segments are a table [count, 4] of
// int64 on the device, rows (start, stop, first, kind): first is the segment's first block; bits of `kind`
// are 1: the second learning rate, 2: weight decay. A block has `chunk` elements of one segment; elements of
// no segment are unchanged. All values that change from step to step are fp32 on the device, too: step (the
// number of this update, from 1), values (lr, decoupled lr, decay), grad_scale, skip (not 0: only a copy in
// E4M3 and its amax are updated, from the unchanged w).
//
// The main parameters are fp32, with a copy in 16 bits or E4M3 if wanted. A copy in E4M3 is
// fp8(bf16(w) * scale), saturating, equal to the cast of a bf16 copy, with a scale and an amax per segment,
// fp32 on the device: a segment is then one parameter or a part of it, which has one scale, and
// amax = max(amax, |bf16(w)|) of the new w. Moments are fp32 or bf16, rounded to nearest.
//
// Bytes an element, fp32 moments and gradients: 30 with a copy (4 + 12 read, 12 + 2 written), 29 with one in
// E4M3 (skipped: 4 read, 1 written), 28 without; bf16 moments and a copy: 22 (4 + 8 read,
// 10 written). Squares: those of the gradients, once.

#include "fp8.cuh"

#include <cmath>

namespace {

constexpr int N = 4;  // elements of a pack: 16 bytes in fp32, 8 in bf16
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int RESIDENT = 2;  // blocks of a multiprocessor
#else
constexpr int RESIDENT = 3;  // 80 registers, 48 KB in flight in fp32
#endif
constexpr int ALIGN = 8;  // packs are counted from a multiple of this before a segment's start

struct Segment {
    int64_t start, stop, first, kind;
};

// What a block works on: whole packs in [first, last), single elements in [begin, first) and [last, end).
struct Range {
    int64_t begin, first, last, end;
    int kind, segment;
};

// Contains at least one barrier. All threads test the table at once: one round trip to memory.
__device__ __forceinline__ Range own_range(const Segment* table, int count, int64_t chunk, int size,
                                           bool whole) {
    const auto block = static_cast<int64_t>(blockIdx.x);
    int below = 0;
    for (int i = 0; i < count; i += THREADS) {
        const int at = i + static_cast<int>(threadIdx.x);
        below += __syncthreads_count(at < count && table[at].first <= block);
    }
    const Segment own = table[below - 1];
    const int64_t base = own.start / ALIGN * ALIGN + (block - own.first) * chunk;
    Range range;
    range.begin = max(own.start, base);
    range.end = min(own.stop, base + chunk);
    range.first = whole ? min((range.begin + size - 1) / size * size, range.end) : range.end;
    range.last = max(range.first, range.end / size * size);
    range.kind = static_cast<int>(own.kind);
    range.segment = below - 1;
    return range;
}

// The single elements before and after the whole packs.
template <typename Body>
__device__ __forceinline__ void each_alone(const Range& range, Body body) {
    const auto before = static_cast<int>(range.first - range.begin);
    const int all = before + static_cast<int>(range.end - range.last);
    for (int i = static_cast<int>(threadIdx.x); i < all; i += THREADS) {
        body(i < before ? range.begin + i : range.last + (i - before));
    }
}

template <typename T, int K>
__device__ __forceinline__ Pack<T, K> load(const void* from, int64_t i) {
    return load_pack(reinterpret_cast<const Pack<T, K>*>(static_cast<const T*>(from) + i));
}

template <typename T, int K>
__device__ __forceinline__ void store(void* to, int64_t i, const Pack<T, K>& pack) {
    *reinterpret_cast<Pack<T, K>*>(static_cast<T*>(to) + i) = pack;
}

// Numbers that all elements share, made by one thread.
struct Scalars {
    const float *step, *values, *grad_scale, *skip;
};

struct Hyper {
    double log_beta1, log_beta2;
    float beta1, beta2, rest1, rest2, eps;  // rest: 1 - beta
};

struct Now {
    float scale, rate, root, eps, decay;  // of this step, with the bias corrections in rate and root
    float cast;                           // the scale of a copy in E4M3
};

struct Flat {
    void *main, *params;
    const void* grads;
    void *exp_avg, *exp_avg_sq;
    int copy;            // the type of params, -1 for none
    const float* scale;  // of a copy in E4M3, as amax
    unsigned* amax;
};

template <int K>
struct Whole {
    Pack<float, K> main;

    __device__ __forceinline__ void read(const Flat& flat, int64_t i) { main = load<float, K>(flat.main, i); }
    __device__ __forceinline__ float get(int k) const { return main[k]; }
    __device__ __forceinline__ void set(int k, float x) { main.values[k] = x; }
    __device__ __forceinline__ void write(const Flat& flat, int64_t i, const Now&) const {
        store(flat.main, i, main);
        if (flat.copy == BF16) copy<__nv_bfloat16>(flat.params, i);
        if (flat.copy == FP16) copy<__half>(flat.params, i);
    }
    template <typename T>
    __device__ __forceinline__ void copy(void* params, int64_t i) const {
        Pack<T, K> pack;
#pragma unroll
        for (int k = 0; k < K; ++k) pack.set(k, main[k]);
        store(params, i, pack);
    }
};

template <int K>
struct Cast : Whole<K> {
    __device__ __forceinline__ float kept(int k) const {  // of a parameter in bf16
        return to_float(from_float<__nv_bfloat16>(this->main[k]));
    }
    __device__ __forceinline__ void write(const Flat& flat, int64_t i, const Now& now) const {
        store(flat.main, i, this->main);
        cast(flat, i, now);
    }
    __device__ __forceinline__ void cast(const Flat& flat, int64_t i, const Now& now) const {
        const float s = now.cast;
        auto* to = static_cast<uint8_t*>(flat.params) + i;
        if constexpr (K == 4) {
            *reinterpret_cast<unsigned*>(to) = four<E4M3>(kept(0) * s, kept(1) * s, kept(2) * s, kept(3) * s);
        } else {
            *to = static_cast<uint8_t>(two<E4M3>(kept(0) * s, 0.0f));
        }
    }
};

// K neighbouring elements: read, worked on, written.
template <template <int> class Main, typename G, typename M, typename V, int K>
struct Elements {
    Main<K> main;
    Pack<G, K> grad;
    Pack<M, K> exp_avg;
    Pack<V, K> exp_avg_sq;

    __device__ __forceinline__ void read(const Flat& flat, int64_t i) {
        main.read(flat, i);
        grad = load<G, K>(flat.grads, i);
        exp_avg = load<M, K>(flat.exp_avg, i);
        exp_avg_sq = load<V, K>(flat.exp_avg_sq, i);
    }

    __device__ __forceinline__ void update(const Flat& flat, int64_t i, const Now& now, const Hyper& hyper) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const float g = grad[k] / now.scale;
            const float m =
                fmaf(hyper.rest1, g, hyper.beta1 * exp_avg[k]);  // spelled out: alike in all variants
            const float v = fmaf(hyper.rest2 * g, g, hyper.beta2 * exp_avg_sq[k]);
            main.set(k, fmaf(main.get(k), now.decay, -now.rate * m / fmaf(sqrtf(v), now.root, now.eps)));
            exp_avg.set(k, m);
            exp_avg_sq.set(k, v);
        }
        main.write(flat, i, now);
        store(flat.exp_avg, i, exp_avg);
        store(flat.exp_avg_sq, i, exp_avg_sq);
    }
};

template <template <int> class Main, typename G, typename M, typename V>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    adamw_update(Flat flat, const Segment* table, int count, int64_t chunk, bool whole, Scalars scalars,
                 Hyper hyper) {
    wait_for_previous_kernel();
    constexpr int STEP = THREADS * N;
    constexpr bool CAST = std::is_same_v<Main<N>, Cast<N>>;
    __shared__ double corrections[2];
    const bool skip = *scalars.skip != 0.0f;
    if (!CAST && skip) return;
    if (threadIdx.x < 2) {  // 1 - beta^step
        corrections[threadIdx.x] =
            -expm1(*scalars.step * (threadIdx.x == 0 ? hyper.log_beta1 : hyper.log_beta2));
    }
    const Range own = own_range(table, count, chunk, N, whole);
    const float lr = scalars.values[own.kind & 1];
    Now now;
    now.scale = *scalars.grad_scale;
    now.rate = lr / static_cast<float>(corrections[0]);
    now.root = rsqrtf(static_cast<float>(corrections[1]));
    now.eps = hyper.eps;
    now.decay = own.kind & 2 ? 1.0f - lr * scalars.values[2] : 1.0f;
    if constexpr (CAST) now.cast = flat.scale[own.segment];
    unsigned largest = 0;
    auto note = [&](const auto& elements, int size) {
        if constexpr (CAST) {
#pragma unroll
            for (int k = 0; k < size; ++k) largest = max(largest, bits_of(elements.main.kept(k)));
        }
    };
    auto work = [&](auto& elements, int64_t i, int size) {
        if constexpr (CAST) {
            if (skip) {
                elements.main.read(flat, i);
                elements.main.cast(flat, i, now);
                return note(elements, size);
            }
        }
        elements.read(flat, i);
        elements.update(flat, i, now, hyper);
        note(elements, size);
    };
    each_alone(own, [&](int64_t i) {
        Elements<Main, G, M, V, 1> element;
        work(element, i, 1);
    });
    const auto length = static_cast<int>(own.last - own.first);
    for (int i = static_cast<int>(threadIdx.x) * N; i < length; i += STEP) {
        Elements<Main, G, M, V, N> elements;
        work(elements, own.first + i, N);
    }
    if constexpr (CAST) {
        raise_to(flat.amax + own.segment, largest_of_block(largest));
    }
}

// Over all threads of a block, in fixed order; only thread 0 gets the sum.
__device__ __forceinline__ double sum_over_block(double x, double* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 1; threadIdx.x == 0 && warp < THREADS / 32; ++warp) x += shared[warp];
    return x;
}

// Of each block's range, sum of squares and number of zeros. partial: [2, blocks]
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sum_squares(double* __restrict__ partial, const T* __restrict__ x, const Segment* __restrict__ table,
                int count, int64_t chunk, bool whole) {
    wait_for_previous_kernel();
    using P = Pack<T>;
    constexpr int BATCH = 4, STEP = THREADS * P::size;
    __shared__ double shared[THREADS / 32];
    const Range own = own_range(table, count, chunk, P::size, whole);
    double sum = 0.0;
    int zeros = 0;
    auto one = [&](float value) {
        sum = fma(static_cast<double>(value), static_cast<double>(value), sum);
        zeros += value == 0.0f;
    };
    each_alone(own, [&](int64_t i) { one(to_float(x[i])); });
    const auto length = static_cast<int>(own.last - own.first);
    for (int i = static_cast<int>(threadIdx.x) * P::size; i < length; i += STEP * BATCH) {
        P batch[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
            if (i + u * STEP < length) batch[u] = load<T, P::size>(x, own.first + i + u * STEP);
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            if (i + u * STEP >= length) break;
#pragma unroll
            for (int k = 0; k < P::size; ++k) one(batch[u][k]);
        }
    }
    sum = sum_over_block(sum, shared);
    const double found = sum_over_block(zeros, shared);
    if (threadIdx.x != 0) return;
    partial[blockIdx.x] = sum;
    partial[gridDim.x + blockIdx.x] = found;
}

// One block per segment: adds up the partial results of the segment's blocks. out: [2, count]
__global__ void __launch_bounds__(THREADS)
    sum_totals(double* __restrict__ out, const double* __restrict__ partial,
               const Segment* __restrict__ table, int count, int64_t blocks) {
    wait_for_previous_kernel();
    __shared__ double shared[THREADS / 32];
    const int own = static_cast<int>(blockIdx.x);
    const int64_t first = table[own].first, last = own + 1 < count ? table[own + 1].first : blocks;
    for (int which = 0; which < 2; ++which) {
        double sum = 0.0;
        for (int64_t i = first + threadIdx.x; i < last; i += THREADS) sum += partial[which * blocks + i];
        sum = sum_over_block(sum, shared);
        if (threadIdx.x == 0) out[which * static_cast<int64_t>(count) + own] = sum;
    }
}

template <typename Body>
void with_fp32_or_bf16(int type, Body body) {
    if (type != FP32 && type != BF16) throw std::runtime_error("element type is neither fp32 nor bf16");
    return type == FP32 ? body(float{}) : body(__nv_bfloat16{});
}

}  // namespace

void adamw(Address main, Address params, Address grads, Address exp_avg, Address exp_avg_sq, Address table,
           int64_t count, int64_t blocks, int64_t chunk, Address step, Address values, Address grad_scale,
           Address skip, double beta1, double beta2, double eps, int copy, int grad_type, int avg_type,
           int avg_sq_type, Address scale, Address amax, Address stream) {
    if (blocks == 0) return;
    const Flat flat{main, params, grads, exp_avg, exp_avg_sq, copy, scale, amax};
    const Scalars scalars{step, values, grad_scale, skip};
    const Hyper hyper{std::log(beta1),
                      std::log(beta2),
                      static_cast<float>(beta1),
                      static_cast<float>(beta2),
                      static_cast<float>(1.0 - beta1),
                      static_cast<float>(1.0 - beta2),
                      static_cast<float>(eps)};
    const bool whole = aligned(main.value) && aligned(params.value) && aligned(grads.value) &&
                       aligned(exp_avg.value) && aligned(exp_avg_sq.value);
    const auto grid = static_cast<unsigned>(blocks);
    with_fp32_or_bf16(grad_type, [&](auto grad) {
        with_fp32_or_bf16(avg_type, [&](auto avg) {
            with_fp32_or_bf16(avg_sq_type, [&](auto avg_sq) {
                using G = decltype(grad);
                using M = decltype(avg);
                using V = decltype(avg_sq);
                auto* kernel = copy == E4M3 ? &adamw_update<Cast, G, M, V> : &adamw_update<Whole, G, M, V>;
                launch(kernel, grid, THREADS, 0, stream, flat, table, static_cast<int>(count), chunk, whole,
                       scalars, hyper);
            });
        });
    });
    check_launch("adamw");
}

void sums_of_squares(Address out, Address partial, Address x, Address table, int64_t count, int64_t blocks,
                     int64_t chunk, int type, Address stream) {
    if (count == 0) return;
    const int segments = static_cast<int>(count);
    if (blocks > 0) {
        with_type(type, [&](auto element) {
            using T = decltype(element);
            const auto grid = static_cast<unsigned>(blocks);
            launch(sum_squares<T>, grid, THREADS, 0, stream, partial, x, table, segments, chunk,
                   aligned(x.value));
        });
    }
    launch(sum_totals, static_cast<unsigned>(count), THREADS, 0, stream, out, partial, table, segments,
           blocks);
    check_launch("sums_of_squares");
}
