// Functions of one number, and their derivatives, as an MLP has them between its matrices.
//
// GELU's tanh form is x s(z), as 1 + tanh(u) = 2 s(2 u): precise for negative x too, where 1 + tanh cancels.
// The exact form needs exp(-x^2 / 2) for its derivative; with that erfc is a polynomial.

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
    struct Normal {  // Phi(x), and exp(-x^2 / 2)
        float below, bell;

        // erfc(z) = p(t) exp(-z^2), t = 1 / (1 + 0.3275911 z), z >= 0, to 1.5e-7: Abramowitz, Stegun 7.1.26.
        __device__ __forceinline__ explicit Normal(float x) {
            const float t = __fdividef(1.0f, 1.0f + 0.23164189f * fabsf(x));  // z = |x| / sqrt(2)
            bell = __expf(-0.5f * x * x);
            float p = 1.061405429f * t - 1.453152027f;
            p = (((p * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
            const float half = 0.5f * p * bell;
            below = x < 0.0f ? half : 1.0f - half;
        }
    };

    __device__ __forceinline__ static float value(float x) { return x * Normal(x).below; }
    __device__ __forceinline__ static float grad(float dy, float x) {
        const Normal normal(x);
        return dy * (normal.below + x * 0.3989422804014327f * normal.bell);
    }
};

struct SquaredRelu {
    // NaN stays NaN
    __device__ __forceinline__ static float value(float x) { return x <= 0.0f ? 0.0f : x * x; }
    __device__ __forceinline__ static float grad(float dy, float x) {
        return x <= 0.0f ? 0.0f : dy * 2.0f * x;
    }
};

// Runs body(Act{}) for the number that ops/gelu.py has for it.
template <typename Body>
void with_act(int act, Body body) {
    switch (act) {
        case 0: return body(GeluTanh{});
        case 1: return body(GeluExact{});
        default: return body(SquaredRelu{});
    }
}

}  // namespace
