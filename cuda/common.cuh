// What all kernels share: loads and stores of 16 bytes, sums over warps and blocks, launches.
//
// A kernel works on packs of 16 bytes, eight bf16 or four fp32, with several loads in flight before the first
// is used. Elements that do not fill a pack, or are not aligned to one, are handled one by one: mostly by the
// same code with packs of one.

#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.h"

// Elements and packs.

template <typename T>
__device__ __forceinline__ float to_float(T x) {
    return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
    return static_cast<T>(x);  // rounds to nearest even
}

// N elements that are loaded and stored at once.
template <typename T, int N = 16 / sizeof(T)>
struct alignas(sizeof(T) * N) Pack {
    static constexpr int size = N;
    T values[N];

    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {  // one instruction instead of two
            const unsigned pair = reinterpret_cast<const unsigned*>(values)[i / 2];
            return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
        }
        return to_float(values[i]);
    }
    __device__ __forceinline__ void set(int i, float x) { values[i] = from_float<T>(x); }
    __device__ __forceinline__ void set(const float (&x)[N]) {
        if constexpr (sizeof(T) == 2 && N % 2 == 0) {  // two by one instruction
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                if constexpr (std::is_same_v<T, __half>) {
                    reinterpret_cast<__half2*>(values)[i / 2] = __floats2half2_rn(x[i], x[i + 1]);
                } else {
                    reinterpret_cast<__nv_bfloat162*>(values)[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) set(i, x[i]);
        }
    }
};

// All of a pack by one instruction. (Telling the caches that it is read but once makes it slower on Hopper.)
template <typename P>
__device__ __forceinline__ P load_pack(const P* from) {
    if constexpr (sizeof(P) == 16) {
        P pack;
        *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
        return pack;
    } else {
        return *from;
    }
}

// A pack that is to stay one between two uses: else the compiler keeps all of it as floats too.
template <typename P>
__device__ __forceinline__ void keep_packed(P& pack) {
    if constexpr (sizeof(P) == 16) {
        uint4& bits = reinterpret_cast<uint4&>(pack);
        asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
    }
}

// Sums and maxima.

struct Sum {
    __device__ static float zero() { return 0.0f; }
    __device__ static float of(float a, float b) { return a + b; }
};

struct Max {
    __device__ static float zero() { return -INFINITY; }
    __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

// Over the 32 lanes of a warp; every lane gets the result, always added in the same order.
template <typename Op>
__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = Op::of(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

// Over all threads of a block of at most 1024; every thread gets the result. `shared` holds 32 floats and may
// be reused when all threads have returned.
template <typename Op>
__device__ __forceinline__ float over_block(float x, float* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    x = over_warp<Op>(x);
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return over_warp<Op>(lane < warps ? shared[lane] : Op::zero());
}

// Launches.

#ifdef __CUDACC__  // else tests/cuda_on_cpu.h has it

inline bool launches_dependents() {  // the GPUs of a process are alike
    static const bool hopper = [] {
        int device = 0, major = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        return major >= 9;
    }();
    return hopper;
}

// kernel<<<grid, threads, shared, stream>>>(args...), from Hopper on as a programmatic dependent launch:
// while the kernel before ends, the blocks of this one are set up, and wait in `wait_for_previous_kernel`,
// which must be the first statement of every kernel.
template <typename... Parameters, typename... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared, cudaStream_t stream,
            Args... args) {
    cudaLaunchAttribute dependent{};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared;
    config.stream = stream, config.attrs = &dependent, config.numAttrs = launches_dependents();
    cudaLaunchKernelEx(&config, kernel, args...);
}

#endif

// Returns when the kernels before this one have ended, and all that they wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

inline void check_launch(const char* name) {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

inline int multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

// Blocks for `work` independent pieces: one each, or as many as keep the GPU busy.
inline unsigned blocks_for(int64_t work, int per_multiprocessor) {
    const int64_t most = static_cast<int64_t>(multiprocessors()) * per_multiprocessor;
    return static_cast<unsigned>(work < 1 ? 1 : work < most ? work : most);
}

inline bool aligned(std::uintptr_t address, int bytes = 16) { return address % bytes == 0; }

// Calls `body` with a value of the element type that `type` names:
//     with_type(type, [&](auto x) { using T = decltype(x); ... });
template <typename Body>
void with_type(int type, Body body) {
    switch (type) {
        case FP32: return body(float{});
        case BF16: return body(__nv_bfloat16{});
        case FP16: return body(__half{});
        default:
            throw std::runtime_error("element type " + std::to_string(type) + " is not one of this kernel's");
    }
}
