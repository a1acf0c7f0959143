// Bias, dropout and residual add in one pass, and back; each of the three is optional. Mask: dropout.cuh.
//
//     x, residual, out [rows, h]     bias [h], of the type of x     rows = [s, b]
//     forward     out = m (x + bias) + residual     m = 0 or 1 / (1 - p), of row and column
//     backward    dx = m dout     dbias = sum over rows of dx, fp32     dresidual = dout, itself
//
// The naive loop, in fp32:  for r, c:  out[r][c] = m(r, c) (x[r][c] + bias[c]) + residual[r][c]
//                           for r, c:  dx[r][c] = m(r, c) dout[r][c];  dbias[c] += dx[r][c]
//
// Bytes in 16 bits a value: 6 with a residual, else 4; backward 4, or 2 where nothing is dropped and the sums
// alone are wanted. Rounded once, at the end.
//
// A thread has a pack of 16 bytes (one value where rows are not whole packs) of several rows, all loaded
// before the first is used; meanwhile a few threads hash the rows, for all of the block. A backward with
// sums over rows has fewer blocks, which go on to the next rows; column_sums.cu adds up their sums.

#include "column_sums.cuh"
#include "dropout.cuh"

namespace {

constexpr int THREADS = 256;  // of a block, at most
constexpr int AT_ONCE = 4;    // rows of a thread
constexpr int RESIDENT = 8;   // blocks a multiprocessor, where they add up columns

struct Args {
    void* out;
    const void *x, *bias, *residual;
    float* sums;          // [parts, h]
    int64_t rows, width;  // of a row, in packs
    int group;            // threads of a row
    Dropout dropout;
};

// The block's sums: over its teams in their order, into its row of the workspace.
template <int N>
__device__ __forceinline__ void write_sums(const float (&sum)[N], const Args& a, int64_t column, int team) {
    __shared__ float shared[THREADS][N];
#pragma unroll
    for (int i = 0; i < N; ++i) shared[threadIdx.x][i] = sum[i];
    __syncthreads();
    if (team != 0 || column >= a.width) return;
    float* to = a.sums + (static_cast<int64_t>(blockIdx.x) * a.width + column) * N;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float whole = 0.0f;
        for (int at = threadIdx.x; at < blockDim.x; at += a.group) whole += shared[at][i];
        to[i] = whole;
    }
}

template <typename T, int N, bool SUMS>
__global__ void __launch_bounds__(THREADS) bias_dropout_rows(const Args a) {
    using P = Pack<T, N>;
    __shared__ uint64_t hashes[2][AT_ONCE * THREADS];
    const int team = threadIdx.x / a.group, teams = blockDim.x / a.group, tile = AT_ONCE * teams;
    const int64_t column = static_cast<int64_t>(blockIdx.y) * a.group + threadIdx.x % a.group;
    const bool inside = column < a.width, dropped = a.dropout.positions != nullptr;
    float bias[N] = {}, sum[N] = {};
    if (!SUMS && a.bias != nullptr && inside) {
        const P pack = load_pack(static_cast<const P*>(a.bias) + column);
#pragma unroll
        for (int i = 0; i < N; ++i) bias[i] = pack[i];
    }
    int turn = 0;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * tile; first < a.rows;
         first += static_cast<int64_t>(gridDim.x) * tile) {
        P x[AT_ONCE], other[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int64_t row = first + k * teams + team, at = row * a.width + column;
            if (row >= a.rows || !inside) continue;
            x[k] = load_pack(static_cast<const P*>(a.x) + at);
            if (!SUMS && a.residual != nullptr) other[k] = load_pack(static_cast<const P*>(a.residual) + at);
        }
        uint64_t* mine = hashes[turn];
        if (dropped) {
            for (int i = threadIdx.x; i < tile && first + i < a.rows; i += blockDim.x) {
                mine[i] = row_hash(a.dropout, first + i);
            }
            __syncthreads();  // one is enough: the next rows' go elsewhere
            turn ^= 1;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int64_t row = first + k * teams + team;
            if (row >= a.rows || !inside) continue;
            float y[N];
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = SUMS ? x[k][i] : x[k][i] + bias[i];
            if (dropped) drop(y, a.dropout, mine[k * teams + team], column * N);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if constexpr (SUMS) sum[i] += y[i];
                if (!SUMS && a.residual != nullptr) y[i] += other[k][i];
            }
            if (SUMS && a.out == nullptr) continue;
            x[k].set(y);
            static_cast<P*>(a.out)[row * a.width + column] = x[k];
        }
    }
    if constexpr (SUMS) write_sums<N>(sum, a, column, team);
}

// Returns the number of blocks that have written sums. most: blocks that may; 0: no sums.
template <typename T, bool SUMS>
int64_t launch(Args a, bool whole, int64_t most, cudaStream_t stream) {
    const int size = whole ? Pack<T>::size : 1;
    a.width /= size;
    const int64_t tiles = (a.width + THREADS - 1) / THREADS;
    a.group = static_cast<int>((a.width + tiles - 1) / tiles);
    const int teams = THREADS / a.group;
    int64_t blocks = (a.rows + AT_ONCE * teams - 1) / (AT_ONCE * teams);
    if constexpr (SUMS) {
        const int64_t resident = (static_cast<int64_t>(multiprocessors()) * RESIDENT + tiles - 1) / tiles;
        blocks = blocks < resident ? blocks : resident;
        blocks = blocks < most ? blocks : most;
    }
    if (blocks > 0x7fffffff || tiles > 65535) throw std::runtime_error("bias_dropout_add: too many blocks");
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles));
    const int threads = a.group * teams;
    if (whole) {
        bias_dropout_rows<T, Pack<T>::size, SUMS><<<grid, threads, 0, stream>>>(a);
    } else {
        bias_dropout_rows<T, 1, SUMS><<<grid, threads, 0, stream>>>(a);
    }
    check_launch("bias_dropout_add");
    return blocks;
}

}  // namespace

void bias_dropout_add(Address out, Address x, Address bias, Address residual, int64_t rows, int64_t h,
                      int type, Address positions, Address samples, int64_t batch, int64_t key, int64_t least,
                      double scale, Address stream) {
    if (rows * h == 0) return;
    bool whole = true;
    for (const Address& a : {out, x, bias, residual}) whole = whole && aligned(a.value);
    const Dropout dropout = dropout_of(positions, samples, batch, key, least, scale);
    with_type(type, [&](auto element) {
        using T = decltype(element);
        const Args a{out, x, bias, residual, nullptr, rows, h, 0, dropout};
        launch<T, false>(a, whole && h % Pack<T>::size == 0, 0, stream);
    });
}

void bias_dropout_backward(Address dbias, Address dx, Address sums, Address grad, int64_t rows, int64_t h,
                           int64_t parts, int type, Address positions, Address samples, int64_t batch,
                           int64_t key, int64_t least, double scale, Address stream) {
    int64_t blocks = 0;
    const Dropout dropout = dropout_of(positions, samples, batch, key, least, scale);
    if (rows * h > 0) {
        with_type(type, [&](auto element) {
            using T = decltype(element);
            const Args a{dx, grad, nullptr, nullptr, sums, rows, h, 0, dropout};
            const bool whole = aligned(dx.value) && aligned(grad.value) && h % Pack<T>::size == 0;
            blocks = launch<T, true>(a, whole, parts, stream);
        });
    }
    if (h > 0) add_parts(dbias, Address{}, sums, parts, blocks, h, false, type, stream);
}
