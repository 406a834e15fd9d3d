"""Warm-up: compile and check a checkpoint's kernels on this machine, so that a server never compiles."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from leank_convert._runtime.fp8_leank import SCALE_NAMES
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.leank_block import KEY_MEAN_KEY, VALUE_BASIS_KEY
from leank_convert.trust import check_code

_COMPUTED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def warm_up(checkpoint: Path, device: str | None, *, trust: bool = False) -> dict[str, Any]:
    """Compile what decoding from a checkpoint needs into tilelang's cache, and tell what; reads no weights.

    The device is a CUDA one, by default the current one. With `trust` its Python files may run even where
    they are no release's.

    Raises:
        LeanKError: If there is no GPU, the kernels cannot be used on it, or the checkpoint holds other code
            than a release's.
    """
    if not checkpoint.is_dir():
        raise LeanKError(f"`{checkpoint}` is no folder", hint="warmup takes a converted checkpoint's folder")
    if device is None and not torch.cuda.is_available():
        raise LeanKError(
            "there is no CUDA device to compile the kernels for",
            hint="run it on the machine that will serve the checkpoint; on a CPU nothing needs compiling",
        )
    chosen = choose_device(device or "cuda")
    if chosen.type != "cuda":
        raise LeanKError(f"kernels are compiled for `cuda` devices, not for `{chosen.type}`")
    model = load_without_weights(checkpoint, trust=trust)
    config, layout = model.config, model.build_cache().pruned_layers[0].layout
    name = str(config.dtype or "bfloat16").removeprefix("torch.")
    if name not in _COMPUTED_DTYPES:
        raise LeanKError(
            f"`{checkpoint}` is stored in {name}; kernels compute in {' and '.join(_COMPUTED_DTYPES)}",
            hint='load it with `dtype="bfloat16"`, or export it from a source in that dtype',
        )
    began = time.perf_counter()
    kernels = find_kernels(model, chosen, _COMPUTED_DTYPES[name])
    everything = find_kernels(model, chosen, _COMPUTED_DTYPES[name], drafts=True)
    if kernels is None or everything is None:
        raise LeanKError(
            f"the kernels of `{checkpoint}` cannot be used on `{torch.cuda.get_device_name(chosen)}`",
            hint="a warning above says why; decoding works without them, in plain torch",
            exit_code=1,
        )
    return {
        "checkpoint": str(checkpoint),
        "device": torch.cuda.get_device_name(chosen),
        "dtype": name,
        "head_dim": layout.head_dim,
        "num_key_value_groups": config.num_attention_heads // config.num_key_value_heads,
        "chunk_size": layout.chunk_size,
        "shapes": len(kernels),
        "draft_kernels": len(everything) - len(kernels),
        "seconds": time.perf_counter() - began,
        "cache": os.environ.get("TILELANG_CACHE_DIR", str(Path("~/.tilelang/cache").expanduser())),
    }


def render_warm_up(facts: dict[str, Any]) -> str:
    """One sentence for a person."""
    return (
        f"compiled and checked in {facts['seconds']:.1f} s on {facts['device']}: {facts['dtype']}, head_dim "
        f"{facts['head_dim']}, {facts['num_key_value_groups']} query heads per KV head, chunks of "
        f"{facts['chunk_size']}, {facts['shapes']} layer {'shape' if facts['shapes'] == 1 else 'shapes'}, "
        f"{facts['draft_kernels']} more kernels for drafts; "
        f"kept in {facts['cache']}"
    )


def load_without_weights(checkpoint: Path, *, trust: bool = False) -> Any:
    """A checkpoint's model on the meta device, masks of the right widths; LeanKError if it is not loaded."""
    check_code(checkpoint, trust=trust)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)  # type: ignore[no-untyped-call]
        if config.leank.get("kv_scales") is not None:
            for name, scale in model.named_buffers():
                if name.endswith(SCALE_NAMES):
                    scale.fill_(1)
        if config.leank.get(KEY_MEAN_KEY):  # whichever it is
            model.key_means = [torch.zeros(1, 1, 1)] * len(config.leank["widths"])
        if config.leank.get(VALUE_BASIS_KEY):
            model.value_bases = [torch.zeros(1, 1, 1)] * len(config.leank["widths"])
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise LeanKError(
            f"`{checkpoint}` is no checkpoint that this machine can load: {error}",
            hint=f"`leank-convert verify {checkpoint}` lists what is wrong",
        ) from error
    return model


def find_kernels(
    model: Any, device: torch.device, dtype: torch.dtype, *, drafts: bool = False
) -> list[Any] | None:
    """Compile the decode kernels that serve all layers of a LeanK model, one for each shape of a layer.

    Layers differ in nothing that is compiled in but the most chunks that one of their heads has. With
    `drafts`, those for several new tokens of a row are compiled, too. None where plain torch decodes, be it
    in one layer.
    """
    if device.type != "cuda":
        return None
    config, layers = model.config, model.build_cache().pruned_layers
    # By the name under which a layer itself looks for them, whichever of the runtime's files defines it.
    runtime: Any = sys.modules[type(layers[0]).__module__]
    most_columns = runtime.MAX_DRAFT if drafts else 1
    found = [
        runtime.find_kernels(
            device,
            dtype,
            head_dim=layers[0].layout.head_dim,
            num_groups=config.num_attention_heads // config.num_key_value_heads,
            chunk_size=layers[0].layout.chunk_size,
            max_chunks=max_chunks,
            value_chunk=layers[0].layout.value_chunk,
            num_columns=num_columns,
            cache_dtype={"fp8": torch.float8_e4m3fn, "int4": torch.uint8}.get(layers[0].kv_dtype),
            has_sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        )
        for max_chunks in sorted({layer.layout.max_chunks for layer in layers})
        for num_columns in range(1, most_columns + 1)
    ]
    return None if None in found else list(dict.fromkeys(found))  # several numbers of columns share kernels
