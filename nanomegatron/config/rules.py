"""How a setting is declared, and the errors that follow from the declaration.

    min_lr: float = setting(0.0, "...", at_most="--lr")     --min-lr 2.0: must be at least 0 and at most --lr
    finetune: bool = setting(False, "...", needs="--load")  --finetune: needs --load

Without a lower bound a number must be greater than 0, or at least 0 if that is its default. Conditions may
have a reason after a comma and a fix after a semicolon:

    --num-experts                                it is set, or a switch is on
    --no-fast-paths                              a switch is off
    --lr-decay-style linear or cosine            it is one of these values, or contains one
    --context-parallel-size greater than 1
    --bf16 or --fp16                             one of the two holds
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

BOUNDS = {
    "above": ("greater than", operator.gt),
    "at_least": ("at least", operator.ge),
    "below": ("less than", operator.lt),
    "at_most": ("at most", operator.le),
}
Bound = float | str | None  # a number, or the flag of the setting that holds it
Conditions = str | tuple[str, ...] | dict[str, str | tuple[str, ...]]  # for every value, or by value


@dataclass(frozen=True)
class Rules:
    """The rules of a setting, besides its type and default.

    refused: values that only Megatron has, each with a fix.
    resumable: may differ when a run continues in its folder. Default: all but those of model and data.
    names_run: is part of the default --run-name. Default: all but those of checkpoints and of the run.
    """

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple = ()
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    required: bool = False
    count: int = 0  # number of values in a list; 0: any
    above: Bound = None
    at_least: Bound = None
    below: Bound = None
    at_most: Bound = None
    part_of: str = ""  # the condition for the setting to have an effect; else only this is reported
    needs: Conditions = ()
    excludes: Conditions = ()
    brings: Conditions = ()  # set beside it, with a note, if `needs` fail; may end in " if CONDITION"
    fast_path: bool = False  # asks for a fast path, which --no-fast-paths excludes
    resumable: bool | None = None
    names_run: bool | None = None
    most_used: bool = False  # listed by --help


def setting(default: Any, text: str, *aliases: str, **rules: Any) -> Any:
    """A dataclass field with its one-line help, short flag aliases and `Rules`; choices may be one string."""
    if isinstance(choices := rules.get("choices"), str):
        rules["choices"] = tuple(choices.split())
    if not {"above", "at_least"} & rules.keys():
        rules["at_least" if default == 0 else "above"] = 0
    return dataclasses.field(default=default, metadata=vars(Rules(text, aliases, **rules)))


common = functools.partial(setting, most_used=True)


def declared(config: Any) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield every setting in order: the part of `config` that it belongs to, its field and its value."""
    for part in dataclasses.fields(config):
        values = getattr(config, part.name)
        yield from ((part.name, s, getattr(values, s.name)) for s in dataclasses.fields(values))


def values_of(config: Any) -> dict[str, Any]:
    """The value of every setting, by name."""
    return {s.name: value for _, s, value in declared(config)}


def flag(name: str) -> str:
    """'hidden_size' -> '--hidden-size'."""
    return "--" + name.replace("_", "-")


def spelled(name: str, value: Any) -> str:
    """A setting as it is given: '--hidden-size 64', '--window-size 7 0', '--swiglu', '--no-rope-fusion'."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return " ".join([flag(name), *map(str, items(value))])


def items(value: Any) -> tuple:
    """The values of a list, or the one value."""
    return value if isinstance(value, tuple) else (value,)


def those_that_hold(*rows: tuple[Any, str]) -> list[str]:
    """Return the messages of a table, (condition, message) each, whose conditions are true."""
    return [message for condition, message in rows if condition]


def broken_rules(config: Any) -> Iterator[str]:
    """Yield an error for each value out of bounds, and for settings that others need or exclude."""
    values, found = values_of(config), {}
    for _, s, value in declared(config):
        rules, words = Rules(**s.metadata), spelled(s.name, value)
        if value is None and rules.required:
            yield f"{flag(s.name)}: missing; give it, or a --config"
        elif value is not None and (bounds := _broken_bounds(value, rules, values)):
            yield f"{words}: {bounds}"
        if value in (None, s.default):
            continue
        needs, excludes = _conditions(rules.needs, value), _conditions(rules.excludes, value)
        if rules.part_of and not holds(rules.part_of, values):
            needs, excludes = (rules.part_of,), ()
        if missing := dict.fromkeys(text for text in needs if not holds(text, values)):
            found.setdefault(("need", " and ".join(missing)), []).append(words)
        for text in excludes + ("--no-fast-paths, being a fast path",) * rules.fast_path:
            if holds(text, values):
                fix = "" if ";" in text else "; leave one out"
                found.setdefault(("not with", text + fix), []).append(words)
    for (verb, what), words in found.items():
        yield f"{', '.join(words)}: {verb}{'s' * (verb == 'need' and len(words) == 1)} {what}"


def beyond_limits(config: Any) -> bool:
    """Whether a number is over 100 times its bound, so that lists of this length would take too long."""
    limits = ((value, s.metadata["at_most"]) for _, s, value in declared(config))
    return any(n > 100 * limit for value, limit in limits if type(limit) is int for n in _numbers(value))


def _numbers(value: Any) -> list[float]:
    return [n for n in items(value) if type(n) in (int, float)]


def _broken_bounds(value: Any, rules: Rules, values: dict[str, Any]) -> str:
    """The bounds of a setting in words if one of its numbers breaks them; else empty."""
    numbers = _numbers(value)
    must = "each must be" if isinstance(value, tuple) else "must be"
    if not all(map(math.isfinite, numbers)):
        return f"{must} a finite number"
    texts, broken = [], False
    for name, (words, is_within) in BOUNDS.items():
        bound = text = getattr(rules, name)
        if isinstance(bound, str):
            bound = values[_name(text)]
            text = f"{text} {bound}"
            if bound is not None and not bound >= 0:
                bound = None  # an error of its own, from which this one would follow
        if bound is not None:
            texts.append(f"{words} {text}")
            broken |= not all(is_within(number, bound) for number in numbers)
    return f"{must} {' and '.join(texts)}" if broken else ""


def _conditions(conditions: Conditions, value: Any) -> tuple[str, ...]:
    if isinstance(conditions, dict):
        return tuple(text for v in items(value) for text in _conditions(conditions.get(v, ()), v))
    return (conditions,) if isinstance(conditions, str) else conditions


def brought(config: Any, given: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (option to add, setting that brings it) if its needs fail, unless given or excluded."""
    values, rules = values_of(config), {s.name: Rules(**s.metadata) for _, s, _ in declared(config)}
    for _, s, value in declared(config):
        needs, brings = (_conditions(part, value) for part in (rules[s.name].needs, rules[s.name].brings))
        if value in (None, s.default) or (needs and all(holds(need, values) for need in needs)):
            continue
        for text in brings:
            option, _, condition = text.partition(" if ")
            name = _name(option.split()[0])
            excluded = any(holds(other, values) for other in _conditions(rules[name].excludes, True))
            wanted = not condition or holds(condition, values)
            if wanted and name not in given and not _is_set(flag(name), values) and not excluded:
                yield option, spelled(s.name, value)


def holds(condition: str, values: dict[str, Any]) -> bool:
    """Whether a condition of `needs` or `excludes` is true of these settings."""
    without_reason = re.split("[,;]", condition)[0]
    return any(_is_set(option, values) for option in re.split(" or (?=--)", without_reason))


def _is_set(option: str, values: dict[str, Any]) -> bool:
    """Whether one flag of a condition is set as the option says."""
    name, _, wanted = option.partition(" ")
    if _name(name) not in values:
        return values[_name(name).removeprefix("no_")] is False
    value = values[_name(name)]
    if wanted.startswith("greater than "):
        return value is None or value > float(wanted.removeprefix("greater than "))  # None: it will follow
    if wanted:
        return any(str(item) in wanted.split(" or ") for item in items(value))
    return value is not None and value is not False and value != ()


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
