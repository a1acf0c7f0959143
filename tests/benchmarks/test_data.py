"""The benchmarks of data, tiny: what they measure is there, and all ways make the same bytes."""

import json
import sys

import pytest

from benchmarks import data

NUMBERS = ["dataset", "0 threads", "0 threads documents", "1 threads", "1 threads documents"]


def test_loader(tmp_path, capsys, monkeypatch, full):
    """Without megatron-core in the fast tier: to import it takes seconds."""
    if not full:
        monkeypatch.setitem(sys.modules, "megatron.core.datasets", None)
    out = tmp_path / "loader.json"
    data.main(["loader", "--small", "--documents", "2000", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["documents"] == 2000 and result["tokens"] == 2_000_000
    for s in ("seq 1024", "seq 8192"):
        found = result[s]
        assert list(found["ours"]) == NUMBERS
        assert full or "megatron" in found["megatron"]["failed"]
        assert min(found["ours"].values()) > 0 and found["cold start"]["seconds"] > 0
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.full
def test_preprocess(tmp_path):
    """megatron-core's bytes are those of preprocess.py."""
    pytest.importorskip("megatron.core")
    texts = ["the quick brown fox", *(f"line {i} of a page" for i in range(70))]
    lines = [json.dumps({"text": text}) for text in texts]
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "preprocess.json"
    corpus.write_text("\n".join(lines) + "\n")
    flags = "--tokenizer ByteTokenizer --repeats 1 --corpus".split()
    data.main(["preprocess", *flags, str(corpus), "--out", str(out)])
    result = json.loads(out.read_text())
    cases = ["alone, 1", "start, 1", "ours, 1", "per document, 1", "ours, 2", "per document, 2"]
    assert list(result["cpu_seconds"]) == cases and min(map(max, result["cpu_seconds"].values())) >= 0
    assert min(result["seconds"]["ours, 1"]) > 0 and result["tokens"] > result["text_mb"]  # each has its end
    assert result["text_mb"] == pytest.approx(sum(map(len, texts)) / 1e6)


def test_outputs_that_differ_are_refused(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a"}\n')

    def child(args, case, workers, prefix):
        for end in ("bin", "idx"):
            with open(f"{prefix}_text_document.{end}", "w") as file:
                file.write(case)
        return 1.0, 1.0

    monkeypatch.setattr(data, "child", child)
    with pytest.raises(ValueError, match="different bytes"):
        data.main(["preprocess", "--corpus", str(corpus), "--tokenizer", "ByteTokenizer"])
