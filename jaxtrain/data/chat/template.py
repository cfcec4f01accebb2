"""Chat templates: messages -> text, with Jinja set up as in transformers."""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxtrain.data.chat.messages import BEGIN, END
from jaxtrain.data.files.sources import CHAT_TEMPLATE_SOURCES
from jaxtrain.data.records import Message, Tools
from jaxtrain.settings import UserError

Tree = dict[str, Any]  # a plain section of a configuration
Render = Callable[..., str]  # (messages, add_generation_prompt, tools=None) -> text


class TemplateRefused(UserError):
    """The chat template refuses a conversation."""


# For models without a template of their own: an answer ends with EOS.
DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' + message['role'] | capitalize + '\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n\\n' }}{% endfor %}"
    "{{ '### Assistant\\n' if add_generation_prompt }}"
)
MOST_MADE = 2**24  # limit on a template's * and **: characters, entries, or bits of a power
DATE = datetime(2024, 7, 26)  # fixed: with today's date a template's data would change every day


def read_template(given: str | None) -> str:
    """Return the Jinja text of a template given as text, as a file, or not at all (the default)."""
    if given is None or "{" in given:
        return given or DEFAULT_TEMPLATE
    if not Path(given).expanduser().is_file():
        raise UserError(f"template {given!r} is neither Jinja text nor a file")
    try:
        text = Path(given).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"template {given} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise UserError(f"template {given} is empty: it would render no conversation")
    return text


def make_render(template: str, special: dict[str, str]) -> Render:
    """Return the function that renders messages. special: tokens that the template names.

    Sandboxed, with transformers' filters, functions and generation blocks, whose output is put
    between BEGIN and END. Raises UserError for invalid Jinja. The function raises TemplateRefused
    for a conversation that the template refuses.
    """
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError(
            "chat templates need the package jinja2, of the extra hf: pip install jinja2, or "
            "uv sync --extra hf"
        ) from error

    class Generation(Extension):
        """{% generation %} blocks: the assistant's output."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    class Sandbox(ImmutableSandboxedEnvironment):
        """Sandbox that refuses products and powers that would fill the memory."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(x) if hasattr(x, "__len__") else x for x in (left, right)]
            if all(isinstance(size, int) for size in sizes):
                power = operator == "**" and abs(left) > 1
                size = right * left.bit_length() if power else sizes[0] * sizes[1]
                if abs(size) > MOST_MADE:
                    raise OverflowError(f"a {operator} makes more than {MOST_MADE:,}")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    if "strftime_now is defined" not in template:
        environment.globals["strftime_now"] = DATE.strftime
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template is not valid Jinja: {error}") from error
    except RecursionError:
        raise UserError("the chat template is not valid Jinja: it is nested too deep") from None

    def render(messages: Sequence[Message], begin: bool, tools: Tools = None) -> str:
        try:
            return compiled.render(
                messages=messages, add_generation_prompt=begin, tools=tools,
                documents=None, **special,
            )  # fmt: skip
        except Exception as error:  # a template computes: it may divide by zero, or call itself
            first = messages[0]["content"][:60] if messages else ""
            own = isinstance(error, jinja2.TemplateError)
            reason = str(error) if own else f"{type(error).__name__}: {error}"
            raise TemplateRefused(
                f"the chat template refuses the conversation that begins {first!r}: {reason}"
            ) from error

    return render


def apply_chat_defaults(tree: Tree) -> bool:
    """Fill in the defaults for conversations; returns whether the configuration trains on any.

    The defaults: conversations are packed whole, one document each, and some are held out. Values
    that the configuration sets take precedence. The text of a template file replaces its path, so
    that a run directory needs no other file.
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
    """Yield the chat and preference sources in a plain section of a configuration."""
    if isinstance(node, dict):
        if node.get("name") in CHAT_TEMPLATE_SOURCES:
            yield node
        for value in node.values():
            yield from chat_sources(value)
