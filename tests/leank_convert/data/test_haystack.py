import json
import random
import re
import sys
from itertools import islice

import pytest

from leank_convert.data import SampleSource, haystack
from leank_convert.data.haystack import open_haystack
from leank_convert.recipe import HaystackSection
from tests.checks import refusal, section

STORY = [f"Chapter {n} is about the number {n}, and {'very ' * (n % 7)}little else." for n in range(400)]


def read(source, count=1000, control="(?!)", **values):
    """The first sentences that come out of a source, from its first on."""
    opened = open_haystack(HaystackSection(source=str(source), **values), re.compile(control))

    class First(random.Random):
        def randrange(self, *args):
            return 0

    return list(islice(opened.read(First()), count))


@pytest.fixture
def story(tmp_path):
    """The same sentences as text with line breaks, as a list of records, and as one record a line."""
    records = [{"text": " ".join(STORY[n : n + 40]), "id": n} for n in range(0, 400, 40)]
    texts = [record["text"].replace(", and", ",\nand") for record in records]
    (tmp_path / "story.txt").write_text("\n\n".join(texts))
    (tmp_path / "story.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "story.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return tmp_path


@pytest.mark.parametrize("name", ["story.txt", "story.json", "story.jsonl"])
def test_sentences_come_in_the_order_of_the_file_and_begin_anew_at_its_end(story, name):
    assert read(story / name, count=450) == [*STORY, *STORY[:50]]


def test_sentences_end_where_readers_see_their_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text('He said: "Go!" Then he\nleft… Why?\n\nA heading\n\n你好。再见。好', encoding="utf-8-sig")
    expected = ['He said: "Go!"', "Then he left…", "Why?", "A heading", "你好。", "再见。", "好"]
    assert read(path, count=7) == expected


def test_text_without_full_stops_is_cut_so_that_lengths_stay_exact(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("word " * 500 + "x" * 1000)
    pieces = read(path, count=10)
    assert max(map(len, pieces)) <= 400
    assert pieces[0].split() == ["word"] * 80
    text = " ".join(pieces)
    assert text.count("word") == 500
    assert text.count("x") == 1000


def test_another_column_is_read_of_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / ".hidden").mkdir()
    path = tmp_path / ".hidden" / "a [1]*.jsonl"
    path.write_text('{"text": "No.", "body": "Yes."}\n\n{"body": "Of course."}\n')
    assert read(path, count=2, column="body") == ["Yes.", "Of course."]


def test_sentences_with_control_tokens_are_left_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("One. Two <s> struck </s> out. Three. Four<|eot|>.")
    assert read(path, count=2, control=r"</?s>|<\|eot\|>") == ["One.", "Three."]


@pytest.mark.parametrize(
    ("name", "content", "message", "remedy"),
    [
        ("none.txt", None, r"`.*none\.txt` does not exist", "is looked up from"),
        ("~no.such.user/a.txt", None, r"'~no\.such\.user/a\.txt' cannot be a path: .*home", ""),
        ("folder.txt", None, r"` is a folder, a pipe or a device", ""),
        ("a.csv", b"text\n", r"a\.csv` has the suffix `\.csv`", ".txt, .json, .jsonl"),
        ("a.txt", b" \n\n ", "holds no text", "data.haystack.source"),
        ("a.jsonl", b"", "holds no text", "data.haystack.source"),
        ("a.txt", b"Caf\xe9.", r"a\.txt` is not UTF-8: .* at byte 3", "iconv"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl` cannot be read: JSON parse error", "a line"),
        ("a.json", b"[" * 100_000, r"a\.json` cannot be read: .*depth", ""),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": null, "body": "b", "n": 1}\n',
            r"a\.jsonl`: record 2 has no `text`; its keys: `body`, `n`",
            "data.haystack.column",
        ),
        (
            "a.jsonl",
            b'{"text": ["' + b"a" * 200 + b'"]}\n',
            r"record 1: `text` is `\['a{78}`, a list, not text",
            "data.haystack.column",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_is_wrong(
    tmp_path, capfd, name, content, message, remedy
):
    (tmp_path / "folder.txt").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refusal(message, remedy):
        read(name if name.startswith("~") else tmp_path / name)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["story.txt", "story.jsonl"])
def test_of_a_large_file_the_beginning_is_used_and_that_is_said(story, name, monkeypatch, caplog):
    monkeypatch.setattr(haystack, "_MAX_BYTES", 9000)
    sentences = read(story / name, count=400)
    assert f"haystack `{story / name}` is large" in caplog.text
    used = sentences.index(STORY[0], 1) if STORY[0] in sentences[1:] else len(sentences)
    assert 80 <= used < 250
    assert sentences[: used - 1] == STORY[: used - 1]


def test_a_dataset_is_streamed_as_far_as_it_is_used_and_cached_without_a_network(monkeypatch, caplog):
    """Streaming goes to the hub even for what was fetched before."""
    given, taken = [], []

    def load_dataset(path, **options):
        given.append((path, options["name"], options["split"], options["streaming"]))
        if options["split"] == "nope":
            raise ValueError("Bad split: nope")
        return ({"body": taken.append(text) or text} for text in STORY)

    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package, "load_dataset", load_dataset)
    monkeypatch.setattr(haystack, "_MAX_BYTES", 3000)
    for is_offline in (False, True):
        monkeypatch.setattr(package.config, "HF_HUB_OFFLINE", is_offline)
        taken.clear()
        assert read("someone/stories", count=60, column="body", config="en")[:40] == STORY[:40]
        assert given.pop() == ("someone/stories", "en", "train", not is_offline)
        assert len(taken) < 80
    assert "haystack `someone/stories` is large" in caplog.text
    with refusal(r"`someone/stories` .*split nope\) cannot be read: Bad split: nope"):
        read("someone/stories", split="nope")
    with refusal(r"someone/stories`: train record 1 has no `text`; its keys: `body`"):
        read("someone/stories")


def test_a_missing_datasets_package_and_keys_of_a_dataset_beside_a_file_are_told(story, monkeypatch):
    monkeypatch.chdir(story)
    monkeypatch.setitem(sys.modules, "datasets", None)
    install = "pip install 'leank-convert[datasets]'"
    for name in ("someone/stories", "story.jsonl"):
        with refusal(rf"`{name}` .*the package `datasets`, which is missing", install):
            read(name)
    with refusal(r"`data\.haystack\.config` and `data\.hayst"):  # of a dataset alone
        read(story / "story.txt", config="en", split="test")


@pytest.mark.parametrize("task", ["multi_value", "passkey"])
def test_samples_hide_their_facts_in_consecutive_sentences_of_the_haystack(plain_tokenizer, story, task):
    source = HaystackSection(source=str(story / "story.txt"))
    data = section(tasks=[task], haystack=source, questions_per_context=2)
    samples = SampleSource(plain_tokenizer, data, seed=0)
    starts = set()
    for index in range(4):
        prompt = plain_tokenizer.decode(samples.draw(index).prompt_ids())
        chapters = [int(number) for number in re.findall(r"Chapter (\d+) is", prompt)]
        assert len(chapters) > 10
        assert chapters == [(chapters[0] + offset) % 400 for offset in range(len(chapters))]
        starts.add(chapters[0])
        again = SampleSource(plain_tokenizer, data, seed=0).draw(index)
        assert plain_tokenizer.decode(again.prompt_ids()) == prompt
    assert len(starts) > 1


def test_fingerprint_is_of_the_samples_and_of_all_text_they_may_take(plain_tokenizer, story):
    path = story / "story.txt"
    data = section(haystack=HaystackSection(source=str(path)))

    def fingerprint(seed=0, tokenizer=plain_tokenizer, data=data):
        return SampleSource(tokenizer, data, seed).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    copy = story / "copy.txt"
    copy.write_bytes(path.read_bytes())
    assert fingerprint(data=section(haystack=HaystackSection(source=str(copy)))) == first
    assert fingerprint(seed=1) != first
    assert fingerprint(data=section(haystack=data.haystack, questions_per_context=2)) != first
    # Task 0 is retrieval, which takes nothing from the haystack.
    path.write_text(path.read_text().replace("number 377", "number 773"))
    changed = fingerprint()
    assert changed != first
    plain_tokenizer.chat_template = "So: " + plain_tokenizer.chat_template
    assert fingerprint() not in (first, changed)
