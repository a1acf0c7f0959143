"""Megatron Core's spellings of what is here, for code that was written for it. The core imports none of this.

Tests: tests/config/test_keywords.py. Page: docs/api.md.

    Megatron Core                                      here
    ColumnParallelLinear(..., gather_output=True)      tp.ColumnParallelLinear, then comm.gather_from
    RowParallelLinear(..., input_is_parallel=False)    comm.scatter_to, then tp.RowParallelLinear
    RowParallelLinear(..., skip_bias_add=True)         tp.RowParallelLinear, and its bias apart
    GPTModel(config, transformer_layer_spec=None)      model.GPTModel; the config is the spec
    get_forward_backward_func()                        forward_backward, which calls pp.run_schedule

A step of code that was written for Megatron:

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        output = model(batch, batch.labels)  # the last stage: the loss of each token
        return output, lambda output: (output.mean(), {"lm loss": output.mean().detach()})

    buckets.zero_grad_buffer(8)
    reports = forward_backward(forward_step_func=forward_step, data_iterator=batches, model=model, ...)
    buckets.finish_grad_sync()

`with_megatron_keywords` wraps a constructor: Megatron's other keywords are accepted if they change nothing;
else a TypeError says what to use instead, from the table in config/megatron_keywords.toml.
`TransformerConfig` takes them itself. (Megatron-LM, core 0.19)
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanomegatron import model as core_model
from nanomegatron import tp as core_tp
from nanomegatron.comm import gather_from, scatter_to
from nanomegatron.config.keywords import with_megatron_keywords
from nanomegatron.mesh import Axis
from nanomegatron.param import Init
from nanomegatron.pp import ModelChunks, run_schedule


def forward_backward(
    *,
    forward_step_func: Callable[[Iterator, core_model.GPTModel], tuple[torch.Tensor, Callable]],
    data_iterator: Iterator | list[Iterator] | None,
    model: ModelChunks,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[Any]:
    """What Megatron's `get_forward_backward_func()` returns, for forward steps written for that.

    forward_step_func(iterator, chunk) -> (output, loss_func); loss_func(output) -> (loss, report), or
    (loss, tokens, report) for a loss that is a sum. As in Megatron, the loss is divided by the number of
    microbatches and that of tokens, or without tokens multiplied by cp; and gradients in buckets become the
    mean over the dp x cp ranks. data_iterator: one, or one for each chunk, from which each forward takes its
    microbatch. seq_length: of whole rows, before cp shards them. Gradients are added to
    `ParamAndGradBuckets`: call this between their `zero_grad_buffer` and `finish_grad_sync`; without buckets
    they are added to `.grad`. fp16's loss scale and the weight of routers' losses are for forward_step_func.
    Returns the report of each microbatch on the rank of the last stage, an empty list on others.
    """
    several = isinstance(data_iterator, list | tuple)
    if len(model) > 1 and not several and data_iterator is not None:
        raise ValueError(f"data_iterator: one for each of the {len(model)} chunks of this rank is needed")
    iterators = dict(zip(model, data_iterator if several else [data_iterator] * len(model)))
    reports = []
    bucket = getattr(next(model.parameters()), "bucket", None)
    to_mean = 1.0
    if bucket is not None:
        to_mean = bucket.buckets.loss_factor / bucket.axis.size

    def step(chunk: core_model.GPTModel, _: int) -> torch.Tensor:
        output, loss_func = forward_step_func(iterators[chunk], chunk)
        if not chunk.post_process:
            return output
        loss, *tokens, report = loss_func(output)
        reports.append(report)
        if tokens:
            loss = loss / tokens[0].clamp(min=1)
        else:
            loss = loss * model.cp.size
        return loss * to_mean / num_microbatches

    run_schedule(
        model,
        step,
        num_microbatches,
        model.shape(seq_length // model.cp.size, micro_batch_size),
        forward_only,
    )
    return reports


@with_megatron_keywords
class GPTModel(core_model.GPTModel):
    """`model.GPTModel` that also takes Megatron's keywords."""


@with_megatron_keywords
class ColumnParallelLinear(core_tp.ColumnParallelLinear):
    """`tp.ColumnParallelLinear`, with `gather_output` whole on all ranks. x `[s, b, i]` -> `[s, b, o]`"""

    def __init__(
        self,
        input_size: int,
        output_size: int | dict[str, int | tuple[int, int]],
        tp: Axis,
        init: Init = Init(name="linear"),  # noqa: B008 (frozen)
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        if gather_output and isinstance(output_size, dict) and len(output_size) > 1:
            raise ValueError(f"{init.name}: gather_output would mix the parts {', '.join(output_size)}")
        super().__init__(input_size, output_size, tp, init, bias, skip_bias_add, sequence_parallel)
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> core_tp.Output:
        y = super().forward(x)
        if not self.gather_output:
            return y
        if not self.skip_bias_add:
            return gather_from(y, self.tp)
        return tuple(part if part is None else gather_from(part, self.tp) for part in y)


@with_megatron_keywords
class RowParallelLinear(core_tp.RowParallelLinear):
    """`tp.RowParallelLinear`, without `input_is_parallel` of a whole input. x `[s, b, i]` -> `[s, b, o]`

    With `skip_bias_add` it returns (y, bias) instead of their sum.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: Axis,
        init: Init = Init(name="linear"),  # noqa: B008 (frozen)
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(input_size, output_size, tp, init, bias, sequence_parallel)
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add

    def forward(self, x: torch.Tensor) -> core_tp.Output:
        if not self.input_is_parallel:
            x = scatter_to(x, self.tp)
        if self.skip_bias_add:
            return self.linear(x, self.weight, self.tp, self.comm), self.bias
        return super().forward(x)
