"""The router against megatron-core's own, under settings by chance: choice, losses, bias, gradients."""

import random

import torch

from nanomegatron.router import kept_tokens, move_expert_biases
from tests.megatron_oracle import Oracle
from tests.moe_routers import E, H, S, batch_of, close, router_of, settings

SAMPLES = 3
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def drawn(seed: int) -> dict:
    """Settings of a router that Megatron takes, as chance would have them."""
    chance = random.Random(seed)
    k = chance.choice([1, 2, 2, 3, 4])
    sigmoid = chance.random() < 0.6
    given = {"moe_router_topk": k, "moe_router_score_function": "sigmoid" if sigmoid else "softmax"}
    if sigmoid:
        given["moe_router_enable_expert_bias"] = chance.random() < 0.7
        given["moe_router_bias_update_rate"] = chance.choice([1e-3, 0.25])
    else:
        given["moe_router_pre_softmax"] = k == 1 or chance.random() < 0.5
    if k in (2, 4) and chance.random() < 0.4:
        given |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    if chance.random() < 0.4:
        given["moe_router_topk_scaling_factor"] = 2.5
    if chance.random() < 0.6:
        given["moe_expert_capacity_factor"] = chance.choice([0.3, 0.75, 1.0, 1.5, 9.0])
        given["moe_token_drop_policy"] = chance.choice(["probs", "probs", "position"])
        given["moe_pad_expert_input_to_capacity"] = chance.random() < 0.3
    kinds = [kind for kind in LOSSES if chance.random() < 0.4]
    given["moe_router_load_balancing_type"] = kinds or ["none"]
    given["moe_aux_loss_coeff"] = [chance.choice([0.3, 2.0]) for _ in kinds] or [0.0]
    given["moe_z_loss_coeff"] = chance.choice([None, 0.5])
    given["disable_bias_linear"] = chance.random() < 0.5
    if chance.random() < 0.3:
        given |= {"bf16": True, "moe_router_dtype": chance.choice(["fp32", "fp64"])}
    return given


def tensors_of(given: dict, seed: int) -> dict[str, torch.Tensor]:
    """What both routers get; experts' scores differ, so that some experts are over their capacity."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (S, SAMPLES, H), "weight": (E, H), "bias": (E,), "expert_bias": (E,)}
    shapes["grad"] = S * SAMPLES, E
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if given.get("bf16"):
        found |= {name: found[name].bfloat16() for name in ("x", "weight", "bias")}
    return found


def ours(given: dict, tensors: dict[str, torch.Tensor]) -> dict:
    """What `megatron_oracle.routed` returns, by the router here."""
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if name != "bf16"}
    router = router_of(settings(given.pop("moe_router_topk"), **given), dtype=tensors["x"].dtype)
    with torch.no_grad():
        for name in ("weight", "bias", "expert_bias"):
            if getattr(router, name) is not None:
                getattr(router, name).copy_(tensors[name])
    x = tensors["x"].clone().requires_grad_()
    router.begin_step()
    probs, ids = router(x.flatten(0, 1), batch_of(SAMPLES, aux_scale=1 / (S * SAMPLES)))
    kept, ids = ids >= 0, ids.long().clamp(min=0)
    table = torch.zeros(len(ids), E).scatter_add(1, ids, probs * kept)
    (table * tensors["grad"]).sum().backward()
    found = {"probs": table.detach(), "x.grad": x.grad}
    found["chosen"] = torch.zeros(len(ids), E).scatter_add(1, ids, kept.float()) > 0
    found |= {f"{name}.grad": param.grad for name, param in router.named_parameters()}
    if router.expert_bias is not None:
        move_expert_biases([router], kept_tokens([router]))
        found["expert_bias"] = router.expert_bias
    return found


def compare(oracle: Oracle, seed: int) -> None:
    """Fail unless both routers do the same, with settings and numbers of this seed."""
    given = drawn(seed)
    tensors = tensors_of(given, seed)
    shape = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 2, "num_moe_experts": E}
    theirs = {name: v for name, v in given.items() if name not in ("bf16", "disable_bias_linear")}
    theirs |= {"add_bias_linear": not given["disable_bias_linear"]}
    expected = oracle("route", shape | theirs, tensors, tensors["x"].dtype)
    found, padded = ours(given, tensors), given.get("moe_pad_expert_input_to_capacity")
    assert found.keys() == expected.keys()
    if given.get("moe_token_drop_policy") == "position":
        # Of which tokens Megatron leaves to torch.topk among equals; here they are the first.
        if not padded:
            assert torch.equal(found["chosen"].sum(0), expected["chosen"].sum(0))
        names = ["expert_bias"]
    else:
        close(found["probs"], expected["probs"].float(), 1e-5)
        names = found.keys() - {"probs", "chosen"}
        if not padded:
            assert torch.equal(found["chosen"], expected["chosen"])
    if padded and "expert_bias" in found:  # Megatron counts the padding: each expert's load is the capacity
        assert torch.equal(expected["expert_bias"], tensors["expert_bias"])
        names = set(names) - {"expert_bias"}
    tolerance = 2e-2 if given.get("bf16") else 2e-5
    for name in names:
        if name in found:
            scale = expected[name].float().abs().max().item() + 1e-30
            difference = (found[name].float() - expected[name].float()).abs().max().item()
            assert difference <= tolerance * scale, (name, given)
