"""Base class of all configuration sections, UserError, and helpers of the commands."""

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
        """Refuse values that pydantic would coerce (true to 1) or that work nowhere."""
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
    """A field that is derived from others if it is None; a resolved section has no None left. Its
    type is a parameter of the section's class: `int | None`, or `int` if resolved."""
    return Field(None, description=description, ge=ge, le=le, gt=gt)


NOT_MEANT = "not_meant"  # type of validation errors whose `ctx` names the field


def _fault(value: Any, field: FieldInfo) -> str | None:
    """Why a plain value is wrong for a field, before pydantic validates it; None if it is fine."""
    kinds = set(_leaves(field.annotation))
    if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):
        return None  # a section, whose own fields are checked
    counts = not kinds.isdisjoint((int, float)) and bool not in kinds
    for one in _inside(value):
        if counts and isinstance(one, bool):
            return "it must be a number, not true or false"
        if type(one) is int and not -(2**63) <= one < 2**63:
            return "the number is beyond 64 bits"
        if isinstance(one, str) and not is_text(one):
            return "it has a NUL character, or is not UTF-8"
    return None


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation is made of."""
    parts = get_args(annotation)
    yield from (leaf for part in parts for leaf in _leaves(part)) if parts else (annotation,)


def _inside(value: Any) -> Iterator[Any]:
    """Yield a plain value, or all values and keys nested in its lists and sections."""
    if isinstance(value, (dict, list, tuple)):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        yield from (one for part in parts for one in _inside(part))
    else:
        yield value


def is_text(text: str) -> bool:
    """Whether a string can be a file name and be encoded: no NUL, no unpaired surrogate."""
    return not re.search("[\0\ud800-\udfff]", text)


class UserError(Exception):
    """An error that the user can fix: a command prints it as one line and exits with code 2.

    The message says what is wrong, where, and what would be right. Each argument is one such line.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


# ---- JSON --------------------------------------------------------------------------------------


Pairs = list[tuple[str, Any]]


def parse_json(
    text: str | bytes, where: str, object_of: Callable[[Pairs], Any] | None = None
) -> Any:
    """Parse JSON. Raises UserError that begins with `where` for invalid JSON.

    object_of: makes an object from its (name, value) pairs, and may raise ValueError.
    """
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise UserError(f"{where} is not valid JSON: it is nested too deep") from None
    except ValueError as error:  # also numbers of thousands of digits, and bytes that are not UTF-8
        raise UserError(f"{where} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError for a missing file or one without an object."""
    try:
        found = parse_json(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, but must be an object, {{...}}")
    return found


def visible(text: str) -> str:
    """Text that is safe for a terminal or a page: control characters become visible symbols.

    An escape sequence could change a terminal's title, colours or even its contents, and a page
    with a NUL is not HTML. Line feeds, tabs and the carriage return before a line feed stay.
    """
    return CONTROL.sub(lambda found: chr(SYMBOLS.get(ord(found[0]), 0xFFFD)), text)


CONTROL = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
SYMBOLS = {i: 0x2400 + i for i in range(0x20)} | {0x7F: 0x2421}  # Unicode has none for C1


# ---- commands ----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Argument parser of a command. Wrong arguments raise UserError: one line, without the
    usage."""

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[Any, list[str]]:
        for given in sys.argv[1:] if args is None else args:
            if not is_text(given):
                raise UserError(f"argument {given!r}: it has a NUL character, or is not UTF-8")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


TINY = 1e-30  # smallest positive value of an argument
SEEDS = 2**63 - 1


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The argparse type of an integer from `least` to `most`."""

    def read(text: str) -> int:
        if re.fullmatch(r"[-+]?[0-9]{1,20}", text) and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be a whole number from {least} to {most:,}"
        )

    return read


def real(least: float, words: str, most: float = math.inf) -> Callable[[str], float]:
    """The argparse type of a finite float from `least` to `most`, a range that `words` describe."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and least <= value <= most:
            return value
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number {words}")

    return read


# Errors of a path or a disk, not of the code.
DISK = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.EIO,
    errno.EBUSY, errno.ETXTBSY, errno.ENXIO,
)  # fmt: skip


MOST_SHOWN = 2000  # longest message in characters


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Decorator of a command's main(argv), which returns its exit code. A UserError, a file error
    or running out of memory prints one line and returns 2."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> int:
        try:
            code = main(*args, **kwargs)
            sys.stdout.flush()
            return code
        except UserError as error:
            for line in error.args or ("",):
                say_error(str(line))
        except BrokenPipeError:  # the reader closed the pipe, as in `--help | head`
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
    """Print an error as one line, with control characters escaped and URL passwords removed."""
    line = re.sub(r"://[^\s/@'\"]*:[^\s/@'\"]*@", "://...@", line)
    if len(line) > MOST_SHOWN:
        line = f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], line)
    print(f"error: {line}", file=sys.stderr)
