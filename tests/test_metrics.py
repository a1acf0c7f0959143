"""FLOP conventions against published totals; the files and lines of a run, read back."""

import io
import json
import math
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from nanomegatron import metrics
from nanomegatron.config import Config, DataConfig, RunConfig, TransformerConfig
from nanomegatron.metrics import CONVENTIONS, bits_per_byte, device_peak, flops_per_iteration, parameter_count
from nanomegatron.metrics_log import KEYS, RunLog
from nanomegatron.metrics_plot import plot_loss, smoothed
from nanomegatron.metrics_writers import missing_extras, read_jsonl

LLAMA = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
GPT2_SMALL = TransformerConfig(12, 768, 12, max_position_embeddings=1024)
LLAMA2_7B = TransformerConfig(32, 4096, 32, 11008, **LLAMA)
LLAMA3_8B = TransformerConfig(32, 4096, 32, 14336, num_query_groups=8, **LLAMA)
LLAMA3_70B = TransformerConfig(80, 8192, 64, 28672, num_query_groups=8, **LLAMA)
MISTRAL_7B = LLAMA3_8B
QWEN3_8B = TransformerConfig(36, 4096, 32, 12288, 128, 8, qk_layernorm=True, **LLAMA)
QWEN25_05B = TransformerConfig(
    24,
    896,
    14,
    4864,
    num_query_groups=2,
    add_qkv_bias=True,
    **LLAMA | {"untie_embeddings_and_output_weights": False},
)


# The work of a step


def test_flops_are_megatrons_to_the_last_one():
    assert flops_per_iteration(GPT2_SMALL, 50304, 1024, 1) == 817184636928
    assert flops_per_iteration(LLAMA3_8B, 128256, 8192, 1) == 421645529382912
    assert flops_per_iteration(LLAMA3_8B, 128256, 8192, 24) == 24 * 421645529382912


def test_keys_outside_the_window_are_no_work():
    """One layer in three sees all: counted key by key, all squares as by definition half a key short."""
    s, window = 64, 9
    model = TransformerConfig(3, 48, 4, window_size=(window, 0), window_attn_skip_freq="3")
    plain = TransformerConfig(3, 48, 4)
    outside = sum(1 for query in range(s) for key in range(query + 1) if query - key > window)
    half_a_key = (s - (window + 1)) / 2  # the usual count has s * s / 2 keys, not s * (s + 1) / 2
    saved = flops_per_iteration(plain, 128, s, 1) - flops_per_iteration(model, 128, s, 1)
    assert saved == 2 * 12 * 48 * (outside - half_a_key)
    square = [flops_per_iteration(m, 128, s, 1, "full-attention") for m in (plain, model)]
    assert square[0] == square[1]


@pytest.mark.parametrize(
    "convention, at_4096, at_8192",
    [
        ("megatron", 48.25, 51.47),
        ("full-attention", 51.47, 57.91),
        ("6n-causal", 51.40, 54.62),
        ("6n", 54.62, 61.07),
    ],
)
def test_conventions_at_llama3_8b(convention, at_4096, at_8192):
    per_token = [flops_per_iteration(LLAMA3_8B, 128256, s, 1, convention) / s / 1e9 for s in (4096, 8192)]
    assert per_token == pytest.approx([at_4096, at_8192], abs=0.005)
    assert convention in CONVENTIONS


def test_unknown_convention_names_the_known_ones():
    with pytest.raises(ValueError, match="'mfu' is unknown.*megatron, full-attention"):
        flops_per_iteration(LLAMA3_8B, 128256, 8192, 1, "mfu")


@pytest.mark.parametrize(
    "model, vocab, count",
    [
        (GPT2_SMALL, 50257, 124439808),
        (LLAMA2_7B, 32000, 6738415616),
        (LLAMA3_8B, 128256, 8030261248),
        (LLAMA3_70B, 128256, 70553706496),
        (MISTRAL_7B, 32000, 7241732096),
        (QWEN3_8B, 151936, 8190735360),
        (QWEN25_05B, 151936, 494032768),
    ],
)
def test_parameter_counts_are_the_published_ones(model, vocab, count):
    assert parameter_count(model, vocab) == count


def test_peaks_and_mfu():
    assert (
        device_peak("NVIDIA H200", "bfloat16") == device_peak("NVIDIA H100 80GB HBM3", "float16") == 989.5e12
    )
    assert device_peak("NVIDIA H100 PCIe", "bfloat16") == 756.5e12
    assert device_peak("NVIDIA A100-SXM4-80GB", "float32") == 156e12
    for unknown in ("cpu", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H20"):
        assert device_peak(unknown, "bfloat16") is None
    # Megatron-Bridge's Llama-3-8B row: 14,451 tokens/s on each of 8 GPUs is published as 744 TFLOP/s, 75.2 %.
    seconds = 128 * 8192 / (8 * 14451)
    assert metrics.mfu(
        flops_per_iteration(LLAMA3_8B, 128256, 8192, 128), seconds, 8, 989.5e12
    ) == pytest.approx(0.752, abs=5e-4)
    assert metrics.mfu(1e12, 1.0, 1, None) is None


def test_bits_per_byte():
    assert bits_per_byte(math.log(256), tokens=1000, num_bytes=1000) == pytest.approx(8)  # uniform bytes
    assert bits_per_byte(math.log(4096), tokens=100, num_bytes=400) == pytest.approx(3)


def test_no_torch_is_needed_to_count():
    code = "import sys, nanomegatron.metrics, nanomegatron.metrics_log; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


# The records of a run


def config(**run) -> Config:
    run = {"log_interval": 10, "train_iters": 100} | run
    return Config(data=DataConfig(global_batch_size=8, seq_length=32), run=RunConfig(**run))


def record(iteration: int, **changes) -> dict:
    values = (iteration, 8 * iteration, 8, 5.0 - iteration / 50, 1.5, 3e-4, 20.0, 12800.0, 0.25, None)
    return dict(zip(KEYS, values, strict=True)) | changes


def started(folder, iteration: int = 0, **run) -> RunLog:
    log = RunLog(folder, config(**run), stream=io.StringIO())
    log.begin(iteration, 100)
    return log


def test_console_has_fixed_columns(tmp_path):
    log = started(tmp_path)
    log.line("a banner")
    for i in range(1, 21):
        log.step(record(i, peak_mem_gib=1.25, mfu=0.4 if i <= 10 else 0.6))
    lines = log.stream.getvalue().splitlines()
    assert lines[0] == "a banner"
    assert lines[1].split() == "step loss lr grad_norm tok/s TF/s MFU mem GiB eta".split()
    assert [line.split()[0] for line in lines[2:]] == ["1", "10", "20"]
    mean = sum(5.0 - i / 50 for i in range(11, 21)) / 10
    assert lines[4].split() == [
        "20",
        f"{mean:.4f}",
        "3.00e-04",
        "1.500",
        "12.8k",
        "0.25",
        "60.0%",
        "1.25",
        "0:02",
    ]
    assert len({len(line) for line in lines[1:]}) == 1 and len(lines[1]) <= 120
    assert "\r" not in log.stream.getvalue() and "\x1b" not in log.stream.getvalue()


def test_log_has_megatrons_lines(tmp_path):
    log = started(tmp_path, log_throughput=True)
    log.step(record(1, lm_loss=float("nan"), skipped=1, loss_scale=1024.0))
    for i in range(2, 11):
        log.step(record(i, lm_loss=2.0, mfu=0.5, tflops_per_gpu_6n=0.5))
    log.evaluation(10, "validation", 2.0, 1.5)
    first, second, rule, box, rule2 = (tmp_path / "log.txt").read_text().splitlines()
    assert re.fullmatch(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration        1/     100 \| .*\|", first
    )
    assert "| consumed samples:            8 | elapsed time per iteration (ms): 20.0 |" in first
    assert "| lm loss: NAN | loss scale: 1024.0 |" in first
    assert first.endswith("| number of skipped iterations:   1 | number of nan iterations:   1 |")
    assert "MFU" not in first
    assert (
        "| throughput per GPU (TFLOP/s/GPU): 0.2 | by 6n: 0.5 | MFU: 50.0% | learning rate: 3.000000E-04"
        in second
    )
    assert (
        "| global batch size:     8 | lm loss: 2.000000E+00 | loss scale: 1.0 | grad norm: 1.500 |" in second
    )
    assert rule == rule2 == "-" * len(box)
    assert box.startswith(
        " validation loss at iteration 10 on validation set | lm loss value: 2.000000E+00 | lm"
    )
    assert "lm loss PPL: 7.389056E+00 | " in box
    assert log.stream.getvalue().splitlines()[-1] == (
        "validation at step 10: loss 2.0000, perplexity 7.389, 1.500 bits per byte"
    )


def test_series_is_one_json_object_a_step(tmp_path):
    log = started(tmp_path / "run", metrics_jsonl=str(tmp_path / "deep" / "extra.jsonl"))
    log.step(record(1, lm_loss=0.1 + 0.2, grad_norm=float("inf")))
    log.step(record(2, skipped=1))
    text = (tmp_path / "run" / "metrics.jsonl").read_text()  # complete without close()
    assert text == (tmp_path / "deep" / "extra.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert list(lines[0]) == list(KEYS) and list(lines[1]) == [*KEYS, "skipped"]
    assert lines[0]["lm_loss"] == 0.1 + 0.2 and lines[0]["mfu"] is None
    assert float(lines[0]["grad_norm"]) == math.inf
    with pytest.raises(KeyError, match="grad_norm"):
        log.step({key: value for key, value in record(3).items() if key != "grad_norm"})


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    log = started(tmp_path)
    for i in range(1, 8):
        log.step(record(i))
        log.evaluation(i, "validation", 3.0)
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 8, "lm_l')  # killed while writing
    log = started(tmp_path, iteration=5)
    log.step(record(6, lm_loss=1.0))
    log.evaluation(5, "validation", 3.0)
    assert [(r["iteration"], r["lm_loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [
        *((i, record(i)["lm_loss"]) for i in range(1, 6)),
        (6, 1.0),
    ]
    assert [r["iteration"] for r in read_jsonl(tmp_path / "evals.jsonl")] == [1, 2, 3, 4, 5]
    started(tmp_path, iteration=0)
    assert read_jsonl(tmp_path / "metrics.jsonl") == read_jsonl(tmp_path / "evals.jsonl") == []


def test_other_ranks_warn_and_keep_their_own_log(tmp_path):
    main = started(tmp_path)
    other = RunLog(tmp_path, config(), 3, "rank 3 tp1 dp0", io.StringIO())
    other.begin(0, 100)
    other.step(record(1))
    other.evaluation(1, "validation", 1.0)
    assert not (tmp_path / "log.3.txt").exists() and read_jsonl(tmp_path / "metrics.jsonl") == []
    other.line("only in the file")
    other.warn("disk is full")
    main.warn("slow")
    assert other.stream.getvalue() == "! [rank 3 tp1 dp0] disk is full\n"
    assert (tmp_path / "log.3.txt").read_text() == "only in the file\n! [rank 3 tp1 dp0] disk is full\n"
    assert main.stream.getvalue() == (tmp_path / "log.txt").read_text() == "! slow\n"


def test_status_keeps_facts_and_the_first_failure(tmp_path):
    def status() -> dict:
        return json.loads((tmp_path / "status.json").read_text())

    main = started(tmp_path)
    other = RunLog(tmp_path, config(), 1, "rank 1 tp1", io.StringIO())
    assert status()["state"] == "running" and status()["exit_code"] is None
    main.status("running", iteration=40, checkpoint=tmp_path / "ckpt")
    other.status("done", exit_code=0)  # not its business
    assert status()["state"] == "running"
    other.status("failed", exit_code=1, message="out of memory")
    main.status("failed", exit_code=1, message="lost a peer")
    told = status()
    assert (told["state"], told["exit_code"], told["message"]) == ("failed", 1, "out of memory")
    assert (told["iteration"], told["checkpoint"], told["rank"]) == (40, str(tmp_path / "ckpt"), "rank 1 tp1")
    again = started(tmp_path)
    assert status()["state"] == "running" and status()["message"] == ""
    again.status("preempted", exit_code=75)
    assert status()["exit_code"] == 75
    with pytest.raises(ValueError, match="'over' is not one of running, done, preempted, failed"):
        again.status("over")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]  # no temporary left


def test_bar_on_a_terminal_only(tmp_path):
    pytest.importorskip("tqdm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log = RunLog(tmp_path, config(), stream=Terminal())
    log.begin(40, 100)
    log.step(record(50))
    log.close()
    text = log.stream.getvalue()
    assert "40/100" in text and "\r" in text
    assert any(line.split()[:1] == ["50"] for line in text.splitlines())


def test_tensorboard_has_megatrons_tags(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = started(tmp_path, tensorboard_dir=str(tmp_path / "tb"))
    log.step(record(1, loss_scale=2.0))
    log.step(record(2))
    log.evaluation(2, "validation", 3.0, 1.5)
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {
        *(
            "lm loss",
            "learning-rate",
            "grad-norm",
            "throughput",
            "batch-size",
            "iteration-time",
            "loss-scale",
        ),
        *("lm loss vs samples", "lm loss validation", "lm loss validation ppl"),
    } <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("batch-size")] == [(1, 8.0), (2, 8.0)]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [8, 16]
    assert [e.value for e in events.Scalars("iteration-time")] == pytest.approx([0.02, 0.02])


def test_wandb_gets_the_same_scalars(tmp_path, monkeypatch):
    class Wandb:
        calls: list = []

        def init(self, **kwargs):
            self.calls.append(kwargs)
            return types.SimpleNamespace(
                log=lambda s, step: self.calls.append((step, s)), finish=lambda: None
            )

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    log = started(tmp_path / "name", wandb_project="project")
    log.step(record(1))
    log.close()
    init, (step, scalars) = Wandb.calls
    assert (init["project"], init["name"], init["config"]["data"]["seq_length"]) == ("project", "name", 32)
    assert step == 1 and scalars["lm loss"] == 4.98 and scalars["batch-size"] == 8


def test_a_missing_extra_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = config(wandb_project="p", tensorboard_dir="tb")
    assert len(missing_extras(asked)) == 2 and missing_extras(config()) == []
    with pytest.raises(ValueError, match=r'--wandb-project p needs .* wandb: pip install -e "\.\[log\]"'):
        RunLog(tmp_path / "run", asked)
    assert not (tmp_path / "run").exists()


# The loss curve


def write_series(folder, losses) -> None:
    log = started(folder)
    for i, loss in enumerate(losses, 1):
        log.step(record(i, lm_loss=loss))
    log.evaluation(len(losses), "validation", 2.5)
    log.close()


def test_plot_is_a_picture_that_fits_a_page(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    write_series(tmp_path, [5.5, float("nan"), 4.0, 3.0])
    assert plot_loss(tmp_path) == tmp_path / "loss.png"
    pixels = imread(tmp_path / "loss.png")
    assert pixels.shape[1] == 800 and pixels[..., :3].std() > 0.01


def test_plot_says_what_it_lacks(tmp_path, monkeypatch):
    said: list[str] = []
    write_series(tmp_path, [float("nan")])
    assert plot_loss(tmp_path, said.append) is None and "no finite loss" in said[0]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_loss(tmp_path, said.append) is None
    assert said[1] == 'loss.png needs matplotlib: pip install -e ".[viz]"'


def test_smoothing_is_a_centred_mean_of_what_is_finite():
    line = np.arange(400.0)
    assert smoothed(line) == pytest.approx(line)  # a straight line stays one, up to its ends
    noise = np.random.default_rng(0).normal(size=4000)
    assert smoothed(noise)[100:-100].std() < 0.15
    noise[7] = np.nan
    assert np.isfinite(smoothed(noise)).all()
