// Rows added to rows: attention to some of the keys joined with attention to others, and sums of gradients.
//
//     places (i, h), i < s, h < heads, of d values; each of the parts p, four at most, has rows for some of
//     them: j_p(i) = numbers_p[i], or i - begin_p, where that is one of 0 .. count_p - 1
//     with log-sum-exps:     l = lse_out[h][i] = log(sum_p exp(lse_p[h][j_p]))
//                            out = sum_p exp(lse_p[h][j_p] - l) rows_p[j_p][h]
//     without:               out = sum_p rows_p[j_p][h]
//
// The naive loop, in fp32:  for i, h, c:  out[i][h][c] = sum over p of w_p rows_p[j_p(i)][h][c]
//
// The first part and `out` are fp32 or of the type of the others: sums begin and end as results of kernels,
// and are fp32 between. Each value is read and written once: 4 x 2 + 2 bytes where four parts of 16 bits make
// the whole, 4 + 2 and 4 where one is added to a sum, which may be in place.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, MOST = 4;

struct Part {
    const void* rows;
    const int64_t* numbers;
    const float* lse;
    int64_t begin, count;
};

struct Parts {
    Part each[MOST];
    float* lse_out;
    int64_t s, heads, packs;
    int number;
};

// A thread has one pack of a row. Index: of packs; divisions in 64 bits would take as long as the rest.
template <typename Index, typename Out, typename First, typename More>
__global__ void __launch_bounds__(THREADS) merge_packs(Out* out, const Parts parts) {
    wait_for_previous_kernel();
    const Index at = blockIdx.x * static_cast<Index>(THREADS) + threadIdx.x;
    const Index packs = static_cast<Index>(parts.packs), heads = static_cast<Index>(parts.heads);
    if (at >= static_cast<Index>(parts.s) * heads * packs) return;
    const Index row = at / packs, column = at % packs, i = row / heads, h = row % heads;
    int64_t pack[MOST];
    float weight[MOST], most = -INFINITY;
    bool others = false;
#pragma unroll
    for (int p = 0; p < MOST; ++p) {
        pack[p] = -1;
        weight[p] = 1.0f;
        if (p >= parts.number) continue;
        const Part& part = parts.each[p];
        const int64_t j = part.numbers ? part.numbers[i] : i - part.begin;
        if (j < 0 || j >= part.count) continue;
        pack[p] = (j * parts.heads + h) * parts.packs + column;
        others |= p > 0;
        if (parts.lse_out) most = fmaxf(most, weight[p] = part.lse[h * part.count + j]);
    }
    if (!others && !parts.lse_out && static_cast<const void*>(out) == parts.each[0].rows) return;
    First first;  // loaded before the weights are known, which takes as long
    More more[MOST - 1];
    if (pack[0] >= 0) first = load_pack(static_cast<const First*>(parts.each[0].rows) + pack[0]);
#pragma unroll
    for (int p = 1; p < MOST; ++p) {
        if (pack[p] >= 0) more[p - 1] = load_pack(static_cast<const More*>(parts.each[p].rows) + pack[p]);
    }
    if (parts.lse_out) {
        const bool none = most == -INFINITY;  // no part has seen a key
        float total = 0.0f;
#pragma unroll
        for (int p = 0; p < MOST; ++p) {
            weight[p] = pack[p] < 0 || none ? 0.0f : expf(weight[p] - most);
            total += weight[p];
        }
#pragma unroll
        for (int p = 0; p < MOST; ++p) weight[p] *= none ? 0.0f : 1.0f / total;
        if (column == 0) parts.lse_out[h * parts.s + i] = none ? most : most + logf(total);
    }
    float values[Out::size];
#pragma unroll
    for (int k = 0; k < Out::size; ++k) {
        values[k] = pack[0] < 0 ? 0.0f : weight[0] * first[k];
#pragma unroll
        for (int p = 1; p < MOST; ++p) {
            if (pack[p] >= 0) values[k] += weight[p] * more[p - 1][k];
        }
    }
    Out sum;
    sum.set(values);
    out[at] = sum;
}

template <typename T, int N>
void run(Address out, const Parts& parts, int out_type, int first_type, Address stream) {
    const int64_t blocks = (parts.s * parts.heads * parts.packs + THREADS - 1) / THREADS;
    auto with_types = [&](auto o, auto f) {
        using Index = std::conditional_t<N == 1, int64_t, uint32_t>;
        launch(merge_packs<Index, Pack<decltype(o), N>, Pack<decltype(f), N>, Pack<T, N>>,
               static_cast<unsigned>(blocks), THREADS, 0, stream, out, parts);
    };
    auto with_first = [&](auto o) { first_type == FP32 ? with_types(o, float{}) : with_types(o, T{}); };
    out_type == FP32 ? with_first(float{}) : with_first(T{});
}

}  // namespace

// table: on the host, for each part the addresses of its rows, numbers and log-sum-exps, begin and count.
void merge_rows(Address out, Address lse_out, Address table, int number, int64_t s, int64_t heads, int64_t d,
                int out_type, int first_type, int type, Address stream) {
    if (s * heads * d == 0) return;
    if (number < 1 || number > MOST) throw std::runtime_error("merge_rows takes one to four parts");
    Parts parts{{}, lse_out, s, heads, 0, number};
    bool whole = d % 8 == 0 && aligned(out.value, 32) && s * heads * (d / 8) < 0xffff0000;
    const int64_t* entry = table;
    for (int p = 0; p < number; ++p, entry += 5) {
        const auto address = [&](int i) { return Address{static_cast<std::uintptr_t>(entry[i])}; };
        parts.each[p] = Part{address(0), address(1), address(2), entry[3], entry[4]};
        whole = whole && aligned(address(0).value, 32);
    }
    parts.packs = whole ? d / 8 : d;
    with_type(type, [&](auto element) {
        using T = decltype(element);
        whole ? run<T, 8>(out, parts, out_type, first_type, stream)
              : run<T, 1>(out, parts, out_type, first_type, stream);
    });
    check_launch("merge_rows");
}
