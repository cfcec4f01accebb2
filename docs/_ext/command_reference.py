"""The directive `command-reference`: what `jaxtrain COMMAND --help` prints, for each command."""

import contextlib
import io
import os
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from jaxtrain import cli


def help_of(command: str) -> str:
    """The help of one command, 96 columns wide."""
    os.environ["COLUMNS"], out = "96", io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    text = out.getvalue()
    return text.partition("\nfields (a section with")[0].rstrip()  # they have a page of their own


class CommandReference(Directive):
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for command in cli.COMMANDS:
            section = nodes.section(ids=[f"jaxtrain-{command}"])
            section += nodes.title(text=f"jaxtrain {command}")
            section += nodes.literal_block(text=help_of(command), language="text")
            found.append(section)
        return found


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True}
