"""Filter by a number that documents already have, such as a perplexity or a classifier's score."""

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from jaxtrain.data.filters.batch import FilterFunctions, TextBatch
from jaxtrain.data.filters.marks import MarkFiles
from jaxtrain.data.pool import Map
from jaxtrain.settings import Settings, UserError


class ScoreFilter(Settings):
    """Keeps documents by a JSONL field or Parquet column; those without a number are removed."""

    name: Literal["score"] = "score"
    field: str = Field(description="key or column of the score")
    minimum: float | None = Field(default=None, description="minimum score; null: no bound")
    maximum: float | None = Field(default=None, description="maximum score; null: no bound")
    keep_fraction: float | None = Field(
        default=None, gt=0, le=1, description="fraction of the documents to keep; null: all"
    )
    keep: Literal["highest", "lowest", "middle"] = Field(
        default="highest",
        description="documents that keep_fraction keeps: those with the highest, lowest or "
        "middle scores",
    )

    @model_validator(mode="after")
    def _removes_something(self) -> "ScoreFilter":
        if self.minimum is None and self.maximum is None and self.keep_fraction is None:
            raise ValueError("a score filter needs minimum, maximum or keep_fraction")
        return self


def document_scores(config: ScoreFilter, batch: TextBatch) -> np.ndarray:
    """float64 [documents]; NaN if missing. Raises UserError for a value that is not a number."""
    values = [record.get(config.field) for record in batch.records]
    for value in values:
        if not (value is None or isinstance(value, (int, float))):
            raise UserError(
                f"data.train.filters: score reads a number from '{config.field}', not {value!r}"
            )
    return np.array([np.nan if value is None else value for value in values], np.float64)


def filter_by_rank(
    config: ScoreFilter, marks: MarkFiles, _sources_D: np.ndarray, _mapped: Map
) -> np.ndarray:
    """Apply the bounds, then keep a share of the rest; of equal scores the earlier ones stay."""
    scores_D = marks.column()
    if len(scores_D) and np.isnan(scores_D).all():
        raise UserError(f"data.train.filters: no document has a field '{config.field}'")
    reasons = np.where(np.isnan(scores_D), 1, 0).astype(np.uint8)
    if config.minimum is not None:
        reasons[scores_D < config.minimum] = 2
    if config.maximum is not None:
        reasons[scores_D > config.maximum] = 3
    if config.keep_fraction is not None:
        left = np.flatnonzero(reasons == 0)
        order = {"lowest": scores_D[left], "highest": -scores_D[left]}.get(config.keep)
        if order is None:
            order = np.abs(_ranks(scores_D[left]) - (len(left) - 1) / 2)
        ranked = left[np.argsort(order, kind="stable")]
        reasons[ranked[round(config.keep_fraction * len(left)) :]] = 4
    return reasons


def _ranks(values: np.ndarray) -> np.ndarray:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


FUNCTIONS = FilterFunctions(
    ("no score", "below minimum", "above maximum", "not in the share"),
    features=document_scores,
    decide=filter_by_rank,
)
