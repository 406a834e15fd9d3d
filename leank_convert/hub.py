"""Hugging Face hub: models and masks by their id, downloads, uploads, and its errors in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path

from leank_convert.checkpoint_io import (
    ADAPTER_FOLDER,
    ADAPTER_NAME,
    ADAPTER_WEIGHTS_NAME,
    CONFIG_NAME,
    DIGESTS_NAME,
    DOWNLOADED_PATTERNS,
    GGUF_HINT,
    NEVER_DOWNLOADED_PATTERNS,
    TRAINING_FOLDER,
    read_leank_config,
)
from leank_convert.digests import read_digests
from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.files import read_json, user_path

TESTBED = "testbed"
# In quotes up to the closing one, else up to white space or what ends a value.
_LOCAL_PATH = re.compile(
    r"""(?<![\w./~-])(?<!:(?=//))(?:file://)?"""
    r"""(?:(['"])((?:~|\.{1,2})?/(?:(?!\1)[^\n])+)|((?:~|\.{1,2})?/[^\s'"`,;)\]}]+))"""
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model(model: str | Path) -> Path:
    """Turn a model's local folder, hub id (downloaded to the hub's cache) or `testbed` into a local folder.

    Raises:
        LeanKError: If there is no such folder, or the hub does not give the model.
    """
    folder = user_path(model)
    if folder.is_dir():
        return folder
    if folder.exists():
        hint = GGUF_HINT if folder.suffix == ".gguf" else "name the folder that holds config.json"
        raise LeanKError(f"model `{model}` is a file", hint=hint)
    if str(model) == TESTBED:
        from leank_convert.testbed import MODEL_DIR

        return Path(MODEL_DIR)
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise LeanKError(f"model folder `{model}` does not exist")
    return _download(model)


@cache
def _download(model: str) -> Path:
    """Download a model, once a process: what is committed meanwhile would be another model's weights."""
    from huggingface_hub import snapshot_download

    with _hub_errors(model):
        return Path(
            snapshot_download(
                model,
                allow_patterns=list(DOWNLOADED_PATTERNS),
                ignore_patterns=list(NEVER_DOWNLOADED_PATTERNS),
            )
        )


def model_name(model: str | Path) -> str:
    """The name under which artifacts remember a model: its hub id, or its folder's name without the path."""
    return hub_name(model) or user_path(model).resolve().parts[-1]


def hub_name(model: str | Path) -> str | None:
    """What the hub calls a model, or `testbed`; None of a folder outside the hub's cache."""
    folder = user_path(model)
    if not folder.is_dir():
        return str(model)
    *_, repository, snapshots, commit = ("", "", *folder.resolve().parts)
    # No owner's name has two dashes in a row, unlike names of models.
    name = repository.removeprefix("models--").replace("--", "/", 1)
    in_cache = snapshots == "snapshots" and name != repository and _COMMIT.fullmatch(commit) is not None
    return name if in_cache and _HUB_ID.fullmatch(name) else None


def name_in_config(folder: Path) -> str | None:
    """The hub id that transformers left in a model folder's config.json; None if it holds none.

    It is that of the model which was loaded before this one was saved: training changes weights, not the id.
    """
    with suppress(LeanKError):
        noted = read_json(folder / CONFIG_NAME).get("_name_or_path")
        return noted if is_repository(noted) else None
    return None


def known_name(model: str | Path) -> str | None:
    """What the hub calls a model, else what a folder's config.json says; None where neither is known."""
    return hub_name(model) or name_in_config(user_path(model))


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/name` of a repository on the hub."""
    return "/" in name and _HUB_ID.fullmatch(name) is not None


def is_repository(name: object) -> bool:
    """Whether something is a name `owner/name` that the hub would take."""
    if not isinstance(name, str) or not is_hub_id(name):
        return False
    with suppress(LeanKError):
        check_repo_id(name)
        return True
    return False


def check_base_model(name: str | None) -> None:
    """Check what a user says that a model is called on the hub; LeanKError if it cannot be."""
    if name is not None and not is_repository(name):
        raise LeanKError(
            f"base model {cut(name)} is not a valid name of a hub repository",
            hint="use `owner/name`, as on the hub",
        )


def hide_local_paths(text: str, named: Collection[str | None] = ()) -> str:
    """Leave of every local path in a text `.../` and its last part, as what is passed on is read elsewhere.

    What is `named` may be a path, or the id of something on the hub; others are found by how they begin.
    """
    for name in named:
        # Unlike `Path.exists`, it takes a name that is too long.
        if name and "/" in name and (os.path.exists(name) or not is_hub_id(name)):  # noqa: PTH110
            text = text.replace(name, f".../{Path(name).name}")
    return _LOCAL_PATH.sub(lambda found: f"{found[1] or ''}.../{Path(found[2] or found[3]).name}", text)


def download_file(repo_id: str, name: str) -> Path:
    """Download one file of a repository to the hub's cache; LeanKError if the hub does not give it."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(repo_id):
        return Path(hf_hub_download(repo_id, name))


def push_to_hub(path: str | Path, repo_id: str, *, private: bool = False, adapter: bool = False) -> str:
    """Upload a checkpoint to `owner/name`, without what else lies beside it, and return the address.

    Args:
        path: The checkpoint's folder.
        repo_id: The repository, made if it does not exist.
        private: Whether one that is made is private; if not, the owner's default holds.
        adapter: Whether the adapter that `export` converted beside the checkpoint is uploaded, too; one that
            was uploaded before goes.

    Raises:
        LeanKError: If `path` is no LeanK checkpoint, the repository holds another model or is public where
            `private` is asked for, or the hub refuses.
    """
    from huggingface_hub import HfApi

    folder = user_path(path)
    check_repo_id(repo_id)
    read_leank_config(folder)
    own = stale = None  # without a list, all of it
    if (folder / DIGESTS_NAME).exists():
        beside = [f"{ADAPTER_FOLDER}/{name}" for name in (ADAPTER_NAME, ADAPTER_WEIGHTS_NAME)]
        own = [escape(name) for name in (*read_digests(folder), DIGESTS_NAME, *(beside if adapter else ()))]
        # Of an upload before: transformers reads one file of weights rather than a list of several.
        stale = ["model*.safetensors*", "*_leank.py", f"{ADAPTER_FOLDER}/adapter_*"]
    api = HfApi()
    with _hub_errors(repo_id, uploads=True):
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise LeanKError(
                f"`{repo_id}` is there, and public", hint="name another, or make it private first"
            )
        if api.file_exists(repo_id, CONFIG_NAME):
            held = read_json(Path(api.hf_hub_download(repo_id, CONFIG_NAME)))
            if "leank" not in held:
                raise LeanKError(f"`{repo_id}` holds another model already", hint="name another repository")
        api.upload_folder(
            repo_id=repo_id,
            folder_path=str(folder),
            allow_patterns=own,
            delete_patterns=stale,
            ignore_patterns=[f"{TRAINING_FOLDER}/**"],
            commit_message="Upload a LeanK checkpoint",
        )
    return str(address)


def check_repo_id(repo_id: str) -> None:
    """Check a repository's name without asking the hub; raises LeanKError."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # a lazy export

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise LeanKError(
            f"`{repo_id}` is not a valid name of a hub repository", hint="use `owner/name`"
        ) from error


@contextmanager
def _hub_errors(repo_id: str, *, uploads: bool = False) -> Iterator[None]:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    # The base error of the HTTP client that the installed huggingface_hub is built on: no connection, say.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except HFValidationError as error:
        raise LeanKError(
            f"`{repo_id}` is no folder here, and no name of a hub repository", hint=first_line(error)
        ) from error
    except LocalTokenNotFoundError as error:
        raise LeanKError("not logged in to the hub", hint="run `hf auth login`") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, transport_error, OSError) as error:
        reason = first_line(error)
        hint: str | None = None
        message = f"`{repo_id}` is not here, and the hub fails: {reason}"
        if uploads:
            message = f"uploading to `{repo_id}` failed: {reason}"
            hint = "check the name, and that `hf auth login` gave a token that may write"
        elif isinstance(error, GatedRepoError):
            message = f"`{repo_id}` is gated on the hub"
            hint = f"accept its terms at https://huggingface.co/{repo_id}, then run `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError):
            message = f"`{repo_id}` is neither here nor on the hub"
            hint = "a private repository needs `hf auth login`"
        elif isinstance(error, RemoteEntryNotFoundError):
            message = f"`{repo_id}` on the hub lacks a file: {reason}"
        raise LeanKError(message, hint=hint) from error
