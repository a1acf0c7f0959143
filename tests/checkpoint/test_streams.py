"""Conversion in slices: memory, types, several files, --verify, interruptions."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from nanomegatron.checkpoint import blocks, convert_target, manifest, megatron_write, streams
from nanomegatron.checkpoint import files as shards
from nanomegatron.checkpoint.checkpoint import load
from nanomegatron.checkpoint.convert_source import open_hf, open_ours
from nanomegatron.checkpoint.torch_dist import read_foreign
from nanomegatron.config.cli import from_toml
from tests.checkpoint.test_convert import LLAMA, files, own_memory, run, trained_here
from tests.checkpoints import ALONE
from tests.hf_models import data, hugging_face, logit_error, transformers
from tests.hf_models import save as save_theirs

ROOT = Path(convert.__file__).parent


def large(folder: Path, rows: int) -> None:
    """A folder of a llama with two tensors of `rows` rows of 1 KiB."""
    save_theirs(hugging_face("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    few = dict(vocab_size=rows, hidden_size=256, intermediate_size=8, num_hidden_layers=1, head_dim=64)
    few |= dict(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)
    (folder / "config.json").write_text(json.dumps(config | few))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    zeros = {key: torch.zeros(x.shape) for key, x in model.state_dict().items()}
    save_file(zeros, folder / "model.safetensors")


def test_memory_is_that_of_a_few_slices(tmp_path, monkeypatch):
    """Two tensors of 64 MiB, both ways and with a cast, take less than 24 MiB beside the program."""
    large(tmp_path / "theirs", 2**16)
    monkeypatch.setattr(streams, "SLICE", 2**20)
    for module in (blocks, manifest):  # else eight blocks of 16 MiB are on their way to the disk
        monkeypatch.setattr(module, "CRC_BLOCK", 2**20)
    peak, usual = [], streams.host_bytes

    def watched(x: torch.Tensor):
        peak.append(own_memory())
        return usual(x)

    for module in (shards, streams):
        monkeypatch.setattr(module, "host_bytes", watched)
    assert run(tmp_path / "theirs", tmp_path / "first") == 0  # loads what the program needs
    before = own_memory()
    peak.clear()
    assert run(tmp_path / "theirs", tmp_path / "ours", "nanomegatron", "--dtype", "bf16") == 0
    assert run(tmp_path / "ours", tmp_path / "again", "hf", "--verify") == 0
    assert len(peak) > 128 and max(peak) - before < 24 * 2**20


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "phi3"])
def test_types_of_weights(tmp_path, name):
    model = hugging_face(name)
    save_theirs(model, tmp_path / "theirs")
    assert run(tmp_path / "theirs", tmp_path / "ours", "nanomegatron", "--dtype", "bf16", "--verify") == 0
    assert from_toml(load(tmp_path / "ours", [], ALONE).config).dtype_name == "bfloat16"
    assert run(tmp_path / "ours", tmp_path / "again", "hf", "--verify") == 0
    assert run(tmp_path / "ours", tmp_path / "wide", "hf", "--dtype", "fp32") == 0
    old, new, wide = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "again", "wide"))
    assert old.keys() == new.keys() == wide.keys()
    for key, x in old.items():
        assert torch.equal(x.bfloat16(), new[key]) and torch.equal(x.bfloat16().float(), wide[key])
    before = json.loads((tmp_path / "theirs/config.json").read_text())
    after = json.loads((tmp_path / "again/config.json").read_text())
    assert {key for key, value in before.items() if after.get(key) != value} <= {"dtype", "torch_dtype"}
    for folder, dtype in (("again", torch.bfloat16), ("wide", torch.float32)):
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert found.config.dtype == dtype and type(found) is type(model)


def test_values_that_fp16_does_not_have(tmp_path, capsys):
    model = hugging_face("llama")
    model.model.norm.weight.data[0] = 1e6
    save_theirs(model, tmp_path / "theirs")
    assert run(tmp_path / "theirs", tmp_path / "ours", "nanomegatron", "--dtype", "fp16") == 2
    assert "final_layernorm.weight has values beyond 65504" in capsys.readouterr().err
    assert run(tmp_path / "theirs", tmp_path / "ours", "nanomegatron", "--dtype", "bf16", "--verify") == 0
    assert "cast to bf16, to the bit" in capsys.readouterr().out


def whole(stream: streams.Stream) -> torch.Tensor:
    return torch.cat(list(stream.slices()))


def test_fp32_is_read_from_the_main_parameters(tmp_path):
    trained_here(tmp_path / "ckpt", dtype=torch.bfloat16, **LLAMA)
    source = open_ours(tmp_path / "ckpt", None)
    main = {key: x for key, x in source.streams.items() if key.startswith("main/")}
    assert len(main) == len(source.tensors)
    assert run(tmp_path / "ckpt", tmp_path / "theirs", "hf", "--dtype", "fp32", "--verify") == 0
    for name, stream in open_hf(tmp_path / "theirs").tensors.items():
        assert torch.equal(whole(stream), whole(main[f"main/{name}"]))


def test_the_main_parameters_of_a_cast_run_are_its_weights(tmp_path):
    trained_here(tmp_path / "ckpt", **LLAMA)
    source = open_ours(tmp_path / "ckpt", None)
    cast = source.cast(torch.bfloat16)
    for name, stream in source.tensors.items():
        assert f"main/{name}" not in source.streams
        assert torch.equal(whole(cast.streams[f"main/{name}"]), whole(stream))
        assert torch.equal(whole(cast.tensors[name]), whole(stream).bfloat16())


@torch.no_grad()
def test_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "SLICE", 1000)  # 7 rows and a rest
    model = trained_here(tmp_path / "ckpt", **LLAMA)
    assert run(tmp_path / "ckpt", tmp_path / "one", "hf") == 0
    assert run(tmp_path / "ckpt", tmp_path / "many", "hf", "--max-shard-size", "20KB", "--verify") == 0
    names = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert run(tmp_path / "ckpt", tmp_path / "x", "nanomegatron", "--max-shard-size", "20KB") == 2
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    whole, parts = load_file(tmp_path / "one/model.safetensors"), {}
    for name in names:
        found = load_file(tmp_path / "many" / name)
        assert sum(x.nbytes for x in found.values()) <= 20_000 or len(found) == 1
        parts |= found
    assert parts.keys() == whole.keys() and all(torch.equal(x, parts[key]) for key, x in whole.items())
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "many", output_loading_info=True
    )
    assert not any(info.values()) and theirs.config.num_hidden_layers == 2
    tokens, _, positions = data()
    expected = theirs(tokens, position_ids=positions[None], use_cache=False).logits
    assert logit_error("", model, expected) < 1e-5


def test_an_index_of_other_files_is_left_out(tmp_path):
    save_theirs(hugging_face("llama"), tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").is_file()
    assert run(tmp_path / "theirs", tmp_path / "ours", "nanomegatron", "--dtype", "bf16") == 0
    assert run(tmp_path / "ours", tmp_path / "again", "hf") == 0
    assert run(tmp_path / "ours", tmp_path / "small", "hf", "--max-shard-size", "30KB") == 0
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1
    assert run(tmp_path / "theirs", tmp_path / "kept", "nanomegatron") == 0
    assert run(tmp_path / "kept", tmp_path / "one", "hf", "--max-shard-size", "5GB") == 0
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    assert {path.name for path in (tmp_path / "again").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


@pytest.mark.parametrize("source, target", [("hf", "nanomegatron"), ("hf", "megatron-core")])
def test_verify_compares_what_is_on_disk(tmp_path, monkeypatch, capsys, source, target):
    save_theirs(hugging_face("llama"), tmp_path / "theirs")
    paths = ("--input-path", str(tmp_path / "theirs"), "--output-path", str(tmp_path / "out"))
    words = ["--source", source, "--target", target, *paths, "--verify"]
    assert convert.main(words) == 0 and "verified: all 21 weights" in capsys.readouterr().out
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    words[words.index(str(tmp_path / "out"))] = str(tmp_path / "wrong")
    if target == "nanomegatron":
        write = convert_target.write_streams

        def negated(folder, rank, tensors):
            key = f"model/{name}"
            more = {key: tensors[key].map(torch.neg, torch.float32)} if key in tensors else {}
            write(folder, rank, tensors | more)

        monkeypatch.setattr(convert_target, "write_streams", negated)
    else:
        usual = megatron_write.their_stream

        def other(kind, parts, streams):
            found = usual(kind, parts, streams)
            return found.map(torch.neg, torch.float32) if parts[0][0] == name else found

        monkeypatch.setattr(megatron_write, "their_stream", other)
    assert convert.main(words) == 2
    assert "linear_fc2.weight is not what was read" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "theirs"]


def test_a_slice_for_megatron_is_written_without_the_rest_of_its_tensor(tmp_path, monkeypatch):
    """torch.save writes all that a view is of: here a weight file of Hugging Face, mapped into memory."""
    monkeypatch.setattr(streams, "SLICE", 1000)
    save_theirs(hugging_face("llama"), tmp_path / "theirs")
    paths = ("--input-path", str(tmp_path / "theirs"), "--output-path", str(tmp_path / "out"))
    assert convert.main(["--source", "hf", "--target", "megatron-core", *paths]) == 0
    folder = tmp_path / "out/release"
    for file, places in read_foreign(folder).format["entries"].items():
        data = (folder / file).read_bytes()
        for begin, length, _ in places.values():
            found = torch.load(io.BytesIO(data[begin : begin + length]), weights_only=True)
            assert found.untyped_storage().nbytes() == found.nbytes < 2000


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_conversion_leaves_nothing_to_load(tmp_path, sign):
    """Killed in the weights: nothing has the name, no config.json is there, and the next one cleans up."""
    large(tmp_path / "theirs", 2**13)
    assert run(tmp_path / "theirs", tmp_path / "ours") == 0
    before = files(tmp_path)
    out = tmp_path / "new" / "folder" / "out"
    paths = f"--input-path {tmp_path / 'ours'} --output-path {out}"
    slow = "import time; from nanomegatron.checkpoint import streams as s; s.SLICE = 2**16; w = s.host_bytes;"
    slow += "s.host_bytes = lambda x: (time.sleep(0.05), w(x))[1];"
    slow += f"import runpy, sys; sys.argv = 'convert.py --source nanomegatron --target hf {paths}'.split();"
    slow += f"runpy.run_path({str(ROOT / 'convert.py')!r}, run_name='__main__')"
    child = subprocess.Popen([sys.executable, "-c", slow], env=os.environ | {"PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 60
    while not list(out.parent.glob("out.tmp*/model*.safetensors")) and time.monotonic() < end:
        time.sleep(0.02)
    child.send_signal(sign)
    assert child.wait(20) in (143, -sign)
    left = list(out.parent.glob("out*"))
    assert len(left) == (tmp_path / "new").exists() == (sign == signal.SIGKILL)
    assert not any((folder / "config.json").exists() for folder in left)
    assert run(tmp_path / "ours", out, "hf") == 0
    assert files(out) == files(tmp_path / "theirs")
    assert {k: v for k, v in files(tmp_path).items() if not k.startswith("new/")} == before


def test_the_second_of_two_conversions_into_a_folder_is_refused(tmp_path, monkeypatch, capsys):
    """The first is done while it works: that one's files stay whole."""
    save_theirs(hugging_face("llama"), tmp_path / "theirs")
    write, out = convert.write_ours, tmp_path / "out"

    def overtaken(*given, **more):
        monkeypatch.setattr(convert, "write_ours", write)
        other = ["--source", "hf", "--target", "nanomegatron", "--input-path", str(tmp_path / "theirs")]
        subprocess.run([sys.executable, ROOT / "convert.py", *other, "--output-path", out], check=True)
        winners.update(files(out))
        return write(*given, **more)

    winners = {}
    monkeypatch.setattr(convert, "write_ours", overtaken)
    assert run(tmp_path / "theirs", out) == 2
    said = capsys.readouterr().err
    assert "Directory not empty" in said and f"'{out}'" in said
    assert winners and files(out) == winners and sorted(tmp_path.iterdir()) == [out, tmp_path / "theirs"]


def test_progress_says_rate_and_time_left(capsys):
    with convert.progress("written", 4 * 10**9, every=0) as report:
        for _ in range(2):
            report(10**9)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("written 2.0 of 4.0 GB, ") and last.endswith(" left") and "GB/s" in last


def test_words_that_are_no_sizes(capsys):
    with pytest.raises(SystemExit):
        convert.arguments("--source hf --target hf --input-path . --output-path x --no-such-flag".split())
    with pytest.raises(SystemExit):
        convert.arguments(
            "--source hf --target hf --input-path . --output-path x --max-shard-size 5TB".split()
        )
    assert "give a size such as 5GB" in capsys.readouterr().err
    assert [convert.size(text) for text in ("5GB", "500mb", "12", "3K")] == [5 * 10**9, 5 * 10**8, 12, 3000]
