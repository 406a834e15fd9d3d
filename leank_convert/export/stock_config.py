"""Check of a source's config.json by transformers' own config class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leank_convert.config_class import build_config, refused_by_transformers
from leank_convert.families import Architecture


def check_stock_config(config: Mapping[str, Any], architecture: Architecture, *, origin: str) -> None:
    """Check that the family's classes in transformers make a model of a config.json.

    One layer is built, without memory for its weights; nothing is downloaded.

    Args:
        config: The parsed config.json, overrides applied, its facts read.
        architecture: The family.
        origin: The file, for messages.

    Raises:
        LeanKError: If they do not.
    """
    # Imported here: it takes more than a second, which an import of the toolkit need not.
    import torch
    import transformers

    stock: Any = build_config(config, architecture, origin=origin)
    with refused_by_transformers(origin), torch.device("meta"):
        stock.num_hidden_layers = 1
        if getattr(stock, "layer_types", None) is not None:
            stock.layer_types = stock.layer_types[-1:]
        getattr(transformers, architecture.causal_lm_class)(stock)
