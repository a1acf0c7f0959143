// As much of cuBLASLt as cuda/matmul_fp8.cu calls, for numbers in the memory of a CPU: to see that what that
// hands over is right, where there is neither the library nor a GPU. Attributes are those of cublasLt.h; what
// the real one would refuse, or read beyond its end, is refused here.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

extern "C" {

int handles = 0, searches = 0, matmuls = 0;  // so many have been made

struct Description {
    int transpose_a, transpose_b;
    std::int8_t fast;
    const float *scale_a, *scale_b;
};
struct Layout {
    int type;
    std::uint64_t rows, columns;
    std::int64_t stride;
};
struct Preference {
    std::uint64_t workspace_bytes;
    std::uint32_t alignments[4];
};
struct Algorithm {
    std::uint64_t data[8];
};
struct Result {
    Algorithm algorithm;
    std::size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, E4M3 = 28, E5M2 = 29 };

const char* cublasLtGetStatusName(int status) {
    return status == NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}

int cublasLtCreate(void** handle) {
    ++handles;
    *handle = &handles;
    return SUCCESS;
}

int cublasLtMatmulDescCreate(void** description, int compute_type, int scale_type) {
    *description = new Description{};
    return compute_type == 68 && scale_type == R_32F ? SUCCESS : INVALID_VALUE;
}

static int put(void* to, std::size_t size, const void* value, std::size_t bytes) {
    if (size != bytes) return INVALID_VALUE;
    std::memcpy(to, value, bytes);
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, std::size_t bytes) {
    auto& d = *static_cast<Description*>(description);
    switch (attribute) {
        case 3: return put(&d.transpose_a, sizeof(d.transpose_a), value, bytes);
        case 4: return put(&d.transpose_b, sizeof(d.transpose_b), value, bytes);
        case 17: return put(&d.scale_a, sizeof(d.scale_a), value, bytes);
        case 18: return put(&d.scale_b, sizeof(d.scale_b), value, bytes);
        case 25: return put(&d.fast, sizeof(d.fast), value, bytes);
        default: return INVALID_VALUE;
    }
}

int cublasLtMatrixLayoutCreate(void** layout, int type, std::uint64_t rows, std::uint64_t columns,
                               std::int64_t stride) {
    *layout = new Layout{type, rows, columns, stride};
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new Preference{0, {256, 256, 256, 256}};
    return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
    delete static_cast<Preference*>(preference);
    return SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value,
                                         std::size_t bytes) {
    auto& p = *static_cast<Preference*>(preference);
    if (attribute == 1) return put(&p.workspace_bytes, sizeof(p.workspace_bytes), value, bytes);
    if (attribute < 5 || attribute > 8) return INVALID_VALUE;
    return put(&p.alignments[attribute - 5], sizeof(p.alignments[0]), value, bytes);
}

// The algorithm is what it was chosen for: alignments, bytes of workspace, scales or none, fast or not.
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* description, void* a_layout, void* b_layout, void* c,
                                   void* d, void* preference, int wanted, Result* found, int* count) {
    const auto& a = *static_cast<Layout*>(a_layout);
    const auto& b = *static_cast<Layout*>(b_layout);
    const auto& out = *static_cast<Layout*>(d);
    const auto& how = *static_cast<Description*>(description);
    const auto& p = *static_cast<Preference*>(preference);
    ++searches;
    *count = 0;
    const bool types = (a.type == E4M3 || b.type == E4M3) && out.type == R_32F;
    const bool shapes = a.rows == b.rows && a.columns == out.rows && b.columns == out.columns;
    if (handle != &handles || wanted != 1 || c != d || !shapes) return INVALID_VALUE;
    if (!types || how.transpose_a != 1 || how.transpose_b != 0) return NOT_SUPPORTED;
    for (const Layout& each : {a, b, out}) {
        if (each.stride != static_cast<std::int64_t>(each.rows) || each.rows % 16 != 0) return NOT_SUPPORTED;
    }
    if (how.scale_a == nullptr || how.scale_b == nullptr) return NOT_SUPPORTED;
    *found = Result{};
    for (int i = 0; i < 4; ++i) found->algorithm.data[i] = p.alignments[i];
    found->algorithm.data[4] = p.workspace_bytes;
    found->algorithm.data[5] = how.fast;
    *count = 1;
    return SUCCESS;
}

static double number(std::uint8_t bits, int type) {
    const int mantissa_bits = type == E4M3 ? 3 : 2, bias = type == E4M3 ? 7 : 15;
    const int exponent = (bits & 127) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
    const double fraction = std::ldexp(mantissa, -mantissa_bits) + (exponent > 0);
    return (bits & 128 ? -1 : 1) * std::ldexp(fraction, (exponent > 0 ? exponent : 1) - bias);
}

int cublasLtMatmul(void* handle, void* description, const float* alpha, const std::uint8_t* a,
                   Layout* a_layout, const std::uint8_t* b, Layout* b_layout, const float* beta,
                   const float* c, void* c_layout, float* d, void* d_layout, const Algorithm* algorithm,
                   void* workspace, std::size_t workspace_bytes, void* stream) {
    const auto& how = *static_cast<Description*>(description);
    const auto& best = algorithm->data;
    const void* addresses[] = {a, b, c, d, how.scale_a, how.scale_b, workspace};
    const std::uint64_t alignments[] = {best[0], best[1], best[2], best[3], 16, 16, 16};
    for (int i = 0; i < 7; ++i) {
        if (reinterpret_cast<std::uintptr_t>(addresses[i]) % alignments[i] != 0) return INVALID_VALUE;
    }
    if (handle != &handles || c != d || c_layout != d_layout || stream != nullptr) return INVALID_VALUE;
    if (workspace_bytes < best[4] || how.fast != static_cast<std::int8_t>(best[5])) return INVALID_VALUE;
    const auto rows = a_layout->columns, columns = b_layout->columns, k = a_layout->rows;
    for (std::uint64_t j = 0; j < columns; ++j) {
        for (std::uint64_t i = 0; i < rows; ++i) {
            double sum = 0.0;
            for (std::uint64_t l = 0; l < k; ++l) {
                sum += number(a[i * k + l], a_layout->type) * number(b[j * k + l], b_layout->type);
            }
            d[j * rows + i] =
                static_cast<float>(*alpha * *how.scale_a * *how.scale_b * sum + *beta * c[j * rows + i]);
        }
    }
    ++matmuls;
    return SUCCESS;
}

}  // extern "C"
