"""Command lines that cannot be: each ends at once, with exit code 2 and a message that names the mistake.

The fast tier takes the first of each kind, the full one all.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.launch import start as start_module

ROOT = Path(train.__file__).parent
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 10 --device cpu"
)
MOCK = f"{MODEL} --mock-data --vocab-size 100"
REAL = f"{MODEL} --split 90,10,0 --eval-iters 1"
# Flags behind MOCK, or behind REAL for what is about data and files | what the message must hold; without it
# the flags themselves.
KINDS = {
    "zero": """
--hidden-size 0
--num-layers 0
--num-attention-heads 0
--ffn-hidden-size 0
--kv-channels 0
--seq-length 0
--micro-batch-size 0
--global-batch-size 0
--train-iters 0
--train-samples 0
--eval-interval 0
--save-interval 0
--exit-interval 0
--log-interval 0
--lr-decay-iters 0
--nproc 0
--tp 0 | --tensor-model-parallel-size 0:
--pp 0 | --pipeline-model-parallel-size 0:
--cp 0 | --context-parallel-size 0:
--vpp 0 | --num-virtual-stages-per-pipeline-rank 0:
--num-experts 4 --moe-router-topk 0 | --moe-router-topk 0:
--ddp-bucket-size 0
--vocab-size 0
--make-vocab-size-divisible-by 0
--iterations-to-skip 0
--trace-iterations 0
--norm-epsilon 0 | --norm-epsilon 0.0:
--adam-eps 0 | --adam-eps 0.0:
--rotary-base 0 | --rotary-base 0.0:
--distributed-timeout-minutes 0 | --distributed-timeout-minutes 0.0:
--exit-duration-in-mins 0 | --exit-duration-in-mins 0.0:
""",
    "negative": """
--hidden-size -64
--num-layers -1
--num-query-groups -1
--lr -1e-3 | --lr -0.001:
--min-lr -1 | --min-lr -1.0:
--lr-warmup-iters -1
--weight-decay -0.1
--clip-grad -1 | --clip-grad -1.0:
--adam-beta1 -0.1
--init-method-std -0.02
--hidden-dropout -0.1
--eval-iters -1
--seed -1
--num-workers -1
--ckpt-step -1
--profile-step-start -1
--fp8-margin -1 --fp8-format e4m3 --bf16 | --fp8-margin -1:
--log-fp8-stats -1 | --log-fp8-stats -1:
--num-experts 4 --moe-z-loss-coeff -1 | --moe-z-loss-coeff -1.0:
--split -1,1,1
""",
    "no number": """
--lr nan
--lr=nan | --lr nan:
--lr inf
--min-lr nan
--weight-decay nan
--clip-grad inf
--adam-beta2 nan
--hidden-dropout nan
--init-method-std inf
--lr-warmup-fraction nan
--initial-loss-scale nan --fp16 | --initial-loss-scale nan:
--distributed-timeout-minutes nan
--exit-duration-in-mins nan
--split nan
--split inf,1
""",
    "too large": """
--hidden-dropout 1 | --hidden-dropout 1.0:
--attention-dropout 1.5
--adam-beta1 1 | --adam-beta1 1.0:
--min-lr 1 | --min-lr 1.0: must be at least 0 and at most --lr
--lr-warmup-iters 10 | --lr-warmup-iters 10: must be less than the decay's 10
--lr-warmup-fraction 1.5
--seed 4294967296
--rotary-percent 2 --position-embedding-type rope | --rotary-percent 2.0:
--max-position-embeddings 8 | --max-position-embeddings 8: must be at least --seq-length 32
--num-experts 4 --moe-router-topk 5 | --moe-router-topk 5: must be greater than 0 and at most --num-experts 4
--profile --profile-ranks 4 | --profile-ranks 4:
""",
    "wrong type": """
--hidden-size 64.5
--hidden-size 6e1
--hidden-size NaN
--num-layers two
--lr fast
--lr= | --lr: an empty value
--seed 1.5
--train-iters all
--micro-batch-size 1.5
--rampup-batch-size 2 2 x
--iterations-to-skip a
--window-size a b
--bf16 yes | --bf16 yes: a switch
--use-distributed-optimizer maybe
--tp two | --tensor-model-parallel-size two:
""",
    "wrong number of values": """
--lr 1e-3 1e-4
--hidden-size
--run-name a b
--rampup-batch-size 2 2 | --rampup-batch-size 2 2: takes 3 values
--window-size 7 | --window-size 7: takes 2 values
--hierarchical-context-parallel-sizes 2
--config a b
--metrics-jsonl a b
-lr 1e-3 | -lr 1e-3: takes one value
""",
    "empty": """
--load= | --load: an empty value; give one, or leave the flag out
--run-name= | --run-name: an empty value
--data-cache-path= | --data-cache-path: an empty value
--config= | --config: an empty value
--data-path | --data-path: takes at least one value
--iterations-to-skip | --iterations-to-skip: takes at least one value
--data-path= | --data-path: an empty value
--metrics-jsonl | --metrics-jsonl: takes one value
""",
    "absurd": f"""
--num-layers 100000000 | --num-layers 100000000: must be greater than 0 and at most 10000
--train-iters 100000000000 | --train-iters 100000000000: must be greater than 0 and at most 20000000
--train-samples 10000000000 --global-batch-size 1 --train-iters None | 10000000000 iterations; must be
--vocab-size 1000000000000 | --vocab-size 1000000000000: must be
--hidden-size 1000000000 | --hidden-size 1000000000: must be greater than 0 and at most
--eval-iters 100000000000 | --eval-iters 100000000000: must be at least 0 and at most 20000000
--global-batch-size 8000000000000 | --global-batch-size 8000000000000: must be
--micro-batch-size 8000000000000 | --micro-batch-size 8000000000000: must be
--rampup-batch-size 1 1 100 --global-batch-size 16000000 | --rampup-batch-size 1 1 100: must reach
--num-workers 100000 | --num-workers 100000: must be at least 0 and at most 1024
--distributed-timeout-minutes 1e300 | --distributed-timeout-minutes 1e+300: must be greater than 0 and at most
--seq-length 1000000000000 | --seq-length 1000000000000: must be
--num-attention-heads 1000000000 | --num-attention-heads 1000000000: must be
--ffn-hidden-size 100000000000 | --ffn-hidden-size 100000000000: must be
--kv-channels 100000000000 | --kv-channels 100000000000: must be
--nproc 1000000 | --nproc 1000000: must be greater than 0 and at most
--save-interval 1{"0" * 400} | must be below 2^63
--save-interval 1{"0" * 5000} | must be a whole number
--run-name {"a" * 300} | of at most 200 bytes
--save {"a" * 300} | cannot write to
--hidden-size 65536 --num-layers 1000 --num-attention-heads 64 | GiB are needed, and this machine has
""",
    "no such choice": """
--normalization rmsnorm | --normalization rmsnorm: must be one of LayerNorm, RMSNorm; did you mean RMSNorm?
--position-embedding-type ROPE | did you mean rope?
--lr-decay-style exponential
--device gpu
--device cuda:0
--distributed-backend mpi
--data-parallel-sharding-strategy all
--dataloader-type random
--attention-backend flash2
--recompute-granularity all
--timing-log-option median
--ckpt-format zarr
--ckpt-format torch_dcp | --ckpt-format torch_dcp: of parameters sharded over dp; use sharded
--dist-ckpt-strictness return_all | nothing here could be given the names
--dist-ckpt-strictness no
--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler | not with | leave one out
--fp8-format e5m2 --bf16 | --fp8-format e5m2:
--fp8-recipe mxfp8 --fp8-format e4m3 --bf16 | --fp8-recipe mxfp8:
--exp-avg-dtype fp8
--tokenizer-type gpt2bpetokenizer
--num-experts 4 --moe-token-dispatcher-type nccl | --moe-token-dispatcher-type nccl:
--optimizer sgd | --optimizer sgd: here only adam
""",
    "no such flag": """
--hiden-size 64 | --hiden-size: unknown flag; did you mean --hidden-size?
--learning-rate 1e-3 | --learning-rate: unknown flag
--foo bar | --foo: unknown flag; --help all lists every flag
--no-lr | --no-lr: unknown flag
--batch-size 8 | --batch-size: unknown flag; did you mean --global-batch-size?
--use-megatron-fsdp | --use-megatron-fsdp: a flag of Megatron-LM for something that is not here
--use-flash-attn 2 | --use-flash-attn 2: takes 0 values
""",
    "does not divide": """
--hidden-size 66 | --hidden-size 66: must be a multiple of --num-attention-heads 4; nearest 64 or 68
--num-query-groups 3
--kv-channels 15 --position-embedding-type rope | head size 15: must be even for rope; set --kv-channels
--global-batch-size 3 --micro-batch-size 2 | --global-batch-size 3: must be a multiple of --micro-batch-size 2
--tp 3 --nproc 3 | --num-attention-heads 4: must be a multiple of --tensor-model-parallel-size 3
--tp 2 | --tensor-model-parallel-size 2: must divide the number of processes, 1; use --nproc 2
--pp 3 --nproc 3 | --num-layers 2: must be a multiple of 3 pipeline ranks
--cp 3 --nproc 3 | --seq-length 32: must be a multiple of 2 x --context-parallel-size 3
--dp 3 --nproc 2 | --data-parallel-size 3: 2 processes give 2
--num-experts 3 --ep 2 --nproc 2 | --num-experts 3: must be a multiple of --expert-model-parallel-size 2
""",
    "contradiction": """
--bf16 --fp16 | --bf16: not with --fp16; leave one out
--swiglu --squared-relu | --swiglu: not with --squared-relu
--train-samples 5 | --train-iters 10 --train-samples 5: give one
--data-path nowhere | --mock-data: not with --data-path; leave one out
--use-distributed-optimizer --data-parallel-sharding-strategy no_shard | --use-distributed-optimizer: not with
--loss-scale 8 | --loss-scale 8.0: needs --fp16
--eval-only --eval-iters 0 | --eval-only: needs --eval-iters
--fp8-format e4m3 --no-bf16 | --fp8-format e4m3: needs --bf16
--exp-avg-dtype bf16 | --exp-avg-dtype bf16: needs --use-precision-aware-optimizer
--vpp 2 | --num-virtual-stages-per-pipeline-rank 2: needs --pipeline-model-parallel-size
--ep 2 --nproc 2 | --expert-model-parallel-size 2: needs --num-experts
--overlap-param-gather --no-use-distributed-optimizer | --overlap-param-gather: needs
--finetune | --finetune: needs --load
--on-spike rollback | --on-spike rollback: needs --save-interval
--no-load-optim
--optimizer-cpu-offload --no-bf16 | --optimizer-cpu-offload: needs --bf16 or --fp16
--dynamic-context-parallel
--profile --profile-step-start 5 --profile-step-end 5 | --profile-step-end 5: must exceed --profile-step-start
""",
    "file of settings": """
--config nowhere.toml | --config nowhere.toml: no such file or preset; presets are
--config torn.toml | torn.toml: Unterminated string
--config latin.toml | latin.toml: not UTF-8 (byte 12)
--config key.toml | key.toml: unknown key hiden-size; did you mean --hidden-size?
--config type.toml | type.toml: hidden-size = 'big': must be a whole number
--config extends.toml | gone.toml: no such file
--config folder | folder: is a folder; give a regular file
--config deep.toml | deep.toml: nested too deeply
--config chain0.toml | extends more than
--config deep | config.json: not JSON (nested too deeply)
--config huge | num_hidden_layers = 1
--config list | model_type = ['llama']
--config number | config.json: must be a JSON object, not 3
--config list | model_type = ['llama']
--run-name ../up
--run-name .
""",
    "file of data": """
--data-path nowhere | --data-path nowhere: no file nowhere.bin and nowhere.idx; make them with nanomegatron
--data-path noidx | --data-path noidx: no file noidx.idx;
--data-path empty | empty.idx: 0 bytes
--data-path torn | torn.idx: 50 bytes
--data-path words --tokenizer-type ByteTokenizer --seq-length 100000 | --seq-length + 1 = 100001
--data-args-path blank | --data-args-path blank: has no data path in it
--data-args-path nowhere | --data-args-path nowhere: no such file
--train-data-path words --valid-data-path nowhere | --valid-data-path nowhere: no file
--valid-data-path words | --valid-data-path words: needs --train-data-path
--train-data-path words --data-path words | --train-data-path words: not with --data-path; leave one out
--data-path words --tokenizer-type ByteTokenizer --data-cache-path file | file: cannot keep caches there
--tokenizer-type ByteTokenizer | --tokenizer-type ByteTokenizer --split 90,10,0: give --data-path
--split 50,50 | --split 50,50: give --data-path; the built-in text has a tokenizer and a split of its own
""",
    "blend": """
--data-path 0 words 1 words | --data-path 0 words 1 words: give a weight above 0 before every prefix
--data-path -1 words 1 words | --data-path -1 words 1 words: give a weight
--data-path nan words 1 words | --data-path nan words 1 words: give a weight
--data-path 1 nowhere 2 words | --data-path nowhere: no file
--data-path 1 words words | --data-path 1: no file
--data-path words --split 0,1,0 | --split 0,1,0: must be
--data-path words --split 1,1,1,1 | --split 1,1,1,1: must be
""",
    "tokenizer": """
--data-path words --tokenizer-type GPT2 | --tokenizer-type GPT2: must be one of
--data-path words --tokenizer-type NullTokenizer | --tokenizer-type NullTokenizer: needs --vocab-size
--data-path words --tokenizer-type NullTokenizer --vocab-size 50 | words: holds token 256; the vocabulary
--data-path words --tokenizer-type TikTokenizer | --tokenizer-type TikTokenizer: needs --tokenizer-model
--data-path words --tokenizer-type TikTokenizer --tokenizer-model gpt9 | --tokenizer-model gpt9: no such file
--data-path words --tokenizer-type TikTokenizer --tokenizer-model file | file:1: b'x y z' is not
--data-path words --tokenizer-type GPT2BPETokenizer --vocab-file file | needs --merge-file
--data-path words --tokenizer-model file | --tokenizer-model file: needs --tokenizer-type
--data-path words --tokenizer-type ByteTokenizer --vocab-size 100 | --vocab-size 100: the tokenizer has 257
""",
    "place to write": """
--data-path words --tokenizer-type ByteTokenizer --save file/ckpt | --save file/ckpt: cannot write to
--data-path words --metrics-jsonl file/x | --metrics-jsonl file/x: file is a file; give another folder
--data-path words --metrics-jsonl folder | --metrics-jsonl folder: is a folder; give the name of a file
--data-path words --trace-dir file/deep/x | --trace-dir file/deep/x: file is a file
--data-path words --tensorboard-dir file | --tensorboard-dir file
""",
}
LLAMA = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
LLAMA |= dict(intermediate_size=128, vocab_size=100, max_position_embeddings=64, rms_norm_eps=1e-5)
FILES = {
    **{f"chain{i}.toml": f'extends = "chain{i + 1}.toml"\n' for i in range(1200)},
    "torn.toml": 'num-layers = 2\nlr = "0.1',
    "latin.toml": b'run-name = "\xe9"\n',
    "key.toml": "hiden-size = 3\n",
    "type.toml": 'hidden-size = "big"\n',
    "extends.toml": 'extends = "gone.toml"\n',
    "deep.toml": "x = " + "[" * 5000 + "]" * 5000,
    "deep/config.json": "[" * 50000 + "]" * 50000,
    "huge/config.json": json.dumps(LLAMA | {"num_hidden_layers": 10**400}),
    "list/config.json": json.dumps(LLAMA | {"model_type": ["llama"]}),
    "number/config.json": "3",
    "file": "x y z\n",
    "blank": "\n",
    "empty.bin": "",
    "empty.idx": "",
}
BEHIND_REAL = ("file of data", "blend", "tokenizer", "place to write")
CASES = [
    pytest.param(kind, *(line.split(" | ") * 2)[:2], marks=[pytest.mark.full] * bool(i), id=line[:60])
    for kind, lines in KINDS.items()
    for i, line in enumerate(lines.strip().splitlines())
]


def test_there_are_enough():
    assert len(CASES) >= 150 and len(KINDS) >= 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files of each kind, whole and damaged."""
    place = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (place / "folder").mkdir()
    with IndexedDatasetBuilder(str(place / "words"), np.uint16) as builder:
        for _ in range(40):
            builder.add_document(np.append(np.full(100, 97), 256))
        builder.finalize()
    for name in ("torn", "noidx"):
        shutil.copy(place / "words.bin", place / f"{name}.bin")
    (place / "torn.idx").write_bytes((place / "words.idx").read_bytes()[:50])
    return place


@pytest.mark.parametrize("kind, flags, part", CASES)
def test_a_bad_command_line_is_answered(kind, flags, part, folder, monkeypatch, capsys):
    """In less than a second of work, by a line or two (memory: with a table of 6), and nothing is trained."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "train", lambda run: DONE)
    monkeypatch.setattr(start_module, "launch", lambda *_, **__: [DONE])
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", lambda *_: None)  # it would stay
    start = time.process_time()
    try:
        code = train.main(f"{REAL if kind in BEHIND_REAL else MOCK} {flags}".split())
    finally:
        shutil.rmtree("runs", ignore_errors=True)
    printed = capsys.readouterr()
    said = printed.err + printed.out
    assert code == BAD_CONFIG and part in said and "Traceback" not in said, said
    assert len(said.splitlines()) <= 4 + 6 * ("GiB of a rank" in said) and time.process_time() - start < 1


NO_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""


TRAIN = ["--foo", "--num-layers 100000000", "--help all", "--tp 2 --device cpu"]
GENERATE = ["--top-k -1", "--pp 2 --nproc 3"]
WRONG = [f"train.py {flags}" for flags in TRAIN]
WRONG += [f"nanomegatron/__main__.py generate --load x {flags}" for flags in GENERATE]
WRONG += ["preprocess.py --workers 0 --input x --output-prefix y --tokenizer-type ByteTokenizer"]
WRONG += [f"convert.py --source hf --target {to} --input-path x --output-path y" for to in ("hf", "megatron")]


@pytest.mark.parametrize("line", WRONG)
def test_it_is_answered_before_torch_is_imported(line, tmp_path):
    """In less than a second of CPU time, the start of the interpreter included."""
    program, *flags = line.split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", NO_TORCH, str(ROOT / program), *flags]
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == (DONE if "--help" in flags else BAD_CONFIG), done.stderr
    assert "AssertionError" not in done.stderr and (done.stdout + done.stderr).strip()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
