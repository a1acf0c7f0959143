"""What a step's time on the GPU goes into: kernels of a made-up profile, by class, and what is hidden."""

import json

import pytest

from tools import kernel_times


def event(name: str, start: float, duration: float, stream: int = 7) -> dict:
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_kernels_are_sorted_and_hidden_communication_is_not_exposed(tmp_path):
    """Two steps of 1000 us; the second has 100 us of a gather under a matmul, and 200 us of 300 exposed."""
    step = [
        event("nvjet_hsh_128x256", 0, 400),
        event("ncclDevKernel_AllGather", 100, 100, 20),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 400, 100),
        event("ncclDevKernel_ReduceScatter", 450, 150, 20),
        event("Memcpy DtoD (Device -> Device)", 600, 100, 21),
        event("Memcpy DtoD (Device -> Device)", 700, 50),
        event("triton_poi_fused_add_adam_like_gemm", 750, 50),
        event("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 900, 100),
    ]
    later = [{**e, "ts": e["ts"] + 1000} for e in step]
    trace, host = tmp_path / "trace.json", {**event("nvjet", 0, 5000), "cat": "cpu_op"}
    assert kernel_times.table(trace, 2) is None
    trace.write_text(json.dumps({"traceEvents": [host]}))
    assert kernel_times.table(trace, 2) is None
    trace.write_text(json.dumps({"traceEvents": [host, *step, *later]}))
    found = kernel_times.table(trace, 2)["ms"]
    expected = {
        "period": 1.0,
        "gemm": 0.4,
        "attention": 0.1,
        "communication": 0.35,
        "other": 0.1,
        "optimizer": 0.1,
        "communication busy": 0.35,
        "communication exposed": 0.2,
        "idle": 0.1,
    }
    assert found == pytest.approx(expected)


def test_overlapping_stretches_count_once():
    assert kernel_times.union([(5, 9), (0, 3), (2, 4), (4, 5)]) == [(0, 9)]
    assert kernel_times.length(kernel_times.union([(0, 3), (1, 2), (10, 11)])) == 4
