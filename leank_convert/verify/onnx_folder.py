"""Checks of an ONNX folder: description, files and graph; the graph's answers, and those of its source."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME, open_checkpoint, read_leank_facts
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.export.fold import DTYPES, fold
from leank_convert.export.plan import plan_edits
from leank_convert.hub import resolve_model
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask
from leank_convert.onnx.check import check_rules, distance, largest_difference
from leank_convert.onnx.description import (
    check_description,
    check_equal,
    host_errors,
    read_description,
)
from leank_convert.onnx.graph import trial_sizes
from leank_convert.onnx.leank_onnx import LeanKOnnx
from leank_convert.onnx.leank_onnx_cache import MODEL_FILE, Array, Cache, Description
from leank_convert.onnx.leank_onnx_session import Step
from leank_convert.onnx.libraries import check_available
from leank_convert.onnx.pruned_model import load_stock
from leank_convert.onnx.quantize import OPERATOR, SCHEMES
from leank_convert.verify.checks import Checks, Report

# Of the largest number, on a real prompt: other weights or channels are off by about as much as that.
_TOLERANCES = {"float32": 1e-4, "float16": 5e-2}
# In the first layer, of the norm: 4 bits are off by about a tenth, another model by more than 1.
_QUANTIZED_TOLERANCE = 0.5
# How often what was measured at the export, of other tokens. Another model is off by more than 1 of the norm.
_QUANTIZED_EXCESS = 3
# Of the prompt, and of what is read of it at first: the rest attends to a cache.
_PROMPT_SIZE, _PROMPT_CHUNK = 16, 12


@dataclass(frozen=True)
class _Source:
    """The model that a graph is compared with; a converted checkpoint has the graph's order of heads."""

    folder: Path
    config: Mapping[str, Any]
    facts: ModelFacts


def verify_onnx(path: str | Path, source: str | Path | None) -> Report:
    """Check an ONNX folder against its description, run its graph, and compare it with its source.

    Args:
        path: The folder.
        source: The model it was made from, or a checkpoint of it: a folder or a hub id.

    Raises:
        LeanKError: If one of ONNX's packages is missing, or `source` is no complete model.
    """
    check_available()
    original = None if source is None else _open_source(source)
    checks = Checks()
    _check_folder(Path(path), original, checks)
    return checks.report(path, source)


def _open_source(source: str | Path) -> _Source:
    folder = resolve_model(source)
    config = open_checkpoint(folder).config
    is_checkpoint = "leank" in config
    facts = (
        read_leank_facts(config, folder) if is_checkpoint else read_model_facts(config, origin=str(source))
    )
    return _Source(folder, config, facts)


def _check_folder(folder: Path, original: _Source | None, checks: Checks) -> None:
    """Make the checks in order; one that needs a failed one before it is left out."""
    description = checks.value("description", lambda: _read(folder))
    if description is None:
        return
    checks.digests(folder, description.files, listed_in=ONNX_DESCRIPTION_NAME)
    mask = checks.value("mask file", lambda: _check_mask(folder, description))
    graph = checks.value("external data", lambda: _check_external_data(folder, description))
    if graph is None or mask is None:
        return
    if not checks.holds("graph", lambda: _check_graph(folder, graph, description)):
        return
    model = checks.value("onnxruntime", lambda: _run(folder))
    if model is None:
        return
    checks.holds("regions", lambda: _check_regions(model))
    if original is not None:
        _compare_with_source(model, original, mask, checks)


def _read(folder: Path) -> tuple[Description, str]:
    description = read_description(folder)
    if missing := sorted({MODEL_FILE, MASK_FILE_NAME} - description.files.keys()):
        raise LeanKError(f"`files` does not name `{missing[0]}`")
    content = description.content
    return description, (
        f"format {content['format_version']}, cache {content['dtype']}, window sizes "
        f"{description.sink_size}, {description.recent_size}, {description.flush_size}"
    )


def _check_mask(folder: Path, description: Description) -> tuple[ChannelMask, str]:
    mask = load_mask(folder / MASK_FILE_NAME)
    check_description(description, mask)
    more = "" if mask.key_mean is None else ", and the mean of keys"
    more += "" if mask.value_basis is None else ", and the basis of V"
    return mask, (
        f"pruning ratio {mask.pruning_ratio:.4f}; widths, heads, lanes, inputs and outputs of "
        f"{ONNX_DESCRIPTION_NAME} are the mask's{more}"
    )


def _check_external_data(folder: Path, description: Description) -> tuple[Any, str]:
    """Check that every weight is whole in the folder; gives the graph without its weights."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    path = folder / MODEL_FILE
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise LeanKError(f"cannot read `{path}`: {error.strerror}") from error
    except Exception as error:  # protobuf's own, which protobuf has moved about
        raise LeanKError(f"`{path}` is truncated or no ONNX graph: {first_line(error)}") from error
    sizes: dict[str, int] = {}
    for tensor in filter(uses_external_data, model.graph.initializer):
        try:
            info = ExternalDataInfo(tensor)
        except ValueError as error:
            raise LeanKError(f"`{path}`: where `{tensor.name}` lies is nonsense: {error}") from error
        if info.location not in sizes:
            if info.location not in description.files:
                raise LeanKError(f"`files` does not name `{info.location}`, where `{tensor.name}` lies")
            if not (folder / info.location).is_file():
                raise LeanKError(f"`{folder / info.location}` is missing: `{tensor.name}` lies there")
            sizes[info.location] = (folder / info.location).stat().st_size
        stop = (info.offset or 0) + (info.length or 0)
        if stop > sizes[info.location]:
            raise LeanKError(
                f"`{folder / info.location}` is truncated: it has {sizes[info.location]} bytes, and tensor "
                f"`{tensor.name}` ends at {stop}"
            )
    return model, ", ".join(f"`{name}`, {size:,} bytes" for name, size in sizes.items()) or "none"


def _check_graph(folder: Path, model: Any, description: Description) -> str:
    """Check a graph by onnx's rules, and compare opset, quantization and tensors with the description."""
    check_rules(folder / MODEL_FILE)
    content, source = description.content, f"`{MODEL_FILE}` has"
    opset = next((item.version for item in model.opset_import if item.domain == ""), None)
    check_equal(content["opset"], opset, "opset", source)
    scheme = SCHEMES.get(content["weights"])
    expected = {(scheme.bits, scheme.block_size)} if scheme else set()
    found = set(_quantization(model))
    quantization = content["quantization"] or {}
    described = {tuple(quantization.get(key) for key in ("bits", "block_size"))} if quantization else set()
    known = content["weights"] in (content["dtype"], *SCHEMES)
    if not (known and expected == described == found):
        raise LeanKError(
            f"`{ONNX_DESCRIPTION_NAME}`: `weights` is {cut(content['weights'])}, `quantization` "
            f"{cut(content['quantization'])}; (bits, block size) in `{MODEL_FILE}` are {sorted(found)}"
        )
    for part, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
        plain = [{key: tensor[key] for key in ("name", "dtype", "shape")} for tensor in content[part]]
        check_equal(plain, list(_graph_tensors(values)), part, source)
    return f"{len(model.graph.node)} nodes pass onnx's checker; opset {opset}, weights {content['weights']}"


def _quantization(model: Any) -> Iterator[tuple[int, int]]:
    """Bits and block size of every quantized product."""
    import onnx

    for node in model.graph.node:
        if node.op_type == OPERATOR:
            values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            yield values.get("bits", 4), values.get("block_size", 0)  # 4 is ONNX Runtime's default


def _graph_tensors(values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    import onnx

    for value in values:
        kind = value.type.tensor_type
        dtype = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        shape = [size.dim_param or size.dim_value for size in kind.shape.dim]
        yield {"name": value.name, "dtype": "float32" if dtype == "float" else dtype, "shape": shape}


def _run(folder: Path) -> tuple[LeanKOnnx, str]:
    """Decode one token on a full window, or much of one, some tokens pruned, over random keys and values."""
    with host_errors():
        model = LeanKOnnx(folder)
    d = model.description
    num_slots, past, pruned = trial_sizes(d.sink_size, d.recent_size, d.flush_size)
    cache = Cache(d, 1, num_slots, 5)
    generator = np.random.default_rng(0)
    for values in cache.tensors().values():
        values[:] = generator.standard_normal(values.shape, np.float32)
    logits = _decode(model, cache, past, pruned)
    return model, f"a decode step behind {past} tokens gives logits {list(logits.shape)}"


def _decode(model: LeanKOnnx, cache: Cache, past: int, pruned: int) -> Array:
    """Logits of token 0 behind `past` tokens, `pruned` of them pruned."""
    with host_errors():
        step = Step(model.graph, model.description, cache.tensors(), 1)
        logits = step.run(past_lengths=past, pruned_lengths=pruned)
    if not all(np.isfinite(values).all() for values in (logits, *chain(*step.present))):
        raise LeanKError(
            f"`{model.folder / MODEL_FILE}`: what a step gives holds numbers that are not finite"
        )
    return logits


def _check_regions(model: LeanKOnnx) -> str:
    """Look whether the graph has the sink that is described, and counts pruned tokens from it.

    With a full sink, and the token behind it pruned, a value must matter in the sink's last slot and in the
    first column of the pruned region, and must not matter in the slots after them.
    """
    d = model.description
    sink = d.sink_size
    _, _, num_pruned = trial_sizes(d.sink_size, d.recent_size, d.flush_size)
    if not num_pruned:
        return f"not tried: a sink of {sink} tokens is too long for it"

    def answer(region: str, slot: int) -> Array:
        cache = Cache(d, 1, sink + 2, 2)
        for name, values in cache.tensors().items():
            if f".{region}." in name and name.endswith(".value"):
                values[..., slot] = 10  # K is 0, so that every token has some weight
        return _decode(model, cache, sink + 1, 1)

    probes = [("window", sink - 1, True)] * (sink > 0) + [("window", sink, False)]
    stores_values = any(bucket.value_width != 0 for bucket in chain(*d.buckets))
    probes += [("pruned", 0, True), ("pruned", 1, False)] * stores_values
    without = answer("no", 0)
    for region, slot, counts in probes:
        if np.array_equal(answer(region, slot), without) == counts:
            raise LeanKError(
                f"`{model.folder / MODEL_FILE}`: behind a sink of {sink} and 1 pruned token, slot {slot} of "
                f"the {region} region {'does not count' if counts else 'counts'}: the graph has another "
                "`sink_size`"
            )
    return f"a sink of {sink} tokens, then the pruned ones"


def _compare_with_source(model: LeanKOnnx, source: _Source, mask: ChannelMask, checks: Checks) -> None:
    """Let a graph and its source's stock class read the same prompt, and compare what they make of it."""
    description = model.description
    if not checks.holds("source: sizes", lambda: _check_sizes(description, source)):
        return
    tokens = np.random.default_rng(0).integers(description.vocab_size, size=_PROMPT_SIZE)
    answer = checks.value("source: prompt", lambda: _read_prompt(model, tokens))
    if answer is None:
        return
    cached, logits = answer
    # Under the rope that the graph was made with.
    config, rope = source.config, mask.provenance.rope_parameters if mask.provenance else None
    is_checkpoint = "leank" in config
    if not is_checkpoint and rope is not None and dict(rope) != source.facts.rope_parameters:
        config = apply_config_overrides(config, {"rope_parameters": dict(rope)})
    stock = load_stock(source.folder, config, source.facts.architecture, description.content["dtype"])
    if not is_checkpoint and mask.value_basis is not None:
        _fold(stock, source, mask.value_basis)
    with torch.no_grad():
        expected = stock(torch.from_numpy(tokens)[None], use_cache=True)
    layers = [(layer.keys, layer.values) for layer in expected[CACHE].layers]
    order = None if is_checkpoint else description.content["head_permutation"]
    checks.holds(
        "source: keys and values", lambda: _check_cache(cached, layers, order, description, mask.key_mean)
    )
    checks.holds("source: logits", lambda: _check_logits(logits, expected.logits[0], description))


def _fold(stock: Any, source: _Source, basis: Tensor) -> None:
    """Fold a basis of V [L, H_kv, D, D] into a model's weights, rounded as an export rounds them."""
    checkpoint, facts = open_checkpoint(source.folder), source.facts
    order = [range(facts.num_key_value_heads)] * len(facts.layers)
    weights = dict(stock.named_parameters())
    for name, edit in plan_edits(checkpoint, facts, order, basis).items():
        stored = checkpoint.find(name)
        if edit.bases is None or stored is None or name not in weights:  # the class may lack a bias
            continue
        weight = weights[name].data
        for block, own in zip(weight.chunk(len(edit.bases), edit.dim), edit.bases, strict=True):
            if own is not None:
                block.copy_(fold(block, own, edit.dim).to(DTYPES[stored.dtype]))


def _check_sizes(description: Description, source: _Source) -> str:
    described, facts = description.content["model"], source.facts
    expected = {
        "model_type": facts.model_type,
        "num_hidden_layers": facts.num_hidden_layers,
        "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim,
        "vocab_size": source.config.get("vocab_size", description.vocab_size),
    }
    check_equal({key: described[key] for key in expected}, expected, "model", f"`{source.folder}` has")
    return f"{described['model_type']}, {described['num_hidden_layers']} layers"


def _read_prompt(model: LeanKOnnx, tokens: Array) -> tuple[tuple[dict[str, Array], Tensor], str]:
    """The cache of a prompt, token t in slot t of the windows, and the logits of every token [S, V]."""
    whole = copy.copy(model)
    whole.description = copy.copy(model.description)
    whole.description.recent_size = len(tokens)
    session = whole.start()
    with host_errors():
        (logits,) = session.feed([tokens.tolist()], prompt_chunk=_PROMPT_CHUNK, all_logits=True)
    assert session.cache is not None
    told = f"{len(tokens)} tokens, {_PROMPT_CHUNK} of them at first"
    return (session.cache.tensors(), torch.from_numpy(logits)), told


def _check_cache(
    cached: Mapping[str, Array],
    layers: list[tuple[Tensor, Tensor]],
    order: list[list[int]] | None,
    description: Description,
    key_mean: Tensor | None,
) -> str:
    """Compare windows with K and V [B, H_kv, S, D] of every layer, put in the order of the graph's lanes.

    What came off keys, [L, H_kv, D] in the original head order, is added again.
    """
    content, largest = description.content, 0.0
    quantized = content["quantization"] is not None
    # What is quantized in one layer changes the next: the first alone shows which weights they are.
    for layer, (keys, values) in enumerate(layers[:1] if quantized else layers):
        heads = slice(None) if order is None else order[layer]
        lanes = torch.tensor(content["channel_order"][layer])[None, :, None]
        expected = {
            "key": keys[:, heads].take_along_dim(lanes, -1),
            "value": values[:, heads].transpose(2, 3),
        }
        for part, right in expected.items():
            window = torch.from_numpy(cached[f"past_key_values.{layer}.window.{part}"])
            found = window.narrow(2 if part == "key" else 3, 0, keys.shape[2]).double()
            if part == "key" and key_mean is not None:
                mean = key_mean[layer][content["head_permutation"][layer]]
                found = found + mean[:, None].double().take_along_dim(lanes[0], -1)
            difference = (distance if quantized else largest_difference)(found, right.double())
            if not difference < (_QUANTIZED_TOLERANCE if quantized else _TOLERANCES[content["dtype"]]):
                raise LeanKError(
                    f"layer {layer}: {part}s differ from the source's by {difference:.1e} of the "
                    f"{'norm' if quantized else 'largest'}: other weights, another order of heads or channels"
                )
            largest = max(largest, difference)
    which = "the first layer's" if quantized else "every layer's"
    return f"{which} are the source's within {largest:.1e}"


def _check_logits(logits: Tensor, expected: Tensor, description: Description) -> str:
    """Compare logits [S, V]."""
    found, right = logits.double(), expected.double()
    same = f"{float((found.argmax(-1) == right.argmax(-1)).double().mean()):.0%} of next tokens are the same"
    content = description.content
    if content["quantization"] is not None:
        difference, at_export = distance(found, right), content["quantization"].get("difference")
        before = "" if at_export is None else f" ({at_export:.1e} of other tokens, at the export)"
        detail = (
            f"weights of {content['weights']} change them by {difference:.1e} of their norm{before}; {same}"
        )
        if not difference < (1.0 if at_export is None else _QUANTIZED_EXCESS * at_export):
            raise LeanKError(f"{detail}: other weights than the source's")
        return detail
    difference = largest_difference(found, right)
    detail = f"they differ from the source's by {difference:.1e} of the largest; {same}"
    if not difference < _TOLERANCES[content["dtype"]]:
        raise LeanKError(detail)
    return detail
