"""Reads a pickle as plain data, with a `Record` in the place of each object.

    argparse.Namespace, {"hidden_size": 64}    NEWOBJ, BUILD    ->    Record("argparse.Namespace", (), {...})

Unpickling imports and calls what the file names. Here a name is a Record too, and to call one makes another:
no class and no function is ever there to be called. Operations that hash what they are given, or take memory
for more than the file has, are refused.
"""

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

ALLOWED = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
BINBYTES SHORT_BINBYTES TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM
SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
""".split()
OPERATIONS = [getattr(pickle, name)[0] for name in ALLOWED]


class Table(dict):
    """A dict of a pickle. Its keys are texts, numbers or records: tuples may take forever to hash."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | int | Record):
            raise TypeError(f"{type(key).__name__} as a key")
        super().__setitem__(key, value)


@dataclass(eq=False, slots=True)
class Record:
    """A class, function or dtype that a pickle names, or an object: what is called, with which arguments.

    state, items: what is set afterwards; of an object that is like a list nothing is kept.
    """

    name: str
    args: tuple = ()
    state: Any = None
    items: Table = field(default_factory=Table)

    def __call__(self, *args: Any) -> "Record":
        return Record(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, item: Any) -> None:
        """Leave out an item."""


class _Reader(pickle._Unpickler):
    """The unpickler that is written in Python: the one in C takes 32 GB for a memo with the number 2^31."""

    dispatch = {code: pickle._Unpickler.dispatch[code] for code in OPERATIONS}
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]]

    def find_class(self, module: str, name: str) -> Record:
        return Record(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Record:
        return Record("storage", (pid,))

    def _load_dict(self) -> None:
        self.stack.append(Table())

    dispatch[pickle.EMPTY_DICT[0]] = _load_dict


def build_pickle(data: bytes) -> Any:
    """Return what the pickle builds; of tensors of torch.save, all but the elements. Raises ValueError."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # of any kind: the file may be anything
        raise ValueError(f"its pickle is not read: {type(error).__name__} {error!s:.80}") from None
