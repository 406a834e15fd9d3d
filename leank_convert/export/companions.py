"""Companion files of a model's weights: its tokenizer above all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from leank_convert.checkpoint_io import TOKENIZER_CONFIG_NAME, find_companions, read_config
from leank_convert.config_class import quiet_transformers
from leank_convert.errors import LeanKError, cut
from leank_convert.export.config_json import encode_json
from leank_convert.files import read_json_if_there, write_atomically
from leank_convert.tokenizer import load_tokenizer

_TOKENIZER_FILES = ("tokenizer", "vocab", "tekken")
# What transformers loads where a folder names no tokenizer class, and a name it had before.
_GENERIC_CLASS = "TokenizersBackend"
_GENERIC_CLASS_BEFORE = "PreTrainedTokenizerFast"
_NAMED = 8  # files in a warning

_logger = logging.getLogger("leank_convert")


def copy_companions(folder: Path, target: Path) -> None:
    """Copy a model's companions, so that the checkpoint's tokenizer gives the same tokens as the model's.

    Files are copied byte for byte, but for tokenizer_config.json: a reference to code is left out, and
    transformers looks the tokenizer's class up by `model_type`, and does not know that of a checkpoint; where
    that would choose another class, the file names the model's. One warning names what is missing.

    Raises:
        LeanKError: If tokenizer_config.json is no JSON object.
        OSError: If a file cannot be read or written.
    """
    found, settings = read_companions(folder)
    refers_to_code = "auto_map" in settings
    settings.pop("auto_map", None)
    if has_tokenizer(found):
        try:
            chosen = find_tokenizer_class(folder)
            if not names_class(folder, settings, chosen):
                found[TOKENIZER_CONFIG_NAME] = encode_json({**settings, "tokenizer_class": chosen})
        except LeanKError as error:
            if not refers_to_code:  # else it was warned of
                _logger.warning("%s; it is copied as it is", error.message)
    write_files(found, target)
    is_there = {
        "tokenizer": has_tokenizer(found),
        "chat template": has_chat_template(settings, found),
        "`generation_config.json`": "generation_config.json" in found,
    }
    if missing := [name for name, is_found in is_there.items() if not is_found]:
        _logger.warning("`%s` has no %s; nor will the checkpoint", folder, ", no ".join(missing))


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether a tokenizer's files are among a model's companions."""
    return any(name.startswith(_TOKENIZER_FILES) for name in names)


def has_chat_template(settings: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a model's tokenizer_config.json or the names of its companions tell of a chat template."""
    return "chat_template" in settings or any("chat_template" in name for name in names)


def read_companions(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Read a model's companions by name, data alone, and its tokenizer_config.json, references to code in it.

    One warning says what is left out because it is code. LeanKError if tokenizer_config.json is no JSON
    object, OSError if a file cannot be read.
    """
    paths, others = find_companions(folder)
    found = {name: path.read_bytes() for name, path in paths.items()}
    settings = read_json_if_there(folder / TOKENIZER_CONFIG_NAME)
    left_out = [cut(name) for name in others]
    if "auto_map" in settings:
        data = {key: value for key, value in settings.items() if key != "auto_map"}
        found[TOKENIZER_CONFIG_NAME] = encode_json(data)
        left_out.insert(0, f"`auto_map` of `{TOKENIZER_CONFIG_NAME}`")
    if left_out:
        _logger.warning(
            "`%s`: not carried over, being code or no known kind of data: %s; a tokenizer that needs it may "
            "not load, or give other tokens: bring your own",
            folder,
            ", ".join(left_out[:_NAMED])
            + (f" and {len(left_out) - _NAMED} more" if left_out[_NAMED:] else ""),
        )
    return found, settings


def write_files(contents: Mapping[str, bytes], target: Path) -> None:
    """Write files by their names into an existing folder; OSError if one cannot be written."""
    for name, content in contents.items():
        (target / name).parent.mkdir(exist_ok=True)
        write_atomically(target / name, content)


def find_tokenizer_class(folder: Path) -> str:
    """The class that transformers makes a folder's tokenizer of; LeanKError if it cannot be loaded."""
    with quiet_transformers(logging.ERROR):  # its advice is about the source, not about what is written
        return type(load_tokenizer(folder)).__name__


def names_class(folder: Path, settings: Mapping[str, Any], chosen: str) -> bool:
    """Whether a folder whose tokenizer_config.json says `settings` names a tokenizer's class, in any way."""
    named = settings.get("tokenizer_class") or read_config(folder).get("tokenizer_class") or _GENERIC_CLASS
    return chosen in (named, named.removesuffix("Fast")) or (named, chosen) == (
        _GENERIC_CLASS_BEFORE,
        _GENERIC_CLASS,
    )
