"""Sources with quantized weights: those that are converted exactly, and why the others are refused."""

from shutil import copytree

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from leank_convert.evaluate.loading import load_evaluated, load_model
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.methods.make import train_mask
from leank_convert.onnx import export_onnx
from leank_convert.recipe_file import load_recipe
from leank_convert.train.model import count_bytes, open_model
from leank_convert.train.model import load_model as load_training_model
from tests.checks import edit_json, edit_tensors, failed, fitting_mask, refusal, refused_export
from tests.packed_weights import FEW_BITS, FORMATS, GROUP, SHARED_SCALES, eight_bit_config

WEIGHTS = "model.safetensors"
ATTENTION = "model.layers.1.self_attn"
K_PROJ = f"{ATTENTION}.k_proj"
LARGE = {"hidden_size": 512, "head_dim": 32, "num_hidden_layers": 2}
BY_THE_LIBRARY = ["compressed-tensors by the library", "NVFP4 by the library"]
HALF_HEADS = {**LARGE, "num_key_value_heads": 8, "head_dim": GROUP // 2}  # a group of inputs is for two


@pytest.fixture
def quantized(source_model):
    """Write a model with quantized projections, and one of the plain weights that they stand for."""

    def build(name, family="llama", **sizes):
        if name.endswith("by the library"):
            pytest.importorskip("compressed_tensors")
        layout = {**FORMATS, **SHARED_SCALES}[name]()
        sizes = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 64, "mlp_bias": False, **sizes}
        folder = source_model(family, shards=False, **sizes)
        plain = copytree(folder, folder.with_name("plain"))
        tensors, exact = {}, {}
        for key, weight in load_file(folder / WEIGHTS).items():
            if not key.endswith("_proj.weight"):
                tensors[key] = exact[key] = weight
                continue
            written = layout.write(weight)
            exact[key] = layout.read(written).contiguous()
            assert (exact[key] - weight).abs().max() < 0.4, "another layout than that of the reader"
            tensors.update((key.removesuffix("weight") + part, tensor) for part, tensor in written.items())
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        save_file(exact, plain / WEIGHTS, {"format": "pt"})
        edit_json(folder / "config.json", quantization_config=layout.config)
        return layout, folder, plain

    return build


@pytest.fixture
def export_both(tmp_path):
    """Checkpoints of a quantized model and of one of the weights that it stands for, by one mask."""

    def export(source, plain):
        mask = fitting_mask(plain)
        return [export_checkpoint(each, mask, tmp_path / f"{each.name}-out") for each in (source, plain)]

    return export


def parts_of(module, tensors):
    names = (name for name in tensors if name.startswith(f"{module}."))
    return {name.removeprefix(f"{module}."): tensors[name] for name in names}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_stands_for_the_permuted_weights(name, quantized, export_both):
    sizes = HALF_HEADS if name.endswith("in the order of activations") else LARGE
    layout, source, plain = quantized(name, **sizes if name in FEW_BITS else {})
    out, expected = export_both(source, plain)
    assert failed(out, source) == {}
    assert read_json(out / "config.json")["quantization_config"] == layout.config
    assert read_json(out / "config.json")["leank"]["head_permutation"][1] != [0, 1, 2, 3]
    written, before = load_file(out / WEIGHTS), load_file(source / WEIGHTS)
    assert written.keys() == before.keys()
    for key, tensor in load_file(expected / WEIGHTS).items():
        parts = parts_of(key.removesuffix(".weight"), written)
        assert (layout.read(parts) if len(parts) > 1 else written[key]).equal(tensor), key
    # Each tensor that moved is missed where it has not.
    for module in (K_PROJ, f"{ATTENTION}.o_proj"):
        own = [f"{module}.{part}" for part in parts_of(module, before)]
        moved = [key for key in own if not before[key].equal(written[key])]
        assert moved
        for key in moved:
            save_file({**written, key: before[key]}, out / WEIGHTS, {"format": "pt"})
            told = "".join(failed(out, source).values())
            assert f"tensor `{key}` is not the permutation of its source" in told


@pytest.mark.parametrize("name", BY_THE_LIBRARY)
def test_packed_weights_are_measured_as_the_weights_they_stand_for(name, quantized, testbed_tokenizer):
    _, source, plain = quantized(name, **LARGE)
    recipe = load_recipe("quickstart", ["model.dtype=float32"])
    testbed_tokenizer.save_pretrained(source)
    files = open_model(source, recipe.model)
    model = load_training_model(files, recipe, torch.device("cpu")).model
    found, forecast = model.state_dict(), count_bytes(files, recipe, torch.device("cpu"))["weights"]
    assert forecast == sum(weight.nbytes for weight in load_file(plain / WEIGHTS).values())
    for key, tensor in load_file(plain / WEIGHTS).items():
        assert found[key].dtype == tensor.dtype and found[key].equal(tensor), key


def round_inputs(source, kind="float"):
    """Have a model of 8 bits in rows round what its modules are given."""
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quantization_status": "compressed", "format": f"{kind}-quantized", "ignore": ["lm_head"]}
    edit_json(
        source / "config.json",
        quantization_config={**eight_bit_config(), **config, "config_groups": {"group_0": group}},
    )


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [("llama", "rows", "float"), ("gpt_oss", "rows", "float"), ("llama", "rows of integers", "int")],
)
def test_training_learns_of_them_what_it_learns_of_the_plain_weights(
    family, name, kind, quantized, testbed_tokenizer, without_report, tmp_path
):
    """Whatever the checkpoint rounds inputs of modules to, which has no gradients."""
    sizes = {"vocab_size": len(testbed_tokenizer), "max_position_embeddings": 2048}
    _, source, plain = quantized(name, family, **sizes)
    round_inputs(source, kind)
    short = ["stage1.steps=2", "stage2.steps=1", "held_out_samples=0", "data.max_length=300"]
    recipe = load_recipe("quickstart", [*short, "width_multiple=2", "pruning_ratio=0.5"])
    masks = []
    for folder in (source, plain):
        testbed_tokenizer.save_pretrained(folder)
        masks.append(train_mask(folder, tmp_path / f"{folder.name}-mask", recipe=recipe, progress=False))
    found, expected = (mask.scaling_factors for mask in masks)
    assert not expected.eq(1).all()
    torch.testing.assert_close(found, expected)


def test_weights_whose_kernels_give_no_gradients_are_refused_by_what_trains(
    quantized, testbed_tokenizer, monkeypatch, tmp_path
):
    _, source, _ = quantized("rows", vocab_size=len(testbed_tokenizer), max_position_embeddings=2048)
    testbed_tokenizer.save_pretrained(source)
    round_inputs(source)
    monkeypatch.setattr(CompressedTensorsHfQuantizer, "is_trainable", False)
    with refusal("kernels of its quantized weights give no gradients", "export"):
        train_mask(source, tmp_path / "mask", recipe=load_recipe("quickstart", ["width_multiple=2"]))


@pytest.mark.parametrize("name", BY_THE_LIBRARY)
def test_weights_that_stay_packed_are_evaluated(name, quantized, export_both, testbed_tokenizer):
    _, source, plain = quantized(name, **LARGE)
    testbed_tokenizer.save_pretrained(source)
    out, _ = export_both(source, plain)
    evaluated, ids = load_evaluated(out, torch.device("cpu")), torch.arange(9)[None]
    assert evaluated.dense.get_submodule(K_PROJ) is evaluated.model.get_submodule(K_PROJ)
    expected = load_model(plain, torch.device("cpu"), trust_remote_code=False)
    with torch.no_grad():
        torch.testing.assert_close(evaluated.dense(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)


def test_rows_of_a_fused_projection_take_their_scales_along(quantized, export_both):
    layout, source, plain = quantized("rows", "phi3", pad_token_id=0)
    out, expected = export_both(source, plain)
    assert failed(out, source) == {}
    name = f"{ATTENTION}.qkv_proj"
    found = layout.read(parts_of(name, load_file(out / WEIGHTS)))
    assert found.equal(load_file(expected / WEIGHTS)[f"{name}.weight"])


@pytest.mark.parametrize("name", ["blocks", "one scale, fp8"])
def test_transformers_reads_the_permuted_weights(name, quantized, export_both):
    layout, source, plain = quantized(name)
    wants_no_gpu = {**layout.config, "dequantize": True}
    edit_json(source / "config.json", quantization_config=wants_no_gpu)
    options = {"trust_remote_code": True, "dtype": torch.float32}
    found, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(out, **options)
        for out in export_both(source, plain)
    )
    assert type(found).__name__ == "LeanKLlamaForCausalLM"
    tensors = found.state_dict()
    for key, tensor in expected.state_dict().items():
        assert tensors[key].equal(tensor), key
    prompt = torch.arange(4, 44)[None]
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    assert found.generate(prompt, **options).equal(expected.generate(prompt, **options))


def test_a_library_that_is_not_installed_is_named(quantized, tmp_path, monkeypatch):
    _, source, plain = quantized("rows")
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
        with refusal(r"cannot be loaded: compressed-tensors.* is required"):
            load()


def test_plain_attention_is_converted_whatever_the_rest_is_stored_as(source_model, tmp_path):
    """As GPT-OSS is published: experts in MXFP4, whose layout says nothing to an export."""
    sizes = {"head_dim": 8, "intermediate_size": 64, "pad_token_id": 0, "layer_types": ["full_attention"] * 3}
    source = source_model("gpt_oss", shards=False, **sizes)
    mask = fitting_mask(source)
    expected = load_file(export_checkpoint(source, mask, tmp_path / "plain") / WEIGHTS)
    experts = [name for name in expected if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(experts) == 6
    for name in experts:
        count, inputs, outputs = expected[name].shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16)).byte()
        packed = {name: None, f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0].clone()}
        edit_tensors(source / WEIGHTS, **packed)
    edit_json(source / "config.json", quantization_config={"quant_method": "mxfp4"})
    out = export_checkpoint(source, mask, tmp_path / "out")
    assert failed(out, source) == {}
    written, before = load_file(out / WEIGHTS), load_file(source / WEIGHTS)
    assert written.keys() == before.keys()
    for name, tensor in written.items():
        assert tensor.equal(expected.get(name, before[name])), name
    edit_tensors(source / WEIGHTS, **{f"{experts[0]}_blocks": None, f"{experts[0]}_scales": None})
    with refusal(f"tensor `{experts[0]}` is missing"):
        export_checkpoint(source, mask, tmp_path / "other")


# Of rows of eight bits unless another layout is named: sizes, what config.json says and what tensors are
# changed to, and what an export says.
REFUSED = {
    "blocks of two heads": (
        "blocks of 16", {}, {}, {},
        "has `weight_scale_inv` [2, 2] for a weight [32, 32], of which heads have 8 rows each: numbers are "
        "for parts of two heads",
    ),
    "groups of inputs": (
        "groups of inputs", {}, {}, {},
        "has `weight_scale` [32, 2] for a weight [32, 64], of which heads have 16 columns each",
    ),
    "groups of two heads": (
        "GPTQ", HALF_HEADS, {}, {},
        "heads have 16 columns each: numbers are for parts of two heads",
    ),
    "4-bit blocks of two heads": (
        "NF4", {"hidden_size": 256, "head_dim": 32}, {}, {},
        "[2] for a weight [128, 256], of which heads have 32 rows each",
    ),
    "AWQ's layout of another kernel": (
        "AWQ", LARGE, {},
        {f"{ATTENTION}.q_proj.qweight": lambda tensor: tensor.T}, "512], which is not known here",
    ),
    "tiles": (
        "LLM.int8", {}, {}, {f"{ATTENTION}.q_proj.weight_format": lambda tensor: tensor + 1},
        "stores it in tiles",
    ),
    "other tensors": (
        "rows", {}, {}, {f"{K_PROJ}.weight": None, f"{K_PROJ}.compressed": torch.ones(512)},
        "which stores it as `compressed`, `weight_scale`, a layout that is not known here",
    ),
    "no scale": ("rows", {}, {}, {f"{ATTENTION}.v_proj.weight_scale": None}, "and its scale is missing"),
    "a tensor more": (
        "rows", {}, {}, {f"{ATTENTION}.o_proj.rotation": torch.arange(64)}, "has `rotation` [64] for a",
    ),
    "another method": (
        "rows", {}, {"quant_method": "quark"}, {}, "quantized by `quark`, which stores weights in a layout"
    ),
    "no method": ("rows", {}, {"quant_method": ...}, {}, "without a `quant_method`"),
    "a cache": (
        "rows", {}, {"kv_cache_scheme": {"num_bits": 8}}, {},
        "`quantization_config.kv_cache_scheme` is for a",
    ),
    "scales of a cache": (
        "rows", {}, {}, {f"{ATTENTION}.k_scale": torch.ones(1)}, f"tensor `{ATTENTION}.k_scale` is for a",
    ),
    "rotations": (
        "rows", {}, {"transform_config": {"config_groups": {"R3": {}}}}, {},
        "rotates what is between weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_permuted_exactly_is_refused_with_the_reason(case, quantized, tmp_path):
    name, sizes, keys, tensors, message = case
    layout, source, plain = quantized(name, **sizes)
    edit_tensors(source / WEIGHTS, **tensors)
    given = {key: value for key, value in {**layout.config, **keys}.items() if value is not ...}
    edit_json(source / "config.json", quantization_config=given)
    refused_export(source, fitting_mask(plain), tmp_path / "out", message)


def test_a_graph_is_made_of_plain_weights(quantized, tmp_path):
    _, source, plain = quantized("rows")
    with refusal(f"^`{source}`: .* a graph is made of plain ones"):
        export_onnx(source, fitting_mask(plain), tmp_path / "out")
