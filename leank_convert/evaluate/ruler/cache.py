"""Drawn prompts kept in a folder, a file for each task at each length, since long prompts take a while."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from leank_convert import data
from leank_convert.evaluate.prompt import Prompt
from leank_convert.evaluate.ruler.source import PromptSource, open_source
from leank_convert.evaluate.ruler.tasks import ESSAY_TASKS, QA_TASK
from leank_convert.files import write_atomically
from leank_convert.recipe import HaystackSection

_logger = logging.getLogger("leank_convert")


def cached_prompts(
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    lengths: Sequence[int],
    num_samples: int,
    seed: int,
    haystack: HaystackSection,
    qa_file: Path | None = None,
    folder: Path | None = None,
) -> list[Prompt]:
    """`draw_prompts`, from files where the same was drawn before.

    A file that is damaged is drawn and written anew; one that cannot be written is told of and done without.

    Args:
        tokenizer: The model's own.
        tasks: Names of `RULER_TASKS`.
        lengths: Tokens of prompt and answer.
        num_samples: Prompts of each task at each length.
        seed: Of everything drawn.
        haystack: Where running text comes from.
        qa_file: The user's questions, for `qa`.
        folder: Holds the files; None for `default_cache_folder()`.

    Raises:
        LeanKError: As `draw_prompts`.
    """
    source = open_source(tokenizer, tasks, seed, haystack, qa_file)
    folder = default_cache_folder() if folder is None else folder
    common = f"{_digest_generator()} {_digest_tokenizer(tokenizer)} {seed} {num_samples}"
    prompts: list[Prompt] = []
    for task in tasks:
        for length in lengths:
            digest = hashlib.sha256(f"{common} {task} {length} {_digest_files(source, task)}".encode())
            path = folder / f"{task}-{length}-{digest.hexdigest()[:32]}.jsonl"
            cell = _read(path)
            if cell is None:
                cell = source.draw(task, length, num_samples)
                _write(path, cell)
            prompts += cell
    return prompts


def default_cache_folder() -> Path:
    """`leank-convert/ruler` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "leank-convert" / "ruler"


def _digest_generator() -> str:
    """Of the code that draws: a change to a text is a change to the prompts."""
    here = Path(__file__).parent
    files = [*here.glob("*.py"), *Path(data.__file__).parent.glob("*.py"), here.with_name("prompt.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of everything that decides how a prompt becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        type(tokenizer).__name__,
        json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str(),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        str(getattr(tokenizer, "chat_template", None)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _digest_files(source: PromptSource, task: str) -> str:
    if task == QA_TASK and source.questions is not None:
        return source.questions.digest
    return source.haystack.digest if task in ESSAY_TASKS else ""


def _read(path: Path) -> list[Prompt] | None:
    """The prompts of a file, or None where there is none or its first line is not the rest's digest."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest.decode(errors="replace") != hashlib.sha256(content).hexdigest():
        _logger.warning("cached prompts `%s` are damaged; they are drawn anew", path)
        return None
    records = [json.loads(line) for line in content.splitlines()]
    return [
        Prompt(
            **{
                **record,
                "input_ids": torch.tensor(record["input_ids"]),
                "references": tuple(record["references"]),
            }
        )
        for record in records
    ]


def _write(path: Path, prompts: Sequence[Prompt]) -> None:
    names = [field.name for field in fields(Prompt)]
    records = [{name: getattr(prompt, name) for name in names} for prompt in prompts]
    lines = [json.dumps({**record, "input_ids": record["input_ids"].tolist()}) for record in records]
    content = "\n".join(lines).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    except OSError as error:
        _logger.warning("prompts cannot be cached in `%s`: %s", path.parent, error.strerror)
