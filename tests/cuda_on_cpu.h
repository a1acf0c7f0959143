// CUDA's threads on one thread of a CPU, to run kernels where there is no GPU: slowly, and for tests alone.
//
// Every thread of a block is a fiber with a stack of its own; blocks run one after the other. A fiber runs
// until it comes to a barrier or a warp-wide operation, then the next one does; from the first to the last,
// and in every second launch from the last to the first, so that a barrier that is missing gives other bits
// the second time. What this finds is wrong arithmetic, wrong indices, wrong synchronization (a barrier that
// some threads never reach ends the program with a message), an address not aligned to what is read there
// (the compiler's sanitizer), launches that a GPU would refuse. What it does not know is memory spaces and
// most races.

#pragma once
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __restrict__
#define __restrict__

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulated {

constexpr int STACK = 64 * 1024, LANES = 32;

constexpr std::size_t MOST_SHARED = 227 * 1024;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "%s, block %u\n", what, blockIdx.x);
    std::abort();
}

struct Fiber {
    ucontext_t context;  // to begin with; from then on `place`, as swapcontext asks the kernel about signals
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(STACK);
    uint3 index;
    bool begun = false, done = false;
};

struct Meeting {  // of all threads of a block, or of those of a warp
    int arrived = 0;
    long round = 0;
};

inline std::vector<std::unique_ptr<Fiber>> fibers;
inline jmp_buf scheduler;
inline int current, live;
inline std::vector<int> live_of_warp;
inline Meeting block_meeting;
inline std::vector<Meeting> warp_meetings;
inline std::vector<std::array<unsigned long long, LANES>> exchanged;
inline std::vector<char> dynamic_shared;
inline const std::function<void()>* body;
inline bool moved;     // somebody has since the scheduler last looked
inline bool backward;  // the last thread first

inline void yield() {
    if (!_setjmp(fibers[current]->place)) _longjmp(scheduler, 1);
    threadIdx = fibers[current]->index;
}

inline void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

inline void meet(Meeting& meeting, const int& expected) {
    const long round = meeting.round;
    ++meeting.arrived;
    moved = true;
    while (meeting.round == round) {
        if (meeting.arrived >= expected) {
            meeting.arrived = 0;
            ++meeting.round;
            moved = true;
            return;
        }
        yield();
    }
}

inline int lane() { return current % LANES; }
inline int warp() { return current / LANES; }
inline void meet_warp() { meet(warp_meetings[warp()], live_of_warp[warp()]); }

template <typename T>
T from_lane(T value, int source) {
    static_assert(sizeof(T) <= sizeof(unsigned long long));
    auto& slots = exchanged[warp()];
    std::memcpy(&slots[lane()], &value, sizeof(T));
    meet_warp();
    T found;
    std::memcpy(&found, &slots[source], sizeof(T));
    meet_warp();
    return found;
}

inline void run_fiber() {  // of one block after the other
    for (;;) {
        (*body)();
        fibers[current]->done = true;
        --live;
        --live_of_warp[warp()];
        moved = true;
        yield();
    }
}

inline void make_fiber() {
    Fiber& fiber = *fibers.emplace_back(std::make_unique<Fiber>());
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
}

inline void run_block(int threads) {
    live = threads;
    live_of_warp.assign((threads + LANES - 1) / LANES, 0);
    for (int i = 0; i < threads; ++i) ++live_of_warp[i / LANES];
    block_meeting = {};
    warp_meetings.assign(live_of_warp.size(), {});
    exchanged.resize(live_of_warp.size());
    while (static_cast<int>(fibers.size()) < threads) make_fiber();
    for (int i = 0; i < threads; ++i) {
        const unsigned at = i;
        fibers[i]->done = false;
        fibers[i]->index = {at % blockDim.x, at / blockDim.x % blockDim.y, at / (blockDim.x * blockDim.y)};
    }
    while (live) {
        moved = false;
        for (int i = 0; i < threads; ++i) {
            current = backward ? threads - 1 - i : i;
            if (fibers[current]->done) continue;
            threadIdx = fibers[current]->index;
            resume(*fibers[current]);
        }
        if (!moved) fail("a barrier that not all threads come to");
    }
}

inline char* shared_begin() {
    return dynamic_shared.data() + (128 - reinterpret_cast<std::uintptr_t>(dynamic_shared.data()) % 128);
}

template <typename Kernel>
void launch(dim3 grid, dim3 block, std::size_t shared, Kernel kernel) {
    const std::function<void()> call = kernel;
    body = &call;
    gridDim = grid;
    blockDim = block;
    const unsigned blocks = grid.x * grid.y * grid.z, threads = block.x * block.y * block.z;
    if (!blocks || !threads || threads > 1024 || grid.y > 65535 || grid.z > 65535 || shared > MOST_SHARED) {
        fail("a launch that is too large, or empty");
    }
    dynamic_shared.resize(shared + 256);
    for (unsigned i = 0; i < blocks; ++i) {
        const unsigned at = backward ? blocks - 1 - i : i;
        blockIdx = {at % grid.x, at / grid.x % grid.y, at / (grid.x * grid.y)};
        std::fill(dynamic_shared.begin(), dynamic_shared.end(), '\xff');  // NaN
        run_block(threads);
        char* const end = dynamic_shared.data() + dynamic_shared.size();
        if (std::any_of(shared_begin() + shared, end, [](char c) { return c != '\xff'; })) {
            fail("something is written behind shared memory");
        }
    }
    backward = !backward;
}

inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }

template <typename T>
T* shared_memory() {
    return reinterpret_cast<T*>(shared_begin());
}

}  // namespace emulated

// As common.cuh has it.
template <typename... Parameters, typename... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, std::size_t shared, cudaStream_t,
            Args... args) {
    emulated::launch(grid, threads, shared, [&] { kernel(args...); });
}

inline void __syncthreads() { emulated::meet(emulated::block_meeting, emulated::live); }
inline void __syncwarp(unsigned = 0xffffffff) { emulated::meet_warp(); }

template <typename T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
    return emulated::from_lane(value, emulated::lane() / width * width + source % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits, int = 32) {
    return emulated::from_lane(value, emulated::lane() ^ bits);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int step, int width = 32) {
    const int lane = emulated::lane(), source = lane + step;
    return emulated::from_lane(value, source / width == lane / width ? source : lane);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int step, int width = 32) {
    const int lane = emulated::lane(), source = lane - step;
    return emulated::from_lane(value, source >= lane / width * width ? source : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned bits = 0;
    auto& slots = emulated::exchanged[emulated::warp()];
    const unsigned long long mine = predicate != 0;
    slots[emulated::lane()] = mine;
    emulated::meet_warp();
    const int lanes = std::min<int>(32, blockDim.x * blockDim.y * blockDim.z - emulated::warp() * 32);
    for (int i = 0; i < lanes; ++i) bits |= static_cast<unsigned>(slots[i] & 1) << i;
    emulated::meet_warp();
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <typename T>
T __ldcs(const T* from) { return *from; }
template <typename T>
T __ldg(const T* from) { return *from; }
template <typename T>
T __ldcg(const T* from) { return *from; }
template <typename T>
void __stcs(T* to, T value) { *to = value; }
template <typename T>
void __stcg(T* to, T value) { *to = value; }

template <typename T>
T atomicAdd(T* at, T value) { const T old = *at; *at = old + value; return old; }
template <typename T>
T atomicMax(T* at, T value) { const T old = *at; *at = std::max(old, value); return old; }
template <typename T>
T atomicMin(T* at, T value) { const T old = *at; *at = std::min(old, value); return old; }

inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __longlong_as_double(long long x) { double y; std::memcpy(&y, &x, 8); return y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (static_cast<unsigned long long>(x) * y) >> 32; }
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
    unsigned same = 0;
    const int lanes = std::min<int>(32, blockDim.x * blockDim.y * blockDim.z - emulated::warp() * 32);
    for (int i = 0; i < lanes; ++i) {
        same |= static_cast<unsigned>(__shfl_sync(0xffffffff, value, i) == value) << i;
    }
    return same;
}
inline int __syncthreads_count(int predicate) {
    static int total;
    __syncthreads();
    total = 0;
    __syncthreads();
    total += predicate != 0;
    __syncthreads();
    return total;
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) > 0; }
inline int __syncthreads_and(int predicate) {
    return __syncthreads_count(predicate) == static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (static_cast<unsigned long long>(high) << 32) | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned>(bytes >> (8 * (selector >> 4 * i & 7)) & 0xff) << 8 * i;
    }
    return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffffu, b & 0xffffu);
}
template <typename T, typename Combine>
T over_lanes(T value, Combine combine) {
    for (int step = 16; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
    return over_lanes(value, [](T a, T b) { return std::max(a, b); });
}
template <typename T>
T __reduce_add_sync(unsigned, T value) {
    return over_lanes(value, [](T a, T b) { return a + b; });
}
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
inline void __threadfence() {}
inline void __trap() { std::abort(); }
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

extern "C" {
inline cudaError_t emulated_last_error() { return cudaSuccess; }
}
#define cudaGetLastError emulated_last_error
#define cudaGetErrorString(error) "no error"
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaDeviceGetAttribute(value, attribute, device) \
    (*(value) = (attribute) == cudaDevAttrMultiProcessorCount ? 2 : emulated::MOST_SHARED, cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, ...) (*(blocks) = 2, cudaSuccess)
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaMemsetAsync(to, value, bytes, stream) (std::memset(to, value, bytes), cudaSuccess)
