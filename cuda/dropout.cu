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
// Forward: a thread has a pack of 16 bytes (one value where rows are not whole packs) of several rows, all
// loaded before the first is used; meanwhile a few threads hash the rows, for all of the block. Backward with
// sums over rows: blocks as column_sums.cuh has them, where each lane hashes every 32nd row of its warp. Sums
// without dropout are those of column_sums.cu.

#include "column_sums.cuh"
#include "dropout.cuh"

namespace {

constexpr int THREADS = 256;  // of a block, at most
constexpr int AT_ONCE = 4;    // rows of a thread
constexpr int RESIDENT = 4;   // blocks a multiprocessor in the backward with sums

struct Args {
    void* out;
    const void *x, *bias, *residual;
    int64_t rows, width;  // of a row, in packs
    int group;            // threads of a row
    Dropout dropout;
};

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) bias_dropout_rows(const Args a) {
    wait_for_previous_kernel();
    using P = Pack<T, N>;
    __shared__ uint64_t hashes[2][AT_ONCE * THREADS];
    const int team = threadIdx.x / a.group, teams = blockDim.x / a.group, tile = AT_ONCE * teams;
    const int64_t column = static_cast<int64_t>(blockIdx.y) * a.group + threadIdx.x % a.group;
    const bool inside = column < a.width, dropped = a.dropout.positions != nullptr;
    float bias[N] = {};
    if (a.bias != nullptr && inside) {
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
            if (a.residual != nullptr) other[k] = load_pack(static_cast<const P*>(a.residual) + at);
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
            for (int i = 0; i < N; ++i) y[i] = x[k][i] + bias[i];
            if (dropped) drop(y, a.dropout, mine[k * teams + team], column * N);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (a.residual != nullptr) y[i] += other[k][i];
            }
            x[k].set(y);
            static_cast<P*>(a.out)[row * a.width + column] = x[k];
        }
    }
}

template <typename T>
void launch(Args a, bool whole, cudaStream_t stream) {
    const int size = whole ? Pack<T>::size : 1;
    a.width /= size;
    const int64_t tiles = (a.width + THREADS - 1) / THREADS;
    a.group = static_cast<int>((a.width + tiles - 1) / tiles);
    const int teams = THREADS / a.group;
    const int64_t blocks = (a.rows + AT_ONCE * teams - 1) / (AT_ONCE * teams);
    if (blocks > 0x7fffffff || tiles > 65535) throw std::runtime_error("bias_dropout_add: too many blocks");
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles));
    const int threads = a.group * teams;
    if (whole) {
        launch(bias_dropout_rows<T, Pack<T>::size>, grid, threads, 0, stream, a);
    } else {
        launch(bias_dropout_rows<T, 1>, grid, threads, 0, stream, a);
    }
    check_launch("bias_dropout_add");
}

template <typename P>
__global__ void __launch_bounds__(ROW_THREADS, RESIDENT)
    dropout_backward_rows(P* __restrict__ dx, float* __restrict__ workspace, const P* __restrict__ grad,
                          int64_t rows, int64_t packs, const Dropout dropout) {
    wait_for_previous_kernel();
    const int64_t pack = pack_of_thread(), step = static_cast<int64_t>(gridDim.y) * ROWS;
    const int lane = threadIdx.x % 32;
    int64_t row = static_cast<int64_t>(blockIdx.y) * ROWS + threadIdx.x / 32;
    float sums[P::size] = {};
    uint64_t hash = 0;  // of the row that is this lane's of the next 32
    for (int turn = 0; row < rows; row += AT_ONCE * step, turn += AT_ONCE) {
        P values[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int64_t at = row + k * step;
            if (at < rows && pack < packs) values[k] = load_pack(grad + at * packs + pack);
        }
        if (turn % 32 == 0 && row + lane * step < rows) hash = row_hash(dropout, row + lane * step);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const uint64_t of_row = __shfl_sync(0xffffffff, hash, (turn + k) % 32);
            if (row + k * step >= rows || pack >= packs) continue;
            float y[P::size];
#pragma unroll
            for (int i = 0; i < P::size; ++i) y[i] = values[k][i];
            drop(y, dropout, of_row, pack * P::size);
#pragma unroll
            for (int i = 0; i < P::size; ++i) sums[i] += y[i];
            values[k].set(y);
            dx[(row + k * step) * packs + pack] = values[k];
        }
    }
    write_part(sums, workspace, packs * P::size);
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
        launch<T>({out, x, bias, residual, rows, h, 0, dropout}, whole && h % Pack<T>::size == 0, stream);
    });
}

void bias_dropout_backward(Address dbias, Address dx, Address sums, Address grad, int64_t rows, int64_t h,
                           int64_t parts, int type, Address positions, Address samples, int64_t batch,
                           int64_t key, int64_t least, double scale, Address stream) {
    if (h == 0) return;
    const Dropout dropout = dropout_of(positions, samples, batch, key, least, scale);
    with_packs(h, type, aligned(dx.value | grad.value), [&](auto pack, int64_t packs) {
        const int64_t blocks = blocks_down(rows, packs, dx.value ? RESIDENT : BLOCKS, parts);
        if (!dx.value) return column_sums(dbias, sums, grad, rows, h, blocks, 0, type, type, stream);
        if (rows > 0) {
            launch(dropout_backward_rows<decltype(pack)>, over_rows(packs, blocks), ROW_THREADS, 0, stream,
                   dx, sums, grad, rows, packs, dropout);
            check_launch("bias_dropout_backward");
        }
        add_parts({dbias}, sums, parts, rows > 0 ? blocks : 0, h, false, type, stream);
    });
}
