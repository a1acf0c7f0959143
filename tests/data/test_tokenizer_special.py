"""Special tokens that a tokenizer's file puts around a text: in data, in prompts, in what is said of them."""

import json

import pytest

from nanomegatron.checkpoint.hf import folder_tokenizer
from nanomegatron.commands.generate_args import main as generate
from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.data.tokenizer import EOD, build_tokenizer, tokenizer_from_spec
from nanomegatron.report.generate import prompts_of
from tests.data.test_preprocess import jsonl, read, run
from tests.tokenizer_shapes import byte_level, byte_pairs, pieces

OFF = "--tokenizer-hf-no-include-special-tokens"
TEXTS = ["one", "", " two  \n", f"<bos> three{EOD}", "\u3000\n4<eos>"]


def with_processor(folder, kind: str):
    """A tokenizer.json of byte pairs, <bos> and <eos> after it, with a post-processor of this kind."""
    library = pytest.importorskip("tokenizers")
    folder.mkdir(exist_ok=True)
    byte_pairs(folder, byte_level(), added=["  "])
    made = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<bos>", "<eos>"])
    made.decoder = library.decoders.ByteLevel()
    names = [(name, made.token_to_id(name)) for name in ("<bos>", "<eos>")]
    processors = library.processors
    template = {"first": "<bos> $A", "both": "<bos> $A <eos>", "last": "$A <eos>"}.get(kind)
    if template:
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=names)
    elif kind == "llama3":
        first = processors.TemplateProcessing(single="<bos> $A", special_tokens=names)
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), first])
    elif kind == "bert":
        made.post_processor = processors.BertProcessing(names[1], names[0])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "add_bos_token": True}))
    return dict(names)


def transformers_ids(folder, **how):
    """transformers' way with text; special tokens in it are text, as here by default."""
    transformers = pytest.importorskip("transformers")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made = transformers.AutoTokenizer.from_pretrained(str(folder))
    return [made(text, split_special_tokens=True, **how).input_ids for text in TEXTS]


def written(prefix) -> list[list[int]]:
    data = read(prefix)
    return [data[i].tolist() for i in range(len(data))]


@pytest.mark.parametrize("kind", ["none", "first", "both", "last", "llama3", "bert"])
def test_ids_are_those_of_transformers(kind, tmp_path, capsys):
    """One by one, many at once, in the .bin; without them by Megatron's flag, which is said by no key."""
    special = with_processor(tmp_path, kind)
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path]
    source = ["--input", jsonl(tmp_path / "in.jsonl", TEXTS), "--output-prefix"]
    prefix = [special["<bos>"]] * (kind in ("first", "both", "llama3", "bert"))
    suffix = [special["<eos>"]] * (kind in ("both", "last", "bert"))
    for flags, how in ([], {}), ([OFF], {"add_special_tokens": False}):
        theirs, on = transformers_ids(tmp_path, **how), not flags
        ours = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        ours.include_special_tokens(on)
        assert [*map(ours.encode, TEXTS)] == theirs
        assert ours.encode_many(TEXTS)[0].tolist() == sum(theirs, [])
        assert run(*source, tmp_path / "x", *model, *flags, "--overwrite") == 0
        assert written(tmp_path / "x") == [ids for ids in theirs if ids]
        sidecar, said = read(tmp_path / "x").sidecar(), capsys.readouterr().out
        assert (sidecar.get("prefix_ids", []), sidecar.get("suffix_ids", [])) == (prefix * on, suffix * on)
        assert tokenizer_from_spec(sidecar["tokenizer"]).encode("one") == theirs[0]
        assert (f"begins with <bos> (id {special['<bos>']})" in said) == bool(prefix and on)
        assert (f"ends with <eos> (id {special['<eos>']})" in said) == bool(suffix and on)


def test_append_eod_beside_one_that_the_file_puts_there(tmp_path, capsys):
    """Two, as Megatron-LM appends its own whatever the ids end with; an empty document is not empty then."""
    special = with_processor(tmp_path, "both")
    first, last = special["<bos>"], special["<eos>"]
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path, "--append-eod"]
    assert run("--input", jsonl(tmp_path / "in.jsonl", TEXTS), "--output-prefix", tmp_path / "x", *model) == 0
    assert written(tmp_path / "x") == [[*ids, last] for ids in transformers_ids(tmp_path)]
    assert written(tmp_path / "x")[1] == [first, last, last]
    said = (
        f"begins with <bos> (id {first}) and ends with <eos> (id {last}), then <eos> (id {last}) of --append"
    )
    assert said in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("kind", ["none", "first", "both", "llama3"])
def test_megatrons_own_class(kind, tmp_path):
    library = pytest.importorskip("megatron.core.tokenizers.text.libraries.huggingface_tokenizer")
    with_processor(tmp_path, kind)
    transformers_ids(tmp_path)  # names the class
    for on in True, False:
        theirs = library.HuggingFaceTokenizer(str(tmp_path), use_fast=True, include_special_tokens=on)
        ours = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        ours.include_special_tokens(on)
        found, counts = ours.encode_many(TEXTS, special=True)  # Megatron's way with those in a text
        assert found.tolist() == sum(map(theirs.text_to_ids, TEXTS), [])
        assert len(counts) == len(TEXTS) and ours.eod == theirs.eos_id


def test_data_with_and_without_are_told_apart(tmp_path):
    """A run of preprocess.py resumes only in the same way; a run of training takes the way of its data.

    So it does with those of earlier versions, which put none there and do not say so, whatever the flags.
    """
    special = with_processor(tmp_path, "first")
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path]
    source = ["--input", jsonl(tmp_path / "in.jsonl", TEXTS * 20)]
    for name, flags in ("with", []), ("without", [OFF]):
        assert run(*source, "--output-prefix", tmp_path / name, *model, *flags) == 0
        prefix = f"{tmp_path}/{name}_text_document"
        named = dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
        for given in {}, named:
            data = DataConfig(data_path=(prefix,), seq_length=8, split="1", **given)
            tokenizer = choose_tokenizer(data)
            assert (
                tokenizer.encode("one")[:1] == [special["<bos>"]]
                if name == "with"
                else tokenizer.encode("one")
            )
            assert [*tokenizer.prefix_ids] == [special["<bos>"]] * (name == "with")
            assert len(build_datasets(data, (4, 0, 0), 1, tokenizer)[0])
    sidecars = [read(tmp_path / name).sidecar() for name in ("with", "without")]
    assert sidecars[0]["fingerprint"] == sidecars[1]["fingerprint"]  # the same ids of a text
    assert "include_special_tokens" not in sidecars[1]["tokenizer"]
    data = DataConfig(data_path=(f"{tmp_path}/with_text_document",), **named)
    off = DataConfig(**vars(data) | {"tokenizer_hf_no_include_special_tokens": True})
    assert [*choose_tokenizer(off).prefix_ids] == []


def test_resume_of_preprocess_in_the_other_way(tmp_path, capsys, monkeypatch):
    with_processor(tmp_path, "first")
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path, "--resume"]
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n[]\n')
    flags = ["--input", tmp_path / "bad.jsonl", "--output-prefix", tmp_path / "x", *model]
    assert run(*flags) == 2 and run(*flags, OFF) == 2
    assert "of a run with another prefix_ids" in capsys.readouterr().err


def test_a_folder_with_a_sentencepiece_model(tmp_path):
    """As transformers: by its tokenizer_config.json. Named by flags it is Megatron's way, without any."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    plain = pieces(tmp_path, user_defined_symbols=["<added>"]).ours
    for asked in {}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}:
        config = {"tokenizer_class": "LlamaTokenizer"} | asked
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        ours = folder_tokenizer(tmp_path, plain.vocab_size)
        assert ours.encode("one two") == theirs("one two").input_ids
        assert ours.encode_many(["one two"])[0].tolist() == theirs("one two").input_ids
        assert tokenizer_from_spec(ours.spec).encode("one") == ours.encode("one")
        assert build_tokenizer("Llama2Tokenizer", ours.spec["model"]).encode("a") == plain.encode("a")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="no special tokens around a text now"):
        tokenizer_from_spec(ours.spec)


@pytest.fixture(scope="module", params=["none", "first", "both"])
def model(request, tmp_path_factory):
    """A folder of a tiny Llama with its tokenizer, and what is in it."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param)
    special = with_processor(folder, request.param)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        vocab_size=max(special.values()) + 9,
        initializer_range=0.3,
        eos_token_id=special["<eos>"],
    )
    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    transformers_ids(folder)
    return request.param, folder, theirs, transformers.AutoTokenizer.from_pretrained(str(folder)), special


def continued(theirs, tokenizer, text: str, **how) -> str:
    """By transformers: the likeliest twelve tokens, without what the file puts behind a text."""
    ids = tokenizer(text, return_tensors="pt", split_special_tokens=True, **how).input_ids
    if ids[0, -1:].tolist() == [theirs.config.eos_token_id]:
        ids = ids[:, :-1]
    made = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    return tokenizer.decode(made[0], skip_special_tokens=True)


def test_generate_is_transformers(model, capsys):
    """With <bos> before the prompt, and without it by the flag. <eos> behind a prompt is left out."""
    kind, folder, theirs, tokenizer, special = model
    flags = ["--load", str(folder), "--device", "cpu", "--temperature", "0", "--max-new-tokens", "12"]
    for more, how in ([], {}), ([OFF], {"add_special_tokens": False}):
        assert generate([*flags, *more, "--prompt", "def one"]) == 0
        found = capsys.readouterr()
        assert found.out == continued(theirs, tokenizer, "def one", **how) + "\n"
        begins = f"nanomegatron generate: each prompt begins with <bos> (id {special['<bos>']})"
        assert (begins in found.err) == (kind != "none" and not more)
        behind = f"prompts are without <eos> (id {special['<eos>']}), which the tokenizer puts behind a text"
        assert (behind in found.err) == (kind == "both" and not more)
    if kind != "none":
        assert generate([*flags, "--prompt", ""]) == 0  # <bos> alone
        assert capsys.readouterr().out == continued(theirs, tokenizer, "") + "\n"


def test_samples_of_a_run_begin_with_it_once(tmp_path):
    """The prompts at the end of a run are from its data: their <bos> is no text."""
    with_processor(tmp_path, "first")
    ours = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    ids, _ = ours.encode_many(["def one", "x"])
    prompt = prompts_of(ours, [ids], 9)[0]
    assert prompt.startswith("def one") and "<bos>" not in prompt
