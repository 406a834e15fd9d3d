"""Upload a checkpoint to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from leank_convert.checkpoint_io import first_line, read_leank_config
from leank_convert.errors import LeanKError
from leank_convert.export.publish import TRAINING_FOLDER


def push_to_hub(path: str | Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a checkpoint, without the training run that may lie beside it.

    Args:
        path: The checkpoint's folder.
        repo_id: `owner/name` on the hub; made if it does not exist.
        private: Whether a repository that is made is private.

    Returns:
        The repository's address.

    Raises:
        LeanKError: If `path` is no LeanK checkpoint, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    read_leank_config(Path(path))
    # The base error of the HTTP client that the installed huggingface_hub is built on: no connection, say.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=str(path),
            ignore_patterns=[f"{TRAINING_FOLDER}/**"],
            commit_message="Upload a LeanK checkpoint",
        )
    except HFValidationError as error:
        raise _bad_repo_id(repo_id) from error
    except LocalTokenNotFoundError as error:
        raise LeanKError("not logged in to the hub", hint="run `hf auth login`") from error
    except (HfHubHTTPError, transport_error, OSError) as error:
        raise LeanKError(
            f"uploading to `{repo_id}` failed: {first_line(error)}",
            hint="check the name, and that `hf auth login` gave a token that may write",
        ) from error
    return str(address)


def check_repo_id(repo_id: str) -> None:
    """Check a repository's name without asking the hub.

    Raises:
        LeanKError: If it cannot be one.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # a lazy export

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise _bad_repo_id(repo_id) from error


def _bad_repo_id(repo_id: str) -> LeanKError:
    return LeanKError(f"`{repo_id}` is no name of a hub repository", hint="use `owner/name`")
