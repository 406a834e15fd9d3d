"""Licence and hub id of the source model, for the model card."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from leank_convert.checkpoint_io import CARD_NAME, find_companions
from leank_convert.errors import shorten
from leank_convert.hub import is_repository, name_in_config
from leank_convert.recipe_file import parse_yaml

# Cards begin with their front matter, and no model's is as long.
_MAX_FRONT_MATTER = 1 << 16
_FRONT_MATTER = re.compile(r"\ufeff?---[ \t]*\n(.*?\n)---[ \t]*(\n|$)", re.DOTALL)
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,80}")
_ONE_LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,300}")

_logger = logging.getLogger("leank_convert")


@dataclass(frozen=True)
class Source:
    """The model that a checkpoint is made of, as far as its card tells of it."""

    name: str  # what artifacts call it
    noted_name: str | None = None  # what its config.json calls it, if it may be that
    base_model: str | None = None  # its hub id
    licence: Mapping[str, str] = field(default_factory=dict)  # as `read_licence` gives it
    chats: bool = False  # whether it has a chat template
    whole: str | None = None  # the `model_type` of the larger model whose text model it is


def read_licence(folder: Path) -> dict[str, str]:
    """Read what there is of a model's `license`, `license_name` and `license_link`, as its card names them.

    Without a card that names one, a licence file that travels with the checkpoint stands for it.
    """
    given = _read_front_matter(folder / CARD_NAME)
    files = sorted(name for name in find_companions(folder)[0] if name.startswith("LICENSE"))
    if not _is_text(given.get("license"), _LICENCE):
        return {"license": "other", "license_link": files[0]} if files else {}
    found = {key: given[key] for key in ("license", "license_name") if _is_text(given.get(key), _ONE_LINE)}
    link: object = given.get("license_link")
    # A link within the model's repository leads nowhere, unless its file travels.
    if _is_text(link, _ONE_LINE) and (link.startswith(("https://", "http://")) or link in files):
        found["license_link"] = link
    return found


def find_base_model(folder: Path, name: str, mask_model: str) -> str | None:
    """Find the hub id of the model that a checkpoint is made of.

    The first that is one, of what artifacts call it, what it was called when the mask was made, and the name
    that transformers left in config.json.
    """
    return next((known for known in (name, mask_model) if is_repository(known)), name_in_config(folder))


def read_base_models(folder: Path) -> list[object]:
    """Read what a model's own card says that the model was made from; nothing where it does not say."""
    given = _read_front_matter(folder / CARD_NAME).get("base_model")
    return given if isinstance(given, list) else [given]


def _read_front_matter(card: Path) -> dict[Any, Any]:
    """The metadata of a model card; empty if there is none that can be read."""
    if not card.is_file():
        return {}
    with card.open("rb") as file:
        text = file.read(_MAX_FRONT_MATTER).decode(errors="replace").replace("\r\n", "\n")
    found = _FRONT_MATTER.match(text)
    if found is None:
        return {}
    try:
        values = parse_yaml(found[1])
    except ValueError as error:
        _logger.warning(
            "the front matter of `%s` cannot be read, nor its licence: %s", card, shorten(str(error), 200)
        )
        return {}
    return values if isinstance(values, dict) else {}


def _is_text(value: object, form: re.Pattern[str]) -> TypeGuard[str]:
    return isinstance(value, str) and form.fullmatch(value) is not None
