// FP8 matmul that adds to what is there, for weight gradients: torch's own FP8 matmul only writes.
//
//     out [m, n]  =  or +=  a_inverse * b_inverse * a [m, k] b [n, k]^T      E4M3 or E5M2, not both E5M2
//                                                                            out in fp32 or bf16
//
// The naive loop:  for i, j:  out[i][j] += a_inverse * b_inverse * sum over l of a[i][l] * b[j][l]
// To add moves 8 bytes an element of an fp32 out; a matmul into a temporary and a sum of the two move 16.
//
// Host code alone: the matmul is cuBLASLt's, out of the library that torch has loaded. Building needs neither
// that nor its header: what is used of it is declared here, the same in all releases of CUDA 12 and 13.
//
// cuBLASLt has the columns of a matrix contiguous. To it `out` is [n, m], b [k, n] and a [k, m], so that it
// computes out^T = b a^T, with its A = our b, transposed, and its B = our a: the one form it has for FP8.
//
// Nothing waits for the GPU. A problem's first call asks the library for an algorithm, and must come before a
// CUDA graph is captured; later ones reuse all but the addresses. Calls come one at a time: Python's lock.

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "kernels.h"

namespace {

using Status = int;  // an enum of C, as the attributes and the types below; 0 is success

enum Description { TRANSPOSE_A = 3, SCALE_A = 17, SCALE_B = 18, FAST_ACCUMULATION = 25 };
enum Preference {
    WORKSPACE_BYTES = 1,
    REDUCTIONS = 3,
    ALIGNMENT_A = 5,
    ALIGNMENT_B,
    ALIGNMENT_C,
    ALIGNMENT_D
};
constexpr int COMPUTE_32F = 68, TRANSPOSE = 1, NOT_SUPPORTED = 15;
constexpr uint32_t REDUCE_IN_FP32 = 2;  // partial sums of a matmul split along k: never in 16 bits

struct Algorithm {
    uint64_t data[8];
};
struct Found {
    Algorithm algorithm;
    size_t workspace_bytes;
    Status status;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Found) == 96, "as cublasLtMatmulHeuristicResult_t");

struct Library {
    Status (*create)(void** handle);
    Status (*describe)(void** description, int compute_type, int scale_type);
    Status (*set)(void* description, int attribute, const void* value, size_t bytes);
    Status (*lay_out)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride);
    Status (*prefer)(void** preference);
    Status (*set_preference)(void* preference, int attribute, const void* value, size_t bytes);
    Status (*forget)(void* preference);
    Status (*find)(void* handle, void* description, void* a, void* b, void* c, void* d, void* preference,
                   int wanted, Found* found, int* count);
    Status (*multiply)(void* handle, void* description, const void* alpha, const void* a, void* a_layout,
                       const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                       void* d, void* d_layout, const Algorithm* algorithm, void* workspace,
                       size_t workspace_bytes, cudaStream_t stream);
    const char* (*name)(Status);
};

void* open_library() {
    const char* names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    for (const char* name : names) {
        if (void* file = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return file;
    }
    std::string why;
    for (const char* name : names) {
        if (void* file = dlopen(name, RTLD_NOW)) return file;
        why += std::string(why.empty() ? "" : "; ") + dlerror();
    }
    throw std::runtime_error("torch has loaded no cuBLASLt of CUDA 12 or 13, and there is none to load: " +
                             why);
}

Library load() {
    void* file = open_library();
    const auto function = [&](auto& to, const char* name) {
        void* found = dlsym(file, name);
        if (found == nullptr) throw std::runtime_error(std::string("the cuBLASLt here has no ") + name);
        to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(found);
    };
    Library all;
    function(all.create, "cublasLtCreate");
    function(all.describe, "cublasLtMatmulDescCreate");
    function(all.set, "cublasLtMatmulDescSetAttribute");
    function(all.lay_out, "cublasLtMatrixLayoutCreate");
    function(all.prefer, "cublasLtMatmulPreferenceCreate");
    function(all.set_preference, "cublasLtMatmulPreferenceSetAttribute");
    function(all.forget, "cublasLtMatmulPreferenceDestroy");
    function(all.find, "cublasLtMatmulAlgoGetHeuristic");
    function(all.multiply, "cublasLtMatmul");
    function(all.name, "cublasLtGetStatusName");
    return all;
}

const Library& library() {
    static const Library loaded = load();  // tried again in the next call if it has thrown
    return loaded;
}

// What an algorithm is chosen for.
struct Problem {
    int64_t m, n, k, a_alignment, b_alignment, out_alignment, workspace_bytes;
    int a_type, b_type, out_type, add, fast, device;

    auto all() const {
        return std::tie(m, n, k, a_alignment, b_alignment, out_alignment, workspace_bytes, a_type, b_type,
                        out_type, add, fast, device);
    }
    bool operator<(const Problem& other) const { return all() < other.all(); }
};

// What a call needs besides the addresses; kept as long as the process.
struct Plan {
    void *handle, *description, *a, *b, *out;
    Algorithm algorithm;
};

cudaDataType type_of(int type) {
    switch (type) {
        case BF16: return CUDA_R_16BF;
        case E4M3: return CUDA_R_8F_E4M3;
        case E5M2: return CUDA_R_8F_E5M2;
        default: return CUDA_R_32F;
    }
}

void check(Status status, const char* what, const Problem& p) {
    if (status == 0) return;
    const char* names[] = {"fp32", "bf16", "fp16", "E4M3", "E5M2"};
    const auto matrix = [&](int64_t rows, int64_t columns, int type) {
        return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "] " + names[type];
    };
    throw std::runtime_error(std::string("matmul: ") + what + ": " + library().name(status) + ", " +
                             matrix(p.m, p.k, p.a_type) + " x " + matrix(p.k, p.n, p.b_type));
}

template <typename T>
void set(void* description, Description attribute, T value, const Problem& p) {
    check(library().set(description, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute", p);
}

void set_scales(void* description, const void* a_inverse, const void* b_inverse, const Problem& p) {
    set(description, SCALE_A, b_inverse, p);
    set(description, SCALE_B, a_inverse, p);
}

void* handle_of(const Problem& p) {
    static std::map<int, void*> handles;
    void*& handle = handles[p.device];
    if (handle == nullptr) check(library().create(&handle), "cublasLtCreate", p);
    return handle;
}

Algorithm find(const Plan& plan, const Problem& p) {
    void* preference = nullptr;
    check(library().prefer(&preference), "cublasLtMatmulPreferenceCreate", p);
    const auto prefer = [&](Preference attribute, auto value) {
        check(library().set_preference(preference, attribute, &value, sizeof(value)),
              "cublasLtMatmulPreferenceSetAttribute", p);
    };
    prefer(WORKSPACE_BYTES, static_cast<uint64_t>(p.workspace_bytes));
    prefer(ALIGNMENT_A, static_cast<uint32_t>(p.b_alignment));
    prefer(ALIGNMENT_B, static_cast<uint32_t>(p.a_alignment));
    prefer(ALIGNMENT_C, static_cast<uint32_t>(p.out_alignment));
    prefer(ALIGNMENT_D, static_cast<uint32_t>(p.out_alignment));
    if (p.out_type != FP32) prefer(REDUCTIONS, REDUCE_IN_FP32);
    Found found = {};
    int count = 0;
    Status status = library().find(plan.handle, plan.description, plan.b, plan.a, plan.out, plan.out,
                                   preference, 1, &found, &count);
    library().forget(preference);
    if (status == 0) status = count == 0 ? NOT_SUPPORTED : found.status;
    check(status, "cublasLtMatmulAlgoGetHeuristic", p);
    return found.algorithm;
}

Plan make_plan(const void* a_inverse, const void* b_inverse, const Problem& p) {
    Plan plan = {};
    plan.handle = handle_of(p);
    const auto lay_out = [&](void** layout, int type, int64_t rows, int64_t columns) {
        check(library().lay_out(layout, type_of(type), rows, columns, rows), "cublasLtMatrixLayoutCreate", p);
    };
    lay_out(&plan.a, p.a_type, p.k, p.m);
    lay_out(&plan.b, p.b_type, p.k, p.n);
    lay_out(&plan.out, p.out_type, p.n, p.m);
    check(library().describe(&plan.description, COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate", p);
    set(plan.description, TRANSPOSE_A, TRANSPOSE, p);
    set(plan.description, FAST_ACCUMULATION, static_cast<int8_t>(p.fast), p);
    set_scales(plan.description, a_inverse, b_inverse, p);
    plan.algorithm = find(plan, p);
    return plan;
}

const Plan& plan_of(const void* a_inverse, const void* b_inverse, const Problem& p) {
    static std::map<Problem, Plan> plans;
    auto at = plans.find(p);
    if (at == plans.end()) at = plans.emplace(p, make_plan(a_inverse, b_inverse, p)).first;
    return at->second;
}

// The largest power of two that divides it, of those that the library asks for.
int64_t alignment(Address x) { return std::min<std::uintptr_t>(x.value & -x.value, 256); }

int device() {
    int current = 0;
    cudaGetDevice(&current);
    return current;
}

}  // namespace

void matmul_ready() { library(); }

void matmul(Address out, Address a, Address a_inverse, Address b, Address b_inverse, Address workspace,
            int64_t workspace_bytes, int64_t m, int64_t n, int64_t k, int a_type, int b_type, int out_type,
            int add, int fast, Address stream) {
    const Problem p = {m,      n,      k,        alignment(a), alignment(b), alignment(out), workspace_bytes,
                       a_type, b_type, out_type, add,          fast,         device()};
    const Plan& plan = plan_of(a_inverse, b_inverse, p);
    set_scales(plan.description, a_inverse, b_inverse, p);
    const float one = 1.0f, beta = add ? 1.0f : 0.0f;
    const Status status =
        library().multiply(plan.handle, plan.description, &one, b, plan.b, a, plan.a, &beta, out, plan.out,
                           out, plan.out, &plan.algorithm, workspace, workspace_bytes, stream);
    check(status, "cublasLtMatmul", p);
}
