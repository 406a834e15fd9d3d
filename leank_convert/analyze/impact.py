"""Norm against impact: what it costs to remove four channels, and how large their norm was.

The paper (section "Some channels exhibit large magnitudes but limited impact") removes "subsequent groups of
every 4 channels" from a model, evaluates each time how much worse it answers one task, and sets that beside
the group's average norm. It does not say whether the prompt's own attention loses the channels. Here a group
is channels 4g to 4g + 3 of every KV head of every layer, its norm the mean of their norm ratios, and every
product of a query with a key loses it, in the prompt as in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leank_convert.analyze.prompts import Prompt
from leank_convert.train.fusion import uncompiled

REMOVING_ATTENTION_NAME = "leank_remove"
GROUP_SIZE = 4


@dataclass(frozen=True)
class GroupImpact:
    """One group of channels.

    Attributes:
        first: Its first channel.
        norm: The mean norm ratio of its channels, over all layers and heads.
        exact_match: Share of the prompts answered right without it.
        lost: By how much that is less than with all channels.
    """

    first: int
    norm: float
    exact_match: float
    lost: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)


def count_passes(head_dim: int, num_prompts: int) -> int:
    """How many passes `measure_impact` takes."""
    return (1 + -(-head_dim // GROUP_SIZE)) * num_prompts


@torch.no_grad()
def measure_impact(
    model: PreTrainedModel,
    channel_norms: Tensor,
    prompts: Sequence[Prompt],
    *,
    advance: Callable[[], None] = lambda: None,
) -> tuple[GroupImpact, ...]:
    """Remove each group of channels in turn and see how many prompts are still answered right.

    An answer is right if every token of it is the likeliest after those before: what greedy decoding of the
    dense model without these channels would give. The model keeps the attention set here.

    Args:
        model: A causal language model, as `train.subject.load_subject` loads it.
        channel_norms: Norm ratios [L, H_kv, D].
        prompts: Prompts with answers.
        advance: Called after each pass.
    """
    head_dim = channel_norms.shape[-1]
    model.set_attn_implementation(REMOVING_ATTENTION_NAME)

    def score(first: int | None) -> float:
        kept = torch.ones(head_dim, device=model.device)
        if first is not None:
            kept[first : first + GROUP_SIZE] = 0
        right = 0
        for prompt in prompts:
            right += _answers_right(model, prompt, kept)
            advance()
        return right / len(prompts)

    whole = score(None)
    groups = []
    for first in range(0, head_dim, GROUP_SIZE):
        norm = channel_norms[..., first : first + GROUP_SIZE].mean().item()
        exact_match = score(first)
        groups.append(GroupImpact(first, norm, exact_match, whole - exact_match))
    return tuple(groups)


def _answers_right(model: PreTrainedModel, prompt: Prompt, kept_channels: Tensor) -> bool:
    tokens = torch.cat([prompt.input_ids, prompt.answer_ids])[:-1].to(model.device)
    num = len(prompt.answer_ids)
    with uncompiled():
        output: Any = model(
            input_ids=tokens[None], use_cache=False, logits_to_keep=num, leank_kept_channels=kept_channels
        )
    return bool((output.logits[0].argmax(-1).cpu() == prompt.answer_ids).all())


def _removing_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    leank_kept_channels: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's dense attention without some channels; transformers' attention signature."""
    if leank_kept_channels is None or attention_mask is not None:
        raise TypeError(
            f"attention `{REMOVING_ATTENTION_NAME}` needs `leank_kept_channels` and takes no mask"
        )
    kept = leank_kept_channels.to(query)
    output, _ = sdpa_attention_forward(
        module, query * kept, key, value, None, scaling=scaling, is_causal=True
    )
    return output, None


AttentionInterface.register(REMOVING_ATTENTION_NAME, _removing_attention)
