import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import DIGESTS_NAME, INDEX_NAME
from leank_convert.digests import write_digests
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.mask import ChannelMask, all_channels_mask, load_mask, save_mask
from leank_convert.verify import Check, verify_checkpoint
from tests.tiny_families import OPTIONS

LAYER = "model.layers.1.self_attn."


@pytest.fixture
def export(
    source_model: Callable[..., Path], ragged_mask: Callable[..., torch.Tensor], tmp_path: Path
) -> Callable[..., tuple[Path, Path]]:
    def build(family: str = "llama", **options: Any) -> tuple[Path, Path]:
        source = source_model(family, **options)
        facts = read_model_facts(read_json(source / "config.json"), origin="config.json")
        mask = ragged_mask(facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim)
        return source, export_checkpoint(source, ChannelMask(mask), tmp_path / "out")

    return build


def failed(out: Path, source: Path | None = None) -> dict[str, str]:
    report = verify_checkpoint(out, source)
    assert report.ok == all(check.ok for check in report.checks)
    return {check.name: check.detail for check in report.checks if not check.ok}


def bless(out: Path) -> None:
    """Bring the list of digests up to date, so that what lies behind it is looked at alone."""
    (out / DIGESTS_NAME).unlink()
    write_digests(out, {})


def shard_with(folder: Path, tensor: str) -> Path:
    if not (folder / INDEX_NAME).exists():
        return folder / "model.safetensors"
    return folder / read_json(folder / INDEX_NAME)["weight_map"][tensor]


def change(folder: Path, tensor: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = shard_with(folder, tensor)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    tensors[tensor] = edit(tensors[tensor]).contiguous()
    save_file(tensors, file, metadata)
    bless(folder)


def change_leank(folder: Path, **changes: Any) -> None:
    config = read_json(folder / "config.json")
    config["leank"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    bless(folder)


@pytest.mark.parametrize(
    ("family", "shards"),
    [*((family, True) for family in ("llama", "mistral", "qwen2", "qwen3")), ("llama", False)],
)
def test_an_export_verifies_against_its_source(
    family: str, shards: bool, export: Callable[..., tuple[Path, Path]]
) -> None:
    source, out = export(family, shards=shards)
    report = verify_checkpoint(out, str(source))
    assert report.ok, failed(out, source)
    names = [check.name for check in report.checks]
    num_files = sum(path.is_file() for path in out.rglob("*")) - 1  # but the list itself
    assert Check("digests", True, f"{num_files} of {num_files} files as {DIGESTS_NAME} says") in report.checks
    assert sum(name.startswith("source: model") for name in names) == len(list(source.glob("*.safetensors")))
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert not [check for check in verify_checkpoint(out).checks if check.name.startswith("source")]


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_one_wrong_number_is_found(projection: str, export: Callable[..., tuple[Path, Path]]) -> None:
    source, out = export(hidden_size=8, intermediate_size=8, head_dim=2, num_hidden_layers=2)
    assert failed(out, source) == {}
    name = f"{LAYER}{projection}.weight"

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        tensor[-1, -1] += 1e-3
        return tensor

    change(out, name, nudge)
    (detail,) = failed(out, source).values()
    assert detail == f"tensor `{name}` is not the permutation of its source"
    assert failed(out) == {}


@pytest.mark.parametrize("name", [LAYER + "q_proj.bias", LAYER + "k_proj.weight"])
def test_heads_in_the_sources_order_are_found(name: str, export: Callable[..., tuple[Path, Path]]) -> None:
    source, out = export()
    original = load_file(shard_with(source, name))[name]
    change(out, name, lambda _: original)
    assert [*failed(out, source).values()] == [f"tensor `{name}` is not the permutation of its source"]


@pytest.mark.parametrize("name", ["lm_head.weight", LAYER + "o_proj.bias"])
def test_a_changed_tensor_that_should_have_stayed_is_found(
    name: str, export: Callable[..., tuple[Path, Path]]
) -> None:
    source, out = export()
    change(out, name, lambda tensor: tensor.neg())
    assert [*failed(out, source).values()] == [f"tensor `{name}` differs from its source"]


def test_another_source_is_found(
    export: Callable[..., tuple[Path, Path]], source_model: Callable[..., Path]
) -> None:
    _, out = export("llama")
    assert "source: tensors" in failed(out, source_model("qwen2"))
    assert "source: tensors" in failed(out, source_model("llama", dtype="bfloat16"))


# Of whose folders transformers makes an empty tokenizer, of a class that it has for them.
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "qwen3_next"])
def test_a_model_without_a_tokenizer_verifies(
    family: str, source_model: Callable[..., Path], tmp_path: Path
) -> None:
    options = {"head_dim": 4, "num_hidden_layers": 4, "pad_token_id": 0, **OPTIONS[family]}
    source = source_model(family, **options)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    facts = read_model_facts(read_json(source / "config.json"), origin="config.json")
    out = export_checkpoint(source, all_channels_mask(facts), tmp_path / "out")
    assert failed(out, source) == {}
    for key, value in (("tokenizer_class", "Qwen2Tokenizer"), ("eos_token", "x")):
        (out / "tokenizer_config.json").write_text(json.dumps({key: value}))
        bless(out)
        assert failed(out, source).keys() == {"source: companions"}
        assert f"`{key}` is {value!r}" in failed(out, source)["source: companions"]
    (out / "tokenizer_config.json").unlink()
    (out / "tokenizer.json").write_text("{}")
    bless(out)
    assert "is not in both folders" in failed(out, source)["source: companions"]


def test_changed_missing_and_added_files_are_found(export: Callable[..., tuple[Path, Path]]) -> None:
    _, out = export()
    (out / "modeling_leank.py").write_text("import os\n")
    (out / "cache_leank.py").unlink()
    details = failed(out)
    assert details.keys() == {"digest of modeling_leank.py", "digest of cache_leank.py"}
    assert "was changed: its SHA-256" in details["digest of modeling_leank.py"]
    assert "is missing" in details["digest of cache_leank.py"]


def test_a_digest_cannot_point_outside(export: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    _, out = export()
    (tmp_path / "secret").touch()
    digests = read_json(out / DIGESTS_NAME)
    digests["files"]["../secret"] = "0"
    (out / DIGESTS_NAME).write_text(json.dumps(digests))
    assert "is missing" in failed(out)["digest of ../secret"]


def test_damaged_weights_are_found(export: Callable[..., tuple[Path, Path]]) -> None:
    _, out = export()
    file = shard_with(out, LAYER + "q_proj.weight")
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated or damaged" in failed(out)["headers and index"]
    file.unlink()
    assert "is missing" in failed(out)["headers and index"]


def test_an_index_that_does_not_fit_is_found(
    export: Callable[..., tuple[Path, Path]], edit_json: Callable[..., None]
) -> None:
    _, out = export()
    index = read_json(out / INDEX_NAME)
    edit_json(out / INDEX_NAME, metadata={"total_size": 5})
    assert "`total_size` is 5" in failed(out)["headers and index"]
    weight_map = {name: file for name, file in index["weight_map"].items() if "layernorm" not in name}
    edit_json(out / INDEX_NAME, metadata=index["metadata"], weight_map=weight_map)
    assert "does not name tensor" in failed(out)["headers and index"]


def rotate(rows: list[list[int]]) -> list[list[int]]:
    return [rows[0], [*rows[1][1:], rows[1][0]], *rows[2:]]


@pytest.mark.parametrize(
    ("key", "edit", "message"),
    [
        ("widths", rotate, "`leank.channel_masks[1]` keeps"),
        ("widths", lambda rows: rows[:-1], "not 3 rows, one for each pruned layer"),
        ("widths", lambda rows: [[-1, *rows[0][1:]], *rows[1:]], "`leank.widths[0][0]` is -1, not in 0"),
        ("head_permutation", lambda rows: [[0, 0, 1, 2], *rows[1:]], "[0, 0, 1, 2], not a permutation"),
        ("pruning_ratio", lambda _: 0.25, "`leank.pruning_ratio` is 0.25"),
        ("format_version", lambda _: 3, "`leank.format_version` is 3, these runtime files read 1"),
        ("format_version", lambda _: True, "`leank.format_version` is True"),
        ("sink_size", lambda _: -1, "`leank.sink_size` is -1"),
        (
            "config_overrides",
            lambda _: [],
            "`leank.config_overrides` is []: Input should be a valid",
        ),
        ("extra", lambda _: 1, "has key 'extra', which format 1 does not know"),
        ("z" * 10**4, lambda _: 1, "has key 'zzz"),
        ("files", lambda _: None, "does not name `channel_mask.safetensors`"),
    ],
)
def test_a_leank_block_that_contradicts_itself_is_found(
    key: str,
    edit: Callable[[Any], Any],
    message: str,
    export: Callable[..., tuple[Path, Path]],
) -> None:
    _, out = export()
    before = read_json(out / "config.json")["leank"]
    change_leank(out, **{key: edit(before.get(key))})
    assert message in failed(out)["config"] and len(failed(out)["config"]) < 600


def test_names_that_no_file_can_have_are_found(export: Callable[..., tuple[Path, Path]]) -> None:
    _, out = export()
    digests = read_json(out / DIGESTS_NAME)
    digests["files"] |= {"z" * 10**4: "0", "a\0": "1"}
    (out / DIGESTS_NAME).write_text(json.dumps(digests))
    found = [text for key, text in failed(out).items() if key.startswith("digest of")]
    assert len(found) == 2 and all(len(text) < 300 for text in found)


def test_an_unstable_permutation_is_found(
    source_model: Callable[..., Path], ragged_mask: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    mask = ragged_mask()
    mask[:, 1] = mask[:, 0]
    out = export_checkpoint(source_model(), ChannelMask(mask), tmp_path / "out")
    rows = read_json(out / "config.json")["leank"]["head_permutation"]
    swapped = [[{0: 1, 1: 0}.get(head, head) for head in row] for row in rows]
    change_leank(out, head_permutation=swapped)
    assert "not stable within a bucket" in failed(out)["config"]


def flip(rows: list[str]) -> list[str]:
    """Keep another channel of every head that keeps some but not all, where the 4 last bits are padding."""
    heads = [rows[1][start : start + 4] for start in range(0, len(rows[1]), 4)]
    return [rows[0], "".join(f"{int(f'{int(head, 16):016b}'[11::-1], 2):03x}0" for head in heads), *rows[2:]]


@pytest.mark.parametrize(
    ("edit", "check", "message"),
    [
        (flip, "mask file", "layer 1 keeps other channels than the checkpoint's layer"),
        (lambda rows: rows[::-1], "config", "`leank.channel_masks[0]` keeps ["),
        (lambda rows: rows[:-1], "config", "is not a list of 3 strings"),
        (
            lambda rows: [*rows[:2], rows[2][:-1] + "1"],
            "config",
            "keeps channels beyond the 12 of a head",
        ),
        (lambda rows: [rows[0][:-1], *rows[1:]], "config", "`leank.channel_masks[0]` is not"),
        (lambda rows: [rows[0], "x" * len(rows[1]), rows[2]], "config", "not 16 hex digits"),
        (lambda _: 7, "config", "is not a list of 3 strings"),
    ],
)
def test_masks_that_contradict_each_other_are_found(
    edit: Callable[[Any], Any], check: str, message: str, export: Callable[..., tuple[Path, Path]]
) -> None:
    _, out = export()
    change_leank(out, channel_masks=edit(read_json(out / "config.json")["leank"]["channel_masks"]))
    details = failed(out)
    assert details.keys() == {check}
    assert message in details[check]


def test_another_mask_file_is_found(export: Callable[..., tuple[Path, Path]]) -> None:
    _, out = export()
    path = out / "channel_mask.safetensors"
    mask = load_mask(path)
    save_mask(ChannelMask(mask.channel_mask.flip(0), None, mask.provenance), path)
    assert failed(out).keys() == {"digest of channel_mask.safetensors", "mask file"}
    bless(out)
    assert failed(out).keys() == {"list of digests", "digest of channel_mask.safetensors", "mask file"}


def test_metadata_of_another_export_is_found(export: Callable[..., tuple[Path, Path]]) -> None:
    _, out = export()
    change_leank(out, sink_size=7)
    assert failed(out).keys() == {"header metadata"}


def test_a_model_that_is_no_checkpoint_of_ours_is_an_error(
    source_model: Callable[..., Path], export: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    _, out = export()
    with pytest.raises(LeanKError, match="is not a LeanK checkpoint"):
        verify_checkpoint(source_model())
    with pytest.raises(LeanKError, match=re.escape("has no `config.json`")):
        verify_checkpoint(tmp_path)
    with pytest.raises(LeanKError, match="does not exist"):
        verify_checkpoint(out, tmp_path / "missing")
