"""Whether a run fits: the table and the remedies by arithmetic, and the command `nanomegatron plan`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import preprocess
from nanomegatron.commands.plan import known_gpu, main
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import parse
from nanomegatron.config.rules import values_of
from nanomegatron.plan.layer import Machine, Sizes
from nanomegatron.plan.memory import memory_of_ranks
from nanomegatron.plan.room import CHANGES, Planned, check_room, left_out, memory_table, remedies
from nanomegatron.report.banner import memory_room

GIB = 2**30
LLAMA = "--config llama3-8b --global-batch-size 128"
PARAMETERS = 8030261248


def planned(flags: str, world: int = 1, gpu: bool = True) -> Planned:
    """The run of a command line."""
    parsed = parse(flags.split())
    assert [*parsed.errors, *validate(parsed.config, world, "cuda" if gpu else "cpu")] == []
    machine = Machine(gpu=gpu, kernels=gpu)
    shared = 1 if gpu else world
    return Planned(resolve(parsed.config, world), parsed.config.data.vocab_size, machine, world, shared)


def rows(run: Planned, room: float) -> dict[str, tuple[float, float]]:
    """GiB by itself and with those above, by the flags."""
    found = (re.match(r" +([\d.]+) +([\d.]+)   (--.*)", line) for line in remedies(run, room))
    return {match[3]: (float(match[1]), float(match[2])) for match in found if match}


def test_flags_are_the_changes_that_they_name():
    for flags, values in CHANGES.items():
        parsed = parse([*"--config gpt2-124m --no-bf16".split(), *flags.split()])
        assert parsed.errors == ()
        assert {name: values_of(parsed.config)[name] for name in values} == values, flags


def test_remedies_need_what_a_run_with_their_flags_needs():
    """The last makes room, and none before it; 12 bytes of a parameter are divided by 8."""
    run, room = planned(LLAMA, 8), 70 * GIB
    found = rows(run, room)
    names = [name.removesuffix(", fits") for name in found]
    assert names[0] == "--use-distributed-optimizer" and names[-1] == "--recompute-granularity full"
    assert [name.endswith(", fits") for name in found] == [False] * (len(found) - 1) + [True]
    saved = run.need / GIB - found["--use-distributed-optimizer"][0]
    assert saved == pytest.approx(12 * PARAMETERS * 7 / 8 / GIB, abs=0.01)
    for name, (alone, _) in zip(names, found.values(), strict=True):
        assert alone == pytest.approx(planned(f"{LLAMA} {name}", 8).need / GIB, abs=0.006)
    both = planned(f"{LLAMA} --use-distributed-optimizer --recompute-granularity full", 8).need / GIB
    together = [*found.values()][-1][1]
    assert together == pytest.approx(both, abs=0.006) and together <= 70


def test_more_gpus_are_named_where_a_remedy_takes_them():
    found = rows(planned(LLAMA), 40 * GIB)
    assert "--use-distributed-optimizer" not in found  # nothing to divide by
    assert "--tp 2 --sp on 2 GPUs" in found and "--tp 4 --sp on 4 GPUs, fits" in found
    huge = rows(planned("--config llama3-70b --global-batch-size 64", 8), 43 * GIB)
    assert {"--tp 8 --sp", "--pp 2 on 16 GPUs", "--pp 4 on 32 GPUs, fits"} <= huge.keys(), (
        "those above have tp 8"
    )
    assert found["--tp 2 --sp on 2 GPUs"][0] == pytest.approx(
        planned(f"{LLAMA} --tp 2 --sp", 2).need / GIB, abs=0.006
    )


def test_the_room_of_a_machine_is_that_of_its_container(monkeypatch):
    """For the ranks that are here: without a limit all of the memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for text, size in ("4096\n", 4096), ("max\n", pages), ("9" * 18, pages):
        monkeypatch.setattr(Path, "read_text", lambda path, text=text: text)
        assert memory_room(torch.device("cpu"), 8) == (size, 2)


def test_ranks_that_share_a_machine_are_counted_together():
    """On a CPU: nothing goes to the host's memory, in which all is, and there are no more processes."""
    run = planned("--config llama3-8b --no-bf16 --global-batch-size 8 --device cpu", 2, gpu=False)
    assert run.need == 2 * sum(memory_of_ranks(*run[:3])[0].values())
    found = rows(run, GIB)
    assert list(found)[:2] == ["--bf16", "--use-distributed-optimizer"]
    assert not any("offload" in name or "GPU" in name for name in found)
    assert list(remedies(run, GIB))[-1].startswith("  no change of settings makes room")


def test_a_note_or_a_refusal_shows_the_table():
    run = planned(LLAMA, 8)
    assert check_room(run, 1.001 * run.need) == ""
    note = check_room(run, 0.6 * run.need)
    assert "about 170.86 GiB are needed, and this machine has 102.51" in note
    with pytest.raises(ValueError) as refused:
        check_room(run, 0.49 * run.need)
    for text in note, str(refused.value):
        assert re.search(r"^  Adam moments +59.83$", text, re.MULTILINE)
        assert re.search(r"^  together +170.86$", text, re.MULTILINE)
        assert re.search(r" --use-distributed-optimizer", text)


def test_a_table_has_the_first_the_largest_and_the_last_of_many_ranks():
    ranks = [{"weights": GIB * (1 + (i == 5)), "messages": 2**20} for i in range(12)]
    lines = [line.split() for line in memory_table(ranks)]
    assert lines == [
        "GiB of a rank pp 0 pp 5 pp 11".split(),
        "weights 1.00 2.00 1.00".split(),
        "together 1.00 2.00 1.00".split(),
    ]
    assert "pp 7" in next(memory_table(ranks[:8])) and "pp" not in next(memory_table(ranks[:1]))


def test_the_table_says_what_it_leaves_out():
    """Mixtral, an expert a rank: 2 copies for each token of a rank, at most one for each token of all 8."""
    run = planned("--config mixtral-8x7b --vocab-size 32000 --ep 8 --moe-token-dispatcher-type alltoall", 8)
    dense, sparse = planned(LLAMA, 8), [*left_out(run)]
    assert [*left_out(dense)] == ["  left out: torch's own memory and CUDA's and NCCL's"]
    copy = 2 * (2 * 4096 + 3 * 14336)  # bytes of rows, outputs, gate and up, product
    sizes = Sizes(run.config, run.machine), Sizes(run.busiest.config, run.machine)
    assert [x.copies for x in sizes] == [2, 8]
    more = run.busiest.need - run.need
    in_backward = 2 * 2 * 14336  # of the layer whose gradients are in flight, less what it frees
    assert more == 6 * 4096 * (32 * copy + in_backward)
    assert f"{more / GIB:.2f} GiB more" in sparse[1] and len(sparse) == 2
    capacity = "--moe-expert-capacity-factor 1.25"
    dropping = planned(f"--config mixtral-8x7b --vocab-size 32000 --ep 8 {capacity}", 8)
    assert Sizes(dropping.busiest.config, run.machine).copies == 2 * 1.25


# The command.


def test_a_run_that_fits_and_one_that_does_not(capsys):
    """The largest rank counts; a tenth of the memory is left to CUDA."""
    flags = "--config llama3-8b --vocab-size 128256 --pp 4 --gpus 4 --global-batch-size 32".split()
    need = planned(" ".join(flags).replace("--gpus 4", ""), 4).need / GIB
    assert main([*flags, "--gpu-memory", f"{need / 0.9 + 0.1}"]) == 0
    fits = capsys.readouterr().out
    assert "fits    90% of" in fits and "needed" not in fits.split("together")[1]
    assert "8.03 B params" in fits and "tp1 pp4 dp1 cp1 ep1" in fits
    bubble = 3 / 32  # of 1f1b: (stages - 1) / microbatches
    assert f"bubble {bubble:.1%}" in fits
    assert main([*flags, "--gpu-memory", f"{need / 0.9 - 0.1}"]) == 1
    assert re.search(
        r"no fit .*\n.*\n +[\d.]+ +[\d.]+   --recompute-granularity selective", capsys.readouterr().out
    )


def test_gpus_are_known_by_name(capsys):
    for name, size in ("h100", 80), ("NVIDIA A100-SXM4-40GB", 40), ("GB200", 186), ("rtx 4090", 24):
        assert known_gpu(name) == (name, size)
    assert main(["--gpu", "foo"]) == 2
    assert "--gpu foo: none of GB200, B200, " in capsys.readouterr().err


def test_the_gpu_of_this_machine_is_asked(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "NVIDIA H200, 143771"\necho "NVIDIA H200, 143771"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert known_gpu(None) == ("NVIDIA H200", 143771 / 1024)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert known_gpu(None)[1] is None
    assert main(["--config", "llama-80gb"]) == 0
    assert "fits    GPUs of 80 GB or more" in capsys.readouterr().out


def test_errors_are_those_of_train_all_at_once(capsys):
    assert main("--config llama3-8b --tp 3 --lrr 1 --gpus 6".split()) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "nanomegatron plan:" and len(errors) >= 3
    assert "--lrr: unknown flag" in errors[1] and "--tensor-model-parallel-size 3" in errors[2]
    assert main(["--gpus", "0"]) == 2 and main(["--gpu-memory", "-1"]) == 2


def test_the_vocabulary_is_that_of_the_data(tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n')
    flags = f"--input {tmp_path}/text.jsonl --output-prefix {tmp_path}/text --tokenizer-type ByteTokenizer"
    assert preprocess.main(flags.split()) == 0
    assert main(["--config", "tiny-cpu", "--data-path", f"{tmp_path}/text_text_document"]) == 0
    assert "vocab 257," in capsys.readouterr().out
    assert main(["--config", "tiny-cpu"]) == 0
    out = capsys.readouterr().out
    assert "vocab 4096," in out and "embedded text" in out


def test_no_torch_is_needed():
    code = (
        "import sys; from nanomegatron.commands.plan import main; main([]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
