// The norms of norm.cu with their result in FP8: row-major, transposed, or both, for linear layers that come
// next.
//
//     x, residual, out, total [rows, h]     weight, bias [h], mean, rstd [rows], as in norm.cu
//     v = x, or total = x + residual rounded to their type        y = norm of v, weight and bias
//     row [rows, h] = fp8(y * scale)        flip [h, rows] = row^T        amax = max(amax, |y|)
//
// y is rounded to the type of x first, then to FP8: what norm.cu and fp8_cast.cu give one after the other.
//
// The naive loop, in fp32:  for r:  mean[r], rstd[r] of v[r];  for c:
//                           y = (v[r][c] - mean[r]) rstd[r] w[c] + b[c], rounded
//                           row[r][c] = flip[c][r] = fp8(y * scale);  amax = max(amax, |y|)
//
// Bytes in 16 bits a value: 3 for one of the two, 4 for both (two read; one more in rows above WIDE), 4 more
// with the add (two read, two written).
//
// A block has 16 rows, so that a column of it has 16 bytes to store, or 8 where nothing is transposed. A warp
// takes the statistics of a row and leaves it in shared memory; then a thread has 8 columns of all rows,
// which it turns in registers. On Hopper 16 rows fit there up to h 7168 in 16 bits. Longer ones are read a
// second time, from the L2 cache as long as all that run at once fit there (two blocks a multiprocessor).
// Where one block fills the shared memory its reads wait for its writes: of rows longer than WIDE a second
// kernel turns `row` to `flip`.

#include "fp8.cuh"

namespace {

constexpr int64_t WIDE = 7168;  // bytes of a row: of longer ones two blocks do not fit a multiprocessor

struct Norm {
    uint8_t *row, *flip;  // null where not wanted, as out, total, mean, residual, bias, amax
    void *out, *total;
    float *rstd, *mean;
    const void *x, *residual, *weight, *bias;
    const float* scale;
    unsigned* amax;
    int64_t rows, h;
    float eps, from;  // `from` is added to the weight
    int type, weight_type;
    bool kept;  // in shared memory
};

template <bool WHOLE, typename T>
__device__ __forceinline__ void store_eight(void* to, int type, int64_t at, int64_t inside,
                                            const Eight<T>& x) {
    if constexpr (WHOLE) {
        uint4* place = reinterpret_cast<uint4*>(static_cast<T*>(to) + at);
#pragma unroll
        for (int p = 0; p < static_cast<int>(sizeof(T)) / 2; ++p) {
            place[p] = make_uint4(x.words[4 * p], x.words[4 * p + 1], x.words[4 * p + 2], x.words[4 * p + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= inside) continue;
            if (type == FP32) static_cast<float*>(to)[at + i] = x[i];
            if (type == BF16) static_cast<__nv_bfloat16*>(to)[at + i] = from_float<__nv_bfloat16>(x[i]);
            if (type == FP16) static_cast<__half*>(to)[at + i] = from_float<__half>(x[i]);
        }
    }
}

// By loads that keep their place after a store or a barrier: what this block has written, or reads often.
template <bool WHOLE, typename T>
__device__ __forceinline__ Eight<T> load_again(const void* from, int type, int64_t at, int64_t inside) {
    if constexpr (!WHOLE) return load_eight<false, T>(from, type, at, inside);
    Eight<T> eight;
    const uint4* place = reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at);
#pragma unroll
    for (int p = 0; p < static_cast<int>(sizeof(T)) / 2; ++p) {
        const uint4 four = place[p];
        eight.words[4 * p] = four.x, eight.words[4 * p + 1] = four.y;
        eight.words[4 * p + 2] = four.z, eight.words[4 * p + 3] = four.w;
    }
    return eight;
}

template <bool WHOLE, typename T>
__device__ __forceinline__ void parameters(float (&w)[8], const void* from, int type, int64_t at,
                                           int64_t inside, float more) {
    if (WHOLE && type != FP32) {
        const Eight<T> some = load_again<WHOLE, T>(from, type, at, inside);
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = some[i] + more;
    } else {
        const Eight<float> some = load_again<WHOLE, float>(from, type, at, inside);
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = some[i] + more;
    }
}

// Where a row lies after its first pass, and the pass: a warp has the row, 8 neighbours a lane.
template <bool WHOLE, typename T>
struct Row {
    const void* from;  // x or total
    Eight<T>* kept;    // the row in shared memory, or null
    int64_t begin, h;
    int type;

    __device__ __forceinline__ Eight<T> at(int64_t column) const {
        if (WHOLE && kept != nullptr) return kept[column / 8];
        return load_again<WHOLE, T>(from, type, begin + column, h - column);
    }
};

// The first read of a row, several loads at once; writes the total and the copy. Gives the row's sum, or
// sum of squares.
template <bool ADD, bool WHOLE, typename T>
__device__ __forceinline__ float first_read(const Norm& a, const Row<WHOLE, T>& row, bool squares) {
    constexpr int BATCH = (ADD ? 8 : 16) / sizeof(T);
    float sum = 0.0f;
    for (int64_t c = threadIdx.x % 32 * 8; c < a.h; c += 256 * BATCH) {
        Eight<T> x[BATCH], other[ADD ? BATCH : 1];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int64_t column = c + u * 256;
            x[u] = load_eight<WHOLE, T>(a.x, a.type, row.begin + column, a.h - column);
            if constexpr (ADD) {
                other[u] = load_eight<WHOLE, T>(a.residual, a.type, row.begin + column, a.h - column);
            }
        }
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int64_t column = c + u * 256;
            if (column >= a.h) continue;
            if constexpr (ADD) {
                float total[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) total[i] = x[u][i] + other[u][i];
                x[u] = rounded<WHOLE, T>(total, a.type);
                store_eight<WHOLE>(a.total, a.type, row.begin + column, a.h - column, x[u]);
            }
            if (WHOLE && row.kept != nullptr) row.kept[column / 8] = x[u];
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += squares ? x[u][i] * x[u][i] : x[u][i];  // zeros past the row
        }
    }
    return over_warp<Sum>(sum);
}

template <bool WHOLE, typename T>
__device__ __forceinline__ float squares_from(const Row<WHOLE, T>& row, float mean) {
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t c = threadIdx.x % 32 * 8; c < row.h; c += 256) {
        const Eight<T> x = row.at(c);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float off = WHOLE || c + i < row.h ? x[i] - mean : 0.0f;
            sum += off * off;
        }
    }
    return over_warp<Sum>(sum);
}

// 16 rows of four bytes of each of 8 columns, low and high four: 16 bytes a column.
template <bool WHOLE>
__device__ __forceinline__ void store_columns(const Norm& a, const unsigned (&q)[16], int64_t row,
                                              int64_t column) {
    unsigned words[4][4];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[g][i] = q[4 * g + i];
        turn(words[g]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (!WHOLE && column + c >= a.h) continue;
        const uint4 bytes = make_uint4(words[0][c], words[1][c], words[2][c], words[3][c]);
        store_bytes<WHOLE>(a.flip + (column + c) * a.rows + row, bytes, a.rows - row);
    }
}

constexpr int threads_of(bool flip, bool whole) { return flip && whole ? 512 : 256; }  // at most

template <int FORMAT, bool FLIP, bool WHOLE, typename T>
__global__ void __launch_bounds__(threads_of(FLIP, WHOLE), FLIP || !WHOLE ? 1 : 3)
    norm_fp8_rows(const Norm a) {
    wait_for_previous_kernel();
    constexpr int ROWS = FLIP ? 16 : 8, BATCH = 8 / sizeof(T);  // rows that are read at once
    extern __shared__ __align__(16) uint4 shared[];
    __shared__ float means[ROWS], rstds[ROWS];
    __shared__ unsigned most;
    const int64_t first = blockIdx.x * static_cast<int64_t>(ROWS);
    const int count = static_cast<int>(min(static_cast<int64_t>(ROWS), a.rows - first));
    auto row_of = [&](int r) {
        Eight<T>* kept = a.kept ? reinterpret_cast<Eight<T>*>(shared) + r * (a.h / 8) : nullptr;
        return Row<WHOLE, T>{a.residual != nullptr ? a.total : a.x, kept, (first + r) * a.h, a.h, a.type};
    };
    if (threadIdx.x == 0) most = 0;
    const float h = static_cast<float>(a.h);
    for (int r = threadIdx.x / 32; r < count; r += blockDim.x / 32) {
        const Row<WHOLE, T> row = row_of(r);
        const bool centred = a.mean != nullptr;
        float sum =
            a.residual != nullptr ? first_read<true>(a, row, !centred) : first_read<false>(a, row, !centred);
        const float mean = centred ? sum / h : 0.0f;
        if (centred) sum = squares_from(row, mean);
        const float rstd = rsqrtf(sum / h + a.eps);
        if (threadIdx.x % 32 != 0) continue;
        means[r] = mean, rstds[r] = rstd;
        a.rstd[first + r] = rstd;
        if (centred) a.mean[first + r] = mean;
    }
    __syncthreads();

    const float s = *a.scale;
    unsigned largest = 0;
    for (int64_t c = threadIdx.x * 8ll; c < a.h; c += blockDim.x * 8ll) {
        float w[8], b[8] = {};
        parameters<WHOLE, T>(w, a.weight, a.weight_type, c, a.h - c, a.from);
        if (a.bias != nullptr) parameters<WHOLE, T>(b, a.bias, a.weight_type, c, a.h - c, 0.0f);
        unsigned low[16] = {}, high[16] = {};
#pragma unroll
        for (int begin = 0; begin < ROWS; begin += BATCH) {
            Eight<T> x[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (begin + i < count) x[i] = row_of(begin + i).at(c);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int r = begin + i;
                if (r >= count) continue;
                float y[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const float v = (x[i][k] - means[r]) * rstds[r] * w[k] + b[k];
                    y[k] = WHOLE || c + k < a.h ? v : 0.0f;
                }
                const Eight<T> out = rounded<WHOLE, T>(y, a.type);
                const uint2 q = cast_eight<FORMAT>(out, s, largest);
                low[r] = q.x, high[r] = q.y;
                const int64_t at = (first + r) * a.h + c;
                if (a.row) store_bytes<WHOLE>(a.row + at, q, a.h - c);
                if (a.out) store_eight<WHOLE>(a.out, a.type, at, a.h - c, out);
            }
        }
        if constexpr (FLIP) {
            store_columns<WHOLE>(a, low, first, c);
            store_columns<WHOLE>(a, high, first, c + 4);
        }
    }
    if (a.amax == nullptr) return;
    largest = __reduce_max_sync(0xffffffff, largest);
    if (threadIdx.x % 32 == 0) atomicMax(&most, largest);
    __syncthreads();
    raise_to(a.amax, most);
}

template <int FORMAT, bool FLIP>
void launch_norm(Norm a, bool whole, cudaStream_t stream) {
    const int tall = FLIP ? 16 : 8;
    const int64_t blocks = (a.rows + tall - 1) / tall;
    if (blocks > 0x7fffffff) throw std::runtime_error("norm_fp8: more than 2^31 blocks");
    const int threads = a.h >= 4096 ? threads_of(FLIP, whole) : 256;
    auto run = [&](auto* kernel, int64_t bytes) {
        int device = 0, most = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        a.kept = bytes > 0 && bytes + 1024 <= most;
        const int dynamic = a.kept ? static_cast<int>(bytes) : 0;
        if (dynamic > 47 * 1024)
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
        launch(kernel, static_cast<unsigned>(blocks), threads, dynamic, stream, a);
    };
    if (!whole) return run(norm_fp8_rows<FORMAT, FLIP, false, float>, 0);
    with_type(a.type, [&](auto element) {
        using T = decltype(element);
        run(norm_fp8_rows<FORMAT, FLIP, true, T>, tall * a.h * static_cast<int64_t>(sizeof(T)));
    });
}

}  // namespace

void norm_fp8(Address x, Address residual, Address weight, Address bias, Address row, Address flip,
              Address out, Address total, Address rstd, Address mean, Address scale, Address amax,
              int64_t rows, int64_t h, double eps, int from_one, int type, int weight_type, int format,
              Address stream) {
    if (rows * h == 0) return;
    if (row.value && flip.value && h * (type == FP32 ? 4 : 2) > WIDE) {
        norm_fp8(x, residual, weight, bias, row, {}, out, total, rstd, mean, scale, amax, rows, h, eps,
                 from_one, type, weight_type, format, stream);
        return fp8_transpose(row, flip, rows, h, stream);
    }
    bool whole = h % 8 == 0 && (flip.value == 0 || rows % 16 == 0);
    for (const Address& a : {row, flip, out, total, x, residual, weight, bias})
        whole = whole && aligned(a.value);
    const Norm a{row,
                 flip,
                 out,
                 total,
                 rstd,
                 mean,
                 x,
                 residual,
                 weight,
                 bias,
                 scale,
                 amax,
                 rows,
                 h,
                 static_cast<float>(eps),
                 from_one ? 1.0f : 0.0f,
                 type,
                 weight_type,
                 false};
    if (format == E4M3) {
        flip.value ? launch_norm<E4M3, true>(a, whole, stream) : launch_norm<E4M3, false>(a, whole, stream);
    } else {
        flip.value ? launch_norm<E5M2, true>(a, whole, stream) : launch_norm<E5M2, false>(a, whole, stream);
    }
    check_launch("norm_fp8");
}
