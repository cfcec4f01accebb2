import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jaxtrain.data.sources import (
    SHAKESPEARE,
    SOURCES,
    JsonlSource,
    ParquetSource,
    TextSource,
    content_hash,
    documents,
)
from jaxtrain.settings import UserError

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
LINES = "one\n\ntwo \u00e9\r\nthree\n \n\nfour"


def read(source):
    return list(documents(source))


def refuses(source, *parts):
    with pytest.raises(UserError) as error:
        read(source)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_every_kind_of_source_is_in_the_table():
    assert set(SOURCES) == {"text", "jsonl", "parquet"}


def test_tinyshakespeare_is_built_in():
    assert read(TextSource()) == [SHAKESPEARE.read_text()]


@pytest.mark.parametrize("ending", COMPRESS)
def test_text_is_cut_into_documents(tmp_path, ending):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(COMPRESS[ending](LINES.encode()))
    assert read(TextSource(path=str(path))) == [LINES]
    lines = ["one", "two \u00e9", "three", "four"]
    assert read(TextSource(path=str(path), document="line")) == lines
    paragraphs = ["one\n", "two \u00e9\r\nthree\n", "four"]
    assert read(TextSource(path=str(path), document="paragraph")) == paragraphs


@pytest.mark.parametrize("ending", COMPRESS)
def test_jsonl(tmp_path, ending):
    rows = [{"body": "a\nb", "id": 1}, {"body": "", "id": 2}, {"body": "\u00e9"}]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](text.encode()))
    assert read(JsonlSource(path=str(path), field="body")) == ["a\nb", "\u00e9"]


def test_parquet(tmp_path):
    pq.write_table(pa.table({"body": ["a", None, "b"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert read(ParquetSource(path=str(tmp_path), column="body")) == ["a", "b"]
    path = str(tmp_path / "a.parquet")
    refuses(ParquetSource(path=path), path, "no column 'text'", "body, n")
    refuses(ParquetSource(path=path, column="n"), path, "'n' is int64")
    (tmp_path / "b.parquet").write_text("no")
    refuses(ParquetSource(path=str(tmp_path / "b.parquet")), "b.parquet", "not a Parquet file")


def test_folders_and_globs_are_sorted_and_folders_filtered(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "notes.json"):
        (tmp_path / name).write_text(name)
    assert read(TextSource(path=str(tmp_path))) == ["a.txt", "b.txt", "c.md"]
    assert read(TextSource(path=f"{tmp_path}/*.txt")) == ["a.txt", "b.txt"]
    refuses(ParquetSource(path=str(tmp_path)), str(tmp_path), ".parquet")
    refuses(TextSource(path=f"{tmp_path}/*.rst"), f"no file matches {tmp_path}/*.rst")


def test_a_url_is_opened_by_fsspec():
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.txt", b"far away")
    assert read(TextSource(path="memory://corpus/a.txt")) == ["far away"]
    refuses(TextSource(path="nosuch://x"), "nosuch://x")


def test_bad_files_are_named(tmp_path):
    bad = tmp_path / "a.txt"
    refuses(TextSource(path=str(bad)), "no file or folder", str(bad))
    bad.write_text("")
    refuses(TextSource(path=str(bad)), str(bad), "holds no text")
    bad.write_bytes(b"fine\nso\xff")
    refuses(TextSource(path=str(bad)), str(bad), "not UTF-8", "offset 7")
    for ending in (".gz", ".xz", ".zst"):
        damaged = tmp_path / f"b.txt{ending}"
        damaged.write_bytes(b"not compressed at all")
        refuses(TextSource(path=str(damaged)), str(damaged), "decompressed")


@pytest.mark.parametrize(
    "line, parts",
    [
        ("{oops", ["line 2", "not valid JSON"]),
        ("[1]", ["line 2", "not a JSON object"]),
        ('{"body": "x", "id": 3}', ["line 2", "no field 'text'", "body, id"]),
        ('{"text": 5}', ["line 2", "'text' is int"]),
        ('{"text": "\\ud800"}', ["line 2", "no Unicode"]),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, parts):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n' + line + "\n")
    refuses(JsonlSource(path=str(path)), str(path), *parts)


def test_content_hash_follows_the_content_only(tmp_path):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("same")
    b.write_text("same")
    hash_of = lambda path: content_hash(TextSource(path=str(path)), tmp_path / "cache")
    assert hash_of(a) == hash_of(b)
    b.write_text("else")
    assert hash_of(a) != hash_of(b)


def test_a_large_file_is_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.sources.HASH_ALWAYS_BELOW", 3)
    path = tmp_path / "a.txt"
    path.write_text("large")
    source = TextSource(path=str(path))
    first = content_hash(source, tmp_path / "cache")
    monkeypatch.setattr("hashlib.file_digest", None)
    assert content_hash(source, tmp_path / "cache") == first
    path.write_text("larger")
    with pytest.raises(TypeError):
        content_hash(source, tmp_path / "cache")
