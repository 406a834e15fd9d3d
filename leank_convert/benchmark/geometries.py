"""Shapes of real models that benchmarks build with random weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.errors import LeanKError


@dataclass(frozen=True)
class Geometry:
    """The shape of one model.

    Attributes:
        name: What `--geometry` calls it.
        model_id: The hub id of the model that has this shape.
        config: Its config.json, as far as shape and arithmetic go.
        windows: `sink_size`, `recent_size` and `flush_size` of its mask.
    """

    name: str
    model_id: str
    config: Mapping[str, Any]
    windows: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({"sink_size": 128, "recent_size": 1024, "flush_size": 32})
    )

    @property
    def facts(self) -> ModelFacts:
        """Layers, heads and whatever else conversion reads of a config."""
        return read_model_facts(self.config, origin=self.name)

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts."""
        facts = self.facts
        return {
            "geometry": self.name,
            "num_hidden_layers": facts.num_hidden_layers,
            "num_attention_heads": facts.num_attention_heads,
            "num_key_value_heads": facts.num_key_value_heads,
            "head_dim": facts.head_dim,
        }


GEOMETRIES: Mapping[str, Geometry] = MappingProxyType(
    {
        geometry.name: geometry
        for geometry in (
            Geometry(
                "llama-3.1-8b",
                "meta-llama/Llama-3.1-8B-Instruct",
                {
                    "model_type": "llama",
                    "num_hidden_layers": 32,
                    "hidden_size": 4096,
                    "intermediate_size": 14336,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "vocab_size": 128256,
                    "max_position_embeddings": 131072,
                    "rope_parameters": {
                        "rope_type": "llama3",
                        "rope_theta": 500000.0,
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192,
                    },
                    "rms_norm_eps": 1e-5,
                    "tie_word_embeddings": False,
                },
            ),
            Geometry(
                "qwen2.5-7b",
                "Qwen/Qwen2.5-7B-Instruct",
                {
                    "model_type": "qwen2",
                    "num_hidden_layers": 28,
                    "hidden_size": 3584,
                    "intermediate_size": 18944,
                    "num_attention_heads": 28,
                    "num_key_value_heads": 4,
                    "vocab_size": 152064,
                    "max_position_embeddings": 32768,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
                    "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": False,
                },
            ),
            Geometry(
                "tiny",
                "leank-convert/tiny",
                {
                    "model_type": "llama",
                    "num_hidden_layers": 2,
                    "hidden_size": 64,
                    "intermediate_size": 96,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 64,
                    "vocab_size": 128,
                    "max_position_embeddings": 4096,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                    "rms_norm_eps": 1e-5,
                    "tie_word_embeddings": False,
                },
                MappingProxyType({"sink_size": 4, "recent_size": 16, "flush_size": 4}),
            ),
        )
    }
)


def find_geometry(name: str | None, mask_shape: tuple[int, ...] | None) -> Geometry:
    """Find a geometry by its name, else by the shape of a mask, else the first of the table.

    Args:
        name: A key of `GEOMETRIES`.
        mask_shape: Layers, KV heads and channels of the mask to run with.

    Raises:
        LeanKError: If there is none, or the mask does not fit it.
    """
    known = ", ".join(f"`{key}`" for key in GEOMETRIES)
    if name is not None and name not in GEOMETRIES:
        raise LeanKError(f"there is no geometry `{name}`", hint=f"known: {known}")
    if mask_shape is None:
        return GEOMETRIES[name or next(iter(GEOMETRIES))]
    for geometry in GEOMETRIES.values():
        facts = geometry.facts
        fits = mask_shape == (facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim)
        if fits and name in (None, geometry.name):
            return geometry
    raise LeanKError(
        f"a mask of shape {list(mask_shape)} (layers, KV heads, head_dim) fits "
        + (f"no geometry among {known}" if name is None else f"another model than `{name}`"),
        hint="masks of these models are what benchmarks run with",
    )
