"""Megatron-LM's keywords that are no fields here: accepted if they change nothing, else a TypeError.

    TransformerConfig(num_layers=2, ..., use_cpu_initialization=True)    accepted: it is always so
    TransformerConfig(num_layers=2, ..., add_bias_linear=False)          TypeError: disable_bias_linear
    from nanomegatron.core import parallel_state                         ImportError: mesh.Mesh

So code from Megatron's examples runs, or says which word to change (`megatron_keywords.toml`).
"""

import dataclasses
import difflib
import functools
import inspect
import tomllib
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def megatron_keywords() -> dict[str, Any]:
    """The tables of megatron_keywords.toml by the class they belong to, and the list `taken`."""
    return tomllib.loads((Path(__file__).parent / "megatron_keywords.toml").read_text())


def with_megatron_keywords(cls: type) -> type:
    """Return the class with a constructor that also accepts Megatron's keywords, or says what to use."""
    own, names = cls.__init__, inspect.signature(cls).parameters
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    lists = [f.name for f in fields if typing.get_origin(f.type) is tuple]

    @functools.wraps(own)
    def init(self: Any, *values: Any, **keywords: Any) -> None:
        check_keywords(cls.__name__, names, {k: keywords.pop(k) for k in [*keywords] if k not in names})
        for name in keywords.keys() & lists:  # Megatron's are lists, or one value
            value = keywords[name]
            keywords[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
        own(self, *values, **keywords)

    cls.__init__ = init
    return cls


def answer_import(name: str) -> None:
    """Raise ImportError with what stands here for a name that Megatron Core has, AttributeError for others.

    Imports from `core` or a module of it ask for its `__path__` first, which does not say what they want.
    """
    known = megatron_keywords()["imports"]
    if name == "__path__":
        lines = (f"  {theirs:<34}nanomegatron.{ours}" for theirs, ours in known.items())
        raise ImportError(
            "\n".join(["Megatron Core's modules are not here (docs/guides/own-loop.md):", *lines])
        )
    if name in known:
        raise ImportError(f"there is no {name} here: use nanomegatron.{known[name]}")
    raise AttributeError(f"nanomegatron has no {name}")


def check_keywords(owner: str, own: Iterable[str], given: dict[str, Any]) -> None:
    """Raise TypeError for `given` keywords of class `owner` that would change something, or are unknown."""
    known, wrong = megatron_keywords() if given else {}, []
    for name, value in given.items():
        if name in known[owner]:
            instead, *neutral = known[owner][name]
            if value is not None and (type(value), value) not in [(type(n), n) for n in neutral]:
                wrong.append(f"{name}={value!r}: use {instead}")
        elif name not in known["taken"]:
            near = difflib.get_close_matches(name, own, 1)
            wrong.append(f"{name}: unknown" + (f"; did you mean {near[0]}?" if near else ""))
    if wrong:
        raise TypeError(f"{owner}({'; '.join(wrong)})")
