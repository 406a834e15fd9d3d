"""Learn which K cache channels an LLM needs, and write checkpoints that keep only those.

The functions here are what the command line calls. Nothing heavy is imported before one of them is used:

    from leank_convert import export_checkpoint, train_mask

    mask = train_mask("meta-llama/Llama-3.2-1B-Instruct", "run")
    export_checkpoint("meta-llama/Llama-3.2-1B-Instruct", mask, "out")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leank_convert.evaluate import evaluate_checkpoint as evaluate_checkpoint
    from leank_convert.export import export_checkpoint as export_checkpoint
    from leank_convert.export.adapter import convert_adapter as convert_adapter
    from leank_convert.mask import load_mask as load_mask
    from leank_convert.methods.make import train_mask as train_mask
    from leank_convert.methods.make import train_masks as train_masks
    from leank_convert.methods.measured_cache import measure_cache as measure_cache
    from leank_convert.onnx import export_onnx as export_onnx
    from leank_convert.prune import prune_model as prune_model
    from leank_convert.recipe import Recipe as Recipe
    from leank_convert.recipe_file import load_recipe as load_recipe
    from leank_convert.verify import verify_checkpoint as verify_checkpoint

_HOMES = {
    "Recipe": "recipe",
    "convert_adapter": "export.adapter",
    "evaluate_checkpoint": "evaluate",
    "export_checkpoint": "export",
    "export_onnx": "onnx",
    "load_mask": "mask",
    "load_recipe": "recipe_file",
    "measure_cache": "methods.measured_cache",
    "prune_model": "prune",
    "train_mask": "methods.make",
    "train_masks": "methods.make",
    "verify_checkpoint": "verify",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
