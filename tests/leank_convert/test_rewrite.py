"""A checkpoint of an earlier release, written anew: what a fresh export of its source would be."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.mask import ChannelMask
from leank_convert.rewrite import rewrite_checkpoint
from leank_convert.verify import verify_checkpoint

YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("family", "shards", "overrides"),
    [*((family, True, {}) for family in ("llama", "mistral", "qwen2", "qwen3")), ("llama", False, YARN)],
)
@pytest.mark.parametrize("format_version", [1, 2])
def test_what_is_written_anew_is_a_fresh_export(
    format_version: int,
    family: str,
    shards: bool,
    overrides: dict[str, Any],
    source_model: Callable[..., Path],
    fitting_mask: Callable[[Path], ChannelMask],
    as_format_1: Callable[[Path], Path],
    snapshot: Callable[[Path], dict[str, str]],
    tmp_path: Path,
) -> None:
    source = source_model(family, shards=shards, head_dim=6)
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    options: dict[str, Any] = {"sink_size": 4, "recent_size": 5, "flush_size": 6, "prune": "deferred"}
    options["base_model"] = "owner/model"
    fresh = export_checkpoint(
        source, fitting_mask(source), tmp_path / "fresh", config_overrides=overrides, **options
    )
    old = tmp_path / "old"
    export_checkpoint(source, fitting_mask(source), old, config_overrides=overrides, **options)
    if format_version == 1:
        as_format_1(old)
    new = rewrite_checkpoint(old, tmp_path / "new")
    report = verify_checkpoint(new, source)
    assert report.ok, [check for check in report.checks if not check.ok]
    if format_version == 2:
        assert snapshot(new) == snapshot(fresh)
        return
    # What was overridden is not known: that alone differs.
    assert read_json(new / "config.json")["leank"]["config_overrides"] is None
    expected, found = snapshot(fresh), snapshot(new)
    for name in ("config.json", "leank_digests.json"):
        del expected[name], found[name]
    for file in fresh.glob("model*.safetensors"):
        tensors, others = load_file(file), load_file(new / file.name)
        assert tensors.keys() == others.keys()
        assert all(tensor.equal(others[name]) for name, tensor in tensors.items())
        del expected[file.name], found[file.name]
    assert found == expected


def test_a_checkpoint_that_does_not_verify_is_not_written_anew(
    source_model: Callable[..., Path],
    fitting_mask: Callable[[Path], ChannelMask],
    as_format_1: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    source, out = source_model(), tmp_path / "new"
    old = as_format_1(export_checkpoint(source, fitting_mask(source), tmp_path / "old"))
    (old / "channel_mask.safetensors").write_bytes(b"another")
    message = f"`{old}` does not verify: digest of channel_mask.safetensors: "
    with pytest.raises(LeanKError, match=re.escape(message)):
        rewrite_checkpoint(old, out)
    assert not out.exists()
    for model, message in ((source, "is not a LeanK checkpoint"), (tmp_path / "no", "does not exist")):
        with pytest.raises(LeanKError, match=message):
            rewrite_checkpoint(model, out)


def test_the_command_takes_a_checkpoint_in_place_of_a_model(
    source_model: Callable[..., Path], fitting_mask: Callable[[Path], ChannelMask], tmp_path: Path
) -> None:
    source = source_model()
    old = export_checkpoint(source, fitting_mask(source), tmp_path / "old")

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(main, ["export", "-o", str(tmp_path / "new"), *map(str, arguments)])

    for arguments, message in (
        ((), "name MODEL, or a checkpoint by --from-checkpoint"),
        ((source, "--from-checkpoint", old), "--from-checkpoint excludes MODEL"),
        (("--from-checkpoint", old, "--prune", "eager"), "--from-checkpoint excludes --prune"),
        (("--from-checkpoint", old, "--format", "onnx"), "--from-checkpoint excludes --format"),
        (("--from-checkpoint", old, "--set", "windows.sink_size=1"), "--from-checkpoint excludes --set"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr
        assert not (tmp_path / "new").exists()
    written = run("--from-checkpoint", old)
    assert (written.exit_code, written.stdout) == (0, f"{tmp_path / 'new'}\n"), written.output
    assert "already holds a checkpoint" in run("--from-checkpoint", old).stderr
    assert run("--from-checkpoint", old, "--overwrite").exit_code == 0
    assert json.loads((tmp_path / "new" / "config.json").read_text())["leank"]["format_version"] == 2
