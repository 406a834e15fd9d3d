"""Files of a benchmark in the user's folder, and prompts of their text."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from leank_convert.data.sample import encode_prompts
from leank_convert.errors import LeanKError


def list_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files with these suffixes in a folder and below, in order; LeanKError if there is no folder."""
    if not folder.is_dir():
        raise LeanKError(
            f"data folder `{folder}` {'is a file' if folder.exists() else 'does not exist'}",
            hint="bring the benchmark's published files, and name their folder by `--data`",
        )
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool = True) -> list[int]:
    """Tokenise a prompt, through the chat template if there is one and the prompt is meant for it."""
    if chat and getattr(tokenizer, "chat_template", None) is not None:
        return encode_prompts(tokenizer, [text])[0]
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids
