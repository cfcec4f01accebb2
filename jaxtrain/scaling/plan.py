"""The planned runs of a study: length, parameter counts and cost. Nothing is trained here."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from jaxtrain.config import Config, find_config, load_config
from jaxtrain.config.resolve import Resolved, resolve, vocab_size_of
from jaxtrain.model import Transformer, flops_per_token, split
from jaxtrain.model.flops import active, sizes
from jaxtrain.scaling.study import Counting, HeldOut, LearningRates, ModelSize, Study
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Specs, count


class ModelCounts(NamedTuple):
    """Parameters and FLOPs of one model."""

    parameters: dict[str, float]  # by the way of counting (`study.Counting`)
    flops_per_token: float  # forward and backward

    def of(self, counting: Counting) -> float:
        """The parameter count of one convention."""
        return self.parameters[counting]


class PlannedRun(NamedTuple):
    """A run of the study. Its name is made from its settings: equal settings are the same run."""

    name: str
    kinds: tuple[str, ...]  # its uses: isoflop, tokens, learning_rates, batch_sizes, held_out
    size: ModelSize
    seed: int
    steps: int
    tokens: int
    flops: float
    parameters: float  # counted by the study's convention
    batch_size: int  # sequences per step
    multiplier: float  # of the learning rates
    budget: float | None  # requested FLOPs
    overrides: tuple[str, ...]


def model_counts(c: Resolved, vocab_size: int) -> ModelCounts:
    """Parameters by each counting convention, and FLOPs per token (nanochat's convention).

    matrices_and_head: matrices of the blocks and the head (nanochat's scaling parameters), with
    only the active experts. matrices: the same without the head. without_embeddings: all but the
    embedding tables. total: all.
    """
    specs: Specs = split(Transformer(c.model, vocab_size))[1]
    table = sizes(specs)
    both = active(c.model, specs)
    head = specs["embed"].size if c.model.tied_head and "embed" in specs else count(specs, "head")
    tables = sum(n for group, n in table.items() if "embedding" in group)
    parameters = {
        "matrices_and_head": both,
        "matrices": both - head,
        "without_embeddings": float(table["total"] - tables),
        "total": float(table["total"]),
    }
    flops = flops_per_token(c.model, specs, c.train.sequence_length)
    return ModelCounts(parameters, float(flops))


class Planner:
    """Makes the runs of a study. The counts of each model are cached."""

    def __init__(self, study: Study):
        self.study = study
        self._known: dict[tuple[str, ...], tuple[Resolved, ModelCounts]] = {}

    def resolved(self, size: ModelSize, more: Sequence[str] = ()) -> tuple[Resolved, ModelCounts]:
        """The resolved configuration of a model size, and its counts."""
        lines = (*self.study.overrides, *size_overrides(size), *more)
        if lines not in self._known:
            config = load_config(find_config(self.study.config), last_overrides(lines))
            vocab_size = vocab_size_of(config.data)
            c = resolve(config, vocab_size)
            self._known[lines] = c, model_counts(c, vocab_size)
        return self._known[lines]

    def run(
        self,
        kind: str,
        size: ModelSize,
        seed: int,
        *,
        flops: float | None = None,
        tokens: float | None = None,
        batch_size: int | None = None,
        multiplier: float = 1.0,
        more: tuple[str, ...] = (),
        rates_of: Resolved | None = None,
    ) -> PlannedRun:
        """Plan one run of `flops` or `tokens`. Raises UserError if that is too few steps.

        rates_of: the configuration whose learning rates are multiplied; default the run's own.
        """
        rows = (f"train.batch_size={batch_size}",) if batch_size else ()
        rows += ("train.device_batch_size=null",) if batch_size else ()
        c, counts = self.resolved(size, (*rows, *more))
        rates = rate_overrides(rates_of or c, multiplier)
        per_step = c.train.batch_size * c.train.sequence_length
        asked = tokens if flops is None else flops / counts.flops_per_token
        assert asked is not None
        steps = round(asked / per_step)
        if steps < self.study.least_steps:
            what = f"{tokens:.3g} tokens" if flops is None else f"the budget {flops:.3g} FLOPs"
            raise UserError(
                f"{kind}: {what} at depth {size.depth}, width {c.model.width} are {steps} steps of "
                f"{per_step:,} tokens, and least_steps is {self.study.least_steps}: leave that "
                "size out, raise the budget, or lower train.batch_size"
            )
        lines = (
            *rows,
            f"train.steps={steps}",
            *more,
            *(rates if multiplier != 1.0 or rates_of else ()),
        )
        if multiplier != 1.0 and not rates:
            raise UserError(f"{kind}: optim.name={c.optim.name} has no learning rate to multiply")
        name = f"d{size.depth}_w{c.model.width}_b{c.train.batch_size}_t{steps}_m{multiplier:g}"
        if more:
            name += f"_{kind}"
        return PlannedRun(
            f"{name}_s{seed}", (kind,), size, seed, steps, steps * per_step,
            steps * per_step * counts.flops_per_token, counts.of(self.study.parameters),
            c.train.batch_size, multiplier, flops, lines,
        )  # fmt: skip

    def length(
        self, one: LearningRates | HeldOut, size: ModelSize
    ) -> tuple[float | None, float | None]:
        """(FLOPs, tokens) of a run of a model size; one of the two is None."""
        if one.tokens_per_parameter is None:
            return one.flops, one.tokens
        parameters = self.resolved(size)[1].of(self.study.parameters)
        return None, one.tokens_per_parameter * parameters

    def runs(self) -> list[PlannedRun]:
        """All runs but the held-out one; a run that serves two kinds is listed once."""
        found: dict[str, PlannedRun] = {}
        for one in self._runs():
            if one.name in found:
                before = found[one.name]
                kinds = tuple(dict.fromkeys((*before.kinds, *one.kinds)))
                one = before._replace(kinds=kinds, budget=before.budget or one.budget)
            found[one.name] = one
        return list(found.values())

    def _runs(self) -> Iterator[PlannedRun]:
        s = self.study
        for seed in s.seeds:
            if s.isoflop:
                for budget in s.isoflop.budgets:
                    for size in s.isoflop.sizes:
                        yield self.run("isoflop", size, seed, flops=budget)
            if s.tokens:
                for size in s.tokens.sizes:
                    for tokens in s.tokens.tokens:
                        yield self.run("tokens", size, seed, tokens=tokens)
            if s.learning_rates:
                for size in s.learning_rates.sizes:
                    flops, tokens = self.length(s.learning_rates, size)
                    for m in s.learning_rates.multipliers:
                        yield self.run(
                            "learning_rates", size, seed, flops=flops, tokens=tokens, multiplier=m
                        )
            yield from self._batch_runs(seed)

    def _batch_runs(self, seed: int) -> Iterator[PlannedRun]:
        b = self.study.batch_sizes
        if b is None:
            return
        first = self.resolved(b.size, (f"train.batch_size={b.batch_sizes[0]}",))[0]
        for tokens, rows, m in product(b.tokens, b.batch_sizes, b.multipliers):
            factor = float(f"{m * (rows / b.batch_sizes[0]) ** b.rate_power:.6g}")
            steps = round(tokens / (rows * first.train.sequence_length))
            every = max(1, steps // b.evaluations)
            yield self.run(
                "batch_sizes", b.size, seed, tokens=tokens, batch_size=rows, multiplier=factor,
                more=(f"eval.every={every}", *b.overrides), rates_of=first,
            )  # fmt: skip

    def held_out(self) -> PlannedRun | None:
        """The run whose loss is predicted, with the first seed."""
        one = self.study.held_out
        if one is None:
            return None
        flops, tokens = self.length(one, one.size)
        return self.run("held_out", one.size, self.study.seeds[0], flops=flops, tokens=tokens)

    def config(self, run: PlannedRun) -> Config:
        """The configuration of a run, as for `jaxtrain train`."""
        lines = (
            "eval.every=null", "sample.prompts=[]", "sample.every=null", "checkpoint.final=false",
            "metrics.tensorboard=false", *self.study.overrides, *size_overrides(run.size),
            *run.overrides, f"run.seed={run.seed}", f"run.directory={self.study.folder}",
            f"run.name={run.name}",
        )  # fmt: skip
        return load_config(find_config(self.study.config), last_overrides(lines))


def size_overrides(size: ModelSize) -> tuple[str, ...]:
    width = "null" if size.width is None else str(size.width)
    return f"model.depth={size.depth}", f"model.width={width}"


def last_overrides(lines: Sequence[str]) -> list[str]:
    """Overrides without those that a later one of the same key replaces."""
    return list({line.partition("=")[0].strip(): line for line in lines}.values())


def rate_overrides(c: Resolved, multiplier: float) -> tuple[str, ...]:
    """Overrides that multiply each learning rate of the optimizer."""
    rates = {
        name: value for name, value in c.optim.model_dump().items()
        if isinstance(value, float) and (name.endswith("_lr") or name in ("lr", "learning_rate"))
    }  # fmt: skip
    return tuple(f"optim.{name}={value * multiplier:.8g}" for name, value in rates.items())


def check_data(study: Study, runs: Sequence[PlannedRun], tokens: int) -> None:
    """Raise UserError for a run that needs more than `most_epochs` epochs of the training data."""
    longest = max(runs, key=lambda run: run.tokens)
    if longest.tokens > study.most_epochs * tokens:
        raise UserError(
            f"{longest.name} trains on {longest.tokens:,} tokens, but the data has {tokens:,}: "
            f"lower the budget, or set most_epochs={math.ceil(longest.tokens / tokens)}"
        )


def plan_text(study: Study, runs: Sequence[PlannedRun], done: set[str]) -> str:
    """A line for each run, grouped by use, and the cost of the missing runs.

    The runs of the shipped studies fit 80 columns.
    """
    groups: dict[str, list[tuple[str, ...]]] = {}
    for run in runs:
        use = "done" if run.name in done else ", ".join(run.kinds)
        row = (
            run.name, f"{run.parameters:,.0f}", f"{run.tokens:,d}",
            f"{run.tokens / run.parameters:.2f}", f"{run.flops:.1e}",
        )  # fmt: skip
        groups.setdefault(use, []).append(row)
    heads = [("", "", "", "tokens/", ""), ("run", "parameters", "tokens", "parameter", "FLOPs")]
    rows = [*heads, *(row for group in groups.values() for row in group)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    line = lambda row: " ".join(
        [row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:]))]
    ).rstrip()
    lines = [*map(line, heads)]
    for use, group in groups.items():
        lines += [f"{use}:", *map(line, group)]
    left = [run for run in runs if run.name not in done]
    flops = sum(run.flops for run in left)
    total = f"{len(left)} of {len(runs)} runs are missing: {flops:.3g} FLOPs"
    if study.flops_per_s:
        total += f", {flops / study.flops_per_s / 60:.1f} min at {study.flops_per_s:.3g} FLOPs/s"
    return "\n".join([*lines, total])
