"""Megatron-LM's flags that are no setting here, from `megatron_flags.toml`: noted, refused or respelled."""

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanomegatron.config.rules import declared, holds, spelled, values_of
from nanomegatron.config.settings import Config


@functools.cache
def megatron_flags() -> dict[str, Any]:
    """Read the tables of megatron_flags.toml, whose comments explain them."""
    return tomllib.loads((Path(__file__).parent / "megatron_flags.toml").read_text())


def only_here(config: Config) -> list[str]:
    """Return the flags of a model that Megatron-LM does not have, or not together."""
    model = [(s, value) for part, s, value in declared(config) if part == "model" and value != s.default]
    own = megatron_flags()["own"]
    found = [spelled(s.name, value) for s, value in model if s.name.replace("_", "-") in own]
    return found + refused_together(config)


def refused_together(config: Config) -> list[str]:
    """Return the flags of a model that stop Megatron-LM together, though it has each."""
    model, name = config.model, "moe_shared_expert_intermediate_size"
    width = getattr(model, name) if model.num_experts and not model.disable_bias_linear else None
    return [f"{spelled(name, width)} without --disable-bias-linear"] if width else []


def answer(known: dict[str, Any], word: str, name: str, arguments: list[str]) -> tuple[str, str]:
    """Return (note, error) for Megatron's flag `word`, one of them empty; both if it has no such flag."""
    if name in known["unsupported"]:
        return "", f"{word}: a flag of Megatron-LM for something that is not here; {hint_of(known, name)}"
    wanted, given = (known["always_on"] | known["not_needed"]).get(name), " ".join([word, *arguments])
    if isinstance(wanted, str) and arguments not in ([word] for word in wanted.split(" or ")):
        return "", f"{given}: here only {wanted}"
    if isinstance(wanted, int) and len(arguments) != wanted:
        return "", f"{given}: takes {wanted} values"
    if wanted is None:
        return "", ""
    reason = f"; {known['reasons'][name]}" if name in known["reasons"] else ""
    return f"{word}: {'always on' if name in known['always_on'] else 'not needed here'}{reason}", ""


def hint_of(known: dict[str, Any], name: str) -> str:
    """What to use in place of a flag that is not here: the hint of its longest prefix."""
    prefixes = [prefix for prefix in known["hints"] if name.startswith(prefix)]
    return known["hints"][max(prefixes, key=len)] if prefixes else "leave it out"


def missing_companions(known: dict[str, Any], argv: list[str], config: Config) -> Iterator[str]:
    """Yield an error for each Megatron flag in `argv` that needs a setting which is not made."""
    flags = {word.lstrip("-").replace("_", "-") for word in argv}
    for name, condition in known["needs"].items():
        if name in flags and not holds(condition, values_of(config)):
            yield f"--{name}: needs {condition}"
