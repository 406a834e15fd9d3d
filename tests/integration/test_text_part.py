"""The text model of a model that also reads images is converted where it lies."""

import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from leank_convert.checkpoint_io import open_checkpoint
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.export import export_checkpoint
from leank_convert.hub import resolve_model
from leank_convert.recipe import Recipe
from leank_convert.train.model import load_model, open_model
from leank_convert.verify import verify_checkpoint
from tests.checks import edit_json, refusal, rejected
from tests.tiny_families import OPTIONS, weights_of

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, **HEADS}
GEMMA = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
# Of each the stem of its classes, what sees images, and what else its config has.
MULTIMODAL = {"gemma3": ("Gemma3", GEMMA, {"mm_tokens_per_image": 1}), "qwen3_5": ("Qwen3_5", QWEN, {})}
WHOLE = {"all_channels": True, "sink_size": 4, "recent_size": 8}


@pytest.fixture(params=MULTIMODAL)
def whole(request, tmp_path):
    """A tiny random model of texts and images, and its folder."""
    stem, vision, further = MULTIMODAL[request.param]
    config = getattr(transformers, f"{stem}Config")(
        text_config={**SIZES, **OPTIONS[f"{request.param}_text"]},
        vision_config={"hidden_size": 32, "intermediate_size": 64, **vision},
        **further,
    )
    torch.manual_seed(0)
    folder = tmp_path / "whole"
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("testbed")).save_pretrained(folder)
    return model, folder


def logits(model):
    ids = torch.randint(3, 200, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_its_checkpoint_answers_as_the_whole_and_holds_no_images(whole, tmp_path, caplog):
    model, folder = whole
    out = export_checkpoint(folder, None, tmp_path / "out", **WHOLE)
    assert "also reads images: its text model alone is converted" in caplog.text
    converted = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype="auto")
    torch.testing.assert_close(logits(converted), logits(model))
    (shard,) = open_checkpoint(out).shards.values()
    assert not any("vis" in name or "projector" in name for name in shard.tensors)
    assert f"`model_type` is {model.config.model_type}" in (out / "README.md").read_text()
    assert verify_checkpoint(out, source=folder).ok
    AutoTokenizer.from_pretrained(out, config=converted.config)


def test_shards_and_older_names_are_read(whole, tmp_path):
    model, folder = whole

    def older(name):
        if "lm_head" in name:
            return f"language_model.{name.removeprefix('language_model.')}"
        return name.replace("model.language_model.", "language_model.model.")

    tensors = {older(name): tensor for name, tensor in weights_of(folder).items()}
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size="20KB")  # many files, some of images alone
    out = export_checkpoint(folder, None, tmp_path / "out", **WHOLE)
    converted = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype="auto")
    torch.testing.assert_close(logits(converted), logits(model))


def test_it_is_trained_and_evaluated_from_the_whole_folder(whole, tmp_path):
    model, folder = whole
    recipe = Recipe()
    trained = load_model(open_model(folder, recipe.model), recipe, torch.device("cpu"))
    expected = model.model.language_model.state_dict()
    torch.testing.assert_close(dict(trained.model.model.state_dict()), dict(expected))
    out = export_checkpoint(folder, None, tmp_path / "out", **WHOLE)
    evaluated = load_evaluated(folder, torch.device("cpu"), mask=out / "channel_mask.safetensors")
    torch.testing.assert_close(logits(evaluated.dense), logits(model))


@pytest.mark.parametrize("whole", ["gemma3"], indirect=True)
def test_it_is_refused_where_that_is_asked_for_or_it_is_quantized(whole, tmp_path):
    model, folder = whole
    for command in (["export", "--all-channels"], ["train"], ["export-onnx", "--all-channels"]):
        told = rejected(*command, folder, "-o", tmp_path / "out", "--no-text-model")
        assert "is a 'gemma3', which also reads images" in told
    text, quantized = model.config.text_config.to_dict(), {"quantization_config": {"quant_method": "fp8"}}
    for changes in (quantized, {"quantization_config": None, "text_config": {**text, **quantized}}):
        edit_json(folder / "config.json", **changes)
        with refusal("`quantization_config` is of a larger model"):
            export_checkpoint(folder, None, tmp_path / "out", all_channels=True)
