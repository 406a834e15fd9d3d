"""Companion files of a model's weights: its tokenizer above all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from leank_convert.checkpoint_io import COMPANION_PATTERNS, read_config
from leank_convert.errors import first_line
from leank_convert.export.config_json import encode_json
from leank_convert.files import read_json, write_atomically

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

_TOKENIZER_FILES = ("tokenizer", "vocab", "tekken")
# What transformers loads where a folder names no tokenizer class, and a name it had before.
_GENERIC_CLASS = "TokenizersBackend"
_GENERIC_CLASS_BEFORE = "PreTrainedTokenizerFast"

_logger = logging.getLogger("leank_convert")


def copy_companions(folder: Path, target: Path) -> None:
    """Copy a model's companions, so that the checkpoint's tokenizer gives the same tokens as the model's.

    Files are copied byte for byte, but for the tokenizer's class: transformers looks it up by `model_type`,
    and does not know that of a checkpoint. Where that would choose another class, tokenizer_config.json names
    the model's. One warning names what is missing.

    Args:
        folder: The model.
        target: An existing folder.

    Raises:
        OSError: If a file cannot be read or written.
    """
    found = {
        str(path.relative_to(folder)): path
        for pattern in COMPANION_PATTERNS
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }
    for name, path in found.items():
        copy = target / name
        copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, path.read_bytes())
    missing = []
    settings: dict[str, Any] = {}
    if any(name.startswith(_TOKENIZER_FILES) for name in found):
        settings = _keep_tokenizer_class(folder, target)
    else:
        missing.append("tokenizer")
    if "chat_template" not in settings and not any("chat_template" in name for name in found):
        missing.append("chat template")
    if "generation_config.json" not in found:
        missing.append("`generation_config.json`")
    if missing:
        _logger.warning("`%s` has no %s; nor will the checkpoint", folder, ", no ".join(missing))


def _keep_tokenizer_class(folder: Path, target: Path) -> dict[str, Any]:
    """Name the class in the copied tokenizer_config.json if need be, and give the model's own settings."""
    settings: dict[str, Any] = {}
    try:
        if (folder / TOKENIZER_CONFIG_NAME).is_file():
            settings = read_json(folder / TOKENIZER_CONFIG_NAME)
        chosen = _load_tokenizer_class(folder)
    except Exception as error:  # a tokenizer's files fail to load in as many ways as there are tokenizers
        _logger.warning(
            "the tokenizer of `%s` cannot be loaded (%s); it is copied as it is", folder, first_line(error)
        )
        return settings
    named = settings.get("tokenizer_class") or read_config(folder).get("tokenizer_class") or _GENERIC_CLASS
    if chosen not in (named, named.removesuffix("Fast")) and (named, chosen) != (
        _GENERIC_CLASS_BEFORE,
        _GENERIC_CLASS,
    ):
        write_atomically(target / TOKENIZER_CONFIG_NAME, encode_json({**settings, "tokenizer_class": chosen}))
    return settings


def _load_tokenizer_class(folder: Path) -> str:
    # Imported here: it takes most of a second, which an import of the toolkit need not.
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    # Its advice is about the source, not about what is written.
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        return type(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)).__name__
    finally:
        transformers_logging.set_verbosity(verbosity)
