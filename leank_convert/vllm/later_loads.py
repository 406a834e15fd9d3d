"""What a running engine loads beside its weights or in their place: LoRA adapters, and other weights.

vLLM asks a model about neither, and takes its layers apart before new weights come, so its loading is
wrapped: adapters have to be made for the order of a checkpoint's heads, weights to be of the same mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.worker.gpu_worker import Worker

from leank_convert._runtime.files_leank import MASK_FILE, OTHER_HEADS, fits_heads

_load, _reload = WorkerLoRAManager._load_adapter, Worker.reload_weights


def check_later_loads() -> None:
    """Have vLLM refuse what does not fit a LeanK model, and put heads of other adapters in order."""
    WorkerLoRAManager._load_adapter, Worker.reload_weights = _load_in_order, _reload_alike


def _load_in_order(manager: WorkerLoRAManager, request: Any) -> Any:
    """Load an adapter; for a LeanK model its heads are put in the order of ranks, as those of weights."""
    adapter = _load(manager, request)
    model: Any = manager._adapter_manager.model
    if (in_rank_order := getattr(model, "with_ordered_heads", None)) is None:
        return adapter
    folder = get_adapter_absolute_path(request.lora_path)
    if not fits_heads(folder, model.config.leank, {}):
        raise ValueError(f"adapter `{request.lora_path}`: {OTHER_HEADS}, and serve NEW")
    # By its class's name vLLM knows in which order GPT-OSS has the rows of its experts.
    if model.config.model_type == "leank_gpt_oss" and any(".experts" in name for name in adapter.loras):
        raise ValueError(
            f"adapter `{request.lora_path}` changes experts, whose rows vLLM would take in another order; "
            "merge it into the original model, then convert that"
        )
    for name, weights in adapter.loras.items():
        part = "lora_a" if name.endswith(".o_proj") else "lora_b"
        setattr(weights, part, in_rank_order(f"{name}.weight", getattr(weights, part)))
    return adapter


def _reload_alike(
    worker: Any, weights_iterator: Any = None, weights_path: str | None = None, *given: Any, **options: Any
) -> None:
    """Reload weights, of another folder where that has the mask and the constants that are served."""
    config = getattr(worker.model_runner.get_model(), "config", None)
    own: Mapping[str, Any] | None = getattr(config, "leank", None)
    if own is not None and weights_iterator is not None:
        raise ValueError(
            "reload_weights: weights of an iterator may have the original's order of heads: name the folder "
            "of a checkpoint (`weights_path`)"
        )
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
