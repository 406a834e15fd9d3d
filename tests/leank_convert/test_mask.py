import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.errors import LeanKError
from leank_convert.mask import (
    ChannelMask,
    MaskProvenance,
    all_channels_mask,
    check_mask_fits,
    load_mask,
    resolve_mask,
    save_mask,
)

REAL_MASKS = Path(__file__).parents[3] / "shared" / "masks"


def facts(**changes: Any) -> ModelFacts:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 96,
    }
    return read_model_facts({**config, **changes}, origin="config.json")


def provenance(**changes: Any) -> MaskProvenance:
    given: dict[str, Any] = {
        "method": "leank",
        "sink_size": 0,
        "recent_size": 64,
        "flush_size": 16,
        "pruning_ratio_asked": 0.7,
        "width_multiple": 4,
        "recipe": 'steps: 2\n# ümlaut "quoted"\n',
        "seed": 0,
    }
    return MaskProvenance.for_model("a/b", facts(), **{**given, **changes})


def test_a_saved_mask_is_read_back_whole(tmp_path: Path, ragged_mask: Callable[..., torch.Tensor]) -> None:
    mask = ChannelMask(ragged_mask(), torch.rand(3, 4, 12), provenance())
    save_mask(mask, tmp_path / "m.safetensors")
    read = load_mask(tmp_path / "m.safetensors")
    assert read.channel_mask.equal(mask.channel_mask)
    assert mask.scaling_factors is not None and read.scaling_factors is not None
    assert read.scaling_factors.equal(mask.scaling_factors)
    assert read.provenance == mask.provenance
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_unknown_facts_stay_unknown(tmp_path: Path, ragged_mask: Callable[..., torch.Tensor]) -> None:
    imported = provenance(pruning_ratio_asked=None, width_multiple=None, recipe=None, seed=None)
    save_mask(ChannelMask(ragged_mask(), None, imported), tmp_path / "m.safetensors")
    assert load_mask(tmp_path / "m.safetensors").provenance == imported
    save_mask(ChannelMask(ragged_mask()), tmp_path / "bare.safetensors")
    assert load_mask(tmp_path / "bare.safetensors").provenance is None


def test_the_file_is_safetensors_with_the_facts_in_its_metadata(
    tmp_path: Path, ragged_mask: Callable[..., torch.Tensor]
) -> None:
    mask = ragged_mask()
    save_mask(ChannelMask(mask, torch.zeros(3, 4, 12), provenance()), tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.get_tensor("channel_mask").equal(mask)
        assert file.get_tensor("scaling_factors").dtype == torch.float32
        metadata = file.metadata()
    assert metadata["format"] == "leank-mask"
    assert metadata["format_version"] == "1"
    assert metadata["pruning_ratio_asked"] == "0.7"
    assert float(metadata["pruning_ratio"]) == pytest.approx(1 - mask.float().mean().item())
    assert metadata["recipe"] == provenance().recipe


def test_equal_masks_give_equal_bytes(tmp_path: Path, ragged_mask: Callable[..., torch.Tensor]) -> None:
    for name in ("a", "b"):
        save_mask(ChannelMask(ragged_mask(), None, provenance()), tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_failed_write_leaves_the_old_file(
    step: str, tmp_path: Path, ragged_mask: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_mask(ChannelMask(ragged_mask()), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, fail)
    with pytest.raises(LeanKError, match=r"cannot write mask `.*m.safetensors`: No space left"):
        save_mask(ChannelMask(ragged_mask(seed=1)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def write(path: Path, values: torch.Tensor) -> Path:
    if path.suffix == ".safetensors":
        save_file({"anything": values.contiguous()}, path)
    elif path.suffix == ".npy":
        np.save(path, values.numpy())
    else:
        torch.save(values, path)
    return path


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".npy", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.int64, torch.uint8])
def test_plain_tensors_are_imported(
    tmp_path: Path, ragged_mask: Callable[..., torch.Tensor], suffix: str, dtype: torch.dtype
) -> None:
    mask = ragged_mask()
    read = load_mask(write(tmp_path / f"m{suffix}", mask.to(dtype)))
    assert read.channel_mask.dtype == torch.bool
    assert read.channel_mask.equal(mask)
    assert read.provenance is None and read.scaling_factors is None


@pytest.mark.parametrize("suffix", [".pth", ".npy", ".safetensors"])
@pytest.mark.parametrize("value", [0.5, -1.0, 2.0, float("nan"), 1.0000001])
def test_other_values_are_refused_with_their_place(tmp_path: Path, suffix: str, value: float) -> None:
    values = torch.ones(2, 3, 4, dtype=torch.float64)
    values[1, 2, 3] = value
    with pytest.raises(LeanKError, match=re.escape(f"value {value} at [1, 2, 3] is not 0 or 1")):
        load_mask(write(tmp_path / f"m{suffix}", values))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 2, 3, 4), (2, 0, 4)])
def test_other_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(LeanKError, match=re.escape(f"shape {list(shape)}")):
        load_mask(write(tmp_path / "m.npy", torch.ones(shape)))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@pytest.mark.parametrize(
    "content",
    [
        {"mask": torch.ones(1, 2, 3)},
        [torch.ones(1)],
        Evil(),
    ],
    ids=["dict", "list", "code"],
)
def test_pickles_of_anything_else_are_refused(
    tmp_path: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.pth"
    torch.save(content, path)
    with pytest.raises(LeanKError, match=r"m\.pth` .*not .*one plain tensor"):
        load_mask(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["m.pth", "m.pt", "m.npy", "m.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\0\1garbage" * 9], ids=["empty", "garbage"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LeanKError, match=re.escape(name)):
        load_mask(tmp_path / name)


def test_missing_unknown_and_ambiguous_files(tmp_path: Path) -> None:
    with pytest.raises(LeanKError, match="does not exist"):
        load_mask(tmp_path / "m.pth")
    with pytest.raises(LeanKError, match="is a folder"):
        load_mask(tmp_path)
    (tmp_path / "m.txt").touch()
    with pytest.raises(LeanKError, match=r"unknown file type `\.txt`"):
        load_mask(tmp_path / "m.txt")
    save_file({"a": torch.ones(1, 2, 3), "b": torch.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(LeanKError, match="holds 2 tensors"):
        load_mask(tmp_path / "m.safetensors")
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(LeanKError, match="not an array of numbers"):
        load_mask(tmp_path / "o.npy")


def test_a_mask_is_named_by_file_folder_or_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def download(repo_id: str, name: str) -> str:
        asked.append((repo_id, name))
        return str(tmp_path / "cached")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert resolve_mask("runs/one") == Path("runs/one/channel_mask.safetensors")
    assert resolve_mask("owner/missing.pth") == Path("owner/missing.pth")
    assert resolve_mask("missing") == Path("missing")
    assert resolve_mask(tmp_path / "no" / "such" / "thing") == tmp_path / "no" / "such" / "thing"
    assert asked == []
    assert resolve_mask("owner/Qwen2.5-7B-LeanK") == tmp_path / "cached"
    assert asked == [("owner/Qwen2.5-7B-LeanK", "channel_mask.safetensors")]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    metadata = {"format": "leank-mask", "format_version": "2"}
    save_file({"channel_mask": torch.ones(1, 2, 3, dtype=torch.bool)}, tmp_path / "m.safetensors", metadata)
    with pytest.raises(LeanKError, match="format version 2"):
        load_mask(tmp_path / "m.safetensors")


def test_widths_and_ratio_of_any_mask() -> None:
    mask = torch.zeros(2, 3, 5, dtype=torch.bool)
    mask[0, 1] = True
    mask[1, 2, :2] = True
    assert ChannelMask(mask).widths == ((0, 5, 0), (0, 0, 2))
    assert ChannelMask(mask).pruning_ratio == pytest.approx(1 - 7 / 30)
    assert all_channels_mask(facts()).pruning_ratio == 0
    assert all_channels_mask(facts()).widths == ((12,) * 4,) * 3


@pytest.mark.parametrize(
    ("mask", "factors"),
    [
        (torch.ones(1, 2, 3), None),
        (torch.ones(2, 3, dtype=torch.bool), None),
        (torch.ones(1, 2, 3, dtype=torch.bool), torch.ones(1, 2, 4)),
        (torch.ones(1, 2, 3, dtype=torch.bool), torch.ones(1, 2, 3, dtype=torch.float64)),
    ],
)
def test_a_mask_is_bool_and_its_factors_float32(mask: torch.Tensor, factors: torch.Tensor | None) -> None:
    with pytest.raises(LeanKError, match=r"got (float|bool)"):
        ChannelMask(mask, factors)


def check(mask: ChannelMask, model: ModelFacts) -> None:
    check_mask_fits(mask, model, mask_origin="m.pth", model_origin="some/model")


def test_a_mask_of_another_model_is_refused(ragged_mask: Callable[..., torch.Tensor]) -> None:
    mask = ChannelMask(ragged_mask(), None, provenance())
    check(mask, facts())
    with pytest.raises(LeanKError, match=re.escape("[3, 4, 12]; model `some/model` needs [2, 4, 12]")):
        check(mask, facts(num_hidden_layers=2))
    with pytest.raises(LeanKError, match="`model_type` llama; model `some/model` has qwen2"):
        check(mask, facts(model_type="qwen2"))
    with pytest.raises(LeanKError, match="`num_attention_heads` 8; model `some/model` has 16"):
        check(mask, facts(num_attention_heads=16, head_dim=12))
    check(ChannelMask(ragged_mask()), facts(model_type="qwen2"))


def test_a_mask_trained_under_another_rope_is_refused_with_both(
    ragged_mask: Callable[..., torch.Tensor],
) -> None:
    mask = ChannelMask(ragged_mask(), None, provenance())
    with pytest.raises(LeanKError) as caught:
        check(mask, facts(rope_theta=1e6))
    assert '"rope_theta": 10000.0' in str(caught.value)
    assert '"rope_theta": 1000000.0' in str(caught.value)
    assert "--recipe" in str(caught.value.hint) and "inspect m.pth" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "shape", "ratio", "empty"),
    [
        ("llama-3.1-8b-instruct.pth", (32, 8, 128), 0.6875, 47),
        ("qwen2.5-7b-instruct.pth", (28, 4, 128), 0.7098, 35),
    ],
)
def test_real_masks_are_imported(name: str, shape: tuple[int, ...], ratio: float, empty: int) -> None:
    if not (REAL_MASKS / name).exists():
        pytest.skip("the real masks are not here")
    mask = load_mask(REAL_MASKS / name)
    assert mask.channel_mask.shape == shape
    assert mask.pruning_ratio == pytest.approx(ratio, abs=1e-4)
    assert sum(width == 0 for layer in mask.widths for width in layer) == empty


def test_a_damaged_array_is_refused_whatever_byte_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "m.npy"
    np.save(path, np.ones((2, 2, 4), dtype=bool))
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content) - 16, 2):
        for byte in (b"\0", b"(", b"9", b"\xff"):
            path.write_bytes(content[:position] + byte + content[position + 1 :])
            try:
                load_mask(path)
            except LeanKError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused > 40
