"""A layout as a word, `tp2dp2z1sp`: sizes of axes, then what is switched on.

tp2 dp2      processes that share a layer, and replicas      sp   sequence parallel
z1 z2        optimizer states, and gradients too, cut        ov   all overlaps there are
ce           loss fused with the output projection           rc   layers recomputed; rs: parts of them
bk           small buckets, so that there are many           av   averaged by the collective
co           optimizer states on the host (bf16 alone)
fp           all fast paths that can run; else the plain forms, and fast ones that other words ask for
pp2 pp4      pipeline stages; behind them v2, v4 for interleaved chunks, zb and zbv for
             deferred weight gradients (zb-h1, zb-v), gp for gpipe, uneven for a split by cost,
             ly for one in letters, with stages that have no layer
cp2 cp4      processes that share each row, in a ring; a2a, ag (all-gather), hi (a2a between two, a ring
             of these), mx (another way in each layer)
ep2 ep4      processes of these that share the experts, et with each expert whole on one, not cut over tp
eo so        the exchange of tokens overlapped: by halves, and with the shared experts
rm ra rh     recomputed: layers of experts, their activations, shared experts
"""

import re

LAYOUT_FLAGS = """
tp --tp {} | dp --dp {} | pp --pp {} | v --vpp {} | cp --context-parallel-size {}
ep --expert-model-parallel-size {} | et --expert-tensor-parallel-size 1 | fp --fast-paths
z1 --use-distributed-optimizer | z2 --data-parallel-sharding-strategy optim_grads
sp --sequence-parallel | ce --cross-entropy-loss-fusion | bk --ddp-bucket-size 4000
rc --recompute-granularity full --recompute-method uniform --recompute-num-layers 2
rs --recompute-activations --recompute-modules core_attn mlp_act layernorm
av --ddp-average-in-collective | co --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
zb --pipeline-schedule zb-h1 | zbv --pipeline-schedule zb-v | gp --pipeline-schedule gpipe
uneven --pipeline-split flops | ly --pipeline-model-parallel-layout Ett!!(t,)*2!L
a2a --cp-comm-type a2a | ag --cp-comm-type allgather | mx --cp-comm-type p2p a2a allgather p2p
hi --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2
eo --overlap-moe-expert-parallel-comm | so --moe-shared-expert-overlap
rm --recompute-activations --recompute-modules core_attn moe
ra --recompute-activations --recompute-modules core_attn moe_act layernorm
rh --recompute-activations --recompute-modules moe_act shared_experts
"""
LAYOUT_FLAGS = dict(
    entry.strip().split(" ", 1) for entry in re.split(r"[|\n]", LAYOUT_FLAGS) if entry.strip()
)
LAYOUT_WORD = re.compile(r"[tdpce]p\d+|v\d|z\d|zbv|uneven|a2a|[a-z]{2}")


def flags_of(layout: str) -> tuple[int, str]:
    """Return the number of processes of a layout, and its flags of train.py. Raises ValueError."""
    words = LAYOUT_WORD.findall(layout)
    names = [re.sub(r"(?<=p)\d+$|(?<=^v)\d$", "", word) for word in words]
    if unknown := [
        word for word, name in zip(words, names, strict=True) if name not in (*LAYOUT_FLAGS, "ov")
    ]:
        raise ValueError(f"layout {layout!r}: {unknown[0]!r} is no word of one; docs/debugging.md lists them")
    if not words or "".join(words) != layout:
        raise ValueError(f"layout {layout!r} is not made of words such as tp2, pp2, sp; docs/debugging.md")
    if "sp" in words and not re.search(r"tp([2-9]|1\d)", layout):
        raise ValueError(f"layout {layout!r}: sp cuts sequences over tp; give tp2sp, or leave it out")
    size, flags = 1, []
    for word, name in zip(words, names, strict=True):
        count = word.removeprefix(name)
        size *= int(count) if name in ("tp", "dp", "pp", "cp") else 1
        if name == "ov":
            sharded = "z1" in words or "z2" in words
            flags += ["--overlap-grad-reduce"] + ["--overlap-param-gather"] * sharded
            flags += ["--tp-comm-overlap"] * ("sp" in words)
        else:
            flags.append(LAYOUT_FLAGS[name].format(count).replace("!", "|"))
    return size, " ".join(flags)
