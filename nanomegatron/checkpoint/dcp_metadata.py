"""Reads and writes `.metadata` of torch.distributed.checkpoint, which is a pickle, without the module pickle.

    torch.Size((3, 4))    GLOBAL torch.Size, (3, 4), TUPLE1, REDUCE    <->    Record("torch.Size", ((3, 4),))

Unpickling calls what the file names. Here nothing is called: `pickletools` splits the file into operations,
which build dicts, lists, tuples, texts and numbers, and a `Record` where the pickle has an object. Names
that are not in ALLOWED are refused, as are all operations that such a file does not need.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

from nanomegatron.checkpoint.files import DTYPES
from nanomegatron.checkpoint.manifest import CheckpointError

METADATA_LIMIT = 64 * 2**20  # bytes; reading takes about a second for 4 MiB
DCP_CLASSES = "torch.distributed.checkpoint.metadata."
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
DCP_NAMES = """
Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex
StorageMeta _MEM_FORMAT_ENCODING
""".split()
ALLOWED = {f"{DCP_CLASSES}{name}" for name in DCP_NAMES} | {STORAGE_INFO, *map(str, DTYPES)}
ALLOWED |= {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"}
VALUES = set("BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE BINFLOAT".split())
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}


@dataclass(frozen=True)
class Name:
    """A class, function or dtype that a pickle names."""

    text: str


@dataclass(eq=False)
class Record:
    """An object of a pickle: the name that is called, its arguments, and the state that is set afterwards."""

    name: str
    args: tuple = ()
    state: Any = None


def read_pickle(data: bytes) -> Any:
    """Return what the pickle builds. Raises CheckpointError for one with other names or operations."""
    try:
        return _build(data)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"no metadata of torch.distributed.checkpoint ({error!r})") from None


def _build(data: bytes) -> Any:
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
            case "NONE" | "NEWTRUE" | "NEWFALSE" as name:
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
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
                stack[-1].extend(added)
            case "SETITEM" | "SETITEMS" as name:
                added = take(2 if name == "SETITEM" else len(stack) - marks.pop())
                stack[-1].update(zip(map(_key, added[::2]), added[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL" as name:
                stack.append(_name(".".join(value.split(" ") if name == "GLOBAL" else take(2))))
            case "NEWOBJ" | "REDUCE":
                what, args = take(2)
                stack.append(Record(what.text, args))
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


def _key(key: Any) -> Any:
    """A text, or a record, which is compared by identity: tuples of tuples may take forever to hash."""
    if not isinstance(key, str | Record):
        raise TypeError(f"{type(key).__name__} as a key")
    return key


def _name(text: str) -> Name:
    if text not in ALLOWED:
        raise CheckpointError(f"it names {text[:80]}, which is refused: a pickle may run what it names")
    return Name(text)


def write_pickle(value: Any) -> bytes:
    """Return the pickle that builds the value: what `read_pickle` returns, and numbers below 2^63."""
    memo: dict[str, int] = {}
    return b"\x80\x02" + b"".join(_operations(value, memo)) + b"."


def _operations(value: Any, memo: dict[str, int]) -> list[bytes]:
    """The operations that push a value. memo: the names that were pushed before."""

    def each(values: Any) -> list[bytes]:
        return [operation for x in values for operation in _operations(x, memo)]

    match value:
        case None | True | False:
            return [{None: b"N", True: b"\x88", False: b"\x89"}[value]]
        case int():
            return [b"\x8a\x08" + value.to_bytes(8, "little", signed=True)]
        case str():
            return [b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()]
        case Name(text) if text in memo:
            return [b"j" + memo[text].to_bytes(4, "little")]
        case Name(text):
            memo[text] = len(memo)
            put = b"r" + memo[text].to_bytes(4, "little")
            return [b"c" + "\n".join(text.rsplit(".", 1)).encode() + b"\n" + put]
        case tuple():
            return [b"(", *each(value), b"t"]
        case list():
            return [b"](", *each(value), b"e"]
        case dict():
            return [b"}(", *each(x for item in value.items() for x in item), b"u"]
        case Record(name, args, None):
            return [*each((Name(name), args)), b"R"]
        case Record(name, args, state):
            return [*each((Name(name), args)), b"\x81", *each((state,)), b"b"]
    raise TypeError(f"{type(value).__name__} in metadata")
