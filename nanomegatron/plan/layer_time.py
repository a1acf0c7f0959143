"""The seconds of a microbatch in a layer, and in the parts at both ends of the model, on one rank.

Letters as in `layer.py`: t tokens of a microbatch, h features, n of the query, g of keys or values, f of the
FFN, each on one tp rank; H features of the whole stream. A matmul of the forward has one of the same size for
the gradient of its input (B) and one for that of its weight (W).

    matmuls         t x (n + 2g) x H, t x H x n, t x 2f x H (gated, else f), t x H x f; output: t x V x H;
                    experts: c t rows instead of t
    attention       4 s t n / 2 FLOPs for rows of s tokens, causal; twice in the backward
    other kernels   bytes. Values of a token in the forward, and in the backward:
                    norm with add 4h, 4h; rotary 2(n + g), 2(n + g); gated unit 3f, 5f; GELU 2f, 3f;
                    loss V, 2V; permutation 6ch, 8ch; CAST_BYTES for casts of gradients to FP8
    tp              with sequence parallelism two all-gathers and a reduce-scatter of a pair of layers are
                    exposed, two more run beside matmuls; without it all-reduces of the same bytes
    cp              a ring beside attention; all-to-all and all-gather are exposed
    ep              dispatch and combine, forward and backward, are exposed
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from nanomegatron.plan.cluster import Cluster
from nanomegatron.plan.layer import CPMode, Sizes

LAYER_KERNELS = 16, 14, 7  # of a dense layer in F, B and W, without a graph
LAYER_GRAPHS = 2  # of a dense layer, with graphs of layers
EXPERT_KERNELS = 30, 24, 6  # more with experts
CAST_KERNELS = 4, 6, 2  # more with FP8
CAST_BYTES = 6  # read 2 and write 1 + 1 at two thirds of the bandwidth, since one copy is transposed
UNCAST = "bf16", "fp32"  # kinds of matmuls whose operands are not cast
OVERLAPPED = 0.3  # of tp's communication that matmuls in pieces leave exposed


class StageTime(NamedTuple):
    """The seconds of F, B and W of some layers for one microbatch, and of the three together by part."""

    seconds: tuple[float, float, float]
    ops: Counter


class LayerTimes:
    """The seconds of F, B and W in a layer of a run, by part."""

    def __init__(self, sizes: Sizes, cluster: Cluster) -> None:
        self.sizes, self.cluster = sizes, cluster
        model, precision = sizes.model, sizes.config.precision
        self.kind = {4: "fp32"}.get(sizes.item, "bf16")
        self.fp8 = precision.fp8_recipe if precision.fp8_format else None
        self.fp8_layers = precision.fp8_layers(model.num_layers)
        kinds = zip(model.moe_layers, sizes.cp_modes, model.windows, strict=True)
        kinds = [(*kind, number in self.fp8_layers) for number, kind in enumerate(kinds)]
        self.like = tuple(kinds.index(kind) for kind in kinds)  # the first layer that is computed like each

    def matmuls(self, m: float, n: float, k: float, kind: str) -> tuple[float, float, float]:
        """F, B and W of x `[m, k]` times a weight `[n, k]`."""
        run = self.cluster.matmul
        return run(m, n, k, kind), run(m, k, n, kind), run(n, k, m, kind)

    def layer(self, number: int) -> tuple[Counter, Counter, Counter]:
        """F, B and W of a layer; what is recomputed of its parts counts in B."""
        sizes, model = self.sizes, self.sizes.model
        moe, mode = model.moe_layers[number], sizes.cp_modes[number]
        ops = self._attention(number, mode), self._mlp(number, moe)
        forward, backward, weight = (sum(op, Counter()) for op in zip(*ops))
        again = self._again(ops, mode)
        in_fp8 = self._kind(number) not in UNCAST
        kernels = [a + b * moe + c * in_fp8 for a, b, c in zip(LAYER_KERNELS, EXPERT_KERNELS, CAST_KERNELS)]
        gaps = [Counter({"other kernels": n * self.cluster.gap}) for n in kernels]
        return forward + gaps[0], backward + again + gaps[1], weight + gaps[2]

    def _again(self, ops: tuple, mode: CPMode) -> Counter:
        """The time of selective recomputation."""
        sizes = self.sizes
        model = self.sizes.model
        (attention, mlp) = (op[0] for op in ops)
        parts: Counter = Counter()
        if model.recomputes("core_attn"):
            parts["attention"] = attention["attention"]
        if model.recomputes("mlp") or model.recomputes("moe"):
            parts += mlp
        values = 4 * sizes.h * model.recomputes("layernorm")
        acted = sizes.ffn(False) + sizes.copies * sizes.expert_ffn * bool(model.num_experts)
        values += 3 * acted * (model.recomputes("mlp_act") or model.recomputes("moe_act"))
        parts["other kernels"] += self._move(values)
        return parts

    def _move(self, values: float, item: float | None = None) -> float:
        """Seconds of a kernel that reads and writes this number of values of each token."""
        return self.cluster.move(values * self.sizes.tokens * (item or self.sizes.item))

    def _kind(self, number: int) -> str:
        return self.fp8 if number in self.fp8_layers else self.kind

    def _dense(self, shapes: list[tuple[float, float]], kind: str) -> list[Counter]:
        """F, B and W of matmuls of all tokens, (outputs, inputs) each, and of the FP8 casts for them."""
        sizes, parts = self.sizes, [Counter(), Counter(), Counter()]
        for n, k in shapes:
            for part, seconds in zip(parts, self.matmuls(sizes.tokens, n, k, kind), strict=True):
                part["matmuls"] += seconds
            if kind not in UNCAST:
                parts[1]["other kernels"] += self._move(n * (1 if n > 2 * k else 2), CAST_BYTES / 2)
                if kind != "delayed":  # scales of the current values: their maximum first
                    parts[0]["other kernels"] += self._move(3 * k, 2)
                    parts[1]["other kernels"] += self._move(3 * n, 2)
                if not sizes.config.precision.optimizer_casts(sizes.parallel.sharding != "no_shard"):
                    parts[0]["other kernels"] += self.cluster.move(4 * n * k)  # as if in each microbatch
        return parts

    def _attention(self, number: int, mode: CPMode) -> list[Counter]:
        sizes, model, kind = self.sizes, self.sizes.model, self._kind(number)
        hidden = model.hidden_size
        shapes = [(sizes.n + 2 * sizes.g, hidden), (hidden, sizes.n)]
        forward, backward, weight = self._dense(shapes, kind)
        window = model.windows[number]
        keys = sizes.row if window is None else min(2 * window, sizes.row)
        flops = 4 * keys / 2 * sizes.tokens * sizes.n
        seconds = self.cluster.attend(flops, sizes.row / mode.keys, model.head_dim)
        if sizes.backend == "unfused":
            scores = sizes.heads * sizes.row
            seconds = tuple(x + self._move(y * scores) for x, y in zip(seconds, (6, 8), strict=True))
        rotated = 2 * (sizes.n + sizes.g) * (model.position_embedding_type in ("rope", "yarn"))
        rotated += 3 * (sizes.n + sizes.g) * model.qk_layernorm
        forward["attention"], backward["attention"] = seconds
        forward["other kernels"] += self._move(4 * sizes.h + rotated)
        backward["other kernels"] += self._move(4 * sizes.h + rotated + 3 * sizes.n)
        return self._with_cp(self._with_tp([forward, backward, weight], kind), mode, seconds)

    def _mlp(self, number: int, moe: bool) -> list[Counter]:
        sizes, model, kind = self.sizes, self.sizes.model, self._kind(number)
        f, gated = sizes.ffn(moe), model.gated
        shapes = [(f * (2 if gated else 1), model.hidden_size), (model.hidden_size, f)] if f else []
        forward, backward, weight = self._dense(shapes, kind)
        forward["other kernels"] += self._move(4 * sizes.h + (3 if gated else 2) * f)
        backward["other kernels"] += self._move(4 * sizes.h + (5 if gated else 3) * f)
        ops = [forward, backward, weight]
        if f:
            ops = self._with_tp(ops, kind)
        return [a + b for a, b in zip(ops, self._experts(), strict=True)] if moe else ops

    def _experts(self) -> list[Counter]:
        sizes, model, cluster = self.sizes, self.sizes.model, self.cluster
        kind = self.fp8 if sizes.fp8_experts else "grouped"
        rows, h, f = sizes.copies * sizes.tokens / sizes.local_experts, model.hidden_size, sizes.expert_ffn
        parts = [Counter(), Counter(), Counter()]
        for n, k in ((f * (2 if model.gated else 1), h), (h, f)):
            for part, seconds in zip(parts, self.matmuls(rows, n, k, kind), strict=True):
                part["matmuls"] += seconds * sizes.local_experts
        moved, acted = sizes.copies * h, sizes.copies * f
        parts[0]["other kernels"] = self._move(6 * moved + 3 * acted)
        parts[1]["other kernels"] = self._move(8 * moved + 5 * acted)
        weights = sizes.local_experts * f * h * (3 if model.gated else 2)
        parts[2]["other kernels"] = cluster.move(12 * weights)  # gradients in 16 bits, then added in fp32
        ep = sizes.parallel.expert_model_parallel_size
        ranks = held = ep * sizes.etp
        tokens = sizes.tokens / sizes.config.sequence_cut
        if model.moe_token_dispatcher_type == "alltoall":
            held = ep * (1 - (1 - 1 / ep) ** model.moe_router_topk)  # ranks with any of a token's experts
        seconds = 2 * cluster.collective(tokens * h * sizes.item * held, ranks)
        for part in parts[:2]:
            part["ep communication"] = seconds
        return parts

    def _with_tp(self, ops: list[Counter], kind: str) -> list[Counter]:
        """The same with the communication of a pair of column- and row-parallel layers.

        With sequence parallelism FP8 layers gather bytes: rows of x, and of the gradient.
        """
        sizes, tp = self.sizes, self.sizes.tp
        if tp == 1:
            return ops
        values, cut = sizes.tokens * sizes.model.hidden_size, sizes.config.sequence_cut > 1
        once = self.cluster.collective(values * sizes.item, tp)  # an all-reduce is two of these
        gather = self.cluster.collective(values, tp) if cut and kind not in UNCAST else once
        exposed = [gather + once, gather if cut else 0.0]
        if sizes.parallel.tp_comm_overlap:
            exposed = [e * OVERLAPPED for e in exposed]
        for op, seen in zip(ops, exposed):
            op["tp communication"] += seen
        return ops

    def _with_cp(self, ops: list[Counter], mode: CPMode, attention: tuple[float, float]) -> list[Counter]:
        """The same with the communication of attention over cp."""
        sizes, cluster = self.sizes, self.cluster
        if sizes.parallel.context_parallel_size == 1:
            return ops
        if mode.heads > 1:
            whole = (2 * sizes.n + 2 * sizes.g) * sizes.value
            for op in ops[:2]:
                op["cp communication"] += cluster.collective(whole, mode.heads, sizes.tp)
        if mode.keys > 1:
            sent = 2 * sizes.g * sizes.value * mode.keys
            once = cluster.collective(sent, mode.keys, sizes.tp * mode.heads)
            # The backward sends keys again, and sums of their gradients in fp32.
            for op, seconds, compute in zip(ops, (once, 3 * once), attention):
                beside = 0.0 if mode.gathered else min(seconds, compute * (mode.keys - 1) / mode.keys)
                op["cp communication"] += seconds - beside
        return ops

    def ends(self, columns: int, first: bool, last: bool) -> tuple[Counter, Counter, Counter]:
        """F, B and W of embedding, last norm, output layer and loss. columns: of the logits on a rank."""
        sizes, hidden = self.sizes, self.sizes.model.hidden_size
        parts = [Counter(), Counter(), Counter()]
        kind = self.fp8 if sizes.fp8_head else self.kind
        if last:
            parts = self._dense([(columns, hidden)], kind)
            parts[0]["other kernels"] += self._move(columns + 3 * sizes.h)
            parts[1]["other kernels"] += self._move(2 * columns + 4 * sizes.h)
        if first:
            parts[0]["other kernels"] += self._move(2 * sizes.h)
            parts[2]["other kernels"] += self._move(6 * sizes.h)
        return tuple(self._with_tp(parts, kind) if last else parts)


layer_times = lru_cache(maxsize=1024)(LayerTimes)  # the same for all pipelines and replicas: `sizes_of`


@lru_cache(maxsize=1024)
def layer_time(times: LayerTimes, number: int, again: bool) -> StageTime:
    """Return the time of a layer; again: B computes all of F again."""
    forward, backward, weight = times.layer(number)
    ops = forward, backward + forward if again else backward, weight
    return StageTime(tuple(op.total() for op in ops), sum(ops, Counter()))


@lru_cache(maxsize=8192)
def stage_time(times: LayerTimes, like: tuple[int, ...], columns: int, first: bool, last: bool) -> StageTime:
    """Return the time of a stage. like: of `times`, of its layers; columns: of the logits on a rank."""
    ends = times.ends(columns, first, last)
    seconds = [op.total() for op in ends]
    ops = sum(ends, Counter())
    for run, again in times.sizes.model.segments(len(like)):
        for number, count in Counter(like[i] for i in run).items():
            layer = layer_time(times, number, again)
            seconds = [x + y * count for x, y in zip(seconds, layer.seconds, strict=True)]
            ops = ops + Counter({part: x * count for part, x in layer.ops.items()})
    return StageTime(tuple(seconds), ops)
