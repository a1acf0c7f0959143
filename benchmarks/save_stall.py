"""How long a save holds up a step, and how fast checkpoints are written and read; one GPU.

    python -m benchmarks.save_stall --folder /tmp/saves --out FILE.json     8 layers of llama3-8b, 6 minutes
    python -m benchmarks.save_stall --ways async,plain --out FILE.json      these; the others stay in the file
    python -m benchmarks.save_stall --small --out FILE.json                 a tiny model on a CPU, to test it
    python -m benchmarks.save_stall --way verify --size 1073741824          only the checks, of cached files
    python -m benchmarks.save_stall --way trace --folder /tmp/saves         what waits for what in a save

    plain   a file of --size bytes: written in blocks by four threads and synced; read, not from the cache
    async   steps | save | steps until it is published     --async-save; then all files are checked
    sync    the save by itself; then loads, from the disk and from the page cache
    dcp     steps | torch.distributed.checkpoint.async_save | steps until it is done

Each is a process of its own, and its files are removed before the next: the disk holds one checkpoint. Times
of steps are those of the host between the reports of two steps, saves included. `stall_s` is what the step of
the save and the next one take longer than the median of the steps before, `excess_s` the same of all steps
until the save is published. Rates are in GB/s of all bytes of a checkpoint.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import train
from nanomegatron.checkpoint.blocks import verify_files, write_blocks
from nanomegatron.checkpoint.checkpoint import load
from nanomegatron.checkpoint.folder import read_manifest
from nanomegatron.checkpoint.manifest import SavedFile, rank_file
from nanomegatron.checkpoint.resume import Checkpoints
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.report.log import RunLog
from nanomegatron.report.steps import Reporter
from nanomegatron.report.traffic import Traffic
from nanomegatron.step import Training
from tools.gpu_gate import commit_of

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("async", "sync", "dcp", "plain")
FLAGS = (
    "--config llama3-8b --num-layers 8 --bf16 --mock-data --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 1000 --eval-iters 0 --save-interval 1000 --run-name stall"
)
SMALL = (
    "--device cpu --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--seq-length 16 --mock-data --vocab-size 96 --micro-batch-size 1 --train-iters 1000 --eval-iters 0 "
    "--save-interval 1000 --run-name stall"
)
WARM, BEFORE, LEAST, MOST = 4, 8, 3, 60  # steps: not timed; timed before a save, after it
BLOCK, THREADS = 16 * 2**20, 4


def start(flags: str) -> Training:
    """A run at its first step."""
    world = World.from_environment()
    parsed, config = train.settings(flags.split(), world)
    device = pick_device(config.run.device, world)
    mesh = Mesh.build(config.parallel, world, device, observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(config.run.folder, config))
    run.optimizer.cast_weights()
    return run


def step(run: Training) -> None:
    """One step, launched before the one before it is reported, as in train.py."""
    reporter = run.observer(Reporter)
    report = train.launch_step(run, reporter)
    run.progress.iteration += 1
    reporter.report_previous(report)


def timed_steps(run: Training, count: int, done: Callable[[], bool] = lambda: False) -> list[float]:
    """Seconds of each step, at least LEAST, until `done`."""
    times: list[float] = []
    while len(times) < LEAST or (len(times) < count and not done()):
        begin = time.perf_counter()
        step(run)
        times.append(time.perf_counter() - begin)
    return times


def seconds(work: Callable[[], Any]) -> float:
    """The time of a call; the device is idle before and after it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def stall(before: list[float], begun: float, after: list[float]) -> dict[str, Any]:
    """What a save that took `begun` seconds to begin adds to the steps around it."""
    median, after = statistics.median(before), [begun + after[0], *after[1:]]
    excess = [t - median for t in after]
    return {
        "step_s": median,
        "step_while_writing_s": statistics.median(after),
        "begin_s": begun,
        "stall_s": sum(excess[:2]),
        "excess_s": sum(excess),
        "steps_s": [round(t, 4) for t in before + after],
    }


def drop_cache(folder: Path) -> None:
    """Let the next reads of the folder's files come from the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# The ways.


def measure_plain(folder: Path, flags: str, size: int) -> dict[str, Any]:
    """A file of `size` bytes, without a checksum."""
    path, block = folder / "plain", os.urandom(BLOCK)
    places = range(0, size, BLOCK)

    def written() -> None:
        with open(path, "wb") as file, ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda at: os.pwrite(file.fileno(), block, at), places))
            os.fsync(file.fileno())

    def read() -> None:
        with open(path, "rb") as file, ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda at: len(os.pread(file.fileno(), BLOCK, at)), places))

    write_s = seconds(written)
    drop_cache(folder)
    cold, warm = seconds(read), seconds(read)
    return {"bytes": size, "write_s": write_s, "read_s": cold, "read_cached_s": warm}


def measure_async(folder: Path, flags: str, _: int) -> dict[str, Any]:
    """The first save after the start."""
    run, began = start(f"{flags} --async-save --save {folder}/ckpt"), time.perf_counter()
    run.observer(Checkpoints).saver.writer.buffer.ready.result()
    prepared = time.perf_counter() - began
    timed_steps(run, WARM)
    before, begin = timed_steps(run, BEFORE), time.perf_counter()
    run.observer(Checkpoints).save()
    begun = time.perf_counter() - begin
    after = timed_steps(run, MOST, run.observer(Checkpoints).saver.writer.published.done)
    run.observer(Checkpoints).saver.finish()
    write_s = time.perf_counter() - begin
    target = folder / "ckpt" / f"iter_{run.observer(Checkpoints).saver.saved:07d}"
    shard = {target / rank_file("sharded", 0): read_manifest(target).files[0]}
    check_s = seconds(lambda: verify_files(shard, THREADS))
    run.observer(Checkpoints).saver.close()
    times = {"prepare_s": prepared, "write_s": write_s, "check_s": check_s}
    return {"bytes": size_of(target), **times, **stall(before, begun, after)}


def measure_sync(folder: Path, flags: str, _: int) -> dict[str, Any]:
    """The save, and loads of all that it holds."""
    run = start(f"{flags} --no-async-save --save {folder}/ckpt")
    timed_steps(run, WARM)
    write_s = seconds(lambda: run.observer(Checkpoints).save())
    found = {"bytes": size_of(folder / "ckpt"), "write_s": write_s}
    pieces = run.observer(Checkpoints).pieces()
    drop_cache(folder)
    for name in ("load_s", "load_cached_s"):
        found[name] = seconds(lambda: load(f"{folder}/ckpt", pieces, run.mesh))
    return found


def measure_dcp(folder: Path, flags: str, _: int) -> dict[str, Any]:
    """The same tensors by torch, with its defaults. `write_s` is null if it takes longer than MOST steps."""
    run = start(f"{flags} --no-async-save --save {folder}/ckpt")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    timed_steps(run, WARM)
    before = timed_steps(run, BEFORE)
    run.observer(Reporter).flush()
    run.buckets.wait_params()
    state = {
        f"{i} {piece.key}": piece.data
        for i, piece in enumerate(run.observer(Checkpoints).pieces())
        if piece.owner
    }
    begin = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=str(folder / "dcp"))
    begun = time.perf_counter() - begin
    after = timed_steps(run, MOST, future.done)
    write_s = time.perf_counter() - begin if future.done() else None
    return {"bytes": size_of(folder / "dcp"), "write_s": write_s, **stall(before, begun, after)}


def measure_verify(folder: Path, flags: str, size: int) -> dict[str, Any]:
    """Seconds to check two files in the page cache, the best of five: by CRC-32, by SHA-256, by both."""
    data, threads = os.urandom(size // 2), torch.get_num_threads()
    files = {folder / name: write_blocks(folder / name, [data], THREADS) for name in ("a", "b")}
    hashes = {path: SavedFile(file.bytes, file.sha256) for path, file in files.items()}
    ways = {"crc32": (files, False), "sha256": (hashes, False), "both": (files, True)}
    best = {
        name: min(seconds(lambda f=given, b=both: verify_files(f, threads, b)) for _ in range(5))
        for name, (given, both) in ways.items()
    }
    for path in files:
        path.unlink()
    return {"bytes": size, "threads": threads, **best}


def measure_trace(folder: Path, flags: str, _: int) -> dict[str, Any]:
    """An asynchronous save under torch's profiler: waits of device and host, in ms since its begin.

    device: gaps of 3 ms in the stream of the step, and what is beside them; copies: begin and end of all;
    host: ops and calls of CUDA that take 20 ms.
    """
    run = start(f"{flags} --async-save --save {folder}/ckpt")
    run.observer(Checkpoints).saver.writer.buffer.ready.result()
    timed_steps(run, WARM)
    with torch.profiler.profile() as profile:
        with torch.profiler.record_function("save"):
            run.observer(Checkpoints).save()
        timed_steps(run, LEAST)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    return {"bytes": 0, **waits_in(json.loads(path.read_text())["traceEvents"])}


def waits_in(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What `measure_trace` reports, of the events of a trace."""
    timed = [(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e) for e in events if e.get("ph") == "X"]
    zero = next(begin for begin, _, e in timed if e["name"] == "save")
    timed = sorted((begin - zero, end - zero, e) for begin, end, e in timed if begin >= zero)
    on_device = [one for one in timed if one[2].get("cat", "").startswith(("kernel", "gpu_mem"))]
    kernels = [e["args"]["stream"] for *_, e in on_device if e["cat"] == "kernel"]
    main = max(set(kernels), key=kernels.count, default=None)
    gaps, last = [], None
    for begin, end, e in on_device:
        if e["args"]["stream"] == main:
            if last and begin - last[0] > 3:
                gaps.append([round(last[0]), round(begin - last[0]), last[1], e["name"]])
            last = max(end, last[0] if last else end), e["name"]
    copies = [one for one in on_device if one[2]["args"]["stream"] != main and "DtoH" in one[2]["name"]]
    host = [
        [round(begin), round(end - begin), e["name"], e["tid"]]
        for begin, end, e in timed
        if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation") and end - begin > 20
    ]
    span = [round(copies[0][0]), round(copies[-1][1])] if copies else []
    return {"device": gaps, "copies": span, "host": host}


def run_way(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own measures; the folder is empty before and after it."""
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    words = [sys.executable, "-m", "benchmarks.save_stall", "--way", way, "--size", str(args.size)]
    words += ["--folder", str(args.folder.resolve()), *["--small"] * args.small]
    began = time.perf_counter()
    try:
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=args.timeout)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1]) if done.returncode == 0 else {"failed": done.stdout[-2000:]}
    except subprocess.TimeoutExpired:
        found = {"failed": f"not done after {args.timeout} s"}
    shutil.rmtree(args.folder, ignore_errors=True)
    return with_rates(found) | {"seconds": round(time.perf_counter() - began, 1)}


def with_rates(found: dict[str, Any]) -> dict[str, Any]:
    """Beside each time of writing or reading, GB/s."""
    names = [name for name in found if name.startswith(("write", "read", "load", "check")) and found[name]]
    rates = {name.removesuffix("_s") + "_gb_s": found["bytes"] / found[name] / 1e9 for name in names}
    return found | rates


def main(argv: list[str] | None = None) -> int:
    """Run all ways, or one of them in this process; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("saves"), help="on the disk; is emptied")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each way")
    parser.add_argument("--way", choices=(*WAYS, "verify", "trace"), help="only this, in this process")
    parser.add_argument("--ways", default=",".join(WAYS), help="of the driver, in this order")
    parser.add_argument("--size", type=int, default=16 * 10**9, help="bytes of the plain file")
    args = parser.parse_args(argv)
    if args.way:
        args.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder := args.folder.resolve())
        measure = globals()[f"measure_{args.way}"]
        print(json.dumps(measure(folder, SMALL if args.small else FLAGS, args.size)), flush=True)
        os._exit(0)  # a save by torch may still be at work
    result = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    result |= {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "command": "python -m benchmarks.save_stall" + " --small" * args.small,
        "commit": commit_of(ROOT),
        "torch": version("torch"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not args.small else "cpu",
    }
    for way in args.ways.split(","):
        result[way] = run_way(way, args)
        text = json.dumps(result, indent=1)
        if args.out:
            args.out.write_text(text + "\n")
        print(way, json.dumps({k: v for k, v in result[way].items() if k != "steps_s"}), flush=True)
    return int(any("failed" in result[way] for way in args.ways.split(",")))


if __name__ == "__main__":
    sys.exit(main())
