"""Data sets for tests, and Megatron's own reading of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanomegatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def write(prefix, documents, dtype=np.uint16, sidecar=None):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize(sidecar)
    return IndexedDataset(prefix)


def random_documents(seed, count, longest, empty=False):
    """The recipe of the golden, so that seed 0, 50, 20 gives the same documents."""
    state = np.random.RandomState(seed)
    return [state.randint(1, 100, state.randint(0 if empty else 1, longest)) for _ in range(count)]


FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def megatron(path, sizes, seq_length, seed, split, **settings):
    """Megatron's own three datasets of a prefix, a blend (prefixes, weights), three of those, or nothing."""
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    blend, per_split, cache = None, None, path
    if isinstance(path, list):
        per_split, cache = path, next(b for b in path if b)[0][0]
    elif isinstance(path, tuple):
        blend, cache = path, path[0][0]
    elif path:
        blend = ([str(path)], None)
    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=split if blend else None,
        path_to_cache=str(cache) + "-megatron" if cache else None,
        tokenizer=SimpleNamespace(
            vocab_size=127, eod=126, unique_identifiers={}, pad=-1, special_tokens_dict={}
        ),
        **{"create_attention_mask": False, **dict.fromkeys(FLAGS, False), **settings},
    )
    kind = gpt.MockGPTDataset if path is None else gpt.GPTDataset
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return builder.BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    finally:
        torch.distributed.destroy_process_group()


def assert_same(ours, theirs):
    for name in ("document_index", "sample_index", "shuffle_index"):
        mine, reference = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == reference.dtype, name
        np.testing.assert_array_equal(mine, reference, err_msg=name)
    for i in {0, 1, len(ours) // 2, len(ours) - 1} & set(range(len(ours))):
        sample = theirs[i]
        np.testing.assert_array_equal(ours[i][:-1], sample["tokens"])
        np.testing.assert_array_equal(ours[i][1:], sample["labels"])
