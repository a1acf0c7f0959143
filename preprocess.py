"""Tokenize text: JSON Lines or plain text to Megatron's .bin/.idx.

    python preprocess.py --input 'corpus/*.jsonl.gz' --output-prefix data/corpus --append-eod --workers 8 \\
        --tokenizer-type GPT2BPETokenizer --vocab-file encoder.json --merge-file vocab.bpe
    zcat corpus.gz | python preprocess.py --input - --output-prefix data/corpus --tokenizer-type ByteTokenizer
    python preprocess.py --input corpus.jsonl --train-tokenizer 32000 --output data/bpe.tiktoken
    python preprocess.py --verify-data data/corpus_text_document
    python preprocess.py --embedded

The main process reads, workers parse and tokenize, and the main process writes in the order of the input, so
the result does not depend on the number of workers. A line that is no document ends the program with
`file:line: reason` and exit code 2, and changes no output file.

`--embedded` needs no download: it prepares the sources of Python's standard library.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from nanomegatron.config.help import CommandParser
from nanomegatron.config.settings import DataConfig
from nanomegatron.config.user_files import escaped
from nanomegatron.data.indexed_dataset import file_lock, publish
from nanomegatron.data.output import DatasetOutput
from nanomegatron.data.reading import blocks, chunks, documents, input_files, kind, size_of
from nanomegatron.data.text import Encoder, in_order, train_tokenizer
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.data.verify import verify_pair

TOKENIZER_TYPES = DataConfig.__dataclass_fields__["tokenizer_type"].metadata["choices"]
FLAGS = {
    "--input": dict(
        nargs="+",
        help=".jsonl, .json (JSON Lines), .txt (a document), also .gz or .zst; .parquet, .arrow; globs; a "
        "folder of a Hugging Face data set; - for JSON Lines from standard input",
    ),
    "--json-keys": dict(nargs="+", default=["text"], help="keys whose text is taken, a dataset each"),
    "--output-prefix": dict(help="writes PREFIX_KEY_document.{bin,idx,json}"),
    "--tokenizer-type": dict(choices=TOKENIZER_TYPES, metavar="TYPE", help=", ".join(TOKENIZER_TYPES)),
    "--tokenizer-model": dict(help="rank file, tokenizer.json or its folder, tokenizer.model, tiktoken name"),
    "--vocab-file": dict(help="encoder.json of GPT2BPETokenizer"),
    "--merge-file": dict(help="vocab.bpe of GPT2BPETokenizer"),
    "--vocab-size": dict(
        type=int, help="ids of NullTokenizer, the end-of-document token among them (unlike Megatron 0.16's)"
    ),
    "--null-tokenizer-eod-id": dict(type=int, help="id that ends a document of NullTokenizer (the last)"),
    "--tiktoken-pattern": dict(choices=("v1", "v2"), help="of Megatron's JSON vocabulary (v2)"),
    "--tiktoken-num-special-tokens": dict(type=int, help="special tokens before it (1000)"),
    "--tokenizer-hf-no-include-special-tokens": dict(
        action="store_true",
        help="no special tokens around a text, such as <s>; else those of HuggingFaceTokenizer's file",
    ),
    "--parse-special-tokens": dict(
        action="store_true",
        help="special tokens in a text are those tokens, as in Megatron-LM; else they are text",
    ),
    "--append-eod": dict(action="store_true", help="end every document with the end-of-document token"),
    "--workers": dict(type=int, default=1, help="processes that tokenize; the result does not depend on it"),
    "--log-interval": dict(
        type=int, help="documents between two lines of progress; every few seconds without"
    ),
    "--skip-bad-lines": dict(
        type=int, default=0, metavar="N", help="leave out up to N, listed in PREFIX.skipped"
    ),
    "--resume": dict(
        action="store_true", help="keep what is complete when interrupted, and go on from there"
    ),
    "--overwrite": dict(action="store_true", help="replace a finished data set of these names"),
    "--partitions": dict(
        type=int, default=1, help="taken from Megatron's scripts; --workers alone decides here"
    ),
    "--keep-sequential-samples": dict(action="store_true", help="always so"),
    "--train-tokenizer": dict(type=int, metavar="N", help="instead: train a byte-level BPE of N entries"),
    "--verify-data": dict(nargs="+", metavar="PREFIX", help="instead: compare pairs with their hashes"),
    "--embedded": dict(action="store_true", help="instead: prepare the standard library's sources"),
    "--output": dict(help="rank file of --train-tokenizer; folder of --embedded (data)"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit code: 0 done, 2 wrong arguments, input or data, 130 interrupted."""
    arguments = parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers are the processes; no threads beside
    try:
        if arguments.embedded:
            prepare_embedded(Path(arguments.output or "data"))
        elif arguments.verify_data:
            return verify_data(arguments.verify_data)
        elif not arguments.input:
            raise ValueError("nothing to do: give --input FILE ..., --verify-data or --embedded")
        elif arguments.train_tokenizer:
            if not arguments.output:
                raise ValueError("--train-tokenizer needs --output FILE for the rank file")
            check_parent("--output", arguments.output)
            files, keys = input_files(arguments.input), tuple(arguments.json_keys)
            texts = (text for document in documents(files, keys) for text in document.texts(keys))
            print(train_tokenizer(texts, arguments.train_tokenizer, Path(arguments.output)))
        else:
            for report in preprocess_arguments(arguments):
                print(report)
    except (ValueError, OSError) as error:
        print(escaped(f"nanomegatron preprocess: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("nanomegatron preprocess: interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Define the flags; those of Megatron's tools/preprocess_data.py have the same meaning."""
    p = CommandParser(
        prog="nanomegatron preprocess",
        usage="%(prog)s --input FILE --output-prefix PREFIX [OPTIONS]",
        description=__doc__.splitlines()[0],
    )
    for name, declared in FLAGS.items():
        p.add_argument(name, **declared)
    return p


def verify_data(prefixes: list[str]) -> int:
    """Check pairs of files, reading all of them; returns the exit code: 0 whole, 2 if one is damaged."""
    damaged = 0
    for prefix in prefixes:
        damage, text = verify_pair(prefix, os.cpu_count() or 1, lambda line: print(line, file=sys.stderr))
        print(f"{prefix}: {text}")
        for line in damage:
            print(escaped(f"nanomegatron preprocess: {line}"), file=sys.stderr)
        damaged += bool(damage)
    return 2 if damaged else 0


def preprocess_arguments(a: argparse.Namespace) -> list[str]:
    """Tokenize as the command line says; returns a line of report for each dataset."""
    for flag, value, fix in (
        ("--output-prefix", a.output_prefix, "the start of the files' names"),
        ("--tokenizer-type", a.tokenizer_type, ", ".join(TOKENIZER_TYPES)),
    ):
        if not value:
            raise ValueError(f"{flag} is missing; give it: {fix}")
    for flag, least in (("workers", 1), ("partitions", 1), ("skip_bad_lines", 0)):
        if (value := getattr(a, flag)) < least:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: {least} is the least")
    check_parent("--output-prefix", a.output_prefix)
    tokenizer = build_tokenizer(
        a.tokenizer_type,
        a.tokenizer_model,
        a.vocab_file,
        a.merge_file,
        a.vocab_size,
        a.null_tokenizer_eod_id,
        a.tiktoken_pattern,
        a.tiktoken_num_special_tokens,
    )
    if a.tokenizer_hf_no_include_special_tokens:
        tokenizer.include_special_tokens(False)
    keys, files = tuple(a.json_keys), input_files(a.input)
    if plain := [f for f in files if kind(f) == ".txt" and keys != ("text",)]:
        raise ValueError(
            f"{plain[0]}: plain text has only the key text, --json-keys asks for {' '.join(keys)}"
        )
    for idx in (Path(f"{a.output_prefix}_{key}_document.idx") for key in keys):
        unfinished = a.resume and Path(f"{a.output_prefix}.unfinished").exists()
        if idx.exists() and not (a.overwrite or unfinished):
            raise ValueError(
                f"{idx}: a finished data set; give another --output-prefix, or --overwrite to replace it"
            )
    encoder = Encoder(tokenizer, keys, a.append_eod, a.parse_special_tokens)
    return tokenize(files, a.output_prefix, encoder, a.workers, a.log_interval, a.skip_bad_lines, a.resume)


def check_parent(flag: str, path: str) -> None:
    """Raise ValueError unless the folder of an output is there or can be made beside others."""
    folder = Path(path).parent
    if not folder.parent.is_dir():
        raise ValueError(
            f"{flag} {path}: there is no folder {folder.parent}; mend the path, or mkdir -p {folder}"
        )


def tokenize(
    files: list[str],
    prefix: str | Path,
    encoder: Encoder,
    workers: int = 1,
    log_interval: int | None = None,
    skip_bad_lines: int = 0,
    resume: bool = False,
) -> list[str]:
    """Tokenize files to PREFIX_KEY_document.{bin,idx,json} for each key; returns a line of report for each.

    Up to `skip_bad_lines` bad lines are left out, and listed in PREFIX.skipped. Raises ValueError for one
    more, and if there is no token at all; then no file of these names has changed.
    """
    with DatasetOutput(prefix, encoder).open(files, resume) as output:
        if output.documents:
            print(f"--resume: {output.documents:,} documents are there and right", file=sys.stderr)
        with Progress(sum(map(size_of, files)), log_interval, output.place.read) as progress:
            pieces = chunks(blocks(files, encoder.keys, output.place))
            for encoded, bad, place in in_order(encoder, pieces, workers):
                skipped = output.skipped + bad
                if len(skipped) > skip_bad_lines:
                    raise ValueError(
                        f"{skipped[skip_bad_lines]}; --skip-bad-lines N leaves out up to N, here "
                        f"{skip_bad_lines}"
                    )
                output.add(encoded, bad, place)
                progress.wrote(output.documents, output.tokens, place.read)
        return output.finish()


class Progress(AbstractContextManager):
    """Shows progress on stderr: one line that changes on a terminal, else a new line every few seconds."""

    def __init__(self, total_bytes: int, interval: int | None, begin: int) -> None:
        """total_bytes: 0 if unknown. begin: bytes that an earlier run has read."""
        self.total, self.interval, self.begin = total_bytes, interval, begin
        self.documents = self.tokens = self.bytes = self.shown_documents = 0
        self.terminal = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def __exit__(self, kind: type | None, *error: object) -> None:
        """Without an error all is written: the last line says so, if there was one before."""
        if self.shown > self.start:
            if kind is None:
                self.bytes = self.total or self.bytes
                self._show()
            if self.terminal:
                print(file=sys.stderr)

    def wrote(self, documents: int, tokens: int, read: int) -> None:
        """Show the progress, if it is due. documents, tokens: written; read: bytes of input that had them."""
        self.documents, self.tokens, self.bytes = documents, tokens, read
        due = time.monotonic() - self.shown >= (0.2 if self.terminal else 5)
        if self.interval:
            due = documents - self.shown_documents >= self.interval
        if due:
            self._show()

    def _show(self) -> None:
        self.shown, self.shown_documents = time.monotonic(), self.documents
        seconds = max(self.shown - self.start, 1e-9)
        done = self.bytes - self.begin
        text = (
            f"{self.documents:,} documents, {self.documents / seconds:,.0f}/s "
            f"| {done / seconds / 1e6:.1f} MB/s | {self.tokens / seconds / 1e6:.2f} M tokens/s"
        )
        if self.total:
            text += f" | {self.bytes / self.total:4.0%}"
        if self.total and done:
            left = round(seconds * (self.total - self.bytes) / done)
            text += f" | ETA {left // 60}:{left % 60:02}"
        print(
            f"\r{text}\x1b[K" if self.terminal else text,
            end="" if self.terminal else "\n",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Embedded:
    """The files of the data that needs no download; `tokenizer_model` is None for bytes."""

    train_prefix: str
    valid_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None
    note: str


def prepare_embedded(
    root: Path = Path("data"), vocab: int = 4096, report: Callable[[str], object] = print
) -> Embedded:
    """Prepare the standard library's sources as training and validation data in `root`/python-VERSION.

    Done once: if several processes call it, one works and the others wait. Tokens are a BPE of `vocab`
    entries trained on the text, or bytes where the tokenizers library is missing.
    """
    folder = root / f"python-{platform.python_version()}"
    model = folder / f"bpe-{vocab}.tiktoken"
    bpe = model.exists() or importlib.util.find_spec("tokenizers") is not None
    name = f"bpe-{vocab}" if bpe else "bytes"
    texts = [folder / "train.jsonl", folder / "valid.jsonl"]
    prefixes = [folder / f"{text.stem}-{name}" for text in texts]
    pairs = [f"{prefix}_text_document" for prefix in prefixes]
    needed = [Path(f"{pair}.idx") for pair in pairs] + [model] * bpe
    found = Embedded(
        pairs[0],
        pairs[1],
        "TikTokenizer" if bpe else "ByteTokenizer",
        str(model) if bpe else None,
        "" if bpe else "bytes, since the tokenizers library is missing; pip install tokenizers gives a BPE",
    )
    if all(path.exists() for path in needed):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "lock"):
        if not all(path.exists() for path in texts):
            report(collect_stdlib(*texts))
        if bpe and not model.exists():
            sources = (line.texts(("text",))[0] for line in documents([str(texts[0])]))
            report(train_tokenizer(sources, vocab, model))
        encoder = Encoder(build_tokenizer(found.tokenizer_type, found.tokenizer_model))
        for text, prefix, index, workers in zip(texts, prefixes, needed, (min(2, os.cpu_count() or 1), 1)):
            if not index.exists():
                for line in tokenize([str(text)], prefix, encoder, workers):
                    report(line)
    return found


def collect_stdlib(train_jsonl: Path, valid_jsonl: Path) -> str:
    """Write Python's own *.py files as JSON Lines, every 50th held out; returns a line of report."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if not skipped & {*path.parts})
    count = size = 0
    with publish(valid_jsonl) as valid, publish(train_jsonl) as train:
        with (
            open(train, "w", encoding="utf-8") as train_file,
            open(valid, "w", encoding="utf-8") as valid_file,
        ):
            for name in names:
                try:
                    text = (root / name).read_bytes().decode()
                except (OSError, UnicodeDecodeError):
                    continue
                count, size = count + 1, size + len(text)
                print(
                    json.dumps({"text": text, "path": name}, ensure_ascii=False),
                    file=train_file if count % 50 else valid_file,
                )
        if count < 50:
            raise ValueError(
                f"{root}: {count} Python sources; the embedded data needs the standard library's"
            )
    return f"{root}: {count:,} files, {size / 1e6:.1f} MB of text"


if __name__ == "__main__":
    sys.exit(main())
