"""Bars of a plan: the parts of a GPU's memory and of a step's time, as text.

    memory  72 of 80 GiB WWWWWWWGGGGGGGGGGAAAAAAAAAAAA....    weights 15, gradients 22, activations 31, free 8
    time        11.52 s  MMMMMMMMMMMMMMMMMMMMMMMAAAAAAAoBB    matmuls 62 %, attention 21 %, bubble 4 %

A sign is the first free letter of a part's name; a part below a sign's width is not drawn.
"""

from collections.abc import Iterator

from nanomegatron.plan.search import Candidate

BAR_WIDTH = 60  # signs of a bar
FREE = "free"


def memory_parts(candidate: Candidate, room: float) -> dict[str, float]:
    """GiB by part, the largest first, and what is free of `room` GiB."""
    parts = {name: size / 2**30 for name, size in candidate.memory.items()}
    parts = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return parts | {FREE: max(0.0, room - sum(parts.values()))}


def signs(parts: dict[str, float]) -> dict[str, str]:
    """A sign for each part: a letter of its name that no other has; free memory is a dot."""
    taken = {FREE: "."}
    for name in parts:
        letters = [c for c in name.upper() + name if c.isalpha()]
        taken.setdefault(name, next((c for c in letters if c not in taken.values()), "?"))
    return taken


def bar(parts: dict[str, float]) -> str:
    """A line of BAR_WIDTH signs, divided as the parts are."""
    total, by_name = sum(parts.values()), signs(parts)
    end, drawn = 0.0, ""
    for name, size in parts.items():
        end += size
        drawn += by_name[name] * (round(BAR_WIDTH * end / total) - len(drawn))
    return drawn


def text_bars(candidate: Candidate, room: float) -> Iterator[str]:
    """Yield the lines of both bars, each with a key. room: GiB of a GPU."""
    memory = memory_parts(candidate, room)
    yield f"memory  {candidate.need / 2**30:5.1f} of {room:.0f} GiB  {bar(memory)}"
    yield from key(memory, "{:.1f}")
    step = candidate.step
    time = {name: 100 * part / step.total for name, part in step.parts.items()}
    yield f"time    {step.total * 1e3:11,.1f} ms  {bar(time)}"
    yield from key(time, "{:.1f} %")


def key(parts: dict[str, float], form: str) -> Iterator[str]:
    """Yield lines that say what the signs of a bar mean, of the parts that are seen in it."""
    by_name, seen = signs(parts), {*bar(parts)}
    words = [f"{by_name[name]} {name} {form.format(parts[name])}" for name in parts if by_name[name] in seen]
    for i in range(0, len(words), 4):
        yield " " * 8 + ", ".join(words[i : i + 4])
