"""--debug-nan: stop at the first module, on each rank, that turns finite numbers into others.

Every module's output, and the gradient that it returns for each input, is checked as soon as it is computed.
The message has the ranges of the module's inputs and weights. The host waits for each, so a step is slow;
without the flag there are no hooks.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from nanomegatron.debug.record import module_names, tensors_of, watched
from nanomegatron.faults.health import BadSteps
from nanomegatron.mesh import Mesh
from nanomegatron.pp import Stages


def stop_at_nan(model: Stages, mesh: Mesh) -> None:
    """Add the hooks to all modules. What they find is raised as BadSteps, on the rank that has it."""
    for chunk in model:
        for module, name in module_names(chunk).items():
            module.register_forward_pre_hook(partial(_before, name, mesh))
            module.register_forward_hook(partial(_after, name, mesh))


def _before(name: str, mesh: Mesh, module: nn.Module, args: tuple) -> tuple:
    inputs, what = [x.detach() for x in tensors_of(args)], f"the gradient that {name} returns for input"

    def look(grad: torch.Tensor) -> None:
        _check([grad], what, module, inputs, mesh)

    return tuple(watched(x, look) if tensors_of(x) and not isinstance(x, tuple) else x for x in args)


def _after(name: str, mesh: Mesh, module: nn.Module, args: tuple, output: Any) -> None:
    _check(tensors_of(output), f"the output of {name}", module, tensors_of(args), mesh)


def _check(found: Iterable, what: str, module: nn.Module, inputs: list, mesh: Mesh) -> None:
    bad = [x for x in found if not bool(x.isfinite().all())]
    if bad:
        ranges = [f"input {i}: {value_range(x)}" for i, x in enumerate(inputs)]
        weights = module.named_parameters(recurse=False)
        ranges += [f"{kind}: {value_range(x)}" for kind, x in weights]
        first = f"--debug-nan: {what} is not finite on {mesh.label}: {value_range(bad[0])}"
        raise BadSteps("\n  ".join([first, *ranges]))


def value_range(x: torch.Tensor) -> str:
    """Smallest, largest and largest absolute finite value of x `[...]`, and how many are not finite."""
    x = x.detach().float()
    finite, nan, inf = x[x.isfinite()], int(x.isnan().sum()), int(x.isinf().sum())
    bad = f", {nan} NaN and {inf} infinite of {x.numel()}" if nan or inf else ""
    if not len(finite):
        return f"no finite value{bad}"
    return f"min {finite.min():.3g}, max {finite.max():.3g}, absmax {finite.abs().max():.3g}{bad}"
