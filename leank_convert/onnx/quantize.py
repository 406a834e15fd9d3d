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
from typing import Any

import torch
from torch import Tensor, nn

from leank_convert.errors import LeanKError

OPERATOR = "MatMulNBits"
_ACCURACY_LEVEL = 4


@dataclass(frozen=True)
class Scheme:
    """How weights are quantized: `bits` each, and a scale for `block_size` of a row's."""

    bits: int
    block_size: int


SCHEMES = {"int8": Scheme(8, 128), "int4": Scheme(4, 32)}


def check_quantizer(weights: str | None) -> None:
    """Check that weights can be quantized here.

    Args:
        weights: A key of `SCHEMES`, or None.

    Raises:
        LeanKError: If there is no such scheme, or this onnxruntime lacks the quantizer.
    """
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
    """Quantize the weights of a graph and write it anew, with one file of weights beside it.

    Args:
        path: The graph; it is replaced.
        weights: A key of `SCHEMES`.

    Raises:
        LeanKError: If this onnxruntime lacks the quantizer.
    """
    import onnx

    check_quantizer(weights)
    model = onnx.load(path)
    _store_transposed(model.graph)
    quantizer = _quantizers().MatMulNBitsQuantizer(model, algo_config=_quantizer_config(weights))
    quantizer.process()
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # onnx would append to it
    onnx.save(quantizer.model.model, path, save_as_external_data=True, location=data.name)
    data.chmod(path.stat().st_mode & 0o777)  # onnx keeps it from other users


def round_weights(model: Any, weights: str) -> None:
    """Give a model in memory the values that its weights have once they are quantized.

    Args:
        model: A stock causal LM; its linear layers' weights are changed, and no longer the embedding's.
        weights: A key of `SCHEMES`.
    """
    for module in _linear_layers(model):
        module.weight = nn.Parameter(_rounded(module.weight.detach(), weights), requires_grad=False)


def quantized_bytes(model: Any, weights: str) -> int:
    """Bytes of a model's linear weights in a graph, scales included."""
    scheme = SCHEMES[weights]
    total = 0
    for module in _linear_layers(model):
        blocks = module.out_features * -(-module.in_features // scheme.block_size)
        total += blocks * (scheme.block_size * scheme.bits // 8 + module.weight.element_size())
    return total


def linear_bytes(model: Any) -> int:
    """Bytes of the same weights in the model's own type."""
    return sum(module.weight.numel() * module.weight.element_size() for module in _linear_layers(model))


def _linear_layers(model: Any) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _rounded(weight: Tensor, weights: str) -> Tensor:
    """A weight [out, in] after quantization."""
    scheme = SCHEMES[weights]
    quantizer = _quantizers().DefaultWeightOnlyQuantizer(_quantizer_config(weights))
    packed, scales, _ = quantizer.qbits_block_quant(weight.T.contiguous().numpy())  # [out, blocks, bytes]
    numbers = torch.from_numpy(packed)
    if scheme.bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(2)
    middle = 1 << (scheme.bits - 1)
    blocks = (numbers.float() - middle) * torch.from_numpy(scales)[..., None]
    return blocks.flatten(1)[:, : weight.shape[1]].to(weight.dtype).contiguous()


def _quantizer_config(weights: str) -> Any:
    """The quantizer's settings. In onnxruntime 1.23 it takes the bits from here alone."""
    scheme = SCHEMES[weights]
    return _quantizers().DefaultWeightOnlyQuantConfig(
        block_size=scheme.block_size, is_symmetric=True, accuracy_level=_ACCURACY_LEVEL, bits=scheme.bits
    )


def _store_transposed(graph: Any) -> None:
    """Store a weight that is transposed before its product, as the embedding is that is the output's, too."""
    from onnx import numpy_helper

    stored = {tensor.name: tensor for tensor in graph.initializer}
    transposes = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in stored and len(stored[node.input[0]].dims) == 2
    }
    for node in list(graph.node):
        found = transposes.pop(node.input[1], None) if node.op_type == "MatMul" else None
        if found is not None:
            weight = numpy_helper.to_array(stored[found.input[0]]).T
            graph.initializer.append(numpy_helper.from_array(weight.copy(), found.output[0]))
            graph.node.remove(found)


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
