"""Weights in FP8 cast by AdamW's kernel and gathered as bytes, over NCCL and by copy engines."""

import numpy as np
import pytest
import torch

from tests.gpu.test_layouts import ALL, LAYOUTS, train

FP8 = "--bf16 --fp8-format hybrid --deterministic-mode --fp8-recipe"
CASES = {"z1": (2, "--use-distributed-optimizer"), "z1ov": (2, f"--use-distributed-optimizer {ALL}")}
CASES |= {name: LAYOUTS[name] for name in ("dp2z2av", "dp4z1ov", "pp2v2dp2z1ov")}
CASES["tp2dp2z1sp"] = 4, f"--tp 2 --sp --use-distributed-optimizer {ALL}"


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("layout", CASES)
def test_it_is_the_run_that_casts_at_first_use(layout, recipe, tmp_path):
    """The same numbers, with statistics and a save in between."""
    processes, flags = CASES[layout]
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    flags = f"{flags} {FP8} {recipe} --save-interval 5 --log-fp8-stats 4"
    plain, gathered = (
        train(tmp_path, name, processes, f"{flags} {more}")
        for name, more in (("plain", ""), ("gathered", "--fp8-param-gather"))
    )
    for key in ("lm_loss", "grad_norm"):
        np.testing.assert_allclose(*([step[key] for step in run] for run in (gathered, plain)), rtol=1e-6)
