"""Needle in a haystack: whether a model recalls one fact, by text length and depth of the fact.

A number is hidden in unrelated sentences, at some depth of a text of some length. The end of the
text asks for it (passkey retrieval: Mohtashami & Jaggi 2023, arXiv:2305.16300; the grid of lengths
and depths: Kamradt 2023). A model that recalls nothing chooses one number of four.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxtrain import data
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Scored
from jaxtrain.evaluation.log_likelihood import make_scorer, scores
from jaxtrain.evaluation.tasks import identity, progress_bar, save
from jaxtrain.runs.saved import Saved
from jaxtrain.settings import UserError

FILLER = (
    "Rain fell on the hills all morning.", "A cart went by with two old horses.",
    "The baker opened his shop at six.", "Nobody had seen the cat since Monday.",
    "The river was low that summer.", "They painted the gate green again.",
    "Her brother wrote letters from the coast.", "The clock in the hall was always late.",
)  # fmt: skip
CITIES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Dublin", "Cairo", "Sydney")
FACT, QUESTION = " The secret number of {} is {}.", " The secret number of {} is"
DIGITS, CHOICES = 5, 4
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the fact, as a share of the text before the question
SAMPLES = 10  # texts of each length and depth


class Cell(NamedTuple):
    """Results for the texts of one length and depth."""

    length: int  # tokens, including question and answer
    depth: float
    samples: int
    chosen: float  # share of texts whose hidden number is the likeliest of four; chance is 0.25
    exact: float  # share of texts in which each token of the number is the likeliest of all


def haystack(
    tokenizer: data.Tokenizer, length: int, depth: float, rng: np.random.Generator
) -> list[Scored]:
    """A text of at most `length` tokens with four answers; the first is the hidden number.

    Raises UserError if the fact and the question alone have more tokens.
    """
    city = CITIES[rng.integers(len(CITIES))]
    low, high = 10 ** (DIGITS - 1), 10**DIGITS
    numbers = rng.choice(np.arange(low, high), CHOICES, replace=False)
    encode = lambda text: tokenizer.encode(text).tolist()
    fact, question = encode(FACT.format(city, numbers[0])), encode(QUESTION.format(city))
    answers = [encode(f" {number}.") for number in numbers]
    room = length - 1 - len(fact) - len(question) - max(map(len, answers))
    if room < 0:
        raise UserError(
            f"--needle: {length} tokens are too few for the fact and the question, which have "
            f"{length - room}; give larger lengths"
        )
    sentences: list[list[int]] = []
    while (one := encode(" " + FILLER[rng.integers(len(FILLER))])) and len(one) <= room:
        sentences.append(one)
        room -= len(one)
    sentences.insert(round(depth * len(sentences)), fact)
    text = [tokenizer.bos_id, *chain.from_iterable(sentences), *question]
    return [Scored(np.array([*text, *answer], np.int32), len(text)) for answer in answers]


def haystacks(
    tokenizer: data.Tokenizer, length: int, depth: float, samples: int
) -> Iterator[list[Scored]]:
    """Texts of one length and depth, the same for every model with this tokenizer."""
    for sample in range(samples):
        rng = np.random.default_rng([length, round(1000 * depth), sample])
        yield haystack(tokenizer, length, depth, rng)


def find_needles(
    saved: Saved, config: Resolved, lengths: Sequence[int], samples: int, out: Path
) -> list[Cell]:
    """Ask for hidden numbers in texts of each length and depth, and write `out` (JSON).

    Raises UserError for a length beyond the context of `config`.
    """
    if longer := [length for length in lengths if length > config.model.context_length]:
        raise UserError(
            f"--needle: {longer[0]} tokens are more than the context of "
            f"{config.model.context_length}; set model.context_length={longer[0]} to try them"
        )
    cells = [(length, depth) for length in lengths for depth in DEPTHS]
    found = []
    scorer = make_scorer(saved, config)
    with progress_bar() as bar:
        number = bar.add_task("texts", total=len(cells) * samples)
        jobs = (haystacks(saved.tokenizer, *cell, samples) for cell in cells)
        results = scores(scorer, jobs, lambda n: bar.advance(number, n))
        for (length, depth), result in zip(cells, results, strict=True):
            nll = result.nll.reshape(samples, CHOICES)
            if not np.isfinite(nll).all():
                raise UserError("--needle: the model's log-likelihoods are not finite")
            chosen = float(np.mean(nll.argmin(axis=1) == 0))
            exact = float(np.mean(result.greedy.reshape(samples, CHOICES)[:, 0]))
            found.append(Cell(length, depth, samples, chosen, exact))
    save(out, {"model": identity(saved, config), "cells": [cell._asdict() for cell in found]})
    return found


def needle_table(cells: Sequence[Cell]) -> Table:
    """A row for each length, a column for each depth: both shares of a `Cell`, in percent."""
    table = Table(box=None, header_style="bold", title="hidden numbers: chosen of 4 / exact, %")
    table.add_column("tokens", justify="right")
    for depth in DEPTHS:
        table.add_column(f"depth {depth:.0%}", justify="right")
    for length in dict.fromkeys(cell.length for cell in cells):
        row = [cell for cell in cells if cell.length == length]
        table.add_row(f"{length:,}", *(f"{c.chosen:.0%} / {c.exact:.0%}" for c in row))
    return table


def lengths_of(text: str) -> list[int]:
    """Parse the lengths of --needle. Raises UserError unless all are integers above 0."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--needle: got {text!r}, must be lengths in tokens, such as 1024,4096")
    return sorted({int(part) for part in parts})


def answer_needles(saved: Saved, config: Resolved, arguments: argparse.Namespace) -> None:
    """Run --needle: print a table, and write the results to --out."""
    name = "needle.json" if arguments.step is None else f"needle_step_{arguments.step:06d}.json"
    out = arguments.out or arguments.run / name
    samples = arguments.limit or SAMPLES
    cells = find_needles(saved, config, lengths_of(arguments.needle), samples, out)
    if jax.process_index() == 0:
        Console(width=80).print(needle_table(cells), f"\n{out}", highlight=False)
