"""GSM-Infinite: word problems and equations of any number of operations, in as much filler as one likes.

A row of the published files holds the prompt as `messages`, which here become one user message: templates
that want turns in alternation would refuse two of one role. A row without them, as the benchmark's own
generator writes, is asked in words of our own.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from leank_convert.data.records import read_field, read_records, read_texts
from leank_convert.data.sample import encode_messages
from leank_convert.errors import LeanKError, cut
from leank_convert.evaluate.benchmarks import list_files
from leank_convert.evaluate.prompt import Prompt

_SUBSETS = {1: "symbolic", 2: "medium", 3: "hard"}  # by `d`
_MAX_NEW_TOKENS = 4096
_FORM = (
    "it is read as on the hub: the .parquet files of `InfiniAILab/gsm_infinite_medium_8k` and its like, or "
    ".jsonl, of rows with `problem`, `question`, `solution`, `op`, `length` and `d`"
)


def draw_gsm_infinite(tokenizer: PreTrainedTokenizerBase, folder: Path, num_samples: int) -> list[Prompt]:
    """Read prompts, of each subset the first ones for every number of operations and every length.

    Their `length` is the published one: of the filler around a problem, 0 for none.

    Raises:
        LeanKError: If there is no such folder or no row in it, a row lacks a field, or the package `datasets`
            is missing.
    """
    prompts: list[Prompt] = []
    found: Counter[tuple[str, int]] = Counter()
    for path in list_files(folder, (".parquet", ".jsonl")):
        for place, row in read_records(path, "GSM-Infinite file"):
            operations, length = read_field(row, "op", int, place, _FORM), _read_length(row, place)
            depth = read_field(row, "d", int, place, _FORM)
            if depth not in _SUBSETS:
                raise LeanKError(f"{place}: `d` is {depth}, none of {[*_SUBSETS]}", hint=_FORM)
            task = f"{_SUBSETS[depth]} {operations} operations"
            index = found[task, length]
            if index < num_samples:
                prompts.append(_read_prompt(tokenizer, row, place, task, length, index))
                found[task, length] += 1
    if not prompts:
        raise LeanKError(f"`{folder}` holds no row of GSM-Infinite", hint=_FORM)
    return prompts


def _read_prompt(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], place: str, task: str, length: int, index: int
) -> Prompt:
    if task.startswith(_SUBSETS[1]):
        reference, scoring = ", ".join(read_texts(row, "answer_list", place, _FORM)), "variables"
        closing = "Reason step by step, and name the variables in one sentence at the end."
    else:
        solution = read_field(row, "solution", str, place, _FORM)
        answer = re.search(r"Answer: (-?\d+)", solution)
        if answer is None:
            raise LeanKError(f"{place}: `solution` ends in no `Answer: `: {cut(solution[-60:])}", hint=_FORM)
        reference, scoring = answer[1], "final_number"
        closing = "Reason step by step, and end with `Answer: ` and the number."
    if row.get("messages"):
        messages = read_field(row, "messages", list, place, _FORM)
        text = "\n\n".join(read_field(message, "content", str, place, _FORM) for message in messages)
    else:
        problem, question = (read_field(row, key, str, place, _FORM) for key in ("problem", "question"))
        text = f"Problem: {problem.strip()}\n\nQuestion: {question}\n\n{closing}"
    ids = torch.tensor(encode_messages(tokenizer, [text])[0])
    return Prompt(task, length, index, ids, (reference,), scoring, _MAX_NEW_TOKENS)


def _read_length(row: dict[str, Any], place: str) -> int:
    """Of `8000`, `8k` and `zero_context`."""
    length = str(row.get("length"))
    if length == "zero_context":
        return 0
    found = re.fullmatch(r"(\d{1,9})(k?)", length, re.IGNORECASE)
    if found is None:
        raise LeanKError(f"{place}: `length` is {cut(row.get('length'))}", hint=_FORM)
    return int(found[1]) * (1000 if found[2] else 1)
