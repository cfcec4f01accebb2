"""The annotations of the packages under test are checked at the first calls in each test."""

import importlib
import sys

import annotations
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation

SOURCE = """
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple
import numpy as np
from jaxtyping import Float

def product(a_MK: Float[np.ndarray, "M K"], b_KN: Float[np.ndarray, "K N"]):
    return a_MK @ b_KN

def turned(a_MK: Float[np.ndarray, "M K"]) -> Float[np.ndarray, "M K"]:
    return a_MK.T

def length(x: str) -> int:
    return x and len(x)

@cache
def mode(x: Literal["r", "w"]) -> str:
    return x

def outer(x):
    def inner(y: int):
        return y
    return inner(x)

def of_a_later_class(x: "Later") -> int:
    return 1

@dataclass(frozen=True)
class Point:
    x: int
    def moved(self, by: int) -> "Point":
        return Point(self.x + by)

if True:
    def under_a_condition(x: int):
        return x
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    (folder / "annotated_package.py").write_text(SOURCE)
    finder = annotations.Finder(("annotated_package",))
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, finder)
    annotated_package = importlib.import_module("annotated_package")

    sys.meta_path.remove(finder)
    sys.path.remove(str(folder))
    yield annotated_package
    assert not (folder / "__pycache__").exists()


def array(*shape):
    return np.ones(shape, np.float32)


def test_a_function_in_another_is_checked_the_first_times_alone(checked):
    annotations.made.clear()
    for _ in range(annotations.FIRST):
        with pytest.raises(BeartypeCallHintViolation):
            checked.outer("2")
    assert checked.outer("2") == "2"
    annotations.made.clear()


def test_the_first_calls_in_each_test_are_checked(checked):
    annotations.begin_test()
    for _ in range(annotations.CALLS):
        with pytest.raises(BeartypeCallHintViolation):
            checked.length([1])
    assert checked.length([1]) == 1
    annotations.begin_test()
    with pytest.raises(BeartypeCallHintViolation):
        checked.length([1])


def test_what_is_right_passes(checked):
    assert checked.product(array(2, 3), array(3, 4)).shape == (2, 4)
    assert checked.turned(array(2, 2)).shape == (2, 2)
    assert checked.length("ab") == checked.outer(2) == checked.Point(1).moved(1).x == 2
    assert checked.mode("r") == "r" and checked.of_a_later_class(1) == 1


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m: m.product(array(2, 3), array(4, 3)), id="two sizes of one name"),
        pytest.param(lambda m: m.product(array(2, 3), np.ones((3, 4))[0]), id="rank"),
        pytest.param(lambda m: m.product(array(2, 3), np.ones((3, 4), int)), id="type of numbers"),
        pytest.param(lambda m: m.turned(array(2, 3)), id="shape of what is returned"),
        pytest.param(lambda m: m.length(3), id="argument"),
        pytest.param(lambda m: m.length(""), id="what is returned"),
        pytest.param(lambda m: m.mode("x"), id="below another decorator"),
        pytest.param(lambda m: m.outer("a"), id="function in a function"),
        pytest.param(lambda m: m.under_a_condition("a"), id="function under a condition"),
        pytest.param(lambda m: m.Point("a"), id="dataclass"),
        pytest.param(lambda m: m.Point(1).moved("a"), id="method"),
    ],
)
def test_what_is_wrong_does_not(checked, call):
    with pytest.raises(BeartypeCallHintViolation):
        call(checked)
