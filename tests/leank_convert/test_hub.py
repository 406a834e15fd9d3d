import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import filter_repo_objects

from leank_convert.checkpoint_io import DIGESTS_NAME
from leank_convert.errors import LeanKError
from leank_convert.hub import (
    check_repo_id,
    hide_local_paths,
    hub_name,
    model_name,
    name_in_config,
    push_to_hub,
)


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "leank" / "plots").mkdir(parents=True)
    for name in ("model.safetensors", "leank/state.pt", "leank/plots/a.png", "modeling_leank.py"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"leank": {}}')
    return tmp_path


class FakeHub:
    def __init__(self, error=None):
        self.error = error
        self.repositories = {}
        self.uploaded = set()

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        self.repositories[repo_id] = private
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, ignore_patterns, commit_message):
        assert repo_id in self.repositories and commit_message
        if self.error is not None:
            raise self.error
        names = [
            str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()
        ]
        self.uploaded = {
            *filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        }


@pytest.mark.parametrize("private", [False, True])
def test_a_checkpoint_is_uploaded_without_its_training_run(private, checkpoint, monkeypatch):
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    assert push_to_hub(checkpoint, "me/model", private=private) == "https://huggingface.co/me/model"
    assert hub.repositories == {"me/model": private}
    assert hub.uploaded == {"config.json", "model.safetensors", "modeling_leank.py"}


@pytest.mark.parametrize(
    ("noted", "expected"),
    [("owner/a-model", "owner/a-model"), ("/home/me/model", None), ("model", None), (7, None)],
)
def test_a_folder_may_name_its_model_in_its_config(noted, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": noted}))
    assert name_in_config(tmp_path) == expected
    assert name_in_config(tmp_path / "absent") is None
    assert hub_name(tmp_path) is None
    assert hub_name("owner/other") == "owner/other"


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
        ("source: '/home/me/my text.txt'", (), "source: '.../my text.txt'"),
        ("# --set data.haystack.source=~/me/text.txt", (), "# --set data.haystack.source=.../text.txt"),
        ("[../a/b, './c d/e', file:///f/g]", (), "[.../b, '.../e', .../g]"),
        ("source: my texts/a b.txt", ("my texts/a b.txt",), "source: .../a b.txt"),
        ("id: tests/leank_convert", ("tests/leank_convert",), "id: .../leank_convert"),
        ("id: owner/model", ("owner/model", None), "id: owner/model"),
        ("# https://a.b/c/d and/or 1/2", (), "# https://a.b/c/d and/or 1/2"),
    ],
)
def test_of_local_paths_the_last_part_is_left(text, named, hidden, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    assert hide_local_paths(text, named) == hide_local_paths(hidden) == hidden


def test_files_of_the_users_beside_a_checkpoint_are_not_uploaded(checkpoint, monkeypatch):
    listed = ["config.json", "model.safetensors", "odd[1].json"]
    (checkpoint / "odd[1].json").touch()
    digests = {"format_version": 1, "files": dict.fromkeys(listed, "")}
    (checkpoint / DIGESTS_NAME).write_text(json.dumps(digests))
    (checkpoint / "notes.txt").write_text("private")
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    push_to_hub(checkpoint, "me/model")
    assert hub.uploaded == {*listed, DIGESTS_NAME}


def http_error():
    response = SimpleNamespace(headers={}, request=None)
    return HfHubHTTPError("403 Forbidden\nRequest ID: x", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(), "uploading to `me/model` failed: 403 Forbidden$"),
        (HfHubHTTPError.__bases__[0]("no route"), "uploading to `me/model` failed: no route$"),
        (ConnectionError("no route"), "uploading to `me/model` failed: no route$"),
        (LocalTokenNotFoundError(), "not logged in"),
        (HFValidationError("bad"), "not a valid name of a hub repository"),
    ],
)
def test_what_the_hub_refuses_is_told(error, message, checkpoint, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: FakeHub(error))
    with pytest.raises(LeanKError, match=message):
        push_to_hub(checkpoint, "me/model")


def test_only_checkpoints_of_ours_are_uploaded(checkpoint, monkeypatch):
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(LeanKError, match="is not a LeanK checkpoint"):
        push_to_hub(checkpoint, "me/model")
    assert hub.repositories == {}


@pytest.mark.parametrize("name", ["me/mo del", "me/a--b", "me/model.git", "a/b/c", "", "/model"])
def test_names_the_hub_would_refuse_are_known_before(name):
    check_repo_id("me/model-1.5_b")
    with pytest.raises(LeanKError, match="is not a valid name of a hub repository") as caught:
        check_repo_id(name)
    assert "owner/name" in str(caught.value.hint)
