"""Conversion in one go: means that masks lack, rounded caches that are tried, what stays of a refusal."""

import re
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from leank_convert import convert
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.errors import LeanKError
from leank_convert.evaluate import loading, rounding
from leank_convert.files import read_json
from leank_convert.held_out import HeldOut, TokenShares
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.masks import find_by_name
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.verify import verify_checkpoint
from tests.checks import done, failed, provenance_of, refusal, rejected, run, short_recipe
from tests.tiny_families import tiny_model

pytestmark = pytest.mark.usefixtures("without_report")
SHAPE = (2, 2, 16)
TRIED = r"a cache in {} differs from one in the model's dtype by (\d+\.\d{{4}}) nats a token"


@pytest.fixture(scope="module")
def biased(tmp_path_factory, testbed_tokenizer):
    """A tiny model whose keys are all but constant in the slowest pairs, as Qwen2's biases make them."""
    folder = tmp_path_factory.mktemp("models") / "biased"
    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = {"hidden_size": 64, "vocab_size": len(testbed_tokenizer), "rope_parameters": rope}
    model = tiny_model("llama", seed=0, std=0.15, attention_bias=True, **sizes)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.view(2, 16)[:, [6, 7, 14, 15]] = 150 * torch.randn(2, 4).sign()
    model.save_pretrained(folder)
    testbed_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(short_recipe(held_out_samples=0).to_yaml())
    return path


@pytest.fixture
def mask(biased):
    """A mask of it without a mean, which says what it was made for."""
    channels = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) < 0.6
    return ChannelMask(channels, provenance=provenance_of(biased))


@pytest.fixture
def saved(tmp_path):
    def save(mask, name="mask"):
        save_mask(mask, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    return save


def mean_of(folder):
    mean = load_mask(folder / MASK_FILE_NAME).key_mean
    assert mean is not None
    return mean


def divergence(text, kv_dtype):
    (found,) = re.findall(TRIED.format(kv_dtype), text)
    return float(found)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
def test_a_rounded_cache_is_tried_before_it_is_there(biased, mask, saved, recipe, tmp_path, kv_dtype, out):
    zero = saved(replace(mask, key_mean=torch.zeros(SHAPE).half()), "zero")
    options = ("--kv-dtype", kv_dtype, "--recipe", recipe, "-o", out)
    before = sorted(tmp_path.iterdir())
    told = rejected("export", biased, "--mask", zero, *options)
    assert "error: model `biased` loses its answers: on " in told
    assert divergence(told, kv_dtype) > 0.5 and "; at most 0.1 is taken\nhint: " in told
    assert sorted(tmp_path.iterdir()) == before

    done("export", biased, "--mask", zero, *options, "--force")
    assert not mean_of(out).any() and verify_checkpoint(out, source=biased).ok
    accuracy = (out / "README.md").read_text().partition("## Accuracy")[2]
    assert divergence(accuracy, kv_dtype) == divergence(told, kv_dtype)

    plain = saved(mask, "plain")
    done("export", biased, "--mask", plain, *options, "--overwrite")
    assert mean_of(out)[..., [7, 15]].abs().min() > 100 and verify_checkpoint(out, source=biased).ok
    accuracy = (out / "README.md").read_text().partition("## Accuracy")[2]
    assert divergence(accuracy, kv_dtype) < 0.05


@pytest.mark.filterwarnings("default")
def test_a_mean_is_added_to_an_imported_mask_and_answers_stay(biased, recipe, tmp_path):
    torch.save(torch.ones(SHAPE, dtype=torch.bool), tmp_path / "mask.pth")
    options = ("--recipe", recipe, "--mask", tmp_path / "mask.pth", "-o", tmp_path / "out")
    done("export", biased, *options, "--key-mean")
    block = read_json(tmp_path / "out" / "config.json")["leank"]
    assert block["key_mean"] is True and "kv_dtype" not in block
    assert torch.equal(mean_of(tmp_path / "out"), measure_cache(biased, recipe).statistics.mean)
    assert failed(tmp_path / "out", biased) == {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    dense = LlamaForCausalLM.from_pretrained(biased).eval()
    ids = torch.randint(5, 60, (2, 60), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    ours, expected = (one.generate(ids, **settings) for one in (model, dense))
    assert torch.equal(ours.sequences, expected.sequences)
    assert torch.allclose(torch.stack(ours.logits), torch.stack(expected.logits), atol=1e-3)
    constants = ours[CACHE].layers[0].store.tensors.constants
    assert constants.key_mean is not None and constants.key_scale is None


def test_a_mean_is_added_to_a_packaged_mask_whose_figures_are_of_another_cache(saved, out):
    mask = load_mask(find_by_name("testbed-70"))
    held_out = HeldOut(
        tasks=("retrieval",), min_length=1, max_length=2, num_contexts=1, num_answers=1, seed=0,
        dense=1.0, pruned=0.5, distillation=0.1, tokens=TokenShares(4, 1.0, 0.5),
    )  # fmt: skip
    known = replace(mask.provenance, key_mean_tokens=None, held_out=held_out)
    path = saved(replace(mask, key_mean=None, provenance=known))
    done("export", "testbed", "--mask", path, "--key-mean", "-o", out)
    found = load_mask(out / MASK_FILE_NAME)
    assert found.channel_mask.equal(mask.channel_mask) and found.key_mean is not None
    assert found.provenance.key_mean_tokens > 1000 and found.provenance.held_out is None
    assert verify_checkpoint(out, source="testbed").ok
    card = (out / "README.md").read_text()
    assert f"their mean over {found.provenance.key_mean_tokens:,} tokens" in card
    assert "# The mean of keys was measured beside this mask, by\n#" in found.provenance.recipe
    assert "Not measured when this checkpoint was written" in card and "Rounding alone" not in card


def test_a_mask_keeps_its_own_mean_and_scales_are_of_keys_less_that(biased, mask, saved, recipe, tmp_path):
    measured = measure_cache(biased, recipe)
    own = replace(mask, key_mean=measured.statistics.mean + 8)
    options = ("--kv-dtype", "fp8", "--recipe", recipe, "-o", tmp_path / "out")
    done("export", biased, "--mask", saved(own), *options)
    assert torch.equal(mean_of(tmp_path / "out"), own.key_mean)
    kept, found = own.key_mean.float(), measured.statistics
    largest = torch.maximum((found.highest - kept).abs(), (found.lowest - kept).abs())
    scales = measured.scales(own).keys
    stored = largest.amax(-1, keepdim=True) / scales
    assert (stored <= 224).all() and (stored > 112).all()
    assert not torch.equal(scales, measured.scales(measured.centre(mask)).keys)


def test_keys_are_measured_under_the_rope_of_the_checkpoint(biased, mask, recipe, tmp_path, monkeypatch):
    measure = Mock(wraps=measure_cache)
    monkeypatch.setattr(convert, "measure_cache", measure)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    imported = ChannelMask(mask.channel_mask)
    convert.export_model(biased, imported, tmp_path / "out", recipe=recipe, config_overrides=rope)
    assert [dict(call.args[1].model.config_overrides) for call in measure.call_args_list] == [rope]
    assert load_mask(tmp_path / "out" / MASK_FILE_NAME).provenance.rope_parameters["rope_theta"] == 1e4


def test_training_tries_too_and_what_is_refused_leaves_the_mask_which_is_exported_by_force(
    biased, recipe, tmp_path, monkeypatch, out
):
    train = ("train", biased, "--recipe", recipe, "--kv-dtype", "fp8", "-o", out)
    with monkeypatch.context() as patch:
        patch.setattr(rounding, "MAX_DIVERGENCE", -1.0)  # no trial is passed
        told = rejected(*train)
        forced = shutil.copytree(out, tmp_path / "forced")
        export = ("export", biased, "--kv-dtype", "int4", "-o", forced)
        rejected(*export)
        assert not (forced / "config.json").exists()
        done(*export, "--force")
    assert read_json(forced / "config.json")["leank"]["kv_dtype"] == "int4" and verify_checkpoint(forced).ok
    assert "model `biased` loses its answers: on " in told
    assert "or write it all the same by `leank-convert export --force`" in told
    assert sorted(path.name for path in out.iterdir()) == [MASK_FILE_NAME, "leank"]
    assert not (tmp_path / "out.partial").exists()
    trained = load_mask(out / MASK_FILE_NAME)
    assert trained.key_mean is not None and trained.scaling_factors is not None

    done(*train, "--resume")
    written = load_mask(out / MASK_FILE_NAME)
    assert written.stores_alike(trained) and verify_checkpoint(out, source=biased).ok
    assert divergence((out / "README.md").read_text(), "fp8") < 0.1


def test_a_ratio_whose_cache_is_refused_does_not_take_the_others_with_it(
    biased, recipe, monkeypatch, caplog, out
):
    check = Mock(side_effect=[LeanKError("the first is refused"), None])
    monkeypatch.setattr(rounding.RoundedAnswers, "check", check)
    ratios = ("--pruning-ratio", 0.8, "--pruning-ratio", 0.5)
    told = rejected("train", biased, "--recipe", recipe, *ratios, "--kv-dtype", "int4", "-o", out)
    assert "error: the first is refused" in told
    assert f"no checkpoint in `{out / 'ratio-0.8'}`: the first is refused" in caplog.text
    assert [(out / f"ratio-{ratio}" / "config.json").exists() for ratio in (0.8, 0.5)] == [False, True]


def test_memory_that_does_not_suffice_for_the_trial_is_told_and_by_force_the_export_goes_on(
    biased, mask, saved, recipe, tmp_path, monkeypatch, caplog
):
    options = ("--mask", saved(mask), "--kv-dtype", "int4", "--recipe", recipe, "-o", tmp_path / "out")
    monkeypatch.setattr(loading, "load_from", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    ended = run("export", biased, *options)
    assert ended.exit_code == 1 and not (tmp_path / "out").exists()
    assert "memory does not suffice for the weights of `" in ended.stderr
    told = run("export", biased, *options, "--force")
    assert told.exit_code == 0 and "the cache was not tried: memory does not suffice" in caplog.text
    assert read_json(tmp_path / "out" / "config.json")["leank"]["kv_dtype"] == "int4"


def test_a_mean_may_be_added_to_a_trained_mask_in_its_own_folder(biased, recipe, out):
    options = ("--recipe", recipe, "--set", "key_mean=false", "-o", out)
    done("train", biased, *options, "--kv-dtype", "fp8")
    block = read_json(out / "config.json")["leank"]
    assert block["key_mean"] is True and block["kv_dtype"] == "fp8" and verify_checkpoint(out).ok


def test_no_number_is_no_pass():
    for value in (float("nan"), 0.1001):
        with refusal(r"^model `m` loses its answers: on 9 tokens"):
            rounding.RoundedAnswers("fp8", value, 1.0, 4, 9).check("m")
    rounding.RoundedAnswers("fp8", 0.1, 1.0, 4, 9).check("m")
