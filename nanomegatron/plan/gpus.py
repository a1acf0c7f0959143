"""The dense peak FLOP/s of GPUs' tensor cores, and their memory.

Data sheets mostly quote twice as much, "with sparsity".
"""

import re

# Pattern of the device's name, TFLOP/s in bf16 or fp16, and in tf32, GB of memory where the name has none.
# The first pattern that matches counts.
PEAKS = (
    ("GB200", 2500.0, 1250.0, 186),  # NVIDIA GB200 NVL72 data sheet, per GPU: 5 and 2.5 PFLOP/s sparse
    ("B200", 2250.0, 1125.0, 180),  # NVIDIA HGX B200 data sheet, per GPU: 4.5 and 2.25 PFLOP/s sparse
    ("GH200", 989.5, 494.5, 96),  # NVIDIA GH200 data sheet: 1979 and 989 sparse
    ("H200 NVL", 835.5, 417.5, 141),  # NVIDIA H200 data sheet: 1671 and 835 sparse
    ("H200", 989.5, 494.5, 141),  # the same, SXM: 1979 and 989 sparse
    ("H100 NVL", 835.5, 417.5, 94),  # NVIDIA H100 data sheet: 1671 and 835 sparse
    ("H100 PCIe", 756.5, 378.0, 80),  # NVIDIA H100 PCIe product brief: 1513 and 756 sparse
    ("H100", 989.5, 494.5, 80),  # NVIDIA H100 data sheet, SXM5: 1979 and 989 sparse
    ("A100", 312.0, 156.0, 80),  # NVIDIA A100 data sheet, SXM and PCIe
    ("L40S", 362.05, 183.0, 48),  # NVIDIA L40S data sheet
    ("RTX 4090$", 165.2, 82.6, 24),  # NVIDIA Ada whitepaper, appendix A; not the D or the laptop
)


def device_peak(device_name: str, dtype_name: str) -> float | None:
    """Dense peak FLOP/s of one device for matmuls in `dtype_name` (torch's spelling; float32 means TF32).

    device_name: from torch.cuda.get_device_name(). None if no figure is known: CPUs, slices of a
    GPU (MIG), other GPUs and types.
    """
    column = {"bfloat16": 0, "float16": 0, "float32": 1}.get(dtype_name)
    if column is None or "MIG" in device_name:
        return None
    return next((row[column] * 1e12 for name, *row in PEAKS if re.search(name, device_name)), None)
