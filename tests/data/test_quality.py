"""What each filter removes, by texts that break one rule each."""

import json
import random
import re
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from jaxtrain.data.filters import FILTERS, Filter
from jaxtrain.data.filters.arrays import TextArrays, group_equal, ngrams, seen_before
from jaxtrain.data.filters.batch import TextBatch, changed, compatible
from jaxtrain.data.filters.duplicates import equal_pairs, join_clusters
from jaxtrain.data.filters.marks import (
    BYTES,
    MOST_PARTS,
    MarkFiles,
    count_parts,
    mark_columns,
)
from jaxtrain.settings import UserError

VOCABULARY = (
    "river stone morning letter garden window music paper winter forest travel bridge harbor "
    "market silver candle mountain village teacher summer animal circle doctor family history"
)
WORDS = VOCABULARY.split()


def prose(words=80, seed=0):
    """English as the rules see it: no two sentences are alike."""
    draw = random.Random(seed)
    sentences = []
    while words > 0:
        some = draw.choices(WORDS, k=9)
        some[2], some[5] = draw.sample(["the", "and", "to", "that", "with", "of"], 2)
        sentences.append(" ".join(some).capitalize() + f" {len(sentences)}.")
        words -= 10
    return " ".join(sentences)


def config_of(name, **options):
    return TypeAdapter(Filter).validate_python({"name": name, **options})


def decided(kind, config, features, parts=1):
    """The verdicts of a filter that compares documents; their marks are in two files."""
    sources = np.zeros(len(features), int)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "0.npz", Path(folder) / "1.npz"]
        for path, some in zip(files, np.split(features, [len(features) // 3])):
            np.savez(path, **mark_columns({2: some}))
        marks = MarkFiles(files, 2, np.ones(len(features), bool), parts, Path(folder))
        found = kind.decide(config, marks, sources, map)
        assert sorted(Path(folder).iterdir()) == files
    return found


def reasons(name, texts, records=None, **options):
    """Why a filter removes each text, None where it stays."""
    config, kind = config_of(name, **options), FILTERS[name]
    batch = TextBatch(texts, records or [{}] * len(texts))
    if kind.apply is not None:
        found = kind.apply(config, batch).reasons
    else:
        found = decided(kind, config, kind.features(config, batch))
    return [kind.reasons[number - 1] if number else None for number in found.tolist()]


GOOD = prose()
BROKEN = {
    ("gopher_quality", "too few words"): prose(30),
    ("gopher_quality", "length of the words"): GOOD + " a" * 200,
    ("gopher_quality", "hash signs"): GOOD.replace(".", " # # ."),
    ("gopher_quality", "ellipses"): GOOD.replace(" ", "... ", 20),
    ("gopher_quality", "bullets"): "- " + GOOD.replace(". ", ".\n- "),
    ("gopher_quality", "lines that break off"): GOOD.replace(". ", "...\n", 5),
    ("gopher_quality", "words without letters"): GOOD + " 12345" * 30,
    ("gopher_quality", "no stop words"): " ".join(WORDS * 3),
    ("gopher_repetition", "lines"): GOOD + "\n" + "so\n" * 40,
    ("gopher_repetition", "characters of lines"): prose(40) + f"\n{prose(20, 1)}" * 2 + "\na\nb",
    ("gopher_repetition", "most frequent words"): GOOD.replace(". ", ". the mountain village "),
    ("gopher_repetition", "sequences of words"): " ".join(prose(30, i % 12) for i in range(15)),
    ("c4", "curly bracket"): GOOD + "\nint main() { return 0; }",
    ("c4", "lorem ipsum"): GOOD + " Lorem Ipsum dolor sit amet.",
    ("c4", "too few sentences"): GOOD.replace(".", ","),
    ("fineweb", "ends of lines"): GOOD.replace(". ", "\n") + "\nIt is so",
    ("fineweb", "repeated lines"): GOOD + ("\n" + prose(20, 1)) * 2,
    ("fineweb", "short lines"): GOOD + "\nIt is so." * 3 + "\nIt was.",
    ("language", "another language"): "Der Hund und die Katze mit dem Mann auf der Wiese. " * 3,
    ("language", "no known language"): " ".join(WORDS),
    ("script", "another script"): GOOD + " \u043f\u0440\u0438\u0432\u0435\u0442" * 40,
    ("script", "few letters"): "1 2 3 4 5 6 7 8 9 " * 20 + "words",
}  # fmt: skip


@pytest.mark.parametrize(("name", "reason"), BROKEN)
def test_a_rule_removes_what_breaks_it_and_nothing_else(name, reason):
    texts = [GOOD, BROKEN[name, reason], prose(100, 3)]
    assert reasons(name, texts) == [None, reason, None]
    assert set(FILTERS[name].reasons) >= {reason}


def test_the_rules_are_of_documents_whatever_stands_beside_them():
    texts = [GOOD, *BROKEN.values(), "", "\u4e2d\u6587\u3002", "x"]
    for name in ("gopher_quality", "gopher_repetition", "c4", "fineweb", "language", "script"):
        together = reasons(name, texts)
        assert together == [reasons(name, [text])[0] for text in texts]
        assert reasons(name, []) == []


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("gopher_quality", {"max_words": 79}, GOOD),
        ("gopher_repetition", {"max_paragraphs": 0.1}, "ab\n\n" * 2 + "cd\n\nef\n\ng"),
        ("gopher_repetition", {"max_paragraph_characters": 0.1}, "ab\n\n" * 2 + prose(20)),
        ("c4", {"min_line_words": 90}, GOOD),
        ("c4", {"min_sentences": 11}, GOOD),
        ("fineweb", {"short_line": 2000, "max_short_lines": 1}, GOOD),
    ],
)
def test_a_threshold_is_a_setting(name, options, text):
    assert reasons(name, [text], **options) != [None]


def test_fineweb_as_the_paper_and_as_datatrove_have_it():
    """Where the two differ: repeated lines, quotation marks, lists, and what is at a bound."""
    line = "The river runs to the harbor and the market."
    repeated = "\n".join([*(f"{line[:-1]} {i}." for i in range(30)), line, line])
    quoted = "\n".join(f'"{line} {i}"' for i in range(9))
    lists = "\n\n\n".join(f"Notwithstanding circumstances {i}, it is." for i in range(9))
    devanagari = "\n".join(f"\u0928\u0926\u0940 {'\u0915 ' * 40}{i}\u0964" for i in range(9))
    at_bound = "\n".join(f"{line * 2} {i}" + "." * (i < 3) for i in range(25))
    texts = [GOOD, repeated, quoted, lists, devanagari, at_bound, ""]
    ends = "ends of lines"
    assert reasons("fineweb", texts) == [None, None, None, None, ends, ends, ends]
    assert reasons("fineweb", texts, preset="datatrove") == [
        None, "repeated lines", ends, "line breaks", None, None, "line breaks"
    ]  # fmt: skip
    loose = {"max_repeated": 0.1, "max_line_breaks": 0.6, "min_line_ends": 0}
    assert reasons("fineweb", texts[:-1], preset="datatrove", **loose) == [None] * 6
    assert reasons("fineweb", texts[:2], max_repeated=0.01) == [None, "repeated lines"]


def test_c4_takes_lines_away():
    good = "The river runs to the harbor.\nThe letter was long and it came late!"
    bad = ["No end of a sentence here", "Too short.", "Enable JavaScript to read this page.",
           "Our privacy policy has been changed today."]  # fmt: skip
    text = "\n".join([good, *bad, '"So it is with all letters," he said to her.[12]'])
    verdict = FILTERS["c4"].apply(config_of("c4"), TextBatch([text], [{}]))
    assert verdict.reasons.tolist() == [0]
    assert verdict.texts == [good + '\n"So it is with all letters," he said to her.']
    loose = config_of("c4", terminal_punctuation=False, min_line_words=0, curly_brackets=False)
    verdict = FILTERS["c4"].apply(loose, TextBatch([text + "\n{}"], [{}]))
    assert verdict.reasons.tolist() == [0] and bad[0] in verdict.texts[0]
    assert bad[2] not in verdict.texts[0]


# ---- arrays ------------------------------------------------------------------------------------


def spelled(arrays, spans):
    return [arrays.data[a:b].tobytes().decode() for a, b in zip(spans.starts, spans.stops)]


def test_words_lines_and_paragraphs_are_cut_as_python_does():
    quoted = "\u201cDon\u2019t\u201d \u2014 \u4e2d\u6587\u3002a"
    texts = ["A b,\n c\u00e9d\n\n\nx", "", " \x1f", quoted, "last"]
    arrays = TextArrays(texts)
    assert spelled(arrays, arrays.words) == [word for text in texts for word in text.split()]
    lines = [line for text in texts for line in text.split("\n") if line]
    assert spelled(arrays, arrays.lines) == lines
    assert spelled(arrays, arrays.paragraphs) == ["A b,\n c\u00e9d", "x", " \x1f", quoted, "last"]
    folded = ["A", "b", "c\u00e9d", "x", "Don", "t", "\u4e2d", "\u6587", "a", "last"]
    assert spelled(arrays, arrays.folded_words) == folded
    assert arrays.folded_words.texts.tolist() == [0] * 4 + [3] * 5 + [4]
    assert arrays.sizes.tolist() == [len(text) for text in texts]


def test_equal_words_have_equal_hashes_wherever_they_stand():
    draw = random.Random(0)
    words = ["".join(draw.choices("ab", k=draw.randint(1, 9))) for _ in range(3000)]
    spans = TextArrays([" ".join(words[:2000]), " ".join(words[2000:])]).words
    assert len(set(spans.hashes.tolist())) == len(set(words))
    assert dict(zip(words, spans.hashes.tolist())) == dict(
        zip(words[::-1], spans.hashes[::-1].tolist())
    )
    hashes, first = ngrams(spans, 3)
    known = [tuple(words[i : i + 3]) for i in first]
    assert len(first) == 3000 - 4 and len(set(hashes.tolist())) == len(set(known))
    seen, again = set(), []
    for text, gram in zip(spans.texts[first], known):
        again.append((text, gram) in seen)
        seen.add((text, gram))
    assert seen_before(hashes, spans.texts[first]).tolist() == again
    places, same = group_equal(hashes, spans.texts[first])
    assert sorted(places.tolist()) == list(range(len(first))) and same.sum() == sum(again)


# ---- spaces and forms of letters ---------------------------------------------------------------

ODD = "\u00a0\u1680\u2003\u2009\u202f\u205f\u3000\u2028\x85"


def with_odd_spaces(text, seed=0):
    draw = random.Random(seed)
    return "".join(draw.choice(ODD) if c == " " and draw.random() < 1 / 3 else c for c in text)


def wide(text):
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


@pytest.mark.parametrize("name", ["gopher_quality", "gopher_repetition", "c4", "fineweb", "script"])
def test_a_space_of_another_kind_is_a_space(name):
    texts = [GOOD, *(text for (of, _), text in BROKEN.items() if of == name)]
    odd = [with_odd_spaces(text) for text in texts]
    assert reasons(name, odd) == reasons(name, texts)
    assert TextBatch(odd, [{}] * len(odd)).spaced == [re.sub(r"[^\S\n]", " ", t) for t in texts]


def test_documents_stay_as_they_were_written():
    text = with_odd_spaces("The river runs to the harbor today.\nNo end of this sentence\n" * 3)
    verdict = FILTERS["c4"].apply(config_of("c4"), TextBatch([text], [{}]))
    assert verdict.reasons.tolist() == [0]
    assert verdict.texts == ["\n".join(text.split("\n")[::2][:3])]
    bad = "Please read our privacy\u00a0policy before you go."
    verdict = FILTERS["c4"].apply(config_of("c4"), TextBatch([f"{text}\n{bad}"], [{}]))
    assert bad not in verdict.texts[0]


def test_documents_are_compared_whatever_their_spaces_and_letters():
    for change in (with_odd_spaces, wide, lambda t: t.replace("river", "ri\u00adver")):
        copies = [change(prose(80, seed)) for seed in range(20)]
        found = reasons("near_duplicates", [prose(80, seed) for seed in range(20)] + copies)
        assert found == [None] * 20 + ["near duplicate"] * 20
        assert reasons("language", copies) == [None] * 20
    assert reasons("gopher_quality", [wide(GOOD)]) == reasons("script", [wide(GOOD)]) == [None]


@pytest.mark.slow
@given(st.lists(st.text(max_size=20), max_size=5))
@example(
    ["\uff76\uff9e", "e\u0301\u0323", "\u3131\u314f", "\uac00\u11a8", "\uff21\u030a", "\ufdfa"]
)
def test_texts_are_folded_as_unicode_says(texts):
    """Many texts at once as one after the other by the whole table."""
    texts = [text.encode(errors="ignore").decode() for text in texts]
    found = changed(texts, TextArrays(texts), compatible())
    plain = [unicodedata.normalize("NFKC", text) for text in texts]
    plain = ["".join(" " if c.isspace() and c > "\x7f" else c for c in text) for text in plain]
    assert found == [re.sub("[\u00ad\u2060\ufeff]", "", text) for text in plain]


# ---- duplicates --------------------------------------------------------------------------------


def test_the_first_of_equal_texts_stays():
    assert reasons("exact_duplicates", ["a", "b", "a", "A", "b"]) == [
        None, None, "duplicate", None, "duplicate"
    ]  # fmt: skip


def test_near_duplicates_are_found_by_the_words_that_they_share():
    """Of 60 pairs that share 95% of their shingles nearly all, of 60 that share a third none."""
    texts, pairs = [], 60
    for seed in range(pairs):
        words = random.Random(seed).choices([f"w{i}" for i in range(5000)], k=400)
        near, far = list(words), list(words)
        near[200:202] = ["other", "words"]
        far[200:] = random.Random(-1 - seed).choices([f"v{i}" for i in range(5000)], k=200)
        texts += [" ".join(words), " ".join(near).upper() + "!", " ".join(far)]
    found = np.array([reason is not None for reason in reasons("near_duplicates", texts)])
    assert found[1::3].mean() > 0.95 and not found[0::3].any() and not found[2::3].any()
    strict = reasons("near_duplicates", texts, bands=1, rows=100)
    assert sum(reason is not None for reason in strict) < pairs // 4
    assert reasons("near_duplicates", ["a b", "a b!", "b a", "...", "?"]) == [
        None, "near duplicate", None, None, None
    ]  # fmt: skip


def test_the_chance_to_find_a_pair_is_that_of_the_formula():
    """Shared parts around 0.69, where it is 1/2 with the defaults."""
    texts, shared = [], []
    for seed in range(150):
        draw = random.Random(seed)
        words = [f"w{draw.randrange(10**6)}" for _ in range(300)]
        start = 300 - 55
        texts += [
            " ".join(words),
            " ".join([*words[:start], *(f"v{draw.randrange(10**6)}" for _ in range(55))]),
        ]
        whole, part = 296, start - 4
        shared.append(part / (2 * whole - part))
    found = [reason is not None for reason in reasons("near_duplicates", texts, ngram=5)][1::2]
    expected = np.mean([1 - (1 - s**8) ** 14 for s in shared])
    assert abs(np.mean(found) - expected) < 0.12


def test_clusters_reach_through_others():
    keys = np.array([[1, 9], [2, 8], [3, 9], [2, 7], [5, 7], [0, 0], [0, 0]], np.uint64)
    first = np.arange(7)
    for column in keys.T:
        there = np.flatnonzero(column)
        pairs = np.stack([column[there], there.astype(np.uint64)], axis=1)
        join_clusters(first, equal_pairs(pairs))
    assert first.tolist() == [0, 1, 0, 1, 1, 5, 6]


@pytest.mark.parametrize("name", ["near_duplicates", "exact_duplicates"])
def test_partitions_change_no_verdict(name):
    """Whatever memory they are bounded to."""
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 2**64, (400, 6), np.uint64)
    keys[draw.random(keys.shape) < 0.1] = 0
    copies = draw.integers(0, 400, 300), draw.integers(0, 400, 300), draw.integers(0, 6, 300)
    keys[copies[0], copies[2]] = keys[copies[1], copies[2]]
    keys = keys if name == "near_duplicates" else keys[:, 0]
    found = [decided(FILTERS[name], config_of(name), keys, parts) for parts in (1, 2, 7, 100)]
    assert 0 < found[0].sum() < 400 and all((one == found[0]).all() for one in found)


def test_memory_decides_the_number_of_partitions():
    assert count_parts(1000, 6, 4.0) == 1
    documents, tasks = 10**8, 30
    parts = count_parts(documents, tasks, 4.0)
    assert documents / parts * tasks * BYTES <= 4 * 2**30 < documents / (parts - 1) * tasks * BYTES
    assert count_parts(10**12, tasks, 4.0) == MOST_PARTS


# ---- scores and evaluation sets ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"minimum": 2}, [2, 3, 5]),
        ({"maximum": 3}, [0, 1, 3, 6]),
        ({"keep_fraction": 0.5}, [2, 3, 5]),
        ({"keep_fraction": 0.5, "keep": "lowest"}, [0, 1, 6]),
        ({"keep_fraction": 0.4, "keep": "middle"}, [1, 3]),
        ({"minimum": 1, "keep_fraction": 0.5, "keep": "lowest"}, [1, 3]),
    ],
)
def test_scores_bound_and_rank(options, kept):
    scores = [0.0, 1, 5, 2.0, None, 4, 0.5]
    records = [{"s": score} for score in scores]
    found = reasons("score", ["x"] * 7, records, field="s", **options)
    assert [i for i, reason in enumerate(found) if reason is None] == kept


def test_a_score_that_is_none_is_an_error():
    with pytest.raises(UserError, match="reads a number from 's', not 'high'"):
        reasons("score", ["x"], [{"s": "high"}], field="s", minimum=0)
    with pytest.raises(UserError, match="no document has a field 's'"):
        reasons("score", ["x"], [{"t": 1}], field="s", minimum=0)
    with pytest.raises(ValueError, match="needs minimum, maximum or keep_fraction"):
        config_of("score", field="s")


@pytest.fixture
def evaluation(tmp_path):
    """A bundle of two tasks."""
    words = [f"q{i}" for i in range(20)]
    (tmp_path / "core.yaml").write_text(json.dumps({"icl_tasks": [
        {"label": label, "dataset_uri": f"{label}.jsonl", "num_fewshot": [1], "random_baseline": 0,
         "icl_task_type": "language_modeling"} for label in ("one", "two")
    ]}))  # fmt: skip
    for label in ("one", "two"):
        texts = [[f"{label}{i}{word}" for word in words] for i in range(2)]
        examples = [{"context": " ".join(t[:12]), "continuation": " ".join(t[12:])} for t in texts]
        (tmp_path / f"{label}.jsonl").write_text("\n".join(map(json.dumps, examples)) + "\n")
    return tmp_path


def found_in(folder, texts, **options):
    config = config_of("decontaminate", **options)
    ready = FILTERS["decontaminate"].prepare(config, folder / "cache")
    return (
        FILTERS["decontaminate"].apply(ready, TextBatch(texts, [{}] * len(texts))).reasons.tolist()
    )


def test_what_an_evaluation_asks_is_found(evaluation, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CORE", str(evaluation))
    words = [f"one1q{i}" for i in range(20)]
    crossing = "Before " + " ".join(words[5:18]).upper().replace(" ", ", ") + " after."
    short = "Before " + " ".join(words[5:17]) + " after."
    other = " ".join(f"two0q{i}" for i in range(20))
    assert found_in(evaluation, [GOOD, crossing, short, other]) == [0, 1, 0, 1]
    assert found_in(evaluation, [crossing, short], ngram=6) == [1, 1]
    assert found_in(evaluation, [crossing, other], against=["two"]) == [0, 1]
    assert found_in(evaluation, [crossing, other], spare=["two"]) == [1, 0]
    assert found_in(evaluation, [crossing, other], min_hits=3) == [0, 1]
    odd = [with_odd_spaces(crossing), wide(crossing), crossing.replace("Q7", "\u211a7")]
    assert found_in(evaluation, odd) == [1, 1, 1]
    (evaluation / "mine.jsonl").write_text(json.dumps({"a": [{"b": GOOD}], "c": 3}) + "\n")
    mine = {"against": [str(evaluation / "mine.jsonl")]}
    assert found_in(evaluation, [GOOD, crossing], **mine) == [1, 0]
    identity = FILTERS["decontaminate"].input_hash
    first = identity(config_of("decontaminate"))
    (evaluation / "two.jsonl").write_text("")
    assert identity(config_of("decontaminate")) != first
    (evaluation / "mine.jsonl").write_text('{"a": "b"}\n\n{')
    with pytest.raises(UserError, match=r"mine.jsonl line 3 is not valid JSON"):
        found_in(evaluation, [], **mine)
    with pytest.raises(UserError, match="decontaminate cannot read none.jsonl"):
        found_in(evaluation, [], against=["none.jsonl"])


def test_a_text_of_fewer_words_is_found_as_a_whole(evaluation, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CORE", str(evaluation))
    examples = [
        ("The capital of the river is", "Stone Harbor"),
        ("It follows", "summer"),
        ("He", "left"),
        (" ".join(WORDS[:11]), WORDS[11]),
        ("...", "!"),
    ]
    lines = [json.dumps({"context": a, "continuation": b}) for a, b in examples]
    (evaluation / "one.jsonl").write_text("\n".join(lines) + "\n")
    (evaluation / "two.jsonl").write_text(lines[0] + "\n" + lines[1] + "\n")
    whole = ["the capital, of the RIVER: is stone harbor", "It follows Summer!", "he left"]
    whole += [" ".join(WORDS[:12]), "so the capital of the river is Stone Harbor now"]
    parts = ["the capital of the river is stone", "It follows", "He", " ".join(WORDS[:11]), "...!"]
    assert found_in(evaluation, whole, min_hits=2) == [1] * 5
    assert found_in(evaluation, parts) == [0] * 5
    cut = ["the capital of the river is", "stone harbor it follows"]  # not of one document
    assert found_in(evaluation, cut) == [0, 0]
    assert found_in(evaluation, [*whole, *parts], against=["two"]) == [1, 1, 0, 0, 1] + [0] * 5
