"""From the data configuration to token stores on disk, skipping what the cache holds."""

import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from jaxtrain.data.config import DataConfig
from jaxtrain.data.sources import content_hash, cut_text, documents
from jaxtrain.data.store import TokenStore, open_store, write_store
from jaxtrain.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.settings import UserError

# (stage, UTF-8 bytes done, bytes in all or None if unknown)
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Prepared:
    """What training needs; `directory` holds the stores and the tokenizer."""

    train: TokenStore
    validation: TokenStore | None
    tokenizer: Tokenizer
    directory: Path


def prepare(config: DataConfig, *, progress: Progress = lambda *_: None) -> Prepared:
    """Trains or loads the tokenizer and tokenizes both splits, unless the cache has them.

    The cache is keyed by the content of the files and the settings that matter. A lock lets the
    processes of a machine share the work; an interrupted preparation goes on where it was.
    """
    cache = cache_directory(config)
    directory = cache / _key(config, cache)
    with _locked(directory):
        if not (directory / "tokenizer").is_dir():
            progress("tokenizer", 0, None)
            _save_tokenizer(build_tokenizer(config.tokenizer, _texts(config, "train")), directory)
        tokenizer = load_tokenizer(directory / "tokenizer")
        splits = ["train"] if config.validation.name == "none" else ["train", "validation"]
        for split in splits:
            if not (directory / split).is_dir():
                report = lambda done, split=split: progress(split, done, None)
                write_store(directory / split, _texts(config, split), tokenizer, report)
    stores = [open_store(directory / s, tokenizer=tokenizer.fingerprint) for s in splits]
    _check_vocabulary(config, stores[0])
    return Prepared(stores[0], stores[1] if len(stores) == 2 else None, tokenizer, directory)


def _check_vocabulary(config: DataConfig, train: TokenStore) -> None:
    """A trained vocabulary with more pieces than the text has tokens was learned by heart."""
    c = config.tokenizer
    if c.name == "sentencepiece" and c.path is None and train.tokens < train.vocab_size:
        raise UserError(
            f"data.tokenizer.vocab_size {c.vocab_size} is larger than the training text supports: "
            f"it makes {train.tokens} tokens; use at most {max(259, train.tokens // 10)}"
        )


def cache_directory(config: DataConfig) -> Path:
    """Where prepared data is kept."""
    default = os.environ.get("JAXTRAIN_CACHE", "~/.cache/jaxtrain")
    return Path(config.cache_dir or default).expanduser() / "data"


def _key(config: DataConfig, cache: Path) -> str:
    """A hash of all that decides the stores: contents, how they are read, split and tokenized."""
    settings = config.model_dump(include={"train", "validation", "tokenizer"})
    settings["train"]["path"] = content_hash(config.train, cache)
    if config.validation.name == "source":
        source = config.validation.source
        settings["validation"]["source"]["path"] = content_hash(source, cache)
    if settings["tokenizer"].get("path"):
        settings["tokenizer"]["path"] = build_tokenizer(config.tokenizer, ()).fingerprint
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def _texts(config: DataConfig, split: str) -> Iterator[str]:
    """The documents of a split. Raises UserError if the source cannot be split that way."""
    how = config.validation
    if how.name == "tail":
        return _tail_split(config, split, how.fraction)
    if how.name == "documents":
        limit = int(how.fraction * 2**64)
        return (t for t in documents(config.train) if (_hash(t) < limit) == (split == "validation"))
    if how.name == "source" and split == "validation":
        return documents(how.source)
    return documents(config.train)


def _tail_split(config: DataConfig, split: str, fraction: float) -> Iterator[str]:
    source = config.train
    if source.name != "text":
        raise UserError(
            f"data.validation tail needs a text source, not {source.name}; use documents"
        )
    files = list(islice(documents(source.model_copy(update={"document": "file"})), 2))
    if len(files) != 1:
        raise UserError(
            f"data.validation tail needs a single file, but {source.path} has more; use documents"
        )
    cut = int(len(files[0]) * (1 - fraction))
    text = files[0][:cut] if split == "train" else files[0][cut:]
    return cut_text(io.StringIO(text, newline="\n"), source.document)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    partial = directory / "tokenizer.partial"
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer.save(partial)
    partial.rename(directory / "tokenizer")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
