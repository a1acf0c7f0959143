// Embedding: rows of a table looked up, and gradients added to the rows that tokens have looked up.
//
//     lookup      x[i][j] = table[id] * scale + positions[place]    of ids [b, s]; x is [s, b, h]
//                 id = ids[j][i] - first; zeros where the table has no such row (another rank has it)
//     add         target[id] += sum over the tokens t of this id of grad[t]
//
// The naive loops:  for t, c:  x[t][c] = table[id[t]][c] * scale + positions[place[t]][c]
//                   for t, c:  target[id[t]][c] += grad[t][c]
//
// Bytes in 16 bits an element: 2 h a token and 2 h a row that is looked up; backward 2 h a token, and 8 h a
// row of a target in fp32, which is read and written once.
//
// No atomics. Equal ids stand side by side (a stable sort); entry e of `ids` was number order[e] before, and
// has `repeats` rows of grad. A run is all tokens of an id. A warp adds PART tokens, for 32 packs of the
// columns, in their order and in fp32. A run that is whole in one part goes to its row at once; of one that
// crosses a limit each part leaves a sum, which a second kernel joins:
//
//     tokens     | a a b b b b b b | b b b b b b b b | b b c c c c d d |
//     sums       |     b begins: 0 | b continues: 1  | b ends: 2       |    a, c and d go to their rows
//     row of b   += sum 0 + (sum 1 + sum 2), the later ones by WARPS warps, each a fixed share of them
//
// So a long run is the work of many, and the order of additions depends only on the ids.

#include "common.cuh"

namespace {

constexpr int THREADS = 128, MANY = 8192;       // lookup: of a block; tokens from which a warp has one
constexpr int PART = 64, AHEAD = 4, WARPS = 4;  // add: PART as in ops/embedding.py; rows loaded ahead

struct Lookup {
    const int64_t* ids;
    const int64_t* places;  // [s], or [b, s] with place_stride s
    int64_t packs, rows, first, place_rows, place_stride;
    uint32_t s, b;
    float scale;
};

// A row of threads has a token.
template <typename P>
__global__ void __launch_bounds__(THREADS)
    embedding_lookup_kernel(P* __restrict__ out, const P* __restrict__ table, const P* __restrict__ positions,
                            const Lookup to) {
    wait_for_previous_kernel();
    const uint32_t token = blockIdx.x * blockDim.y + threadIdx.y;
    if (token >= to.s * to.b) return;
    const uint32_t i = token / to.b, j = token % to.b;
    const int64_t row = to.ids[j * static_cast<int64_t>(to.s) + i] - to.first;
    const bool here = row >= 0 && row < to.rows;
    int64_t place = 0;
    if (positions) {
        place = to.places[j * to.place_stride + i];
        if (place < 0 || place >= to.place_rows) __trap();  // as torch does for an index out of bounds
    }
    for (int64_t column = threadIdx.x; column < to.packs; column += blockDim.x) {
        float x[P::size] = {};
        P result, other;
        if (here) {
            const P word = load_pack(table + row * to.packs + column);
            if (positions) other = load_pack(positions + place * to.packs + column);
#pragma unroll
            for (int c = 0; c < P::size; ++c) x[c] = __fmul_rn(word[c], to.scale);
        }
        result.set(x);  // rounded as torch does: after each operation
        if (here && positions) {
#pragma unroll
            for (int c = 0; c < P::size; ++c) x[c] = result[c] + other[c];
            result.set(x);
        }
        out[token * to.packs + column] = result;
    }
}

struct Runs {
    const int* ids;
    const int64_t* order;
    uint32_t tokens, repeats;
    int rows;

    __device__ int id(uint32_t token) const {  // -1 where the target has no such row
        const int id = ids[token / repeats];
        return id >= 0 && id < rows ? id : -1;
    }
    __device__ int64_t row(uint32_t token) const {
        return order[token / repeats] * repeats + token % repeats;
    }
};

template <typename Into, typename Sums, int N>
__device__ __forceinline__ void add_to_row(Into* to, Into old, const Sums (&sum)[N]) {
    float total[N];
#pragma unroll
    for (int c = 0; c < N; ++c) total[c] = old[c] + sum[c];
    old.set(total);
    *to = old;
}

// sums [parts, 2, h]: of the run that began before the part, and of the one that begins in it and continues.
template <typename Into, typename Wide, typename P>
__global__ void __launch_bounds__(32)
    embedding_add_kernel(Into* __restrict__ target, Wide* __restrict__ sums, const P* __restrict__ grad,
                         const Runs runs, int64_t packs) {
    wait_for_previous_kernel();
    __shared__ int ids[PART + 2];  // from the token before the part to the one behind it
    __shared__ int64_t rows[PART];
    const uint32_t begin = blockIdx.x * PART, count = min(static_cast<uint32_t>(PART), runs.tokens - begin);
    for (uint32_t i = threadIdx.x; i < count + 2; i += 32) {
        const bool there = begin + i > 0 && begin + i - 1 < runs.tokens;
        ids[i] = there ? runs.id(begin + i - 1) : -1;
        if (i < count) rows[i] = runs.row(begin + i) * packs;
    }
    __syncthreads();
    const int64_t column = blockIdx.y * 32 + threadIdx.x;
    if (column >= packs) return;
    const int before = ids[0], behind = ids[count + 1];
    float sum[P::size] = {};
    for (uint32_t first = 0; first < count; first += AHEAD) {
        P from[AHEAD];
        Into into[AHEAD];
        bool ends[AHEAD], whole[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const uint32_t i = first + j;
            const int id = i < count ? ids[i + 1] : -1;
            ends[j] = id >= 0 && (i + 1 == count || ids[i + 2] != id);
            whole[j] = ends[j] && id != before && (i + 1 < count || id != behind);
            if (id >= 0) from[j] = load_pack(grad + rows[i] + column);
            if (whole[j]) into[j] = load_pack(target + id * packs + column);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const uint32_t i = first + j;
            const int id = i < count ? ids[i + 1] : -1;
            if (id < 0) continue;
#pragma unroll
            for (int c = 0; c < P::size; ++c) sum[c] += from[j][c];
            if (!ends[j]) continue;
            if (whole[j]) {
                add_to_row(target + id * packs + column, into[j], sum);
            } else {
                Wide part;
                part.set(sum);
                sums[(2 * static_cast<int64_t>(blockIdx.x) + (id != before)) * packs + column] = part;
            }
#pragma unroll
            for (int c = 0; c < P::size; ++c) sum[c] = 0.0f;
        }
    }
}

// A block looks whether a run begins in its part and continues; if so, it adds up the sums of all its parts.
template <typename Into, typename Wide>
__global__ void __launch_bounds__(32 * WARPS)
    embedding_join_kernel(Into* __restrict__ target, const Wide* __restrict__ sums, const Runs runs,
                          int64_t packs) {
    wait_for_previous_kernel();
    __shared__ Wide shares[WARPS][32];
    const uint32_t begin = blockIdx.x * PART, next = begin + PART;
    const int id = runs.id(next - 1);
    if (id < 0 || runs.id(next) != id || (begin > 0 && runs.id(begin - 1) == id)) return;
    int64_t more = 0;  // parts after this one that the run reaches
    for (int found = 32 * WARPS; found == 32 * WARPS; more += found) {
        const int64_t token = next + (more + threadIdx.x) * PART;
        found = __syncthreads_count(token < runs.tokens && runs.id(static_cast<uint32_t>(token)) == id);
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t column = blockIdx.y * 32 + lane;
    float sum[Wide::size] = {};
    if (column < packs) {
        const Wide* part = sums + 2 * (blockIdx.x + 1) * packs + column;
#pragma unroll 4
        for (int64_t k = more * warp / WARPS; k < more * (warp + 1) / WARPS; ++k) {
            const Wide value = load_pack(part + 2 * k * packs);
#pragma unroll
            for (int c = 0; c < Wide::size; ++c) sum[c] += value[c];
        }
    }
    shares[warp][lane].set(sum);
    __syncthreads();
    if (warp > 0 || column >= packs) return;
    const Wide start = load_pack(sums + (2 * static_cast<int64_t>(blockIdx.x) + 1) * packs + column);
#pragma unroll
    for (int c = 0; c < Wide::size; ++c) {
        sum[c] = start[c];
        for (int w = 0; w < WARPS; ++w) sum[c] += shares[w][lane][c];
    }
    Into* row = target + id * packs + column;
    add_to_row(row, load_pack(row), sum);
}

template <typename G, typename P>
void add(Address target, Address sums, Address grad, const Runs& runs, int64_t packs, Address stream) {
    using Into = Pack<G, P::size>;
    using Wide = Pack<float, P::size>;
    const unsigned columns = (packs + 31) / 32, parts = (runs.tokens + PART - 1) / PART;
    launch(embedding_add_kernel<Into, Wide, P>, dim3(parts, columns), 32, 0, stream, target, sums, grad, runs,
           packs);
    if (parts == 1) return;
    launch(embedding_join_kernel<Into, Wide>, dim3(parts - 1, columns), 32 * WARPS, 0, stream, target, sums,
           runs, packs);
}

uint32_t number(int64_t tokens) {
    if (tokens >= 0x7fffffff) throw std::runtime_error("embedding: more than 2^31 tokens");
    return static_cast<uint32_t>(tokens);
}

}  // namespace

// ids [b, s]; places [s] with place_stride 0, or [b, s]; without positions none.
void embedding_lookup(Address out, Address table, Address positions, Address ids, Address places, int64_t s,
                      int64_t b, int64_t h, int64_t rows, int64_t first, int64_t place_rows,
                      int64_t place_stride, double scale, int type, Address stream) {
    if (s * b * h == 0) return;
    with_type(type, [&](auto element) {
        using T = decltype(element);
        auto run = [&](auto pack, int64_t packs) {
            using P = decltype(pack);
            const Lookup to{ids,        places,       packs,     rows,      first,
                            place_rows, place_stride, number(s), number(b), static_cast<float>(scale)};
            const dim3 threads = s * b < MANY ? dim3(THREADS) : dim3(32, THREADS / 32);
            const unsigned blocks = (number(s * b) + threads.y - 1) / threads.y;
            launch(embedding_lookup_kernel<P>, blocks, threads, 0, stream, out, table, positions, to);
        };
        const bool whole = h % Pack<T>::size == 0 && aligned(out.value | table.value | positions.value);
        whole ? run(Pack<T>{}, h / Pack<T>::size) : run(Pack<T, 1>{}, h);
    });
    check_launch("embedding_lookup");
}

// target [rows, h] of target_type, FP32 or `type`; sums [parts, 2, h] in fp32; ids, order [entries].
void embedding_add(Address target, Address sums, Address grad, Address ids, Address order, int64_t entries,
                   int64_t repeats, int64_t rows, int64_t h, int target_type, int type, Address stream) {
    if (entries * repeats * h == 0) return;
    const Runs runs{ids, order, number(entries * repeats), number(repeats), static_cast<int>(rows)};
    with_type(type, [&](auto element) {
        using T = decltype(element);
        auto run = [&](auto pack, int64_t packs) {
            using P = decltype(pack);
            target_type == FP32 ? add<float, P>(target, sums, grad, runs, packs, stream)
                                : add<T, P>(target, sums, grad, runs, packs, stream);
        };
        const bool whole =
            h % Pack<T>::size == 0 && aligned(grad.value) && aligned(target.value | sums.value, 32);
        whole ? run(Pack<T>{}, h / Pack<T>::size) : run(Pack<T, 1>{}, h);
    });
    check_launch("embedding_add");
}
