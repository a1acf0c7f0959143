// FP8 scales from maxima of |x|, on the device: of this tensor (current scaling) or of a history (delayed
// scaling).
//
//     scale = limit / amax, limit = largest value of the format / 2^margin        inverse = 1 / scale
//     within 2^-126 ... 2^126, both normal numbers; rounded down to a power of two on request
//     amax zero, infinite or NaN: scale 1 (current), the scale stays (delayed)
//
// Delayed, n tensors in one launch: history [length, n], row 0 is the step that ends, row j was j steps
// before it.
// The naive loop:  for i:  amax = most_recent ? history[0][i] : max over j of history[j][i]
//                          scale[i] = limits[i] / amax;  history[j][i] = history[j - 1][i], history[0][i] = 0
// An entry that is not finite keeps the scale in its own step and is shifted as zero, so that it does not
// keep the scale for the length of the history. 8 bytes per entry; some microseconds of latency.

#include "fp8.cuh"

namespace {

__global__ void fp8_scale_kernel(float* scale, float* inverse, const float* amax, int64_t n, float limit,
                                 bool power_of_two) {
    wait_for_previous_kernel();
    const int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
    if (i >= n) return;
    scale[i] = scale_for(amax[i], limit, power_of_two, 1.0f);
    inverse[i] = 1.0f / scale[i];
}

// 32 tensors x 32 rows a block, down the history: the next 32 rows are read before these are written one
// lower.
__global__ void fp8_update_kernel(float* scale, float* inverse, float* history, const float* limits,
                                  int64_t n, int64_t length, bool most_recent) {
    wait_for_previous_kernel();
    __shared__ float largest_of[32][33];
    const int64_t i = blockIdx.x * 32ll + threadIdx.x;
    const int down = threadIdx.y;
    const bool here = i < n;
    float largest = 0.0f, newest = 0.0f;
    float now = here && down < length ? history[down * n + i] : 0.0f;
    for (int64_t base = 0; base < length; base += 32) {
        const int64_t at = base + down;
        const float next = here && at + 32 < length ? history[(at + 32) * n + i] : 0.0f;
        if (at == 0) newest = now;
        if (!(now < INFINITY)) now = 0.0f;  // NaN too
        largest = fmaxf(largest, now);
        __syncthreads();
        if (here && at + 1 < length) history[(at + 1) * n + i] = now;
        now = next;
    }
    largest_of[down][threadIdx.x] = largest;
    __syncthreads();
    if (!here || down != 0) return;
    for (int j = 1; j < 32; ++j) largest = fmaxf(largest, largest_of[j][threadIdx.x]);
    history[i] = 0.0f;
    const float amax = most_recent || !(newest < INFINITY) ? newest : largest;
    scale[i] = scale_for(amax, limits[i], false, scale[i]);
    inverse[i] = 1.0f / scale[i];
}

}  // namespace

void fp8_scale(Address amax, Address scale, Address inverse, int64_t n, float limit, int power_of_two,
               Address stream) {
    if (n == 0) return;
    const unsigned blocks = static_cast<unsigned>((n + THREADS - 1) / THREADS);
    launch(fp8_scale_kernel, blocks, THREADS, 0, stream, scale, inverse, amax, n, limit, power_of_two != 0);
    check_launch("fp8_scale");
}

void fp8_update(Address history, Address scale, Address inverse, Address limits, int64_t n, int64_t length,
                int most_recent, Address stream) {
    if (n * length == 0) return;
    const unsigned blocks = static_cast<unsigned>((n + 31) / 32);
    launch(fp8_update_kernel, blocks, dim3(32, 32), 0, stream, scale, inverse, history, limits, n, length,
           most_recent != 0);
    check_launch("fp8_update");
}
