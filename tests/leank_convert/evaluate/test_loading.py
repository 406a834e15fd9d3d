"""A checkpoint and its dense twin, and what a rounded cache costs: worked out apart."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from leank_convert import load_mask, load_recipe
from leank_convert.data import SampleSource
from leank_convert.evaluate.loading import load_evaluated, load_model
from leank_convert.evaluate.rounding import NUM_PROMPTS, answer_rounded
from leank_convert.hub import resolve_model
from leank_convert.mask import resolve_mask
from tests.checks import edit_json, refusal, short_recipe


def test_the_dense_twin_holds_the_very_parameters(evaluated):
    """Tensors of the same memory would not do: a decode step may lay a model's parameters elsewhere."""
    ours, twins = (dict(model.named_parameters()) for model in (evaluated.model, evaluated.dense))
    assert ours.keys() == twins.keys()
    assert all(weight is ours[name] for name, weight in twins.items())


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("config.json", {"intermediate_size": 40}),
        ("config.json", {"model_type": "leank_llama", "auto_map": {"AutoConfig": "none_leank.Config"}}),
        ("generation_config.json", {"max_new_tokens": "many"}),
    ],
    ids=["weights of another shape", "a missing file", "nonsense beside the weights"],
)
def test_what_transformers_cannot_load_is_one_sentence(file, keys, source_model):
    source = source_model()
    edit_json(source / file, **keys)
    with refusal(f"`{source}` cannot be loaded: "):
        load_model(source, torch.device("cpu"), trust_remote_code=True)


def test_a_mask_without_windows_gets_those_that_export_gives_it():
    mask = replace(load_mask(resolve_mask("testbed-70")), provenance=None)
    for recipe, expected in ((None, (16, 64, 16)), (load_recipe("smollm2-135m-instruct"), (64, 256, 32))):
        found = load_evaluated(Path("testbed"), torch.device("cpu"), mask=mask, recipe=recipe).windows
        assert (found.sink_size, found.recent_size, found.flush_size) == expected


def test_a_model_beside_a_mask_may_be_the_hubs(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, **_: resolve_model("testbed"))
    found = load_evaluated(Path("owner/testbed"), torch.device("cpu"), mask="testbed-70")
    assert found.dense.config.model_type == "llama" and found.leank


def test_a_basis_of_v_for_another_models_weights_is_refused(tmp_path):
    tuned = shutil.copytree(resolve_model("testbed"), tmp_path / "tuned")
    with refusal("has a basis of V for copies of testbed"):
        load_evaluated(tuned, torch.device("cpu"), mask="testbed-70-v50")


def test_a_model_beside_a_mask_that_names_a_hubs_kernel_is_refused(source_model):
    source = source_model()
    edit_json(source / "config.json", attn_implementation="owner/kernel")
    with refusal(
        "`attn_implementation` is 'owner/kernel', a kernel that transformers would download and run"
    ):
        load_evaluated(source, torch.device("cpu"), mask="testbed-70")


@pytest.mark.parametrize("keys", [{"text_config": {}}, {"text_config": "x"}], ids=str)
def test_a_config_that_transformers_refuses_is_one_sentence(keys, shipped_checkpoint, copy_of):
    out = copy_of(shipped_checkpoint)
    edit_json(out / "config.json", **keys)
    with refusal(f"`{out}` is refused by transformers: ", f"`leank-convert verify {out}`"):
        load_evaluated(out, torch.device("cpu"))


@pytest.fixture(scope="module")
def checkpoint(export_retriever):
    return export_retriever("rounding", kv_dtype="int4")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
def test_it_is_the_mean_divergence_of_answers_fed_token_by_token(checkpoint, kv_dtype, testbed_tokenizer):
    recipe = short_recipe()
    found = answer_rounded(checkpoint, recipe, kv_dtype, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True).eval()
    samples = SampleSource(testbed_tokenizer, recipe.data, recipe.seed)
    divergences, agreements = [], []
    for place in range(NUM_PROMPTS):
        sample = samples.draw(place)
        read = []
        for dtype in ("auto", kv_dtype):
            cache = model.build_cache("deferred", kv_dtype=dtype)
            with torch.no_grad():
                model(sample.prompt_ids()[None], cache=cache)
                logits = [model(token[None, None], cache=cache).logits for token in sample.answer_ids()]
            read.append(torch.cat(logits)[:, 0].double())
        exact, rounded = read
        assert len(exact) == len(sample.answer_ids()) > 0
        p, q = exact.softmax(-1), rounded.softmax(-1)
        divergences += (p * (p / q).log()).sum(-1).tolist()
        agreements += (exact.argmax(-1) == rounded.argmax(-1)).tolist()
    assert found.num_prompts == NUM_PROMPTS and found.num_tokens == len(divergences)
    assert found.divergence == pytest.approx(sum(divergences) / len(divergences), rel=1e-6)
    assert found.divergence > 1e-4
    assert found.agreement == pytest.approx(sum(agreements) / len(agreements))
    assert f"differs from one in the model's dtype by {found.divergence:.4f} nats" in found.render()
