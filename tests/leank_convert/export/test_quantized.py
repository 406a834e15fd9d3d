"""Sources with quantized weights: those that are converted exactly, and why the others are refused."""

from dataclasses import dataclass, field
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from leank_convert.errors import LeanKError
from leank_convert.evaluate.loading import load_model
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.onnx import export_onnx
from leank_convert.recipe_file import load_recipe
from leank_convert.train.model import load_model as load_training_model
from leank_convert.train.model import open_model
from tests.checks import export_both, failed

WEIGHTS = "model.safetensors"
ATTENTION = "model.layers.1.self_attn"
K_PROJ = f"{ATTENTION}.k_proj.weight"


@dataclass(frozen=True)
class Scheme:
    """How weights are quantized: blocks of a tensor [out, in] share a scale, None for a whole dimension."""

    config: dict[str, Any]
    scale: str
    blocks: tuple[int | None, int | None] = (None, None)
    dtype: torch.dtype = torch.float8_e4m3fn
    scale_shape: tuple[int, ...] | None = None
    also: tuple[str, ...] = ()


def compressed(**others):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **others}


def fine_grained(**others):
    return {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], **others}


TENSOR = Scheme(compressed(), "weight_scale", scale_shape=(1,), also=("input_scale",))
ROWS = Scheme(compressed(), "weight_scale", (1, None))
BLOCKS = Scheme(fine_grained(weight_block_size=[8, 8]), "weight_scale_inv", (8, 8))
STATIC = Scheme(
    fine_grained(weight_block_size=None, activation_scheme="static"),
    "weight_scale_inv",
    scale_shape=(),
    also=("activation_scale",),
)
EXACT = {
    "one scale": TENSOR,
    "rows": ROWS,
    "rows of integers": Scheme(
        compressed(), "weight_scale", (1, None), torch.int8, also=("input_zero_point",)
    ),
    "rows, fbgemm": Scheme(
        {"quant_method": "fbgemm_fp8"}, "weight_scale", (1, None), also=("input_scale_ub",)
    ),
    "one scale, fp8": STATIC,
    "blocks": BLOCKS,
}


def dequantize(weight, scale):
    grid = scale.reshape((*scale.shape, 1, 1)[:2])
    for dim in (0, 1):
        grid = grid.repeat_interleave(weight.shape[dim] // grid.shape[dim], dim)
    return weight.float() * grid


def quantize(weight, scheme):
    rows, columns = (
        size if block is None else block for size, block in zip(weight.shape, scheme.blocks, strict=True)
    )
    tiles = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = tiles.abs().amax((1, 3)) / 100
    whole = weight / dequantize(torch.ones_like(weight), scale)
    if scheme.dtype == torch.int8:
        whole = whole.round()
    return whole.to(scheme.dtype), scale if scheme.scale_shape is None else scale.reshape(scheme.scale_shape)


@pytest.fixture
def quantized(source_model, edit_json):
    """Write a model with quantized projections, and one of the plain weights that they stand for."""

    def build(scheme, family="llama", **sizes):
        folder = source_model(family, shards=False, head_dim=8, intermediate_size=64, **sizes)
        plain = copytree(folder, folder.with_name("plain"))
        tensors = load_file(folder / WEIGHTS)
        exact = dict(tensors)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            module = name.removesuffix(".weight")
            tensors[name], scale = quantize(tensors[name], scheme)
            tensors[f"{module}.{scheme.scale}"] = scale
            exact[name] = dequantize(tensors[name], scale)
            for other in scheme.also:
                tensors[f"{module}.{other}"] = torch.ones(scheme.scale_shape or ())
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        save_file(exact, plain / WEIGHTS, {"format": "pt"})
        edit_json(folder / "config.json", quantization_config=scheme.config)
        return folder, plain

    return build


@pytest.fixture
def edit_tensors():
    """Replace tensors of a model's file; None removes one."""

    def edit(folder, **changes):
        tensors = {**load_file(folder / WEIGHTS), **changes}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / WEIGHTS, {"format": "pt"})

    return edit


@pytest.mark.parametrize("scheme", EXACT.values(), ids=EXACT)
def test_what_is_written_stands_for_the_permuted_weights(
    scheme, quantized, fitting_mask, tmp_path, edit_tensors
):
    source, plain = quantized(scheme)
    out, expected = export_both(source, plain, fitting_mask, tmp_path)
    assert failed(out, source) == {}
    assert read_json(out / "config.json")["quantization_config"] == scheme.config
    assert read_json(out / "config.json")["leank"]["head_permutation"][1] != [0, 1, 2, 3]
    written, before = load_file(out / WEIGHTS), load_file(source / WEIGHTS)
    assert written.keys() == before.keys()
    for name, tensor in load_file(expected / WEIGHTS).items():
        found = written[name]
        if found.dtype == scheme.dtype:
            found = dequantize(found, written[name.removesuffix("weight") + scheme.scale])
        assert found.equal(tensor), name
    if scheme.scale_shape is None:  # a scale that stays where it was is found by verify
        key = f"{ATTENTION}.k_proj.{scheme.scale}"
        assert not written[key].equal(before[key])
        edit_tensors(out, **{key: before[key]})
        told = "".join(failed(out, source).values())
        assert f"tensor `{key}` is not the permutation of its source" in told


def test_rows_of_a_fused_projection_take_their_scales_along(quantized, fitting_mask, tmp_path):
    source, plain = quantized(ROWS, "phi3", pad_token_id=0)
    out, expected = export_both(source, plain, fitting_mask, tmp_path)
    assert failed(out, source) == {}
    name = f"{ATTENTION}.qkv_proj.weight"
    written = load_file(out / WEIGHTS)
    assert dequantize(written[name], written[f"{name}_scale"]).equal(load_file(expected / WEIGHTS)[name])


@pytest.mark.parametrize("scheme", [BLOCKS, STATIC], ids=["blocks", "one scale"])
def test_transformers_reads_the_permuted_weights(scheme, quantized, fitting_mask, tmp_path, edit_json):
    source, plain = quantized(scheme)
    wants_no_gpu = {**scheme.config, "dequantize": True}
    edit_json(source / "config.json", quantization_config=wants_no_gpu)
    options = {"trust_remote_code": True, "dtype": torch.float32}
    found, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(out, **options)
        for out in export_both(source, plain, fitting_mask, tmp_path)
    )
    assert type(found).__name__ == "LeanKLlamaForCausalLM"
    tensors = found.state_dict()
    for name, tensor in expected.state_dict().items():
        assert tensors[name].equal(tensor), name
    prompt = torch.arange(4, 44)[None]
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    assert found.generate(prompt, **options).equal(expected.generate(prompt, **options))


def test_a_library_that_is_not_installed_is_named(quantized, fitting_mask, tmp_path, monkeypatch):
    source, plain = quantized(ROWS)
    out = export_checkpoint(source, fitting_mask(plain), tmp_path / "out")
    monkeypatch.setattr(
        "transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False
    )
    recipe = load_recipe("quickstart")
    cpu = torch.device("cpu")
    for load in (
        lambda: load_model(out, cpu, trust_remote_code=True),
        lambda: load_training_model(open_model(source, recipe.model), recipe, cpu),
    ):
        with pytest.raises(LeanKError, match=r"cannot be loaded: compressed-tensors.* is required"):
            load()


def test_plain_attention_is_converted_whatever_the_rest_is_stored_as(
    source_model, fitting_mask, tmp_path, edit_json, edit_tensors
):
    """As GPT-OSS is published: experts in MXFP4, whose layout says nothing to an export."""
    sizes = {"head_dim": 8, "intermediate_size": 64, "num_local_experts": 4, "pad_token_id": 0}
    layers = ["full_attention"] * 3
    source = source_model("gpt_oss", shards=False, layer_types=layers, **sizes)
    mask = fitting_mask(source)
    expected = load_file(export_checkpoint(source, mask, tmp_path / "plain") / WEIGHTS)
    experts = [name for name in expected if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(experts) == 6
    for name in experts:
        count, inputs, outputs = expected[name].shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16)).byte()
        packed = {name: None, f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0].clone()}
        edit_tensors(source, **packed)
    edit_json(source / "config.json", quantization_config={"quant_method": "mxfp4"})
    out = export_checkpoint(source, mask, tmp_path / "out")
    assert failed(out, source) == {}
    written, before = load_file(out / WEIGHTS), load_file(source / WEIGHTS)
    assert written.keys() == before.keys()
    for name, tensor in written.items():
        assert tensor.equal(expected.get(name, before[name])), name
    edit_tensors(source, **{f"{experts[0]}_blocks": None, f"{experts[0]}_scales": None})
    with pytest.raises(LeanKError, match=f"tensor `{experts[0]}` is missing"):
        export_checkpoint(source, mask, tmp_path / "other")


@dataclass(frozen=True)
class Refused:
    """What a source is refused for, and how it is made of one that is not."""

    message: str
    scheme: Scheme = ROWS
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor | None] = field(default_factory=dict)


REFUSED = {
    "blocks of two heads": Refused(
        "has `weight_scale_inv` [2, 2] for a weight [32, 32], of which heads have 8 rows each: numbers are "
        "for parts of two heads",
        Scheme(fine_grained(weight_block_size=[16, 16]), "weight_scale_inv", (16, 16)),
    ),
    "groups of inputs": Refused(
        "has `weight_scale` [32, 2] for a weight [32, 64], of which heads have 16 columns each",
        Scheme(compressed(), "weight_scale", (1, 32)),
    ),
    "other tensors": Refused(
        "which stores it as `compressed`, `weight_scale`, a layout that is not known here",
        tensors={K_PROJ: None, f"{ATTENTION}.k_proj.compressed": torch.ones(512)},
    ),
    "no scale": Refused("and its scale is missing", tensors={f"{ATTENTION}.v_proj.weight_scale": None}),
    "a dtype of another layout": Refused(
        "has `weight` [32, 16] for a weight [32, 32]", tensors={K_PROJ: torch.ones(32, 16).byte()}
    ),
    "a tensor more": Refused(
        "has `rotation` [64] for a", tensors={f"{ATTENTION}.o_proj.rotation": torch.arange(64)}
    ),
    "another method": Refused(
        "quantized by `quark`, which stores weights in a layout", keys={"quant_method": "quark"}
    ),
    "no method": Refused("without a `quant_method`", keys={"quant_method": ...}),
    "a cache": Refused(
        "`quantization_config.kv_cache_scheme` is for a", keys={"kv_cache_scheme": {"num_bits": 8}}
    ),
    "scales of a cache": Refused(
        f"tensor `{ATTENTION}.k_scale` is for a", tensors={f"{ATTENTION}.k_scale": torch.ones(1)}
    ),
    "rotations": Refused(
        "rotates what is between weights", keys={"transform_config": {"config_groups": {"R3": {}}}}
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_permuted_exactly_is_refused_with_the_reason(
    case, quantized, fitting_mask, tmp_path, edit_json, edit_tensors, refused
):
    source, plain = quantized(case.scheme)
    edit_tensors(source, **case.tensors)
    given = {key: value for key, value in {**case.scheme.config, **case.keys}.items() if value is not ...}
    edit_json(source / "config.json", quantization_config=given)
    refused(source, fitting_mask(plain), tmp_path / "out", case.message)


def test_a_graph_is_made_of_plain_weights(quantized, fitting_mask, tmp_path):
    source, plain = quantized(ROWS)
    with pytest.raises(LeanKError, match=f"^`{source}`: .* a graph is made of plain ones"):
        export_onnx(source, fitting_mask(plain), tmp_path / "out")
