"""Checks of an ONNX folder: description, files, graph, host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME
from leank_convert.errors import LeanKError, first_line
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask
from leank_convert.onnx.check import check_rules
from leank_convert.onnx.description import (
    check_heads,
    describe_inputs,
    describe_outputs,
    host_errors,
    pruning_ratio_of,
    read_description,
)
from leank_convert.onnx.leank_onnx import MODEL_FILE, Description, LeanKOnnx
from leank_convert.onnx.libraries import check_available
from leank_convert.onnx.pruned_model import PrunedModel
from leank_convert.verify.checks import Checks, Report
from leank_convert.verify.onnx_answers import (
    Source,
    check_regions,
    compare_with_source,
    open_source,
    run_step,
)

_BITS = {"int8": 8, "int4": 4}
_OPERATOR = "MatMulNBits"
# What a tensor's description may say; further keys that a later release added say nothing here.
_TENSOR_KEYS = ("name", "dtype", "shape", "layer", "region", "width", "part")


def verify_onnx(path: str | Path, source: str | Path | None) -> Report:
    """Check an ONNX folder against its description, run its graph, and compare it with its source.

    Args:
        path: The folder.
        source: The model it was made from, or a checkpoint of it: a folder or a hub id.

    Raises:
        LeanKError: If one of ONNX's packages is missing, or `source` is no complete model.
    """
    check_available()
    original = None if source is None else open_source(source)
    checks = Checks()
    _check_folder(Path(path), original, checks)
    return checks.report(path, source)


def _check_folder(folder: Path, original: Source | None, checks: Checks) -> None:
    """Make the checks in order; one that needs a failed one before it is left out."""
    description = checks.value("description", lambda: _read(folder))
    if description is None:
        return
    checks.digests(folder, description.files, listed_in=ONNX_DESCRIPTION_NAME)
    sound = checks.holds("heads", lambda: _check_heads(description))
    mask = None
    if sound:
        mask = checks.value("mask file", lambda: _check_mask_file(folder, description))
    graph = checks.value("external data", lambda: _check_external_data(folder, description))
    if graph is not None:
        sound &= checks.holds("graph", lambda: _check_graph(folder, graph, description))
        sound = sound and checks.holds("tensors", lambda: _check_tensors(graph, description))
    if graph is None or not sound:
        return
    model = checks.value("onnxruntime", lambda: _run(folder))
    if model is None:
        return
    checks.holds("regions", lambda: check_regions(model))
    if original is not None:
        compare_with_source(model, original, mask, checks)


def _read(folder: Path) -> tuple[Description, str]:
    description = read_description(folder)
    content = description.content
    if missing := sorted({MODEL_FILE, MASK_FILE_NAME} - description.files.keys()):
        raise LeanKError(f"`files` does not name `{missing[0]}`")
    return description, (
        f"{content['model']['model_type']}, pruning ratio {pruning_ratio_of(description):.4f}, opset "
        f"{content['opset']}, cache {content['dtype']}, weights {content['weights']}"
    )


def _check_heads(description: Description) -> str:
    check_heads(description)
    return f"{len(description.buckets)} layers: widths, buckets, channel order and head permutation agree"


def _channel_masks(description: Description) -> Tensor:
    """The channels that the graph keeps, bool [L, H_kv, D], heads in its own order."""
    lanes = torch.tensor(description.content["channel_order"])
    widths = torch.tensor(description.content["widths"])[..., None]
    kept = (torch.arange(lanes.shape[-1]) < widths).expand(lanes.shape)
    return torch.zeros(lanes.shape, dtype=torch.bool).scatter(-1, lanes, kept)


def _check_mask_file(folder: Path, description: Description) -> tuple[ChannelMask, str]:
    path = folder / MASK_FILE_NAME
    mask = load_mask(path)
    expected = _channel_masks(description)
    permutations = description.content["head_permutation"]
    if mask.channel_mask.shape != expected.shape:
        raise LeanKError(
            f"`{path}` has shape {list(mask.channel_mask.shape)}; the graph has {list(expected.shape)}"
        )
    for layer, kept in enumerate(expected):
        heads = slice(None) if permutations is None else permutations[layer]
        if not mask.channel_mask[layer][heads].equal(kept):
            raise LeanKError(
                f"`{path}`: layer {layer} keeps other channels than `channel_order` and `widths`"
            )
    more = "" if mask.key_mean is None else ", and the mean of keys"
    return mask, f"the same channels, in the original head order{more}"


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
    check_rules(folder / MODEL_FILE)
    opset = next((item.version for item in model.opset_import if item.domain == ""), None)
    if opset != description.content["opset"]:
        raise LeanKError(
            f"`{MODEL_FILE}` has opset {opset}; `{ONNX_DESCRIPTION_NAME}`: {description.content['opset']}"
        )
    _check_weights(model, description)
    return f"{len(model.graph.node)} nodes pass onnx's checker"


def _check_weights(model: Any, description: Description) -> None:
    """Compare the bits and blocks of the graph's products with those described."""
    import onnx

    weights, quantization = (description.content[key] for key in ("weights", "quantization"))
    bits = _BITS.get(weights)
    if bits != (quantization["bits"] if quantization else None):
        raise LeanKError(
            f"`{ONNX_DESCRIPTION_NAME}`: `weights` is `{weights}`, `quantization` {quantization}"
        )
    described = {(bits, quantization["block_size"])} if quantization else set()
    operator = quantization["operator"] if quantization else _OPERATOR
    found = set()
    for node in model.graph.node:
        if node.op_type == operator:
            values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            found.add((values.get("bits", 4), values.get("block_size", 0)))  # 4 is ONNX Runtime's default
    if found != described:
        raise LeanKError(
            f"`{ONNX_DESCRIPTION_NAME}`: `weights` is `{weights}`, (bits, block size) {sorted(described)}; "
            f"`{operator}` in `{MODEL_FILE}` has {sorted(found)}"
        )


def _check_tensors(model: Any, description: Description) -> str:
    """Compare the description with the heads it describes, and the graph with the description."""
    content = description.content
    sizes = description.sink_size, description.recent_size, description.flush_size
    pruned = PrunedModel(None, _channel_masks(description), *sizes)
    inputs = describe_inputs(pruned, content["dtype"])
    outputs = describe_outputs(pruned, content["dtype"], description.vocab_size)
    for part, expected, values in (
        ("inputs", inputs, model.graph.input),
        ("outputs", outputs, model.graph.output),
    ):
        _compare(f"`{part}` of `{ONNX_DESCRIPTION_NAME}`", content[part], expected, "the widths give")
        found = list(_graph_tensors(values))
        plain = [{key: tensor[key] for key in ("name", "dtype", "shape")} for tensor in content[part]]
        _compare(f"{part} of `{MODEL_FILE}`", found, plain, "the description says")
    return f"{len(inputs)} inputs and {len(outputs)} outputs as described"


def _compare(
    what: str, found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], source: str
) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        if any(one.get(key) != other.get(key) for key in _TENSOR_KEYS):
            raise LeanKError(f"{what}: number {index} is {_show(one)}; {source} {_show(other)}")
    if len(found) != len(expected):
        raise LeanKError(f"{what}: there are {len(found)}; {source} {len(expected)}")


def _show(tensor: Mapping[str, Any]) -> str:
    shown = f"{tensor['dtype']} {tensor['shape']}"
    for key, value in tensor.items():
        if key not in ("name", "dtype", "shape") and value is not None:
            shown += f", {key} {value}"
    return f"`{tensor['name']}` ({shown})"


def _graph_tensors(values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    import onnx

    names = {"FLOAT": "float32"}
    for value in values:
        kind = value.type.tensor_type
        dtype = onnx.TensorProto.DataType.Name(kind.elem_type)
        shape = [size.dim_param or size.dim_value for size in kind.shape.dim]
        yield {"name": value.name, "dtype": names.get(dtype, dtype.lower()), "shape": shape}


def _run(folder: Path) -> tuple[LeanKOnnx, str]:
    with host_errors():
        model = LeanKOnnx(folder)
    return model, run_step(model)
