"""Which implementation (kernel or torch) each op uses on this machine: `nanomegatron ops` prints it.

    rope             kernel
    adamw_           torch fused (there are none for cpu)

Whether the kernels are correct is for tests/gpu; tools/kernel_errors.py prints their errors.
"""

from collections.abc import Collection

import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops.kernels import kernels_unavailable

KERNELS = (
    "rms_norm layer_norm add_norm bias_dropout_add rope swiglu gelu squared_relu column_sums scaled_softmax"
    " cross_entropy adamw_ fp8_cast permute merge_rows embedding"
).split()
TORCHS = ("attention_dropout",)
FUSED = ("rms_norm", "layer_norm", "adamw_", "gelu")  # for which torch itself has one kernel
SWITCHES = {  # settings of a model that, if False, switch off the kernels of these ops
    "masked_softmax_fusion": ("scaled_softmax",),
    "rope_fusion": ("rope",),
    "bias_swiglu_fusion": ("swiglu",),
    "bias_dropout_fusion": ("bias_dropout_add",),
    "persist_layer_norm": ("rms_norm", "layer_norm", "add_norm"),
}


def paths(device: torch.device, off: Collection[str] = ()) -> dict[str, str]:
    """For each op what runs on `device`: "kernel", "torch fused" or "torch reference", and why no kernel.

    off: ops whose kernels are switched off.
    """
    plain = {op: f"torch {'fused' if op in FUSED else 'reference'}" for op in (*KERNELS, *TORCHS)}
    why = {op: kernels_unavailable(device) or ("switched off" if op in off else "") for op in KERNELS}
    ours = {op: f"{plain[op]} ({why[op]})" if why[op] else "kernel" for op in KERNELS}
    return ours | {op: f"{plain[op]} (has no kernel)" for op in TORCHS}


def describe_kernels(device: torch.device, model: TransformerConfig) -> str:
    """The result of `paths` for a model's settings, in one line."""
    if why := kernels_unavailable(device):
        apple = " (Apple's GPU is not used)" * torch.backends.mps.is_available()
        why = f"none for cpu{apple}" if device.type == "cpu" else f"none, {why}"
        return f"{why}: torch's fused {', '.join(FUSED)}; reference for the rest"
    off = [op for switch, ops in SWITCHES.items() if not getattr(model, switch) for op in ops]
    by_path: dict[str, list[str]] = {}
    for op, path in paths(device, off).items():
        by_path.setdefault(path, []).append(op)
    by_path = {ops_kernels._kernels.archs: by_path.pop("kernel")} | by_path
    return " | ".join(f"{path}: {', '.join(ops)}" for path, ops in by_path.items())
