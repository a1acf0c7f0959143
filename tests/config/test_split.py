"""Layers of pipeline stages: Megatron's counts and offsets; the split by cost beside all splits there are."""

import itertools
import warnings

import pytest

from nanomegatron.config.split import split_layers
from nanomegatron.schedules import NAMES, embedding_ranks, placement

LLAMA_8B = dict(num_layers=32, head=2.4)


def loop(ranks: int, chunks: int = 1) -> list[list[int]]:
    return placement("gpipe", ranks, chunks)


def sizes(split: list[range]) -> list[int]:
    return [len(layers) for layers in split]


def rank_loads(split: list[range], placed: list[list[int]], head: float) -> list[float]:
    work = [*sizes(split)]
    work[-1] += head
    return [sum(work[stage] for stage in stages) for stages in placed]


WAYS = [
    *(dict(first=first, last=last) for first in (None, 1, 2, 4) for last in (None, 1, 2, 3)),
    dict(embedding=True),
    dict(loss=True),
    dict(embedding=True, loss=True),
]


@pytest.fixture(scope="module")
def megatron():
    """Megatron's split by its own functions: the layers of every stage, or None where it refuses.

    It lets sizes pass that give a rank a negative number of layers, or lose some: that is taken for refused.
    """
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    def split(layers, ranks, chunks, first=None, last=None, embedding=False, loss=False):
        try:
            config = TransformerConfig(
                num_layers=layers,
                hidden_size=4,
                num_attention_heads=1,
                pipeline_model_parallel_size=ranks,
                pipeline_dtype=torch.float32,
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
                account_for_embedding_in_pipeline_split=embedding,
                account_for_loss_in_pipeline_split=loss,
            )
            found = []
            for chunk, rank in itertools.product(range(chunks), range(ranks)):
                at = dict(vp_stage=chunk if chunks > 1 else None, pp_rank=rank)
                begin = get_transformer_layer_offset(config, **at)
                found.append(range(begin, begin + get_num_layers_to_build(config, **at)))
        except (ValueError, AssertionError):
            return None
        whole = [i for part in found for i in part] == [*range(layers)] and all(
            p.start <= p.stop for p in found
        )
        return found if whole else None

    return split


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks, chunks", [*itertools.product((2, 3, 4), (1, 2, 3))])
def test_megatrons_split(megatron, ranks, chunks):
    """The same layers, in the same places, and the same refused."""
    accepted = 0
    for layers, way in itertools.product(range(1, 25), WAYS):
        if ranks == 2 and chunks > 1 and None not in way.values() and "last" in way:
            continue  # no rank is left for the rest: Megatron divides by zero
        theirs = megatron(layers, ranks, chunks, **way)
        try:
            ours = split_layers(layers, loop(ranks, chunks), **way)
        except ValueError:
            ours = None
        accepted += theirs is not None
        assert ours == theirs, (layers, way)
    assert accepted >= 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers, head", [*itertools.product((1, 3, 8, 13), (0.0, 0.4, 1.0, 2.4, 9.0))])
def test_the_busiest_rank_has_as_little_as_can_be(name, layers, head):
    for ranks in (1, 2, 3, 4):
        chunks = {"interleaved": 3, "gpipe": 2, "zb-v": 2}.get(name, 1)
        placed = placement(name, ranks, chunks)
        last_rank = embedding_ranks(placed)[1]
        counts = (c for c in itertools.product(range(layers + 1), repeat=ranks) if sum(c) == layers)
        best = min(max(n + head * (rank == last_rank) for rank, n in enumerate(c)) for c in counts)
        try:
            split = split_layers(layers, placed, head=head)
        except ValueError as error:
            assert layers < ranks and "leave nothing for" in str(error)
            continue
        loads = rank_loads(split, placed, head)
        assert max(loads) == pytest.approx(best) and min(loads) > 0
        assert [i for part in split for i in part] == list(range(layers))


def test_what_the_documentation_says_of_llama():
    even = split_layers(32, loop(4))
    assert sizes(even) == [8, 8, 8, 8] and max(rank_loads(even, loop(4), 2.4)) == pytest.approx(10.4)
    by_cost = split_layers(32, loop(4), head=2.4)
    assert sizes(by_cost) == [9, 9, 8, 6] and max(rank_loads(by_cost, loop(4), 2.4)) == 9
    assert sizes(split_layers(32, loop(4, 2), head=2.4)) == [5, 5, 4, 4, 4, 4, 4, 2]
    in_a_v = split_layers(32, placement("zb-v", 4, 2), head=2.4)
    assert rank_loads(in_a_v, placement("zb-v", 4, 2), 2.4) == pytest.approx([8.4, 9, 9, 8])


def test_a_v_gives_back_to_the_first_rank():
    """Stages 0 and 5 are rank 0's: what counts as a layer makes either smaller, and `last` has no rank."""
    placed = placement("zb-v", 3, 2)
    assert split_layers(12, placed)[5] == range(10, 12)
    assert sizes(split_layers(10, placed, embedding=True, loss=True)) == [1, 2, 2, 2, 2, 1]
    assert sizes(split_layers(10, placed, first=2)) == [1, 2, 2, 2, 2, 1]
    with pytest.raises(
        ValueError, match="--decoder-last-pipeline-num-layers 2: .* rank 0, .*; use --decoder-f"
    ):
        split_layers(10, placed, last=2)


@pytest.mark.parametrize(
    "layers, placed, way, message",
    [
        (
            30,
            loop(4),
            {},
            "--num-layers 30: must be a multiple of 4 .* nearest --num-layers 28 or 32, or --pipeline-s",
        ),
        (
            30,
            loop(4),
            dict(embedding=True),
            "--num-layers 30 \\+ 1: must be a multiple .* nearest --num-layers 27 or 31,",
        ),
        (
            8,
            loop(4, 3),
            {},
            "--num-layers 8: must be a multiple of 4 pipeline ranks x 3 pieces; .* 12, or --pipeline",
        ),
        (
            8,
            loop(2, 2),
            dict(first=3),
            "first-pipeline-num-layers 3: must be a multiple of the 2 pieces of a",
        ),
        (
            8,
            loop(3),
            dict(first=3),
            "--num-layers 8 less .* 3: must be a multiple of 2 .* nearest --num-layers 7 or 9$",
        ),
        (8, loop(2), dict(first=3, last=4), "--num-layers 8: .* 3 .* 4 make 7; leave one out"),
        (
            8,
            loop(3),
            dict(first=8),
            "--num-layers 8 less .* 8: must be a multiple of 2 .* nearest --num-layers 10$",
        ),
        (8, loop(3), dict(first=20), "nearest --num-layers 22$"),
        (
            2,
            loop(4),
            dict(head=1.0),
            "--num-layers 2: leave nothing for pipeline rank 2 of 4; use .* 3 or less",
        ),
        (2, loop(4), {}, "--num-layers 2: must be a multiple of 4 pipeline ranks; nearest --num-layers 4$"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(layers, placed, way, message):
    with pytest.raises(ValueError, match=message):
        split_layers(layers, placed, **way)
