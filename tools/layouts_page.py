"""docs/layouts.md: the planner's layouts for models of all sizes, why, and what common guides say.

python tools/layouts_page.py            is the page current? exit code 1 if not
python tools/layouts_page.py --write    write it, and draw the picture
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, it finds the package of its own checkout

from nanomegatron.config.cli import parse  # noqa: E402
from nanomegatron.plan.cluster import load_cluster  # noqa: E402
from nanomegatron.plan.search import Candidate, Search, disadvantage, model_size  # noqa: E402
from nanomegatron.plan.step_time import step_time  # noqa: E402
from nanomegatron.report.schedule_draw import canvas  # noqa: E402
from tests.plan_rows import rows  # noqa: E402

PAGE, PICTURE = ROOT / "docs/layouts.md", ROOT / "docs/scaling.svg"
LLAMA = "--config llama2-7b --vocab-size 32000 --bf16 --global-batch-size"
LLAMA3 = "--config llama3-70b --vocab-size 128256 --bf16 --global-batch-size"
EXPERTS = "--bf16 --vocab-size 128256 --global-batch-size"


class Model(NamedTuple):
    """A model, its GPUs, what a guide recommends, as flags, and whose guide that is."""

    name: str
    gpus: int
    flags: str
    guide: str
    whose: str


MODELS = (
    Model(
        "1B",
        1,
        f"{LLAMA} 128 --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192",
        "--tp 1",
        "any: one GPU",
    ),
    Model("7B", 8, f"{LLAMA} 256", "--tp 2 --pp 1", "common: tp 1 or 2"),
    Model(
        "13B",
        8,
        f"{LLAMA} 256 --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 "
        "--num-query-groups 40",
        "--tp 2 --pp 1",
        "common: tp 2",
    ),
    Model(
        "30B",
        32,
        f"{LLAMA} 512 --num-layers 60 --hidden-size 6656 --ffn-hidden-size 17920 --num-attention-heads 52 "
        "--num-query-groups 52",
        "--tp 4 --pp 2",
        "common: tp 4 pp 2",
    ),
    Model("70B", 64, f"{LLAMA3} 512", "--tp 4 --pp 4", "common: tp 4 pp 4"),
    Model(
        "175B",
        128,
        f"{LLAMA} 1024 --num-layers 96 --hidden-size 12288 --ffn-hidden-size 32768 --num-attention-heads 96 "
        "--num-query-groups 96 --seq-length 2048",
        "--tp 8 --pp 16",
        "Megatron-LM, GPT-3: tp 8 pp 16",
    ),
    Model(
        "405B",
        256,
        f"{LLAMA3} 512 --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 "
        "--num-attention-heads 128",
        "--tp 8 --pp 16",
        "Llama 3: tp 8 pp 16",
    ),
    Model(
        "462B, 8 experts",
        256,
        f"--config mixtral-8x7b {EXPERTS} 1024 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
        "--moe-ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 4096",
        "--tp 2 --ep 8 --pp 8",
        "Megatron-Core, Mixtral 8x22B: tp 2 ep 8 pp 8",
    ),
    Model(
        "671B, 256 experts",
        1024,
        f"--config qwen3-30b-a3b {EXPERTS} 8192 --num-layers 61 --hidden-size 7168 --num-experts 256 "
        "--moe-ffn-hidden-size 2048 --num-attention-heads 128 --num-query-groups 128 --seq-length 4096 "
        "--moe-shared-expert-intermediate-size 2048",
        "--tp 1 --ep 64 --pp 16",
        "DeepSeek-V3: pp 16 ep 64",
    ),
)
HEAD = """\
# Layouts

What the [planner](planner.md) chooses on nodes of eight H100, with bf16 and AdamW, and why. Beside it the
layout of common guides, planned in the same way. `python tools/layouts_page.py --write` makes this page;
`nanomegatron plan --config NAME --gpus N --gpu H100` does the same for your model, and `--auto-layout` in
training.

| model | GPUs | layout | micro batch | recomputed | MFU, planned | GiB a GPU | why |
|---|--:|---|--:|---|--:|--:|---|
"""
GUIDES = """
| model | guide | its layout, planned | difference |
|---|---|---|---|
"""
TAIL = """
Reasons are the planner's own: of the layouts with fewer ranks to a replica, the one with most, and what it
lacks; and the next best. Behind a "+": what takes longer there, as a share of the chosen layout's step.
Latent attention (DeepSeek-V3) is not in nanomegatron: its row has whole key/value heads.

![tokens a second from 8 to 16,384 GPUs](scaling.svg)

Llama-3-8B on H100: four sequences of 8,192 tokens a step for each GPU (weak), and 1,024 in all (strong).
Lines are predicted; the cross is measured, on four H200.
"""
SIZES = tuple(2**i for i in range(3, 15))


def searched(model: Model, more: str = "") -> tuple[list[Candidate], list[Candidate], Search]:
    """Layouts that fit and that do not, and the search."""
    parsed = parse(shlex.split(f"{model.flags} {more}"))
    search = Search(parsed, parsed.config.data.vocab_size, model.gpus, load_cluster("h100"))
    fits, others = search.run()
    return search.valid(fits, 2), fits + others, search


def reason(best: list[Candidate], all_of_them: list[Candidate], room: float) -> str:
    """Why not a simpler layout, and not the next."""

    def ranks(candidate: Candidate) -> int:
        return candidate.run.config.parallel.ranks_per_replica

    simpler = [c for c in all_of_them if ranks(c) < ranks(best[0])]
    words = []
    if simpler:
        most = max(map(ranks, simpler))
        near = min((c for c in simpler if ranks(c) == most), key=lambda c: (c.step is None, c.need))
        if near.step:  # its bubble may be the least one
            near = replace(near, step=step_time(near.run, near.step.cluster))
        words.append(f"{near.word} {disadvantage(near, best[0], room)}")
    if len(best) > 1:
        words.append(
            f"next {best[1].word}, micro batch {best[1].micro}: {disadvantage(best[1], best[0], room)}"
        )
    return "; ".join(words)


def page() -> str:
    """The text of docs/layouts.md."""
    chosen, guides = [], []
    for model in MODELS:
        best, every, search = searched(model)
        first = best[0]
        again = first.run.config.model.recompute_granularity or "-"
        numbers = f"{first.step.mfu:.1%} | {first.need / 2**30:.0f}"
        size = model_size(search.config, search.vocab) / 1e9
        why = reason(best, every, search.room)
        what = f"{model.name} ({size:.0f} B) | {model.gpus} | {first.word} | {first.micro}"
        chosen.append(f"| {what} | {again} | {numbers} | {why} |")
        theirs, failed, _ = searched(model, model.guide)
        if theirs:
            what = theirs[0].word
            same = what == first.word
            said = "the same" if same else disadvantage(theirs[0], first, search.room)
        else:
            what = model.guide.replace("--", "").replace(" 1", "1")
            said = disadvantage(failed[0], failed[0], search.room) if failed else "none is valid"
        guides.append(f"| {model.name} | {model.whose} | {what} | {said} |")
    return HEAD + "\n".join(chosen) + "\n" + GUIDES + "\n".join(guides) + "\n" + TAIL


def scaling(weak: bool) -> Iterator[tuple[int, float]]:
    """(GPUs, tokens per second) of the best layout of Llama-3-8B."""
    for gpus in SIZES:
        batch = 4 * gpus if weak else 1024
        flags = f"--config llama3-8b --bf16 --vocab-size 128256 --global-batch-size {batch}"
        best, *_ = searched(Model("8B", gpus, flags, "", ""))
        if best:
            yield gpus, best[0].step.tokens_per_s


def draw() -> None:
    """Draw docs/scaling.svg."""
    figure = canvas(PICTURE, (7, 4.5))
    axes = figure.subplots()
    for weak, label in ((True, "weak, predicted"), (False, "strong, predicted")):
        axes.plot(*zip(*scaling(weak), strict=True), label=label)
    measured = [row for row in rows() if row.step_s and row.at.endswith("dp overlap, 4")]
    points = [(row.world, row.tokens / row.step_s) for row in measured]
    axes.plot(*zip(*points, strict=True), "x", label="measured, H200", color="black")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s", title="Llama-3-8B, bf16, H100")
    axes.legend()
    figure.savefig(PICTURE)


def main(argv: list[str]) -> int:
    """Exit code 1 where the page is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    args, text = parser.parse_args(argv), page()
    if args.write:
        PAGE.write_text(text, encoding="utf-8")
        draw()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/layouts.md is not current: python tools/layouts_page.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
