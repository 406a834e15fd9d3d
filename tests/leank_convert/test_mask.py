import dataclasses
import math
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leank_convert.mask import ChannelMask, check_mask_fits, load_mask, resolve_mask, save_mask
from tests.checks import changed, edit_tensors, llama_facts, provenance_for, ragged_mask, refusal, refused


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    save_mask(ChannelMask(ragged_mask()), path)
    before = path.read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", Mock(side_effect=OSError(28, "No space left on device")))
    with refusal(r"cannot write mask `.*m.safetensors`: No space left"):
        save_mask(ChannelMask(ragged_mask(seed=1)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


SUFFIXES = (".pth", ".pt", ".npy", ".safetensors")


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".safetensors":
        save_file(content if isinstance(content, dict) else {"anything": content.contiguous()}, path)
    elif path.suffix == ".npy":
        np.save(path, content, allow_pickle=True)
    else:
        torch.save(content, path)
    return path


class Evil:
    def __reduce__(self):
        return print, ("run",)


class Subclass(torch.Tensor):
    pass


NOT_PLAIN = "is not a pickle of one plain tensor"
SEVERAL = {"a": torch.ones(1, 2, 3), "b": torch.ones(1)}
ONES = torch.ones(2, 3, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.pth", changed(ONES, (1, 2, 3), 0.5), "value 0.5 at [1, 2, 3] is not 0 or 1"),
        ("m.safetensors", changed(ONES, (0, 2, 0), math.nan), "value nan at [0, 2, 0] is not 0 or 1"),
        ("m.pth", torch.ones(1).expand(10**4, 10**4, 10**4), "exceeds any model's: at most 4096 layers"),
        ("m.pth", ONES.to(torch.float8_e4m3fn), "has dtype float8_e4m3fn"),
        ("m.npy", np.ones((2, 3, 4), dtype=[("a", "f4")]), "is not an array of numbers"),
        ("m.safetensors", SEVERAL, "holds 2 tensors (`a`, `b`), not one"),
        ("m.pth", SEVERAL, NOT_PLAIN),
        ("m.pth", Evil(), NOT_PLAIN),
        ("m.pth", ONES.to_sparse(), NOT_PLAIN),
        ("m.pth", ONES.as_subclass(Subclass), NOT_PLAIN),
        *((f"m{suffix}", b"\0\1garbage" * 9, "m") for suffix in SUFFIXES),
        ("m.txt", b"", "unknown file type '.txt'"),
    ],
)
def test_what_is_no_mask_is_refused_in_a_sentence_and_nothing_of_it_runs(
    tmp_path, capsys, name, content, message
):
    refused(load_mask, write(tmp_path / name, content), message)
    assert capsys.readouterr().out == ""


def test_what_is_no_file_larger_than_any_mask_or_of_a_newer_format_is_refused(tmp_path):
    metadata = {"format": "leank-mask", "format_version": "2"}
    save_file({"channel_mask": torch.ones(1, 2, 3, dtype=torch.bool)}, tmp_path / "m.safetensors", metadata)
    refused(load_mask, tmp_path / "m.safetensors", "format version '2'")
    refused(load_mask, tmp_path / "m.pth", "does not exist")
    refused(load_mask, tmp_path, "is a folder")
    os.mkfifo(tmp_path / "pipe.npy")
    refused(load_mask, tmp_path / "pipe.npy", "is a device or a pipe")
    for name in ("large.npy", "large.pt"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2**28)
        refused(load_mask, tmp_path / name, "has 268435456 bytes; no mask has more than 150994944")


@pytest.mark.parametrize("name", ["m.pth", "m.npy"])
def test_a_file_that_may_not_be_read_is_not_called_malformed(tmp_path, monkeypatch, name):
    path, denied = write(tmp_path / name, ONES), Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(torch, "load", denied)
    monkeypatch.setattr(np, "load", denied)
    refused(load_mask, path, f"cannot read mask `{path}`: Permission denied")


def test_a_mask_is_named_by_file_folder_hub_id_or_packaged_name(tmp_path, monkeypatch):
    download = Mock(return_value=str(tmp_path / "cached"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert resolve_mask("runs/one") == Path("runs/one/channel_mask.safetensors")
    assert resolve_mask("owner/missing.pth") == Path("owner/missing.pth")
    assert resolve_mask(tmp_path / "no" / "such" / "thing") == tmp_path / "no" / "such" / "thing"
    assert resolve_mask("testbed-70").name == "testbed-70.safetensors"
    download.assert_not_called()
    assert resolve_mask("owner/Qwen2.5-7B-LeanK") == tmp_path / "cached"
    download.assert_called_once_with("owner/Qwen2.5-7B-LeanK", "channel_mask.safetensors")


@pytest.mark.parametrize(
    ("mask", "factors"),
    [
        (torch.ones(1, 2, 3), None),
        (torch.ones(1, 2, 3, dtype=torch.bool), torch.ones(1, 2, 4)),
        (torch.ones(1, 2, 3, dtype=torch.bool), torch.ones(1, 2, 3, dtype=torch.float64)),
        (torch.ones(1, 2, 3, dtype=torch.bool), torch.full((1, 2, 3), math.nan)),
    ],
)
def test_a_mask_is_bool_and_its_factors_finite_float32(mask, factors):
    with refusal(r"got (float|bool)|`scaling_factors` (is float|holds nan)"):
        ChannelMask(mask, factors)


def test_a_mask_of_another_model_is_refused():
    mask = ChannelMask(ragged_mask(), None, provenance_for(llama_facts()))
    origins = {"mask_origin": "m.pth", "model_origin": "a/model"}
    check_mask_fits(mask, llama_facts(), **origins)
    check_mask_fits(ChannelMask(ragged_mask()), llama_facts(model_type="qwen2"), **origins)
    for changes, message, *hints in (
        ({"num_hidden_layers": 2}, r"\[3, 4, 12\]; model `a/model` needs \[2, 4, 12\]"),
        ({"model_type": "qwen2"}, "`model_type` llama; model `a/model` has qwen2"),
        ({"num_attention_heads": 16, "head_dim": 12}, "`num_attention_heads` 8; model `a/model` has 16"),
        ({"rope_theta": 1e6}, '"rope_theta": 10000.0.*"rope_theta": 1000000.0', "--recipe", "inspect m.pth"),
    ):
        with refusal(message, *hints):
            check_mask_fits(mask, llama_facts(**changes), **origins)


def test_plain_tensors_however_stored_are_imported(tmp_path):
    mask, dtypes = ragged_mask(), (torch.bool, torch.float32, torch.int64, torch.float32)
    for name, tensor in (
        *((f"m{suffix}", mask.to(dtype)) for suffix, dtype in zip(SUFFIXES, dtypes, strict=True)),
        ("m.pth", torch.nn.Parameter(torch.ones(2, 3, 4))),
        ("m.pth", torch.ones(4).expand(2, 3, 4)),
        ("m.pth", torch.ones(8, 3, 4)[3:5]),
        ("m.pth", torch.ones(4, 3, 2).permute(2, 1, 0).to(torch.uint16)),
        ("m.pth", -torch.zeros(2, 3, 4)),
        ("m.npy", torch.from_numpy(np.asfortranarray(np.eye(4)[None].repeat(2, 0)))),
    ):
        read = load_mask(write(tmp_path / name, tensor))
        assert read.channel_mask.dtype == torch.bool and read.channel_mask.equal(tensor.detach() == 1)
        assert read.provenance is None and read.scaling_factors is None


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("num_hidden_layers", "-1", "`num_hidden_layers` is -1: Input should be greater than or equal to 1"),
        ("model", "x" * 10**5, "`model` is 'xx"),
        ("rope_parameters", '{"rope_type": "default", "rope_theta": "x"}', "`rope_theta` is 'x'"),
        ("rope_parameters", "[" * 10**5, "header metadata `rope_parameters` is '[["),
        ("pruning_ratio_asked", "1.5", "`pruning_ratio_asked` is 1.5"),
        ("held_out", "{}", "`held_out.tasks` is missing"),
        ("versions", '{"torch": 2}', "`versions.torch` is 2: Input should be a valid string"),
    ],
)
def test_provenance_that_makes_no_sense_is_refused_by_key(tmp_path, key, text, message):
    path = tmp_path / "m.safetensors"
    save_mask(ChannelMask(ragged_mask(), None, provenance_for(llama_facts())), path)
    edit_tensors(path, {key: text})
    refused(load_mask, path, message)


@pytest.mark.parametrize(
    ("model_type", "partial", "order"),
    [("llama", None, [0, 1, 2, 3, 4, 5, 6, 7]), ("glm4_moe", 0.5, [0, 1, 2, 3]), ("glm4", 0.5, [0, 2, 1, 3])],
)
def test_rotated_channels_lie_such_that_halves_are_pairs(model_type, partial, order):
    keys = {} if partial is None else {"partial_rotary_factor": partial}
    rope = {"rope_type": "default", "rope_theta": 1e4, **keys}
    known = dataclasses.replace(provenance_for(llama_facts()), model_type=model_type, rope_parameters=rope)
    mask = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(ChannelMask(mask, None, known).rotated_channels, mask[..., order])
    assert torch.equal(ChannelMask(mask).rotated_channels, mask)
