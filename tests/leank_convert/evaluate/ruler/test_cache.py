import pytest

from leank_convert.evaluate.ruler import cached_prompts, default_cache_folder, draw_prompts
from leank_convert.evaluate.ruler.source import PromptSource
from leank_convert.recipe import HaystackSection


def facts(prompts):
    return [{**vars(prompt), "input_ids": prompt.input_ids.tolist()} for prompt in prompts]


@pytest.fixture
def drawn(monkeypatch):
    """The tasks and lengths that were drawn, in order."""
    cells = []
    draw = PromptSource.draw

    def counted(self, task, length, num_samples):
        cells.append((task, length))
        return draw(self, task, length, num_samples)

    monkeypatch.setattr(PromptSource, "draw", counted)
    return cells


@pytest.fixture
def ask(plain_tokenizer, tmp_path, question_file):
    """Asks the cache for prompts; keyword arguments replace the usual ones."""

    def cached(tasks=("vt", "qa"), lengths=(1500, 2000), **changes):
        arguments = {
            "tokenizer": plain_tokenizer,
            "num_samples": 2,
            "seed": 0,
            "haystack": HaystackSection(),
            "qa_file": question_file if "qa" in tasks else None,
            "folder": tmp_path / "cache",
        }
        return cached_prompts(tasks=tasks, lengths=lengths, **{**arguments, **changes})

    return cached


def test_what_was_drawn_before_is_read(ask, drawn, plain_tokenizer, question_file):
    first = ask()
    assert len(drawn) == 4
    assert facts(ask()) == facts(first)
    assert len(drawn) == 4
    straight = draw_prompts(
        plain_tokenizer, ["vt", "qa"], [1500, 2000], 2, 0, HaystackSection(), question_file
    )
    assert facts(first) == facts(straight)


def test_a_prompt_that_was_asked_for_its_digest_is_cached_like_others(ask, monkeypatch):
    draw = PromptSource.draw

    def digested(*arguments):
        prompts = draw(*arguments)
        assert all(prompt.digest for prompt in prompts)
        return prompts

    monkeypatch.setattr(PromptSource, "draw", digested)
    first = ask(tasks=("vt",))
    assert [prompt.digest for prompt in ask(tasks=("vt",))] == [prompt.digest for prompt in first]


def test_another_length_or_task_leaves_the_others_cached(ask, drawn):
    ask()
    del drawn[:]
    ask(tasks=("vt", "fwe"), lengths=(1500, 1600))
    assert drawn == [("vt", 1600), ("fwe", 1500), ("fwe", 1600)]


@pytest.mark.parametrize("changed", ["seed", "num_samples", "template", "special", "vocabulary"])
def test_what_prompts_depend_on_makes_them_others(ask, drawn, plain_tokenizer, changed):
    ask(tasks=("vt",), lengths=(1500,))
    changes = {changed: 3} if changed in ("seed", "num_samples") else {}
    if changed == "template":
        plain_tokenizer.chat_template += " "
    if changed == "special":
        plain_tokenizer.bos_token = "</s>"
    if changed == "vocabulary":
        plain_tokenizer.add_tokens(["street"])
    ask(tasks=("vt",), lengths=(1500,), **changes)
    assert len(drawn) == 2


def test_the_content_of_a_file_counts_and_not_its_name(ask, drawn, tmp_path):
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("A sentence. And another.")
    other.write_bytes(one.read_bytes())
    ask(tasks=("niah_single_2", "vt"), haystack=HaystackSection(source=str(one)))
    ask(tasks=("niah_single_2", "vt"), haystack=HaystackSection(source=str(other)))
    assert len(drawn) == 4
    other.write_text("Something else.")
    ask(tasks=("niah_single_2", "vt"), haystack=HaystackSection(source=str(other)))
    assert drawn[4:] == [("niah_single_2", 1500), ("niah_single_2", 2000)]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_drawn_anew(ask, drawn, tmp_path, damage, caplog):
    first = ask(tasks=("vt",), lengths=(1500,))
    (path,) = (tmp_path / "cache").iterdir()
    content = path.read_bytes()
    digit = content.index(b'"input_ids": [') + 14
    path.write_bytes(
        {"cut": content[:-1], "changed": content[:digit] + b"9" + content[digit + 1 :], "empty": b""}[damage]
    )
    assert facts(ask(tasks=("vt",), lengths=(1500,))) == facts(first)
    assert len(drawn) == 2
    assert f"`{path}` are damaged" in caplog.text
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_told_of_and_done_without(ask, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert len(ask(tasks=("vt",), folder=tmp_path / "file" / "cache")) == 4
    assert "prompts cannot be cached" in caplog.text


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "leank-convert" / "ruler"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_folder() == tmp_path / "home" / ".cache" / "leank-convert" / "ruler"
