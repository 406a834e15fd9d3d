"""Check an ONNX folder: its description, its files, its graph, and what onnxruntime makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME
from leank_convert.errors import LeanKError, first_line
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask
from leank_convert.onnx.description import describe_inputs, describe_outputs
from leank_convert.onnx.folder import FolderDescription, TensorDescription, check_heads, read_description
from leank_convert.onnx.libraries import check_available
from leank_convert.onnx.subject import PrunedModel
from leank_convert.onnx.write import MODEL_NAME
from leank_convert.verify.onnx_answers import (
    GraphSession,
    Source,
    check_regions,
    compare_with_source,
    open_source,
    run_step,
)
from leank_convert.verify.report import Checks, VerifyReport

_BITS = {"int8": 8, "int4": 4}


def verify_onnx(path: str | Path, source: str | Path | None = None) -> VerifyReport:
    """Check an ONNX folder against its description, run its graph, and compare it with its source.

    Args:
        path: The folder.
        source: The model it was made from, or a checkpoint of it: a folder or a hub id. Its stock class and
            the graph then read the same short prompt.

    Returns:
        The report; failed checks are in it, not raised.

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
    session = checks.value("onnxruntime", lambda: _run(folder, description))
    if session is None:
        return
    checks.holds("regions", lambda: check_regions(session))
    if original is not None:
        known = mask.provenance if mask else None
        compare_with_source(session, original, known.rope_parameters if known else None, checks)


def _read(folder: Path) -> tuple[FolderDescription, str]:
    description = read_description(folder)
    if missing := sorted({MODEL_NAME, MASK_FILE_NAME} - description.files.keys()):
        raise LeanKError(f"`files` does not name `{missing[0]}`")
    return description, (
        f"{description.model.model_type}, pruning ratio {description.pruning_ratio:.4f}, opset "
        f"{description.opset}, cache {description.dtype}, weights {description.weights}"
    )


def _check_heads(description: FolderDescription) -> str:
    check_heads(description)
    return f"{len(description.widths)} layers: widths, buckets, channel order and head permutation agree"


def _channel_masks(description: FolderDescription) -> Tensor:
    """The channels that the graph keeps, bool [L, H_kv, D], heads in its own order."""
    masks = torch.zeros(torch.tensor(description.channel_order).shape, dtype=torch.bool)
    for layer, row in enumerate(description.widths):
        for head, width in enumerate(row):
            masks[layer, head, description.channel_order[layer][head][:width]] = True
    return masks


def _check_mask_file(folder: Path, description: FolderDescription) -> tuple[ChannelMask, str]:
    path = folder / MASK_FILE_NAME
    mask = load_mask(path)
    expected = _channel_masks(description)
    if mask.channel_mask.shape != expected.shape:
        raise LeanKError(
            f"`{path}` has shape {list(mask.channel_mask.shape)}; the graph has {list(expected.shape)}"
        )
    for layer, kept in enumerate(expected):
        permutation = description.head_permutation[layer] if description.head_permutation else slice(None)
        if not mask.channel_mask[layer][permutation].equal(kept):
            raise LeanKError(
                f"`{path}`: layer {layer} keeps other channels than `channel_order` and `widths`"
            )
    return mask, "the same channels, in the original head order"


def _check_external_data(folder: Path, description: FolderDescription) -> tuple[Any, str]:
    """Check that every weight lies whole beside the graph; gives the graph without its weights."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    path = folder / MODEL_NAME
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


def _check_graph(folder: Path, model: Any, description: FolderDescription) -> str:
    import onnx

    try:
        onnx.checker.check_model(folder / MODEL_NAME, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise LeanKError(f"`{MODEL_NAME}` breaks the rules of ONNX: {first_line(error)}") from error
    opset = next((item.version for item in model.opset_import if item.domain == ""), None)
    if opset != description.opset:
        raise LeanKError(f"`{MODEL_NAME}` has opset {opset}; `{ONNX_DESCRIPTION_NAME}`: {description.opset}")
    _check_weights(model, description)
    return f"{len(model.graph.node)} nodes pass onnx's checker"


def _check_weights(model: Any, description: FolderDescription) -> None:
    """Compare the bits and blocks of the graph's products with those described."""
    import onnx

    weights, quantization = description.weights, description.quantization
    bits = _BITS.get(weights)
    if bits != (quantization.bits if quantization else None):
        raise LeanKError(
            f"`{ONNX_DESCRIPTION_NAME}`: `weights` is `{weights}`, `quantization` {quantization!r}"
        )
    described = {(bits, quantization.block_size)} if quantization else set()
    operator = quantization.operator if quantization else "MatMulNBits"
    found = set()
    for node in model.graph.node:
        if node.op_type == operator:
            values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            found.add((values.get("bits", 4), values.get("block_size", 0)))  # 4 is ONNX Runtime's default
    if found != described:
        raise LeanKError(
            f"`{ONNX_DESCRIPTION_NAME}`: `weights` is `{weights}`, (bits, block size) {sorted(described)}; "
            f"`{operator}` in `{MODEL_NAME}` has {sorted(found)}"
        )


def _check_tensors(model: Any, description: FolderDescription) -> str:
    """Compare the description with the heads it describes, and the graph with the description."""
    sizes = description.sink_size, description.recent_size, description.flush_size
    pruned = PrunedModel(None, _channel_masks(description), *sizes)
    inputs = describe_inputs(pruned, description.dtype)
    outputs = describe_outputs(pruned, description.dtype, description.model.vocab_size)
    for part, expected, values in (
        ("inputs", inputs, model.graph.input),
        ("outputs", outputs, model.graph.output),
    ):
        described: list[TensorDescription] = getattr(description, part)
        _compare(f"`{part}` of `{ONNX_DESCRIPTION_NAME}`", described, expected, "the widths give")
        plain = [TensorDescription(name=t.name, dtype=t.dtype, shape=t.shape) for t in described]
        _compare(f"{part} of `{MODEL_NAME}`", list(_graph_tensors(values)), plain, "the description says")
    return f"{len(inputs)} inputs and {len(outputs)} outputs as described"


def _compare(
    what: str, found: Sequence[TensorDescription], expected: Sequence[TensorDescription], source: str
) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            raise LeanKError(f"{what}: number {index} is {_tell(one)}; {source} {_tell(other)}")
    if len(found) != len(expected):
        raise LeanKError(f"{what}: there are {len(found)}; {source} {len(expected)}")


def _tell(tensor: TensorDescription) -> str:
    rest = tensor.model_dump(exclude={"name", "dtype", "shape"}, exclude_none=True)
    told = "".join(f", {key} {value}" for key, value in rest.items())
    return f"`{tensor.name}` ({tensor.dtype} {tensor.shape}{told})"


def _graph_tensors(values: Iterable[Any]) -> Iterator[TensorDescription]:
    import onnx

    names = {"FLOAT": "float32"}
    for value in values:
        kind = value.type.tensor_type
        dtype = onnx.TensorProto.DataType.Name(kind.elem_type)
        shape: list[int | str] = [size.dim_param or size.dim_value for size in kind.shape.dim]
        yield TensorDescription(name=value.name, dtype=names.get(dtype, dtype.lower()), shape=shape)


def _run(folder: Path, description: FolderDescription) -> tuple[GraphSession, str]:
    session = GraphSession(folder / MODEL_NAME, description)
    return session, run_step(session)
