"""The benchmark of saves, tiny: every way measures what it names."""

import json

import pytest

from benchmarks import save_stall


def test_stall_is_what_a_save_adds():
    found = save_stall.stall([0.9, 1.0, 1.3], 0.25, [1.5, 1.1, 0.8])
    assert found["stall_s"] == pytest.approx(0.85) and found["excess_s"] == pytest.approx(0.65)
    assert found["step_s"] == 1.0 and found["steps_s"] == [0.9, 1.0, 1.3, 1.75, 1.1, 0.8]


def test_waits_are_found_in_a_trace():
    def event(name: str, cat: str, begin: float, ms: float, stream: int = 7) -> dict:
        times = {"ts": begin * 1e3, "dur": ms * 1e3}
        return {"ph": "X", "name": name, "cat": cat, "tid": 1, "args": {"stream": stream}, **times}

    events = [event("save", "user_annotation", 100, 30), event("old", "kernel", 90, 1)]
    events += [event("mm", "kernel", 101, 4), event("add", "kernel", 125, 1), event("mul", "kernel", 127, 1)]
    events += [event("Memcpy DtoH", "gpu_memcpy", x, 9, 13) for x in (104, 113)]
    events += [
        event("cudaMemcpyAsync", "cuda_runtime", 102, 22),
        event("cudaLaunchKernel", "cuda_runtime", 124, 1),
    ]
    found = save_stall.waits_in(events)
    assert found["device"] == [[5, 20, "mm", "add"]] and found["copies"] == [4, 22]
    assert found["host"] == [[0, 30, "save", 1], [2, 22, "cudaMemcpyAsync", 1]]


@pytest.mark.full
def test_all_ways(tmp_path, capsys):
    out = tmp_path / "stall.json"
    argv = ["--small", "--size", "300000", "--folder", str(tmp_path / "saves"), "--out", str(out)]
    assert save_stall.main([*argv, "--ways", "plain,async"]) == 0
    assert save_stall.main([*argv, "--ways", "sync,dcp"]) == 0
    result = json.loads(out.read_text())
    assert set(save_stall.WAYS) < result.keys() and not (tmp_path / "saves").exists()
    assert result["sync"]["bytes"] == pytest.approx(result["async"]["bytes"], abs=500)
    assert result["plain"]["bytes"] == 300000
    assert min(result[way]["write_gb_s"] for way in save_stall.WAYS) > 0
    assert result["sync"]["load_gb_s"] > 0 and result["plain"]["read_gb_s"] > 0
