"""What every part of the configuration shares, and the error that the user can fix."""

import errno
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all configuration sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class UserError(Exception):
    """Something that the user can put right: a command prints it as one line and exits with code 2.

    The message says what was wrong, where, and what would be right.
    """


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; UserError for a file that holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, but must be an object, {{...}}")
    return found


def visible(text: str) -> str:
    """Text for a terminal or a page: control characters as symbols, so that they do nothing there.

    An escape sequence could change a terminal's title, colours or even its contents, and a page
    with a NUL is not HTML. Line feeds, tabs and the carriage return before a line feed stay.
    """
    return CONTROL.sub(lambda found: chr(SYMBOLS.get(ord(found[0]), 0xFFFD)), text)


CONTROL = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
SYMBOLS = {i: 0x2400 + i for i in range(0x20)} | {0x7F: 0x2421}  # of Unicode; C1 has none


# What is wrong with a path or a disk, not with the code.
DISK = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENOSPC, errno.EDQUOT, errno.ELOOP,
)  # fmt: skip


def command(main: Callable[..., int]) -> Callable[..., int]:
    """A command's main(argv), which returns its exit code; a UserError is one line and 2, and so
    is a path that cannot be read or written."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> int:
        try:
            code = main(*args, **kwargs)
            sys.stdout.flush()
            return code
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        except BrokenPipeError:  # the reader has gone, as in `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            if error.errno not in DISK:
                raise
            print(f"error: {error.filename or 'the disk'}: {error.strerror}", file=sys.stderr)
        return 2

    return run
