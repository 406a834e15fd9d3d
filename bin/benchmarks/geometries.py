"""Shapes of real models that benchmarks build with random weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.errors import LeanKError
from leank_convert.windows import Windows


@dataclass(frozen=True)
class Geometry:
    """The shape of one model: its hub id, its config.json as far as arithmetic goes, its mask's windows."""

    name: str
    model_id: str
    config: Mapping[str, Any]
    windows: Windows = field(default_factory=Windows)

    @property
    def facts(self) -> ModelFacts:
        """Layers, heads and whatever else conversion reads of a config."""
        return read_model_facts(self.config, origin=self.name)


_LLAMA = {
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
}
_QWEN = {
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
}
_TINY = {
    **_LLAMA,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TOY = "tiny"
# The first one is the default.
GEOMETRIES: Mapping[str, Geometry] = MappingProxyType(
    {
        "llama-3.1-8b": Geometry("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", _LLAMA),
        "qwen2.5-7b": Geometry("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", _QWEN),
        TOY: Geometry(TOY, "leank-convert/tiny", _TINY, Windows(4, 16, 4)),
    }
)


def find_geometry(name: str | None, mask_shape: tuple[int, ...] | None) -> Geometry:
    """A geometry by its name, else by the shape of a mask `[L, H_kv, D]`, which must fit; else the first."""
    if mask_shape is None:
        return GEOMETRIES[name or next(iter(GEOMETRIES))]
    for geometry in GEOMETRIES.values():
        if mask_shape == geometry.facts.mask_shape and name in (None, geometry.name):
            return geometry
    known = ", ".join(f"`{key}`" for key in GEOMETRIES)
    raise LeanKError(
        f"a mask of shape {list(mask_shape)} (layers, KV heads, head_dim) fits "
        + (f"no geometry among {known}" if name is None else f"another model than `{name}`"),
        hint="masks of these models are what benchmarks run with",
    )
