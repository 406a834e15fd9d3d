"""Tokenizer loading that runs no code of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leank_convert.checkpoint_io import CONFIG_NAME, read_config
from leank_convert.errors import LeanKError, first_line


def load_tokenizer(folder: Path, name: str | Path | None = None, *, trust: bool = False) -> Any:
    """Load the tokenizer of the folder of a model, of a checkpoint or of ONNX graphs.

    Messages call the folder by `name`, as the user does. A tokenizer that is code of the folder's own runs
    only with `trust`.

    Raises:
        LeanKError: If there is none, it cannot be loaded, or it is code that may not run.
    """
    # Imported here: it takes most of a second, which an import of the toolkit need not.
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

    config = None
    try:
        # Of a checkpoint, transformers would run the config's code to learn what it needs of config.json, or
        # warn that it does not know the model type.
        if not trust and (folder / CONFIG_NAME).is_file() and "leank" in (content := read_config(folder)):
            config = PreTrainedConfig.from_dict(content)
        # Not left out: transformers would then ask on the terminal.
        with _unasked():
            found = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=trust)
        if not isinstance(found, PreTrainedTokenizerBase):
            raise TypeError(f"`{type(found).__name__}` is no tokenizer (`tokenizer_class`)")
        return found
    except Exception as error:  # a tokenizer's files fail to load in as many ways as there are tokenizers
        if not trust and "trust_remote_code" in str(error):
            raise LeanKError(
                f"the tokenizer of `{name or folder}` is code of its own (`auto_map` in "
                "`tokenizer_config.json`), which is not run",
                hint="save a tokenizer of one of transformers' own classes into that folder",
            ) from error
        raise LeanKError(
            f"the tokenizer of `{name or folder}` cannot be loaded: {first_line(error).rstrip(' :')}",
            hint="prompts are made with the model's own tokenizer: put its files into that folder; those "
            "of a checkpoint into the model's, which is then exported again",
        ) from error


@contextmanager
def _unasked() -> Iterator[None]:
    """Let transformers refuse code where it would ask: a `tokenizer_class` may be one that loads others."""
    from transformers import dynamic_module_utils

    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # for an answer; none are no question
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds
