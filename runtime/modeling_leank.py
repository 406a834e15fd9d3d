"""Models of converted checkpoints: each family's stock classes, decoding from a LeanK cache."""

from __future__ import annotations

from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from .configuration_leank import LeanKLlamaConfig, LeanKMistralConfig, LeanKQwen2Config, LeanKQwen3Config
from .mixins_leank import LeanKForCausalLMMixin, LeanKModelMixin


class LeanKLlamaModel(LeanKModelMixin, LlamaModel):  # type: ignore[no-untyped-call]
    """Llama without a head, decoding from a LeanK cache."""

    config_class = LeanKLlamaConfig


class LeanKLlamaForCausalLM(LeanKForCausalLMMixin, LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Llama, decoding from a LeanK cache."""

    config_class = LeanKLlamaConfig


class LeanKMistralModel(LeanKModelMixin, MistralModel):  # type: ignore[no-untyped-call]
    """Mistral without a head, decoding from a LeanK cache."""

    config_class = LeanKMistralConfig


class LeanKMistralForCausalLM(LeanKForCausalLMMixin, MistralForCausalLM):  # type: ignore[no-untyped-call]
    """Mistral, decoding from a LeanK cache."""

    config_class = LeanKMistralConfig


class LeanKQwen2Model(LeanKModelMixin, Qwen2Model):  # type: ignore[no-untyped-call]
    """Qwen2 and Qwen2.5 without a head, decoding from a LeanK cache."""

    config_class = LeanKQwen2Config


class LeanKQwen2ForCausalLM(LeanKForCausalLMMixin, Qwen2ForCausalLM):  # type: ignore[no-untyped-call]
    """Qwen2 and Qwen2.5, decoding from a LeanK cache."""

    config_class = LeanKQwen2Config


class LeanKQwen3Model(LeanKModelMixin, Qwen3Model):  # type: ignore[no-untyped-call]
    """Qwen3 without a head, decoding from a LeanK cache."""

    config_class = LeanKQwen3Config


class LeanKQwen3ForCausalLM(LeanKForCausalLMMixin, Qwen3ForCausalLM):  # type: ignore[no-untyped-call]
    """Qwen3, decoding from a LeanK cache."""

    config_class = LeanKQwen3Config
