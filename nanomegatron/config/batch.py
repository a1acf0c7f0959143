"""How many sequences each iteration takes: one number, a ramp or steps.

    --global-batch-size 16                                      16 16 16 16 ...
    --rampup-batch-size 4 4 48 --global-batch-size 16           4 4 4 4  8 8  12 12  16 ...   16 samples each
    --step-batch-size-schedule "0:4 2K:16" --seq-length 32      4 until 2000 tokens are consumed, then 16

A small batch learns more from a sample while the loss still falls fast (arXiv 1812.06162). Both rules are
Megatron's: the ramp's up to 0.16, the steps' since 0.19. They depend only on the samples consumed: a batch
size is the difference of two entries of `samples_before`, and a run resumes on any number of replicas.
"""

import bisect
import itertools

from nanomegatron.config.settings import Config, DataConfig

DEFAULT_ITERS = 1000
MOST_STEPS = 10_000  # batch sizes in a ramp
_POWERS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def stages(data: DataConfig, dp_size: int) -> list[tuple[int, int]]:
    """Return (samples consumed, batch size from there on) of each stage, in order; the last is the full size.

    Raises ValueError with the rule that is broken.
    """
    if data.step_batch_size_schedule is not None:
        return _steps(data.step_batch_size_schedule, data.seq_length)
    last = data.global_batch_size or data.micro_batch_size * dp_size
    if not data.rampup_batch_size:
        return [(0, last)]
    first, increment, samples = data.rampup_batch_size
    if first >= last or (last - first) % increment:
        raise ValueError(f"must reach --global-batch-size {last} from {first} in steps of {increment}")
    sizes = range(first, last + 1, increment)
    if len(sizes) > MOST_STEPS:
        raise ValueError(f"must reach --global-batch-size {last} in at most {MOST_STEPS} steps")
    each = samples / (len(sizes) - 1)  # divided as in Megatron: another rounding moves a boundary

    def begin(i: int) -> int:
        near = itertools.count(max(0, int(i * each) - 1))
        return next(consumed for consumed in near if consumed > samples or int(consumed / each) >= i)

    return [(begin(i), size) for i, size in enumerate(sizes)]


def _steps(schedule: str, seq_length: int) -> list[tuple[int, int]]:
    """The stages of a schedule such as `0:768 250B:1536`: batch sizes from a number of tokens on."""

    def number(text: str) -> int:
        power = _POWERS.get(text[-1:].upper(), 1)
        return int(float(text if power == 1 else text[:-1]) * power)

    found = []
    for entry in schedule.replace(",", " ").split():
        tokens, _, size = entry.partition(":")
        try:
            found.append((number(tokens) // seq_length, number(size)))
        except (ValueError, OverflowError):
            raise ValueError(f'"{entry}" must be TOKENS:BATCH, such as 250B:1536') from None
    found.sort()
    if not found or found[0][0] or min(size for _, size in found) < 1:
        raise ValueError("one entry must begin at 0 tokens, and a batch have at least 1 sequence")
    if len({start for start, _ in found}) < len(found):
        raise ValueError(f"two entries begin at the same sample; one has --seq-length {seq_length} tokens")
    return found


def batch_size_at(data: DataConfig, consumed: int) -> int:
    """The batch size of the iteration that follows `consumed` samples; data: resolved."""
    return [size for start, size in stages(data, 1) if start <= consumed][-1]


def samples_before(config: Config, dp_size: int) -> list[int]:
    """Samples consumed before each iteration of the run, and after its last: train_iters + 1 numbers.

    A run of --train-samples stops before the batch that would exceed them, or, while batches still grow,
    after it (Megatron's rules).
    """
    data, run = config.data, config.run
    starts, sizes = zip(*stages(data, dp_size), strict=True)
    by_samples = run.train_samples is not None and not run.train_iters
    ramp = data.rampup_batch_size[2] if data.rampup_batch_size else -1
    growing = ramp if data.step_batch_size_schedule is None else float("inf")
    table = [0]
    while by_samples or len(table) <= (run.train_iters or DEFAULT_ITERS):
        consumed = table[-1]
        following = consumed + sizes[bisect.bisect_right(starts, consumed) - 1]
        behind = consumed if consumed <= growing else following - 1
        if by_samples and behind >= run.train_samples:
            break
        table.append(following)
    return table
