// RMSNorm and LayerNorm backward; norm.cu says what the letters are, and has the forward.
//
//     n = (v - mean) rstd     g = dy w     dw = sum over rows of dy n     db = sum over rows of dy
//     dx = rstd (g - n mean(g n))                       RMSNorm, where mean = 0
//     dx = rstd (g - mean(g) - n mean(g n))             LayerNorm
//     dx += dtotal, where the residual add's output has a gradient of its own; the residual's is dx too
//     dropped = m dx, where dropout came before the add; dx_bias = sum over rows of dropped, else of dx,
//     from dx rounded to its type, as a pass of its own would read it
//
// The naive loop, in fp32:  for r:  m = sum_c dy[r][c] w[c] n[r][c] / h
//                           for r, c:  dx[r][c] = rstd[r] (dy[r][c] w[c] - n[r][c] m)
//                           for r, c:  dw[c] += dy[r][c] n[r][c]
//
// Bytes in 16 bits a value: 6, with dtotal 8, with dropout 2 more; and for the sums over rows 8 h a block and
// result. The blocks stay: while they work on one row they copy the next ones into shared memory (each thread
// reads only what it copied itself, so that needs no barrier). Their sums for dw and db stay in registers,
// those for dx_bias in shared memory, and become a row of a workspace [1 to 3, parts, h] that column_sums.cu
// adds up, always in the same order. Rows that are not whole packs of 16 bytes, and those longer than 2048
// packs, take the plain kernel, which keeps its sums in the workspace.

#include "column_sums.cuh"
#include "dropout.cuh"
#include "norm.cuh"

namespace {

constexpr int TEAMS = 256;  // threads of a block that has several rows
constexpr int STAGES = 2;   // rows in shared memory, at most
constexpr int SHORT = 512;  // packs of a row that get two a thread, longer ones four

// Threads of a block at most, and blocks of that size that fit a multiprocessor's registers: with two packs a
// thread the weights are kept there too, and n and g between the passes; with four they are read and
// recomputed.
constexpr int threads_of(int per) { return per == 2 ? 256 : MOST; }
constexpr int blocks_of(int per) { return per == 2 ? 2 : 1; }

struct Backward {
    void *dx, *dropped;  // dropped: null without dropout
    float* sums;         // [1 to 3, parts, h], of dw, db, dx_bias
    const void *grad, *grad_total, *x;
    const float *rstd, *mean;
    const void* weight;
    int64_t rows, width, parts;
    float inverse_h, from;
    bool wide;
    int group, stages;
    bool biased;  // dx_bias is wanted
    Dropout dropout;
};

// Asynchronous copies from device to shared memory, in groups; `wait` for all but the last few groups.
__device__ __forceinline__ void copy_async(uint4* to, const uint4* from) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_for_all_but(int groups) {
    switch (groups) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    }
}
static_assert(STAGES <= 2, "wait_for_all_but");

// The ring in shared memory: [stages][x, dy, dtotal][PER][threads] packs, so that lanes are neighbours.
template <int PER>
__device__ __forceinline__ void fetch_row(uint4* slot, const Backward& a, int64_t row, int lane) {
    if (row < a.rows) {
        const int streams = a.grad_total != nullptr ? 3 : 2;
        for (int s = 0; s < streams; ++s) {
            const void* tensor = s == 0 ? a.x : s == 1 ? a.grad : a.grad_total;
            const uint4* from = static_cast<const uint4*>(tensor) + row * a.width;
#pragma unroll
            for (int k = 0; k < PER; ++k) {
                const int pack = lane + k * a.group;
                if (pack < a.width) copy_async(slot + (s * PER + k) * blockDim.x, from + pack);
            }
        }
    }
    copies_end();  // also where there was nothing, so that the groups can be counted
}

// This block's sums, a row of the workspace: over its teams if there are several, in a fixed order.
template <int PER, int N>
__device__ __forceinline__ void write_sums(float (&sums)[PER][N], float* to, float* shared, const Backward& a,
                                           int lane) {
    const int width = static_cast<int>(a.width) * N, warp = threadIdx.x / 32;
    const bool several = a.group <= 32;
    for (int step = a.group; step < 32; step *= 2) {
#pragma unroll
        for (int k = 0; k < PER; ++k) {
#pragma unroll
            for (int i = 0; i < N; ++i) sums[k][i] += __shfl_xor_sync(0xffffffff, sums[k][i], step);
        }
    }
    __syncthreads();
    float* mine = several ? shared + warp * width : to;
    if (!several || threadIdx.x % 32 < a.group) {
#pragma unroll
        for (int k = 0; k < PER; ++k) {
            const int pack = lane + k * a.group;
            if (pack >= a.width) continue;
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                reinterpret_cast<float4*>(mine + pack * N)[i / 4] =
                    make_float4(sums[k][i], sums[k][i + 1], sums[k][i + 2], sums[k][i + 3]);
            }
        }
    }
    if (!several) return;
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = 0.0f;
        for (int other = 0; other < blockDim.x / 32; ++other) sum += shared[other * width + c];
        to[c] = sum;
    }
}

// What a thread has for all its rows: its columns' weights, unless they are too many, and sums.
template <typename T, int PER, bool CENTRED>
struct Columns {
    static constexpr int N = Pack<T>::size, KEPT = PER == 2 ? PER : 0;
    float w[KEPT + 1][N], dw[PER][N] = {}, db[CENTRED ? PER : 1][N] = {};
    float n[KEPT + 1][N], g[KEPT + 1][N];  // of the row; if not kept, recomputed

    __device__ __forceinline__ void load(float (&to)[N], const Backward& a, int pack) {
        parameters<T>(to, a.weight, a.wide, pack);
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] += a.from;
    }

    __device__ __forceinline__ void keep(const Backward& a, int lane) {
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            if (lane + k * a.group < a.width) load(w[k], a, lane + k * a.group);
        }
    }

    // Of pack k; if not kept, read into the last place.
    __device__ __forceinline__ const float (&weights(int k, const Backward& a, int lane)) [N] {
        if constexpr (KEPT > 0) return w[k];
        load(w[KEPT], a, lane + k * a.group);
        return w[KEPT];
    }

    // n and g = dy w of pack k, from shared memory; dy too if wanted.
    __device__ __forceinline__ void read(const Pack<T>* x, const Pack<T>* dy, float (&pdy)[N],
                                         const Backward& a, int k, int lane, float rstd, float mean) {
        const Pack<T> packed_x = x[k * blockDim.x], packed_dy = dy[k * blockDim.x];
        const float (&wk)[N] = weights(k, a, lane);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            pdy[i] = packed_dy[i];
            n[KEPT ? k : 0][i] = (CENTRED ? packed_x[i] - mean : packed_x[i]) * rstd;
            g[KEPT ? k : 0][i] = pdy[i] * wk[i];
        }
    }

    // First pass over a row: sums of g n and, for LayerNorm, g; and what the row adds to dw and db.
    __device__ __forceinline__ void add_row(float (&sums)[CENTRED ? 2 : 1], const Pack<T>* x,
                                            const Pack<T>* dy, const Backward& a, int lane, int packs,
                                            float rstd, float mean) {
#pragma unroll
        for (int k = 0; k < PER; ++k) {
            if (lane + k * a.group >= packs) continue;
            float pdy[N];
            read(x, dy, pdy, a, k, lane, rstd, mean);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                dw[k][i] += pdy[i] * n[KEPT ? k : 0][i];
                sums[0] += g[KEPT ? k : 0][i] * n[KEPT ? k : 0][i];
                if constexpr (CENTRED) {
                    db[k][i] += pdy[i];
                    sums[1] += g[KEPT ? k : 0][i];
                }
            }
        }
    }

    // Second pass: dx, and with BRANCH also `dropped` and the sums for dx_bias, [PER][N / 4][threads] in
    // shared memory; `along` = mean(g n), `shift` = mean(g).
    template <bool BRANCH>
    __device__ __forceinline__ void write_row(int64_t row, const Pack<T>* x, const Pack<T>* dy,
                                              const Pack<T>* dtotal, float4* dx_bias, const Backward& a,
                                              int lane, int packs, float rstd, float mean, float along,
                                              float shift) {
        Pack<T>* dx = static_cast<Pack<T>*>(a.dx) + row * a.width;
        const uint64_t hash = BRANCH && a.dropped != nullptr && packs > 0 ? row_hash(a.dropout, row) : 0;
#pragma unroll
        for (int k = 0; k < PER; ++k) {
            if (lane + k * a.group >= packs) continue;
            float d[N];
            if constexpr (KEPT == 0) read(x, dy, d, a, k, lane, rstd, mean);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float part = g[KEPT ? k : 0][i] - n[KEPT ? k : 0][i] * along;
                d[i] = rstd * (CENTRED ? part - shift : part);
            }
            if (a.grad_total != nullptr) {
                const Pack<T> add = dtotal[k * blockDim.x];
#pragma unroll
                for (int i = 0; i < N; ++i) d[i] += add[i];
            }
            Pack<T> result;
            result.set(d);
            if constexpr (BRANCH) branch(result, row, dx_bias, a, hash, k, lane);
            dx[lane + k * a.group] = result;
        }
    }

    // Of pack k of dx, as it was rounded: dropped, and what it adds to dx_bias. Four values at a time.
    __device__ __forceinline__ void branch(const Pack<T>& dx, int64_t row, float4* dx_bias, const Backward& a,
                                           uint64_t hash, int k, int lane) {
        asm("" : "+r"(lane));  // places are counted again, which costs less than keeping them
        Pack<T> result;
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float d[4] = {dx[i], dx[i + 1], dx[i + 2], dx[i + 3]};
            if (a.dropped != nullptr) {
                drop(d, a.dropout, hash, (lane + k * a.group) * N + i);
                reinterpret_cast<Pack<T, 4>*>(&result)[i / 4].set(d);
            }
            if (a.biased) {
                float4& sum = dx_bias[(k * N + i) / 4 * blockDim.x];
                sum = make_float4(sum.x + d[0], sum.y + d[1], sum.z + d[2], sum.w + d[3]);
            }
        }
        if (a.dropped == nullptr) return;
        static_cast<Pack<T>*>(a.dropped)[row * a.width + lane + k * a.group] = result;
    }
};

template <typename T, int PER, bool CENTRED, bool BRANCH>
__global__ void __launch_bounds__(threads_of(PER), blocks_of(PER)) norm_backward_rows(const Backward a) {
    wait_for_previous_kernel();
    using P = Pack<T>;
    extern __shared__ uint4 ring[];
    __shared__ float shared[2][(CENTRED ? 2 : 1) * WARPS];
    const int lane = threadIdx.x % a.group, team = threadIdx.x / a.group, teams = blockDim.x / a.group;
    const int stream = PER * blockDim.x, slot_size = (a.grad_total != nullptr ? 3 : 2) * stream;
    Columns<T, PER, CENTRED> columns;
    columns.keep(a, lane);
    float4* const dx_bias = reinterpret_cast<float4*>(ring + a.stages * slot_size) + threadIdx.x;
    if (BRANCH && a.biased) {
        for (int i = 0; i < PER * P::size / 4; ++i) dx_bias[i * blockDim.x] = {};
    }
    const int64_t step = static_cast<int64_t>(gridDim.x) * teams;
    int64_t row = static_cast<int64_t>(blockIdx.x) * teams + team;
    for (int s = 0; s < a.stages - 1; ++s) {
        fetch_row<PER>(ring + s * slot_size + threadIdx.x, a, row + s * step, lane);
    }
    float next_rstd = row < a.rows ? a.rstd[row] : 0.0f,
          next_mean = CENTRED && row < a.rows ? a.mean[row] : 0.0f;
    // A team past the last row takes part, with no packs, as long as its block has rows.
    for (int slot = 0, turn = 0; row - team < a.rows; row += step) {
        const int free = slot == 0 ? a.stages - 1 : slot - 1;  // read in the last turn, by this thread
        fetch_row<PER>(ring + free * slot_size + threadIdx.x, a, row + (a.stages - 1) * step, lane);
        const int packs = row < a.rows ? static_cast<int>(a.width) : 0;
        const float rstd = next_rstd, mean = next_mean;
        if (row + step < a.rows) {
            next_rstd = a.rstd[row + step];
            if (CENTRED) next_mean = a.mean[row + step];
        }
        wait_for_all_but(a.stages - 1);
        const P* x = reinterpret_cast<const P*>(ring + slot * slot_size + threadIdx.x);
        float sums[CENTRED ? 2 : 1] = {};
        columns.add_row(sums, x, x + stream, a, lane, packs, rstd, mean);
        over_group(sums, a.group, shared, turn);
        const float along = sums[0] * a.inverse_h, shift = CENTRED ? sums[CENTRED] * a.inverse_h : 0.0f;
        columns.template write_row<BRANCH>(row, x, x + stream, x + 2 * stream, dx_bias, a, lane, packs, rstd,
                                           mean, along, shift);
        slot = slot + 1 == a.stages ? 0 : slot + 1;
    }
    float* to = a.sums + blockIdx.x * a.width * P::size;
    write_sums(columns.dw, to, reinterpret_cast<float*>(ring), a, lane);
    if constexpr (CENTRED) {
        write_sums(columns.db, to + a.parts * a.width * P::size, reinterpret_cast<float*>(ring), a, lane);
    }
    if constexpr (BRANCH) {
        if (!a.biased) return;
#pragma unroll
        for (int k = 0; k < PER; ++k) {
#pragma unroll
            for (int i = 0; i < P::size; i += 4) {
                const float4 sum = dx_bias[(k * P::size + i) / 4 * blockDim.x];
                columns.dw[k][i] = sum.x, columns.dw[k][i + 1] = sum.y;
                columns.dw[k][i + 2] = sum.z, columns.dw[k][i + 3] = sum.w;
            }
        }
        to += (CENTRED ? 2 : 1) * a.parts * a.width * P::size;
        write_sums(columns.dw, to, reinterpret_cast<float*>(ring), a, lane);
    }
}

// Any row, by single elements; the block's sums are kept in its row of the workspace, which fits in the
// cache.
template <typename T>
__global__ void __launch_bounds__(PLAIN) norm_backward_plain(const Backward a) {
    wait_for_previous_kernel();
    __shared__ float shared[2][2 * WARPS];
    float *dw = a.sums + blockIdx.x * a.width, *db = a.mean != nullptr ? dw + a.parts * a.width : nullptr;
    float* dx_bias = a.biased ? dw + (db != nullptr ? 2 : 1) * a.parts * a.width : nullptr;
    for (int64_t c = threadIdx.x; c < a.width; c += PLAIN) {
        dw[c] = 0.0f;
        if (db != nullptr) db[c] = 0.0f;
        if (dx_bias != nullptr) dx_bias[c] = 0.0f;
    }
    int turn = 0;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int64_t begin = row * a.width;
        const T *x = static_cast<const T*>(a.x) + begin, *dy = static_cast<const T*>(a.grad) + begin;
        const float rstd = a.rstd[row], mean = a.mean != nullptr ? a.mean[row] : 0.0f;
        float sums[2] = {};
        for (int64_t c = threadIdx.x; c < a.width; c += PLAIN) {
            const float d = to_float(dy[c]), part = d * ((to_float(x[c]) - mean) * rstd);
            const float w = parameter<T>(a.weight, a.wide, c) + a.from;
            dw[c] += part;
            if (db != nullptr) db[c] += d;
            sums[0] += part * w;
            sums[1] += d * w;
        }
        over_group(sums, PLAIN, shared, turn);
        const float along = sums[0] * a.inverse_h, shift = a.mean != nullptr ? sums[1] * a.inverse_h : 0.0f;
        T* dx = static_cast<T*>(a.dx) + begin;
        const uint64_t hash = a.dropped != nullptr ? row_hash(a.dropout, row) : 0;
        for (int64_t c = threadIdx.x; c < a.width; c += PLAIN) {
            const float w = parameter<T>(a.weight, a.wide, c) + a.from;
            float d[1] = {rstd * (to_float(dy[c]) * w - shift - (to_float(x[c]) - mean) * rstd * along)};
            if (a.grad_total != nullptr) d[0] += to_float(static_cast<const T*>(a.grad_total)[begin + c]);
            dx[c] = from_float<T>(d[0]);
            d[0] = to_float(dx[c]);
            if (a.dropped != nullptr) {
                drop(d, a.dropout, hash, c);
                static_cast<T*>(a.dropped)[begin + c] = from_float<T>(d[0]);
            }
            if (dx_bias != nullptr) dx_bias[c] += d[0];
        }
    }
}

// beside: bytes of shared memory besides the ring.
template <typename T, int PER, bool CENTRED, bool BRANCH>
void launch_backward(Backward a, const Split& s, int64_t& blocks, int stage, int beside, int most,
                     cudaStream_t stream) {
    const auto kernel = norm_backward_rows<T, PER, CENTRED, BRANCH>;
    const int threads = threads_of(PER) * blocks_of(PER);
    int wanted = threads / s.threads;  // blocks a multiprocessor
    while (wanted > 1 && most / wanted - 2048 - beside < 2 * stage) --wanted;
    const int fit = (most / wanted - 2048 - beside) / stage;
    a.stages = fit < 1 ? 1 : fit < STAGES ? fit : STAGES;
    const int bytes = a.stages * stage + beside;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    int resident = 1;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, s.threads, bytes);
    const int64_t teams = s.threads / s.group, needed = (a.rows + teams - 1) / teams;
    const int64_t held = blocks_for(needed, resident < wanted ? resident : wanted);
    blocks = held < blocks ? held : blocks;
    launch(kernel, static_cast<unsigned>(blocks), s.threads, bytes, stream, a);
}

}  // namespace

void norm_backward(Address dx, Address dropped, Address dweight, Address dbias, Address dx_bias, Address sums,
                   Address grad, Address grad_total, Address x, Address rstd, Address mean, Address weight,
                   int64_t rows, int64_t h, int64_t parts, int from_one, int type, int weight_type,
                   Address positions, Address samples, int64_t batch, int64_t key, int64_t least,
                   double scale, Address stream) {
    if (h == 0) return;
    bool whole = true;
    for (const Address& a : {dx, dropped, sums, grad, grad_total, x, weight}) {
        whole = whole && aligned(a.value);
    }
    int device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    int64_t blocks = parts < rows ? parts : rows;
    with_type(type, [&](auto element) {
        using T = decltype(element);
        whole = whole && h % Pack<T>::size == 0;
        Backward a{dx,
                   dropped,
                   sums,
                   grad,
                   grad_total,
                   x,
                   rstd,
                   mean,
                   weight,
                   rows,
                   h,
                   parts,
                   1.0f / static_cast<float>(h),
                   from_one ? 1.0f : 0.0f,
                   weight_type == FP32,
                   PLAIN,
                   1,
                   dx_bias.value != 0,
                   dropout_of(positions, samples, batch, key, least, scale)};
        const int64_t packs = h / Pack<T>::size;
        const Split s = whole ? split(packs, TEAMS, packs <= SHORT ? 2 : 4) : Split{};
        const int stage = (grad_total.value ? 3 : 2) * s.per * s.threads * 16;
        const int beside = a.biased ? s.per * s.threads * Pack<T>::size * 4 : 0;
        if (blocks == 0) return;  // no rows: the sums below are zeros
        if (s.per == 0 || stage + beside > most - 2048) {
            launch(norm_backward_plain<T>, static_cast<unsigned>(blocks), PLAIN, 0, stream, a);
            return;
        }
        a.width = packs, a.group = s.group;
        auto run = [&](auto per, auto centred, auto branch) {
            launch_backward<T, per.value, centred.value, branch.value>(a, s, blocks, stage, beside, most,
                                                                       stream);
        };
        auto with_branch = [&](auto per, auto centred) {
            a.biased || a.dropped ? run(per, centred, std::true_type{})
                                  : run(per, centred, std::false_type{});
        };
        auto with_kind = [&](auto per) {
            dbias.value ? with_branch(per, std::true_type{}) : with_branch(per, std::false_type{});
        };
        s.per == 2 ? with_kind(std::integral_constant<int, 2>{})
                   : with_kind(std::integral_constant<int, 4>{});
    });
    check_launch("norm_backward");
    Targets to{dweight, dbias};
    const bool alike = type == weight_type;
    if (alike) (dbias.value ? to.third : to.second) = dx_bias;
    add_parts(to, sums, parts, blocks, h, false, weight_type, stream);
    if (alike || dx_bias.value == 0) return;
    const int64_t before = (dbias.value ? 2 : 1) * parts * h;  // no rows: the mean is null, dbias is not
    add_parts({dx_bias}, static_cast<const float*>(sums) + before, parts, blocks, h, false, type, stream);
}
