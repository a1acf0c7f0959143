"""What a cluster's GPUs and links reach, and how long single operations take there.

    matmul [m, k] x [k, n]    2 m n k / (rate * k / (k + RAMP) * busy), and never less than its bytes take
                              busy: the share of multiprocessors at work, as tiles come in whole waves
    attention                 FLOPs of causal rows / (rate * s / (s + ROW_RAMP)); rate by features of a head
    other kernels             bytes read and written / bandwidth
    collective over n ranks   bytes * (n - 1) / n / bandwidth + (n - 1) * latency   (ring; alpha-beta model)

Rates are those that training reaches, where power sets the clock, not those of one matmul by itself. Files:
presets/clusters/*.toml, or one that `tools/calibrate.py` has written.
(Ring collectives: Thakur et al., 2005; tile quantization: NVIDIA's matmul background guide)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanomegatron.config.user_files import parse_toml, read_text
from nanomegatron.plan.gpus import PEAKS

CLUSTERS = Path(__file__).resolve().parents[1] / "presets/clusters"
RAMP = 60  # values along k in bf16, and more at higher rates, to fill and to empty a matmul's pipeline
ROW_RAMP = 1400  # tokens, the same for rows of attention
TILE = 128 * 256  # values of a matmul's result that a multiprocessor computes at a time
WAVE = 132  # multiprocessors
SPLIT = 2048  # values along k of a part, where a matmul with few tiles is cut along k


@dataclass(frozen=True)
class LinkRate:
    """Bytes per second in each direction of a GPU, and seconds until the first byte arrives."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, eq=False)
class Cluster:
    """GPUs of one kind, some to a node. FLOP/s, bytes per second, seconds."""

    name: str
    gpu: str
    gpus_per_node: int
    bandwidth: float  # of kernels, read and written together
    matmuls: dict[str, float]  # FLOP/s: bf16, the FP8 recipes, grouped (of experts), fp32
    attention: dict[int, tuple[float, float]]  # FLOP/s forward and backward, by features of a head
    nvlink: LinkRate
    network: LinkRate
    launch: float  # of a kernel without a CUDA graph: what Python, autograd and CUDA need
    gap: float  # between two kernels that the GPU has at hand
    host_link: float  # to the host's memory
    host_bandwidth: float  # of the optimizer on the host, all its bytes together
    peak: float  # dense FLOP/s in bf16, by the data sheet
    memory_gb: float

    def matmul(self, m: float, n: float, k: float, kind: str = "bf16") -> float:
        """Seconds of `[m, k] x [k, n]`, of a kind of `matmuls`."""
        if not m * n * k:
            return 0.0
        tiles = m * n / TILE
        tiles *= 1 if kind == "grouped" or tiles > WAVE else max(1, k / SPLIT)
        busy = 1.0 if kind == "grouped" else tiles / (math.ceil(tiles / WAVE) * WAVE)
        full = self.matmuls[kind if kind in self.matmuls else "tensorwise"]  # also of recipes not measured
        rate = full * (0.9 + 0.1 * busy if tiles > WAVE else busy)
        rate *= k / (k + RAMP * full / self.matmuls["bf16"])
        item = 2 if kind in ("bf16", "grouped") else 1
        return max(2 * m * n * k / rate, self.move((m * k + k * n) * item + 2 * m * n))

    def attend(self, flops: float, s: float, d: int) -> tuple[float, float]:
        """Seconds of forward and backward; flops: of the causal forward, with rows of s keys, heads of d."""
        nearest = min(self.attention, key=lambda size: abs(size - d))
        reached = s / (s + ROW_RAMP)
        forward, backward = self.attention[nearest]
        return flops / (forward * reached), 2 * flops / (backward * reached)

    def move(self, size: float) -> float:
        """Seconds of a kernel that reads and writes `size` bytes together."""
        return size / self.bandwidth

    def link(self, ranks: int, stride: int) -> LinkRate:
        """What a ring over ranks that are `stride` apart reaches: several of a node share its network."""
        inside = max(1, self.gpus_per_node // stride)
        if ranks <= inside:
            return self.nvlink
        return LinkRate(min(self.nvlink.bandwidth, self.network.bandwidth * inside), self.network.latency)

    def collective(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter of `size` bytes over all ranks, or an all-to-all."""
        if ranks == 1 or not size:
            return 0.0
        link = self.link(ranks, stride)
        return size * (ranks - 1) / ranks / link.bandwidth + min(ranks - 1, 32) * link.latency


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster by the name of its GPU or from a file. Raises ValueError for what is neither."""
    known = sorted(path.stem for path in CLUSTERS.glob("*.toml"))
    path = Path(name_or_path)
    card = next((gpu for gpu, *_ in PEAKS if gpu.casefold() in name_or_path.casefold()), name_or_path)
    if path.suffix != ".toml" and card.casefold() in known:  # a PCIe card or a GB200 has other rates
        path = CLUSTERS / f"{card.casefold()}.toml"
    if not path.is_file():
        raise ValueError(f"cluster {name_or_path}: must be a TOML file or one of {', '.join(known)}")
    try:
        values = parse_toml(read_text(path))
        if wrong := [*wrong_values(values, parse_toml(read_text(CLUSTERS / "a100.toml")))]:
            raise ValueError("; ".join(wrong))
        return read_cluster(path.stem, values)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"cluster {path}: {what}; see {CLUSTERS}/h100.toml") from None


def wrong_values(values: dict, least: dict, table: str = "") -> Iterator[str]:
    """Yield an error for what `least` has and `values` lacks, and for what is no number above 0."""
    if table != "attention.":  # any widths of heads
        yield from (f"{table}{name} is missing" for name in least if name not in values)
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(least.get(name), dict):
            yield from wrong_values(value, least[name], f"{name}.")
            continue
        numbers = value if table == "attention." and isinstance(value, list) else [value]
        if table + name != "gpu" and not all(type(n) in (int, float) and n > 0 for n in numbers):
            yield f"{table}{name} = {value!r}: must be a number above 0"


def read_cluster(name: str, values: dict) -> Cluster:
    """Make a cluster of a file's values, in TFLOP/s, GB/s and microseconds. Raises KeyError for a lack."""
    links = {
        key: LinkRate(values[key]["bandwidth"] * 1e9, values[key]["latency"] * 1e-6)
        for key in ("nvlink", "network")
    }
    peak, size = next(((bf16, size) for gpu, bf16, _, size in PEAKS if gpu == values["gpu"]), (None, None))
    return Cluster(
        name=name,
        gpu=values["gpu"],
        gpus_per_node=values["gpus_per_node"],
        bandwidth=values["bandwidth"] * 1e9,
        matmuls={kind: rate * 1e12 for kind, rate in values["matmul"].items()},
        attention={int(d): (f * 1e12, b * 1e12) for d, (f, b) in values["attention"].items()},
        launch=values["launch"] * 1e-6,
        gap=values["gap"] * 1e-6,
        host_link=values["host_link"] * 1e9,
        host_bandwidth=values["host_bandwidth"] * 1e9,
        peak=(peak or values["peak"]) * 1e12,
        memory_gb=size or values["memory"],
        **links,
    )
