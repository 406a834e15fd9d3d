"""Weights [out, in] as libraries store them in eight bits or fewer, by their published layouts."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GROUP = 32  # inputs
# Which of eight neighbours stands in each four bits of a number, from the lowest on.
IN_ORDER = range(8)
OF_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Format:
    """A layout: the config that names it, what writes a weight as tensors by name, and what reads them."""

    config: dict[str, Any]
    write: Callable
    read: Callable


def pack(values, dim, places=IN_ORDER):
    parts = values.long().unflatten(dim, (-1, 8)).unbind(dim + 1)
    return sum(parts[value] << 4 * place for place, value in enumerate(places)).to(torch.int32).contiguous()


def unpack(packed, dim, places=IN_ORDER):
    parts = [packed >> 4 * places.index(value) & 15 for value in range(8)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def in_order(num_inputs):
    return (torch.arange(num_inputs) // GROUP).int()


def by_activation(num_inputs):
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    return in_order(num_inputs)[order]


def round_in_groups(weight, index):
    """Codes [out, in], and scales and zeros [out, groups]."""
    in_groups = weight[:, index.argsort(stable=True)]
    low, high = in_groups.unflatten(1, (int(index.max()) + 1, -1)).aminmax(dim=2)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(1, 15)
    code = (weight / scale[:, index] + zero[:, index]).round().clamp(0, 15)
    return code, scale, zero


def scaled(code, scale, zero, index):
    return (code - zero[:, index]).float() * scale[:, index].float()


def gptq(order, **config):
    def write(weight):
        index = order(weight.shape[1])
        code, scale, zero = round_in_groups(weight, index)
        tensors = {"qweight": pack(code.T, 0), "qzeros": pack(zero.T - 1, 1)}
        return {**tensors, "scales": scale.T.contiguous(), "g_idx": index}

    def read(tensors):
        code, zero = unpack(tensors["qweight"], 0).T, unpack(tensors["qzeros"], 1).T + 1
        # Engines read the index of act-order alone.
        index = tensors["g_idx"] if order is by_activation else order(code.shape[1])
        return scaled(code, tensors["scales"].T, zero, index)

    return Format({"quant_method": "gptq", "bits": 4, "group_size": GROUP, **config}, write, read)


def awq():
    def write(weight):
        code, scale, zero = round_in_groups(weight, in_order(weight.shape[1]))
        tensors = {"qweight": pack(code.T, 1, OF_AWQ), "qzeros": pack(zero.T, 1, OF_AWQ)}
        return {**tensors, "scales": scale.T.contiguous()}

    def read(tensors):
        code, zero = (unpack(tensors[name], 1, OF_AWQ).T for name in ("qweight", "qzeros"))
        return scaled(code, tensors["scales"].T, zero, in_order(code.shape[1]))

    return Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, write, read)


def compressed_config(form="pack-quantized", **weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": GROUP, **weights}}
    about = {"format": form, "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **about}


def compressed(order):
    """Of compressed-tensors, asymmetric, which releases up to 0.19 also order by activation."""

    def write(weight):
        index = order(weight.shape[1])
        code, scale, zero = round_in_groups(weight, index)
        tensors = {"weight_packed": pack(code, 1), "weight_zero_point": pack(zero, 0), "weight_scale": scale}
        indexed = {"weight_g_idx": index} if order is by_activation else {}
        return {**tensors, **indexed, "weight_shape": torch.tensor(weight.shape)}

    def read(tensors):
        code, zero = unpack(tensors["weight_packed"], 1), unpack(tensors["weight_zero_point"], 0)
        index = tensors.get("weight_g_idx", order(code.shape[1]))
        return scaled(code, tensors["weight_scale"], zero, index)

    return Format(compressed_config(strategy="group", symmetric=False), write, read)


def compressed_by_library(form, scales_of, **weights):
    """Without zeros, written and read by the library itself."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = compressed_config(form, symmetric=True, **weights)
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(weight):
        return compressor.compress({"weight": weight, **scales_of(weight)}, scheme)

    return Format(config, write, lambda tensors: compressor.decompress(tensors, scheme)["weight"].float())


def scales_of_nvfp4(weight):
    whole = (448 * 6 / weight.abs().max()).reshape(1)
    largest = weight.unflatten(1, (-1, 16)).abs().amax(2)
    return {"weight_scale": largest / 6 * whole, "weight_global_scale": whole}


def int8():
    def write(weight):
        largest = weight.abs().amax(1)
        code = (weight / largest[:, None] * 127).round().to(torch.int8)
        return {"weight": code, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}

    def read(tensors):
        return tensors["weight"].float() * tensors["SCB"][:, None] / 127

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, write, read)


def nearest(values, codes):
    middles = (codes[1:] + codes[:-1]) / 2
    return torch.bucketize(values, middles).byte()


def four_bits():
    """Of bitsandbytes, in blocks of 64, whose largest values are in 8 bits in blocks of 256."""
    codes, nested_codes = torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 256)

    def write(weight):
        blocks = weight.view(-1, 64)
        largest = blocks.abs().amax(1, keepdim=True)
        code = nearest(blocks / largest, codes).flatten()
        offset = largest.mean()
        nested = (largest - offset).view(-1, 256)
        nested_largest = nested.abs().amax(1, keepdim=True)
        state = {"blocksize": 64, "nested_blocksize": 256, "nested_offset": offset.item()}
        state["shape"] = list(weight.shape)
        tensors = {
            "quant_map": codes,
            "absmax": nearest(nested / nested_largest, nested_codes).flatten(),
            "nested_absmax": nested_largest.flatten(),
            "nested_quant_map": nested_codes,
            "quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
        }
        tensors = {f"weight.{name}": tensor.clone() for name, tensor in tensors.items()}
        return {"weight": (code[::2] << 4 | code[1::2])[:, None], **tensors}

    def read(tensors):
        held = {name.removeprefix("weight."): tensor for name, tensor in tensors.items()}
        state = json.loads(bytes(held["quant_state.bitsandbytes__nf4"].tolist()))
        nested = held["nested_quant_map"][held["absmax"].long()].view(-1, 256)
        largest = (nested * held["nested_absmax"][:, None]).flatten() + state["nested_offset"]
        code = torch.stack([held["weight"] >> 4, held["weight"] & 15], 1).flatten()
        blocks = held["quant_map"][code.long()].view(-1, 64) * largest[:, None]
        return blocks.view(state["shape"])

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, write, read)


def dequantize(weight, scale):
    grid = scale.reshape((*scale.shape, 1, 1)[:2])
    for dim in (0, 1):
        grid = grid.repeat_interleave(weight.shape[dim] // grid.shape[dim], dim)
    return weight.float() * grid


def scaled_parts(config, scale="weight_scale", blocks=(None, None), *, integers=False, shape=None, also=()):
    """Of eight bits each; blocks [out, in] share a scale, None for a whole dimension."""

    def write(weight):
        sizes = zip(weight.shape, blocks, strict=True)
        rows, columns = (size if block is None else block for size, block in sizes)
        tiles = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = tiles.abs().amax((1, 3)) / 100
        whole = weight / dequantize(torch.ones_like(weight), scales)
        code = whole.round().to(torch.int8) if integers else whole.to(torch.float8_e4m3fn)
        scales = scales if shape is None else scales.reshape(shape)
        return {"weight": code, scale: scales, **{name: torch.ones(shape or ()) for name in also}}

    return Format(config, write, lambda tensors: dequantize(tensors["weight"], tensors[scale]))


def eight_bit_config(**others):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **others}


def fine_grained(size=None, **others):
    own = {"weight_block_size": size and [size, size], **others}
    return {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], **own}


FEW_BITS = {
    "GPTQ": lambda: gptq(in_order, desc_act=False),
    "GPTQ in the order of activations": lambda: gptq(by_activation, desc_act=True),
    "AWQ": awq,
    "compressed-tensors": lambda: compressed(in_order),
    "compressed-tensors in the order of activations": lambda: compressed(by_activation),
    "compressed-tensors by the library": lambda: compressed_by_library(
        "pack-quantized",
        lambda weight: {"weight_scale": weight.unflatten(1, (-1, GROUP)).abs().amax(2) / 7},
        strategy="group",
    ),
    "NVFP4 by the library": lambda: compressed_by_library(
        "nvfp4-pack-quantized", scales_of_nvfp4, strategy="tensor_group", group_size=16, type="float"
    ),
    "NF4": four_bits,
}
EIGHT_BITS = {
    "LLM.int8": int8,
    "one scale": lambda: scaled_parts(eight_bit_config(), shape=(1,), also=["input_scale"]),
    "rows": lambda: scaled_parts(eight_bit_config(), blocks=(1, None)),
    "rows of integers": lambda: scaled_parts(
        eight_bit_config(), blocks=(1, None), integers=True, also=["input_zero_point"]
    ),
    "rows, fbgemm": lambda: scaled_parts(
        {"quant_method": "fbgemm_fp8"}, blocks=(1, None), also=["input_scale_ub"]
    ),
    "one scale, fp8": lambda: scaled_parts(
        fine_grained(activation_scheme="static"), "weight_scale_inv", shape=(), also=["activation_scale"]
    ),
    "blocks": lambda: scaled_parts(fine_grained(8), "weight_scale_inv", (8, 8)),
}
FORMATS = FEW_BITS | EIGHT_BITS
# Of which parts of heads share a scale.
SHARED_SCALES = {
    "blocks of 16": lambda: scaled_parts(fine_grained(16), "weight_scale_inv", (16, 16)),
    "groups of inputs": lambda: scaled_parts(eight_bit_config(), blocks=(1, 32)),
}
