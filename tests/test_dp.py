"""Gradients summed over replicas against one process that sees all samples."""

import pytest
import torch
from torch import nn

from nanomegatron.config import TransformerConfig
from nanomegatron.dp import GradBuffer, flat_views
from nanomegatron.mesh import Axis
from nanomegatron.model import GPTModel, Tokens
from nanomegatron.param import Init, ParamSpec, new_parameter, replica
from tests.spmd import run_spmd

TIED = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.1)
UNTIED = TransformerConfig(**{**vars(TIED), "untie_embeddings_and_output_weights": True, "swiglu": True})
VOCAB, SEQUENCE, SAMPLES = 29, 8, 8


def gradients(config, samples, micro_batch, dp_cp):
    """main_grad of every parameter after these samples of the global batch, one microbatch at a time."""
    model = GPTModel(
        config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, padded_vocab_size=32, init=Init(seed=1)
    )
    buffer = GradBuffer(model.parameters(), dp_cp)
    data = torch.randint(VOCAB, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    for ids in torch.tensor(samples).split(micro_batch):
        batch = Tokens(data[ids, :-1], torch.arange(SEQUENCE), ids, dropout_seed=5)
        loss = model(batch, data[ids, 1:]).sum() / (SAMPLES * SEQUENCE)  # tokens of the whole global batch
        loss.backward()
    buffer.grad_sync()
    return model, buffer


def on_a_replica(mesh, config):
    samples = list(range(mesh.dp_cp.rank, SAMPLES, mesh.dp_cp.size))
    model, _ = gradients(config, samples, 2, mesh.dp_cp)
    assert mesh.traffic["dp_cp", "all_reduce", "calls"] == 1
    assert mesh.traffic["dp_cp", "all_reduce", "bytes"] == 4 * sum(p.numel() for p in model.parameters())
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("world, cp", [(2, 1), (4, 2)])
def test_replicas_are_one_process(config, world, cp):
    """Also where dp and cp share the sum: every sample counts once."""
    whole, _ = gradients(config, range(SAMPLES), SAMPLES, Axis.single())
    for grads in run_spmd(on_a_replica, world, config, cp=cp):
        for name, p in whole.named_parameters():
            assert (grads[name] - p.main_grad).norm() <= 1e-5 * p.main_grad.norm() + 1e-8, name


def test_gradients_are_autograds():
    """main_grad against .grad of the same model without a buffer; tied weights add both contributions."""
    model, buffer = gradients(TIED, range(SAMPLES), 4, Axis.single())
    assert len(buffer.params) == len(list(model.parameters()))
    plain = GPTModel(
        TIED, vocab_size=VOCAB, max_sequence_length=SEQUENCE, padded_vocab_size=32, init=Init(seed=1)
    )
    data = torch.randint(VOCAB, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    batch = Tokens(data[:, :-1], torch.arange(SEQUENCE), torch.arange(SAMPLES), dropout_seed=5)
    plain(batch, data[:, 1:]).mean().backward()
    for (name, p), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is None and p.main_grad.shape == p.shape
        torch.testing.assert_close(p.main_grad, twin.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_buffer_is_flat_and_in_reverse_order():
    model, buffer = gradients(UNTIED, range(2), 2, Axis.single())
    grads = [p.main_grad.flatten() for p in reversed(list(model.parameters()))]
    assert torch.equal(buffer.flat, torch.cat(grads))
    assert grads[0].data_ptr() == buffer.flat.data_ptr(), "a view, not a copy"
    buffer.zero()
    assert all((p.main_grad == 0).all() for p in model.parameters())


def test_missing_gradient_is_named():
    """A layer that is not used, also in a later iteration."""
    model, buffer = gradients(UNTIED, range(2), 2, Axis.single())
    buffer.zero()
    model.embedding(Tokens(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4))).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        buffer.grad_sync()
    text = str(caught.value)
    for name in (
        "output_layer.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.final_layernorm.bias",
    ):
        assert name in text
    assert "embedding" not in text


def test_flat_views():
    params = [nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))]
    flat, views = flat_views(params, torch.float32)
    views[1].fill_(2.0)
    assert flat.tolist() == [0.0] * 6 + [2.0] * 4 and views[0].shape == (2, 3)


def test_moved_gradients_add_up_in_fp32():
    """256 + 1 is 256 in bf16; nothing is lost between microbatches."""
    spec = ParamSpec((replica("bias", (1,), Axis.single()),), (1,))
    param = new_parameter(spec, Init(dtype=torch.bfloat16), fill=1.0)
    buffer = GradBuffer([param], Axis.single())
    for value in 256.0, 1.0:
        (param * value).sum().backward()
    buffer.grad_sync()
    assert param.main_grad.item() == 257.0 and param.grad is None
