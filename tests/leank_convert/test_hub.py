import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from leank_convert.checkpoint_io import DIGESTS_NAME
from leank_convert.hub import check_repo_id, hide_local_paths, model_name, push_to_hub, resolve_model
from tests.checks import refusal


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "leank" / "plots").mkdir(parents=True)
    for name in ("model.safetensors", "leank/state.pt", "leank/plots/a.png", "modeling_leank.py"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"leank": {}}')
    return tmp_path


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub's API; `uploaded` are the files that it was sent, `held` those that it has."""
    hub = Mock(uploaded=set(), held=set(), is_private=True, config=None)
    hub.repo_info.side_effect = lambda repo_id: SimpleNamespace(private=hub.is_private)
    hub.file_exists.side_effect = lambda repo_id, name: hub.config is not None
    hub.hf_hub_download.side_effect = lambda repo_id, name: hub.config
    hub.create_repo.side_effect = lambda repo_id, **_: f"https://huggingface.co/{repo_id}"

    def upload(*, repo_id, folder_path, commit_message, delete_patterns, **patterns):
        files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        names = [str(path.relative_to(folder_path)) for path in files]
        hub.uploaded = set(filter_repo_objects(names, **patterns))
        hub.held = set(filter_repo_objects(hub.held, ignore_patterns=delete_patterns)) | hub.uploaded

    hub.upload_folder.side_effect = upload
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


@pytest.mark.parametrize("private", [False, True])
def test_a_checkpoint_is_uploaded_without_its_training_run(private, checkpoint, hub):
    assert push_to_hub(checkpoint, "me/model", private=private) == "https://huggingface.co/me/model"
    # Without a word of the user's, the owner's default holds.
    hub.create_repo.assert_called_once_with("me/model", private=private or None, exist_ok=True)
    sent = hub.upload_folder.call_args.kwargs
    assert sent["repo_id"] == "me/model" and sent["commit_message"]
    assert hub.uploaded == {"config.json", "model.safetensors", "modeling_leank.py"}


def test_a_snapshot_of_the_hubs_cache_is_known_by_its_id_and_a_folder_by_its_name(tmp_path):
    commit = "0123abcd" * 5
    folders = {
        f"models--owner--a-model/snapshots/{commit}": "owner/a-model",
        f"models--owner--a--model/snapshots/{commit}": "owner/a--model",
        f"models--gpt2/snapshots/{commit}": "gpt2",
        "models--owner--a-model/snapshots/mine": "mine",
        f"models--/snapshots/{commit}": commit,
        "snapshots/model": "model",
    }
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    assert {folder: model_name(tmp_path / folder) for folder in folders} == folders
    assert model_name(f"{tmp_path}/{next(iter(folders))}/") == "owner/a-model"
    assert [model_name(path) for path in ("/", "owner/model", "testbed")] == ["/", "owner/model", "testbed"]


@pytest.mark.parametrize(
    ("text", "named", "hidden"),
    [
        ("source: /home/me/text.txt # mine", (), "source: .../text.txt # mine"),
        ("# --set data.haystack.source=~/me/text.txt", (), "# --set data.haystack.source=.../text.txt"),
        ("source: my texts/a b.txt", ("my texts/a b.txt",), "source: .../a b.txt"),
        ("id: tests/leank_convert", ("tests/leank_convert",), "id: .../leank_convert"),
        ("id: owner/model", ("owner/model", None), "id: owner/model"),
        ("# https://a.b/c/d and/or 1/2", (), "# https://a.b/c/d and/or 1/2"),
    ],
)
def test_of_local_paths_the_last_part_is_left(text, named, hidden, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    assert hide_local_paths(text, named) == hide_local_paths(hidden) == hidden


def test_files_of_the_users_beside_a_checkpoint_are_not_uploaded_nor_what_is_none(checkpoint, hub):
    listed = ["config.json", "model.safetensors", "odd[1].json"]
    (checkpoint / "odd[1].json").touch()
    digests = {"format_version": 1, "files": dict.fromkeys(listed, "")}
    (checkpoint / DIGESTS_NAME).write_text(json.dumps(digests))
    (checkpoint / "notes.txt").write_text("private")
    adapter = {f"adapter/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")}
    (checkpoint / "adapter").mkdir()
    for name in (*adapter, "adapter/notes.txt"):
        (checkpoint / name).touch()
    theirs, stale = {"README.md", "notes.txt"}, {"model.safetensors.index.json", "kernel_fp8_leank.py"}
    hub.held = {*theirs, *stale, "model-00001-of-00002.safetensors", "adapter/adapter_model.safetensors"}
    push_to_hub(checkpoint, "me/model")
    assert hub.uploaded == {*listed, DIGESTS_NAME}
    assert hub.held == hub.uploaded | theirs
    push_to_hub(checkpoint, "me/model", adapter=True)
    assert hub.uploaded == {*listed, DIGESTS_NAME, *adapter}
    (checkpoint / "config.json").write_text("{}")
    with refusal("is not a LeanK checkpoint"):
        push_to_hub(checkpoint, "me/other")
    assert hub.create_repo.call_count == 2


def test_nothing_is_uploaded_over_another_model_or_where_all_can_read_what_is_private(
    checkpoint, hub, tmp_path
):
    hub.is_private, hub.config = False, str(tmp_path / "theirs.json")
    Path(hub.config).write_text('{"leank": {}}')
    with refusal("`me/model` is there, and public", "name another"):
        push_to_hub(checkpoint, "me/model", private=True)
    push_to_hub(checkpoint, "me/model")
    Path(hub.config).write_text('{"model_type": "llama"}')
    with refusal("`me/model` holds another model already", "name another repository"):
        push_to_hub(checkpoint, "me/model")
    assert hub.upload_folder.call_count == 1


def test_local_folders_are_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert resolve_model("some/model") == Path("some/model")
    assert resolve_model(tmp_path / "some") == tmp_path / "some"
    assert model_name("some/model") == "model"
    assert model_name("./some/") == "some"
    shipped = resolve_model("testbed")
    assert shipped.name == "model" and shipped.parent.name == model_name("testbed") == "testbed"
    (tmp_path / "testbed").mkdir()
    assert resolve_model("testbed") == Path("testbed")


WRONG = ["me/mo del", "me/a--b", "me/model.git", "a/b/c", "", "/model"]


@pytest.mark.parametrize(
    ("read", "name", "message", "hint"),
    [
        *((check_repo_id, name, "is not a valid name of a hub repository", "owner/name") for name in WRONG),
        (resolve_model, Path("owner/model"), "does not exist", ""),
        (resolve_model, "model.safetensors", "is a file", ""),
        *(
            (resolve_model, name, f"`{name}` is no folder here", "")
            for name in ("foo--bar", "owner/foo..bar")
        ),
    ],
)
def test_what_is_no_folder_and_no_name_of_the_hubs_is_not_asked_of_it(
    read, name, message, hint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    check_repo_id("me/model-1.5_b")
    with refusal(re.escape(message), hint):
        read(name)


def test_hub_ids_are_downloaded_without_pickles(tmp_path, monkeypatch):
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/model") == resolve_model("owner/model") == tmp_path
    download.assert_called_once()  # a commit meanwhile would be another model
    assert download.call_args.args == ("owner/model",)
    patterns = download.call_args.kwargs
    shards = ("model.safetensors", "model-00001-of-00002.safetensors")
    shards += ("model.safetensors-00001-of-00002.safetensors",)  # of Qwen3.5
    wanted = {*shards, "config.json", "model.safetensors.index.json", "tokenizer.json", "README.md"}
    others = {"pytorch_model.bin", "model.bin", "tokenizer.py", "consolidated.00.pth"}
    assert set(filter_repo_objects(wanted | others, **patterns)) == wanted


@pytest.mark.parametrize(
    ("uploads", "kind", "message"),
    [
        (False, errors.GatedRepoError, "`me/model` is gated on the hub"),
        (False, errors.RepositoryNotFoundError, "is neither here nor on the hub"),
        (False, errors.RemoteEntryNotFoundError, "on the hub lacks a file: refused$"),
        (False, errors.LocalEntryNotFoundError, "is not here, and the hub fails: no connection$"),
        (True, errors.HfHubHTTPError, "uploading to `me/model` failed: refused\n"),
        (True, ConnectionError, "uploading to `me/model` failed: no connection\n"),
        (True, errors.LocalTokenNotFoundError, "not logged in"),
    ],
)
def test_what_the_hub_refuses_is_told_in_a_line(uploads, kind, message, checkpoint, hub, monkeypatch):
    try:
        error = kind("refused\nand more", response=SimpleNamespace(headers={}, request=None))
    except TypeError:  # nothing that came from the hub
        error = kind("no connection\nand more")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    hub.upload_folder.side_effect = error
    with refusal(message):
        push_to_hub(checkpoint, "me/model") if uploads else resolve_model("me/model")
