"""V's basis and widths in a mask file and in a checkpoint: written, read, checked, told, measured."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from leank_convert.convert import export_model
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.kv_scales import name_scale_tensors
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.methods import measured_cache
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.report.mask_report import write_report
from tests.checks import (
    edit_tensors,
    facts_of,
    failed,
    fitting_mask,
    prune_values,
    refused,
    rejected,
    say_in_block,
)  # fmt: skip


@pytest.fixture
def source(source_model):
    return source_model()


@pytest.fixture
def mask(source):
    return prune_values(fitting_mask(source), source)


def changed(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def test_it_is_read_back_whole_and_equal_masks_give_equal_bytes(mask, tmp_path, monkeypatch):
    for name in ("a", "b"):
        save_mask(mask, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    read = load_mask(tmp_path / "a.safetensors")
    assert read.provenance == mask.provenance and read.stores_alike(mask)
    assert read.value_basis.equal(mask.value_basis) and read.value_widths.dtype == torch.int32
    kept = int(mask.value_widths.sum())
    assert read.value_pruning_ratio == 1 - kept / mask.channel_mask.numel() and "of V" in repr(read)
    plain = replace(mask, value_basis=None, value_widths=None)
    assert mask.holds(plain) and not plain.holds(mask) and not mask.stores_alike(plain)
    save_mask(plain, tmp_path / "plain.safetensors")
    known = load_mask(tmp_path / "plain.safetensors").provenance
    assert (known.value_weights, known.value_tokens, known.value_pruning_ratio_asked) == (None,) * 3
    heads_without = (~plain.channel_mask.any(-1)).float().mean().item()
    assert plain.value_pruning_ratio == pytest.approx(heads_without)
    monkeypatch.setattr("leank_convert.mask_tensor._MAX_FILE_BYTES", 0)  # but what a basis takes
    refused(load_mask, tmp_path / "plain.safetensors", "no mask has more than 0")
    assert load_mask(tmp_path / "a.safetensors").stores_alike(mask)


def test_what_is_no_basis_and_no_widths_is_refused(mask, tmp_path):
    path = tmp_path / "m.safetensors"
    basis, widths = mask.value_basis, mask.value_widths
    sees, multiples = mask.channel_mask.any(-1), "not a multiple of 3 from 0 to 12"
    seeing, blind = (tuple(heads.nonzero()[0].tolist()) for heads in (sees, ~sees))
    cases = [
        ({"value_basis": None}, "`value_basis` is missing: V is pruned by"),
        ({"value_widths": None}, "`value_widths` is missing: V is pruned by"),
        ({"value_basis": basis.half()}, "`value_basis` is float16 [3, 4, 12, 12], not float32 [3, 4"),
        ({"value_basis": basis[..., :6].contiguous()}, "`value_basis` is float32 [3, 4, 12, 6], not"),
        ({"value_basis": changed(basis, (1, 2, 3, 4), torch.nan)}, "`value_basis[1][2]` is not orthonormal"),
        ({"value_basis": basis * 1.001}, "`value_basis[0][0]` is not orthonormal: its columns' products are"),
        ({"value_widths": widths.long()}, "`value_widths` is int64 [3, 4], not int32 [3, 4]"),
        ({"value_widths": widths[:, :2].contiguous()}, "`value_widths` is int32 [3, 2], not int32 [3, 4]"),
        ({"metadata": {"value_weights": "x"}}, "header metadata `value_weights` is 'x'"),
        ({"value_basis": None, "value_widths": None}, "and its header metadata says by `value_weights` that"),
    ]
    wrong = [(seeing, width, multiples) for width in (-3, 2, 15)]
    for place, width, why in (*wrong, (blind, 3, "and that head keeps no channel of K")):
        told = "`value_widths[{}][{}]` is {}, {}".format(*place, width, why)
        cases.append(({"value_widths": changed(widths, place, width)}, told))
    for case, message in cases:
        save_mask(mask, path)
        edit_tensors(path, **case)
        with pytest.raises(LeanKError, match=re.escape(message)) as caught:
            load_mask(path)
        assert caught.value.exit_code == 2 and str(path) in str(caught.value)
    with pytest.raises(LeanKError, match="a basis of V is of one model"):
        save_mask(replace(mask, provenance=None), path)


def test_a_checkpoint_whose_parts_contradict_one_another_is_found(source, mask, tmp_path):
    out = export_checkpoint(source, mask, tmp_path / "out")
    widths = read_json(out / "config.json")["leank"]["value_widths"]
    assert failed(out, source) == {}
    say = partial(say_in_block, out, "value_widths")
    assert "config.json has `leank.value_widths` None" in say(None)["mask file"]
    assert "`leank.value_widths" in say([[1]])["config"]
    assert "`leank.value_widths" in say([["3"] * 4] * 3)["config"]
    zeros = [[0] * 4] * 3
    assert "in the checkpoint's order, are" in say(zeros)["mask file"]
    save_mask(replace(mask, value_basis=None, value_widths=None), out / MASK_FILE_NAME)
    assert "are None, and config.json has" in say(widths)["mask file"]


def test_it_is_told_by_inspect_card_and_report(source, mask, tmp_path):
    out = export_checkpoint(source, mask, tmp_path / "out")
    save_mask(mask, tmp_path / "m.safetensors")
    ratio = f"{mask.value_pruning_ratio:.4f} (asked: 0.5), by a basis measured on 4,321 tokens"
    removed = f"V {mask.value_pruning_ratio:.1%}, together"
    for path in (tmp_path / "m.safetensors", out):
        facts = inspect_artifact(path)
        assert json.loads(json.dumps(facts)) == facts
        assert facts["value_pruning_ratio"] == mask.value_pruning_ratio
        cache = facts["bytes_per_token"]
        assert cache["value_pruned"] == int(mask.value_widths.sum()) * facts["element_bytes"]
        told = render_inspection(facts)
        assert ratio in told and removed in told and "heads per V width" in told
    card = (out / "README.md").read_text()
    kept = f"{1 - mask.value_pruning_ratio:.1%} of V of all tokens but the first 4"
    assert kept in " ".join(card.split()) and "folded into `v_proj` and `o_proj`" in card
    assert f"\n| V of pruned tokens | {mask.value_pruning_ratio:.1%} removed (asked: 0.5): heads keep" in card
    assert "V is in another basis than in" in card
    write_report(mask, (), tmp_path / "report.html")
    assert f"{mask.value_pruning_ratio:.1%} removed (asked: 50.0%)" in (tmp_path / "report.html").read_text()
    model = inspect_artifact(source)
    assert model["with_values_pruned"]["saved"] == pytest.approx(0.6, abs=1e-3)
    assert "with V at `value_pruning_ratio` 0.5, too: 60.0% saved" in render_inspection(model)


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_an_export_measures_it_for_a_mask_that_has_none(retriever_folder, short_recipe, tmp_path, kv_dtype):
    channels = ChannelMask(torch.arange(16).expand(2, 2, 16) % 3 > 0)
    options = {"recipe": short_recipe(), "sink_size": 4, "recent_size": 16, "flush_size": 4}
    asked = {"kv_dtype": kv_dtype, "key_mean": False, "value_pruning_ratio": 0.5, "force": True}
    out = export_model(retriever_folder, channels, tmp_path / "out", **asked, **options)
    assert failed(out, retriever_folder) == {}
    found = load_mask(out / MASK_FILE_NAME)
    known = found.provenance
    assert found.value_pruning_ratio == 0.5 == known.value_pruning_ratio_asked and known.value_tokens > 1000
    assert (found.key_mean is None) == (kv_dtype is None)
    if kv_dtype is not None:  # of V as it is stored
        measured = measure_cache(retriever_folder, short_recipe(), value_basis=found.value_basis)
        expected = measured.scales(found).values
        tensors = load_file(out / "model.safetensors")
        orders = read_json(out / "config.json")["leank"]["head_permutation"]
        for layer, (_, name) in enumerate(name_scale_tensors(facts_of(retriever_folder))):
            assert tensors[name].equal(expected[layer][orders[layer]])
        return
    with pytest.raises(LeanKError, match=r"prunes V already, 50\.0% of it, and a ratio of 0\.3 is asked for"):
        export_model(retriever_folder, found, tmp_path / "two", value_pruning_ratio=0.3, **options)
    with pytest.raises(LeanKError, match="`value_pruning_ratio` is 1, not a number from 0 to below 1"):
        export_model(retriever_folder, channels, tmp_path / "two", value_pruning_ratio=1, **options)
    ratio = ("--value-pruning-ratio", 1)
    said = rejected("export", retriever_folder, "--mask", out, "-o", tmp_path / "two", *ratio)
    assert "`--value-pruning-ratio`: 1.0 is not in the range" in said


def test_text_that_cannot_be_read_is_refused_before_weights_are_loaded(
    retriever_folder, short_recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(measured_cache, "load_model", lambda *_: pytest.fail("loaded"))
    text, recipe = tmp_path / "text.txt", tmp_path / "recipe.yaml"
    text.write_text(" ")
    recipe.write_text(short_recipe().to_yaml())
    save_mask(ChannelMask(torch.ones(2, 2, 16).bool()), tmp_path / "m.safetensors")
    files = retriever_folder, "--mask", tmp_path / "m.safetensors", "-o", tmp_path / "out"
    named = "--recipe", recipe, "--set", f"data.haystack.source={text}"
    assert "has running text; remove it" in rejected("export", *files, *named, "--key-mean")
    said = rejected("export", *files, *named, "--value-pruning-ratio", 0.5)
    assert f"haystack `{text}` holds no text" in said
