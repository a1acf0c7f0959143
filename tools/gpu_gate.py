"""Is this checkout as fast as another one, on the same GPUs? Exit code 1 if it is not.

    python tools/gpu_gate.py --old ../before                 one GPU, eight cases, at most 8 minutes
    python tools/gpu_gate.py --old ../before --gpus 4        parallel training, seven cases; 2 or 4

    driver ---- old/ask-0007.json ---> worker of the old checkout     a process, or --gpus of them, that
           <-- old/answer-0007.0.json --  one file a rank             stays up and runs case after case
           ---- new/ask-0007.json ---> worker of the new checkout

A case is a short training by the checkout's own train.py, or attention in blocks; nothing is saved. Both
checkouts run it in turn, in every other repetition the new one first, so that drift of clocks cancels. The
median of the steps after warm-up is the time of a repetition, the median of these counts.

Where launching takes about as long as computing, the host sets the pace, and others on it disturb that within
seconds, by half. There both are set up at once and train by turns, a slice of a few steps each; a pause is
not part of any step. The fastest step of all slices counts: noise only ever adds. Still two processes of the
same code differ by up to 7 % where only the host counts: that case has a limit of its own.

    old   warm-up         | slice 0 |         |         | slice 1 | slice 2 |         | ...
    new           warm-up |         | slice 0 | slice 1 |         |         | slice 2 |

A case that looks slower than --limit % allows is repeated as often once more, and fails if all repetitions
together say so. It also fails where the host issues more ops of torch for a step, by as much: that is exact,
and its time hangs on it; or where the last loss is another: it trains something else. The driver imports
neither checkout; workers run gpu_gate_worker.py of the new one, each with its own checkout's packages.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))  # last: for who imports this file, a test
from gpu_gate_worker import POLL, Case, write  # noqa: E402

SIDES = ("old", "new")
MAX_LOSS_CHANGE = 1e-2  # relative
TIMEOUT = 240  # seconds for an answer

COMMON = "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --lr 1e-5 --lr-decay-style constant "
COMMON += "--min-lr 0 --lr-warmup-iters 0 "  # a rate at which the loss stays calm
COMMON += "--distributed-timeout-minutes 3 --no-async-save "  # which would page-lock memory meanwhile
LLAMA = f"{COMMON} --config llama3-8b --num-layers 8 --bf16 "
QWEN = f"{COMMON} --config qwen3-30b-a3b --seq-length 4096 --bf16 --cross-entropy-loss-fusion "
FP8 = "--fp8-format hybrid --fp8-recipe delayed "
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "


def cases_of(gpus: int, tiny: bool) -> list[Case]:
    """A step of eight layers of Llama-3-8B on 16k tokens takes an H200 0.43 s. tiny: to test this tool."""
    if tiny:
        flags = f"{COMMON} --device cpu --tp {gpus} --num-layers 1 --hidden-size 32 --num-attention-heads 4 "
        flags += "--seq-length 32 --vocab-size 96 --make-vocab-size-divisible-by 8 --global-batch-size 4"
        blocks = Case("tiny blocks", "32 4 2 8", 1, 3, "blocks")
        swiglu = Case("tiny swiglu", f"{flags} --swiglu", 1, 2, slices=3)
        return [Case("tiny gelu", flags, 1, 3), swiglu, blocks]
    if gpus == 1:
        llama = f"{LLAMA} --seq-length 8192 --micro-batch-size 2 --global-batch-size "
        gpt2 = f"{COMMON} --config gpt2-124m --seq-length 1024 --bf16 "
        gpt2_small = f"{gpt2} --micro-batch-size 8 --global-batch-size 8"
        qwen = f"{QWEN} --num-layers 3 --micro-batch-size 4 --global-batch-size 4"
        return [
            Case("llama bf16, 1 microbatch", f"{llama} 2", 3, 6),
            Case("llama bf16, 4 microbatches", f"{llama} 8", 1, 3),
            Case("llama fp8, 1 microbatch", f"{llama} 2 {FP8}", 4, 8),
            Case("llama fp8, 4 microbatches", f"{llama} 8 {FP8}", 2, 3),
            Case("gpt2, micro batch 8", gpt2_small, 20, 10, slices=32, limit=10),
            Case("gpt2, micro batch 64", f"{gpt2} --micro-batch-size 64 --global-batch-size 64", 4, 12),
            Case("qwen3 moe, ep 1", qwen, 4, 10),
            Case("attention in blocks", "8192 32 8 128", 10, 40, "blocks"),
        ]
    # Layers become graphs where memory is free, and the other checkout's process holds half of it.
    llama = f"{LLAMA} --cuda-graph-impl none"
    tp = f"{llama} --tp {gpus} --sequence-parallel --tp-comm-overlap --micro-batch-size 2"
    dp = f"{llama} {ZERO1} --micro-batch-size 1 --global-batch-size {2 * gpus} "
    pp = f"{llama} --pp {gpus} --pipeline-schedule zb-v --pipeline-split flops --micro-batch-size 1"
    cp = f"{llama} {ZERO1} --cp {gpus} --cp-comm-type p2p --cross-entropy-loss-fusion --micro-batch-size 1"
    cp += f" --global-batch-size 1 --seq-length {8192 * gpus} --max-position-embeddings {8192 * gpus}"
    ep = f"{QWEN} {ZERO1} --num-layers 3 --ep {gpus} --micro-batch-size 2 --global-batch-size {4 * gpus} "
    ep += "--moe-router-force-load-balancing --moe-token-dispatcher-type "
    return [
        Case("tp, sequence parallel, overlap", f"{tp} --global-batch-size 4", 3, 8),
        Case("dp zero-1, overlap, bf16", dp, 3, 8),
        Case("dp zero-1, overlap, fp8", f"{dp} {FP8} --fp8-param-gather", 4, 8),
        Case("pp zb-v", f"{pp} --global-batch-size {2 * gpus}", 3, 8),
        Case("cp ring", cp, 3, 8),
        *(Case(f"ep {how}", f"{ep} {how}", 4, 6, slices=10) for how in ("allgather", "alltoall")),
    ]


def chosen(cases: list[Case], words: list[str]) -> list[Case]:
    """Those with any of the words in their names."""
    return [case for case in cases if any(word in case.name for word in words)]


class Worker:
    """The ranks of one checkout."""

    def __init__(self, side: str, checkout: Path, gpus: int, folder: Path) -> None:
        self.side, self.folder = side, folder / side
        self.gpus, self.turn = gpus, 0
        self.folder.mkdir()
        command = [*launcher(gpus), str(ROOT / "tools/gpu_gate_worker.py"), str(self.folder)]
        path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
        how = dict(cwd=checkout, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
        with (self.folder / "log.txt").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **how)

    def ask(self, what: str, content: dict | None) -> dict:
        """Have it do something, at first only start. Rank 0's answer, with the largest peak of all.

        Raises RuntimeError with the traceback of a worker that has died.
        """
        if content is not None:
            self.turn += 1
            write(self.folder / f"ask-{self.turn:04}.json", content)
        names = (f"answer-{self.turn:04}", "failed")
        paths, errors = ([self.folder / f"{n}.{rank}.json" for rank in range(self.gpus)] for n in names)
        end = time.monotonic() + TIMEOUT
        while not all(path.exists() for path in paths):
            failed = [path for path in errors if path.exists()]
            if failed or self.process.poll() is not None or time.monotonic() > end:
                causes = [json.loads(path.read_text())["error"] for path in failed]
                causes = causes or [(self.folder / "log.txt").read_text()[-4000:]]
                why = f"{self.side} checkout, {what}: died, or no answer in {TIMEOUT} s"
                raise RuntimeError("\n".join([why, *causes]))
            time.sleep(POLL)
        answers = [json.loads(path.read_text()) for path in paths]
        return answers[0] | {"peak_gib": max(answer.get("peak_gib", 0) for answer in answers)}

    def stop(self) -> None:
        """End it, by force where it does not listen; its ranks notice that their launcher has gone."""
        (self.folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def launcher(gpus: int) -> list[str]:
    """The words before a program that runs on some GPUs of this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    return [sys.executable, *(torchrun if gpus > 1 else [])]


def commit_of(checkout: Path) -> str:
    """What git says of a folder."""
    describe = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(describe, cwd=checkout, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def repetition(case: Case, workers: dict[str, Worker], order: tuple[str, ...]) -> dict[str, dict]:
    """The workers' answers about the case, by side; slice by slice they change places."""
    answers = {side: workers[side].ask(case.name, case._asdict()) for side in order}
    for number in range(case.slices):
        for side in order[:: -1 if number % 2 else 1]:
            if "problem" not in answers[side]:
                answers[side] = workers[side].ask(case.name, {})
    return answers


def time_of(case: Case, turns: list[dict]) -> float:
    """Milliseconds of a step: the median of the repetitions' medians, or the fastest step of all slices."""
    if case.slices:
        return min(min(turn["step_ms"]) for turn in turns)
    return statistics.median(statistics.median(turn["step_ms"]) for turn in turns)


def judge(case: Case, turns: dict[str, list[dict]], limit: float) -> dict:
    """A row of the result: times, and whether the new checkout passes. limit: percent."""
    row: dict = {"name": case.name, "flags": " ".join(case.flags.split()), "passed": False}
    problems = [f"{side} checkout: {t['problem']}" for side in SIDES for t in turns[side] if "problem" in t]
    if problems or not all(turns.values()):
        return row | {"problems": ["FAILED: not comparable", *problems]}
    for side, measured in turns.items():
        row[side] = {key: [turn[key] for turn in measured] for key in ("step_ms", "loss", "left_gib")}
        row[side]["ops"] = measured[-1].get("ops", 0)
        row[side]["ms"] = time_of(case, measured)
        row[side]["peak_gib"] = max(turn["peak_gib"] for turn in measured)
    row["ratio"], longer = row["new"]["ms"] / row["old"]["ms"], case.limit or limit
    if not row["ratio"] <= 1 + longer / 100:
        problems.append(f"FAILED: {100 * (row['ratio'] - 1):.1f} % slower, limit {longer:g} %")
    before, after = (row[side]["ops"] for side in SIDES)
    if after > before * (1 + limit / 100):
        problems.append(f"FAILED: a step has {after} ops of torch instead of {before}, limit {limit:g} %")
    pairs = list(zip(row["old"]["loss"], row["new"]["loss"]))
    if not all(abs(new - old) <= MAX_LOSS_CHANGE * abs(old) for old, new in pairs):  # NaN is no match either
        problems.append(f"FAILED: not comparable, other losses (old, new): {pairs}")
    return row | {"problems": problems, "passed": not problems}


def table(rows: list[dict]) -> str:
    """What is printed last."""
    lines = [f"{'case':<32}{'old ms':>10}{'new ms':>10}{'new/old':>10}"]
    for row in rows:
        numbers = (row["old"]["ms"], row["new"]["ms"], row["ratio"]) if "ratio" in row else ()
        columns = "".join(f"{number:10.3f}" for number in numbers)
        lines.append(f"{row['name']:<32}{columns}  {'; '.join(row['problems']) or 'ok'}")
    return "\n".join(lines)


def in_short(case: Case, answers: dict[str, dict]) -> str:
    """A repetition, in a line."""
    return ", ".join(
        f"{side} {answers[side].get('problem') or format(time_of(case, [answers[side]]), '.2f') + ' ms'}"
        for side in SIDES
    )


def build_kernels(checkouts: dict[str, Path]) -> bool:
    """Compile a missing extension where there is a GPU; whether both have it. Raises SystemExit."""
    for at in checkouts.values() if any(Path("/dev").glob("nvidia[0-9]*")) else ():
        if not any(at.glob("nanomegatron/**/_kernels*.so")):
            subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=at)
    having = [side for side in SIDES if any(checkouts[side].glob("nanomegatron/**/_kernels*.so"))]
    if len(having) == 1:
        raise SystemExit(f"not comparable: only the {having[0]} checkout has CUDA kernels")
    return bool(having)


def repeat(cases: list[Case], count: int, workers: dict[str, Worker], turns: dict, begin: float) -> None:
    """Run the cases `count` times more; the answers of both sides are added to `turns`."""
    for turn in range(count * len(cases)):
        case, swapped = cases[turn % len(cases)], turn // len(cases) % 2 == 1
        if any("problem" in answer for side in SIDES for answer in turns[case.name][side]):
            continue
        answers = repetition(case, workers, SIDES[:: -1 if swapped else 1])
        for side in SIDES:
            turns[case.name][side].append(answers[side])
        print(f"{time.monotonic() - begin:5.0f} s  {case.name}: {in_short(case, answers)}", flush=True)


def compare(args: argparse.Namespace, cases: list[Case], checkouts: dict[str, Path]) -> dict:
    """Run everything; the result as it goes into the JSON."""
    begin, turns = time.monotonic(), {case.name: {side: [] for side in SIDES} for case in cases}
    result: dict = {"date": time.strftime("%Y-%m-%dT%H:%M:%S"), "gpus": args.gpus}
    for side, at in checkouts.items():
        result[side] = {"folder": str(at), "commit": commit_of(at)}
    result |= {"limit_percent": args.limit, "kernels": build_kernels(checkouts), "error": ""}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-gate-", ignore_cleanup_errors=True) as folder:
        try:
            workers |= {side: Worker(side, at, args.gpus, Path(folder)) for side, at in checkouts.items()}
            for worker in workers.values():
                answer = worker.ask("start", None)
                result |= {key: answer[key] for key in ("device", "torch")}
            repeat(cases, args.repetitions, workers, turns, begin)
            doubtful = [case for case in cases if not judge(case, turns[case.name], args.limit)["passed"]]
            repeat(doubtful, args.repetitions, workers, turns, begin)
        except RuntimeError as failure:
            result["error"] = str(failure)
        finally:
            for worker in workers.values():
                worker.stop()
    result["cases"] = [judge(case, turns[case.name], args.limit) for case in cases]
    result["seconds"] = round(time.monotonic() - begin, 1)
    return result | {"passed": not result["error"] and all(row["passed"] for row in result["cases"])}


def main(argv: list[str]) -> int:
    """Exit code 0 where the new checkout passes, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="the other checkout")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--limit", type=float, default=1.5, help="percent that a case may take longer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--only", action="append", metavar="WORDS", help="cases with this in their name; may be repeated"
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    cases = chosen(cases_of(args.gpus, args.tiny), args.only or [""])
    if not cases or args.old is None or not (args.old / "train.py").is_file():
        raise SystemExit(
            f"--old {args.old}, --only {args.only}: must be a checkout, and parts of cases' names"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the workers are stopped
    result = compare(args, cases, {"old": args.old.resolve(), "new": ROOT})
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for key in ("error", "date", "gpus", "device", "torch", "kernels", "old", "new", "seconds"):
        print(f"{key}: {result.get(key)}")
    print(table(result["cases"]), flush=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
