// Functions of one number, and their derivatives, as an MLP has them between its matrices.
//
// GELU's tanh form is x s(z), as 1 + tanh(u) = 2 s(2 u): precise for negative x too, where 1 + tanh cancels.

#pragma once
#include "common.cuh"

namespace {

struct Sigmoid {
    float open, shut;  // s = 1 / (1 + exp(-z)), and 1 - s without cancellation

    __device__ __forceinline__ explicit Sigmoid(float z) {
        const float e = __expf(-z);
        open = __fdividef(1.0f, 1.0f + e);
        shut = e == INFINITY ? 1.0f : e * open;  // not infinity * 0
    }
};

struct GeluTanh {
    // z = 2 sqrt(2/pi) (x + c x^3)
    static constexpr float LINE = 1.5957691216057308f, CUBE = LINE * 0.044715f;

    __device__ __forceinline__ static Sigmoid gate(float x) { return Sigmoid(x * (LINE + CUBE * x * x)); }
    __device__ __forceinline__ static float value(float x) { return x * gate(x).open; }
    __device__ __forceinline__ static float slope(float x) {
        const Sigmoid s = gate(x);
        const float most = fminf(fabsf(x), 32.0f);  // there open * shut is 0
        return s.open + x * s.open * s.shut * (LINE + 3.0f * CUBE * most * most);
    }
    __device__ __forceinline__ static float grad(float dy, float x) { return dy * slope(x); }
};

struct GeluExact {
    __device__ __forceinline__ static float below(float x) {
        return 0.5f + 0.5f * erff(x * 0.7071067811865476f);
    }
    __device__ __forceinline__ static float value(float x) { return x * below(x); }
    __device__ __forceinline__ static float grad(float dy, float x) {
        return dy * (below(x) + x * 0.3989422804014327f * __expf(-0.5f * x * x));
    }
};

struct SquaredRelu {
    // NaN stays NaN
    __device__ __forceinline__ static float value(float x) { return x <= 0.0f ? 0.0f : x * x; }
    __device__ __forceinline__ static float grad(float dy, float x) {
        return x <= 0.0f ? 0.0f : dy * 2.0f * x;
    }
};

}  // namespace
