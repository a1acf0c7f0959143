"""An observer of your own: the gradient noise scale, the batch size beyond which larger ones gain little.

    python examples/noise_scale.py --nproc 2 --train-iters 30 --run-name noise      (flags of train.py)

Every rank's gradient g_r is of B/d of the batch's B samples, their mean g of all. From both norms follow the
squared norm of the true gradient and the variance of a sample's; their ratio is the noise scale, in samples:

    |G|^2 = (B |g|^2 - B/d mean |g_r|^2) / (B - B/d)
    S     = (mean |g_r|^2 - |g|^2) / (d/B - 1/B)                 noise scale = S / |G|^2

Each is averaged over steps first. It is among the numbers of metrics.jsonl. (arXiv 1812.06162, appendix A)
"""

import sys

import torch

import train
from nanomegatron.launch.start import start_run
from nanomegatron.mesh import World
from nanomegatron.step import LocalNumbers, Observer, Training

DECAY = 0.9  # of the averages over steps


class NoiseScale(Observer):
    """Logs `noise_scale`, from the second step on. Sums a number over all ranks, with the loss."""

    def __init__(self, run: Training) -> None:
        mesh = run.mesh
        if mesh.dp.size < 2 or mesh.dp.size < mesh.world.size or run.buckets.overlap_reduce:
            raise ValueError(
                "the noise scale needs replicas alone: --nproc 2 or more, no --overlap-grad-reduce"
            )
        self.run = run
        self.ranks = mesh.dp.size
        self.averages = [0.0, 0.0]

    def before_sync(self) -> LocalNumbers:
        """Square this rank's own gradient, of which the step's is the sum."""
        scale = self.run.optimizer.scaler.scale * self.run.buckets.loss_factor
        squares = [bucket.grads.float().square().sum() for bucket in self.run.buckets.all]
        return {"noise_scale": torch.stack(squares).sum() / scale.square()}

    def after_step(self, step) -> None:
        """Put the noise scale in the place of the sum of squares."""
        large = step.batch.size
        small = large / self.ranks
        of_ranks = step.numbers.pop("noise_scale") * self.ranks
        of_all = step.numbers["grad_norm"] ** 2
        signal = (large * of_all - small * of_ranks) / (large - small)
        noise = (of_ranks - of_all) / (1 / small - 1 / large)
        pairs = zip(self.averages, (signal, noise), strict=True)
        self.averages = [DECAY * average + (1 - DECAY) * new for average, new in pairs]
        if step.batch.iteration > 1:
            step.numbers["noise_scale"] = self.averages[1] / self.averages[0]


def run_rank(world: World, argv: list[str]) -> int:
    """train.py on a rank, with the observer."""
    return train.run_rank(world, argv, [NoiseScale])


if __name__ == "__main__":
    sys.exit(start_run(sys.argv[1:], train.settings, run_rank))
