"""Compiled layers for the context pass, where norms, rotary embedding and activation are a fifth of the time.

Attention and matrix products are as fast as they get; what lies between them reads and writes the hidden
states a dozen times. `torch.compile` fuses that. Only the context pass runs compiled: questions and answers
are a few hundred tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from leank_convert.errors import first_line

_logger = logging.getLogger("leank_convert")


def fuse_layers(model: PreTrainedModel) -> None:
    """Have the layers of a model on one CUDA device compiled when they first run; where that fails, warn."""
    try:
        probe = torch.compile(torch.nn.functional.silu, dynamic=True)
        probe(torch.ones(8, device=model.device))
    except Exception as error:  # no compiler, no Triton, a broken cache: whatever it stumbles upon
        _logger.warning(
            "torch.compile does not work here, so training is a tenth slower: %s", first_line(error)
        )
        return
    layers: Any = model.base_model.layers
    for layer in layers:
        for name, part in layer.named_children():
            # How many tokens each expert gets is another number in every pass; what linear attention runs is
            # as many operations as a context has chunks, or kernels already.
            if name != "linear_attn" and not hasattr(part, "experts"):
                part.compile(dynamic=True)
