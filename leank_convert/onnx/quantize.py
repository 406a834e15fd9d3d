"""Weights of 8 or 4 bits in a graph, by onnxruntime's own quantizer.

Quantized are the products with a constant weight, the output's among them: MatMulNBits, symmetric, a scale
for every block of input channels, activations rounded to 8 bits as it multiplies (`accuracy_level` 4: with
activations in float32 a step takes 16 ms of those below in 4 bits, 185 in 8). The products with the cache
have no constant and stay as they are, and so does the embedding, of which a step reads one row.

Compared on onnxruntime 1.31: the shipped model with the quickstart's mask, 90 prompts of up to 900 tokens,
and CPU time of a step of a model of 373 MB with random weights, on one core.

    weights                      same tokens   logits' error        MB    step ms
    float32                            90/90            0     14.3 / 374     20.9
    int8, MatMulNBits, 128             90/90          2.3%     4.4 / 121      9.0
    int8, MatMulNBits, 32              90/90          1.6%     4.7 / 129     10.6
    int8, quantize_dynamic             90/90          6.1%     4.4 / 119     10.9
    int4, MatMulNBits, 32              89/90         13.2%     3.0 /  87      9.0
    int4, MatMulNBits, 128             89/90         15.3%     2.7 /  79      7.9

`quantize_dynamic` (MatMulInteger) also has one scale for all activations of a call, so that a row's answer
depends on the other rows. Zero points and the other methods for 4 bits (HQQ, k-quant) are no better.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from leank_convert.errors import LeanKError

OPERATOR = "MatMulNBits"
_DOMAIN = "com.microsoft"
_ACCURACY_LEVEL = 4


@dataclass(frozen=True)
class Scheme:
    """How weights are quantized: `bits` each, and a scale for `block_size` of a row's."""

    bits: int
    block_size: int


SCHEMES = {"int8": Scheme(8, 128), "int4": Scheme(4, 32)}


def check_quantizer(weights: str | None) -> None:
    """Check that weights can be quantized here: LeanKError without the scheme, or onnxruntime's quantizer."""
    if weights is None:
        return
    if weights not in SCHEMES:
        raise LeanKError(
            f"weights `{weights}` are not supported", hint=f"use one of {', '.join(SCHEMES)}, or leave it out"
        )
    try:
        _quantizers()
    except ImportError as error:
        raise LeanKError(
            f"weights `{weights}`: this onnxruntime's quantizer cannot be imported: {error}",
            hint="pip install --upgrade 'leank-convert[onnx]'",
        ) from error


def quantize_weights(path: Path, weights: str) -> None:
    """Quantize a graph's weights and write it anew, with one file of them; raises as `check_quantizer`."""
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    check_quantizer(weights)
    model = onnx_ir.load(path)  # tensors stay in the file, and are read one by one
    for node in list(model.graph.all_nodes()):
        weight = _constant_weight(node)
        if weight is not None:
            _replace_product(model.graph, node, weight, SCHEMES[weights])
    RemoveUnusedNodesPass()(model)
    model.opset_imports.setdefault(_DOMAIN, 1)
    data = path.with_name(f"{path.name}.data")
    # Elsewhere, since the embedding is read from the old file while the new one is written.
    with TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        onnx_ir.save(model, written, external_data=data.name)
        for new, old in ((written.with_name(data.name), data), (written, path)):
            new.chmod(path.stat().st_mode & 0o777)
            new.replace(old)


def quantize_blocks(weight: Any, scheme: Scheme) -> tuple[Any, Any]:
    """Numbers, packed into bytes [out, blocks, bytes], and scales [out, blocks] of a weight [in, out]."""
    quantizers = _quantizers()
    config = quantizers.DefaultWeightOnlyQuantConfig(
        block_size=scheme.block_size, is_symmetric=True, bits=scheme.bits
    )
    quantizer = quantizers.DefaultWeightOnlyQuantizer(config)
    packed, scales, _ = quantizer.qbits_block_quant(np.ascontiguousarray(weight))
    return packed, scales.reshape(packed.shape[:2])  # flat in onnxruntime 1.23


def _constant_weight(node: Any) -> Any | None:
    """The weight [in, out] that a node multiplies with, None if it is no such product; a view of the file."""
    if node.op_type != "MatMul":
        return None
    value, transposed = node.inputs[1], False
    source = value.producer()
    # As the embedding is that is the output's weight, too.
    if source is not None and source.op_type == "Transpose":
        value, transposed = source.inputs[0], True
    if value.const_value is None or len(value.shape) != 2:
        return None
    weight = value.const_value.numpy()
    return weight.T if transposed else weight


def _replace_product(graph: Any, node: Any, weight: Any, scheme: Scheme) -> None:
    import onnx_ir

    name = node.inputs[1].name
    inputs = [node.inputs[0]]
    for part, array in zip(("quantized", "scales"), quantize_blocks(weight, scheme), strict=True):
        tensor = onnx_ir.tensor(array, name=f"{name}_{part}")
        value = onnx_ir.Value(
            name=tensor.name,
            type=onnx_ir.TensorType(tensor.dtype),
            shape=onnx_ir.Shape(array.shape),
            const_value=tensor,
        )
        graph.register_initializer(value)
        inputs.append(value)
    in_size, out_size = weight.shape
    attributes = {"K": in_size, "N": out_size, **vars(scheme), "accuracy_level": _ACCURACY_LEVEL}
    old = node.outputs[0]
    product = onnx_ir.node(OPERATOR, inputs, attributes, domain=_DOMAIN, name=node.name)
    product.outputs[0].type, product.outputs[0].shape = old.type, old.shape
    onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [product], [old], product.outputs)


def _quantizers() -> Any:
    """The module of onnxruntime, imported without the log handler that it gives to every program."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        from onnxruntime.quantization import matmul_nbits_quantizer
    finally:
        root.setLevel(level)
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
    return matmul_nbits_quantizer
