"""Mixtures of sources in exact proportions, and stages: the source of each row of every step.

The next source is chosen by how far each is behind its share (Tijdeman 1980, "The chairman
assignment problem"), not at random: after any number of rows each source has given its share of
them to within one row. Each source keeps its own plan and order.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import grain
from pydantic import Field, model_validator

from jaxtrain.data.batches.planning import Counts, PlannedRow, Planner
from jaxtrain.data.files.sources import Source
from jaxtrain.data.filters.duplicates import Duplicates
from jaxtrain.settings import Settings, UserError


class MixturePart(Settings):
    """One source of a mixture."""

    source: Source = Field(description="source of the text")
    weight: float = Field(
        default=1.0,
        ge=0,
        description="sampling weight: its share of the sequences, relative to the other sources",
    )
    max_epochs: float | None = Field(
        default=None,
        gt=0,
        description="passes over this source, after which the other sources take its share; null: "
        "no limit",
    )


class MixtureSource(Settings):
    """Several named sources, mixed by sampling weights."""

    name: Literal["mixture"] = "mixture"
    sources: dict[str, MixturePart] = Field(
        min_length=1, description="sources of the mixture by name"
    )
    filters: tuple[Duplicates, ...] = Field(
        default=(),
        description="exact_duplicates or near_duplicates across all sources, after each source's "
        "own filters. The copy in the first source stays; conversations are not deduplicated",
    )
    first: str | None = Field(
        default=None,
        description="source whose copies are kept over all others'; default the order of `sources`",
    )

    @model_validator(mode="after")
    def _first_is_a_source(self) -> "MixtureSource":
        if self.first is not None and self.first not in self.sources:
            raise ValueError(
                f"first names {self.first!r}, but the sources are {', '.join(self.sources)}"
            )
        return self


class Stage(Settings):
    """A stage of the run with its own mixture, sequence length and batch size."""

    tokens: int | None = Field(
        default=None,
        gt=0,
        description="training tokens of this stage, rounded to a whole step; null: to the end of "
        "the run",
    )
    sequence_length: int | None = Field(
        default=None,
        ge=2,
        description="tokens per sequence, a divisor of train.sequence_length; the tokens per step "
        "stay the same. Default train.sequence_length",
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="sequences of train.sequence_length tokens per step; with shorter sequences, "
        "more of them. Default train.batch_size; learning rates follow optim.batch_scaling",
    )
    weights: dict[str, float] | None = Field(
        default=None,
        description="sampling weights by source; a source that is not listed has weight 0. "
        "Default the weights of the mixture",
    )


class Span(NamedTuple):
    """A stage in the form that the planner uses."""

    first_step: int
    weights: dict[str, float]
    cut: int  # rows per unit of T tokens
    units: int  # per step


class BatchSizes(NamedTuple):
    """Batch sizes of a run: from step firsts[i] on, a step has units[i] units of T tokens."""

    firsts: tuple[int, ...]
    units: tuple[int, ...]
    sequence_length: int

    def tokens(self, steps: int) -> int:
        """Number of training tokens in the first `steps` steps."""
        ends = (*self.firsts[1:], steps)
        taken = (max(0, min(end, steps) - first) for first, end in zip(self.firsts, ends))
        return self.sequence_length * sum(n * size for n, size in zip(taken, self.units))

    def steps(self, tokens: int | float) -> int:
        """Number of whole steps in `tokens` training tokens."""
        spent = [self.tokens(first) for first in self.firsts]
        last = bisect_right(spent, tokens) - 1
        size = self.units[last] * self.sequence_length
        return self.firsts[last] + int((tokens - spent[last]) // size)

    def shares(self, batch_size: int) -> tuple[tuple[int, float], ...]:
        """(first step, its size / batch_size) of each stage; empty if all steps have that size."""
        if {*self.units} == {batch_size}:
            return ()
        return tuple((first, units / batch_size) for first, units in zip(self.firsts, self.units))


def weights_of(train: Source | MixtureSource) -> dict[str, float]:
    """Weights of the sources by name; a single source is named train."""
    if train.name != "mixture":
        return {"train": 1.0}
    return {name: part.weight for name, part in train.sources.items()}


def sources_of(train: Source | MixtureSource) -> dict[str, Source]:
    """Sources by name; a single source is named train."""
    if train.name != "mixture":
        return {"train": train}
    return {name: part.source for name, part in train.sources.items()}


def source_names(train: Source | MixtureSource, most: int = 4) -> str:
    """Paths of the sources as a phrase for the screen, at most `most` of them."""
    paths = [source.path for source in sources_of(train).values()]
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more


def check_data_stages(
    stages: Sequence[Stage], sources: Sequence[str], weights: Sequence[float]
) -> None:
    """Raises ValueError for stages that contradict each other or the sources."""
    for number, stage in enumerate(stages, 1):
        if stage.tokens is None and number < len(stages):
            raise ValueError(f"stage {number} of {len(stages)} needs tokens: it is not the last")
        for name, weight in (stage.weights or {}).items():
            if name not in sources:
                raise ValueError(
                    f"stage {number} weighs {name!r}, but the sources are {', '.join(sources)}"
                )
            if weight < 0:
                raise ValueError(f"stage {number} gives {name!r} the weight {weight}, below 0")
        if not any(weights if stage.weights is None else stage.weights.values()):
            raise ValueError(f"stage {number} gives every source the weight 0")
    if not stages and not any(weights):
        raise ValueError("every source has the weight 0")


def check_lengths(stages: Sequence[Stage], sequence_length: int) -> None:
    """Raises UserError for a stage whose sequence length does not divide that of the run."""
    for number, stage in enumerate(stages, 1):
        if sequence_length % (stage.sequence_length or sequence_length):
            raise UserError(
                f"data.stages: stage {number} has sequence_length {stage.sequence_length}, which "
                f"does not divide train.sequence_length {sequence_length}"
            )


def batch_sizes(stages: Sequence[Stage], batch_size: int, sequence_length: int) -> BatchSizes:
    """Batch sizes of the stages. batch_size: rows of T tokens for stages that do not set one."""
    units = tuple(stage.batch_size or batch_size for stage in stages or [Stage()])
    lengths = (
        round((stage.tokens or 0) / (size * sequence_length)) for stage, size in zip(stages, units)
    )
    firsts = tuple(accumulate(lengths, initial=0))
    return BatchSizes(firsts[: len(units)], units, sequence_length)


def spans(
    stages: Sequence[Stage], weights: dict[str, float], sequence_length: int, batch_size: int
) -> list[Span]:
    """Convert stages to spans. Raises UserError for a sequence length that does not divide T."""
    firsts, units, _ = batch_sizes(stages, batch_size, sequence_length)
    check_lengths(stages, sequence_length)
    found = []
    for first, size, stage in zip(firsts, units, stages or [Stage()]):
        given = weights if stage.weights is None else stage.weights
        live = {name: given[name] for name in weights if given.get(name)}
        length = stage.sequence_length or sequence_length
        found.append(Span(first, live, sequence_length // length, size))
    return found


def next_source(weights: Mapping[str, float], counts: Mapping[str, int]) -> str:
    """Return the source of the next unit. counts: units that each source has given so far.

    Among the sources that are due, it is the one with the earliest deadline. Every source then
    stays within 1 - 1/(2k-2) units of its share, for k sources (Tijdeman 1980).
    """
    if len(weights) == 1:
        return next(iter(weights))
    total = sum(weights.values())
    turns = 1 + sum(counts[name] for name in weights)
    slack = 1 / (2 * len(weights) - 2)
    behind = {name: weight / total * turns - counts[name] for name, weight in weights.items()}
    due = [name for name in weights if behind[name] >= slack - 1e-9]
    return min(due, key=lambda name: (1 - slack - behind[name]) / weights[name])


class PlannedBatch(NamedTuple):
    """The rows of one batch, each with the name of its source, in units of `cut` rows."""

    rows: list[tuple[str, PlannedRow]]
    cut: int
    step: int


class BatchPlan(grain.DatasetIterator[PlannedBatch]):
    """Iterator that plans global batches in order."""

    def __init__(self, planners: dict[str, Planner], spans: list[Span]):
        super().__init__()
        self.planners, self.spans = planners, spans
        self.firsts = [span.first_step for span in spans]
        self.step = 0
        self.turns = dict.fromkeys(planners, 0)  # units since the shares last changed
        self.units = dict.fromkeys(planners, 0)
        self.spent: list[str] = []  # sources that have reached their max_epochs

    def __next__(self) -> PlannedBatch:
        span = self.spans[bisect_right(self.firsts, self.step) - 1]
        if span.first_step == self.step:
            self.turns = dict.fromkeys(self.planners, 0)
        rows = [row for _ in range(span.units) for row in self._unit(span)]
        self.step += 1
        return PlannedBatch(rows, span.cut, self.step - 1)

    def _unit(self, span: Span) -> list[tuple[str, PlannedRow]]:
        while live := {n: w for n, w in span.weights.items() if n not in self.spent}:
            name = next_source(live, self.turns)
            rows = self.planners[name].unit(span.cut)
            if rows is not None:
                self.turns[name] += 1
                self.units[name] += 1
                return [(name, row) for row in rows]
            self.spent.append(name)
            self.turns = dict.fromkeys(self.planners, 0)
        raise UserError(
            f"step {self.step + 1}: all sources of this stage have reached their max_epochs "
            f"({', '.join(span.weights)}); allow more epochs, add text or take fewer steps"
        )

    def get_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "turns": dict(self.turns),
            "units": dict(self.units),
            "spent": list(self.spent),
            "sources": {name: p.get_state() for name, p in self.planners.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.step, self.spent = state["step"], list(state["spent"])
        self.turns, self.units = dict(state["turns"]), dict(state["units"])
        for name, planner in self.planners.items():
            planner.set_state(state["sources"][name])

    def statistics(self, state: dict[str, Any]) -> dict[str, float]:
        """Metrics of the stream up to a state: the fractions of tokens dropped and of rows filled;
        per source its epochs and the packing of its last whole epoch; if there are several, each
        source's share of the rows."""
        parts = state["sources"]
        whole = Counts(*map(sum, zip(*(part["counts"] for part in parts.values()))))
        found = {f"data_{kind}": share for kind, share in shares_of(whole).items()}
        rows, several = max(sum(state["units"].values()), 1), len(parts) > 1
        for name, planner in self.planners.items():
            tail = f"_{name}" if several else ""
            if several:
                found[f"data_share{tail}"] = state["units"][name] / rows
            found[f"data_epochs{tail}"] = planner.epochs(parts[name])
            if parts[name]["whole"]:
                epoch = last_epoch(parts[name])
                found |= {f"data_epoch_{kind}{tail}": x for kind, x in shares_of(epoch).items()}
                found[f"data_epoch_cropped{tail}"] = epoch.cropped
                found[f"data_epoch_left_out{tail}"] = epoch.left_out
        return found


def last_epoch(state: dict[str, Any]) -> Counts:
    """Counts of the last whole epoch, from a source's state."""
    return Counts(*state["began"]) - Counts(*state["before"])


def shares_of(counts: Counts) -> dict[str, float]:
    """`crop`: fraction of tokens in no row; `fill`: fraction of the rows that is not padding."""
    used, dropped, padding = counts[:3]
    return {"crop": dropped / max(used + dropped, 1), "fill": used / max(used + padding, 1)}
