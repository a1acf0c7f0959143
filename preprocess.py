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
from nanomegatron.data.tokenizer import Tokenizer, build_tokenizer
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
    return tokenize(
        files,
        a.output_prefix,
        tokenizer,
        keys,
        a.append_eod,
        a.workers,
        Options(a.log_interval, a.skip_bad_lines, a.resume, a.parse_special_tokens),
    )


def check_parent(flag: str, path: str) -> None:
    """Raise ValueError unless the folder of an output is there or can be made beside others."""
    folder = Path(path).parent
    if not folder.parent.is_dir():
        raise ValueError(
            f"{flag} {path}: there is no folder {folder.parent}; mend the path, or mkdir -p {folder}"
        )


@dataclass(frozen=True)
class Options:
    """How `tokenize` runs: documents between lines of progress, bad lines that it leaves out, --resume.

    special: special tokens in a text are those tokens.
    """

    log_interval: int | None = None
    skip_bad_lines: int = 0
    resume: bool = False
    special: bool = False


def tokenize(
    files: list[str],
    prefix: str | Path,
    tokenizer: Tokenizer,
    keys: tuple[str, ...] = ("text",),
    append_eod: bool = True,
    workers: int = 1,
    options: Options = Options(),
) -> list[str]:
    """Tokenize files to PREFIX_KEY_document.{bin,idx,json} for each key; returns a line of report for each.

    Bad lines that are left out are listed in PREFIX.skipped. Raises ValueError for one more than the options
    allow, and if there is no token at all; then no file of these names has changed.
    """
    facts = {"append_eod": append_eod} | ({"parse_special_tokens": True} if options.special else {})
    around = {"prefix_ids": [*tokenizer.prefix_ids], "suffix_ids": [*tokenizer.suffix_ids]}
    facts |= {name: ids for name, ids in around.items() if ids}
    work = Encoder(tokenizer, keys, append_eod, options.special)
    with DatasetOutput(prefix, tokenizer, keys, facts).open(files, options.resume) as output:
        if output.documents:
            print(f"--resume: {output.documents:,} documents are there and right", file=sys.stderr)
        with Progress(sum(map(size_of, files)), options.log_interval, output.place.read) as progress:
            pieces = chunks(blocks(files, keys, output.place))
            for encoded, bad, place in in_order(work, pieces, workers):
                skipped = output.skipped + bad
                most = options.skip_bad_lines
                if len(skipped) > most:
                    raise ValueError(f"{skipped[most]}; --skip-bad-lines N leaves out up to N, here {most}")
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
    bpe = importlib.util.find_spec("tokenizers") is not None
    name = f"bpe-{vocab}" if bpe else "bytes"
    if found := _prepared(folder, f"bpe-{vocab}") or _prepared(folder, name):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "lock"):
        if found := _prepared(folder, name):
            return found
        texts = {split: folder / f"{split}.jsonl" for split in ("train", "valid")}
        if not all(path.exists() for path in texts.values()):
            report(collect_stdlib(texts["train"], texts["valid"]))
        model = folder / f"{name}.tiktoken" if bpe else None
        if model and not model.exists():
            sources = (line.texts(("text",))[0] for line in documents([str(texts["train"])]))
            report(train_tokenizer(sources, vocab, model))
        tokenizer = build_tokenizer("TikTokenizer" if bpe else "ByteTokenizer", str(model))
        for split, path in texts.items():
            prefix, workers = folder / f"{split}-{name}", min(2, os.cpu_count() or 1)
            for line in tokenize([str(path)], prefix, tokenizer, workers=workers if split == "train" else 1):
                report(line)
        return _prepared(folder, name)


def _prepared(folder: Path, name: str) -> Embedded | None:
    prefixes = [folder / f"{split}-{name}_text_document" for split in ("train", "valid")]
    model = None if name == "bytes" else folder / f"{name}.tiktoken"
    needed = [Path(f"{prefix}.idx") for prefix in prefixes] + ([model] if model else [])
    if not all(path.exists() for path in needed):
        return None
    return Embedded(
        str(prefixes[0]),
        str(prefixes[1]),
        "TikTokenizer" if model else "ByteTokenizer",
        str(model) if model else None,
        "" if model else "bytes, since the tokenizers library is missing; pip install tokenizers gives a BPE",
    )


def collect_stdlib(train_jsonl: Path, valid_jsonl: Path) -> str:
    """Write Python's own *.py files as JSON Lines, every 50th held out; returns a line of report."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    count = size = 0
    with publish(valid_jsonl) as valid, publish(train_jsonl) as train:
        with (
            open(train, "w", encoding="utf-8") as train_file,
            open(valid, "w", encoding="utf-8") as valid_file,
        ):
            for name in names:
                if skipped & set(name.split("/")):
                    continue
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
