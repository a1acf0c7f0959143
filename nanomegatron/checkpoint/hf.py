"""Maps our weights to those of a Hugging Face folder, by a table of names for each family.

    ours     decoder.layers.3.self_attention.linear_qkv.q.weight    [q, h]
    Llama    model.layers.3.self_attn.q_proj.weight                 [q, h]
    GPT-2    transformer.h.3.attn.c_attn.weight                     [h, 3h]     q, k and v side by side

    ours     decoder.layers.3.mlp.experts.5.linear_fc2.weight_t     [f, h]
    Mixtral  model.layers.3.block_sparse_moe.experts.5.w2.weight    [h, f]

GPT-2 stores its weights as [in, out]: our q is the first third of the transpose. The others store them as we
do, head by head; Phi-3 has q, k and v one after the other in one tensor, and gate and up. Files are
memory-mapped: a rank that copies its slice of a tensor reads only that slice.
"""

import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanomegatron.checkpoint.strictness import some
from nanomegatron.checkpoint.upcycle import dense_source
from nanomegatron.config.cli import flag
from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.config.megatron_args import why_no_checkpoint
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.user_files import check_file, read_json
from nanomegatron.data.tokenizer import Tokenizer, build_tokenizer
from nanomegatron.mesh import Axis
from nanomegatron.model import GPTModel
from nanomegatron.param import Init, Part
from nanomegatron.pick_variants import pick_variants

LLAMA = """
embedding.word_embeddings                       model.embed_tokens
decoder.layers.*.input_layernorm                model.layers.*.input_layernorm
decoder.layers.*.self_attention.linear_qkv.q    model.layers.*.self_attn.q_proj
decoder.layers.*.self_attention.linear_qkv.k    model.layers.*.self_attn.k_proj
decoder.layers.*.self_attention.linear_qkv.v    model.layers.*.self_attn.v_proj
decoder.layers.*.self_attention.q_layernorm     model.layers.*.self_attn.q_norm
decoder.layers.*.self_attention.k_layernorm     model.layers.*.self_attn.k_norm
decoder.layers.*.self_attention.linear_proj     model.layers.*.self_attn.o_proj
decoder.layers.*.pre_mlp_layernorm              model.layers.*.post_attention_layernorm
decoder.layers.*.mlp.linear_fc1.gate            model.layers.*.mlp.gate_proj
decoder.layers.*.mlp.linear_fc1.up              model.layers.*.mlp.up_proj
decoder.layers.*.mlp.linear_fc2                 model.layers.*.mlp.down_proj
decoder.final_layernorm                         model.norm
output_layer                                    lm_head
"""
MIXTRAL = """
decoder.layers.*.mlp.router                     model.layers.*.block_sparse_moe.gate
decoder.layers.*.mlp.experts.*.linear_fc1.gate  model.layers.*.block_sparse_moe.experts.*.w1
decoder.layers.*.mlp.experts.*.linear_fc1.up    model.layers.*.block_sparse_moe.experts.*.w3
decoder.layers.*.mlp.experts.*.linear_fc2       model.layers.*.block_sparse_moe.experts.*.w2
"""
QWEN_MOE = """
decoder.layers.*.mlp.router                     model.layers.*.mlp.gate
decoder.layers.*.mlp.experts.*.linear_fc1.gate  model.layers.*.mlp.experts.*.gate_proj
decoder.layers.*.mlp.experts.*.linear_fc1.up    model.layers.*.mlp.experts.*.up_proj
decoder.layers.*.mlp.experts.*.linear_fc2       model.layers.*.mlp.experts.*.down_proj
decoder.layers.*.mlp.shared_experts                    model.layers.*.mlp.shared_expert_gate
decoder.layers.*.mlp.shared_experts.linear_fc1.gate    model.layers.*.mlp.shared_expert.gate_proj
decoder.layers.*.mlp.shared_experts.linear_fc1.up      model.layers.*.mlp.shared_expert.up_proj
decoder.layers.*.mlp.shared_experts.linear_fc2         model.layers.*.mlp.shared_expert.down_proj
"""
PHI3 = """
decoder.layers.*.self_attention.linear_qkv.q    model.layers.*.self_attn.qkv_proj   rows 0/3
decoder.layers.*.self_attention.linear_qkv.k    model.layers.*.self_attn.qkv_proj   rows 1/3
decoder.layers.*.self_attention.linear_qkv.v    model.layers.*.self_attn.qkv_proj   rows 2/3
decoder.layers.*.mlp.linear_fc1.gate            model.layers.*.mlp.gate_up_proj     rows 0/2
decoder.layers.*.mlp.linear_fc1.up              model.layers.*.mlp.gate_up_proj     rows 1/2
"""
NORMS_AFTER = """
decoder.layers.*.post_attention_layernorm       model.layers.*.post_attention_layernorm
decoder.layers.*.pre_mlp_layernorm              model.layers.*.pre_feedforward_layernorm
decoder.layers.*.post_mlp_layernorm             model.layers.*.post_feedforward_layernorm
"""
GPT2 = """
embedding.word_embeddings                       transformer.wte
embedding.position_embeddings                   transformer.wpe
decoder.layers.*.input_layernorm                transformer.h.*.ln_1
decoder.layers.*.self_attention.linear_qkv.q    transformer.h.*.attn.c_attn  transposed 0/3
decoder.layers.*.self_attention.linear_qkv.k    transformer.h.*.attn.c_attn  transposed 1/3
decoder.layers.*.self_attention.linear_qkv.v    transformer.h.*.attn.c_attn  transposed 2/3
decoder.layers.*.self_attention.linear_proj     transformer.h.*.attn.c_proj  transposed
decoder.layers.*.pre_mlp_layernorm              transformer.h.*.ln_2
decoder.layers.*.mlp.linear_fc1                 transformer.h.*.mlp.c_fc     transposed
decoder.layers.*.mlp.linear_fc2                 transformer.h.*.mlp.c_proj   transposed
decoder.final_layernorm                         transformer.ln_f
output_layer                                    lm_head
"""
WEIGHT_TABLES = {
    "gpt2": GPT2,
    "mixtral": LLAMA + MIXTRAL,
    "phi3": LLAMA + PHI3,
    "qwen2_moe": LLAMA + QWEN_MOE,
    "qwen3_moe": LLAMA + QWEN_MOE,
    "olmo2": LLAMA + NORMS_AFTER,
    "gemma2": LLAMA + NORMS_AFTER,
    "gemma3_text": LLAMA + NORMS_AFTER,
}
HEADER = ".header"  # NAME.header: the bytes of weight file NAME before its first tensor
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
TOKENIZER_FILES = {  # names of our tokenizers' files in a Hugging Face folder
    "HuggingFaceTokenizer": {"model": "tokenizer.json"},
    "SentencePieceTokenizer": {"model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
}
# Tensors of older files that are no weights: masks and tables that the model computes.
BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
INDEX = r"(?<=\.)\d+(?=\.)"
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The settings that decide a tensor's shape, beside --hidden-size.
HINTS = {
    "shared_experts": "--moe-shared-expert-intermediate-size",
    "experts": "--num-experts, --moe-ffn-hidden-size",
    "router": "--num-experts",
    "linear_fc": "--ffn-hidden-size",
    "self_attention": "--num-attention-heads, --num-query-groups, --kv-channels",
    "position": "--max-position-embeddings",
    "word": "--vocab-size",
    "output": "--vocab-size, --untie-embeddings-and-output-weights",
}


@dataclass(frozen=True)
class Place:
    """The place of one of our global tensors: the rows of part `index` of their tensor `name`."""

    name: str
    transposed: bool = False
    index: int = 0
    rows: tuple[int, ...] = ()  # of each part

    def ours(self, theirs: torch.Tensor) -> torch.Tensor:
        """Return our tensor as a view of theirs."""
        return (theirs.t() if self.transposed else theirs).split(self.rows)[self.index]

    def shape(self, ours: Sequence[int]) -> list[int]:
        """Return the shape of their tensor, from that of ours."""
        shape = [sum(self.rows), *ours[1:]]
        return shape[::-1] if self.transposed else shape


def places(shapes: Mapping[str, Sequence[int]], family: str, theirs: Iterable[str] = ()) -> dict[str, Place]:
    """Return the place of each of our global names, given with their shapes.

    theirs: the names in a folder; if it was saved without the LM head they have no prefix such as `model.`.
    Raises ValueError with the names that the family does not have.
    """
    rows = filter(None, WEIGHT_TABLES.get(family, LLAMA).splitlines())
    table = {ours: rest for ours, *rest in map(str.split, rows)}
    prefix = table["embedding.word_embeddings"][0].split(".")[0] + "."
    theirs = list(theirs)
    bare = bool(theirs) and not any(name.startswith(prefix) for name in theirs)
    found, rows, unknown = {}, defaultdict(dict), []
    for ours, shape in shapes.items():
        stem, kind = ours.rsplit(".", 1)
        numbers = re.findall(INDEX, stem)  # layer, expert
        if (stem := re.sub(INDEX, "*", stem)) not in table:
            unknown.append(ours)
            continue
        name, *how = table[stem]
        name = name.removeprefix(prefix if bare else "").replace("*", "{}").format(*numbers)
        name = f"{name}.{'bias' if kind == 'bias' else 'weight'}"
        index, count = map(int, how[1].split("/")) if len(how) > 1 else (0, 1)
        transposed = kind == "weight_t" or (how[:1] == ["transposed"] and kind == "weight")
        found[ours] = Place(name, transposed, index, (0,) * count)
        rows[name][index] = shape[0]
    if unknown:
        names = ", ".join(some(unknown))
        raise ValueError(f"{names}: the Hugging Face family {family} has nothing like it")
    return {
        ours: replace(place, rows=tuple(rows[place.name].get(i, 0) for i in range(len(place.rows))))
        for ours, place in found.items()
    }


class Folder:
    """The tensors of a Hugging Face folder by name, memory-mapped. Raises ValueError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.family, self.settings = read_folder(path)
        self.files = weight_files(self.path)
        self.tensors = {}  # read only when accessed
        for name in self.files:
            with suppress(FileNotFoundError):  # the reader says it
                check_file(self.path / name, sys.maxsize)
            try:
                with safe_open(self.path / name, "pt") as file:
                    self.tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            except (OSError, ValueError, SafetensorError) as error:
                raise ValueError(f"{self.path / name}: {error}") from None

    def match(self, parts: Iterable[Part]) -> dict[str, Place]:
        """Return the place of each part. Raises ValueError with all missing, extra or misshapen tensors."""
        shapes, errors = {part.name: part.shape for part in parts}, []
        found = places(shapes, self.family, self.tensors)
        for ours, place in found.items():
            hint = next((f", {flags}" for word, flags in HINTS.items() if word in ours), "")
            wanted, there = place.shape(shapes[ours]), self.tensors.get(place.name)
            if there is None:
                errors.append(f"{place.name}: missing, wanted {wanted}; see --num-layers{hint}")
            elif (shape := list(there.shape)) != wanted:
                errors.append(f"{place.name}: is {shape}, wanted {wanted}; see --hidden-size{hint}")
            elif there.dtype not in FLOAT_DTYPES:
                errors.append(f"{place.name}: is {there.dtype}, wanted weights that are not quantized")
        for name in sorted(self.tensors.keys() - {place.name for place in found.values()}):
            if name == "lm_head.weight":
                embedding = self.tensors.get(found["embedding.word_embeddings.weight"].name)
                if embedding is None or not torch.equal(self.tensors[name], embedding):
                    errors.append(f"{name}: is no copy; see --untie-embeddings-and-output-weights")
            elif not BUFFERS.fullmatch(name):
                errors.append(f"{name}: not in this model; see --num-layers")
        if errors:
            more = [f"... and {len(errors) - 8} more"] if len(errors) > 8 else []
            raise ValueError("\n  ".join([f"{self.path} does not fit this model:", *errors[:8], *more]))
        return found


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files: model.safetensors, those of the index, or the only one."""
    index = folder / "model.safetensors.index.json"
    names = [path.name for path in folder.glob("*.safetensors")]
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if index.is_file():
        try:
            return sorted({Path(name).name for name in read_json(index)["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not an index of safetensors files ({error!r})") from None
    if len(names) == 1:
        return names
    if names:
        raise ValueError(
            f"{folder}: {len(names)} .safetensors files, and no {index.name} that lists their tensors"
        )
    raise ValueError(f"{folder}: no model.safetensors{why_no_checkpoint(folder)}")


def keep_source_files(source: str | Path, kept: Path) -> None:
    """Copy to `kept` all files but the weights of a Hugging Face folder, or of a checkpoint's hf/ folder.

    They are chat template, generation settings and tokenizer; `convert.py` writes them back.
    """
    folder = Path(source) if is_hf_folder(source) else Path(source) / "hf"
    for path in folder.iterdir() if folder.is_dir() and folder != kept else ():
        if path.is_file() and path.suffix not in (*WEIGHTS, HEADER):
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept / path.name)


def folder_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder, or if it has none a NullTokenizer (text is decimal ids).

    Raises ValueError.
    """
    for kind, files in TOKENIZER_FILES.items():
        if all((folder / name).is_file() for name in files.values()):
            paths = {key: str(folder / name) for key, name in files.items()}
            tokenizer = build_tokenizer(kind, **paths)
            tokenizer.include_special_tokens(True)
            return tokenizer
    return build_tokenizer("NullTokenizer", vocab_size=vocab_size)


def stops_of(root: str | Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's own, and those that a Hugging Face model's files name.

    As transformers' generate has it: eos_token_id, a number or a list, of generation_config.json, or of
    config.json where the folder has no such file. The files are in its folder, or what a checkpoint that came
    from it has kept. A NullTokenizer stands for one that is not known: its own token counts only where no
    file names any. Raises ValueError.
    """
    folder = Path(root) if is_hf_folder(root) else Path(root) / "hf"
    paths = [folder / name for name in ("generation_config.json", "config.json")]
    path = next((path for path in paths if path.is_file()), None)
    found = read_json(path).get("eos_token_id") if path else None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(f"{path}: eos_token_id = {found!r:.80}: must be a token's number, or a list of them")
    unknown = tokenizer.spec["type"] == "NullTokenizer"
    return frozenset(ids) if ids and unknown else frozenset({*ids, tokenizer.eod})


def model_parts(config: TransformerConfig, vocab_size: int) -> list[Part]:
    """Return the parts of all parameters of a whole model, built without memory for weights."""
    model = GPTModel(
        replace(config, attention_backend="auto"),  # the run's may need a GPU
        vocab_size=vocab_size,
        max_sequence_length=config.max_position_embeddings,
        init=Init(device=torch.device("meta")),
    )
    pick_variants(model, Axis.single("cp"))
    return [part for param in model.parameters() for part in param.spec.parts]


def load_weights(
    folder: str | Path,
    params: Iterable[torch.nn.Parameter],
    config: TransformerConfig,
    vocab_size: int,
    upcycling: bool = False,
) -> list[str]:
    """Fill each rank's slices of parameters from a Hugging Face folder; returns notes for the user.

    config, vocab_size: of the whole model, even if `params` are only a stage or some experts. upcycling: the
    folder's model is the same without experts. Nothing is communicated.
    Raises ValueError with all mismatches, before any parameter is filled.
    """
    there, types = Folder(folder), set()
    if upcycling and there.settings.get("num_experts"):
        raise ValueError(f"--moe-use-upcycling: {folder} has experts; leave it out")
    whole = model_parts(replace(config, num_experts=None) if upcycling else config, vocab_size)
    found = there.match(whole)
    for param in params:
        for part in param.spec.parts:
            if (source := dense_source(part.name) if upcycling else (part.name, False)) is None:
                continue
            name, transposed = source
            theirs = there.tensors[found[name].name]
            ours = found[name].ours(theirs)
            part.local_view(param.detach()).copy_(part.global_view(ours.t() if transposed else ours))
            types |= {str(theirs.dtype).removeprefix("torch.")} if theirs.dtype != param.dtype else set()
    return [f"weights cast from {dtype}" for dtype in sorted(types)] + config_mismatches(there, config)


def config_mismatches(there: Folder, config: TransformerConfig) -> list[str]:
    """Return notes on settings that fit the folder's weights but differ from those they were trained with."""
    free = {"init_method_std", "max_position_embeddings"}
    return [
        f"{flag(name)} {getattr(config, name)}: {there.path} was trained with {value}"
        for name, value in there.settings.items()
        if name in vars(config) and name not in free and getattr(config, name) != value
    ]
