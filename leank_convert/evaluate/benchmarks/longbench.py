"""LongBench: 21 tasks on long documents, each in a published file of its own.

As in LongBench a prompt that is too long loses its middle.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from leank_convert.data.records import read_field, read_records, read_texts
from leank_convert.data.sample import encode_messages
from leank_convert.errors import LeanKError
from leank_convert.evaluate.benchmarks import list_files
from leank_convert.evaluate.benchmarks.longbench_tasks import TASKS, Task
from leank_convert.evaluate.prompt import Prompt
from leank_convert.evaluate.scores import SCORES

_FORM = (
    "unpack data.zip of `zai-org/LongBench` there: one .jsonl a task, such as `hotpotqa.jsonl`, of records "
    "with `input`, `context`, `answers` and `all_classes`"
)
# Of a text by token: no running text has more, so that what is left out unread would not have stayed.
_MAX_CHARACTERS = 64


def draw_longbench(
    tokenizer: PreTrainedTokenizerBase, folder: Path, num_samples: int, length: int
) -> list[Prompt]:
    """Read prompts, of each task that has a file in the folder, at any depth, its first ones.

    One that is longer, with its answer, than `length` tokens loses its middle.

    Raises:
        LeanKError: If there is no such folder or no task's file in it, a record lacks a field, the length
            leaves no room, or the package `datasets` or one that scores is missing.
    """
    files: dict[str, Path] = {}
    for path in list_files(folder, (".jsonl",)):
        if path.stem in TASKS and files.setdefault(path.stem, path) != path:
            raise LeanKError(f"`{files[path.stem]}` and `{path}` are of one task", hint="remove one of them")
    prompts = []
    for name in (name for name in TASKS if name in files):
        task = TASKS[name]
        SCORES[task.scoring]("", "", ())  # a package that it needs may be missing: not after hours of answers
        records = read_records(files[name], "LongBench file")
        for (place, record), index in zip(records, range(num_samples), strict=False):
            fields = {key: read_field(record, key, str, place, _FORM) for key in ("context", "input")}
            answers = read_texts(record, "answers", place, _FORM)
            classes = read_texts(record, "all_classes", place, _FORM) if task.scoring == "class" else []
            if not answers or (task.scoring == "class" and not classes):
                raise LeanKError(f"{place} has no `{'all_classes' if answers else 'answers'}`", hint=_FORM)
            ids = _fit(tokenizer, task, task.template.format(**fields), length - task.max_new_tokens, name)
            prompts.append(
                Prompt(
                    name, length, index, torch.tensor(ids), tuple(answers), task.scoring, task.max_new_tokens,
                    classes=tuple(classes), first_line=task.first_line,
                )
            )  # fmt: skip
    if not prompts:
        raise LeanKError(f"`{folder}` holds no record of LongBench", hint=_FORM)
    return prompts


def _fit(tokenizer: PreTrainedTokenizerBase, task: Task, text: str, room: int, name: str) -> list[int]:
    """The tokens of a prompt, with as much left out of the middle of its text as has to be."""
    half = max(room, 1) * _MAX_CHARACTERS
    if len(text) > 2 * half:
        text = text[:half] + text[-half:]
    whole: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = encode_messages(tokenizer, [text], chat=task.chat)[0]
    size = len(whole)
    while len(ids) > room:
        size -= len(ids) - room
        if size < 2:
            raise LeanKError(
                f"{room + task.max_new_tokens} tokens leave no room for `{name}`, whose answers take "
                f"{task.max_new_tokens}",
                hint="name more by `--length`",
            )
        halves = (whole[: size // 2], whole[len(whole) - size // 2 :])
        shortened = "".join(str(tokenizer.decode(half, skip_special_tokens=True)) for half in halves)
        ids = encode_messages(tokenizer, [shortened], chat=task.chat)[0]
    return ids
