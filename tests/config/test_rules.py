"""Every declaration of a setting, and what is checked because of it."""

import re

import pytest

from nanomegatron.config.megatron import megatron_flags
from nanomegatron.config.rules import Rules, broken_rules, declared, values_of
from nanomegatron.config.settings import Config

SETTINGS = {setting.name: Rules(**setting.metadata) for _, setting, _ in declared(Config())}
DEFAULTS = values_of(Config())


def flags_in(condition: str) -> list[str]:
    """The settings that a condition or a bound names."""
    flags = re.findall(r"--([\w-]+)", re.split("[,;]", condition)[0])
    return [flag.replace("-", "_").removeprefix("no_" * (flag == "no-fast-paths")) for flag in flags]


def conditions_of(rules: Rules) -> list[str]:
    found = [rules.part_of] * bool(rules.part_of)
    for conditions in (rules.needs, rules.excludes):
        for each in conditions.values() if isinstance(conditions, dict) else [conditions]:
            found += [each] if isinstance(each, str) else each
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_declaration_is_consistent(name):
    """Bounds, conditions and choices are of settings that there are, and of values that they can have."""
    rules = SETTINGS[name]
    bounds = [b for b in (rules.above, rules.at_least, rules.below, rules.at_most) if isinstance(b, str)]
    for text in conditions_of(rules) + bounds:
        assert flags_in(text) and set(flags_in(text)) <= SETTINGS.keys(), text
        for part in re.split("[,;]", text)[0].split(" or "):
            flag, _, wanted = part.rpartition(" ")
            choices = SETTINGS[flags_in(flag)[0]].choices if flag.startswith("--") else ()
            assert not choices or wanted in map(str, choices), text
    values = DEFAULTS[name] if isinstance(DEFAULTS[name], tuple) else (DEFAULTS[name],)
    assert not rules.choices or {*values} - {None} <= {*rules.choices}
    by_value = [c for c in (rules.needs, rules.excludes) if isinstance(c, dict)]
    assert all(value in rules.choices for conditions in by_value for value in conditions)
    assert not {*rules.refused} & {*rules.choices} and rules.help.isascii()


def test_the_defaults_keep_all_rules():
    """But for the shape, which has none."""
    assert [error.split(":")[0] for error in broken_rules(Config())] == [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
    ]


def test_a_flag_that_is_ours_is_none_of_megatrons_alone():
    """What becomes a setting leaves the table of flags that are noted or refused."""
    table = megatron_flags()
    classes = [set(table[kind]) for kind in ("always_on", "not_needed", "unsupported", "spellings")]
    own = {name.replace("_", "-") for name in SETTINGS} | {"config", "help", "print-config"}
    own |= {alias for rules in SETTINGS.values() for alias in rules.aliases}
    own |= {f"no-{name}".replace("_", "-") for name, value in DEFAULTS.items() if isinstance(value, bool)}
    assert sum(map(len, classes)) == len(set.union(*classes)) > 600 and not set.union(*classes) & own
    assert {meant.split()[0] for meant in table["spellings"].values()} <= own
    assert set(table["needs"]) <= set(table["always_on"])
