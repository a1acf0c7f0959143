// The Python module nanomegatron._kernels: the functions of kernels.h, and nothing else.
//
// Addresses are Python numbers, None is the null address. The lock on Python's interpreter is kept: a launch
// takes microseconds.

#include "kernels.h"

#include <pybind11/pybind11.h>

namespace pybind11::detail {
template <>
struct type_caster<Address> {
    PYBIND11_TYPE_CASTER(Address, const_name("int | None"));
    bool load(handle source, bool) {
        if (source.is_none()) return true;
        value.value = reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(source.ptr()));
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return false;
        }
        return true;
    }
};
}  // namespace pybind11::detail

PYBIND11_MODULE(_kernels, module) {
    module.attr("archs") = KERNEL_ARCHS;
    module.def("swiglu_forward", &swiglu_forward);
    module.def("swiglu_backward", &swiglu_backward);
    // gelu.cu, column_sums.cu
    module.def("gelu_forward", &gelu_forward);
    module.def("gelu_backward", &gelu_backward);
    module.def("column_sums", &column_sums);
    // softmax.cu, rope.cu
    module.def("softmax_forward", &softmax_forward);
    module.def("softmax_backward", &softmax_backward);
    module.def("rope", &rope);
    // fp8_cast.cu, fp8_rows.cu, fp8_scale.cu, matmul.cu, permute.cu
    module.def("fp8_amax", &fp8_amax);
    module.def("fp8_cast", &fp8_cast);
    module.def("fp8_cast_blocks", &fp8_cast_blocks);
    module.def("fp8_cast_rows", &fp8_cast_rows);
    module.def("fp8_transpose", &fp8_transpose);
    module.def("fp8_scale", &fp8_scale);
    module.def("fp8_update", &fp8_update);
    module.def("matmul_ready", &matmul_ready);
    module.def("matmul", &matmul);
    module.def("moe_route", &moe_route);
    module.def("moe_permute", &moe_permute);
    module.def("moe_unpermute", &moe_unpermute);
    // norm.cu, norm_backward.cu, dropout.cu
    module.def("norm_forward", &norm_forward);
    module.def("norm_backward", &norm_backward);
    module.def("bias_dropout_add", &bias_dropout_add);
    module.def("bias_dropout_backward", &bias_dropout_backward);
    // merge.cu
    module.def("merge_rows", &merge_rows);
    // embedding.cu
    module.def("embedding_lookup", &embedding_lookup);
    module.def("embedding_add", &embedding_add);
    // norm_fp8.cu, gelu_fp8.cu, swiglu_fp8.cu, cross_entropy_fp8.cu
    module.def("norm_fp8", &norm_fp8);
    module.def("gelu_fp8_forward", &gelu_fp8_forward);
    module.def("gelu_fp8_backward", &gelu_fp8_backward);
    module.def("swiglu_fp8_forward", &swiglu_fp8_forward);
    module.def("swiglu_fp8_backward", &swiglu_fp8_backward);
    module.def("cross_entropy_fp8", &cross_entropy_fp8);
    // cross_entropy.cu, adamw.cu
    module.def("cross_entropy_stats", &cross_entropy_stats);
    module.def("cross_entropy_grad", &cross_entropy_grad);
    module.def("adamw", &adamw);
    module.def("sums_of_squares", &sums_of_squares);
}
