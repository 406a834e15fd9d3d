"""Inspection of a mask file, a checkpoint, an ONNX folder or a model: widths, ratio, bytes, provenance.

`inspect_artifact` collects the facts, JSON-ready; `render_inspection` puts them into rows of text, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from leank_convert._runtime.layout_leank import INT4_GROUP_SIZE
from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    ONNX_DESCRIPTION_NAME,
    is_onnx_folder,
    read_leank_config,
    read_leank_facts,
)
from leank_convert.errors import LeanKError
from leank_convert.estimate import WINDOW_SIZES, Row, estimate_model, find_config, list_estimate_rows
from leank_convert.files import user_path
from leank_convert.head_layout import (
    BYTES_PER_ELEMENT,
    BytesPerToken,
    bytes_of,
    count_cache_bytes,
    describe_layers,
    list_value_widths,
    plan_head_layout,
)
from leank_convert.held_out import HeldOut
from leank_convert.leank_block import KEY_MEAN_KEY, VALUE_BASIS_KEY, VALUE_WIDTHS_KEY, read_block
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, load_own_mask
from leank_convert.masks import find_by_name
from leank_convert.tables import listing
from leank_convert.windows import Windows

_HEAD_ORDERS = {
    "mask": "original head order",
    "checkpoint": "the checkpoint's head order",
    "onnx": "the graph's head order",
}


def inspect_artifact(
    path: str | Path, memory: int | None = None, tokens: int = 8192, kv_dtype: str | None = None
) -> dict[str, Any]:
    """Describe a mask by file or name, a checkpoint, ONNX folder, training run or model: JSON-ready data.

    A mask's widths are in the ORIGINAL head order, a checkpoint's or graph's in its own. With `memory`, bytes
    of vLLM's cache, it is told how many requests of so many `tokens`, prompt and answer, it holds at once;
    it is of `kv_dtype`, None: as the checkpoint says, or of the model's dtype.

    Raises:
        LeanKError: If `path` is none of them.
    """
    facts = _inspect(path)
    if memory is not None:
        facts["capacity"] = _describe_capacity(facts, memory, tokens, kv_dtype)
    return facts


def _inspect(path: str | Path) -> dict[str, Any]:
    config_file = find_config(path)
    if config_file is not None:
        return estimate_model(path, config_file)
    path = user_path(path)
    if not path.exists():
        try:
            path = find_by_name(str(path))
        except LeanKError as error:
            raise LeanKError(
                f"`{path}` does not exist",
                hint="inspect takes a mask file, a checkpoint's, an ONNX or a model's folder, a hub id, or "
                f"the name of a packaged mask; {error.hint}",
            ) from None
    if is_onnx_folder(path):
        return _inspect_onnx(path)
    if path.is_dir() and not (path / CONFIG_NAME).exists() and (path / MASK_FILE_NAME).exists():
        path = path / MASK_FILE_NAME
    return _inspect_checkpoint(path) if path.is_dir() else _inspect_mask(path)


def _inspect_mask(path: Path) -> dict[str, Any]:
    mask = load_mask(path)
    known = mask.provenance
    layers: dict[str, Any] = {}
    if known is not None and known.layers is not None:
        sentence = f"{len(known.layers)} of the model's {known.num_hidden_layers}, those with full attention"
        layers = {"pruned_layers": known.layers, "layers": sentence}
    return {
        "kind": "mask",
        "path": str(path),
        "model_type": known.model_type if known else None,
        **_describe_widths(mask.widths, mask.channel_mask.shape[-1], None, None, mask.stored_values),
        **layers,
        **_describe_origin(mask),
        "windows": known and {key: getattr(known, key) for key in WINDOW_SIZES},
        "key_mean": mask.key_mean is not None,
    }


def _describe_origin(mask: ChannelMask) -> dict[str, Any]:
    known = mask.provenance
    return {
        **{key: getattr(known, key, None) for key in ("model", "pruning_ratio_asked", "width_multiple")},
        "pruning_ratio": mask.pruning_ratio,
        "provenance": known and asdict(known),
    }


def _inspect_checkpoint(path: Path) -> dict[str, Any]:
    config, leank = read_leank_config(path)
    facts = read_leank_facts(config, path)
    windows = read_block(leank, facts, origin=str(path / CONFIG_NAME)).windows
    mask = load_own_mask(path, leank)
    described = _describe_widths(
        leank["widths"], facts.head_dim, facts.dtype, leank.get("kv_dtype"), leank.get(VALUE_WIDTHS_KEY)
    )
    if facts.is_mixed:
        sizes = {key: size for key, size in described["bytes_per_token"].items() if key != "saved"}
        described |= {
            "num_hidden_layers": facts.num_hidden_layers,
            "pruned_layers": facts.layers,
            "layers": describe_layers(facts, BytesPerToken(**sizes), windows, described["element_bytes"]),
        }
    return {
        "kind": "checkpoint",
        "path": str(path),
        "model_type": config["model_type"],
        "format_version": leank["format_version"],
        **described,
        "kv_dtype": leank.get("kv_dtype"),
        "kv_scales": leank.get("kv_scales"),
        **_describe_origin(mask),
        "windows": asdict(windows),
        "key_mean": KEY_MEAN_KEY in leank,
        "value_basis": VALUE_BASIS_KEY in leank,
        "head_permutation": leank["head_permutation"],
    }


def _inspect_onnx(path: Path) -> dict[str, Any]:
    # Imports transformers, for which masks and checkpoints have no use.
    from leank_convert.onnx.description import host_errors, read_description

    description, mask = read_description(path), load_mask(path / MASK_FILE_NAME)
    with host_errors():
        description.check_file(MASK_FILE_NAME)
    try:
        content = description.content
        files = [(name, path / name) for name in description.files]
        return {
            "kind": "onnx",
            "path": str(path),
            **{key: content[key] for key in ("opset", "dtype", "weights", "quantization")},
            **_describe_widths(
                content["widths"], description.head_dim, content["dtype"], None, content.get(VALUE_WIDTHS_KEY)
            ),
            **_describe_origin(mask),
            "model": content["model"]["name"],
            "model_type": content["model"]["model_type"],
            "windows": {key: content[key] for key in WINDOW_SIZES},
            "head_permutation": content["head_permutation"],
            "files": {name: file.stat().st_size if file.is_file() else None for name, file in files},
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # sealed, but not by an export
        raise LeanKError(
            f"`{path / ONNX_DESCRIPTION_NAME}` lacks a value, or has one of no use "
            f"({type(error).__name__}: {error!s:.60})",
            hint="export the model again",
        ) from error


def _describe_widths(
    widths: Sequence[Sequence[int]],
    head_dim: int,
    dtype: str | None,
    kv_dtype: str | None,
    value_widths: Sequence[Sequence[int]] | None,
) -> dict[str, Any]:
    element_bytes = bytes_of(dtype)
    cache = count_cache_bytes(widths, head_dim, element_bytes, kv_dtype, value_widths)
    values = list_value_widths(widths, head_dim, value_widths)
    heads = sorted(width for layer in widths for width in layer)
    return {
        "num_hidden_layers": len(widths),
        "num_key_value_heads": len(widths[0]),
        "head_dim": head_dim,
        "widths": [list(layer) for layer in widths],
        "heads_per_width": {str(width): number for width, number in Counter(heads).items()},
        "value_widths": None if value_widths is None else [list(layer) for layer in value_widths],
        "value_pruning_ratio": 1 - sum(values) / (len(values) * head_dim),
        "element_bytes": element_bytes,
        "element_bytes_assumed": dtype not in BYTES_PER_ELEMENT,
        "bytes_per_token": {**asdict(cache), "saved": cache.saved},
    }


def _describe_capacity(
    facts: Mapping[str, Any], memory: int, tokens: int, kv_dtype: str | None
) -> dict[str, Any]:
    # Imports torch, which masks and checkpoints were read with.
    from leank_convert.vllm.capacity import count_dense, count_pruned
    from leank_convert.vllm.pages import BLOCK_SIZE

    if facts["kind"] == "onnx":
        raise LeanKError(f"`{facts['path']}` is an ONNX folder, which vLLM does not serve")
    if facts["kind"] == "model":
        raise LeanKError(
            f"`{facts['path']}` is not converted; how many requests are held, its mask decides",
            hint="name a checkpoint or a mask; `leank-convert masks` lists the packaged ones",
        )
    if "pruned_layers" in facts:
        raise LeanKError(
            f"`{facts['path']}`: what layers that are not pruned hold in vLLM's cache is not counted",
            hint="`vllm serve` says at its start how many tokens its cache holds",
        )
    kv_dtype = kv_dtype or facts.get("kv_dtype")
    if kv_dtype == "int4":
        raise LeanKError(
            f"`{facts['path']}` keeps its cache in int4, which vLLM does not serve",
            hint="add `--kv-dtype fp8`, or inspect its mask file for a cache in the model's dtype",
        )
    windows = facts["windows"]
    sizes = Windows(*(windows[key] for key in WINDOW_SIZES)) if windows else Windows()
    head_dim, size = facts["head_dim"], facts["element_bytes"]
    stored = BYTES_PER_ELEMENT[kv_dtype] if kv_dtype else size
    layout, values = plan_head_layout(facts["widths"]), facts.get("value_widths")
    if values is not None:
        ordered = zip(values, layout.head_permutation, strict=True)
        values = [[layer[head] for head in order] for layer, order in ordered]
    num_heads = sum(map(len, layout.widths))
    dense = {"dense": size, **({f"dense_{kv_dtype}": stored} if kv_dtype else {})}
    return {
        "memory_bytes": memory,
        "tokens": tokens,
        "block_size": BLOCK_SIZE,
        "kv_dtype": kv_dtype,
        **{
            side: asdict(count_dense(num_heads, head_dim, width, memory, tokens))
            for side, width in dense.items()
        },
        "pruned": asdict(
            count_pruned(layout.widths, head_dim, stored, sizes, memory, tokens, value_widths=values)
        ),
    }


def render_inspection(facts: Mapping[str, Any], *, with_recipe: bool = False) -> str:
    """Render what `inspect_artifact` found as text for a person, if asked with the recipe of the mask."""
    if facts["kind"] == "model":
        lines = listing([*list_estimate_rows(facts)])
    else:
        recipe = ((facts["provenance"] or {}).get("recipe") or "").splitlines()
        rows = [*_model_rows(facts), *_size_rows(facts), *_capacity_rows(facts), *_provenance_rows(facts)]
        if recipe and not with_recipe:
            rows.append(("recipe", f"{len(recipe)} lines; `--with-recipe` prints them"))
        lines = [*listing([*rows, *_file_rows(facts)]), "", *_table_of_widths(facts)]
        if recipe and with_recipe:
            lines += ["", "recipe", *(f"  {line}" for line in recipe)]
    # What a file says must not move a terminal's cursor.
    return "\n".join(line if line.isprintable() else repr(line)[1:-1] for line in lines) + "\n"


def _model_rows(facts: Mapping[str, Any]) -> Iterator[Row]:
    yield facts["kind"], facts["path"]
    yield "model", f"{facts['model'] or 'not known'} ({facts['model_type'] or 'not known'})"
    if facts["kind"] == "checkpoint":
        yield "format", str(facts["format_version"])
        if facts["kv_dtype"] is not None:
            scales = facts["kv_scales"]
            origin = f"scales of {scales['num_tokens']:,} tokens" if scales else "scales of every prompt"
            if facts["kv_dtype"] == "int4":
                origin = f"least number and step of every {INT4_GROUP_SIZE}"
            yield "cache", f"{facts['kv_dtype']}, the window too; {origin}"
    if facts["kind"] == "onnx":
        graph = f"opset {facts['opset']}, cache {facts['dtype']}, weights {facts['weights']}"
        if quantization := facts["quantization"]:
            graph += f" in blocks of {quantization['block_size']}"
            if quantization["difference"] is not None:
                graph += f" (logits differ by {quantization['difference']:.1e} of their norm)"
        yield "graph", graph


def _size_rows(facts: Mapping[str, Any]) -> Iterator[Row]:
    cache, windows = facts["bytes_per_token"], facts["windows"]
    asked, multiple = facts["pruning_ratio_asked"], facts["width_multiple"]
    layers, heads = facts["num_hidden_layers"], facts["num_key_value_heads"]
    yield "shape", f"{layers} layers, {heads} KV heads, head_dim {facts['head_dim']}"
    if "layers" in facts:
        yield "layers", facts["layers"]
    ratio = f"{facts['pruning_ratio']:.4f} (asked: {'not known' if asked is None else asked})"
    multiples = "" if multiple is None else f", widths in multiples of {multiple}"
    yield "pruning ratio", ratio + multiples
    yield "heads per width", ", ".join(f"{width}: {n}" for width, n in facts["heads_per_width"].items())
    if facts["value_widths"] is not None:
        known = facts["provenance"] or {}
        counts = Counter(sorted(width for layer in facts["value_widths"] for width in layer))
        asked, tokens = known.get("value_pruning_ratio_asked"), known.get("value_tokens")
        measured = f", by a basis measured on {tokens:,} tokens" if tokens is not None else ""
        measured += ", which V is rotated into as it is cached" if facts.get("value_basis") else ""
        ratio = f"{facts['value_pruning_ratio']:.4f} (asked: {'not known' if asked is None else asked})"
        yield "V pruning ratio", ratio + measured
        yield "heads per V width", ", ".join(f"{width}: {n}" for width, n in counts.items())
    named = [f"{key} {value}" for key, value in windows.items()] if windows else ["not known"]
    yield "windows", ", ".join(named)
    assumed = " (assumed)" if facts["element_bytes_assumed"] else ""
    yield "bytes per number", f"{facts['element_bytes']}{assumed}"
    yield "bytes per token", f"dense K {cache['key_dense']:,}, V {cache['value_dense']:,}"
    pruned = f"pruned K {cache['key_pruned']:,}, V {cache['value_pruned']:,}"
    key, value = (1 - cache[f"{part}_pruned"] / cache[f"{part}_dense"] for part in ("key", "value"))
    yield "", f"{pruned}: saved K {key:.1%}, V {value:.1%}, together {cache['saved']:.1%}"
    if facts.get("key_mean"):
        tokens = (facts["provenance"] or {}).get("key_mean_tokens")
        measured = f" over {tokens:,} tokens" if tokens is not None else ""
        yield "keys", f"cached less their mean{measured}: a removed channel counts as its mean"


def _capacity_rows(facts: Mapping[str, Any]) -> Iterator[Row]:
    if "capacity" not in facts:
        return
    capacity = facts["capacity"]
    kv_dtype, tokens = capacity["kv_dtype"], capacity["tokens"]
    sides = {"dense": "dense", "pruned": "pruned"}
    if kv_dtype:
        sides = {"dense": "dense", f"dense_{kv_dtype}": f"dense {kv_dtype}", "pruned": f"pruned {kv_dtype}"}
    yield "vLLM", f"with {capacity['memory_bytes']:,} bytes of cache on one GPU"
    for key, label in (
        ("blocks", f"blocks of {capacity['block_size']} tokens"),
        ("requests", f"requests of {tokens:,} tokens at once"),
    ):
        told = ", ".join(f"{name} {capacity[side][key]:,}" for side, name in sides.items())
        dense, pruned = capacity["dense"][key], capacity["pruned"][key]
        more = f" ({pruned / dense:.2f}x)" if dense else ""
        yield "", f"{label}: {told}{more}"


def _provenance_rows(facts: Mapping[str, Any]) -> Iterator[Row]:
    known = facts["provenance"]
    if known is None:
        return
    yield "made by", known["method"] + (f", {known['made_by']}" if known["made_by"] else "")
    yield from ((key, known[key]) for key in ("source", "evaluation") if known[key])
    if known["held_out"]:
        held_out = HeldOut(**known["held_out"])
        yield "held out", held_out.render()
        yield from (("warning", warning) for warning in held_out.warnings)
    if known["seed"] is not None:
        yield "seed", str(known["seed"])
    if known["versions"]:
        named = (f"{name} {v}" for name, v in known["versions"].items() if v != "not installed")
        yield "made with", ", ".join(named)


def _file_rows(facts: Mapping[str, Any]) -> Iterator[Row]:
    for index, (name, size) in enumerate(facts.get("files", {}).items()):
        yield "" if index else "files", f"{name}: " + ("missing" if size is None else f"{size:,} bytes")


def _table_of_widths(facts: Mapping[str, Any]) -> list[str]:
    rows = [("layer", "kept", f"widths ({_HEAD_ORDERS[facts['kind']]})")]
    per_layer = facts["num_key_value_heads"] * facts["head_dim"]
    size = len(str(facts["head_dim"]))
    for layer, row in zip(facts.get("pruned_layers") or count(), facts["widths"], strict=False):
        widths = " ".join(f"{width:<{size}}" for width in row)
        rows.append((f"{layer:>5}", f"{sum(row) / per_layer:>4.0%}", widths))
    return listing(rows)
