"""The masks that ship: which model gets which, unasked or by name, and what is said of it."""

import dataclasses
import json
import logging
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import leank_convert.masks
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.convert import export_model
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.mask import ChannelMask, load_mask, save_mask
from leank_convert.masks import find_by_model, find_by_name, list_masks, percent, value_percent
from leank_convert.testbed import MODEL_DIR
from leank_convert.verify import verify_checkpoint
from tests.checks import edit_json, provenance_of, prune_values, refusal, run

ROOT = Path(__file__).parents[3]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192, **FACTORS}


@pytest.fixture
def packaged(source_model, tmp_path, monkeypatch):
    """The folder of packaged masks, with two of a model `owner/Tiny` beside the real ones."""
    folder = tmp_path / "masks"
    folder.mkdir()
    for path in list_masks():
        (folder / path.name).symlink_to(path)
    source = source_model(shards=False)
    edit_json(source / "config.json", _name_or_path="owner/Tiny")
    for removed in (50, 80):
        channels = torch.rand(3, 4, 12, generator=torch.Generator().manual_seed(removed)) > removed / 100
        known = provenance_of(source, "owner/Tiny", flush_size=removed)
        save_mask(ChannelMask(channels, None, known), folder / f"tiny-{removed}.safetensors")
    monkeypatch.setattr(leank_convert.masks, "FOLDER", folder)
    return folder


@pytest.fixture
def tiny(packaged, tmp_path):
    return tmp_path / "llama-model"


def refused(result, out):
    assert result.exit_code == 2 and not out.exists(), result.output
    return result.stderr


def flush_size(out):
    """Which of the two masks of `owner/Tiny` it is."""
    return read_json(out / "config.json")["leank"]["flush_size"]


def test_every_packaged_mask_is_named_after_its_model_and_says_where_it_comes_from():
    names = {path.stem for path in list_masks()}
    assert {"llama-3.1-8b-instruct-70", "qwen2.5-7b-instruct-70", "testbed-70"} <= names
    notice = (ROOT / "NOTICE").read_text()
    for path in list_masks():
        mask = load_mask(path)
        known = mask.provenance
        assert known is not None
        values = value_percent(path)
        of_values = "" if values is None else f"-v{values}"
        assert path.stem == f"{known.model.rpartition('/')[2].lower()}-{percent(path)}{of_values}"
        assert (mask.value_widths is None) == (values is None)
        if values is not None:
            assert known.value_pruning_ratio_asked == float(values) / 100 and known.value_weights is None
            assert abs(mask.value_pruning_ratio - float(values) / 100) < 0.01
            beside = load_mask(path.with_stem(path.stem.removesuffix(of_values)))
            assert torch.equal(mask.channel_mask, beside.channel_mask)  # K as in the mask of K alone
        assert abs(mask.pruning_ratio - float(percent(path)) / 100) < 0.03
        if known.recipe is None:
            assert known.source is not None and "Copyright (c) Microsoft Corporation" in known.source
            assert known.held_out is None and known.evaluation is not None
            assert f"leank_convert/masks/{path.name}\n" in notice
        else:
            assert known.pruning_ratio_asked == float(percent(path)) / 100
            assert known.held_out is not None or known.evaluation is not None


def test_a_model_of_the_authors_is_exported_verified_and_decoded_without_naming_a_mask(
    source_model, caplog, out
):
    # Llama-3.1-8B's layers, heads, rope and name, and little else of it.
    heads = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    rope = {"rope_parameters": ROPE, "max_position_embeddings": 131072}
    source = source_model(dtype="bfloat16", shards=False, vocab_size=512, **heads, **rope)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / file, source)
    edit_json(source / "config.json", _name_or_path=LLAMA)
    with caplog.at_level(logging.INFO, logger="leank_convert"):
        result = run("export", source, "-o", out)
    assert result.exit_code == 0 and result.stdout == f"{out}\n", result.output
    (note,) = caplog.messages
    assert f"`llama-3.1-8b-instruct-70` of the package, made by the authors of LeanK for {LLAMA} (" in note
    assert "MIT License, Copyright (c) Microsoft Corporation); `config.json` calls this model so" in note
    assert verify_checkpoint(out, source=source).ok
    leank = read_json(out / "config.json")["leank"]
    assert leank["pruning_ratio"] == 0.6875 and (leank["sink_size"], leank["recent_size"]) == (128, 1024)
    card = (out / "README.md").read_text()
    assert "Copyright (c) Microsoft Corporation" in card and "evaluated: in the paper, not here." in card
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(out, config=model.config)
    inputs = tokenizer("goze 17 42 ; " * 330, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert output.sequences.shape[1] == inputs["input_ids"].shape[1] + 4
    memory = output[CACHE].memory()
    assert memory.kept_keys.used + memory.window_keys.used < 0.95 * memory.dense_keys


def test_a_model_is_known_by_its_config_or_its_place_in_the_hubs_cache_and_not_by_its_shape(tiny, tmp_path):
    named, other, cached = (tmp_path / name for name in ("named", "other", "cached"))
    assert flush_size(export_checkpoint(tiny, None, named, pruning_ratio=0.5)) == 50
    edit_json(tiny / "config.json", _name_or_path="owner/Tiny-fine-tuned")
    stderr = refused(run("export", tiny, "-o", other, "--pruning-ratio", 0.5), other)
    assert "no mask for" in stderr and "none packaged for it" in stderr
    assert "or a name of those that `leank-convert masks` lists\n" in stderr
    snapshot = tmp_path / "models--owner--Tiny" / "snapshots" / ("0123abcd" * 5)
    shutil.copytree(tiny, snapshot)
    assert flush_size(export_checkpoint(snapshot, None, cached, pruning_ratio=0.8)) == 80
    assert "not evaluated on this model" not in (cached / "README.md").read_text()
    # A repository of another name that was saved from it: what the hub calls it counts.
    edit_json(tiny / "config.json", _name_or_path="owner/Tiny")
    derived = tmp_path / "models--someone--Tiny" / "snapshots" / ("0123abcd" * 5)
    shutil.copytree(tiny, derived)
    assert "none packaged for it" in refused(run("export", derived, "-o", other), other)


@pytest.mark.parametrize(
    ("file", "text"),
    [("README.md", "---\nbase_model: [owner/Tiny]\n---\n"), ("training_args.bin", "")],
)
def test_a_fine_tune_is_not_taken_for_the_model_that_its_config_still_names(file, text, tiny, tmp_path):
    (tiny / file).write_text(text)
    assert "none packaged for it" in refused(run("export", tiny, "-o", tmp_path / "out"), tmp_path / "out")


def test_a_mask_taken_by_name_is_said_to_be_not_evaluated_on_another_model(tiny, tmp_path, caplog):
    edit_json(tiny / "config.json", _name_or_path=...)
    with caplog.at_level(logging.INFO, logger="leank_convert"):
        out = export_checkpoint(tiny, "Tiny", tmp_path / "out", pruning_ratio=0.5)
    assert flush_size(out) == 50
    assert f"not evaluated on `{tiny}`" in caplog.text
    card = (out / "README.md").read_text()
    assert "The mask was made for owner/Tiny, and is not evaluated on this model." in card
    assert flush_size(export_checkpoint(tiny, "tiny-80", tmp_path / "other")) == 80


def test_a_packaged_mask_that_prunes_v_is_for_every_copy_of_its_model_where_v_is_asked_for(
    tiny, packaged, tmp_path, monkeypatch
):
    monkeypatch.setattr("leank_convert.convert.measure_cache", lambda *_, **__: pytest.fail("measured"))
    mask = prune_values(load_mask(packaged / "tiny-50.safetensors"), tiny).noting(value_weights=None)
    save_mask(mask, packaged / "tiny-50-v50.safetensors")
    options = {"pruning_ratio": 0.5, "key_mean": False, "recipe": "quickstart"}
    of_keys = export_model(tiny, None, tmp_path / "keys", **options)
    assert load_mask(of_keys / "channel_mask.safetensors").value_widths is None
    out = export_model(tiny, None, tmp_path / "both", value_pruning_ratio=0.5, **options)
    assert load_mask(out / "channel_mask.safetensors").stores_alike(mask)
    assert verify_checkpoint(out, source=tiny).ok
    text = tmp_path / "text.txt"
    text.write_text("The harbour master keeps a book of all ships.")
    with pytest.raises(pytest.fail.Exception, match="measured"):  # V on a text of the user's own
        overrides = [f"data.haystack.source={text}"]
        export_model(tiny, None, tmp_path / "own", value_pruning_ratio=0.5, overrides=overrides, **options)
    assert find_by_name("tiny", 0.5).stem == "tiny-50" and find_by_name("tiny-50-v50").stem == "tiny-50-v50"
    # Then it is measured beside a mask of K alone.
    assert find_by_model("owner/Tiny", 0, 0.5) is find_by_model("owner/Tiny", 0.8, 0.5) is None
    edit_json(tiny / "config.json", _name_or_path="owner/Tiny-fine-tuned")
    other = tmp_path / "other"
    stderr = refused(run("export", tiny, "--mask", "tiny-50-v50", "-o", other), other)
    assert "mask `tiny-50-v50` has a basis of V for copies of owner/Tiny, and nothing says" in stderr


def test_a_packaged_mask_comes_last(tiny, tmp_path):
    mask = load_mask(leank_convert.masks.FOLDER / "tiny-50.safetensors")
    own = ChannelMask(~mask.channel_mask)
    save_mask(own, tmp_path / "own.safetensors")
    named = [f"mask={tmp_path / 'own.safetensors'}"]
    recipes = export_checkpoint(tiny, None, tmp_path / "a", overrides=named, recipe="quickstart")
    (tmp_path / "b").mkdir()
    save_mask(own, tmp_path / "b" / "channel_mask.safetensors")
    trained = export_checkpoint(tiny, None, tmp_path / "b")
    unfinished = tmp_path / "c"
    (unfinished / "leank").mkdir(parents=True)
    with refusal("holds a training run, but not its mask"):
        export_checkpoint(tiny, None, unfinished, pruning_ratio=0.5)
    for out in (recipes, trained):
        assert load_mask(out / "channel_mask.safetensors").channel_mask.equal(own.channel_mask)
    again = export_checkpoint(tiny, None, trained, pruning_ratio=0.5, overwrite=True)  # over an export
    assert load_mask(again / "channel_mask.safetensors").channel_mask.equal(mask.channel_mask)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "of `owner/Tiny` was made for a pruning ratio of 0.7; there are masks for 0.5, 0.8"),
        (["--pruning-ratio", "0.6"], "for a pruning ratio of 0.6; there are masks for 0.5, 0.8"),
        (["--mask", "tiny-50", "--pruning-ratio", "0.8"], "for a pruning ratio of 0.8; there is one for 0.5"),
        (["--mask", "tini"], "did you mean `tiny`"),
        (["--mask", "nothing-alike"], "packaged masks: `llama-3.1-8b-instruct-70`, `qwen2.5-7b-instruct-70`"),
        (["--mask", "testbed-70"], "has shape [4, 4, 64]; model"),
        (["--mask", "{own}", "--pruning-ratio", "0.5"], "the ratio picks among packaged masks"),
        (["--all-channels", "--pruning-ratio", "0.5"], "--pruning-ratio and --all-channels exclude each"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(arguments, told, tiny, packaged, tmp_path):
    given = [argument.format(own=packaged / ".." / "own.safetensors") for argument in arguments]
    shutil.copy(packaged / "tiny-50.safetensors", tmp_path / "own.safetensors")
    assert told in refused(run("export", tiny, *given, "-o", tmp_path / "out"), tmp_path / "out")


def test_a_damaged_packaged_file_is_told_where_it_is_asked_for_and_nowhere_else(tiny, packaged, tmp_path):
    file, out = packaged / "tiny-50.safetensors", tmp_path / "out"
    file.write_bytes(file.read_bytes()[:-9])
    export = ["export", tiny, "-o", out]
    for arguments in (export, [*export, "--mask", "tiny-50"], ["masks"]):
        assert f"error: `{file}` is truncated or damaged" in refused(run(*arguments), out)
    assert run("export", "testbed", "-o", out).exit_code == 0


def test_masks_are_listed_with_model_ratio_windows_maker_and_evaluation(packaged):
    shown = run("masks").stdout
    row = r"llama-3.1-8b-instruct-70 +70%: 68.8%  128, 1024  the authors of LeanK"
    assert re.search(rf"{row}\n    model: {LLAMA}\n    evaluated: in the paper, not here\n", shown)
    assert "    evaluated: not yet\n" in shown and "tokens in held-out answers;\n" in shown
    listed = json.loads(run("masks", "--json").stdout)
    assert [mask["name"] for mask in listed] == [path.stem for path in list_masks()]
    inspected = json.loads(run("inspect", "llama-3.1-8b-instruct", "--json").stdout)
    assert inspected["provenance"]["source"] == listed[0]["source"]
    mistyped = run("inspect", "testbet-70")
    assert mistyped.exit_code == 2 and "did you mean `testbed-70`" in mistyped.stderr


def test_a_mask_of_a_run_joins_them_under_the_hub_id_of_its_model(tiny, packaged, tmp_path, monkeypatch):
    mask = load_mask(packaged / "tiny-50.safetensors")
    assert mask.provenance is not None
    known = dataclasses.replace(mask.provenance, model="a-folder", pruning_ratio_asked=0.65)
    save_mask(dataclasses.replace(mask, provenance=known), tmp_path / "mask.safetensors")
    monkeypatch.setattr(sys, "argv", ["package-mask", str(tmp_path / "mask.safetensors"), "owner/Tiny"])
    runpy.run_path(str(ROOT / "bin" / "package-mask"), run_name="__main__")
    joined = load_mask(packaged / "tiny-65.safetensors")
    assert joined.provenance == dataclasses.replace(known, model="owner/Tiny")
    assert export_checkpoint(tiny, None, tmp_path / "out", pruning_ratio=0.65).is_dir()
