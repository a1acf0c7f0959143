// As much of cuBLASLt as cuda/matmul.cu calls, for numbers in the memory of a CPU: to see that what that
// hands over is right, where there is neither the library nor a GPU. Attributes are those of cublasLt.h; what
// the real one would refuse, or read beyond its end, is refused here.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

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
    std::uint32_t alignments[4], reductions;
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
enum { R_32F = 0, R_16F = 2, R_16BF = 14, E4M3 = 28, E5M2 = 29 };

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

static int copy_attribute(void* to, std::size_t size, const void* value, std::size_t bytes) {
    if (size != bytes) return INVALID_VALUE;
    std::memcpy(to, value, bytes);
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, std::size_t bytes) {
    auto& d = *static_cast<Description*>(description);
    switch (attribute) {
        case 3: return copy_attribute(&d.transpose_a, sizeof(d.transpose_a), value, bytes);
        case 4: return copy_attribute(&d.transpose_b, sizeof(d.transpose_b), value, bytes);
        case 17: return copy_attribute(&d.scale_a, sizeof(d.scale_a), value, bytes);
        case 18: return copy_attribute(&d.scale_b, sizeof(d.scale_b), value, bytes);
        case 25: return copy_attribute(&d.fast, sizeof(d.fast), value, bytes);
        default: return INVALID_VALUE;
    }
}

int cublasLtMatrixLayoutCreate(void** layout, int type, std::uint64_t rows, std::uint64_t columns,
                               std::int64_t stride) {
    *layout = new Layout{type, rows, columns, stride};
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new Preference{0, {256, 256, 256, 256}, 7};
    return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
    delete static_cast<Preference*>(preference);
    return SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value,
                                         std::size_t bytes) {
    auto& p = *static_cast<Preference*>(preference);
    if (attribute == 1) return copy_attribute(&p.workspace_bytes, sizeof(p.workspace_bytes), value, bytes);
    if (attribute == 3) return copy_attribute(&p.reductions, sizeof(p.reductions), value, bytes);
    if (attribute < 5 || attribute > 8) return INVALID_VALUE;
    return copy_attribute(&p.alignments[attribute - 5], sizeof(p.alignments[0]), value, bytes);
}

static bool is_fp8(const Layout& x) { return x.type == E4M3 || x.type == E5M2; }
static bool is_half(const Layout& x) { return x.type == R_16F || x.type == R_16BF; }

// FP8 needs scales, rows along k and sizes of whole 16 bytes.
static bool takes(const Description& how, const Layout& a, const Layout& b, const Layout& out) {
    const bool scales = how.scale_a != nullptr && how.scale_b != nullptr;
    for (const Layout& each : {a, b, out}) {
        if (each.rows % 16 != 0) return false;
    }
    const bool types = is_fp8(a) && is_fp8(b) && (a.type == E4M3 || b.type == E4M3);
    const bool outs = is_half(out) || out.type == R_32F;
    return types && scales && outs && how.transpose_a == 1 && how.transpose_b == 0;
}

// An algorithm is what it was chosen for: alignments, bytes of workspace, fast or not. None for a result in 16
// bits may sum in less than fp32.
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* description, void* a_layout, void* b_layout, void* c,
                                   void* d, void* preference, int wanted, Result* found, int* count) {
    const auto& a = *static_cast<Layout*>(a_layout);
    const auto& b = *static_cast<Layout*>(b_layout);
    const auto& out = *static_cast<Layout*>(d);
    const auto& how = *static_cast<Description*>(description);
    const auto& p = *static_cast<Preference*>(preference);
    ++searches;
    *count = 0;
    const auto [rows, a_k] = how.transpose_a ? std::pair(a.columns, a.rows) : std::pair(a.rows, a.columns);
    const auto [columns, b_k] = how.transpose_b ? std::pair(b.rows, b.columns) : std::pair(b.columns, b.rows);
    const bool shapes = a_k == b_k && rows == out.rows && columns == out.columns;
    const bool sums = p.reductions == 2 || out.type == R_32F;
    if (handle != &handles || c != d || !shapes || !sums || wanted != 1) return INVALID_VALUE;
    for (const Layout& each : {a, b, out}) {
        if (each.stride != static_cast<std::int64_t>(each.rows)) return INVALID_VALUE;
    }
    if (!takes(how, a, b, out)) return NOT_SUPPORTED;
    *found = Result{};
    for (int i = 0; i < 4; ++i) found->algorithm.data[i] = p.alignments[i];
    found->algorithm.data[4] = p.workspace_bytes;
    found->algorithm.data[5] = how.fast;
    *count = 1;
    return SUCCESS;
}

struct Format {
    int bytes, exponent_bits, mantissa_bits;
    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

static Format format_of(int type) {
    switch (type) {
        case R_16F: return {2, 5, 10};
        case R_16BF: return {2, 8, 7};
        case E4M3: return {1, 4, 3};
        case E5M2: return {1, 5, 2};
        default: return {4, 8, 23};
    }
}

static double get(const void* values, std::uint64_t index, int type) {
    const Format f = format_of(type);
    std::uint32_t bits = 0;
    std::memcpy(&bits, static_cast<const char*>(values) + index * f.bytes, f.bytes);
    const int exponent = bits >> f.mantissa_bits & ((1 << f.exponent_bits) - 1);
    const double fraction = std::ldexp(bits & ((1 << f.mantissa_bits) - 1), -f.mantissa_bits);
    const bool negative = bits >> (8 * f.bytes - 1);
    return (negative ? -1 : 1) * std::ldexp(fraction + (exponent > 0), std::max(exponent, 1) - f.bias());
}

// Rounded to the nearest normal number.
static void put(void* values, std::uint64_t index, int type, double x) {
    const Format f = format_of(type);
    int exponent = 0;
    const double mantissa = std::frexp(std::abs(x), &exponent);
    auto bits = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(mantissa, f.mantissa_bits + 1)));
    if (bits != 0) bits += (exponent - 2 + f.bias()) << f.mantissa_bits;  // and one from before the point
    bits |= static_cast<std::uint32_t>(std::signbit(x)) << (8 * f.bytes - 1);
    std::memcpy(static_cast<char*>(values) + index * f.bytes, &bits, f.bytes);
}

int cublasLtMatmul(void* handle, void* description, const float* alpha, const void* a, Layout* a_layout,
                   const void* b, Layout* b_layout, const float* beta, const void* c, Layout* c_layout,
                   void* d, Layout* d_layout, const Algorithm* algorithm, void* workspace,
                   std::size_t workspace_bytes, void* stream) {
    const auto& how = *static_cast<Description*>(description);
    const auto& best = algorithm->data;
    const void* addresses[] = {a, b, c, d, how.scale_a, how.scale_b, workspace};
    const std::uint64_t alignments[] = {best[0], best[1], best[2], best[3], 16, 16, 16};
    for (int i = 0; i < 7; ++i) {
        if (reinterpret_cast<std::uintptr_t>(addresses[i]) % alignments[i] != 0) return INVALID_VALUE;
    }
    if (handle != &handles || c != d || c_layout != d_layout || stream != nullptr) return INVALID_VALUE;
    if (workspace_bytes < best[4] || how.fast != static_cast<std::int8_t>(best[5])) return INVALID_VALUE;
    const auto rows = d_layout->rows, columns = d_layout->columns;
    const auto k = how.transpose_a ? a_layout->rows : a_layout->columns;
    const double scale = *alpha * (how.scale_a ? *how.scale_a * *how.scale_b : 1.0);
    for (std::uint64_t j = 0; j < columns; ++j) {
        for (std::uint64_t i = 0; i < rows; ++i) {
            double sum = 0.0;
            for (std::uint64_t l = 0; l < k; ++l) {
                const auto in_a = how.transpose_a ? i * k + l : l * rows + i;
                const auto in_b = how.transpose_b ? l * columns + j : j * k + l;
                sum += get(a, in_a, a_layout->type) * get(b, in_b, b_layout->type);
            }
            const auto place = j * rows + i;
            const double before = *beta == 0.0f ? 0.0 : *beta * get(c, place, d_layout->type);
            double product = scale * sum;
            if (how.scale_a && d_layout->type == R_16BF) {  // of FP8, seen on an H100: rounded, then added
                put(d, place, R_16BF, product);
                product = get(d, place, R_16BF);
            }
            put(d, place, d_layout->type, product + before);
        }
    }
    ++matmuls;
    return SUCCESS;
}

}  // extern "C"
