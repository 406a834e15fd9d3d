"""Weights that compressed-tensors packed, unpacked as soon as a model is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelerate import dispatch_model


def unpack_weights(model: Any, *, rounds_inputs: bool) -> None:
    """Unpack weights now that compressed-tensors would unpack ahead of the first pass of the whole model.

    Modules become those of plain weights, in the model's dtype. `rounds_inputs` is whether they round what
    they are given where the checkpoint says so, which has no gradients.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return
    devices, unpacks = getattr(model, "hf_device_map", None), list(model._forward_pre_hooks.values())
    for unpack in unpacks:
        unpack(model, ())
    for module in model.modules():
        if hasattr(module, "_original_forward_func"):
            # It would hand the module copies of whatever it is called with.
            offload = import_module("compressed_tensors.offload.module")
            offload.remove_module_offload(module, onload_tensors=True)
        if getattr(module, "quantization_scheme", None) is not None:
            if (weight := getattr(module, "weight", None)) is not None:
                weight.data = weight.data.to(model.dtype)  # that of NVFP4 is bfloat16
            if not rounds_inputs:
                module.quantization_enabled = False
    if unpacks and devices and len({*devices.values()}) > 1:  # which it forgets
        dispatch_model(model, devices, skip_keys=model._skip_keys_device_placement)
