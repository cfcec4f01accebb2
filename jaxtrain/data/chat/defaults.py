"""Defaults of a configuration that trains on conversations."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.data.chat.template import read_template
from jaxtrain.data.files.sources import CHAT_TEMPLATE_SOURCES

Tree = dict[str, Any]


def apply_chat_defaults(tree: Tree) -> bool:
    """Fill a plain configuration in, if it trains on conversations; what it says itself wins.

    Returns whether it does.

    They are packed whole and apart, some are held out, and templates in files become part of the
    configuration, so that a run directory says all about its run.
    """
    data = tree.get("data")
    if not isinstance(data, dict):
        return False
    for source in chat_sources(data):
        if isinstance(source.get("template"), str):
            source["template"] = read_template(source["template"])
    if not any(chat_sources(data.get("train"))):
        return False
    for section, default in (("packing", "padded"), ("validation", "documents")):
        given = data.get(section, {})
        if isinstance(given, dict):
            data[section] = {"name": default} | given
    model = tree.get("model") or {}
    if isinstance(model, dict):
        tree["model"] = {"document_mask": True} | model
    return True


def chat_sources(node: object) -> Iterator[Tree]:
    """The sources of conversations in a plain section."""
    if isinstance(node, dict):
        if node.get("name") in CHAT_TEMPLATE_SOURCES:
            yield node
        for value in node.values():
            yield from chat_sources(value)
