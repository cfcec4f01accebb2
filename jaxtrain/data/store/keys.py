"""Cache keys of prepared data: hashes of everything that it depends on."""

import hashlib
import json
from pathlib import Path
from typing import Any

from jaxtrain.data.batches.mixture import sources_of
from jaxtrain.data.chat.template import read_template
from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.sources import ChatTemplateSource, Source, content_hash
from jaxtrain.data.filters.filtering import filter_key
from jaxtrain.data.store import store as stores
from jaxtrain.data.tokenizer.tokenizer import build_tokenizer

RULES = 2  # version of the reading of conversations: older stores are not reused
IDS = 2  # version of the encoding by sentencepiece models


def entry_key(config: DataConfig, cache: Path) -> str:
    """Hash of everything that the stores depend on: contents, reading, splits and tokenizer."""
    settings = config.model_dump(include={"train", "validation", "tokenizer"})
    settings["format"] = stores.FORMAT
    if config.tokenizer.name == "sentencepiece":
        settings["ids"] = IDS
    assert config.train.name != "mixture", "`prepare` takes a mixture apart"
    settings["train"] |= _contents(config.train, cache)
    if config.validation.name == "source":
        settings["validation"]["source"] |= _contents(config.validation.source, cache)
    if settings["tokenizer"].get("path"):
        settings["tokenizer"] = build_tokenizer(config.tokenizer, ()).fingerprint
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def request_key(config: DataConfig, cache: Path) -> str:
    """Hash of everything that the result of `prepare` depends on: contents and processing."""
    settings = config.model_dump(include={"validation", "tokenizer"})
    settings |= {"format": stores.FORMAT, "ids": IDS, "name": config.train.name}
    named: dict[str, Source] = dict(sources_of(config.train))
    if config.train.name == "mixture":
        settings["filters"] = [filter.model_dump() for filter in config.train.filters]
        settings["first"] = config.train.first
    if config.validation.name == "source":
        named["validation: source"] = config.validation.source
        del settings["validation"]["source"]
    settings["sources"] = {
        name: [
            source.model_dump() | _contents(source, cache),
            filter_key(source, cache) if source.filters else None,
        ]
        for name, source in named.items()
    }
    if settings["tokenizer"].get("path"):
        settings["tokenizer"] = build_tokenizer(config.tokenizer, ()).fingerprint
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def _contents(source: Source, cache: Path) -> dict[str, Any]:
    """The fields of a source, with hashes of files in place of their names."""
    fields: dict[str, Any] = {"path": content_hash(source, cache)}
    if isinstance(
        source, ChatTemplateSource
    ):  # the length of a row is not known when a store is written
        fields |= {"template": read_template(source.template), "rules": RULES}
        fields |= {"too_long": None, "refused": None}
    return fields
