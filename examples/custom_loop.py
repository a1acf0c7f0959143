"""A training loop of your own: the library without train.py, on documents that count 1 2 3 ...

    torchrun --nproc-per-node 2 examples/custom_loop.py

Every rank runs this file. Two processes share the model (tp), further ones the samples (dp): python alone,
torchrun with 2 or with 4 processes print the same losses.
"""

import torch

from nanomegatron.comm import all_reduce_
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig, ParallelConfig
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.data.loader import BatchLoader
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.model import GPTModel
from nanomegatron.optim import Optimizer
from nanomegatron.param import Init

STEPS, MICROBATCHES, BATCH, LR, DECAY = 20, 2, 8, 1e-2, 0.01  # BATCH: samples of a microbatch, all ranks


def main() -> None:
    """Mesh, data, model, optimizer, loop."""
    world = World.from_environment()
    parallel = ParallelConfig(tensor_model_parallel_size=min(2, world.size), use_distributed_optimizer=True)
    mesh = Mesh.build(parallel, world, pick_device("auto", world))
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
    data = DataConfig(mock_data=True, vocab_size=100, seq_length=64, micro_batch_size=BATCH // mesh.dp.size)
    tokenizer = choose_tokenizer(data)
    dataset, *_ = build_datasets(data, (STEPS * MICROBATCHES * BATCH, 0, 0), 1234, tokenizer)
    loader = BatchLoader(dataset, data, tokenizer.eod, mesh.dp, mesh.device)
    shape = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, sequence_parallel=True)
    sizes = dict(vocab_size=tokenizer.vocab_size, max_sequence_length=data.seq_length)
    model = GPTModel(shape, **sizes, mesh=mesh, init=Init(seed=1234, device=mesh.device))
    buckets = ParamAndGradBuckets(model, parallel, mesh)
    values = [[LR] * STEPS, [LR] * STEPS, [DECAY] * STEPS]  # by step: learning rate, the vocabulary's, decay
    optimizer = Optimizer(buckets, Config().optimizer, Config().precision, values)
    for step in range(STEPS):
        batches = [loader.get((step * MICROBATCHES + i) * BATCH) for i in range(MICROBATCHES)]
        count = all_reduce_(sum(batch.loss_mask.sum() for batch in batches), mesh.dp_cp)
        mean = torch.zeros((), device=mesh.device)  # of the loss, over all samples of all ranks
        buckets.zero_grad_buffer(MICROBATCHES)
        for batch in batches:
            loss = (model(batch, batch.labels) * batch.loss_mask).sum() / count  # of each token [b, s]
            loss.backward()
            mean += loss.detach()
        buckets.finish_grad_sync()
        stats = optimizer.step(all_reduce_(mean, mesh.dp_cp))
        if mesh.rank == 0:
            print(f"step {step + 1:2d}  loss {mean:.4f}  gradient norm {stats.grad_norm:.4f}", flush=True)
    loader.close()
    Mesh.close()


if __name__ == "__main__":
    main()
