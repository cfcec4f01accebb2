"""Filters by language and script, told from letters and the most frequent words."""

import sys
from functools import cache
from typing import Literal

import numpy as np
from pydantic import Field

from jaxtrain.data.filters.arrays import TextArrays, share
from jaxtrain.data.filters.batch import FilterFunctions, FilterVerdict, TextBatch
from jaxtrain.settings import Settings

# Frequent short words of each language, as `TextArrays.folded_words` cuts them.
STOP_WORDS = {
    "en": "the of and to in a is that for it as was with be by on not he i this are or his from "
    "at which but have an they you were had their we been has",
    "de": "der die und in den von zu das mit sich des auf f\u00fcr ist im dem nicht ein eine "
    "als auch es an werden aus er hat dass sie nach wird bei",
    "fr": "de la le et les des en un une du dans est que qui au pour par sur il l d qu plus pas "
    "ne se son avec ce sont aux n cette",
    "es": "de la que el en y a los se del las un por con no una su para es al lo como m\u00e1s "
    "o pero sus le ha este fue",
    "it": "di e il la che in a per un del della l si \u00e8 con i da le non una al dei nel sono "
    "come gli alla pi\u00f9 anche",
    "pt": "de a o que e do da em um para com n\u00e3o uma os no se na por mais as dos como mas "
    "ao foi das \u00e0 seu sua ou",
    "nl": "de van het een en in is dat op te zijn met voor niet aan er om ook als dan maar bij "
    "uit nog naar heeft hij door",
    "sv": "och i att det som en p\u00e5 \u00e4r av f\u00f6r med till den har de inte om ett men "
    "var jag han fr\u00e5n vid s\u00e5",
    "da": "og i at det en den til er som p\u00e5 de med af for ikke der var et har fra men han "
    "om ved blev jeg",
    "pl": "i w na z do si\u0119 nie \u017ce jest o to jak za od po przez dla a ale by\u0142 "
    "jego co tym",
    "cs": "a v se na je \u017ee s z o do i ve by jako jsou k po pro za od byl ale tak kter\u00fd",
    "tr": "ve bir bu da de i\u00e7in ile olarak \u00e7ok daha gibi olan ne kadar en sonra ama o "
    "var",
    "id": "yang dan di dengan untuk pada dari ini dalam itu tidak ke oleh akan juga adalah sebagai",
    "fi": "ja on ei ett\u00e4 se oli h\u00e4n mutta kun my\u00f6s ovat joka ole niin kuin tai "
    "sek\u00e4",
}
# First and last characters of the blocks that hold a script's letters.
SCRIPTS = {
    "latin": "AZ az \u00c0\u024f \u1e00\u1eff \uff21\uff3a \uff41\uff5a",
    "greek": "\u0370\u03ff \u1f00\u1fff",
    "cyrillic": "\u0400\u052f",
    "hebrew": "\u0590\u05ff",
    "arabic": "\u0600\u06ff \u0750\u077f",
    "devanagari": "\u0900\u097f",
    "thai": "\u0e00\u0e7f",
    "hangul": "\u1100\u11ff \uac00\ud7af",
    "kana": "\u3040\u30ff \uff66\uff9f",
    "han": "\u3400\u4dbf \u4e00\u9fff \U00020000\U0002ffff",
}
LANGUAGES = tuple(STOP_WORDS)
Language = Literal[
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "pl", "cs", "tr", "id", "fi"
]
Script = Literal[
    "latin", "greek", "cyrillic", "hebrew", "arabic", "devanagari", "thai", "hangul", "kana", "han"
]


class LanguageFilter(Settings):
    """Removes documents in other languages, detected by stop words, or in no known language."""

    name: Literal["language"] = "language"
    keep: tuple[Language, ...] = Field(default=("en",), description="languages to keep")
    min_stop_words: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="minimum fraction of words that are stop words of the language",
    )


class ScriptFilter(Settings):
    """Removes documents with too few letters of the kept scripts, or too few letters at all."""

    name: Literal["script"] = "script"
    keep: tuple[Script, ...] = Field(default=("latin",), description="scripts to keep")
    min_share: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="minimum fraction of letters that belong to these scripts",
    )
    min_letters: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="minimum fraction of letters among the characters, without spaces",
    )


def filter_language(config: LanguageFilter, batch: TextBatch) -> FilterVerdict:
    shares_LD = stop_word_shares(batch.folded)
    best, highest = shares_LD.argmax(0), shares_LD.max(0)
    kept = np.isin(best, [LANGUAGES.index(name) for name in config.keep])
    reasons = np.where(highest < config.min_stop_words, 2, np.where(kept, 0, 1))
    return FilterVerdict(reasons.astype(np.uint8))


def stop_word_shares(arrays: TextArrays) -> np.ndarray:
    """float64 [languages, texts]: the share of a text's words that are stop words of each."""
    words, (known, of_LW) = arrays.folded_words, _known_words()
    index = np.minimum(np.searchsorted(known, words.hashes), len(known) - 1)
    hits = np.flatnonzero(known[index] == words.hashes)
    index, texts = index[hits], words.texts[hits]
    count = np.bincount(words.texts, minlength=arrays.count)
    rows = [np.bincount(texts, weights=of[index], minlength=arrays.count) for of in of_LW]
    return np.stack([share(row, count) for row in rows])


@cache
def _known_words() -> tuple[np.ndarray, np.ndarray]:
    """Sorted hashes of all stop words, and bool [languages, words]: which words each has."""
    hashes = {
        name: TextArrays(words.split()).folded_words.hashes for name, words in STOP_WORDS.items()
    }
    known = np.unique(np.concatenate(list(hashes.values())))
    return known, np.stack([np.isin(known, of) for of in hashes.values()])


def filter_script(config: ScriptFilter, batch: TextBatch) -> FilterVerdict:
    shares = np.array([script_shares(text, config.keep) for text in batch.texts]).reshape(-1, 2)
    few, other = shares[:, 1] < config.min_letters, shares[:, 0] < config.min_share
    return FilterVerdict(np.where(few, 2, np.where(other, 1, 0)).astype(np.uint8))


def script_shares(text: str, scripts: tuple[str, ...]) -> tuple[float, float]:
    """Share of these scripts in a text's letters, and of letters in its visible characters."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    there = np.bincount(_script_of()[codes], minlength=len(SCRIPTS) + 2)
    kept = sum(int(there[1 + list(SCRIPTS).index(name)]) for name in scripts)
    visible = len(codes) - int(there[-1])
    letters = visible - int(there[0])
    return kept / max(letters, 1), letters / max(visible, 1)


@cache
def _script_of() -> np.ndarray:
    """uint8 [characters of Unicode]: the number of a letter's script, from 1; len(SCRIPTS) + 1 for
    spaces and control characters; else 0."""
    table = np.zeros(sys.maxunicode + 1, np.uint8)
    for number, blocks in enumerate(SCRIPTS.values(), 1):
        for first, last in blocks.split():
            table[ord(first) : ord(last) + 1] = number
    unseen = [*range(33), *(c for c in range(33, sys.maxunicode + 1) if chr(c).isspace())]
    table[unseen] = len(SCRIPTS) + 1
    return table


LANGUAGE = FilterFunctions(("another language", "no known language"), apply=filter_language)
SCRIPT = FilterFunctions(("another script", "few letters"), apply=filter_script)
