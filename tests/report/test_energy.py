"""Energy of a run: counters that the tests set in place of NVML's, and a clock of theirs."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import train
from nanomegatron.config.settings import Config, RunConfig
from nanomegatron.faults.exit import DONE
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.report import energy as energy_module
from nanomegatron.report import plots, steps
from nanomegatron.report.energy import ENERGY_KEYS, LEAST, Energy, Meter, open_meter
from nanomegatron.report.log import RunLog
from nanomegatron.report.writers import read_jsonl
from tests.report.test_metrics import record


class Gpus:
    """The GPUs of a machine and the time; it stands in the place of the package that reads NVML."""

    class NVMLError(Exception):
        """What the package raises."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.counters = [10**12 + i for i in range(8)]  # GPUs that have run for long
        self.present = 8
        self.unsupported = -1  # a GPU whose counter cannot be read
        self.readings = 0
        self.initialized = False

    def nvmlInit(self) -> None:
        self.initialized = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        assert self.initialized and uuid.startswith("GPU-")
        if int(uuid[4:]) >= self.present:
            raise self.NVMLError("not found")
        return int(uuid[4:])

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        self.readings += 1
        if gpu == self.unsupported:
            raise self.NVMLError("not supported")
        return self.counters[gpu]

    def energy(self, gpus: int = 1, ranks: int = 1) -> Energy:
        return Energy(open_meter([*map(str, range(gpus))]), ranks, lambda: self.seconds)

    def run(self, seconds: float, *watts: float) -> None:
        """Let time go by; watts: of each GPU."""
        self.seconds += seconds
        for i, w in enumerate(watts):
            self.counters[i] += round(1e3 * w * seconds)


@pytest.fixture
def gpus(monkeypatch) -> Gpus:
    found = Gpus()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def figures(joules_per_token: float, watts: float):
    return pytest.approx(dict(zip(ENERGY_KEYS, (joules_per_token, watts), strict=True)), rel=1e-6)


def test_a_figure_is_of_the_steps_since_the_last(gpus):
    energy = gpus.energy()
    gpus.run(60, 80)  # set-up and the first step
    assert energy.step(1000, log=True) == {}
    for i in range(2, 11):
        gpus.run(1, 700)
        found = energy.step(1000, log=i == 10)
        assert found == (figures(0.7, 700) if i == 10 else {})
    for i in range(11, 21):
        gpus.run(0.5, 400)
        found = energy.step(2000, log=i == 20)
    assert found == figures(0.1, 400)
    assert energy.summary() == f"{1e3 * (6300 + 2000) / 29000:.3g} mJ/token, 593 W a GPU over 19 steps"


def test_the_counters_are_read_only_for_a_figure(gpus):
    energy, before = gpus.energy(gpus=2, ranks=2), gpus.readings
    for i in range(1, 31):
        gpus.run(1, 700, 700)
        energy.step(1000, log=i % 10 == 0)
    assert gpus.readings == before + 2 * 4  # after the first step, and at each of three lines


def test_figures_of_too_short_a_time_stay_for_the_next(gpus):
    energy = gpus.energy()
    energy.step(1000, log=True)
    for _ in range(3):
        gpus.run(LEAST / 4 - 0.001, 500)
        assert energy.step(1000, log=True) == {} and energy.summary() == ""
    gpus.run(LEAST / 4 + 0.1, 500)
    assert energy.step(1000, log=True) == figures(500 * gpus.seconds / 4000, 500)


def test_what_is_between_steps_is_left_out(gpus):
    """An evaluation that takes more energy than the steps, and the step after it."""
    energy = gpus.energy()
    for _ in range(1, 6):
        gpus.run(1, 600)
        energy.step(1000, log=False)
    energy.pause()
    gpus.run(100, 300)
    energy.pause()  # two in a row, as at the end
    for i in range(6, 11):
        gpus.run(1, 600)
        found = energy.step(1000, log=i == 10)
    assert found == figures(0.6, 600) and energy.total["steps"] == 8


def test_all_gpus_of_the_run_count(gpus):
    """Those that are read stand for the others."""
    for ranks, note in (2, ""), (16, ", measured on 2 of 16 GPUs"):
        energy = gpus.energy(gpus=2, ranks=ranks)
        energy.step(1000, log=True)
        gpus.run(10, 300, 500)
        assert energy.step(1000 * ranks, log=True) == figures(4, 400)
        assert energy.summary() == f"4 J/token, 400 W a GPU over 1 steps{note}"


@pytest.mark.parametrize("fault", ["set back", "unreadable"])
def test_a_fault_drops_its_steps_only(gpus, fault):
    energy = gpus.energy(gpus=2, ranks=2)
    energy.step(1000, log=True)
    gpus.run(5, 300, 300)
    energy.step(1000, log=False)
    if fault == "set back":
        gpus.counters[1] = 7  # while that of GPU 0 has grown by more than this one had
        gpus.counters[0] += 10**13
    else:
        gpus.unsupported = 1
    assert energy.step(1000, log=True) == {} and energy.summary() == ""
    gpus.unsupported = -1
    gpus.run(5, 300, 300)
    energy.step(1000, log=True)
    gpus.run(5, 300, 300)
    assert energy.step(1000, log=True)[ENERGY_KEYS[1]] == pytest.approx(300)


def test_without_counters_there_are_no_figures(gpus, monkeypatch):
    assert open_meter([]) is None
    gpus.present = 1
    assert open_meter(["0", "1"]) is None
    with pytest.raises(gpus.NVMLError, match="not found"):
        Meter(["1"])
    gpus.unsupported = 0
    assert open_meter(["0"]) is None
    energy = gpus.energy()
    assert energy.step(1000, log=True) == {} and energy.pause() is None and energy.summary() == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_meter(["0"]) is None, "without the package"


def test_the_package_without_gpus(monkeypatch):
    """The names are there; without a driver it raises its own error, and there are no figures."""
    nvml = pytest.importorskip("pynvml")
    names = [name for name in vars(Gpus) if name.startswith("nvml")] + ["NVMLError"]
    assert all(map(nvml.__dict__.__contains__, names)) and len(names) == 4
    assert torch.cuda.is_available() or open_meter(["0"]) is None


def test_figures_in_the_files_of_a_run(gpus, tmp_path):
    """A line of metrics.jsonl in an interval has them, and Megatron's line; after a resume too."""
    settings = Config(run=RunConfig(log_interval=10, train_iters=40))
    for first in 0, 20:
        log, energy = RunLog(tmp_path, settings, stream=io.StringIO()), gpus.energy()
        log.begin(first, 40)
        for i in range(first + 1, first + 21):
            gpus.run(1, 500)
            log.step(record(i, step_time_ms=1000.0, **energy.step(100, i % 10 == 0)))
        log.close()
    with_figures = [r for r in read_jsonl(tmp_path / "metrics.jsonl") if ENERGY_KEYS[0] in r]
    assert [r["iteration"] for r in with_figures] == [10, 20, 30, 40]
    assert {r[ENERGY_KEYS[0]] for r in with_figures} == {5.0} and {
        r[ENERGY_KEYS[1]] for r in with_figures
    } == {500.0}
    lines = (tmp_path / "log.txt").read_text().splitlines()
    parts = "| energy per GPU (J/iter/GPU): 500.0 | power per GPU (W/GPU): 500.0 | learning rate:"
    assert sum(parts in line for line in lines) == 4 < len(lines)


def test_a_run_counts_its_steps_alone(gpus, tmp_path, monkeypatch):
    """One joule a step: without the first, without evaluations and the step after each."""
    read, evaluate = steps.StepReport.read, train.evaluate

    def read_once(step):
        gpus.counters[0] += 1000 * (not step.numbers)
        return read(step)

    def evaluate_hard(run, *which):
        evaluate(run, *which)
        gpus.counters[0] += 10**9

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", lambda *_: None)  # it would stay
    monkeypatch.setattr(plots, "plot_loss", lambda *_: None)
    monkeypatch.setattr(train, "evaluate", evaluate_hard)
    monkeypatch.setattr(steps.StepReport, "read", read_once)
    monkeypatch.setattr(steps, "machine_gpus", lambda mesh: ["0"])
    monkeypatch.setattr(energy_module, "LEAST", 0.0)
    flags = "--device cpu --seq-length 16 --micro-batch-size 1 --global-batch-size 2 --mock-data"
    more = "--train-iters 6 --eval-interval 3 --eval-iters 1 --log-interval 1 --no-save-optim"
    code = train.main([*flags.split(), *more.split(), "--vocab-size", "64", "--run-name", "test"])
    assert code == DONE
    found = {r["iteration"]: r.get(ENERGY_KEYS[0]) for r in read_jsonl(tmp_path / "runs/test/metrics.jsonl")}
    assert found == {1: None, 2: 1 / 32, 3: 1 / 32, 4: None, 5: 1 / 32, 6: 1 / 32}
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert re.search(r"^energy  31.2 mJ/token, \d+ W a GPU over 4 steps$", text, re.M), text


def test_gpus_are_those_of_this_machines_ranks(monkeypatch):
    """By UUID, since the indices of torch and NVML differ under CUDA_VISIBLE_DEVICES."""
    uuids = ["cafe", "beef", "f00d"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i]))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    device = torch.device("cuda", 0)
    world = {n: Axis("world", n, 0, tuple(range(n)), None) for n in (1, 2, 16)}
    assert steps.machine_gpus(Mesh(device=device)) == ["cafe"]
    assert steps.machine_gpus(Mesh(device=device, world=world[2])) == ["cafe", "beef"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # each rank sees fewer
    assert steps.machine_gpus(Mesh(device=device, world=world[16])) == uuids
    assert steps.machine_gpus(Mesh()) == []
