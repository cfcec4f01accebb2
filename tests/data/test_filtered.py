"""Filters as part of preparing: the same on any number of processes, and after any interruption."""

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from test_quality import prose

from jaxtrain.cli import main
from jaxtrain.data import DataConfig, describe_stores, prepare, read_documents, stores_of
from jaxtrain.data.files.sources import JsonlSource
from jaxtrain.data.filters import filtering, work
from jaxtrain.data.filters.filtered import filter_sources, report_lines
from jaxtrain.runs.report_data import data_section
from jaxtrain.settings import UserError

FILTERS = [
    {"name": "gopher_quality"},
    {"name": "exact_duplicates"},
    {"name": "c4", "min_sentences": 1},
    {"name": "near_duplicates"},
    {"name": "score", "field": "score", "minimum": 10},
]
TEXTS = [prose(60, seed) for seed in range(40)]
TEXTS += [TEXTS[3], "too short", TEXTS[5] + " And so on.", TEXTS[7] + "\nno sentence"]
EXPECTED = [*TEXTS[10:40]]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.jsonl"
    rows = [{"text": text, "score": i, "id": f"d{i}"} for i, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(folder, path, **options):
    train = {"name": "jsonl", "path": str(path), "filters": FILTERS}
    rest = {"validation": {"name": "documents", "fraction": 0.2}, "tokenizer": {"name": "bytes"}}
    return DataConfig(**{"cache_dir": str(folder / "cache"), "train": train, **rest, **options})


def written(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def small_blocks(monkeypatch):
    """Each document or two is a group of its own, and each group is written down."""
    monkeypatch.setattr("jaxtrain.data.files.reading.BLOCK", 1000)
    monkeypatch.setattr("jaxtrain.data.store.encode.BATCH", 1500)
    monkeypatch.setattr(filtering, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(filtering, "SHARD", 600)


def test_what_is_left_is_what_is_tokenized(tmp_path, corpus):
    c = config(tmp_path, corpus)
    prepared = prepare(c)
    stores = {**stores_of(prepared.train), "validation": prepared.validation}
    texts = [
        prepared.tokenizer.decode(store.read(i, 0, int(n)))
        for store in stores.values()
        for i, n in enumerate(store.lengths)
    ]
    assert sorted(texts) == sorted(EXPECTED)
    report = prepared.filters["train"]
    assert {row["name"]: row["documents"] for row in report["filters"]} == {
        "gopher_quality": 1, "exact_duplicates": 1, "c4": 0, "near_duplicates": 2, "score": 10
    }  # fmt: skip
    rows = {row["name"]: row for row in report["filters"]}
    assert rows["gopher_quality"]["reasons"] == {"too few words": 1}
    assert rows["gopher_quality"]["samples"] == [{"reason": "too few words", "text": "too short"}]
    assert rows["exact_duplicates"]["bytes"] == len(TEXTS[3])
    assert rows["c4"]["cut_bytes"] == len("\nno sentence")
    assert report["read"] == {"documents": 44, "bytes": sum(map(len, TEXTS))}
    assert report["kept"] == {"documents": 30, "bytes": sum(map(len, EXPECTED))}
    lost = sum(row["bytes"] + row["cut_bytes"] for row in report["filters"])
    assert report["kept"]["bytes"] + lost == report["read"]["bytes"]
    told = "\n".join(report_lines("train", report, samples=1))
    assert "near_duplicates   -2 documents (4.55%)" in told and "[too few words] too short" in told
    page = tmp_path / "run"
    page.mkdir()
    corpus_of = describe_stores(stores_of(prepared.train), prepared.filters)
    (page / "data.json").write_text(json.dumps(corpus_of))
    section = data_section(page, [])
    assert "near_duplicates" in section and "4.55%" in section and "too few words 1" in section
    again = filter_sources(c, lambda *_: pytest.fail("filtered again"))[1]
    assert again == prepared.filters


def test_other_fields_stay_and_the_order_too(tmp_path, corpus):
    assert (
        main(["filter", str(written_config(tmp_path, corpus)), "--out", str(tmp_path / "o")]) == 0
    )
    rows = rows_of(tmp_path / "o")
    assert [row["id"] for row in rows] == [f"d{i}" for i in range(10, 40)]
    assert [row["text"] for row in rows] == EXPECTED


def test_columns_of_parquet_and_fields_of_jsonl_keep_their_names(tmp_path):
    count = 9
    table = {
        "text": [f"a field of another kind {i}" for i in range(count)],
        "body": [prose(60, i) for i in range(count)],
        "n": [*range(count - 1), None],
        "tags": [["a", "b"]] * count,
        "meta": [{"dump": "CC", "score": 0.5}] * count,
        "bytes": [b"\xff"] * count,
        "day": [datetime.date(2026, 11, 21)] * count,
    }
    table["body"][3] = "too short"
    pq.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=4)
    rows = [dict(zip(table, row)) for row in zip(*table.values())]
    del rows[3]
    rows = [row | {"bytes": "/w==", "day": "2026-11-21"} for row in rows]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, field in (("parquet", "column"), ("jsonl", "field")):
        source = {"name": name, "path": str(tmp_path / f"t.{name}"), field: "body"}
        train = source | {"filters": [{"name": "gopher_quality"}]}
        c = config(tmp_path, None, train=train)
        left = filter_sources(c, lambda *_: None)[0].train
        assert rows_of(Path(left.path)) == rows
        assert list(read_documents(left)) == [row["body"] for row in rows]


def rows_of(folder):
    reader = zstandard.ZstdDecompressor().stream_reader(
        (folder / "00000.jsonl.zst").read_bytes(), read_across_frames=True
    )
    return [json.loads(line) for line in reader.read().decode().splitlines()]


def written_config(folder, path):
    file = folder / "c.yaml"
    tree = {"data": config(folder, path).model_dump(mode="json")}
    file.write_text(json.dumps(tree))
    return file


def test_the_command_says_what_is_wrong(tmp_path, corpus, capsys):
    file = str(written_config(tmp_path, corpus))
    out = ["--out", str(tmp_path / "o")]
    assert main(["filter", file]) == 2 and "required: --out" in capsys.readouterr().err
    assert main(["filter", file, "data.train.filters=[]", *out]) == 2
    assert "data.train.filters is empty" in capsys.readouterr().err
    assert main(["filter", file, *out]) == 0 and main(["filter", file, *out]) == 0
    told = capsys.readouterr().out
    assert told.count("left") == 2 and "30 documents (68.18%)" in told
    hard = "data.train.filters=[{name: gopher_quality, min_words: 1000}]"
    assert main(["filter", file, hard, *out]) == 2
    assert "holds the result of other filters" in capsys.readouterr().err
    assert main(["filter", file, hard, "--out", str(tmp_path / "p")]) == 2
    assert "leave no document; gopher_quality removes 44 of 44" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_processes_nor_on_interruptions(tmp_path, corpus, monkeypatch):
    small_blocks(monkeypatch)
    source = config(tmp_path, corpus).train
    whole = filtering.filter_source(source, tmp_path / "whole", key="k", processes=1)
    files = written(tmp_path / "whole")
    assert (
        len(files) > 3
        and list(read_documents(JsonlSource(path=str(tmp_path / "whole")))) == EXPECTED
    )
    monkeypatch.setattr(filtering, "ALONE", 0)
    many = filtering.filter_source(source, tmp_path / "many", key="k", processes=3)
    assert many == whole and written(tmp_path / "many") == files
    monkeypatch.setattr(filtering, "ALONE", 1 << 22)
    begun = {"apply_filters": [], "write_kept": []}
    for fail_after in range(3, 60, 7):
        calls = iter(range(fail_after))

        def failing(name, calls=calls, old=None):
            def called(job, thing):
                if next(calls, None) is None:
                    raise KeyboardInterrupt
                begun[name].append(0)
                return getattr(work, name)(job, thing)

            return called

        for name in begun:
            monkeypatch.setattr(filtering, name, failing(name))
        try:
            again = filtering.filter_source(source, tmp_path / "again", key="k", processes=1)
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "again").exists()
    assert again == whole and written(tmp_path / "again") == files
    assert all(len(calls) < 3 * len(TEXTS) for calls in begun.values())


def test_scores_of_parquet_and_sources_of_a_mixture(tmp_path, corpus):
    table = pa.table({"body": TEXTS[:20], "score": [float(i) for i in range(20)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    best = {"name": "score", "field": "score", "keep_fraction": 0.25}
    parts = {
        "a": {"source": {"name": "parquet", "path": str(tmp_path / "t.parquet"),
                         "column": "body", "filters": [best]}},
        "b": {"source": {"name": "jsonl", "path": str(corpus)}},
    }  # fmt: skip
    corpus_source = {"name": "jsonl", "path": str(corpus), "filters": FILTERS}
    c = config(
        tmp_path,
        corpus,
        train={"name": "mixture", "sources": parts},
        validation={"name": "source", "source": corpus_source},
    )
    left, reports = filter_sources(c, lambda *_: None)
    assert list(read_documents(left.train.sources["a"].source)) == TEXTS[15:20]
    assert left.train.sources["b"] == c.train.sources["b"]
    assert list(read_documents(left.validation.source)) == EXPECTED
    assert reports["a"]["filters"][0]["reasons"] == {"not in the share": 15}
    assert set(reports) == {"a", "validation"}


def test_filters_need_documents_to_hold_out(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"data.validation.name=documents"):
        config(tmp_path, corpus, validation={"name": "tail"})
    with pytest.raises(UserError, match="leave no document"):
        filters = [{"name": "gopher_quality", "min_words": 1000}]
        train = {"name": "jsonl", "path": str(corpus), "filters": filters}
        prepare(config(tmp_path, corpus, train=train))
