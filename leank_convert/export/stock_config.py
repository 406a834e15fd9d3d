"""Check of a source's config.json by transformers' own config class."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from leank_convert.errors import LeanKError
from leank_convert.families import Architecture

_MAX_REASON = 300


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
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)  # it prints the whole config first
    try:
        # The class writes into what it is given.
        stock = getattr(transformers, architecture.config_class).from_dict(copy.deepcopy(dict(config)))
        stock.num_hidden_layers = 1
        if getattr(stock, "layer_types", None) is not None:
            stock.layer_types = stock.layer_types[-1:]
        with torch.device("meta"):
            getattr(transformers, architecture.causal_lm_class)(stock)
    except Exception as error:  # of as many kinds as there are keys
        reason = " ".join(str(error).split())
        raise LeanKError(
            f"`{origin}` is refused by transformers: {reason[:_MAX_REASON]}",
            hint="compare it with the config.json of the model that it was made of",
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
