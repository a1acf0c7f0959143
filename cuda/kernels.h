// What Python calls: one function a launch. Shapes, layouts and maths are stated in the .cu that has the
// kernel.
//
// Pointers and the stream come as numbers; a null pointer says that something optional is not wanted. `Type`
// is the element type of the tensors that can have several. All sizes are counts of elements. The caller
// (nanomegatron/ops) has checked types, shapes, contiguity and devices: here only the launch is checked.

#pragma once
#include <cstdint>

struct Address {  // of device memory, or of a stream; turns into whatever pointer is needed
    std::uintptr_t value = 0;
    template <typename T>
    operator T*() const {
        return reinterpret_cast<T*>(value);
    }
};

enum Type : int { FP32 = 0, BF16 = 1, FP16 = 2, E4M3 = 3, E5M2 = 4 };

// swiglu.cu
void swiglu_forward(Address out, Address x, int64_t rows, int64_t f, int gated, int type, Address stream);
void swiglu_backward(Address dx, Address grad, Address x, int64_t rows, int64_t f, int gated, int type,
                     Address stream);

// gelu.cu, column_sums.cu
void gelu_forward(Address out, Address x, Address bias, int64_t rows, int64_t f, int act, int type,
                  Address stream);
void gelu_backward(Address dx, Address dbias, Address workspace, Address grad, Address x, Address bias,
                   int64_t rows, int64_t f, int64_t parts, int add, int act, int type, int dbias_type,
                   Address stream);
void column_sums(Address out, Address workspace, Address x, int64_t rows, int64_t n, int64_t parts, int add,
                 int type, int out_type, Address stream);

// softmax.cu
void softmax_forward(Address out, Address lse, Address x, float scale, int64_t b, int64_t n, int64_t s,
                     int64_t t, int causal, int64_t window, Address hidden, int64_t hidden_b,
                     int64_t hidden_n, int64_t hidden_s, int type, Address stream);
void softmax_backward(Address dx, Address grad, Address y, float scale, int64_t b, int64_t n, int64_t s,
                      int64_t t, int causal, int64_t window, Address hidden, int64_t hidden_b,
                      int64_t hidden_n, int64_t hidden_s, int type, Address stream);

// rope.cu
void rope(Address out, int64_t out_s, int64_t out_b, int64_t out_h, Address q, int64_t q_s, int64_t q_b,
          int64_t q_h, Address k, int64_t k_s, int64_t k_b, int64_t k_h, Address v, int64_t v_s, int64_t v_b,
          int64_t v_h, Address cos, Address sin, int64_t s, int64_t b, int64_t n, int64_t g, int64_t values,
          int64_t d, int64_t r, int64_t table_b, int interleaved, int inverse, int type, Address stream);

// cross_entropy.cu
void cross_entropy_stats(Address out, Address logits, Address labels, int64_t rows, int64_t columns,
                         int64_t stride, int type, Address stream);
void cross_entropy_grad(Address out, Address logits, Address labels, Address lse, Address grad, int64_t rows,
                        int64_t columns, int64_t width, int64_t out_stride, int64_t stride, int type,
                        Address stream);

// adamw.cu
void adamw(Address main, Address params, Address grads, Address exp_avg, Address exp_avg_sq, Address table,
           int64_t count, int64_t blocks, int64_t chunk, Address step, Address values, Address grad_scale,
           Address skip, double beta1, double beta2, double eps, int copy, int grad_type, int avg_type,
           int avg_sq_type, Address scale, Address amax, Address stream);
void sums_of_squares(Address out, Address partial, Address x, Address table, int64_t count, int64_t blocks,
                     int64_t chunk, int type, Address stream);

// fp8_cast.cu, fp8_rows.cu, fp8_scale.cu
void fp8_amax(Address x, Address amax, int64_t n, int type, Address stream);
void fp8_cast(Address x, Address row, Address flip, Address scale, Address amax, int64_t m, int64_t k,
              int type, int format, Address stream);
void fp8_cast_blocks(Address x, Address inverse, int64_t down, int64_t across, Address row,
                     Address row_inverse, Address flip, Address flip_inverse, int64_t m, int64_t k,
                     int64_t row_stride, int64_t flip_stride, int squares, int power_of_two, int type,
                     int format, Address stream);
void fp8_cast_rows(Address x, Address inverse, int64_t down, int64_t across, Address row, Address row_inverse,
                   Address flip, Address flip_inverse, Address amax, int64_t m, int64_t k, float limit,
                   int type, int format, Address stream);
void fp8_transpose(Address x, Address flip, int64_t m, int64_t k, Address stream);
void fp8_scale(Address amax, Address scale, Address inverse, int64_t n, float limit, int power_of_two,
               Address stream);
void fp8_update(Address history, Address scale, Address inverse, Address limits, int64_t n, int64_t length,
                int most_recent, Address stream);

// matmul.cu; both throw where there is no cuBLASLt
void matmul_ready();
void matmul(Address out, Address a, Address a_inverse, Address b, Address b_inverse, Address workspace,
            int64_t workspace_bytes, int64_t m, int64_t n, int64_t k, int a_type, int b_type, int out_type,
            int add, int fast, Address stream);

// permute.cu
void moe_route(Address ids, Address position, Address source, Address offsets, Address counts, Address work,
               int64_t copies, int64_t experts, int64_t multiple, int64_t rows, Address stream);
void moe_permute(Address x, Address out, Address probs, Address position, Address source, Address z,
                 Address dprobs, int64_t tokens, int64_t topk, int64_t rows, int64_t h, int type,
                 Address stream);
void moe_unpermute(Address z, Address y, Address probs, Address position, Address x, Address dprobs,
                   int64_t tokens, int64_t topk, int64_t h, int type, Address stream);

// norm.cu, norm_backward.cu; from `positions` to `scale`: of dropout, as dropout.cuh has it
void norm_forward(Address out, Address total, Address rstd, Address mean, Address x, Address residual,
                  Address weight, Address bias, Address x_bias, int64_t rows, int64_t h, double eps,
                  int from_one, int type, int weight_type, Address positions, Address samples, int64_t batch,
                  int64_t key, int64_t least, double scale, Address stream);
void norm_backward(Address dx, Address dropped, Address dweight, Address dbias, Address dx_bias, Address sums,
                   Address grad, Address grad_total, Address x, Address rstd, Address mean, Address weight,
                   int64_t rows, int64_t h, int64_t parts, int from_one, int type, int weight_type,
                   Address positions, Address samples, int64_t batch, int64_t key, int64_t least,
                   double scale, Address stream);

// dropout.cu
void bias_dropout_add(Address out, Address x, Address bias, Address residual, int64_t rows, int64_t h,
                      int type, Address positions, Address samples, int64_t batch, int64_t key, int64_t least,
                      double scale, Address stream);
void bias_dropout_backward(Address dbias, Address dx, Address sums, Address grad, int64_t rows, int64_t h,
                           int64_t parts, int type, Address positions, Address samples, int64_t batch,
                           int64_t key, int64_t least, double scale, Address stream);

// merge.cu
void merge_rows(Address out, Address lse_out, Address table, int number, int64_t s, int64_t heads, int64_t d,
                int out_type, int first_type, int type, Address stream);

// embedding.cu
void embedding_lookup(Address out, Address table, Address positions, Address ids, Address places, int64_t s,
                      int64_t b, int64_t h, int64_t rows, int64_t first, int64_t place_rows,
                      int64_t place_stride, double scale, int type, Address stream);
void embedding_add(Address target, Address sums, Address grad, Address ids, Address order, int64_t entries,
                   int64_t repeats, int64_t rows, int64_t h, int target_type, int type, Address stream);

// norm_fp8.cu, gelu_fp8.cu, swiglu_fp8.cu, cross_entropy_fp8.cu
void norm_fp8(Address x, Address residual, Address weight, Address bias, Address row, Address flip,
              Address out, Address total, Address rstd, Address mean, Address scale, Address amax,
              int64_t rows, int64_t h, double eps, int from_one, int type, int weight_type, int format,
              Address stream);
void gelu_fp8_forward(Address x, Address bias, Address row, Address flip, Address scale, Address amax,
                      int64_t rows, int64_t f, int act, int type, int format, Address stream);
void gelu_fp8_backward(Address grad, Address x, Address bias, Address row, Address flip, Address scale,
                       Address amax, Address dbias, Address workspace, int64_t rows, int64_t f, int add,
                       int act, int type, int format, int dbias_type, Address stream);
void swiglu_fp8_forward(Address x, Address row, Address flip, Address scale, Address amax, int64_t rows,
                        int64_t f, int gated, int type, int format, Address stream);
void swiglu_fp8_backward(Address grad, Address x, Address row, Address flip, Address scale, Address amax,
                         int64_t rows, int64_t f, int gated, int type, int format, Address stream);
void cross_entropy_fp8(Address logits, Address labels, Address lse, Address grad, Address row, Address flip,
                       Address scale, Address amax, int64_t rows, int64_t columns, int64_t width, int type,
                       int format, Address stream);
