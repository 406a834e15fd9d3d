"""The mean of keys in a mask file and in a checkpoint: written, read, checked, told."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.report.mask_report import write_report
from leank_convert.safetensors_file import read_header
from leank_convert.verify import verify_checkpoint
from tests.checks import edit_tensors, failed, fitting_mask, provenance_of, say_in_block

TOKENS = 4321


@pytest.fixture
def source(source_model):
    return source_model(head_dim=6)


@pytest.fixture
def mask(source):
    """A mask of the source with all that a mask can have."""
    known = provenance_of(source, key_mean_tokens=TOKENS)
    channels = fitting_mask(source).channel_mask
    generator = torch.Generator().manual_seed(1)
    factors = torch.rand(channels.shape, generator=generator)
    return ChannelMask(channels, factors, known, torch.randn(channels.shape, generator=generator).half())


@pytest.fixture
def checkpoint(source, mask, tmp_path):
    return export_checkpoint(source, mask, tmp_path / "out")


def mean_of(mask):
    assert mask.key_mean is not None
    return mask.key_mean


def test_it_is_read_back_whole_and_equal_masks_give_equal_bytes(mask, tmp_path):
    for name in ("a", "b"):
        save_mask(mask, tmp_path / f"{name}.safetensors")
    read = load_mask(tmp_path / "a.safetensors")
    assert mean_of(read).equal(mean_of(mask)) and mean_of(read).dtype == torch.float16
    assert read.provenance == mask.provenance and read.stores_alike(mask)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    header = read_header(tmp_path / "a.safetensors")
    assert {name: tensor.dtype for name, tensor in header.tensors.items()} == {
        "scaling_factors": "F32", "key_mean": "F16", "channel_mask": "BOOL"
    }  # fmt: skip
    save_mask(replace(mask, key_mean=None), tmp_path / "m.safetensors")
    header = read_header(tmp_path / "m.safetensors")
    assert "key_mean" not in header.tensors and "key_mean_tokens" not in header.metadata
    read = load_mask(tmp_path / "m.safetensors")
    assert read.key_mean is None and not read.stores_alike(mask) and not mask.stores_alike(read)


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        (torch.zeros(3, 4, 6), "`key_mean` is float32 [3, 4, 6], not float16 [3, 4, 6]"),
        (torch.zeros(3, 4, 7).half(), "`key_mean` is float16 [3, 4, 7], not float16 [3, 4, 6]"),
        (torch.full((3, 4, 6), torch.nan).half(), "`key_mean` holds nan at [0, 0, 0], no finite number"),
    ],
)
def test_what_is_no_mean_of_the_masks_keys_is_refused(mask, tmp_path, mean, message):
    path = tmp_path / "m.safetensors"
    save_mask(mask, path)
    edit_tensors(path, key_mean=mean)
    with pytest.raises(LeanKError, match=re.escape(f"mask `{path}`: {message}")) as caught:
        load_mask(path)
    assert caught.value.exit_code == 2
    with pytest.raises(LeanKError, match=re.escape(message)):
        ChannelMask(mask.channel_mask, key_mean=mean)


def test_a_mean_without_the_rope_that_it_holds_under_or_that_was_lost_is_refused(mask, tmp_path):
    path = tmp_path / "m.safetensors"
    message = re.escape(f"mask `{path}` has a tensor `key_mean` and no provenance")
    with pytest.raises(LeanKError, match=message):
        save_mask(replace(mask, provenance=None), path)
    save_mask(ChannelMask(mask.channel_mask), path)
    edit_tensors(path, key_mean=mask.key_mean)
    with pytest.raises(LeanKError, match=message):
        load_mask(path)
    save_mask(mask, path)
    edit_tensors(path, key_mean=None)
    with pytest.raises(LeanKError, match="has no tensor `key_mean`, and its header metadata says"):
        load_mask(path)


def test_a_checkpoint_carries_it_in_its_mask_file_and_says_so(source, mask, checkpoint, tmp_path):
    assert read_json(checkpoint / "config.json")["leank"]["key_mean"] is True
    assert mean_of(load_mask(checkpoint / MASK_FILE_NAME)).equal(mean_of(mask))
    report = verify_checkpoint(checkpoint, source)
    assert report.ok, failed(checkpoint)
    (detail,) = (check.detail for check in report.checks if check.name == "mask file")
    assert detail == "the same channels, in the original head order, and the mean of keys"
    plain = export_checkpoint(source, replace(mask, key_mean=None), tmp_path / "plain")
    assert "key_mean" not in read_json(plain / "config.json")["leank"]
    for shard in plain.glob("model*.safetensors"):
        assert load_file(shard).keys() == load_file(checkpoint / shard.name).keys()


def test_a_checkpoint_whose_parts_contradict_one_another_is_found(checkpoint):
    path = checkpoint / MASK_FILE_NAME
    whole = path.read_bytes()
    say = partial(say_in_block, checkpoint, "key_mean")
    assert "config.json has no `leank.key_mean`" in say(None)["mask file"]
    for value in (False, 1, "x", [True]):
        assert f"`leank.key_mean` is {value!r}, not true" in say(value)["config"]
    edit_tensors(path, key_mean=torch.full((3, 4, 6), torch.nan).half())
    assert "`key_mean` holds nan" in say(True)["mask file"]
    path.write_bytes(whole)
    known = load_mask(path).provenance
    assert known is not None
    save_mask(ChannelMask(load_mask(path).channel_mask, None, known), path)
    assert "config.json says `leank.key_mean`, and `" in say(True)["mask file"]


def test_it_is_told_by_inspect_card_and_report(mask, checkpoint, tmp_path):
    save_mask(mask, tmp_path / "m.safetensors")
    for path in (tmp_path / "m.safetensors", checkpoint):
        facts = inspect_artifact(path)
        assert facts["key_mean"] is True and facts["provenance"]["key_mean_tokens"] == TOKENS
        assert json.loads(json.dumps(facts)) == facts
        told = "cached less their mean over 4,321 tokens: a removed channel counts as its mean"
        assert told in " ".join(render_inspection(facts).split())
    save_mask(replace(mask, key_mean=None), tmp_path / "plain.safetensors")
    plain = inspect_artifact(tmp_path / "plain.safetensors")
    assert plain["key_mean"] is False and "cached less" not in render_inspection(plain)
    card = (checkpoint / "README.md").read_text()
    assert "\n| cached keys | less a constant, their mean over 4,321 tokens: a removed channel counts" in card
    assert "counts as its mean |\n\n## Bytes per cached token" in card
    write_report(mask, (), tmp_path / "report.html")
    assert "cached less their mean over 4,321 tokens" in (tmp_path / "report.html").read_text()


def test_a_run_keeps_its_own_mean(source, mask, tmp_path):
    """The same channels with another mean, or without, are another mask."""
    out = tmp_path / "run"
    out.mkdir()
    save_mask(mask, out / MASK_FILE_NAME)
    for other in (replace(mask, key_mean=None), replace(mask, key_mean=mean_of(mask) + 1)):
        with pytest.raises(LeanKError, match="is another mask than the one to export; it would be lost"):
            export_checkpoint(source, other, out)
    export_checkpoint(source, mask, out)
    assert failed(out) == {}
