"""Weights that take the place of others in a running engine: those of the same mask alone.

vLLM takes a model's layers apart before it asks the model, so its worker's method is wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from vllm.v1.worker.gpu_worker import Worker

from leank_convert._runtime.mask_file_leank import MASK_FILE

_reload = Worker.reload_weights


def check_reloads() -> None:
    """Have vLLM refuse weights of another mask in the place of a LeanK model's."""
    Worker.reload_weights = _reload_alike


def _reload_alike(
    worker: Any, weights_iterator: Any = None, weights_path: str | None = None, *given: Any, **options: Any
) -> None:
    """Reload weights, of another folder where that has the mask and the constants that are served."""
    config = getattr(worker.model_runner.get_model(), "config", None)
    own: Mapping[str, Any] | None = getattr(config, "leank", None)
    if own is not None and weights_path is not None:
        block = PreTrainedConfig.get_config_dict(weights_path)[0].get("leank") or {}
        if _served(block) != _served(own):
            raise ValueError(
                f"`{weights_path}` has another mask, or other constants, than the checkpoint that is served: "
                "start another engine with it"
            )
    _reload(worker, weights_iterator, weights_path, *given, **options)


def _served(block: Mapping[str, Any]) -> dict[str, Any]:
    """A `leank` block as an engine reads it: of the files it names that of the mask."""
    return {**block, "files": block.get("files", {}).get(MASK_FILE)}
