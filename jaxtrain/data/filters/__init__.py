"""Filters of documents, one entry of FILTERS each.

Here: the filters, and running them over sources (on all cores, resumable) with a report. Not here:
tokenizing the rest (store/), and models that score documents (`jaxtrain/evaluation/score.py`).
"""

from typing import Annotated

from pydantic import Field

from jaxtrain.data.filters import (
    c4,
    decontaminate,
    duplicates,
    fineweb,
    gopher,
    language,
    score,
)
from jaxtrain.data.filters.batch import FilterFunctions

Filter = Annotated[
    duplicates.ExactDuplicates
    | duplicates.NearDuplicates
    | gopher.GopherQuality
    | gopher.GopherRepetition
    | c4.C4
    | fineweb.FineWeb
    | language.LanguageFilter
    | language.ScriptFilter
    | score.ScoreFilter
    | decontaminate.Decontaminate,
    Field(discriminator="name"),
]
FILTERS: dict[str, FilterFunctions] = {
    "exact_duplicates": duplicates.EXACT,
    "near_duplicates": duplicates.NEAR,
    "gopher_quality": gopher.QUALITY,
    "gopher_repetition": gopher.REPETITION,
    "c4": c4.FUNCTIONS,
    "fineweb": fineweb.FUNCTIONS,
    "language": language.LANGUAGE,
    "script": language.SCRIPT,
    "score": score.FUNCTIONS,
    "decontaminate": decontaminate.FUNCTIONS,
}
