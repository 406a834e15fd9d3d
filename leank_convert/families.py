"""The model families that can be converted, as rows of one table. A family is added by adding a row.

A row says what the family's config class in transformers does not; sizes, tensors and defaults are
transformers' own. Nothing here imports torch or transformers: class names are strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LEANK_PREFIX = "leank_"
_SLIDING = ("sliding_attention",)
_LINEAR = ("linear_attention",)


@dataclass(frozen=True)
class Architecture:
    """One model family: its classes in transformers, and what is particular to its attention."""

    model_type: str  # the `model_type` of the family's config.json
    stem: str  # the family's name within class names: `<stem>Config`, `<stem>Model`, `<stem>ForCausalLM`
    partial_rotary: bool = False  # whether the config may leave channels of a head unrotated
    sinks: bool = False  # whether each query head has an attention sink, a logit of its own
    experts: bool = False  # whether layers may have a mixture of experts
    other_layers: tuple[str, ...] = ()  # kinds of layers that it may have beside those with full attention
    # Whether kinds of layers are rotated differently, each by parameters of its own.
    rope_by_kind: bool = False
    is_text_part: bool = False  # whether `Text` is in the names of the classes but that with a head
    interleaved_pairs: bool = False  # whether rope turns neighbours together, not channels i and i + D/2
    gated: bool = False  # whether attention's output is multiplied by gates before it is projected

    @property
    def config_class(self) -> str:
        """The family's config class in transformers."""
        return f"{self.stem}{'Text' if self.is_text_part else ''}Config"

    @property
    def base_class(self) -> str:
        """The family's model without a head."""
        return f"{self.stem}{'Text' if self.is_text_part else ''}Model"

    @property
    def causal_lm_class(self) -> str:
        """The family's model with a language-modelling head."""
        return f"{self.stem}ForCausalLM"

    @property
    def leank_model_type(self) -> str:
        """The `model_type` of a converted checkpoint."""
        return LEANK_PREFIX + self.model_type


def attention_tensor(layer: int, name: str) -> str:
    """The full name of a tensor of one layer's attention, such as `q_proj.weight`."""
    return f"model.layers.{layer}.self_attn.{name}"


_ROWS = (
    Architecture("llama", "Llama"),
    Architecture("mistral", "Mistral"),
    Architecture("qwen2", "Qwen2", other_layers=_SLIDING),
    Architecture("qwen3", "Qwen3", other_layers=_SLIDING),
    Architecture("qwen3_moe", "Qwen3Moe", experts=True),
    Architecture("phi3", "Phi3", partial_rotary=True),
    Architecture("smollm3", "SmolLM3"),
    Architecture("glm4_moe", "Glm4Moe", partial_rotary=True, experts=True),
    Architecture("glm4", "Glm4", partial_rotary=True, interleaved_pairs=True),
    Architecture("mixtral", "Mixtral", experts=True),
    Architecture("granite", "Granite"),
    Architecture("seed_oss", "SeedOss"),
    Architecture("ministral3", "Ministral3"),
    Architecture("olmo2", "Olmo2"),
    Architecture("minimax_m2", "MiniMaxM2", partial_rotary=True, experts=True),
    Architecture("ernie4_5", "Ernie4_5", interleaved_pairs=True),
    Architecture("hy_v3", "HYV3", experts=True),
    Architecture("olmo3", "Olmo3", other_layers=_SLIDING, rope_by_kind=True),
    Architecture(
        "qwen3_5_text", "Qwen3_5", is_text_part=True, partial_rotary=True, other_layers=_LINEAR, gated=True
    ),
    Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        is_text_part=True,
        partial_rotary=True,
        experts=True,
        other_layers=_LINEAR,
        gated=True,
    ),
    Architecture(
        "qwen3_next", "Qwen3Next", partial_rotary=True, experts=True, other_layers=_LINEAR, gated=True
    ),
    Architecture("gpt_oss", "GptOss", sinks=True, experts=True, other_layers=_SLIDING),
    Architecture("gemma3_text", "Gemma3", is_text_part=True, other_layers=_SLIDING, rope_by_kind=True),
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.model_type: row for row in _ROWS})
