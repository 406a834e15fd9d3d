"""Files of the user's in an output folder, when an export replaces what it wrote there."""

import hashlib
import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from leank_convert.checkpoint_io import DIGESTS_NAME
from leank_convert.export import export_checkpoint, foreign
from leank_convert.export.publish import check_replaceable, staged_folder
from leank_convert.files import read_json
from leank_convert.verify import verify_checkpoint
from tests.checks import edit_json, fitting_mask, refusal


def digest_of(content):
    return hashlib.sha256(content.encode()).hexdigest()


@pytest.fixture
def old(out):
    """A checkpoint of three shards in `out`, with a list of its files."""
    out.mkdir()
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": dict(zip("abc", shards, strict=True))}
    files = {
        "config.json": json.dumps({"leank": {"files": {"modeling_leank.py": ""}}}),
        "model.safetensors.index.json": json.dumps(index),
        **dict.fromkeys((*shards, "modeling_leank.py", "tokenizer.json", "README.md"), "old"),
    }
    digests = {name: digest_of(content) for name, content in files.items()}
    files[DIGESTS_NAME] = json.dumps({"format_version": 1, "files": digests})
    for name, content in files.items():
        (out / name).write_text(content)
    return out


def replace(out):
    with staged_folder(out, overwrite=True) as partial:
        (partial / "config.json").write_text('{"leank": "new"}')
        (partial / "model.safetensors").write_text("new")
        (partial / DIGESTS_NAME).write_text(json.dumps({"files": {"model.safetensors": digest_of("new")}}))
    return {path.relative_to(out).as_posix() for path in out.rglob("*")} - {DIGESTS_NAME}


def test_what_the_user_put_there_stays_and_the_old_export_goes(old):
    (old / "plots" / "empty").mkdir(parents=True)
    (old / "plots" / "config.json").write_text("mine")
    (old / "plots").chmod(0o750)
    (old / "notes.txt").write_text("mine")
    (old / "nowhere").symlink_to("../gone")
    (old / "all").symlink_to("plots")
    os.mkfifo(old / "pipe")
    kept = {"plots", "plots/empty", "plots/config.json", "notes.txt", "nowhere", "all", "pipe"}
    assert replace(old) == {"config.json", "model.safetensors", *kept}
    assert (old / "plots" / "config.json").read_text() == "mine"
    assert stat.S_IMODE((old / "plots").stat().st_mode) == 0o750
    assert [(old / name).readlink() for name in ("nowhere", "all")] == [Path("../gone"), Path("plots")]
    assert replace(old) == {"config.json", "model.safetensors", *kept}


@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "custom_generate/generate.py", "lora.safetensors", "tokenizer.model"],
)
def test_what_a_loader_would_take_up_is_refused_by_name(old, name):
    (old / name).parent.mkdir(exist_ok=True)
    (old / name).write_text("mine")
    with refusal(rf"`.*/{name}` would count as part of a checkpoint", "move it elsewhere"):
        check_replaceable(old, overwrite=True)


def test_old_weights_are_read_once_a_command_unless_they_change(old, monkeypatch):
    hashed = Mock(wraps=foreign.sha256_of)
    monkeypatch.setattr(foreign, "sha256_of", hashed)
    for _ in range(2):
        check_replaceable(old, overwrite=True)
    assert len({call.args for call in hashed.call_args_list}) == len(hashed.call_args_list) == 8
    (old / "tokenizer.json").write_text("new")
    with refusal("`.*/tokenizer.json` is not what the export wrote"):
        check_replaceable(old, overwrite=True)


def test_a_run_without_a_checkpoint_keeps_what_lies_beside_it(out):
    (out / "leank").mkdir(parents=True)
    for name in ("leank/recipe.yaml", "notes.txt", "README.md"):
        (out / name).write_text("mine")
    with refusal(r"README.md` would count as part"):
        check_replaceable(out, overwrite=False)
    (out / "README.md").unlink()
    assert replace(out) == {"config.json", "model.safetensors", "leank", "leank/recipe.yaml", "notes.txt"}


def test_what_a_list_of_files_names_elsewhere_is_left_alone(old, tmp_path):
    """The list is the old checkpoint's, which may be anybody's."""
    mine = tmp_path / "mine"
    mine.mkdir()
    named = [tmp_path / "beside.txt", mine / "x.json", tmp_path / "absolute.txt"]
    for path in named:
        path.write_text("mine")
    (old / "linked").symlink_to(mine)
    (old / "folder").mkdir()
    outside = ("../beside.txt", "a/../../beside.txt", str(named[2]))
    listed = dict.fromkeys((*outside, "linked/x.json", "folder", "."), "")
    edit_json(old / DIGESTS_NAME, files=read_json(old / DIGESTS_NAME)["files"] | listed)
    assert replace(old) == {"config.json", "model.safetensors", "linked", "folder"}
    assert [path.read_text() for path in named] == ["mine"] * 3


@pytest.mark.parametrize("is_link", [True, False])
def test_nothing_is_written_where_a_link_or_a_file_of_the_users_stands_for_a_folder(is_link, old, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if is_link:
        (old / "chat_templates").symlink_to(elsewhere)
    else:
        (old / "chat_templates").write_text("mine")
    with (
        refusal("chat_templates` would count as part"),
        staged_folder(old, overwrite=True) as partial,
    ):
        (partial / "chat_templates").mkdir()
        (partial / "chat_templates" / "rag.jinja").write_text("the model's")
    assert not any(elsewhere.iterdir())
    assert json.loads((old / "config.json").read_text())["leank"]["files"]


@pytest.mark.parametrize("name", ["tokenizer.json", "my_results.json"])
def test_what_is_not_as_the_export_wrote_it_is_not_lost(old, name):
    """A list of files is the folder's own word: a downloaded one may name a file of the user's."""
    edit_json(old / DIGESTS_NAME, files={name: "0" * 64, **read_json(old / DIGESTS_NAME)["files"]})
    (old / name).write_text("mine")
    with refusal(f"{name}` is not what the export wrote"):
        replace(old)
    assert (old / name).read_text() == "mine" and (old / "config.json").exists()
    (old / name).unlink()
    assert replace(old) == {"config.json", "model.safetensors"}


def test_an_export_of_today_is_replaced_by_another_and_keeps_notes_and_an_edited_card(
    source, source_model, out
):
    export_checkpoint(source, fitting_mask(source), out)
    (out / "notes.txt").write_text("mine")
    (out / "README.md").write_text("mine")
    single = source_model("qwen2", shards=False)
    with refusal(r"README.md` is not what the export wrote"):
        export_checkpoint(single, fitting_mask(single), out, overwrite=True)
    (out / "README.md").rename(out / "mine.md")
    export_checkpoint(single, fitting_mask(single), out, overwrite=True)
    assert (out / "notes.txt").read_text() == (out / "mine.md").read_text() == "mine"
    assert [path.name for path in out.glob("model*.safetensors")] == ["model.safetensors"]
    assert verify_checkpoint(out, single).ok
