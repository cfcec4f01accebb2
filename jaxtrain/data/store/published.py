"""Entries of the cache of prepared data at a URL: a tokenizer and the stores of its splits.

URL/data/KEY is an entry; its `entry.json` is written last and marks it as complete. The note
URL/data/REQUEST.json lists the entries of a configuration, so that another host neither filters nor
tokenizes the text again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data.config import DataConfig
from jaxtrain.data.store.cache import cache_directory
from jaxtrain.data.store.progress import Progress
from jaxtrain.data.store.remote_store import open_remote, publish_store
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_whole
from jaxtrain.storage.objects import RemoteFolder

WHOLE = "entry.json"


def is_published(remote: RemoteFolder) -> bool:
    """Whether an entry is complete."""
    return remote.size(WHOLE) is not None


def publish_entry(
    remote: RemoteFolder, tokenizer: Path, splits: Mapping[str, TokenStore], progress: Progress
) -> None:
    """Uploads a tokenizer and stores of this machine as the entry at a URL."""
    files = {path.name: path.read_bytes() for path in sorted(tokenizer.iterdir())}
    for name, data in files.items():
        remote.write(f"tokenizer/{name}", data)
    for split, store in splits.items():
        publish_store(store, remote.below(split), progress)
    note = {"tokenizer": list(files), "splits": list(splits)}
    remote.write(WHOLE, json.dumps(note).encode())


def fetch_tokenizer(remote: RemoteFolder, directory: Path) -> None:
    """Downloads the tokenizer of an entry to this machine, if it is not there."""
    if directory.is_dir():
        return
    partial = directory.with_name(f"{directory.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name in json.loads(_there(remote, WHOLE))["tokenizer"]:
        write_whole(partial / name, _there(remote, f"tokenizer/{name}"))
    partial.rename(directory)


def open_published(remote: RemoteFolder, config: DataConfig, tokenizer: str) -> TokenStore:
    """Open a store of an entry, to be read through the local cache of a configuration."""
    folder = cache_directory(config).parent
    return open_remote(remote, folder, config.local_cache.max_bytes, tokenizer)


def read_note(remote: RemoteFolder, request: str) -> dict[str, Any] | None:
    """Read the note that `write_note` wrote for a request; None if there is none."""
    text = remote.read(f"{request}.json")
    return None if text is None else json.loads(text)


def write_note(
    remote: RemoteFolder,
    request: str,
    train: Mapping[str, TokenStore],
    validation: TokenStore | None,
    filters: Mapping[str, Any],
) -> None:
    """Writes the note of a request: its stores, and what its filters removed."""
    stores = {name: _names(remote, store)[0] for name, store in train.items()}
    validation_names = [] if validation is None else _names(remote, validation)
    note = {"train": stores, "validation": validation_names, "filters": filters}
    remote.write(f"{request}.json", json.dumps(note).encode())


def _names(remote: RemoteFolder, store: TokenStore) -> Sequence[str]:
    return [url.removeprefix(f"{remote.url}/") for url in store.records.urls]


def _there(remote: RemoteFolder, name: str) -> bytes:
    data = remote.read(name)
    if data is None:
        raise UserError(
            f"{remote.url}/{name} is missing; delete {remote.url} to have it prepared again"
        )
    return data
