"""The pipeline of a run looked at before it starts: a part of `config/check.py`."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from nanomegatron.config.cli import flag
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.schedules import CHUNKS

PP, PER_PIECE = "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
VPP, GROUP = "num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_virtual_pipeline_stage"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
NEED_RANKS = (PER_PIECE, VPP, GROUP, "pipeline_schedule", "pipeline_split", *ENDS, *COUNTED)


def pipeline_errors(config: Config, *_: Any) -> Iterator[str]:
    """What is wrong with the pipeline of a run: its pieces, its schedule, its shares of the layers."""
    given = [s.name for s in fields(ParallelConfig) if getattr(config.parallel, s.name) != s.default]
    given = [name for name in given if name in NEED_RANKS]
    if config.parallel.pipeline_model_parallel_size <= 1:
        if given and (given != [VPP] or config.parallel.num_virtual_stages_per_pipeline_rank > 1):
            need = "needs" if len(given) == 1 else "need"
            yield f"{', '.join(map(flag, given))}: {need} {flag(PP)} greater than 1"
        return
    try:
        parallel = with_virtual_stages(config)
        errors = [*_schedule(parallel)]
        yield from errors
        if not errors:
            parallel.stage_layers(config.model.num_layers)
    except ValueError as error:
        yield str(error)


def with_virtual_stages(config: Config) -> ParallelConfig:
    """The layout with the pieces of a pipeline rank by their number, not their size.

    Raises: ValueError where there is no such number.
    """
    parallel, layers = config.parallel, config.model.num_layers
    size, pp = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    if size is None:
        return parallel
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        raise ValueError(f"{flag(PER_PIECE)}, {flag(VPP)}: only one of the two")
    uneven = [name for name in ENDS if getattr(parallel, name) is not None]
    uneven += ["pipeline_split"] * (parallel.pipeline_split == "flops")
    if uneven:
        raise ValueError(f"{flag(PER_PIECE)} {size}: not with {flag(uneven[0])}; give {flag(VPP)} instead")
    counted = sum(getattr(parallel, name) for name in COUNTED)
    pieces, rest = divmod(layers + counted, pp * size)
    if rest:
        near = [n * pp * size - counted for n in (pieces, pieces + 1) if n]
        raise ValueError(
            f"--num-layers {layers}"
            + f" + {counted}" * bool(counted)
            + f": must divide by {flag(PP)} {pp} x "
            f"{flag(PER_PIECE)} {size}; nearest --num-layers {' or '.join(map(str, near))}"
        )
    return replace(
        parallel, num_layers_per_virtual_pipeline_stage=None, num_virtual_stages_per_pipeline_rank=pieces
    )


def _schedule(parallel: ParallelConfig) -> Iterator[str]:
    name, chunks, pp = parallel.schedule, parallel.chunks, parallel.pipeline_model_parallel_size
    if chunks != CHUNKS.get(name, chunks):
        yield (
            f"--pipeline-schedule {name}: has {CHUNKS[name]} of the model's pieces on a pipeline rank, not "
            f"{chunks}; leave {flag(VPP)} out, or use interleaved"
        )
    elif name == "interleaved" and chunks == 1:
        yield f"--pipeline-schedule interleaved: needs {flag(VPP)} 2 or more; 1f1b is the same with 1"
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and name != "interleaved":
        yield f"{flag(GROUP)} {group}: is for --pipeline-schedule interleaved, not {name}"
    elif group is not None and group < pp:
        yield f"{flag(GROUP)} {group}: must be at least {flag(PP)} {pp}, or later ranks wait"
