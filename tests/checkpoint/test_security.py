"""What a stranger's file may do is be wrong: no pickle is opened, nothing is read or written elsewhere.

And a run on one machine listens to nothing but itself, and keeps no secret of its environment.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import train
from nanomegatron.checkpoint.checkpoint import load
from nanomegatron.checkpoint.folder import MANIFEST, MANIFEST_SUM
from nanomegatron.checkpoint.hf import Folder
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.config.cli import parse, saved_settings
from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import build_datasets
from nanomegatron.data.indexed_dataset import IndexedDataset, file_hash
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.data.verify import verify_pair
from nanomegatron.data.vocabulary import byte_alphabet, write_ranks
from nanomegatron.faults.exit import DONE
from nanomegatron.faults.lock import settings_in
from nanomegatron.mesh import World
from nanomegatron.pick_variants import pick_dataset
from nanomegatron.report import plots
from nanomegatron.report.status import read_status
from nanomegatron.report.writers import read_jsonl
from tests.checkpoint.test_files import Canary
from tests.checkpoints import ALONE, save_alone, sign
from tests.data.test_preprocess import BYTES, run
from tests.megatron_data import random_documents, write
from tests.spmd import run_spmd
from tests.test_train import arguments, corpus, finished, start, wait_for_step  # noqa: F401 (a fixture)

EOD = "<|endoftext|>"
LLAMA = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=2)
LLAMA |= dict(intermediate_size=8, vocab_size=9, max_position_embeddings=8, rms_norm_eps=1e-5)
REFUSED = (ValueError, OSError, CheckpointError)


def train_data(*prefixes: str, **settings) -> None:
    """Open data sets, with their caches, and read a sample."""
    data = DataConfig(data_path=prefixes, seq_length=8, split="1", data_cache_path="cache", **settings)
    made = build_datasets(
        data, (60, 0, 0), 1, build_tokenizer("NullTokenizer", vocab_size=127), kind=pick_dataset(data)
    )
    assert len(made[0][0]) <= 9


def gpt2() -> None:
    build_tokenizer("GPT2BPETokenizer", vocab_file="encoder.json", merge_file="vocab.bpe")


def checked(settings: list[str]) -> None:
    """What the parser says is wrong, as an error."""
    if errors := parse(settings).errors:
        raise ValueError(errors)


def verified() -> None:
    if damage := verify_pair("d", 1, print)[0]:
        raise ValueError(damage)


def preprocessed(source: str) -> None:
    if run("--input", source, "--output-prefix", "out", *BYTES):
        raise ValueError("refused, on stderr")


def nothing_read(found: object) -> None:
    """A reader that passes over what it cannot read returns nothing."""
    if not found:
        raise ValueError("nothing")


# A file, or files of a pattern -> what reads them.
PLACES: dict[str, Callable[[], object]] = {
    "cache/*-document_index.npy": lambda: train_data("d"),
    "cache/*-sample_index.npy": lambda: train_data("d"),
    "cache/*-shuffle_index.npy": lambda: train_data("d"),
    "cache/*-dataset_index.npy": lambda: train_data("1", "d", "2", "e"),
    "cache/*-dataset_sample_index.npy": lambda: train_data("1", "d", "2", "e"),
    "cache/*-taken.npy": lambda: train_data("1", "d", "2", "e"),
    "cache/*-token_range.npy": lambda: train_data("e"),
    "cache/*-sample_ends.npy": lambda: train_data("d", variable_seq_lengths=True),
    "cache/*-sample_order.npy": lambda: train_data("d", variable_seq_lengths=True),
    "cache/*-description.json": lambda: train_data("d"),
    "d.idx": lambda: IndexedDataset("d"),
    "d.bin": verified,
    "d.json": lambda: IndexedDataset("d").sidecar(),
    "ranks": lambda: build_tokenizer("TikTokenizer", "ranks"),
    "vocabulary.json": lambda: build_tokenizer("TikTokenizer", "vocabulary.json"),
    "tokenizer.model": lambda: build_tokenizer("Llama3Tokenizer", "tokenizer.model"),
    "pieces.model": lambda: build_tokenizer("SentencePieceTokenizer", "pieces.model"),
    "encoder.json": gpt2,
    "vocab.bpe": gpt2,
    "hf/tokenizer.json": lambda: build_tokenizer("HuggingFaceTokenizer", "hf"),
    "hf/config.json": lambda: Folder("hf"),
    "hf/model.safetensors": lambda: Folder("hf"),
    "index/model.safetensors.index.json": lambda: Folder("index"),
    "old/pytorch_model.bin": lambda: Folder("old"),
    "old/model.pt": lambda: Folder("old"),
    f"ckpt/iter_0000002/{MANIFEST}": lambda: load("ckpt", [], ALONE, 2),
    f"ckpt/iter_0000002/{MANIFEST_SUM}": lambda: load("ckpt", [], ALONE, 2),
    "ckpt/iter_0000002/rank_00000.safetensors": lambda: load("ckpt", [], ALONE, 2),
    "ckpt/latest_checkpointed_iteration.txt": lambda: nothing_read(saved_settings("ckpt")),
    "run/config.toml": lambda: settings_in(Path("run")),
    "run/status.json": lambda: nothing_read(read_status(Path("run/status.json"), print)),
    "run/metrics.jsonl": lambda: nothing_read(read_jsonl(Path("run/metrics.jsonl"))),
    "mine.toml": lambda: checked(["--config", "mine.toml"]),
    "text.jsonl": lambda: preprocessed("text.jsonl"),
    "text.jsonl.gz": lambda: preprocessed("text.jsonl.gz"),
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a file of each kind, mostly whole."""
    monkeypatch.chdir(tmp_path)
    kind = build_tokenizer("NullTokenizer", vocab_size=127)
    about = dict(fingerprint=kind.fingerprint, tokenizer=kind.spec, max_token=99)
    write("d", random_documents(0, 40, 20), sidecar=about)
    write("e", random_documents(1, 40, 20))
    for prefixes in (("d",), ("1", "d", "2", "e")):
        train_data(*prefixes)
    train_data("d", variable_seq_lengths=True)
    for folder in ("hf", "index", "old", "run"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(LLAMA))
    save_file({"model.norm.weight": torch.ones(8)}, "hf/model.safetensors")
    save_alone(Path("ckpt"), 2)
    write_ranks(Path("ranks"), (bytes([i]) for i in range(256)))
    entries = byte_alphabet() | {EOD: 256}
    Path("encoder.json").write_text(json.dumps(entries))
    Path("vocab.bpe").write_text("#version\n")
    gpt2()
    Folder("hf")
    return tmp_path


def plant(path: Path, canary: Path) -> None:
    """Put a pickle there that makes the folder `canary` when it is opened, with hashes beside it that fit."""
    if path.suffix == ".npy":
        np.save(path, np.array([Canary(canary)], dtype=object), allow_pickle=True)
        record = next(r for r in path.parent.glob("*-description.json") if r.name[:32] == path.name[:32])
        facts = json.loads(record.read_text())
        files = [path.with_name(f"{path.name[:32]}-{name}.npy") for name in facts["arrays"]]
        record.write_text(json.dumps(facts | {"sha256": [file_hash(file) for file in files]}))
    elif path.suffix in (".bin", ".pt") and path.parent.name == "old":
        torch.save(Canary(canary), path)
    elif path.name == MANIFEST:
        sign(path.parent, pickle.dumps(Canary(canary), 0).decode())
    else:
        path.write_bytes(pickle.dumps(Canary(canary)) * 9)


def test_no_pickle_is_opened(place):
    """In every place that something is read from: refused, or a cache rebuilt without it."""
    pickle.loads(pickle.dumps(Canary(place / "works")))
    assert (place / "works").is_dir()
    for pattern, read in PLACES.items():
        found = list(place.glob(pattern)) or [place / pattern]
        kept = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        for path in found:
            plant(path, place / "canary")
        planted = [path.read_bytes() for path in found]
        try:
            read()
            assert path.parent.name == "cache" and [p.read_bytes() for p in found] != planted, pattern
        except REFUSED as error:
            assert "pickle" not in type(error).__name__.lower(), pattern
        assert not (place / "canary").exists(), pattern
        for path, data in kept.items():
            if path.read_bytes() != data:
                path.write_bytes(data)
        for path in set(found) - kept.keys():
            path.unlink()
    assert len(PLACES) >= 20


# Names in the index of a Hugging Face folder, sizes in its files. (Manifests: checkpoint/test_files.py)


def bomb(header: dict | bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text


def tensor(shape: list, offsets: list) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


NAMES = [
    "../outside.safetensors",
    "/etc/passwd",
    "{outside}",
    "a" * 4096 + ".safetensors",
    "",
    ".",
    "..",
    "\0",
]
NAMES += ["sub/../../outside.safetensors", "hf/../outside.safetensors", 3, None, ["x"]]
FILES = {
    "header of 2^62 bytes": bomb(b"{}", 2**62),
    "header longer than the file": bomb(b"{}", 4096),
    "header of 200 MB": (200 * 2**20).to_bytes(8, "little"),
    "negative shape": bomb({"w": tensor([-1, 2], [0, 8])}) + bytes(8),
    "huge shape": bomb({"w": tensor([2**40, 2**40], [0, 8])}) + bytes(8),
    "more than the file": bomb({"w": tensor([2**30], [0, 2**32])}) + bytes(8),
    "overlap": bomb({"w": tensor([2], [0, 8]), "v": tensor([2], [4, 12])}) + bytes(12),
    "offsets backwards": bomb({"w": tensor([2], [8, 0])}) + bytes(8),
    "deep JSON": bomb(b'{"w": ' + b"[" * 100_000),
    "a list": bomb(b"[]"),
}


def refused_soon(read: Callable[[], object]) -> str:
    """The error that it raises, in under 2 s and 200 MB."""
    began, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError) as error:
        read()
    assert time.monotonic() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 2**10
    return str(error.value)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_names_in_an_index_stay_in_the_folder(name, tmp_path):
    """The file that they point to is there, and whole; it is not read, and nothing is written."""
    folder, outside = tmp_path / "hf", tmp_path / "outside.safetensors"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file({"model.norm.weight": torch.ones(8)}, outside)
    name = name.format(outside=outside) if isinstance(name, str) else name
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )
    before = sorted(tmp_path.rglob("*"))
    assert str(folder) in refused_soon(lambda: Folder(folder))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", FILES)
def test_sizes_in_a_file_are_checked(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILES[kind])
    if kind == "header of 200 MB":
        os.truncate(path, 201 * 2**20)  # a hole
    assert str(path) in refused_soon(lambda: Folder(tmp_path))


# Whole runs.


def listeners(process: int | str) -> list[str]:
    """Addresses, in hexadecimal, at which a process waits for connections."""
    mine = set()
    for entry in os.listdir(f"/proc/{process}/fd"):
        try:
            mine.add(os.readlink(f"/proc/{process}/fd/{entry}"))
        except OSError:
            continue  # closed meanwhile
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{process}/net/{table}")
        for row in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].split(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
SECRET = "canary-5f1c2e"


def watched(world: World, argv: list[str], folder: str) -> list[str]:
    """A rank that runs with a secret in its environment; where it listens in a step."""
    os.chdir(folder)
    os.environ["HF_TOKEN"] = os.environ["WANDB_API_KEY"] = SECRET
    usual, found = train.train_step, []

    def train_step(run, *limits):
        found.extend(listeners("self"))
        return usual(run, *limits)

    train.train_step, plots.plot_loss = train_step, lambda *_: None
    assert train.run_rank(world, argv) == DONE
    return found


def without_secret(folder: Path, but: int = 5) -> None:
    """No file of a run holds it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > but and not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_ranks_of_one_machine_listen_to_it_alone(corpus, tmp_path):  # noqa: F811
    """And what they write has nothing of the environment."""
    more = "--train-iters 2 --lr-warmup-iters 0 --num-layers 1 --trace-dir trace --trace-iterations 2"
    argv = arguments(corpus, more)
    for found in run_spmd(watched, 2, argv, str(tmp_path)):
        assert found and set(found) <= LOOPBACK
    without_secret(tmp_path)


def processes(session: int) -> list[int]:
    """All processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        found += [int(name)] * (int(fields[3]) == session)
    return found


@pytest.mark.full
def test_the_program_listens_to_its_machine_alone(corpus, tmp_path):  # noqa: F811
    """The launcher, its fork server and all ranks; a run that fails keeps the secret too."""
    argv = [*arguments(corpus, "--save-interval 5"), "--nproc", "2", "--train-iters", "100000"]
    secret = os.environ | {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    process = start(tmp_path, argv, start_new_session=True, env=secret)
    wait_for_step(tmp_path, 5, process)
    found = {number: listeners(number) for number in processes(process.pid)}
    assert len(found) >= 4 and any(found.values())
    assert {address for each in found.values() for address in each} <= LOOPBACK
    ranks = [number for number, each in found.items() if each]
    os.kill(ranks[0], signal.SIGKILL)
    output = finished(process, 1)
    assert "was killed by SIGKILL" in output and SECRET not in output
    without_secret(tmp_path)


@pytest.mark.full
def test_a_run_needs_no_network(corpus, tmp_path):  # noqa: F811
    """In a network namespace with a loopback interface and nothing else. A profile has no secret either."""
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    more = "--train-iters 6 --nproc 2 --profile --profile-step-start 2 --profile-step-end 3"
    secret = os.environ | {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    process = start(tmp_path, arguments(corpus, more), prefix=tuple(alone), env=secret)
    assert "next    nanomegatron generate" in finished(process, DONE)
    without_secret(tmp_path)
