"""The compiled kernels: for which tensors they can be used, and how they are launched.

    a tensor on a GPU for which the extension was built      the kernel of cuda/
    anything else, and all `with without_kernels():`         the reference, plain torch

A kernel gets addresses, sizes and the current stream, and checks nothing: the caller of `launch_kernel` makes
sure that all tensors are contiguous, on one device, and of the types and shapes that the .cu file states. A
launch is asynchronous and takes the host some microseconds.

An autograd.Function calls a kernel's binding directly, which takes the host least; an op that overwrites its
input reports that to autograd. torch.compile and torch.export see nothing of a kernel: they need
`without_kernels()`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch

try:
    from nanomegatron import _kernels
except ImportError as error:  # if a file exists and cannot be loaded, this says why
    _kernels, MISSING = None, str(error)
else:
    MISSING = ""

TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = "plain torch, for a forward inside nanomegatron.ops.kernels.without_kernels(),"


class Switch:
    """`with without_kernels():` runs the references: to compare with, or for second derivatives.

    It applies to the whole process: a backward recomputes activations on a thread of autograd, which would
    not see thread-local or context variables.
    """

    def __init__(self) -> None:
        self.off = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before


without_kernels = Switch()


def kernels_unavailable(device: torch.device) -> str:
    """The reason why kernels do not run on a device; "" if they do."""
    return "they are switched off" if without_kernels.off else _unfit(device)


@functools.cache
def _unfit(device: torch.device) -> str:
    if device.type != "cuda":
        return f"there are none for {device.type}"
    major, minor = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)
    if 0 < major < 8:
        return f"they need Ampere (sm_80), this GPU is sm_{major}{minor} (bf16 is slow on it: use --fp16)"
    if _kernels is None:
        return f"the extension is not built ({MISSING}); pip install . where nvcc is"
    if not major:
        return "there is no GPU here"
    fits = {f"sm_{major}{minor}a", *(f"sm_{major}{i}" for i in range(minor + 1))} & {*_kernels.archs.split()}
    return "" if fits else f"the extension is built for {_kernels.archs}, this GPU is sm_{major}{minor}"


def usable(x: torch.Tensor, op: str, types: tuple[torch.dtype, ...] = FLOATS) -> bool:
    """Whether kernels support x `[...]`; if not, and x is on a GPU, warns once per op and dtype."""
    if not x.is_cuda:
        return False
    if x.dtype in types and not kernels_unavailable(x.device):
        return True
    if not without_kernels.off:
        _tell(op, x.dtype, x.device)
    return False


def check_fits(
    what: str, x: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless x `[...]`, if there is one, has this shape, type and device; what: its name."""
    if x is not None and (x.shape, x.dtype, x.device) != (shape, dtype, device):
        raise ValueError(
            f"{what} {x.dtype} {list(x.shape)} on {x.device}: must be {dtype} {list(shape)} on {device}"
        )


@functools.cache
def _tell(op: str, dtype: torch.dtype, device: torch.device) -> None:
    why = _unfit(device) or "they are for fp32, bf16 and fp16"
    warnings.warn(f"{op} of {dtype} on {device} runs in plain torch, without kernels: {why}", stacklevel=3)


def once(backward: Callable, instead: str = PLAIN) -> Callable:
    """Decorate a backward that has no derivative: differentiating its results raises RuntimeError.

    instead: the alternative that has one, for the message. (torch's once_differentiable raises nothing if the
    incoming gradient is a constant, as that of a sum: second derivatives are then wrong.)
    """
    name = backward.__qualname__.partition(".")[0]
    error = f"{name} is once_differentiable: it has no second derivative; {instead} has one"

    @functools.wraps(backward)
    def run(ctx, *grads: torch.Tensor | None) -> tuple | torch.Tensor | None:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        leaves = [t if t is None else t.detach().requires_grad_() for t in found]
        return torch._C._functions.DelayedError(error.encode(), len(leaves))(*leaves)

    return run


def launch_kernel(name: str, *args: torch.Tensor | float | None) -> None:
    """Launch a kernel on the current stream of the device that has all args `[...]`. Raises RuntimeError."""
    device = args[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch_kernel(name, *args)
    numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    getattr(_kernels, name)(*numbers, torch._C._cuda_getCurrentRawStream(device.index))
