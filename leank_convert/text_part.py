"""The text model of a larger one that also reads images: its config, its tensors' names, how it is loaded.

It is read where it lies: nothing is copied before an export, and tensors of images never are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from leank_convert.config_class import quiet_transformers
from leank_convert.errors import LeanKError, cut
from leank_convert.families import ARCHITECTURES
from leank_convert.files import read_json

# What the whole's config.json may say of its parts.
_SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# By either name that transformers gives the text model in a larger one's files; the head may lie beside it.
_PREFIX = r"^(?:model\.)?language_model\."
_RENAMED: Mapping[str, str] = MappingProxyType(
    {rf"{_PREFIX}(?=lm_head\.)": "", rf"{_PREFIX}(?:model\.)?(?!lm_head\.)": "model."}
)

_logger = logging.getLogger("leank_convert")


def read_text_part(config: Mapping[str, Any], origin: Path) -> dict[str, Any] | None:
    """Return the config of a larger model's text model, None where none is known in it.

    Raises:
        LeanKError: If its weights are quantized, whose settings name the larger model's modules.
    """
    text = config.get("text_config")
    # Tuples: what stands there need not be hashable.
    if config.get("model_type") in (*ARCHITECTURES,) or not isinstance(text, Mapping):
        return None
    if text.get("model_type") not in (*ARCHITECTURES,):
        return None
    if any(part.get("quantization_config") is not None for part in (config, text)):
        raise LeanKError(
            f"`{origin}`: `quantization_config` is of a larger model, whose modules it names, and not of its "
            "text model",
            hint="name the model that it was quantized from",
        )
    return {**{key: config[key] for key in _SHARED_KEYS if key in config}, **text}


def text_name(tensor: str) -> str | None:
    """Return what a larger model's tensor is called in its text model, None where it is no part of that."""
    if tensor.startswith("lm_head."):
        return tensor
    for pattern, new in _RENAMED.items():
        if re.match(pattern, tensor):
            return re.sub(pattern, new, tensor)
    return None


def find_whole(folder: Path) -> str | None:
    """Return the `model_type` of the larger model in a folder whose text model is read, None without one."""
    file = folder / "config.json"
    config = read_json(file)
    return None if read_text_part(config, file) is None else str(config.get("model_type"))


def load_from(loader: Any, folder: Path, **options: Any) -> Any:
    """Call `from_pretrained` of a class on a folder; of a larger model the text model, by its `config`."""
    if find_whole(folder) is None:
        return loader.from_pretrained(folder, **options)
    with quiet_transformers(logging.ERROR):  # it lists tensors of images as unexpected
        return loader.from_pretrained(folder, key_mapping=dict(_RENAMED), **options)


def refuse_whole(folder: Path) -> None:
    """Refuse a model that also reads images; raises LeanKError."""
    whole = find_whole(folder)
    if whole is not None:
        raise LeanKError(
            f"`{folder}` is a {cut(whole)}, which also reads images, and its text model alone is converted",
            hint="leave `--no-text-model` out to convert that",
        )


@cache
def warn_of_images(folder: Path) -> None:
    """Warn, once a folder, that of a larger model only the text model is converted."""
    if find_whole(folder) is not None:
        _logger.warning("`%s` also reads images: its text model alone is converted", folder)
