// Rows added to rows: attention to some of the keys joined with attention to others, and sums of gradients.
//
//     rows (i, h), i < s places of h < heads, each of d values; `part` has rows for `count` of the places:
//     j(i) = numbers[i], or i - begin; where that is none of 0 .. count - 1 the row stays as it is
//     with log-sum-exps:     l = lse_out[h][i] = log(exp(lse[h][i]) + exp(lse_part[h][j]))
//                            out = exp(lse[h][i] - l) first + exp(lse_part[h][j] - l) part
//     without:               out = first + part
//
// The naive loop, in fp32:  for i, h, c:  out[i][h][c] = a first[i][h][c] + b part[j(i)][h][c]
//
// `first` and `out` are fp32 or of the type of `part`: the sums of a ring of ranks begin and end as results
// of kernels, and are fp32 between. Bytes a value of 16 bits, read and written once: 2 + 2 and 4 in the first
// sum, 4 + 2 and 4 in one between, which may be in place, 4 + 2 and 2 in the last.

#include "common.cuh"

namespace {

constexpr int THREADS = 256;

struct Rows {
    const int64_t* numbers;
    const float *lse, *lse_part;
    float* lse_out;
    int64_t s, heads, packs, begin, count;
};

// A thread has one pack of a row.
template <typename Out, typename First, typename Part>
__global__ void __launch_bounds__(THREADS)
    merge_packs(Out* out, const First* first, const Part* __restrict__ part, Rows rows) {
    const int64_t at = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
    if (at >= rows.s * rows.heads * rows.packs) return;
    const int64_t row = at / rows.packs, i = row / rows.heads, h = row % rows.heads;
    const int64_t j = rows.numbers ? rows.numbers[i] : i - rows.begin;
    const bool both = j >= 0 && j < rows.count;
    float a = 1.0f, b = 1.0f;
    if (rows.lse) {
        const float here = rows.lse[h * rows.s + i];
        float total = here;
        if (both) {
            const float there = rows.lse_part[h * rows.count + j], most = fmaxf(here, there);
            const float e1 = expf(here - most), e2 = expf(there - most);
            const bool none = most == -INFINITY;  // neither has seen a key
            total = none ? most : most + logf(e1 + e2);
            a = none ? 0.0f : e1 / (e1 + e2);
            b = none ? 0.0f : e2 / (e1 + e2);
        }
        if (at % rows.packs == 0) rows.lse_out[h * rows.s + i] = total;
    }
    if (!both && static_cast<const void*>(out) == static_cast<const void*>(first)) return;
    const First old = load_pack(first + at);
    float values[Out::size];
#pragma unroll
    for (int k = 0; k < Out::size; ++k) values[k] = old[k];
    if (both) {
        const Part more = load_pack(part + (j * rows.heads + h) * rows.packs + at % rows.packs);
#pragma unroll
        for (int k = 0; k < Out::size; ++k) values[k] = a * values[k] + b * more[k];
    }
    Out sum;
    sum.set(values);
    out[at] = sum;
}

template <typename T, int N>
void run(Address out, Address first, Address part, Rows rows, int out_type, int first_type, Address stream) {
    const int64_t blocks = (rows.s * rows.heads * rows.packs + THREADS - 1) / THREADS;
    auto launch = [&](auto o, auto f) {
        merge_packs<Pack<decltype(o), N>, Pack<decltype(f), N>, Pack<T, N>>
            <<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(out, first, part, rows);
    };
    auto with_first = [&](auto o) { first_type == FP32 ? launch(o, float{}) : launch(o, T{}); };
    out_type == FP32 ? with_first(float{}) : with_first(T{});
}

}  // namespace

void merge_rows(Address out, Address first, Address part, Address numbers, Address lse, Address lse_part,
                Address lse_out, int64_t s, int64_t heads, int64_t d, int64_t begin, int64_t count,
                int out_type, int first_type, int type, Address stream) {
    if (s * heads * d == 0) return;
    const bool whole =
        d % 8 == 0 && aligned(out.value, 32) && aligned(first.value, 32) && aligned(part.value, 32);
    const Rows rows{numbers, lse, lse_part, lse_out, s, heads, whole ? d / 8 : d, begin, count};
    with_type(type, [&](auto element) {
        using T = decltype(element);
        whole ? run<T, 8>(out, first, part, rows, out_type, first_type, stream)
              : run<T, 1>(out, first, part, rows, out_type, first_type, stream);
    });
    check_launch("merge_rows");
}
