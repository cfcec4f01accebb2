"""Duplicates across the sources of a mixture: whose copy stays, the counts, any interruption."""

import json

import pytest
from test_quality import prose

from jaxtrain.cli import main
from jaxtrain.data import DataConfig, prepare, read_documents
from jaxtrain.data.filters import filtering, work
from jaxtrain.data.filters.filtered import filter_sources, report_lines
from jaxtrain.settings import UserError

BASE = [prose(60, seed) for seed in range(16)]
NEAR = [text + " And so on." for text in BASE]
TEXTS = {
    "web": [*BASE[:6], BASE[2], NEAR[9]],
    "wiki": [BASE[0], NEAR[1], *BASE[6:10]],
    "books": [BASE[5], BASE[6], NEAR[7], *BASE[10:13], BASE[12]],
}
BOTH = [{"name": "exact_duplicates"}, {"name": "near_duplicates"}]


@pytest.fixture
def sources(tmp_path):
    found = {}
    for name, texts in TEXTS.items():
        path = tmp_path / f"{name}.jsonl"
        rows = [{"text": text, "id": f"{name}{i}"} for i, text in enumerate(texts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[name] = {"source": {"name": "jsonl", "path": str(path)}}
    return found


def config(folder, sources, **options):
    train = {"name": "mixture", "sources": sources, "filters": BOTH} | options
    return DataConfig(
        train=train,
        validation={"name": "none"},
        tokenizer={"name": "bytes"},
        packing={"name": "best_fit"},
        cache_dir=str(folder / "cache"),
    )


def left(c):
    """The texts of each source, and the reports."""
    found, reports = filter_sources(c, lambda *_: None)
    parts = found.train.sources.items()
    return {name: list(read_documents(part.source)) for name, part in parts}, reports


def pairs(reports):
    return {
        name: {row["name"]: row["reasons"] for row in report["filters"]}
        for name, report in reports.items()
    }


def test_the_first_source_keeps_its_copies(tmp_path, sources):
    texts, reports = left(config(tmp_path, sources))
    assert texts == {
        "web": [*BASE[:6], NEAR[9]],
        "wiki": BASE[6:9],
        "books": BASE[10:13],
    }
    assert pairs(reports) == {
        "web": {"exact_duplicates": {"in web": 1}, "near_duplicates": {}},
        "wiki": {"exact_duplicates": {"in web": 1}, "near_duplicates": {"in web": 2}},
        "books": {
            "exact_duplicates": {"in web": 1, "in wiki": 1, "in books": 1},
            "near_duplicates": {"in wiki": 1},
        },
    }
    assert reports["wiki"]["read"] == {"documents": 6, "bytes": sum(map(len, TEXTS["wiki"]))}
    assert reports["wiki"]["kept"] == {"documents": 3, "bytes": sum(map(len, BASE[6:9]))}
    told = "\n".join(report_lines("wiki", reports["wiki"], samples=1))
    assert "exact_duplicates  -1 documents" in told and "(in web 1)" in told
    assert f"[in web] {BASE[0][:50]}" in told


def test_a_source_that_is_named_keeps_its_copies(tmp_path, sources):
    texts, reports = left(config(tmp_path, sources, first="books"))
    assert texts["books"] == [BASE[5], BASE[6], NEAR[7], *BASE[10:13]]
    assert texts["web"] == [*BASE[:5], NEAR[9]] and texts["wiki"] == [BASE[8]]
    assert list(texts) == ["web", "wiki", "books"]  # the mixture's order is its own
    assert pairs(reports)["web"]["exact_duplicates"] == {"in books": 1, "in web": 1}


def test_after_the_filters_of_a_source_itself(tmp_path, sources):
    short = {"name": "gopher_quality"}
    sources["web"]["source"] |= {"filters": [short], "sample_by": "id"}
    path = tmp_path / "web.jsonl"
    path.write_text(path.read_text() + '{"text": "too short", "id": "x"}\n')
    c = config(tmp_path, sources)
    texts, reports = left(c)
    assert texts["web"] == [*BASE[:6], NEAR[9]]
    rows = {row["name"]: row["documents"] for row in reports["web"]["filters"]}
    assert rows == {"gopher_quality": 1, "exact_duplicates": 1, "near_duplicates": 0}
    assert reports["web"]["read"]["documents"] == 9 and reports["web"]["kept"]["documents"] == 7
    assert filter_sources(c, lambda *_: None)[0].train.sources["web"].source.sample_by == "id"
    plain = config(tmp_path, sources | {"web": {"source": {"name": "jsonl", "path": str(path)}}})
    prepared = prepare(plain)
    assert {name: store.documents for name, store in prepared.train.items()} == {
        "web": 8, "wiki": 3, "books": 3
    }  # fmt: skip


def test_the_bytes_do_not_depend_on_interruptions(tmp_path, sources, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.files.reading.BLOCK", 1000)
    monkeypatch.setattr("jaxtrain.data.store.encode.BATCH", 1500)
    monkeypatch.setattr(filtering, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(filtering, "SHARD", 100)
    texts = {name: part.source for name, part in config(tmp_path, sources).train.sources.items()}
    filters = config(tmp_path, sources).train.filters
    files = lambda folder: {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
    whole = filtering.filter_across(texts, filters, tmp_path / "whole", key="k", processes=1)
    assert len(files(tmp_path / "whole")) > 5
    calls, stops = [], 0

    def failing(name):
        def called(job, thing):
            calls.append(name)
            if len(calls) % 3 == 0:
                raise KeyboardInterrupt
            return getattr(work, name)(job, thing)

        return called

    for name in ("apply_filters", "write_kept"):
        monkeypatch.setattr(filtering, name, failing(name))
    while stops < 40:
        try:
            again = filtering.filter_across(
                texts, filters, tmp_path / "again", key="k", processes=1
            )
            break
        except KeyboardInterrupt:
            stops += 1
            assert not (tmp_path / "again").exists()
    assert stops > 3 and again == whole
    assert sorted(files(tmp_path / "again").values()) == sorted(files(tmp_path / "whole").values())
    assert filtering.filter_across(texts, filters, tmp_path / "again", key="k") == whole


def test_the_command_and_what_is_wrong(tmp_path, sources, capsys):
    file, out = tmp_path / "c.yaml", tmp_path / "out"
    tree = {"data": config(tmp_path, sources).model_dump(mode="json")}
    file.write_text(json.dumps(tree))
    assert main(["filter", str(file), "--out", str(out)]) == 0
    assert "in web 1, in wiki 1, in books 1" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["books", "web", "wiki"]
    assert main(["filter", str(file), "--out", str(out), "data.train.first=none"]) == 2
    assert "first names 'none', but the sources are web, wiki, books" in capsys.readouterr().err
    assert main(["filter", str(file), "--out", str(out), "data.train.first=wiki"]) == 2
    assert "holds the result of other filters" in capsys.readouterr().err
    (tmp_path / "wiki.jsonl").write_text(json.dumps({"text": BASE[0]}) + "\n")
    with pytest.raises(UserError, match="leave no document of wiki: the sources before it have"):
        filter_sources(config(tmp_path, sources), lambda *_: None)
    with pytest.raises(ValueError, match="data.validation.name=documents"):
        DataConfig(train=config(tmp_path, sources).train, validation={"name": "tail"})
