"""The mean of keys, and V's basis and widths, in mask files and checkpoints: written, read, checked, told."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from leank_convert.convert import export_model
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.kv_scales import name_scale_tensors
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.methods import measured_cache
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.report.mask_report import write_report
from leank_convert.safetensors_file import read_header
from leank_convert.verify import verify_checkpoint
from tests.checks import (
    changed,
    edit_tensors,
    facts_of,
    failed,
    fitting_mask,
    provenance_of,
    prune_values,
    refusal,
    refused,
    rejected,
    say_in_block,
    short_recipe,
)  # fmt: skip

TOKENS = 4321
WITHOUT = {"key_mean": {"key_mean": None}, "values": {"value_basis": None, "value_widths": None}}


@pytest.fixture
def masks(source):
    """Masks of it with a mean of keys and scaling factors, and with V pruned."""
    told = {"pruning_ratio_asked": 0.7, "width_multiple": 4, "seed": 0}
    told |= {"key_mean_tokens": TOKENS, "recipe": 'steps: 2\n# ümlaut "quoted"\n'}
    plain, known = fitting_mask(source), provenance_of(source, **told)
    generator = torch.Generator().manual_seed(1)
    factors = torch.rand(plain.channel_mask.shape, generator=generator)
    mean = torch.randn(factors.shape, generator=generator).half()
    centred = ChannelMask(plain.channel_mask, factors, known, mean)
    return {"key_mean": centred, "values": prune_values(plain, source)}


@pytest.mark.parametrize("part", WITHOUT)
def test_it_is_read_back_whole_and_equal_masks_give_equal_bytes(part, masks, tmp_path, monkeypatch):
    mask, plain = masks[part], replace(masks[part], **WITHOUT[part])
    for name, each in (("a", mask), ("plain", plain)):
        save_mask(each, tmp_path / f"{name}.safetensors")
    read, without = (load_mask(tmp_path / f"{name}.safetensors") for name in ("a", "plain"))
    assert read.provenance == mask.provenance and read.stores_alike(mask)
    save_mask(read, tmp_path / "again.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    assert not without.stores_alike(mask) and not mask.stores_alike(without)
    if part == "key_mean":
        assert read.key_mean.equal(mask.key_mean) and without.key_mean is None
        assert read.channel_mask.equal(mask.channel_mask)
        assert read.scaling_factors.equal(mask.scaling_factors)
        told = f"ChannelMask([3 x 4 x 12], {mask.pruning_ratio:.1%} removed, leank, llama-model)"
        assert repr(without) == told
        header = read_header(tmp_path / "a.safetensors")
        assert {name: tensor.dtype for name, tensor in header.tensors.items()} == {
            "scaling_factors": "F32", "key_mean": "F16", "channel_mask": "BOOL"
        }  # fmt: skip
        assert "key_mean_tokens" not in read_header(tmp_path / "plain.safetensors").metadata
        return
    assert read.value_basis.equal(mask.value_basis) and read.value_widths.dtype == torch.int32
    kept = int(mask.value_widths.sum())
    assert read.value_pruning_ratio == 1 - kept / mask.channel_mask.numel() and "of V" in repr(read)
    assert mask.holds(plain) and not plain.holds(mask)
    known = without.provenance
    assert (known.value_weights, known.value_tokens, known.value_pruning_ratio_asked) == (None,) * 3
    heads_without = (~plain.channel_mask.any(-1)).float().mean().item()
    assert plain.value_pruning_ratio == pytest.approx(heads_without)
    monkeypatch.setattr("leank_convert.mask_tensor._MAX_FILE_BYTES", 0)  # but what a basis takes
    refused(load_mask, tmp_path / "plain.safetensors", "no mask has more than 0")
    assert load_mask(tmp_path / "a.safetensors").stores_alike(mask)


@pytest.mark.parametrize("part", WITHOUT)
def test_what_makes_no_sense_is_refused(part, masks, tmp_path):
    mask, path = masks[part], tmp_path / "m.safetensors"
    basis, widths, mean = mask.value_basis, mask.value_widths, mask.key_mean
    sees, multiples = mask.channel_mask.any(-1), "not a multiple of 3 from 0 to 12"
    seeing, blind = (tuple(heads.nonzero()[0].tolist()) for heads in (sees, ~sees))
    if part == "key_mean":
        nan = torch.full(mean.shape, torch.nan).half()
        cases = [
            ({"key_mean": mean.float()}, "`key_mean` is float32 [3, 4, 12], not float16 [3, 4, 12]"),
            ({"key_mean": mean[..., :7].contiguous()}, "`key_mean` is float16 [3, 4, 7], not float16 [3"),
            ({"key_mean": nan}, "`key_mean` holds nan at [0, 0, 0], no finite number"),
        ]
        for case, message in cases:
            with refusal(re.escape(message)):
                ChannelMask(mask.channel_mask, **case)
        cases += [({"key_mean": None}, "has no tensor `key_mean`, and its header metadata says")]
    else:
        cases = [
            ({"value_basis": None}, "`value_basis` is missing: V is pruned by"),
            ({"value_widths": None}, "`value_widths` is missing: V is pruned by"),
            ({"value_basis": basis.half()}, "`value_basis` is float16 [3, 4, 12, 12], not float32 [3, 4"),
            ({"value_basis": basis[..., :6].contiguous()}, "`value_basis` is float32 [3, 4, 12, 6], not"),
            ({"value_basis": changed(basis, (1, 2, 3, 4), torch.nan)}, "`value_basis[1][2]` is not ortho"),
            ({"value_basis": basis * 1.001}, "`value_basis[0][0]` is not orthonormal: its columns' products"),
            ({"value_widths": widths.long()}, "`value_widths` is int64 [3, 4], not int32 [3, 4]"),
            ({"value_widths": widths[:, :2].contiguous()}, "`value_widths` is int32 [3, 2], not int32 [3"),
            ({"metadata": {"value_weights": "x"}}, "header metadata `value_weights` is 'x'"),
            (WITHOUT[part], "and its header metadata says by `value_weights` that"),
        ]
        wrong = [(seeing, width, multiples) for width in (-3, 2, 15)]
        for place, width, why in (*wrong, (blind, 3, "and that head keeps no channel of K")):
            told = "`value_widths[{}][{}]` is {}, {}".format(*place, width, why)
            cases.append(({"value_widths": changed(widths, place, width)}, told))
    for case, message in cases:
        save_mask(mask, path)
        edit_tensors(path, **case)
        refused(load_mask, path, message)
    lost = f"mask `{path}` has a tensor `key_mean` and no prov" if part == "key_mean" else "is of one model"
    with refusal(re.escape(lost)):
        save_mask(replace(mask, provenance=None), path)
    if part == "key_mean":
        save_mask(ChannelMask(mask.channel_mask), path)
        edit_tensors(path, key_mean=mean)
        refused(load_mask, path, lost)


def test_a_checkpoint_carries_a_mean_in_its_mask_file_and_says_so(source, masks, tmp_path):
    mask = masks["key_mean"]
    checkpoint = export_checkpoint(source, mask, tmp_path / "out")
    assert read_json(checkpoint / "config.json")["leank"]["key_mean"] is True
    assert load_mask(checkpoint / MASK_FILE_NAME).key_mean.equal(mask.key_mean)
    report = verify_checkpoint(checkpoint, source)
    assert report.ok, failed(checkpoint)
    (detail,) = (check.detail for check in report.checks if check.name == "mask file")
    assert detail == "the same channels, in the original head order, and the mean of keys"
    plain = export_checkpoint(source, replace(mask, key_mean=None), tmp_path / "plain")
    assert "key_mean" not in read_json(plain / "config.json")["leank"]
    for shard in plain.glob("model*.safetensors"):
        assert load_file(shard).keys() == load_file(checkpoint / shard.name).keys()


def test_a_checkpoint_whose_parts_contradict_one_another_is_found(source, masks, tmp_path):
    out = export_checkpoint(source, masks["key_mean"], tmp_path / "out")
    path = out / MASK_FILE_NAME
    whole = path.read_bytes()
    say = partial(say_in_block, out, "key_mean")
    assert "config.json has no `leank.key_mean`" in say(None)["mask file"]
    for value in (False, 1, "x", [True]):
        assert f"`leank.key_mean` is {value!r}, not true" in say(value)["config"]
    edit_tensors(path, key_mean=torch.full((3, 4, 12), torch.nan).half())
    assert "`key_mean` holds nan" in say(True)["mask file"]
    path.write_bytes(whole)
    save_mask(replace(load_mask(path), scaling_factors=None, key_mean=None), path)
    assert "config.json says `leank.key_mean`, and `" in say(True)["mask file"]

    out = export_checkpoint(source, masks["values"], tmp_path / "pruned")
    widths = read_json(out / "config.json")["leank"]["value_widths"]
    assert failed(out, source) == {}
    say = partial(say_in_block, out, "value_widths")
    assert "config.json has `leank.value_widths` None" in say(None)["mask file"]
    for value in ([[1]], [["3"] * 4] * 3):
        assert "`leank.value_widths" in say(value)["config"]
    assert "in the checkpoint's order, are" in say([[0] * 4] * 3)["mask file"]
    save_mask(replace(masks["values"], **WITHOUT["values"]), out / MASK_FILE_NAME)
    assert "are None, and config.json has" in say(widths)["mask file"]


def test_they_are_told_by_inspect_card_and_report(source, masks, tmp_path):
    mask = masks["values"]
    ratio = f"{mask.value_pruning_ratio:.4f} (asked: 0.5), by a basis measured on 4,321 tokens"
    kept = f"{1 - mask.value_pruning_ratio:.1%} of V of all tokens but the first 4"
    for part, inspected, card, page in (
        (
            "key_mean",
            ["cached less their mean over 4,321 tokens: a removed channel counts as its mean"],
            ["| cached keys | less a constant, their mean over 4,321 tokens: a removed channel counts as"],
            "cached less their mean over 4,321 tokens",
        ),
        (
            "values",
            [ratio, f"V {mask.value_pruning_ratio:.1%}, together", "heads per V width"],
            [
                *(kept, "folded into `v_proj` and `o_proj`", "V is in another basis than in"),
                f"| V of pruned tokens | {mask.value_pruning_ratio:.1%} removed (asked: 0.5): heads keep",
            ],
            f"{mask.value_pruning_ratio:.1%} removed (asked: 50.0%)",
        ),
    ):
        out = export_checkpoint(source, masks[part], tmp_path / part)
        save_mask(masks[part], tmp_path / "m.safetensors")
        for path in (tmp_path / "m.safetensors", out):
            facts = inspect_artifact(path)
            assert json.loads(json.dumps(facts)) == facts
            if part == "values":
                assert facts["value_pruning_ratio"] == mask.value_pruning_ratio
                pruned = int(mask.value_widths.sum()) * facts["element_bytes"]
                assert facts["bytes_per_token"]["value_pruned"] == pruned
            else:
                assert facts["key_mean"] is True and facts["provenance"]["key_mean_tokens"] == TOKENS
            told = " ".join(render_inspection(facts).split())
            assert all(line in told for line in inspected)
        told = " ".join((out / "README.md").read_text().split())
        assert all(line in told for line in card)
        write_report(masks[part], (), tmp_path / "report.html")
        assert page in (tmp_path / "report.html").read_text()
    assert facts["key_mean"] is False and "cached less" not in render_inspection(facts)
    model = inspect_artifact(source)
    assert model["with_values_pruned"]["saved"] == pytest.approx(0.6, abs=1e-3)
    assert "with V at `value_pruning_ratio` 0.5, too: 60.0% saved" in render_inspection(model)


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_an_export_measures_it_for_a_mask_that_has_none(retriever_folder, tmp_path, kv_dtype):
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
    with refusal(r"prunes V already, 50\.0% of it"):
        export_model(retriever_folder, found, tmp_path / "two", value_pruning_ratio=0.3, **options)
    with refusal("`value_pruning_ratio` is 1, not a number from 0 to below 1"):
        export_model(retriever_folder, channels, tmp_path / "two", value_pruning_ratio=1, **options)
    ratio = ("--value-pruning-ratio", 1)
    said = rejected("export", retriever_folder, "--mask", out, "-o", tmp_path / "two", *ratio)
    assert "`--value-pruning-ratio`: 1.0 is not in the range" in said


def test_text_that_cannot_be_read_is_refused_before_weights_are_loaded(
    retriever_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(measured_cache, "load_model", lambda *_: pytest.fail("loaded"))
    text, recipe = tmp_path / "text.txt", tmp_path / "recipe.yaml"
    recipe.write_text(short_recipe().to_yaml())
    save_mask(ChannelMask(torch.ones(2, 2, 16).bool()), tmp_path / "m.safetensors")
    files = retriever_folder, "--mask", tmp_path / "m.safetensors", "-o", tmp_path / "out"
    named = "--recipe", recipe, "--set", f"data.haystack.source={text}"
    assert "has running text; remove it" in rejected("export", *files, *named, "--key-mean")
    for written, told in (
        (" ", f"haystack `{text}` holds no text"),
        ("x" * 999, f"`{text}` make too few tokens: 1"),
    ):
        text.write_text(written)
        assert told in rejected("export", *files, *named, "--value-pruning-ratio", 0.5)
