"""The tensors that transformers' own class of a family asks a config.json's model to have."""

from __future__ import annotations

from typing import Any

from leank_convert.architectures import ModelFacts
from leank_convert.config_class import build_config, refused_by_transformers


def list_stock_tensors(facts: ModelFacts, *, origin: str) -> dict[str, tuple[int, ...]]:
    """List the shapes of a model's tensors, by the names that they have in files.

    The model is built without memory for its weights. `origin` is its config.json, for messages.

    Raises:
        LeanKError: If transformers makes no model of its config.json.
    """
    # Imported here: it takes more than a second, which an import of the toolkit need not.
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = build_config(facts.config, facts.architecture, origin=origin)
    with refused_by_transformers(origin), torch.device("meta"):
        model: Any = getattr(transformers, facts.architecture.causal_lm_class)(config)
        # In memory, experts lie in one tensor that files hold in parts.
        tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
