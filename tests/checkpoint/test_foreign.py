"""Checkpoints of other programs, and forged ones of torch_dist and torch: read or refused, nothing run."""

import hashlib
import io
import os
import pickle
import resource
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanomegatron.checkpoint.checkpoint import load, save
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.checkpoint.megatron_torch import read_legacy
from nanomegatron.config.pickles import Record, build_pickle
from tests.checkpoints import ALONE, change_manifest, cuts, expect, save_alone, tensor

STEP = 20


def wanted() -> Piece:
    return Piece("model/w", (8, 12), (0, 0), torch.zeros(8, 12))


@pytest.fixture
def foreign(tmp_path) -> Path:
    """What torch.distributed.checkpoint saves of plain tensors and of an object."""
    whole = {"model/w": tensor("model/w", STEP), "model/b": tensor("model/b", STEP), "about": {"lr": 0.1}}
    folder = tmp_path / "theirs" / f"iter_{STEP:07d}"
    whole |= {"t": torch.arange(6).view(2, 3).t(), "empty": torch.ones(0, 3)}
    dcp.save(whole, checkpoint_id=folder, no_dist=True)
    return folder


def test_tensors_of_another_program(foreign):
    halves = [Piece("model/w", (8, 12), (0, 6 * i), torch.zeros(8, 6)) for i in (0, 1)]
    turned = Piece("t", (3, 2), (1, 0), torch.zeros(2, 2, dtype=torch.int64))  # saved with its strides
    loaded = load(foreign.parent, [*halves, turned], ALONE)
    expect(halves, STEP)
    assert turned.data.tolist() == [[1, 4], [2, 5]]
    assert loaded.iteration == STEP and loaded.state == {} and "no hash says" in loaded.notes[0]
    with pytest.raises(CheckpointError, match=r"model/b: saved \[5\], wanted \[6\]\n  about: missing"):
        load(foreign.parent, [Piece("model/b", (6,), (0,), torch.zeros(6)), piece("about")], ALONE)


def piece(key: str) -> Piece:
    return Piece(key, (1,), (0,), torch.zeros(1))


class Canary:
    """Unpickling this leaves a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def refused(root: Path, canary: Path, match: str) -> None:
    """Loading fails soon, without much memory, for the reason, and nothing is run or written."""
    before = sorted(root.parent.rglob("*"))
    began, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=match):
        load(root, [wanted()], ALONE)
    assert time.monotonic() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 2**10
    assert not canary.exists() and sorted(root.parent.rglob("*")) == before


def nested(data: bytes) -> bytes:
    """A dict whose key is a tuple of two tuples of two ..., 100 deep: 2^100 steps to hash."""
    return b"\x80\x02})" + b"2\x86" * 100 + b"Nu."


LACKS = "lacks what it must have"  # nothing that it names is called, or there at all
PICKLES = {  # bytes of .metadata -> why they are refused
    "canary": (lambda c, data: pickle.dumps(Canary(c)), LACKS),
    "canary behind a record": (lambda c, data: data[:-1] + pickle.dumps(Canary(c))[2:], LACKS),
    "another module": (lambda c, data: b"cos\nsystem\n(X\x02\x00\x00\x00lstR.", LACKS),
    "a builtin": (lambda c, data: b"c__builtin__\neval\n(tR.", LACKS),
    "a method of an allowed name": (lambda c, data: b"ctorch\nSize.__new__\n(tR.", LACKS),
    "an instance": (lambda c, data: b"(ios\nsystem\n.", "pickle is not read"),
    "a persistent id": (lambda c, data: b"X\x01\x00\x00\x00aQ.", LACKS),
    "an extension": (lambda c, data: b"\x82\x01.", "pickle is not read"),
    "a memo of 2^31": (lambda c, data: b"\x80\x02Nr\xff\xff\xff\x7f" + b".", LACKS),
    "bytes of 2^60": (lambda c, data: b"\x96" + (2**60).to_bytes(8, "little") + b".", "pickle is not read"),
    "a key without end": (lambda c, data: nested(data), "pickle is not read"),
    "state of a name": (lambda c, data: b"ctorch\nSize\n}b.", LACKS),
    "a call of a record": (lambda c, data: b"ctorch\nSize\n)R)R.", LACKS),
    "a call of a text": (lambda c, data: b"X\x01\x00\x00\x00a)R.", "'str' object is not callable"),
    "a set with a key without end": (lambda c, data: b"\x8f(" + b")" + b"2\x86" * 100 + b"\x90.", "not read"),
    "attributes of a dict": (lambda c, data: b"})}X\x03\x00\x00\x00getNs\x86b.", "pickle is not read"),
    "a call of a dict": (lambda c, data: b"})R.", "pickle is not read"),
    "too few values": (lambda c, data: b"\x80\x02u.", "pickle is not read"),
    "no end": (lambda c, data: data[:-1], "pickle is not read"),
    "half": (lambda c, data: data[: len(data) // 2], "pickle is not read"),
    "nothing": (lambda c, data: b"", "pickle is not read"),
    "text": (lambda c, data: b"tensors " * 500, "pickle is not read"),
    "a number": (lambda c, data: b"\x80\x02K\x01.", LACKS),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_metadata_that_may_run_or_burst_is_refused(foreign, tmp_path, kind):
    change, match = PICKLES[kind]
    path = foreign / ".metadata"
    path.write_bytes(change(tmp_path / "canary", path.read_bytes()))
    refused(foreign.parent, tmp_path / "canary", match)


def write_pickle(value: Any) -> bytes:
    """The pickle that builds a value that `build_pickle` returns, forged in any way; numbers below 2^63."""
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
        case Record(name, (), None) if name in memo:
            return [b"j" + memo[name].to_bytes(4, "little")]
        case Record(name, (), None):
            memo[name] = len(memo)
            put = b"r" + memo[name].to_bytes(4, "little")
            return [b"c" + "\n".join(name.rsplit(".", 1)).encode() + b"\n" + put]
        case Record("storage", pid, None):
            return [*each(pid), b"Q"]
        case Record(name, args, None):
            return [*each((Record(name), args)), b"R"]
        case Record(name, args, state):
            return [*each((Record(name), args)), b"\x81", *each((state,)), b"b"]
        case tuple():
            return [b"(", *each(value), b"t"]
        case list():
            return [b"](", *each(value), b"e"]
        case dict():
            return [b"}(", *each(x for item in value.items() for x in item), b"u"]
    raise TypeError(f"{type(value).__name__} in metadata")


def changed(foreign: Path, change: Callable[[dict, dict, dict], object]) -> None:
    """Change the state of `.metadata`, the table of model/w, the place of its only chunk."""
    state = build_pickle((foreign / ".metadata").read_bytes()).state
    place = next(p for i, p in state["storage_data"].items() if i.state["fqn"] == "model/w")
    change(state, state["state_dict_metadata"]["model/w"].state, place.state)
    data = write_pickle(Record("torch.distributed.checkpoint.metadata.Metadata", (), state))
    (foreign / ".metadata").write_bytes(data)


def size(*sizes) -> Record:
    return Record("torch.Size", (sizes,))


FORGERIES = {
    "parent": (lambda s, t, p: p.update(relative_path="../__0_0.distcp"), "not of the form"),
    "absolute": (lambda s, t, p: p.update(relative_path="/etc/passwd"), "not of the form"),
    "4 kB": (lambda s, t, p: p.update(relative_path="__" + "0" * 4096 + "_0.distcp"), "not of the form"),
    "no text": (lambda s, t, p: p.update(relative_path=5), "where a name must be"),
    "no such file": (lambda s, t, p: p.update(relative_path="__7_0.distcp"), "No such file"),
    "beyond its end": (lambda s, t, p: p.update(offset=2**40), "is not F32"),
    "before its begin": (lambda s, t, p: p.update(offset=-1), "is not a size"),
    "huge entry": (lambda s, t, p: p.update(length=2**61), "is not F32"),
    "no length": (lambda s, t, p: p.pop("length"), "lacks what it must have"),
    "huge shape": (lambda s, t, p: t.update(size=size(2**40, 2**40)), "cover"),
    "many dims": (lambda s, t, p: t.update(size=size(*[1] * 1000)), "at most 6 sizes"),
    "negative": (lambda s, t, p: t.update(size=size(-8, 12)), "is not a size"),
    "huge chunk": (lambda s, t, p: grow(t, (2**31, 2**30)), "does not fit into"),
    "the same twice": (
        lambda s, t, p: t.update(chunks=t["chunks"] * 2, size=size(16, 12)),
        "cover 96 of 192",
    ),
    "hole": (lambda s, t, p: t["chunks"].clear(), "cover 0 of 96"),
    "another dtype": (lambda s, t, p: t["properties"].__setattr__("state", (5,)), "lacks what it must have"),
    "no tables": (lambda s, t, p: s.pop("storage_data"), "lacks what it must have"),
    "ours without a manifest": (
        lambda s, t, p: s["storage_meta"].state.update(save_id="nanomegatron"),
        "manifest.json is missing",
    ),
}


def grow(table: dict, shape: tuple) -> None:
    """Give a tensor and its chunk another shape."""
    table["size"] = table["chunks"][0].state["sizes"] = size(*shape)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_metadata_is_refused(foreign, tmp_path, forgery):
    change, match = FORGERIES[forgery]
    changed(foreign, change)
    refused(foreign.parent, tmp_path / "canary", match)


def test_links_are_not_followed_and_large_metadata_not_read(foreign, tmp_path):
    for name in ("__0_0.distcp", ".metadata"):
        good = (foreign / name).rename(tmp_path / "outside")
        (foreign / name).symlink_to(good)
        refused(foreign.parent, tmp_path / "canary", "Too many levels|symbolic")
        (foreign / name).unlink()
        shutil.copy(good, foreign / name)
    os.truncate(foreign / ".metadata", 2**40)  # a hole: takes no room on the disk
    refused(foreign.parent, tmp_path / "canary", "more than 67108864 bytes")


ALLOCATES = b"\x80\x02c__builtin__\nbytearray\n\x8a\x06" + (2**40).to_bytes(6, "little") + b"\x85R."
NO_TENSOR = "another dtype or shape|'Record' object is not subscriptable"


def bomb(kind: str, canary: Path) -> bytes:
    """What stands where torch.save's file is expected."""
    buffer = io.BytesIO()
    torch.save(Canary(canary) if kind == "canary" else tensor("model/w", STEP), buffer)
    if kind == "text":
        return b"tensors " * 500
    if kind in ("compressed", "large pickle", "bytes of 2^40"):
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(packed := io.BytesIO(), "w") as new:
            for info in old.infolist():
                data = old.read(info)
                if info.filename.endswith("data.pkl"):
                    data = ALLOCATES if kind == "bytes of 2^40" else b"N0" * 2**23 + data
                how = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
                new.writestr(info.filename, data, how)
        return packed.getvalue()
    return buffer.getvalue()


BOMBS = {
    "canary": NO_TENSOR,
    "bytes of 2^40": NO_TENSOR,  # torch.load with weights_only=True takes the memory
    "text": "zip",
    "compressed": "compressed",
    "large pickle": "a pickle of 16777",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_entries_that_may_run_or_burst_are_refused(foreign, tmp_path, kind):
    """For another program's tensor, and for a file of --ckpt-format torch, whose hash is then right."""
    data = bomb(kind, tmp_path / "canary")
    path = foreign / "__0_0.distcp"
    at = path.stat().st_size
    path.write_bytes(path.read_bytes() + data)
    changed(foreign, lambda s, t, p: p.update(offset=at, length=len(data)))
    refused(foreign.parent, tmp_path / "canary", BOMBS[kind])
    save(tmp_path / "ours", STEP, cuts(STEP), {}, "", ALONE, format="torch")
    path = tmp_path / f"ours/iter_{STEP:07d}/rank_00000.pt"
    path.write_bytes(data)
    change_manifest(path.parent, lambda m: m["files"].__setitem__(0, [0, *described(data)]))
    refused(tmp_path / "ours", tmp_path / "canary", BOMBS[kind])


def described(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


LEGACY_FORGERIES = {  # of a tensor [4, 4] in a storage of 64 bytes
    "beyond its end": (dict(shape=(4, 5)), "out of bounds"),
    "begins too late": (dict(begin=1), "out of bounds"),
    "before its begin": (dict(begin=-1), "invalid storage offset"),
    "backwards": (dict(stride=(4, -1)), "Negative strides"),
    "huge": (dict(shape=(2**62, 2**62)), "overflow"),
    "one element 2^40 times": (dict(shape=(2**40,), stride=(0,)), "does not fit into file 0"),
    "text as a size": (dict(shape=("a", 4)), "must be tuple of ints"),
    "no such storage": (dict(member="../0"), "'../0'"),
    "no such type": (dict(kind="os.system"), "'os.system'"),
}


@pytest.mark.parametrize("forgery", LEGACY_FORGERIES)
def test_forged_tensors_of_megatron_are_refused(tmp_path, forgery):
    change, match = LEGACY_FORGERIES[forgery]
    given = dict(shape=(4, 4), stride=(4, 1), begin=0, member="0", kind="torch.FloatStorage") | change
    storage = Record("storage", (("storage", Record(given["kind"]), given["member"], "cpu", 16),))
    tensor = Record(
        "torch._utils._rebuild_tensor_v2", (storage, *(given[k] for k in ("begin", "shape", "stride")))
    )
    path = tmp_path / "mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", write_pickle({"model": {"decoder.x.weight": tensor}}))
        archive.writestr("a/data/0", bytes(64))
    with pytest.raises(CheckpointError, match=match):
        read_legacy(tmp_path)


ENTRY = "model/w[0:8,0:12]"
OURS = {  # the manifest's entry of the format
    "parent": (lambda f: f.update(entries={"../__0_0.distcp": f["entries"]["__0_0.distcp"]}), "of the form"),
    "absolute": (lambda f: f.update(entries={"/etc/passwd": {}}), "of the form"),
    "no entries": (lambda f: f.update(entries={}), "torch_dist|IndexError|index"),
    "no place": (lambda f: f["entries"]["__0_0.distcp"].pop(ENTRY), "is not F32"),
    "a place of text": (lambda f: f["entries"]["__0_0.distcp"].update({ENTRY: "abc"}), "is not F32"),
    "beyond its end": (lambda f: f["entries"]["__0_0.distcp"].update({ENTRY: [0, 9, 2**40]}), "is not F32"),
    "before its begin": (lambda f: f["entries"]["__0_0.distcp"].update({ENTRY: [0, 9, -5]}), "is not F32"),
    "no such format": (lambda f: f.update(name="zarr"), "format 'zarr' is not one of sharded"),
    "another program's": (lambda f: f.update(foreign=True), "which writes no manifest"),
    "no elements": (lambda f: f["entries"]["__0_0.distcp"].update({ENTRY: [0, 9, None]}), "is not F32"),
    "another format": (lambda f: f.update(name="torch"), "No such file"),
    "metadata of text": (lambda f: f.update(metadata="abc"), "iter_0000020"),
}


@pytest.mark.parametrize("forgery", OURS)
def test_forged_places_are_refused(tmp_path, forgery):
    """A manifest of ours whose hash is right and whose content is not."""
    save(tmp_path / "ours", STEP, cuts(STEP), {}, "", ALONE, format="torch_dist")
    change, match = OURS[forgery]
    change_manifest(tmp_path / f"ours/iter_{STEP:07d}", lambda m: change(m["format"]) and None)
    refused(tmp_path / "ours", tmp_path / "canary", match)


def test_no_pickle_of_ours_is_read(tmp_path):
    """Not even with the right hash: a canary for `.metadata`, and in each entry beside its elements."""
    save_alone(tmp_path / "ours", 10)
    save(tmp_path / "ours", STEP, cuts(STEP), {}, "", ALONE, format="torch_dist")
    folder = tmp_path / f"ours/iter_{STEP:07d}"
    canary = pickle.dumps(Canary(tmp_path / "canary"))
    (folder / ".metadata").write_bytes(canary)
    data = (folder / "__0_0.distcp").read_bytes().replace(b"torch._utils", b"canary_utils")
    (folder / "__0_0.distcp").write_bytes(data)

    def change(manifest: dict) -> None:
        manifest["format"]["metadata"] = described(canary)
        manifest["files"][0] = [0, *described(data)]

    change_manifest(folder, change)
    pieces = cuts(None)
    assert load(tmp_path / "ours", pieces, ALONE).iteration == STEP
    expect(pieces, STEP)
    assert not (tmp_path / "canary").exists()
