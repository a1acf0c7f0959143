"""The quick start of Megatron Core, function by function, with the names that are here.

    torchrun --nproc-per-node 2 examples/quick_start.py

Two processes share the model (tp), further ones the samples (dp); python alone prints the same losses.
The checkpoint is written to ckpt/ in the current folder.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nanomegatron.batch import Batch
from nanomegatron.checkpoint.checkpoint import load, save, training_pieces
from nanomegatron.comm import all_reduce_
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig, ParallelConfig
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.data.loader import BatchLoader
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.megatron_api import forward_backward
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.model import GPTModel
from nanomegatron.optim import Optimizer
from nanomegatron.param import Init
from nanomegatron.pp import ModelChunks

ITERATIONS, LENGTH, BATCH = 5, 64, 8  # BATCH: samples of an iteration, all ranks


def initialize_distributed(tensor_model_parallel_size: int) -> tuple[ParallelConfig, Mesh]:
    """The layout and its groups; other functions get the mesh, there is no global state."""
    world = World.from_environment()
    parallel = ParallelConfig(tensor_model_parallel_size=min(tensor_model_parallel_size, world.size))
    mesh = Mesh.build(parallel, world, pick_device("auto", world))
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
    return parallel, mesh


def model_provider(mesh: Mesh) -> ModelChunks:
    """This rank's part of the model, all of whose weights follow from the seed."""
    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=4, use_cpu_initialization=True
    )
    init = Init(seed=123, device=mesh.device)
    return ModelChunks(
        [GPTModel(config, vocab_size=100, max_sequence_length=LENGTH, mesh=mesh, init=init)], mesh
    )


def get_train_data_iterator(mesh: Mesh) -> Iterator[Batch]:
    """The microbatches of this rank."""
    data = DataConfig(
        mock_data=True, vocab_size=100, seq_length=LENGTH, micro_batch_size=BATCH // mesh.dp.size
    )
    tokenizer = choose_tokenizer(data)
    dataset, *_ = build_datasets(data, (ITERATIONS * BATCH, 0, 0), 0, tokenizer)
    loader = BatchLoader(dataset, data, tokenizer.eod, mesh.dp, mesh.device)
    yield from (loader.get(i * BATCH) for i in range(ITERATIONS))
    loader.close()


def forward_step_func(mesh: Mesh) -> Callable:
    """Megatron's forward step: (iterator, model) -> (output, function of it that returns the loss)."""

    def forward_step(data_iterator: Iterator[Batch], model: GPTModel) -> tuple[torch.Tensor, Callable]:
        batch = next(data_iterator)

        def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            loss = (losses * batch.loss_mask).sum()
            tokens = batch.loss_mask.sum()
            total = all_reduce_(torch.stack((loss.detach(), tokens)), mesh.dp_cp)
            return loss, tokens, {"lm loss": total[0] / total[1]}

        return model(batch, batch.labels), loss_func

    return forward_step


def main() -> None:
    """Groups, model, gradients, optimizer, data, loop; a checkpoint written and read."""
    parallel, mesh = initialize_distributed(tensor_model_parallel_size=2)
    model = model_provider(mesh)
    buckets = ParamAndGradBuckets(model, parallel, mesh)  # beside the model, which nothing wraps
    values = [[1e-3] * ITERATIONS] * 2 + [
        [0.0] * ITERATIONS
    ]  # learning rates, weight decays of the iterations
    optimizer = Optimizer(buckets, Config().optimizer, Config().precision, values)
    train_iterator = get_train_data_iterator(mesh)
    for iteration in range(ITERATIONS):
        buckets.zero_grad_buffer(1)
        (losses_reduced,) = forward_backward(
            forward_step_func=forward_step_func(mesh),
            data_iterator=train_iterator,
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=BATCH // mesh.dp.size,
        )
        buckets.finish_grad_sync()  # finalize_model_grads
        optimizer.step(losses_reduced["lm loss"])
        if mesh.rank == 0:
            print(f"Iteration {iteration}: lm loss {losses_reduced['lm loss']:.4f}", flush=True)
    pieces = training_pieces(model.parameters(), {}, mesh)  # slices of global tensors: any layout reads them
    save(Path("ckpt"), ITERATIONS, pieces, {}, "", mesh)
    load(Path("ckpt"), pieces, mesh)
    if mesh.rank == 0:
        print("Successfully loaded the model from ckpt/", flush=True)
    Mesh.close()


if __name__ == "__main__":
    main()
