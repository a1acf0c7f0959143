"""Reads a pickle without the module pickle: what it builds, with a `Record` in the place of each object.

    argparse.Namespace, {"hidden_size": 64}    NEWOBJ, BUILD    ->    Record("argparse.Namespace", (), {...})

Unpickling calls what the file names. Here nothing is called: `pickletools` splits the file into operations,
which build dicts, lists, tuples, texts, numbers and Records. Other operations are refused.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VALUES = set(
    "BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE BINFLOAT BINBYTES SHORT_BINBYTES".split()
)
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


@dataclass(frozen=True)
class Name:
    """A class, function or dtype that a pickle names."""

    text: str


@dataclass(eq=False)
class Record:
    """An object of a pickle: the name that is called, its arguments, and what is set or added afterwards."""

    name: str
    args: tuple = ()
    state: Any = None
    contents: Any = None  # of an object that is like a dict or list


def build_pickle(data: bytes, checked: Callable[[str], str], tensors: bool = False) -> Any:
    """Return what the pickle builds; `checked` returns a name in it, or raises an error of its own.

    tensors: it may have those of torch.save, whose elements are elsewhere.

    Raises ValueError, LookupError, TypeError or AttributeError for a pickle with other operations.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def take(count: int) -> list:
        if not 0 <= count <= len(stack):
            raise IndexError("too few values")
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return taken

    for operation, value, _ in pickletools.genops(data):
        match operation.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case name if name in VALUES:
                stack.append(value)
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case name if name in EMPTY:
                stack.append(EMPTY[name]())
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(take(len(stack) - marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(take(int(name[-1]))))
            case "APPEND" | "APPENDS" as name:
                added = take(1 if name == "APPEND" else len(stack) - marks.pop())
                _contents(stack[-1], list).extend(added)
            case "SETITEM" | "SETITEMS" as name:
                added = take(2 if name == "SETITEM" else len(stack) - marks.pop())
                _contents(stack[-1], dict).update(zip(map(_key, added[::2]), added[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL" as name:
                stack.append(Name(checked(".".join(value.split(" ") if name == "GLOBAL" else take(2)))))
            case "NEWOBJ" | "REDUCE":
                what, args = take(2)
                stack.append(Record(what.text, args))
            case "BINPERSID" if tensors:
                stack.append(Record("storage", tuple(take(1))))
            case "BUILD":
                (state,) = take(1)
                stack[-1].state = state
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT" as name:
                memo[len(memo) if name == "MEMOIZE" else value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case name:
                raise ValueError(f"operation {name}")
    raise ValueError("no end")


def _contents(target: Any, kind: type) -> Any:
    """What items are added to: a dict or list, or the contents of an object that is like one."""
    if isinstance(target, Record):
        target.contents = kind() if target.contents is None else target.contents
        return target.contents
    return target


def _key(key: Any) -> Any:
    """A text, a number or a record, which is compared by identity: tuples may take forever to hash."""
    if not isinstance(key, str | int | Record):
        raise TypeError(f"{type(key).__name__} as a key")
    return key
