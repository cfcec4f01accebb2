"""Upload of a folder as a repository of huggingface.co (extra `hf`)."""

import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxtrain.settings import UserError

NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)  # OWNER/NAME


@runtime_checkable
class HubClient(Protocol):
    """The methods of `huggingface_hub.HfApi` that are used."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> object: ...
    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> object: ...


def open_hub(name: str) -> HubClient:
    """A logged-in client. Raises UserError for an invalid repository name or without a login.

    Called before a checkpoint is written, since writing may take long.
    """
    if not NAME.fullmatch(name) or ".." in name or "--" in name or name.endswith(".git"):
        raise UserError(f"--push-to-hub {name}: must be OWNER/NAME, such as me/my-model")
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise UserError(
            "--push-to-hub needs huggingface_hub: uv sync --extra hf, or install the wheel with "
            "[hf]"
        ) from None
    client = huggingface_hub.HfApi()
    try:
        client.whoami()
    except Exception as error:  # hub and network errors have no common base class
        raise UserError(
            f"--push-to-hub: the hub does not know you ({error_line(error)}): `hf auth login`, or "
            "set HF_TOKEN to a token that may write"
        ) from error
    return client


def upload(client: HubClient, folder: Path, name: str, public: bool) -> str:
    """Upload all files of a folder in one commit; returns the URL of the repository.

    A missing repository is created, private unless `public`. Raises UserError if the hub refuses.
    """
    try:
        client.create_repo(name, private=not public, exist_ok=True)
        client.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except Exception as error:
        raise UserError(
            f"the hub refuses {name}: {error_line(error)}; the checkpoint is complete in {folder}, "
            f"and `hf upload {name} {folder}` sends it"
        ) from error
    return f"https://huggingface.co/{name}"


def error_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
