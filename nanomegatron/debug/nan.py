"""--debug-nan: stop at the first module, on each rank, that gets or makes numbers that are not finite.

Every module's inputs and outputs and the gradients of both are checked before the next computation, so before
ranks sum them; weight gradients once complete. The message has the ranges of the module's inputs and weights.
The host waits for each, so a step is slow; without the flag there are no hooks.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from nanomegatron.debug.record import module_names, tensors_of, watched
from nanomegatron.dp import Bucket, ParamAndGradBuckets
from nanomegatron.faults.health import BadSteps
from nanomegatron.mesh import Mesh
from nanomegatron.pp import ModelChunks


def stop_at_nan(model: ModelChunks, grads: ParamAndGradBuckets, mesh: Mesh) -> None:
    """Add the hooks to modules and buckets. What they find is raised as BadSteps, on the rank that has it."""
    for chunk in model:
        for module, name in module_names(chunk).items():
            module.register_forward_pre_hook(partial(_before, name, mesh))
            module.register_forward_hook(partial(_after, name, mesh))
    grads.before_reduce["nan"] = partial(_before_sum, mesh)


def _before(name: str, mesh: Mesh, module: nn.Module, args: tuple) -> tuple:
    inputs = [x.detach() for x in tensors_of(args)]
    for x in inputs:
        _check(f"the input of {name}", module, inputs, mesh, x)
    look = partial(_check, f"the gradient that {name} returns for input", module, inputs, mesh)
    return tuple(watched(x, look) if tensors_of(x) and not isinstance(x, tuple) else x for x in args)


def _after(name: str, mesh: Mesh, module: nn.Module, args: tuple, output: Any) -> None:
    inputs = [x.detach() for x in tensors_of(args)]
    look = partial(_check, f"the gradient of the output of {name}", module, inputs, mesh)
    for x in tensors_of(output):
        _check(f"the output of {name}", module, inputs, mesh, x)
        if x.requires_grad:
            x.register_hook(look)  # it looks before the backward, which may sum over ranks


def _before_sum(mesh: Mesh, bucket: Bucket) -> None:
    for param, grad in zip(bucket.params, bucket.views(bucket.grads), strict=True):
        _check(f"the gradient of {param.spec.name}", None, [], mesh, grad)


def _check(what: str, module: nn.Module | None, inputs: list, mesh: Mesh, x: torch.Tensor) -> None:
    """Raise BadSteps if x `[...]` is not finite. module, inputs: whose ranges the message has."""
    if bool(x.isfinite().all()):
        return
    ranges = [f"input {i}: {value_range(each)}" for i, each in enumerate(inputs)]
    weights = module.named_parameters(recurse=False) if module else ()
    ranges += [f"{kind}: {value_range(each)}" for kind, each in weights]
    first = f"--debug-nan: {what} is not finite on {mesh.label}: {value_range(x)}"
    raise BadSteps("\n  ".join([first, *ranges]))


def value_range(x: torch.Tensor) -> str:
    """Smallest, largest and largest absolute finite value of x `[...]`, and how many are not finite."""
    x = x.detach().float()
    finite, nan, inf = x[x.isfinite()], int(x.isnan().sum()), int(x.isinf().sum())
    bad = f", {nan} NaN and {inf} infinite of {x.numel()}" if nan or inf else ""
    if not len(finite):
        return f"no finite value{bad}"
    return f"min {finite.min():.3g}, max {finite.max():.3g}, absmax {finite.abs().max():.3g}{bad}"
