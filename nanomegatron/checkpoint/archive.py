"""Reads files of torch.save, mapped into memory, without torch.load: nothing is unpickled.

    archive/data.pkl    read by config/pickles.py: what is saved, with a Record in the place of each tensor
    archive/data/0      the elements of a storage, not compressed; tensors are views of it

(torch.load calls what weights_only=True allows, bytearray too: 100 bytes of pickle may take all memory.)
"""

import mmap
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nanomegatron.checkpoint.blocks import open_file
from nanomegatron.checkpoint.files import DTYPES
from nanomegatron.config.pickles import Record, build_pickle

STORAGE_TYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
} | {str(dtype): dtype for dtype in DTYPES}


class Archive:
    """What torch.save has written. value: what was saved, with Records. Errors are of any kind."""

    def __init__(self, file: BinaryIO, data: memoryview, pickle_limit: int) -> None:
        """data: the bytes of the file. pickle_limit: the most bytes of its pickle."""
        self.value: Any = None
        self.storages: dict[str, torch.Tensor] = {}  # bytes, by number
        for info in zipfile.ZipFile(file).infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"{info.filename[:80]} is compressed")
            begin = elements_at(data, info)
            member = data[begin : begin + info.file_size]
            if not info.filename.endswith(".pkl"):
                found = torch.frombuffer(member, dtype=torch.uint8) if member else torch.empty(0).byte()
                self.storages[info.filename.rpartition("/")[2]] = found
            elif info.file_size > pickle_limit:
                raise ValueError(f"a pickle of {info.file_size} bytes, at most {pickle_limit}")
            else:
                self.value = build_pickle(bytes(member))

    def tensor(self, value: Any) -> torch.Tensor | None:
        """Return the tensor that a part of `value` stands for, or None."""
        match value:
            case Record("torch._tensor._rebuild_from_type_v2", (function, _, args, *_)):  # it has attributes
                return self.tensor(Record(function.name, args))
            case Record(name, args) if name.startswith("torch._utils._rebuild_parameter"):
                return self.tensor(args[0])
            case Record("torch._utils._rebuild_tensor_v2", (storage, begin, shape, stride, *_)):
                _, kind, member, *_ = storage.args[0]
            case Record("torch._utils._rebuild_tensor_v3", (storage, begin, shape, stride, _, _, kind, *_)):
                member = storage.args[0][2]
            case _:
                return None
        return self.storages[member].view(STORAGE_TYPES[kind.name]).as_strided(shape, stride, begin)


def open_archive(path: Path, pickle_limit: int) -> Archive:
    """Map a file of torch.save into memory."""
    with open_file(path) as file:
        return Archive(file, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)), pickle_limit)


def elements_at(archive: memoryview, info: zipfile.ZipInfo) -> int:
    """The offset of a member's bytes in a zip file, whose members are not compressed."""
    names = struct.unpack_from("<HH", archive, info.header_offset + 26)
    return info.header_offset + 30 + sum(names)
