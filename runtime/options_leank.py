"""What a `generate` call asks for, from its arguments and generation configs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig


def first_given(kwargs: dict[str, Any], configs: tuple[GenerationConfig | None, ...], name: str) -> Any:
    """Return an option from where `generate` would take it: arguments, then generation configs."""
    for value in (kwargs.get(name), *(getattr(config, name, None) for config in configs)):
        if value is not None:
            return value
    return None


def prompt_columns(inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> int | None:
    """Return the columns that the prompt of a `generate` call will have filled, earlier turns included."""
    for candidate in (
        kwargs.get("attention_mask"),
        kwargs.get("inputs_embeds"),
        inputs,
        kwargs.get("input_ids"),
    ):
        if isinstance(candidate, torch.Tensor) and candidate.ndim >= 2:
            return int(candidate.shape[1])
    return None


def columns_to_reserve(
    prompt: int, kwargs: dict[str, Any], configs: tuple[GenerationConfig | None, ...]
) -> int | None:
    """Return the columns that a `generate` call may fill, None if many more than its prompt.

    It may end long before its limit, so only an answer that is short beside the prompt is worth memory.
    """
    answer = first_given(kwargs, configs, "max_new_tokens")
    limit = first_given(kwargs, configs, "max_length") if answer is None else prompt + answer
    if limit is not None and prompt < limit <= prompt + max(prompt // 8, 256):
        return int(limit)
    return None
