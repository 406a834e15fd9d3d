"""LongBench's tasks: how each is asked, in words of our own, and scored.

Six go without the chat template, as in LongBench: what they hold is examples or code to go on with.
"""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """How a task is asked and scored."""

    template: str  # of `{context}` and `{input}`
    scoring: str  # a key of `SCORES`
    max_new_tokens: int
    chat: bool = True  # whether through the chat template
    first_line: bool = False  # whether what follows the answer's first line counts for nothing


def _ask(what: str, label: str, instruction: str, ending: str) -> str:
    """The instruction before the text and again behind it, as LongBench has it."""
    return f"{what} {instruction}\n\n{label}{{context}}\n\n{instruction}\n\n{ending}"


_QUESTION = "Question: {input}\nAnswer:"
_BRIEFLY = "Answer the question in as few words as you can, and explain nothing."
_ALONE = "Give the answer to the question alone, without another word."
_FROM_ARTICLE = (
    "Answer the question in as few words as you can, at most one sentence, and explain nothing. A question "
    'for yes or no is answered with "yes" or "no"; one that the article does not answer with "unanswerable".'
)
_PASSAGES = _ask("Below are several passages and a question on them.", "Passages:\n", _ALONE, _QUESTION)
_RESPOND = "Respond in one sentence or a few."
_REQUEST = "Request: {input}\nResponse:"
_COUNT = "How many different paragraphs are there, each counted once? Write that number alone."
_PARAGRAPH = 'Which paragraph is it a summary of? Answer in the form "Paragraph 1", "Paragraph 2", and so on.'
_CODE = "Go on with this code, by one line.\n"

TASKS = {
    "narrativeqa": Task(
        _ask("Below are a story, from a book or a film, and a question.", "Story: ", _BRIEFLY, _QUESTION),
        "words", 128,
    ),
    "qasper": Task(
        _ask("Below are a scientific article and a question.", "Article: ", _FROM_ARTICLE, _QUESTION),
        "words", 128,
    ),
    "multifieldqa_en": Task(_ask("Below are a text and a question.", "", _ALONE, _QUESTION), "words", 64),
    "multifieldqa_zh": Task(
        "请读下面的文字。\n\n{context}\n\n请根据以上文字回答问题，只写答案。\n\n问题：{input}\n答案：",
        "characters", 64,
    ),
    "hotpotqa": Task(_PASSAGES, "words", 32),
    "2wikimqa": Task(_PASSAGES, "words", 32),
    "musique": Task(_PASSAGES, "words", 32),
    "dureader": Task(
        "请读下面的文章，再回答问题。\n\n文章：{context}\n\n请根据文章作答。\n\n问题：{input}\n答案：",
        "rouge_characters", 128,
    ),
    "gov_report": Task(
        _ask("Below is a report of a government agency.", "Report:\n", "Sum it up on one page.", "Summary:"),
        "rouge", 512,
    ),
    "qmsum": Task(
        _ask("Below are a meeting's transcript and a request.", "Transcript:\n", _RESPOND, _REQUEST),
        "rouge", 512,
    ),
    "multi_news": Task(
        _ask("Below are several news articles.", "News:\n", "Sum all of them up on one page.", "Summary:"),
        "rouge", 512,
    ),
    "vcsum": Task(
        "请读下面的会议记录，并写一段总结。\n\n会议记录：\n{context}\n\n总结：", "rouge_characters", 512
    ),
    "trec": Task(
        "Which type is the last question of? Questions with their types come first.\n\n{context}\n{input}",
        "class", 64, chat=False, first_line=True,
    ),
    "triviaqa": Task(
        "Answer the last question from its passage, with the answer alone. Examples come first."
        "\n\n{context}\n\n{input}",
        "words", 32, chat=False, first_line=True,
    ),
    "samsum": Task(
        "Sum the last dialogue up in a few short sentences. Examples come first.\n\n{context}\n\n{input}",
        "rouge", 128, chat=False, first_line=True,
    ),
    "lsht": Task(
        "请判断最后一条新闻的类别，前面是一些例子。\n\n{context}\n{input}",
        "class", 64, chat=False, first_line=True,
    ),
    "passage_count": Task(
        _ask("Below are paragraphs, some of which come more than once.", "", _COUNT, "Number: "),
        "numbers", 32,
    ),
    "passage_retrieval_en": Task(
        "Below are 30 paragraphs, and then a summary of one of them.\n\n{context}\n\n"
        f"The summary:\n\n{{input}}\n\n{_PARAGRAPH}\n\nAnswer: ",
        "numbers", 32,
    ),
    "passage_retrieval_zh": Task(
        "下面有若干段落，以及其中一段的摘要。\n\n{context}\n\n摘要：\n\n{input}\n\n"
        "摘要出自哪一段？请按“段落1”、“段落2”的格式作答。\n\n答案：",
        "numbers", 32,
    ),
    "lcc": Task(f"{_CODE}{{context}}The next line:\n", "code", 64, chat=False),
    "repobench-p": Task(f"{_CODE}{{context}}{{input}}The next line:\n", "code", 64, chat=False),
}  # fmt: skip
"""By the names of their files."""
