"""Shapes of real models that benchmarks build with random weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.errors import LeanKError
from leank_convert.files import read_json
from leank_convert.windows import Windows


@dataclass(frozen=True)
class Geometry:
    """The shape of one model: its hub id, its config.json as far as arithmetic goes, its mask's windows."""

    name: str
    model_id: str
    config: Mapping[str, Any]
    windows: Windows

    @property
    def facts(self) -> ModelFacts:
        """Layers, heads and whatever else conversion reads of a config."""
        return read_model_facts(self.config, origin=self.name)


TOY = "tiny"
# The first one is the default.
_KNOWN = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", Windows()),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", Windows()),
    TOY: ("leank-convert/tiny", Windows(4, 16, 4)),
}
_CONFIGS = Path(__file__).with_name("configs")
GEOMETRIES = {
    name: Geometry(name, model_id, read_json(_CONFIGS / f"{name}.json"), windows)
    for name, (model_id, windows) in _KNOWN.items()
}


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
