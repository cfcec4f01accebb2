import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jaxtrain.data.files import reading
from jaxtrain.data.files.reading import SOURCES, blocks, read_documents, texts_of
from jaxtrain.data.files.sources import (
    SHAKESPEARE,
    ChatSource,
    CodeSource,
    JsonlSource,
    ParquetSource,
    TextSource,
    content_hash,
    find_files,
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
    return list(read_documents(source))


def refuses(source, *parts):
    with pytest.raises(UserError) as error:
        read(source)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_every_kind_of_source_is_in_the_table():
    assert set(SOURCES) == {"text", "jsonl", "parquet", "code", "chat", "preference"}


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


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_text_of_parquet_however_it_is_stored(tmp_path, kind):
    texts = ["a", None, "b", "a"]
    column = pa.array(texts, kind.value_type if pa.types.is_dictionary(kind) else kind)
    table = pa.table({"text": column.cast(kind), "n": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.nulls(3)}), tmp_path / "b.parquet")
    assert pq.read_schema(tmp_path / "a.parquet").field("text").type == kind
    assert read(ParquetSource(path=str(tmp_path))) == ["a", "b", "a"]
    refuses(ParquetSource(path=str(tmp_path / "b.parquet")), "b.parquet", "holds no text")


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_byte_order_mark_is_no_text(tmp_path, ending, monkeypatch):
    rows = [json.dumps({"text": text}) for text in ("\u00e9", "\ufeffb")]
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending]("\n".join(rows).encode("utf-8-sig")))
    assert read(JsonlSource(path=str(path))) == ["\u00e9", "\ufeffb"]
    text = tmp_path / f"a.txt{ending}"
    text.write_bytes(COMPRESS[ending]("a\n\ufeffb".encode("utf-8-sig")))
    assert read(TextSource(path=str(text))) == ["a\n\ufeffb"]
    monkeypatch.setattr(reading, "BLOCK", 1)
    assert read(TextSource(path=str(text), document="line")) == ["a", "\ufeffb"]
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfx = 1")
    assert read(CodeSource(path=str(tmp_path))) == ["x = 1"]
    talk = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    for name, records in (("c.jsonl", talk), ("c.json", [talk])):
        (tmp_path / name).write_text(json.dumps(records), encoding="utf-8-sig")
        assert len(read(ChatSource(path=str(tmp_path / name)))) == 1


def test_folders_and_globs_are_sorted_and_folders_filtered(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "notes.json"):
        (tmp_path / name).write_text(name)
    assert read(TextSource(path=str(tmp_path))) == ["a.txt", "b.txt", "c.md"]
    assert read(TextSource(path=f"{tmp_path}/*.txt")) == ["a.txt", "b.txt"]
    refuses(ParquetSource(path=str(tmp_path)), str(tmp_path), ".parquet")
    refuses(TextSource(path=f"{tmp_path}/*.rst"), f"no file matches {tmp_path}/*.rst")


def test_a_file_may_have_the_name_of_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    assert read(TextSource(path=f"{tmp_path}/a[1].txt")) == ["one"]


def test_links_count_as_what_they_point_to(tmp_path):
    """The layout of a snapshot that Hugging Face's hub leaves: names that link to blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main" / "data"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, blob in enumerate(("5a", "b3", "0c")):
        (blobs / blob).write_text(f"{i}")
        (snapshot / f"{i}.txt").symlink_to(f"../../../blobs/{blob}")
    (tmp_path / "linked").symlink_to(snapshot.parent)
    for path in (tmp_path / "snapshots", snapshot, tmp_path / "linked", f"{tmp_path}/*/main/*/*"):
        assert read(TextSource(path=str(path))) == ["0", "1", "2"]
    assert read(TextSource(path=f"{tmp_path}/**/*.txt")) == ["0", "1", "2"]
    assert [file.size for file in find_files(TextSource(path=str(snapshot)))] == [1, 1, 1]


def test_no_file_counts_twice(tmp_path):
    for name in ("b.txt", "in/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "d.txt").symlink_to("in/c.txt")
    (tmp_path / "out").symlink_to("in")
    assert read(TextSource(path=str(tmp_path))) == ["b.txt", "in/c.txt"]
    assert read(TextSource(path=f"{tmp_path}/[ad].txt")) == ["b.txt", "in/c.txt"]
    for i in range(1, 13):
        (tmp_path / f"{i}.txt").write_text(f"{i}")
    assert len(read(TextSource(path=f"{tmp_path}/{{1..12}}*.txt"))) == 12


def test_links_that_lead_nowhere_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.storage.objects.time", None)  # it is not tried again
    (tmp_path / "a.txt").write_text("a")
    loop, link = tmp_path / "loop.txt", tmp_path / "link.txt"
    loop.symlink_to("loop.txt")
    for path in (loop, tmp_path, f"{tmp_path}/*", f"{loop}/in"):
        refuses(TextSource(path=str(path)), str(loop), "levels of symbolic links")
    loop.unlink()
    link.symlink_to("gone.txt")
    for path in (link, tmp_path, f"{tmp_path}/*.txt"):
        refuses(TextSource(path=str(path)), f"{link} is a broken link to gone.txt")
    assert read(CodeSource(path=str(tmp_path), suffixes=(".txt",))) == ["a"]
    link.unlink()
    (tmp_path / "again").symlink_to(".")
    for path in (tmp_path, f"{tmp_path}/**"):
        refuses(
            TextSource(path=str(path)), f"{tmp_path}/again is a link to a folder that contains it"
        )
    assert read(CodeSource(path=str(tmp_path), suffixes=(".txt",))) == ["a"]


def test_names_that_mean_something_elsewhere(tmp_path):
    odd = tmp_path / "br[0]"
    odd.mkdir()
    (odd / "a::b.txt").write_text("one")
    (odd / "[c].txt").write_text("two")
    (tmp_path / "br0").mkdir()
    (tmp_path / "br0" / "d.txt").write_text("not asked for")
    both = ["two", "one"]
    for path in (odd, f"{odd}/*.txt", f"{tmp_path}/br[0]/*", f"{tmp_path}/br[[]0]/*"):
        assert read(TextSource(path=str(path))) == both
    assert read(TextSource(path=f"{odd}/a::b.txt")) == ["one"]
    assert read(TextSource(path=f"{odd}/[c]*")) == ["two"]
    assert read(TextSource(path=f"file://{odd}")) == both
    pq.write_table(pa.table({"text": ["three"]}), odd / "a::b.parquet")
    assert read(ParquetSource(path=str(odd))) == ["three"]
    with pytest.raises(ValueError, match="it has a NUL character"):
        TextSource(path=f"{tmp_path}/\0")


def test_code_is_text_of_its_own_authors(tmp_path):
    wanted = {"main.py": "x = 1\n", "src/a.md": "# Read\n", "src/lib.rs": "fn f() {}\n"}
    others = {
        "node_modules/left/pad.js": "pad()",
        "src/vendor/big.go": "package big",
        ".git/config.py": "x",
        "src/app.min.js": "f()",
        "src/api_pb2.py": "y = 2",
        "data.csv": "1,2",
        "src/long.py": "z" * 5000,
        "empty.py": "\n",
    }
    for name, text in (wanted | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.py").write_bytes(b"x = 1\0")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    source = CodeSource(path=str(tmp_path), max_bytes=4000)
    assert read(source) == list(wanted.values())
    titled = source.model_copy(update={"header": "# file: {path}"})
    assert read(titled) == [f"# file: {name}\n{text}" for name, text in wanted.items()]
    only = source.model_copy(update={"suffixes": (".rs",)})
    assert read(only) == ["fn f() {}\n"]
    refuses(source.model_copy(update={"suffixes": (".zig",)}), str(tmp_path), "ends in .zig")


def test_a_url_is_opened_by_fsspec():
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.txt", b"far away")
    assert read(TextSource(path="memory://corpus/a.txt")) == ["far away"]
    memory.pipe("/corpus/br[0]/a::b.txt", b"odd")
    for path in ("", "/*", "/a::b.txt"):
        assert read(TextSource(path="memory://corpus/br[0]" + path)) == ["odd"]
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


def test_compressed_text_that_was_cut_short_is_named(tmp_path):
    text = "\n".join(f"line {i * i}" for i in range(3000)).encode()
    for ending in (".gz", ".xz", ".zst"):
        path = tmp_path / f"a.txt{ending}"
        path.write_bytes(COMPRESS[ending](text)[:-9])
        refuses(TextSource(path=str(path), document="line"), str(path), "decompressed")
    (tmp_path / "b.txt.zst").write_bytes(COMPRESS[".zst"](b"one ") + COMPRESS[".zst"](b"two"))
    assert read(TextSource(path=str(tmp_path / "b.txt.zst"))) == ["one two"]


@pytest.mark.parametrize("block", [1, 7, 64, 10_000])
@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_reading_goes_on_at_any_block(tmp_path, monkeypatch, document, block):
    monkeypatch.setattr(reading, "BLOCK", block)
    text = "one\n\n\ntwo \u00e9\r\n\r\nthree\n \nfour\n" + "five " * 30 + "\n\nsix\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(text.encode()))
    source = TextSource(path=str(tmp_path), document=document)
    files = find_files(source)
    found = list(blocks(source, files))
    texts = [text for block in found for text in texts_of(source, block)]
    monkeypatch.setattr(reading, "BLOCK", 1 << 22)
    assert (
        texts == read(source) and len(texts) == {"file": 2, "line": 12, "paragraph": 10}[document]
    )
    monkeypatch.setattr(reading, "BLOCK", block)
    for index, one in enumerate(found):
        assert list(blocks(source, files, one.after)) == found[index + 1 :]
        assert one.line == 1 + text.encode()[: one.start].count(b"\n")
    assert found[-1].after.stored <= sum(file.size for file in files)


@pytest.mark.parametrize(
    "line, parts",
    [
        ("{oops", ["line 2", "not valid JSON"]),
        ("[1]", ["line 2", "not a JSON object"]),
        ('{"body": "x", "id": 3}', ["line 2", "no field 'text'", "body, id"]),
        ('{"text": 5}', ["line 2", "'text' is int"]),
        ('{"text": "\\ud800"}', ["line 2", "not Unicode"]),
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
    monkeypatch.setattr("jaxtrain.data.files.sources.HASH_ALWAYS_BELOW", 3)
    path = tmp_path / "a.txt"
    path.write_text("large")
    source = TextSource(path=str(path))
    first = content_hash(source, tmp_path / "cache")
    monkeypatch.setattr("hashlib.file_digest", None)
    assert content_hash(source, tmp_path / "cache") == first
    path.write_text("larger")
    with pytest.raises(TypeError):
        content_hash(source, tmp_path / "cache")
