"""Preconditions of CUDA graph capture, of a model and of each step.

Whatever is not known to compute the same in every step has a reason here why it runs as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all

from .capture_leank import StepGraph

# Whose modules compute the same in every step; `kernels` marks what of transformers it could replace.
_STOCK_PACKAGES = ("torch", "transformers", "kernels")

# Arguments of a forward pass that may be there, and what they may be for a step to be captured.
_PLAIN_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    "input_ids": lambda value: value is None or value.ndim == 2,
    "inputs_embeds": lambda value: value is None or value.ndim == 3,
    "position_ids": lambda value: value is None or (value.ndim == 2 and not value.is_floating_point()),
    "logits_to_keep": lambda value: isinstance(value, int) and value >= 0,
    "return_dict": lambda value: value in (None, True),
    "output_hidden_states": lambda value: value in (None, False),
}


class ModelState:
    """What a captured step presumes of a model: its modules, and where its weights lie.

    Args:
        model: The model.
        device: Where its weights should lie.
        fuse: Called where its steps can be captured: lays weights side by side, and returns whether
            `fused_forward` serves it now.

    Attributes:
        why_eager: Why its steps cannot be captured; None if they can.
        is_fused: Whether they run as `fused_forward`.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, fuse: Callable[[], bool] | None = None
    ) -> None:
        modules = list(model.modules())
        self._model = model  # so that no other model takes its id while this counts
        self._members = [
            members
            for module in modules
            for members in (module._modules, module._parameters, module._buffers)
            if members
        ]
        self._values = list(chain.from_iterable(members.values() for members in self._members))
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        # Subclasses may have no address; they are refused below.
        self._tensors = [tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter)]
        self._hooks = [
            hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._hooks += [of_all._global_forward_hooks, of_all._global_forward_pre_hooks]
        self._attributes = [vars(module) for module in modules[1:]]
        self.why_eager = _why_model_is_eager(modules, tensors, device)
        self._intercepted = self._is_intercepted()
        if self.why_eager is None and any(self._hooks):
            self.why_eager = "a module has forward hooks"
        self.is_fused = self.why_eager is None and fuse is not None and fuse()
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]

    def holds(self) -> bool:
        """Return whether modules, what they run, weights and their addresses are what they were."""
        values = list(chain.from_iterable(members.values() for members in self._members))
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and [tensor.data_ptr() for tensor in self._tensors] == self._pointers
            and self._is_intercepted() == self._intercepted
        )

    def _is_intercepted(self) -> tuple[bool, bool]:
        """Return whether modules have hooks, and whether some have a forward pass of their own."""
        return any(self._hooks), any("forward" in attributes for attributes in self._attributes)


def _why_model_is_eager(
    modules: list[nn.Module], tensors: list[torch.Tensor], device: torch.device
) -> str | None:
    """Return why a model's steps cannot be captured, from what does not change between steps."""
    root = modules[0]
    if getattr(root, "hf_quantizer", None) is not None:
        return "the model is quantized"
    for module in modules[1:]:
        if type(module).__module__.split(".")[0] not in _STOCK_PACKAGES:
            # An adapter's module may switch in Python what it computes.
            return f"module {type(module).__name__} is not of the stock model"
        if "forward" in vars(module):
            return f"module {type(module).__name__} has a forward of its own, as accelerate's hooks give it"
        # Where kinds of layers have rotary embeddings of their own, one of each.
        rope_type = getattr(module, "rope_type", "default")
        for kind in rope_type.values() if isinstance(rope_type, dict) else (rope_type,):
            if "dynamic" in kind or kind == "longrope":
                return f"rotary embedding of type {kind!r} changes with the length"
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
        return "weights are a tensor subclass"
    if any(tensor.device != device for tensor in tensors):
        return f"weights are not all on {device}"
    return None


def why_step_is_eager(model: Any, inputs: dict[str, Any], tokens: torch.Tensor) -> str | None:
    """Return why a decode step cannot be captured, from what may change with every step.

    Args:
        model: The model.
        inputs: Arguments of its forward pass, without cache and attention mask.
        tokens: Those of them that the step runs on, ids `[B, d]` or embeddings `[B, d, hidden]`.
    """
    if tokens.device.type != StepGraph.device_type:
        return f"device {tokens.device} has no graphs"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(tokens.device.type):
        return "autocast is on"
    config = model.config
    if getattr(config, "output_hidden_states", False) or not getattr(config, "return_dict", True):
        return "the config asks for another output"
    for name, value in inputs.items():
        is_plain = _PLAIN_ARGUMENTS.get(name)
        if value is not None if is_plain is None else not is_plain(value):
            return f"argument {name}"
    if inputs["input_ids"] is not None and inputs["inputs_embeds"] is not None:
        return "both input_ids and inputs_embeds are given"
    position_ids = inputs["position_ids"]
    if position_ids is not None and position_ids.device != tokens.device:
        return "position_ids are on another device"
    if StepGraph.is_capturing():
        return "the stream is being captured by the caller"
    return None
