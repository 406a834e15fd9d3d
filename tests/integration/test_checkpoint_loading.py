"""A converted checkpoint loads through transformers alone, and what it saves loads again."""

import hashlib
import json
import logging
import os
import pickle
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

from leank_convert._runtime.configuration_leank import CACHE
from tests.checks import edit_json, edit_tensors, failed, run_python
from tests.integration.conftest import GREEDY, WIDTHS
from tests.tiny_families import batch

# Runs where `leank_convert`, its dependencies and tilelang cannot be imported.
STRANGER = """
import sys, warnings
for name in ("leank_convert", "runtime", "tilelang", "pydantic", "matplotlib", "tensorboard"):
    sys.modules[name] = None
warnings.simplefilter("error")
import torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    print(model.generate(torch.arange(4, 34)[None], **GREEDY).tolist())
""".replace("GREEDY", str(GREEDY))


def test_every_auto_class_finds_its_class(converted):
    folder = converted(widths=WIDTHS).folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert type(config).__name__ == "LeanKLlamaConfig" and config.model_type == "leank_llama"
    base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(base).__name__ == "LeanKLlamaModel"
    with torch.no_grad():
        assert base(**batch())[CACHE].memory().kept_keys.used


def test_without_trust_in_its_code_the_checkpoint_is_not_silently_dense(converted):
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(converted(widths=WIDTHS).folder, trust_remote_code=False)


def test_it_and_what_it_saves_run_where_the_toolkit_cannot_be_imported(converted, load, tmp_path):
    checkpoint = converted("qwen3", WIDTHS)
    model = load(checkpoint.folder)
    again = tmp_path / "again"
    model.save_pretrained(again)
    AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=True).save_pretrained(again)
    assert failed(again, checkpoint.source) == {}  # in one file, the source's weights in several
    expected = model.generate(torch.arange(4, 34)[None], **GREEDY)
    loaded = pickle.loads(pickle.dumps(load(again)))
    assert loaded.generate(torch.arange(4, 34)[None], **GREEDY).tolist() == expected.tolist()
    third = tmp_path / "third"
    loaded.save_pretrained(third)
    place = {"cwd": tmp_path, "env": {**os.environ, "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"}}
    result = run_python("-c", STRANGER, checkpoint.folder, third, **place, timeout=120)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [expected.tolist()] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_loads_in_any_dtype_with_a_device_map(dtype, converted, load):
    model = load(converted(widths=WIDTHS).folder, dtype=dtype, device_map="auto")
    result = model.generate(**batch(), **GREEDY, return_dict_in_generate=True)
    store = result[CACHE].layers[0].store.tensors
    assert store.kept_keys.dtype == store.window_values.dtype == dtype
    assert result.sequences.shape == (2, 39)


def test_a_model_that_lies_on_several_devices_says_what_that_costs(converted, load, tmp_path, caplog):
    logging.getLogger("transformers").propagate = True
    places = {"model": "cpu", "lm_head": "disk"}
    folder = converted(widths=WIDTHS).folder
    load(folder, device_map=places, offload_folder=tmp_path)
    assert "the model lies on 2 devices, so its decode steps cannot be captured" in caplog.text
    assert '`device_map="cuda"` makes them several times faster' in caplog.text
    caplog.clear()
    load(folder, device_map="cpu")
    assert "devices" not in caplog.text


def test_the_text_generation_pipeline_generates(converted, load):
    checkpoint = converted(widths=WIDTHS)
    model = load(checkpoint.folder)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=True)
    text = " ".join(f"w{number % 60}" for number in range(30))
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    ours = generate(text, return_full_text=False, **GREEDY)[0]["generated_text"]
    tokens = model.generate(**tokenizer(text, return_tensors="pt"), **GREEDY)[0, 30:]
    assert ours == tokenizer.decode(tokens, skip_special_tokens=True)
    messages = [{"role": "user", "content": text}]
    assert generate(messages, **GREEDY)[0]["generated_text"][-1]["role"] == "assistant"


@pytest.mark.parametrize("changed", ["gone", "another"])
def test_saving_leaves_the_models_own_config_as_it_is(changed, converted, load, tmp_path):
    checkpoint = converted(widths=WIDTHS)
    model = load(checkpoint.folder)
    before = json.loads(json.dumps(model.config.leank))
    mask_file = checkpoint.folder / "channel_mask.safetensors"
    if changed == "gone":
        mask_file.unlink()
    else:
        mask_file.write_bytes(b"another mask")
    model.save_pretrained(tmp_path / "again")
    assert model.config.leank == before and mask_file.name in before["files"]
    assert not (tmp_path / "again" / mask_file.name).exists()
    block = json.loads((tmp_path / "again" / "config.json").read_text())["leank"]
    assert "modeling_leank.py" in block["files"] and mask_file.name not in block["files"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises((OSError, AssertionError)):
        model.save_pretrained(blocked / "below")
    assert model.config.leank == before


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fault", ["gone", "altered", "of another mask"])
def test_a_checkpoint_whose_mean_is_lost_or_another_is_not_loaded(fault, converted, load):
    checkpoint = converted(widths=WIDTHS, centred=True)
    file = checkpoint.folder / "channel_mask.safetensors"
    whole = file.read_bytes()
    if fault == "gone":
        file.unlink()
    elif fault == "altered":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        file.write_bytes((converted(widths=WIDTHS, name="other").folder / file.name).read_bytes())
    message = "`channel_mask.safetensors`, which holds the mean of keys, is missing or not the file that was"
    with pytest.raises(ValueError, match=re.escape(f"`{checkpoint.folder}`: {message}")):
        load(checkpoint.folder)
    stock = transformers.LlamaForCausalLM.from_pretrained(checkpoint.folder)  # needs no mean
    original = transformers.LlamaForCausalLM.from_pretrained(checkpoint.source)
    with torch.no_grad():
        assert torch.allclose(stock(**batch()).logits, original(**batch()).logits, atol=1e-3)
    file.write_bytes(whole)
    load(checkpoint.folder)


@pytest.mark.filterwarnings("default")
def test_a_mean_that_the_digest_vouches_for_and_makes_no_sense_is_not_loaded(converted, load):
    checkpoint = converted(widths=WIDTHS, centred=True)
    file, config = checkpoint.folder / "channel_mask.safetensors", checkpoint.folder / "config.json"
    mean, leank = load_file(file)["key_mean"], json.loads(config.read_text())["leank"]
    for own, message in (
        (None, "holds no tensor `key_mean` that can be read"),
        (mean.float(), "`key_mean` is torch.float32 [2, 2, 16], not finite float16 [2, 2, 16]"),
        (mean[:1].clone(), "`key_mean` is torch.float16 [1, 2, 16], not finite float16"),
        (mean.masked_fill(mean > 1, torch.inf), "not finite float16 [2, 2, 16]"),
    ):
        edit_tensors(file, key_mean=own)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        edit_json(config, leank={**leank, "files": {**leank["files"], file.name: digest}})
        with pytest.raises(ValueError, match=re.escape(message)):
            load(checkpoint.folder)


@pytest.mark.filterwarnings("default")
def test_a_saved_model_carries_its_mean_along_or_is_not_saved(converted, load, tmp_path, monkeypatch):
    checkpoint = converted("qwen2", WIDTHS, centred=True)
    model = load(checkpoint.folder)
    expected = model.generate(**batch(), **GREEDY)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(again.generate(**batch(), **GREEDY), expected)
    assert failed(tmp_path / "again") == {}
    again.save_pretrained(tmp_path / "again")  # over itself
    assert torch.equal(load(tmp_path / "again").generate(**batch(), **GREEDY), expected)
    with monkeypatch.context() as place:
        place.chdir(checkpoint.folder.parent)
        moved = load(checkpoint.folder.name)
    moved.save_pretrained(tmp_path / "from_another_place")
    assert (tmp_path / "from_another_place" / "channel_mask.safetensors").is_file()
    moved.mask_file = None  # of a model that was made from its config
    moved.config.name_or_path = str(checkpoint.folder)
    moved.save_pretrained(tmp_path / "from_its_config")
    assert (tmp_path / "from_its_config" / "channel_mask.safetensors").is_file()

    (checkpoint.folder / "channel_mask.safetensors").unlink()
    before = json.loads(json.dumps(model.config.leank))
    with pytest.raises(ValueError, match=r"^`channel_mask.safetensors`, .* is no longer in .*: put it back"):
        model.save_pretrained(tmp_path / "third")
    assert not (tmp_path / "third").exists() and model.config.leank == before
    assert torch.equal(model.generate(**batch(), **GREEDY), expected)


def test_two_checkpoints_live_in_one_process(converted, load):
    """Each loads its own copy of the code over one registry, and the last one's attention is in its table.

    Another family, another mask; the first has attention sinks, the second has none.
    """
    one = converted("gpt_oss", WIDTHS, name="one")
    two = converted("qwen3", [[0, 5], [8, 8]], name="two", seed=3)
    first = load(one.folder)
    alone = first.generate(**batch(), **GREEDY)
    second = load(two.folder)
    assert type(first).__module__ != type(second).__module__
    other = second.generate(**batch(), **GREEDY)
    caches = [None, None]
    for turn in range(3):
        for index, model in enumerate((first, second)):
            with torch.no_grad():
                ids = batch()["input_ids"][:1] if turn == 0 else torch.tensor([[5]])
                caches[index] = model(ids, cache=caches[index])[CACHE]
    assert [cache.get_seq_length() for cache in caches] == [25, 25]
    assert first.generate(**batch(), **GREEDY).tolist() == alone.tolist()
    third = load(one.folder)
    assert third.generate(**batch(), **GREEDY).tolist() == alone.tolist()
    assert second.generate(**batch(), **GREEDY).tolist() == other.tolist()
    dense = AutoModelForCausalLM.from_pretrained(one.source).eval()
    assert dense.generate(**batch(), **GREEDY).shape == (2, 39)
