"""Opens what `convert.py` reads: a checkpoint's weights by our names, none of them read yet.

hf               a Hugging Face folder, memory-mapped
nanomegatron     a checkpoint of this program, its checksums compared; with optimizer states
megatron-core    one of Megatron-LM, torch_dist or legacy
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.checkpoint import load
from nanomegatron.checkpoint.files import TORCH_DTYPES, Piece
from nanomegatron.checkpoint.formats import fill, open_checkpoint
from nanomegatron.checkpoint.hf import Folder, model_parts
from nanomegatron.checkpoint.manifest import CheckpointError, Manifest
from nanomegatron.checkpoint.megatron import open_megatron
from nanomegatron.checkpoint.optimizer_state import scaler_numbers
from nanomegatron.checkpoint.streams import Stream
from nanomegatron.config.cli import build_config, from_toml, parse
from nanomegatron.config.hf import is_hf_folder
from nanomegatron.config.megatron_args import megatron_folder, megatron_progress, why_no_checkpoint
from nanomegatron.config.settings import Config, ParallelConfig, PrecisionConfig
from nanomegatron.lr_schedule import LossScaler
from nanomegatron.mesh import Mesh, World

ALONE = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint to convert.

    streams: the weights by our names, "model/NAME", others of a Hugging Face folder by theirs, "hf/NAME", and
    states of the optimizer, "exp_avg/NAME" ...; state: what a checkpoint of ours has saved beside tensors, or
    would have.
    """

    root: Path
    config: Config
    streams: dict[str, Stream]
    state: dict[str, Any] = field(default_factory=dict)
    folder: Folder | None = None
    notes: Sequence[str] = ()

    def of_kind(self, kind: str) -> dict[str, Stream]:
        """Return the tensors of a kind, by name."""
        return {key[len(kind) + 1 :]: x for key, x in self.streams.items() if key.startswith(f"{kind}/")}

    @property
    def tensors(self) -> dict[str, Stream]:
        """The weights, by our names."""
        return self.of_kind("model")

    @property
    def vocab_size(self) -> int:
        return self.streams[f"model/{WORD_EMBEDDINGS}"].shape[0]

    def only(self, kinds: str | tuple[str, ...]) -> "SourceModel":
        """Return it with the tensors whose keys begin so."""
        return replace(self, streams={key: x for key, x in self.streams.items() if key.startswith(kinds)})

    def nbytes(self, kinds: str | tuple[str, ...] = "") -> int:
        """Bytes of the tensors whose keys begin so; the optimizer's states are fp32."""
        return sum(stream.nbytes for key, stream in self.streams.items() if key.startswith(kinds))

    def cast(self, dtype: torch.dtype) -> "SourceModel":
        """Return it with weights of this type; fp32 is read from the main parameters, if it has them.

        Of an fp32 run that is cast to 16 bits the weights become its main parameters.
        """
        found = self.tensors
        streams = self.streams
        if dtype == torch.float32:
            found = {name: streams.get(f"main/{name}", stream) for name, stream in found.items()}
        else:
            streams = main_from_weights(streams) | streams
        found = {f"model/{name}": stream.map(cast_of(name, dtype), dtype) for name, stream in found.items()}
        precision = replace(self.config.precision, **types(dtype))
        return replace(self, streams=streams | found, config=replace(self.config, precision=precision))

    def counted(self, report: Callable[[int], object]) -> "SourceModel":
        """Return it so that `report` hears the bytes of each slice that is read."""

        def count(x: torch.Tensor) -> torch.Tensor:
            report(x.nbytes)
            return x

        return replace(self, streams={key: x.map(count, x.dtype) for key, x in self.streams.items()})


def main_from_weights(streams: dict[str, Stream]) -> dict[str, Stream]:
    """Return main parameters that are the weights, for those that have optimizer states."""
    trained = [key.removeprefix("exp_avg/") for key in streams if key.startswith("exp_avg/")]
    return {
        f"main/{name}": streams[f"model/{name}"].map(torch.Tensor.float, torch.float32) for name in trained
    }


def cast_of(name: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the cast of a tensor's slices, which raises ValueError if fp16 has no such values."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        found = x.to(dtype)
        if dtype == torch.float16 and not found.isfinite().all() and x.isfinite().all():
            raise ValueError(f"--dtype fp16: {name} has values beyond 65504, its largest; give bf16 or fp32")
        return found

    return cast


def types(dtype: torch.dtype) -> dict[str, bool]:
    """Return the settings of a precision that say a type of weights."""
    return {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}


def open_hf(root: Path) -> SourceModel:
    """Open a Hugging Face folder. Raises ValueError."""
    folder = Folder(root)
    config = build_config(folder.settings)
    parts = model_parts(config.model, config.data.vocab_size)
    found = folder.match(parts)

    def stream(x: torch.Tensor) -> Stream:
        return Stream(tuple(x.shape), x.dtype, lambda begin, end: x[begin:end] if x.dim() else x)

    rest = sorted(folder.tensors.keys() - {place.name for place in found.values()})
    streams = {f"model/{n}": stream(place.ours(folder.tensors[place.name])) for n, place in found.items()}
    streams |= {f"hf/{name}": stream(folder.tensors[name]) for name in rest}
    precision = PrecisionConfig(**types(streams[f"model/{WORD_EMBEDDINGS}"].dtype))
    return SourceModel(root, replace(config, precision=precision), streams, folder=folder)


def open_ours(root: Path, step: int | None) -> SourceModel:
    """Open and verify a checkpoint of this program. Raises CheckpointError."""
    if megatron_folder(root, step):
        raise CheckpointError(f"--input-path {root}: is of Megatron-LM; give --source megatron-core")
    loaded = load(root, [], ALONE, step)
    if loaded is None:
        fix = why_no_checkpoint(root, step)
        fix = "; it is of Hugging Face, give --source hf" if is_hf_folder(root) else fix
        raise CheckpointError(f"--input-path {root}: no checkpoint there{fix}")
    folder = root / f"iter_{loaded.iteration:07d}"
    folder = folder if folder.exists() else folder.with_suffix(".old")
    streams = streams_of(folder, open_checkpoint(folder))
    config = from_toml(loaded.config)
    if f"model/{WORD_EMBEDDINGS}" not in streams:
        raise CheckpointError(f"{folder}: model/{WORD_EMBEDDINGS} is missing")
    return SourceModel(root, config, streams, loaded.state, notes=loaded.notes)


def open_theirs(root: Path, step: int | None, flags: list[str]) -> SourceModel:
    """Open a checkpoint of Megatron-LM; its args, or flags, say what the model is. Raises ValueError."""
    folder = megatron_folder(root, step)
    if folder is None:
        files = "no .metadata and metadata.json, or mp_rank_*, in the iteration of the tracker or --ckpt-step"
        fix = why_no_checkpoint(root, step) or f": {files}"
        if any(root.glob("iter_*/manifest.json")):
            fix = "; it is of nanomegatron, give --source nanomegatron"
        raise CheckpointError(f"--input-path {root}: no checkpoint of Megatron-LM there{fix}")
    parsed = parse(["--load", str(folder), *flags])
    config = parsed.config
    if parsed.errors:
        raise ValueError("\n  ".join(parsed.errors))
    if not config.data.vocab_size:
        raise ValueError(f"{folder}: it does not say how large the vocabulary is; give --vocab-size")
    length = config.model.max_position_embeddings or config.data.seq_length
    model = replace(config.model, max_position_embeddings=length)
    config = replace(config, model=model, checkpoint=replace(config.checkpoint, load=None))
    manifest = open_megatron(folder, model, config.data.vocab_size)
    notes = list(manifest.notes)
    if "--vocab-size" in " ".join(flags):
        notes.append(f"rows of the vocabulary from {config.data.vocab_size} on are left out, as padding")
    source = SourceModel(root, config, streams_of(folder, manifest), notes=notes)
    iteration, samples = megatron_progress(folder)
    if samples is None or not source.of_kind("exp_avg"):
        return source.only("model/")
    scaler = scaler_numbers(LossScaler(config.precision, torch.device("cpu")))
    state = {
        "iteration": iteration,
        "consumed_samples": samples,
        "skipped_samples": 0,
        "data_samples": [],
        "optimizer": {"good_steps": iteration, "loss_scaler": scaler},
    }
    source = replace(source, state=state)
    if config.precision.bf16 or config.precision.fp16:
        return replace(source, streams=main_from_weights(source.streams) | source.streams)
    return source.only(("model/", "exp_avg/", "exp_avg_sq/"))


def streams_of(folder: Path, manifest: Manifest) -> dict[str, Stream]:
    """Return all tensors of a checkpoint, by key."""

    def stream(key: str) -> Stream:
        saved = manifest.tensors[key]
        dtype = TORCH_DTYPES[saved.dtype]

        def rows(begin: int, end: int) -> torch.Tensor:
            shape = (end - begin, *saved.shape[1:]) if saved.shape else ()
            offset = (begin, *(0 for _ in saved.shape[1:])) if saved.shape else ()
            data = torch.empty(shape, dtype=dtype)
            fill(folder, manifest, [Piece(key, saved.shape, offset, data)])
            return data

        return Stream(tuple(saved.shape), dtype, rows, whole="source" in manifest.format)

    return {key: stream(key) for key in manifest.tensors}
