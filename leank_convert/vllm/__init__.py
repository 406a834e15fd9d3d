"""vLLM serves converted checkpoints: configs, models, cache groups and an attention backend, as its plugin.

vLLM calls `register` in each of its processes, maybe more than once. A page of a layer is split in two. Kept
pages hold the kept channels of K and V, for every token; window pages hold the rest. Both are cache groups
of vLLM and draw blocks from its one pool. Window pages between the sink and the recent window are given back
when decoding begins.
"""

from __future__ import annotations

import functools
from typing import Any

from leank_convert.families import ARCHITECTURES

BACKEND = "LEANK"
FP8_NAMES = ("fp8", "fp8_e4m3")
"""What vLLM calls a cache in e4m3."""


def register() -> None:
    """Tell transformers and vLLM of the configs, architectures and the attention backend."""
    from transformers import AutoConfig
    from vllm.config import SpeculativeConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from leank_convert.vllm.configs import CONFIG_CLASSES, draft_as_stock, settings_of

    for config_class in CONFIG_CLASSES:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for family in ARCHITECTURES.values():
        stock = family.causal_lm_class
        name = f"LeanK{stock}"
        # By name: the front end has no need of the model.
        ModelRegistry.register_model(name, f"leank_convert.vllm.models:{name}")
        MODELS_CONFIG_MAP[name] = settings_of(MODELS_CONFIG_MAP.get(stock, VerifyAndUpdateConfig))
    if BACKEND in AttentionBackendEnum.__members__:
        return  # called before
    register_backend(BACKEND, "leank_convert.vllm.backend.LeanKBackend")
    # It goes with a config from process to process, so it is made of what each of them finds by its name.
    compose = SpeculativeConfig.compose_draft_hf_overrides

    def compose_for_checkpoints(*args: Any, **options: Any) -> Any:
        return functools.partial(draft_as_stock, compose(*args, **options))

    SpeculativeConfig.compose_draft_hf_overrides = staticmethod(compose_for_checkpoints)
