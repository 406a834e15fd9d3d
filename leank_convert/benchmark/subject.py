"""What is measured: a mask on the shape of a real model, and the runtime files as a checkpoint loads them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from leank_convert.benchmark.geometries import GEOMETRIES, Geometry, find_geometry
from leank_convert.checkpoint_io import CONFIG_NAME
from leank_convert.errors import LeanKError
from leank_convert.export.config_json import build_config, build_leank_facts, encode_json
from leank_convert.export.runtime_files import copy_runtime_files
from leank_convert.head_layout import HeadLayout, plan_head_layout
from leank_convert.mask import ChannelMask, MaskProvenance, load_mask, resolve_mask
from leank_convert.windows import Windows

# Heads' widths as a learned mask of 70% has them, in quarters of a head: 0.3125 of all channels.
_SYNTHETIC_QUARTERS = (0, 1, 1, 2, 1, 2, 1, 2)
_SYNTHETIC_SEED = 0
_FOLDER_NAME = "leank_benchmark"

COMPILED, PLAIN_TORCH = "compiled kernel", "plain torch"


@dataclass(frozen=True)
class Subject:
    """A mask, and the model shape that it fits.

    Attributes:
        geometry: The shape.
        mask: Kept channels, original head order.
        origin: Where the mask comes from, for people.
        windows: Window sizes.
    """

    geometry: Geometry
    mask: ChannelMask
    origin: str
    windows: Windows

    @property
    def layout(self) -> HeadLayout:
        """The order of the heads in a checkpoint."""
        return plan_head_layout(self.mask.widths)

    @property
    def channel_masks(self) -> list[Tensor]:
        """Kept channels of every layer `[H_kv, D]`, heads in the checkpoint's order."""
        return [
            self.mask.channel_mask[layer][list(permutation)]
            for layer, permutation in enumerate(self.layout.head_permutation)
        ]

    def keeping_all(self) -> Subject:
        """The same shape with every channel kept."""
        whole = ChannelMask(torch.ones_like(self.mask.channel_mask))
        return replace(self, mask=whole, origin="every channel kept")

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts."""
        return {
            **self.geometry.describe(),
            "mask": self.origin,
            "pruning_ratio": self.mask.pruning_ratio,
            "sink_size": self.windows.sink_size,
            "recent_size": self.windows.recent_size,
            "flush_size": self.windows.flush_size,
        }


def choose_subject(mask: str | None, recipe: str | None, geometry: str | None) -> Subject:
    """Put together what to measure.

    Args:
        mask: A mask file, a folder that holds one, or a hub id; None for the recipe's, else a synthetic one.
        recipe: A recipe that names a mask, a model and windows.
        geometry: A key of `GEOMETRIES`; None for the one that the mask fits.

    Raises:
        LeanKError: If they do not go together.
    """
    windows: dict[str, int] = {}
    if recipe is not None:
        from leank_convert.recipe_file import load_recipe

        loaded = load_recipe(recipe)
        windows = {key: getattr(loaded.windows, key) for key in ("sink_size", "recent_size", "flush_size")}
        mask = mask or loaded.mask
        geometry = geometry or _geometry_of_model(loaded.model.id)
    if mask is None:
        shape = find_geometry(geometry, None)
        made = synthetic_mask(shape)
        origin = "synthetic (widths as learned)"
    else:
        made = load_mask(resolve_mask(mask))
        shape = find_geometry(geometry, tuple(made.channel_mask.shape))
        origin = Path(mask).name
    known = made.provenance
    trained = {key: getattr(known, key) for key in shape.windows} if known is not None else {}
    return Subject(shape, made, origin, Windows(**{**shape.windows, **windows, **trained}))


def synthetic_mask(geometry: Geometry) -> ChannelMask:
    """Make a mask whose widths are spread as in a learned one and whose channels are random."""
    facts = geometry.facts
    generator = torch.Generator().manual_seed(_SYNTHETIC_SEED)
    mask = torch.zeros(facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim, dtype=torch.bool)
    for layer in range(facts.num_hidden_layers):
        for head in range(facts.num_key_value_heads):
            # Shifted by layer, so that layers differ as they do in a learned mask.
            quarters = _SYNTHETIC_QUARTERS[(head + 3 * layer) % len(_SYNTHETIC_QUARTERS)]
            kept = torch.randperm(facts.head_dim, generator=generator)[: quarters * facts.head_dim // 4]
            mask[layer, head, kept] = True
    return ChannelMask(mask)


def _geometry_of_model(model_id: str | None) -> str:
    for geometry in GEOMETRIES.values():
        if geometry.model_id == model_id:
            return geometry.name
    raise LeanKError(
        f"no geometry has the shape of the recipe's model `{model_id}`",
        hint="name one: `--geometry " + "|".join(GEOMETRIES) + "`",
    )


class Runtime:
    """The runtime files of one checkpoint, loaded as transformers loads them.

    Attributes:
        folder: The checkpoint.
        config: Its config.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        self.folder = folder
        try:
            self.config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            modeling = self.config.auto_map["AutoModelForCausalLM"]
            # The file that imports all others: loaded in its name, they are modules of one package.
            model_class = get_class_from_dynamic_module(modeling, str(folder))
        except (OSError, ValueError, AttributeError, KeyError) as error:
            raise LeanKError(
                f"`{folder}` is no checkpoint that this machine can load: {error}",
                hint=f"`leank-convert verify {folder}` lists what is wrong",
            ) from error
        self._package = model_class.__module__.rpartition(".")[0]

    def module(self, name: str) -> ModuleType:
        """One of its files, such as `cache_leank`.

        Raises:
            LeanKError: If the checkpoint has no such file.
        """
        try:
            return importlib.import_module(f"{self._package}.{name}")
        except ModuleNotFoundError as error:
            raise LeanKError(
                f"`{self.folder}` has no `{name}.py`: it was exported by another release of leank-convert",
                hint="export it again",
            ) from error

    def build_cache(self, channel_masks: list[Tensor]) -> Any:
        """An empty cache without a model; masks `[H_kv, D]` as `Subject.channel_masks` gives them."""
        return self.module("cache_leank").LeanKCache(self.config, channel_masks)

    def build_model(self, channel_masks: list[Tensor], device: torch.device, dtype: torch.dtype) -> Any:
        """A model of random weights, made on the device."""
        from transformers import AutoModelForCausalLM

        with torch.device(device):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                self.config, trust_remote_code=True, dtype=dtype
            )
        for layer, mask in zip(model.model.layers, channel_masks, strict=True):
            layer.self_attn.channel_mask.copy_(mask)
        return model.eval()

    @property
    def chunk_size(self) -> int:
        """Channels of a chunk, in all layers."""
        settings = self.module("configuration_leank").read_settings(self.config)
        return int(self.module("layout_leank").choose_chunk_size(settings.widths, settings.head_dim))

    def name_attention(self, device: torch.device, dtype: torch.dtype) -> str:
        """What decode attention runs in: figures of plain torch must not pass for the kernel's."""
        return PLAIN_TORCH if self.find_kernels(device, dtype) is None else COMPILED

    def find_kernels(self, device: torch.device, dtype: torch.dtype) -> list[Any] | None:
        """The compiled kernels that serve all layers, or None where plain torch serves any.

        Layers differ in nothing that is compiled in but the most chunks that one of their heads has.
        """
        if device.type != "cuda":
            return None
        settings = self.module("configuration_leank").read_settings(self.config)
        layout, chunk_size = self.module("layout_leank").ChunkLayout, self.chunk_size
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        most = {layout(widths, settings.head_dim, chunk_size).max_chunks for widths in settings.widths}
        found = [
            self.module("decode_kernels_leank").find_kernels(
                device,
                dtype,
                head_dim=settings.head_dim,
                num_groups=groups,
                chunk_size=chunk_size,
                max_chunks=max_chunks,
            )
            for max_chunks in sorted(most)
        ]
        return None if None in found else found


def load_runtime(subject: Subject, folder: str | Path, dtype: torch.dtype) -> Runtime:
    """Write a subject's config and the runtime files to a folder, and load them as a checkpoint.

    No weights are written: they are random, and made where they are used.

    Args:
        subject: What to measure.
        folder: A folder that may be removed when nothing is loaded from it any more.
        dtype: The dtype that the config names.
    """
    facts, windows = subject.geometry.facts, subject.windows
    known = subject.mask.provenance or MaskProvenance.for_model(
        subject.geometry.model_id,
        facts,
        method="benchmark",
        sink_size=windows.sink_size,
        recent_size=windows.recent_size,
        flush_size=windows.flush_size,
    )
    leank = build_leank_facts(subject.mask, known, subject.layout, windows)
    config = {**subject.geometry.config, "dtype": str(dtype).removeprefix("torch.")}
    # transformers keeps a copy of the files under the folder's name: one name, so that copies do not pile up.
    folder = Path(folder, _FOLDER_NAME)
    folder.mkdir()
    copy_runtime_files(folder)
    (folder / CONFIG_NAME).write_bytes(encode_json(build_config(config, facts.architecture, leank, {})))
    return Runtime(folder)
