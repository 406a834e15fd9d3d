"""The packaged mask of the model that is exported: only where the model is known to be the mask's own."""

from __future__ import annotations

from pathlib import Path

from leank_convert.checkpoint_io import CONFIG_NAME
from leank_convert.export.source_card import read_base_models
from leank_convert.files import user_path
from leank_convert.hub import hub_name, name_in_config
from leank_convert.mask import ChannelMask
from leank_convert.masks import find_by_model

# What trainers leave beside weights that they changed; config.json still names the model they began with.
_TRAINERS_FILES = ("adapter_config.json", "trainer_state.json", "training_args.bin")


def find_packaged(
    model: str | Path, pruning_ratio: float | None, value_pruning_ratio: float | None = None
) -> Path | None:
    """Find the packaged mask of a model by what the hub calls it, or by what its config.json says it is.

    With a ratio for V, it is one that prunes V, too.

    Raises:
        LeanKError: If there is none of that ratio, or the file cannot be read.
    """
    name = identify_model(model)
    return find_by_model(name, pruning_ratio, value_pruning_ratio) if name else None


def identify_model(model: str | Path) -> str | None:
    """What the hub calls a model, else its config.json, unless something says that weights were changed."""
    if name := hub_name(model):
        return name
    folder = user_path(model)
    noted = name_in_config(folder)
    if noted in read_base_models(folder) or any((folder / file).exists() for file in _TRAINERS_FILES):
        return None
    return noted


def describe_packaged(name: str, mask: ChannelMask, model: str | Path) -> str:
    """Say in a line which mask is taken, where it comes from and how it was evaluated."""
    known = mask.provenance
    assert known is not None  # every packaged mask has it
    text = f"mask `{name}` of the package, made by {known.maker} for {known.model}"
    if known.source is not None:
        text += f" ({known.source})"
    if hub_name(model) == known.model:
        windows = f"{known.sink_size} tokens at the start and {known.recent_size} recent ones whole"
        return f"{text}; evaluated with {windows}: {known.evaluated}"
    if identify_model(model) == known.model:
        return f"{text}; `{CONFIG_NAME}` calls this model so; changed weights need a mask of their own"
    return f"{text}; not evaluated on `{model}`"
