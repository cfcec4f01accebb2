"""What every part of the configuration shares, and the error that the user can fix."""

import argparse
import errno
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """Base of all configuration sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, given: Any) -> Any:
        """Refuses what pydantic would take for something else (true for 1), or works nowhere."""
        for name, value in given.items() if isinstance(given, dict) else ():
            if (field := cls.model_fields.get(name)) and (reason := _fault(value, field)):
                raise PydanticCustomError(NOT_MEANT, "{why}", {"field": name, "why": reason})
        return given


def derived_field(
    description: str,
    ge: int | None = None,
    le: int | float | None = None,
    gt: int | float | None = None,
) -> Any:
    """A field that follows from others where it is left open (None); a resolved section has none
    that is open. Its type is a parameter of the section's class: `int | None`, resolved `int`."""
    return Field(None, description=description, ge=ge, le=le, gt=gt)


NOT_MEANT = "not_meant"  # the type of an error that says its field itself


def _fault(value: Any, field: FieldInfo) -> str | None:
    """What is wrong with a plain value of a field, whatever else it must be."""
    kinds = set(_leaves(field.annotation))
    if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):
        return None  # its own fields are looked at
    counts = not kinds.isdisjoint((int, float)) and bool not in kinds
    for one in _inside(value):
        if counts and isinstance(one, bool):
            return "it must be a number, not true or false"
        if type(one) is int and not -(2**63) <= one < 2**63:
            return "the number is beyond 64 bits"
        if isinstance(one, str) and not is_text(one):
            return "it has NUL in it, or what is no UTF-8"
    return None


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    parts = get_args(annotation)
    yield from (leaf for part in parts for leaf in _leaves(part)) if parts else (annotation,)


def _inside(value: Any) -> Iterator[Any]:
    """A plain value, or what its lists and sections hold, keys too."""
    if isinstance(value, (dict, list, tuple)):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        yield from (one for part in parts for one in _inside(part))
    else:
        yield value


def is_text(text: str) -> bool:
    """Whether a text can be a file's name and be written: no NUL, no half of a surrogate pair."""
    return not re.search("[\0\ud800-\udfff]", text)


class UserError(Exception):
    """Something that the user can put right: a command prints it as one line and exits with code 2.

    The message says what was wrong, where, and what would be right. Several arguments are several
    such lines.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


# ---- JSON --------------------------------------------------------------------------------------


Pairs = list[tuple[str, Any]]


def parse_json(
    text: str | bytes, where: str, object_of: Callable[[Pairs], Any] | None = None
) -> Any:
    """The value of a JSON text; UserError that begins with `where` for what is none.

    object_of: makes an object of its names and values, and may raise ValueError.
    """
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise UserError(f"{where} is not valid JSON: it is nested too deep") from None
    except ValueError as error:  # numbers of thousands of digits, and bytes that are not UTF-8, too
        raise UserError(f"{where} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; UserError for a file that holds none."""
    try:
        found = parse_json(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
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


# ---- commands ----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """The arguments of a command. What is wrong with them is a UserError: one line, not the usage
    as well."""

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[Any, list[str]]:
        for given in sys.argv[1:] if args is None else args:
            if not is_text(given):
                raise UserError(f"argument {given!r}: it has NUL in it, or what is no UTF-8")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


TINY = 1e-30  # the least number above 0 of an argument
SEEDS = 2**63 - 1


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` to `most`."""

    def read(text: str) -> int:
        if re.fullmatch(r"[-+]?[0-9]{1,20}", text) and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be a whole number from {least} to {most:,}"
        )

    return read


def real(least: float, words: str, most: float = math.inf) -> Callable[[str], float]:
    """The type of an argument that is a finite number, as `words` say, from `least` to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and least <= value <= most:
            return value
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number {words}")

    return read


# What is wrong with a path or a disk, not with the code.
DISK = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.EIO,
    errno.EBUSY, errno.ETXTBSY, errno.ENXIO,
)  # fmt: skip


MOST_SHOWN = 2000  # characters of a message


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
            for line in error.args or ("",):
                say_error(str(line))
        except BrokenPipeError:  # the reader has gone, as in `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            if error.errno not in DISK:
                raise
            say_error(f"{error.filename or 'the disk'}: {error.strerror}")
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = (str(error).splitlines() or ["a list is too long"])[0]
            say_error(f"out of memory ({reason}): make the model, the batch or the text smaller")
        return 2

    return run


def say_error(line: str) -> None:
    """Print it as one line, whatever names and values it quotes; without the password of a URL."""
    line = re.sub(r"://[^\s/@'\"]*:[^\s/@'\"]*@", "://...@", line)
    if len(line) > MOST_SHOWN:
        line = f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], line)
    print(f"error: {line}", file=sys.stderr)
