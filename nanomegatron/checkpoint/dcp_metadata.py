"""Reads and writes `.metadata` of torch.distributed.checkpoint, which is a pickle, without the module pickle.

    torch.Size((3, 4))    GLOBAL torch.Size, (3, 4), TUPLE1, REDUCE    <->    Record("torch.Size", ((3, 4),))

Unpickling calls what the file names. Here nothing is called (config/pickles.py), and names that are not in
ALLOWED are refused.
"""

from typing import Any

from nanomegatron.checkpoint.files import DTYPES
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.config.pickles import Name, Record, build_pickle

METADATA_LIMIT = 64 * 2**20  # bytes; reading takes about a second for 4 MiB
DCP_CLASSES = "torch.distributed.checkpoint.metadata."
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
DCP_NAMES = """
Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex
StorageMeta _MEM_FORMAT_ENCODING
""".split()
PLANS = "SavePlan WriteItem WriteItemType TensorWriteData".split()  # megatron-core adds them
ALLOWED = {f"{DCP_CLASSES}{name}" for name in DCP_NAMES} | {STORAGE_INFO, *map(str, DTYPES)}
ALLOWED |= {f"torch.distributed.checkpoint.planner.{name}" for name in PLANS}
ALLOWED |= {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"}


def read_pickle(data: bytes) -> Any:
    """Return what the pickle builds. Raises CheckpointError for one with other names or operations."""
    try:
        return build_pickle(data, _allowed)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"no metadata of torch.distributed.checkpoint ({error!r})") from None


def _allowed(name: str) -> str:
    if name not in ALLOWED:
        raise CheckpointError(f"it names {name[:80]}, which is refused: a pickle may run what it names")
    return name


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
