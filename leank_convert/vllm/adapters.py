"""LoRA adapters: vLLM loads those that were made for the order of a checkpoint's heads.

vLLM asks a model nothing about an adapter, so its loading is wrapped.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import WorkerLoRAManager

from leank_convert._runtime.adapter_leank import OTHER_HEADS, fits_heads

_load = WorkerLoRAManager._load_adapter


def check_adapters() -> None:
    """Have vLLM refuse adapters that do not fit a LeanK model's heads, and put those of others in order."""
    WorkerLoRAManager._load_adapter = _load_in_order


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
