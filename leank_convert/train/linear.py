"""Linear-attention layers in a training step: questions continue from the context's state.

Such a layer mixes tokens in their order. What stands side by side in attention's one row is therefore laid
out for it as a batch, a row for each question with its answer, and all rows begin with the context's state.
Gradients pass through the tokens of answers; state and questions are constant.

Letters: Q questions, S tokens of a row, N tokens that a pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.train.attention import ContextPass, FollowingPass


def linear_layers(model: PreTrainedModel) -> list[Any]:
    """A model's modules of linear attention, none in most models."""
    layers: Any = model.base_model.layers
    return [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]


@contextmanager
def carry_states(model: PreTrainedModel, leank_pass: ContextPass | FollowingPass) -> Iterator[None]:
    """Have a pass fill a context's states, or go on from them, in layers with linear attention."""
    with ExitStack() as hooks:
        for layer in linear_layers(model):
            enter, leave = partial(_enter, leank_pass), partial(_leave, leank_pass)
            hooks.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(leave))
        yield


@dataclass(frozen=True)
class _Continued:
    """Stands for transformers' cache, which would write over the state that the backward pass needs."""

    conv_state: Tensor  # the convolution's last inputs [Q, channels, kernel]
    recurrent_state: Tensor  # [Q, heads, key channels, value channels]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.conv_state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.recurrent_state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        return torch.cat([self.conv_state, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int) -> None:
        pass


def _enter(
    leank_pass: ContextPass | FollowingPass, layer: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Give a layer its state, and each question's tokens as a row [Q, S, hidden_size]."""
    context, index = leank_pass.context, layer.layer_idx
    states: Any = context.states
    name = "cache" if "cache" in kwargs else "cache_params"  # before transformers 5.24
    if isinstance(leank_pass, ContextPass):
        return args, {**kwargs, name: states}
    hidden_states: Tensor = kwargs["hidden_states"]
    if leank_pass.student is None:
        context.inputs[index] = hidden_states[:, : leank_pass.num_questions]
    else:
        hidden_states = torch.cat([context.inputs[index], hidden_states], dim=1)
    assert leank_pass.rows is not None
    tokens = leank_pass.rows.tokens.to(hidden_states.device)
    conv_state, recurrent_state = (
        state.expand(len(tokens), -1, *state.shape[2:])
        for state in (states.get_conv_state(index), states.get_recurrent_state(index))
    )
    padded = torch.nn.functional.pad(hidden_states[0], (0, 0, 0, 1))
    continued = _Continued(conv_state, recurrent_state)
    return args, {**kwargs, "hidden_states": padded[tokens], name: continued}


def _leave(leank_pass: ContextPass | FollowingPass, layer: Any, args: Any, output: Tensor) -> Tensor:
    """Lay the pass's tokens side by side again: [1, N, hidden_size] of rows [Q, S, hidden_size]."""
    if isinstance(leank_pass, ContextPass):
        return output
    assert leank_pass.rows is not None
    return output.flatten(0, 1)[leank_pass.rows.places.to(output.device)][None]
