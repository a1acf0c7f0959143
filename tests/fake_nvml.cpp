// As much of NVML as nanomegatron/report/energy.py uses: GPUs GPU-0, GPU-1, ... with counters that a test sets.
#include <cstdlib>
#include <cstring>

extern "C" {
unsigned long long counters[8];
int present = 8;       // GPUs
int unsupported = -1;  // one of them, whose counter cannot be read
int initialized = 0;
int readings = 0;

int nvmlInit_v2() {
    initialized = 1;
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** gpu) {
    if (!initialized) return 1;                      // NVML_ERROR_UNINITIALIZED
    if (std::strncmp(uuid, "GPU-", 4) != 0) return 2;  // NVML_ERROR_INVALID_ARGUMENT
    int index = std::atoi(uuid + 4);
    if (index >= present) return 6;  // NVML_ERROR_NOT_FOUND
    *gpu = &counters[index];
    return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(void* gpu, unsigned long long* energy) {
    ++readings;
    auto counter = static_cast<unsigned long long*>(gpu);
    if (counter - counters == unsupported) return 3;  // NVML_ERROR_NOT_SUPPORTED
    *energy = *counter;
    return 0;
}
}
