"""Cases of the matmuls of linear layers and the output layer, with cuBLASLt's algorithm chosen by time.

torch: its own choice; first: the first of the library's list, as `--gemm-autotune` has it; tuned: the fastest
of the list under load. `algorithm` is its number in the list. A sample takes 60 ms, so that clock and power
are those of the form. y = x W^T, dx = g W, dW += g^T x in fp32; with fp8 by torch's `_scaled_mm`, and dW by
the library's best for one answer. Values are random: of zeros a GPU is faster.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.layer_cases import LAYERS
from benchmarks.session import Case, Run, Session
from nanomegatron.fp8 import Recipe, Scales
from nanomegatron.ops.fp8_matmul import add_fp8_product_, fp8_matmul
from nanomegatron.ops.tuner import Tuner, tuner_unavailable
from nanomegatron.param import add_product, product

bind = functools.partial
MODELS = {  # input and output features
    "llama": {name: sizes[:2] for name, sizes in LAYERS.items()} | {"head": (4096, 128256)},
    "gpt2": {
        "qkv": (768, 2304),
        "proj": (768, 768),
        "fc1": (768, 3072),
        "fc2": (3072, 768),
        "head": (768, 50304),
    },
}
ROWS = 8192, 16384


class Gemms:
    """The three matmuls of one layer. x `[t, i]`, W `[o, i]`, g `[t, o]`, bf16."""

    def __init__(self, t: int, i: int, o: int, device: torch.device) -> None:
        self.t, self.i, self.o = t, i, o
        self.device = device

    @functools.cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """x, w, g and the gradient dw in fp32, made at their first use."""
        shapes = {"x": (self.t, self.i, 1.0), "w": (self.o, self.i, 0.02), "g": (self.t, self.o, 1e-3)}
        make = bind(torch.randn, device=self.device)
        values = {role: (make(m, n) * scale).bfloat16() for role, (m, n, scale) in shapes.items()}
        return values | {"dw": torch.zeros(self.o, self.i, device=self.device)}

    @functools.cached_property
    def casts(self) -> dict:
        """x, w and g in FP8, with one scale each."""
        layer = Scales(Recipe("tensorwise"), self.device).add_layer("layer")
        return {role: layer.cast(self.values[role], role) for role in "xwg"}

    def bf16(self, name: str, tuner: Tuner | None) -> Callable:
        """Of y, dx or dW."""
        x, w, g, dw = self.values.values()
        if name == "dW":
            return bind(add_product, dw, g, x, tuner=tuner)
        return bind(product, x, w.t(), tuner) if name == "y" else bind(product, g, w, tuner)

    def fp8(self, name: str, tuner: Tuner | None) -> Callable:
        """Of y, dx or dW."""
        x, w, g = self.casts.values()
        if name == "dW":
            return bind(add_fp8_product_, self.values["dw"], g.columnwise, x.columnwise, tuner=tuner)
        a, b = (x.rowwise, w.rowwise) if name == "y" else (g.rowwise, w.columnwise)
        return bind(fp8_matmul, a, b, torch.bfloat16, name == "y", tuner)

    def run(self, precision: str, name: str, time: Callable | None) -> Run:
        """With the algorithm that is chosen by `time`. Raises RuntimeError where the library is not."""
        if why := tuner_unavailable(self.device):
            raise RuntimeError(why)
        tuner = Tuner(Path(tempfile.gettempdir()) / "there are no times here", "", writes=False, time=time)
        call = getattr(self, precision)(name, tuner)
        call()
        if not tuner.problems:
            raise RuntimeError(f"{name}: torch's, since the addresses are not aligned")
        (tuned,) = tuner.problems.values()
        return Run(call, facts={"algorithm": tuned.choice + 1, "algorithms": tuned.candidates})


def alike(run: Callable[[int], None], count: int) -> list[float]:
    """Times that make a tuner choose the first of the list."""
    return [1.0] * count


def cases(session: Session) -> Iterator[Case]:
    """Of each layer of both models; the output layer is not in FP8."""
    shrink, rows = (32, (64,)) if session.args.small else (1, ROWS)
    for model, t in ((model, t) for model in MODELS for t in rows):
        for layer, (i, o) in MODELS[model].items():
            gemms = Gemms(t, *(size // shrink // 16 * 16 for size in (i, o)), session.device)
            for precision in ("bf16", "fp8") if layer != "head" else ("bf16",):
                for name in ("y", "dx", "dW"):
                    plain = bind(getattr(gemms, precision), name, None)
                    forms = {"torch": plain, "first": bind(gemms.run, precision, name, alike)}
                    forms["tuned"] = bind(gemms.run, precision, name, None)
                    expected = None if name == "dW" else lambda plain=plain: (plain()(),)
                    flops = 2.0 * t * gemms.i * gemms.o
                    yield Case(
                        f"{model} {t} {precision} {layer} {name}", forms, flops=flops, expected=expected
                    )
