// Cross entropy of logits whose columns may be cut over ranks, in two passes over memory.
//
//     x [rows, columns] with a row stride, any number of padding columns behind
//     labels [rows], counted from the first column here; one outside 0..columns-1 belongs to another rank
//     1. maximum = max_c x[r][c]     total = sum_c exp(x[r][c] - maximum)
//        target = x[r][label], or 0 if it is not here
//        (between the two, Python makes lse = log sum exp over all ranks, and loss = lse - target)
//     2. d loss / d x = grad[r] (exp(x[r][c] - lse[r]) - (c == label)), rounded once, and 0 in the padding
//        columns; may be written over x
//
// The naive loops, in fp32:
//     for r, c:  maximum[r] = max(maximum[r], x[r][c])      for r, c:  total[r] += exp(x[r][c] - maximum[r])
//     for r, c:  d[r][c] = grad[r] * (exp(x[r][c] - lse[r]) - (c == label[r]))
//
// Bytes in 16 bits a logit: 2 in the first pass (each thread keeps a running maximum and a sum that fits it,
// and they are merged: one read; Milakov and Gimelshein, arXiv 1805.02867), 4 in the second. Exponentials are
// __expf: off by 2 + 1.2 |x| in the last place, 1e-5 of a term of e^-80, 2e-7 of one that matters.

#include "common.cuh"

#include <cfloat>

namespace {

constexpr int THREADS = 256, UNROLL = 4;     // first pass: a block a row
constexpr int GRAD_UNROLL = 4, BATCHES = 2;  // second pass: several blocks a row

// The number of elements before the first whole pack.
template <typename T>
__device__ __forceinline__ int before_packs(const T* row, int columns) {
    const int bytes = static_cast<int>(-reinterpret_cast<std::uintptr_t>(row) & 15);
    return min(bytes / static_cast<int>(sizeof(T)), columns);
}

// The maximum of what was seen, at least -FLT_MAX, so that exp(-inf - maximum) is 0; NaN shows in the total.
struct Seen {
    float maximum = -FLT_MAX, total = 0.0f;

    template <typename P, int N>
    __device__ __forceinline__ void add(const P (&packs)[N]) {
        float top = maximum;
#pragma unroll
        for (int u = 0; u < N; ++u)
#pragma unroll
            for (int k = 0; k < P::size; ++k) top = fmaxf(top, packs[u][k]);
        total *= __expf(maximum - top);
        maximum = top;
#pragma unroll
        for (int u = 0; u < N; ++u) {
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < P::size; ++k) sum += __expf(packs[u][k] - top);
            total += sum;
        }
    }

    __device__ __forceinline__ void add_one(float x) {
        const float top = fmaxf(maximum, x);
        total = total * __expf(maximum - top) + __expf(x - top);
        maximum = top;
    }
};

// out: [3, rows], maxima, totals, targets. Rows of any alignment: elements before and after the whole packs
// are handled one by one.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4)
    cross_entropy_statistics(float* __restrict__ out, const T* __restrict__ logits,
                             const int64_t* __restrict__ labels, int64_t rows, int columns, int64_t stride) {
    wait_for_previous_kernel();
    using P = Pack<T>;
    __shared__ float shared[32];
    const int thread = static_cast<int>(threadIdx.x);
    P nothing;
#pragma unroll
    for (int k = 0; k < P::size; ++k) nothing.set(k, -INFINITY);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* x = logits + row * stride;
        const int head = before_packs(x, columns), packs = (columns - head) / P::size;
        const P* whole = reinterpret_cast<const P*>(x + head);
        Seen seen;
        for (int i = thread; i < packs; i += THREADS * UNROLL) {
            P batch[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                batch[u] = nothing;
                if (i + u * THREADS < packs) batch[u] = load_pack(whole + i + u * THREADS);
            }
            seen.add(batch);
        }
        const int tail = head + packs * P::size;
        if (thread < head) seen.add_one(to_float(x[thread]));
        if (thread < columns - tail) seen.add_one(to_float(x[tail + thread]));
        const float maximum = over_block<Max>(seen.maximum, shared);
        const float total = over_block<Sum>(seen.total * __expf(seen.maximum - maximum), shared);
        if (thread != 0) continue;
        const int64_t label = labels[row];
        const bool only_inf =
            total == 0.0f;  // the loops have exp(-inf + inf) then, and -inf, 0 for no columns
        const bool has_nan = isnan(total) && maximum < INFINITY;
        out[row] = only_inf ? -INFINITY : has_nan ? total : maximum;
        out[rows + row] = only_inf && columns > 0 ? NAN : total;
        out[2 * rows + row] = label >= 0 && label < columns ? to_float(x[label]) : 0.0f;
    }
}

// The inputs of one row's gradient.
struct Row {
    float grad, lse;
    int label;  // -1: not here

    __device__ __forceinline__ float of(float x, bool labelled) const {
        return grad * (__expf(x - lse) - (labelled ? 1.0f : 0.0f));
    }
};

// blockIdx.x is the piece of the row, THREADS * GRAD_UNROLL * BATCHES packs; the first piece has the elements
// outside whole packs, too. `out` may be `logits`: each element is read and then written by one thread.
template <typename T>
__global__ void __launch_bounds__(THREADS, 5)
    cross_entropy_gradient(T* out, const T* logits, const int64_t* labels, const float* lse,
                           const float* grad, int64_t rows, int columns, int width, int64_t out_stride,
                           int64_t stride) {
    wait_for_previous_kernel();
    using P = Pack<T>;
    constexpr int STEP = THREADS * GRAD_UNROLL;
    const int thread = static_cast<int>(threadIdx.x);
    for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
        const T* x = logits + r * stride;
        T* y = out + r * out_stride;
        const int64_t label = labels[r];
        const Row row{grad[r], lse[r], label >= 0 && label < columns ? static_cast<int>(label) : -1};
        const bool alike =
            ((reinterpret_cast<std::uintptr_t>(x) ^ reinterpret_cast<std::uintptr_t>(y)) & 15) == 0;
        const int head = alike ? before_packs(x, columns) : columns, packs = (columns - head) / P::size;
        const P* from = reinterpret_cast<const P*>(x + head);
        P* to = reinterpret_cast<P*>(y + head);
        const int begin = static_cast<int>(blockIdx.x) * STEP * BATCHES;
        const int end = min(packs, begin + STEP * BATCHES);
        for (int i = begin + thread; i < end; i += STEP) {
            P batch[GRAD_UNROLL];
#pragma unroll
            for (int u = 0; u < GRAD_UNROLL; ++u)
                if (i + u * THREADS < end) batch[u] = load_pack(from + i + u * THREADS);
#pragma unroll
            for (int u = 0; u < GRAD_UNROLL; ++u) {
                const int at = i + u * THREADS;
                if (at >= end) break;
                const int here = row.label - head - at * P::size;  // of the label, in this pack
                float d[P::size];
#pragma unroll
                for (int k = 0; k < P::size; ++k) d[k] = row.of(batch[u][k], k == here);
                batch[u].set(d);
                to[at] = batch[u];
            }
        }
        if (blockIdx.x != 0) continue;
        auto one = [&](int c) {
            y[c] = from_float<T>(c < columns ? row.of(to_float(x[c]), c == row.label) : 0.0f);
        };
        for (int c = thread; c < head; c += THREADS) one(c);
        for (int c = head + packs * P::size + thread; c < width; c += THREADS) one(c);
    }
}

}  // namespace

void cross_entropy_stats(Address out, Address logits, Address labels, int64_t rows, int64_t columns,
                         int64_t stride, int type, Address stream) {
    if (rows == 0) return;
    const auto blocks = static_cast<unsigned>(rows < INT32_MAX ? rows : INT32_MAX);
    with_type(type, [&](auto element) {
        using T = decltype(element);
        launch(cross_entropy_statistics<T>, blocks, THREADS, 0, stream, out, logits, labels, rows,
               static_cast<int>(columns), stride);
    });
    check_launch("cross_entropy_stats");
}

void cross_entropy_grad(Address out, Address logits, Address labels, Address lse, Address grad, int64_t rows,
                        int64_t columns, int64_t width, int64_t out_stride, int64_t stride, int type,
                        Address stream) {
    if (rows * width == 0) return;
    with_type(type, [&](auto element) {
        using T = decltype(element);
        constexpr int64_t PIECE = int64_t{THREADS} * GRAD_UNROLL * BATCHES * Pack<T>::size;
        const int64_t pieces = columns < 1 ? 1 : (columns + PIECE - 1) / PIECE;
        const dim3 blocks(static_cast<unsigned>(pieces), static_cast<unsigned>(rows < 65535 ? rows : 65535));
        launch(cross_entropy_gradient<T>, blocks, THREADS, 0, stream, out, logits, labels, lse, grad, rows,
               static_cast<int>(columns), static_cast<int>(width), out_stride, stride);
    });
    check_launch("cross_entropy_grad");
}
