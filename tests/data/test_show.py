import json
from dataclasses import replace

import pytest

from jaxtrain.cli import main
from jaxtrain.data import DataConfig, describe_stores, prepare
from jaxtrain.data.show import shorten, show_rows
from jaxtrain.runs import report


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    for name, text in (("long", "abcdefghij" * 13), ("short", "klmno")):
        (folder / f"{name}.txt").write_text("".join(f"{text}{i}\n" for i in range(50)))
    source = lambda name: {"name": "text", "path": f"{folder}/{name}.txt", "document": "line"}
    sources = {
        "long": {"source": source("long")},
        "short": {"source": source("short"), "weight": 3},
    }
    fields = {"train": {"name": "mixture", "sources": sources}, "cache_dir": str(folder)}
    fields |= {"tokenizer": {"name": "bytes"}, "validation": {"name": "none"}}
    return fields


def lines_of(fields, packing, **options):
    config = DataConfig.model_validate(fields | {"packing": packing})
    sizes = {"batch_size": 8, "sequence_length": 40, **options}
    return "\n".join(show_rows(prepare(config), config, **sizes))


def test_rows_show_their_documents_cuts_and_padding(mixed):
    text = lines_of(mixed, {"name": "padded"}, rows=8, sequence_length=44)
    assert text.startswith("step 0: 8 rows of 44 tokens, packing padded, seed 0")
    assert text.count("== row") == 8 and text.count(", long: ") == 2
    long, short = text.index(", long: "), text.index(", short: ")
    assert ", long: 1 document, 44 tokens\n-- [1] document" in text[long:]
    assert "(end not in this row)" in text[long:].split("\n\n")[0]
    # Documents of six or seven bytes and their BOS.
    row = text[short:].split("\n\n")[0]
    assert " documents, " in row and "without label" not in row
    assert row.count("<bos>klmno") == row.count("-- [")
    assert "long     25.0%" in text and "short    75.0%" in text
    assert "bytes/token" in text and "crop " in text
    assert "long: of an epoch's documents 50 cropped (66.11% of the tokens), 0 left out" in text
    assert "short: of an epoch's documents 0 cropped (0.00% of the tokens), 0 left out" in text


def test_a_later_step_and_a_stage_of_short_rows(mixed):
    stages = [{"tokens": 640, "sequence_length": 20}, {}]
    text = lines_of(mixed | {"stages": stages}, {"name": "concat"}, step=1, rows=1)
    assert text.startswith("step 1: 16 rows of 20 tokens") and "== 2 steps: crop 0.00%" in text
    text = lines_of(mixed | {"stages": stages}, {"name": "concat"}, step=2, rows=1)
    assert text.startswith("step 2: 8 rows of 40 tokens")


def test_long_texts_keep_both_ends():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghij", 5) == "ab [... 5 characters ...] hij"


def test_the_command_line(mixed, tmp_path, capsys):
    path = tmp_path / "mixed.yaml"
    path.write_text(json.dumps({"data": mixed, "train": {"sequence_length": 40, "batch_size": 4}}))
    assert main(["show-data", str(path), "data.packing.name=best_fit", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("== row") == 2 and "packing best_fit" in out
    path.rename(tmp_path / "config.yaml")  # as in a run directory
    assert main(["show-data", str(tmp_path), "data.packing.name=best_fit", "--rows", "2"]) == 0
    assert capsys.readouterr().out == out
    assert main(["show-data", str(tmp_path), "data.train.sources.short.weight=-1"]) == 2
    assert "data.train.sources.short.weight" in capsys.readouterr().err


def test_the_report_has_a_section_on_the_data(mixed, tmp_path):
    prepared = prepare(DataConfig.model_validate(mixed))
    (tmp_path / "data.json").write_text(json.dumps(describe_stores(prepared.train)))
    row = {"step": 1, "kind": "train", "time": 1.0, "data_crop": 0.125, "data_fill": 0.75}
    row |= {"data_share_long": 0.25, "data_share_short": 0.75, "data_wait": 0.0012}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = report.write_report(tmp_path).read_text()
    assert "packing cropped 12.50%" in page and "75.00% are text and 25.00% padding" in page
    assert "Steps waited for data in 0.12% of their time" in page
    assert page.count("documents by length") == 2
    assert "<th>short</th><td>50</td><td>340</td><td>1.00</td><td>7</td><td>75.0%</td>" in page
    # All long documents have 131 or 132 tokens, all short ones 6 or 7: a bar each.
    assert "<th>256</th><td>50</td>" in page and page.count('class="bar"') == 2
    assert "is damaged" not in page
    lost = replace(prepared.train["long"], skipped={"/cache/00001.array_record": 3})
    (tmp_path / "data.json").write_text(json.dumps(describe_stores({"long": lost})))
    page = report.write_report(tmp_path).read_text()
    assert "00001.array_record is damaged: its 3 documents are left out" in page
    (tmp_path / "data.json").write_text("{")
    assert "<h2>Data</h2>" not in report.write_report(tmp_path).read_text()
