"""A web server and an object store that fail now and then, on this machine."""

import contextlib
import gzip
import http.server
import io
import re
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxtrain.data import DataConfig, prepare
from jaxtrain.data.files.reading import blocks, read_documents, texts_of
from jaxtrain.data.files.sources import (
    JsonlSource,
    ParquetSource,
    TextSource,
    content_hash,
    find_files,
)
from jaxtrain.settings import UserError
from jaxtrain.storage import objects

LINES = [f"line {i} " + "x" * (i % 90) for i in range(4000)]
TEXT = "\n".join(LINES).encode()
LINE_BY_LINE = {"document": "line"}


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends `server.files`, of each answer as many bytes as the next of `server.cuts` says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append((self.path, asked))
        if server.failures:
            return self.answer(server.failures.pop(0), b"")
        data = server.files.get(self.path)
        if data is None:
            return self.answer(404, b"")
        start = int(asked[6:-1]) if asked and server.ranges else 0
        if start and start >= len(data):
            return self.answer(416, b"")
        self.answer(
            206 if start else 200, data[start:], server.cuts.pop(0) if server.cuts else server.cut
        )

    def answer(self, status, data, cut=None):
        self.send_response(status)
        if self.server.length == "told":
            self.send_header("Content-Length", str(len(data)))
        elif self.server.length == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
            chunks = (data[i : i + 7000] for i in range(0, len(data) + 7000, 7000))
            data = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        else:
            self.close_connection = True
        self.send_header("ETag", self.server.tag)
        self.end_headers()
        self.wfile.write(data[:cut])
        if cut is not None and cut < len(data):
            self.close_connection = True  # in the middle

    def handle(self):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has seen enough
            super().handle()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.asked, server.failures = {}, [], []
        server.cut, server.cuts, server.ranges, server.tag = None, [], True, '"one"'
        server.length = "told"
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """No time is lost in tests; what would have been waited is noted."""
    found = []
    monkeypatch.setattr("jaxtrain.storage.objects.time", SimpleNamespace(sleep=found.append))
    return found


def read(url, **options):
    return list(read_documents(TextSource(path=url, **options)))


def test_a_connection_that_drops_is_taken_up_at_the_byte_it_reached(server, capsys):
    server.files["/a.txt"] = TEXT
    server.cut = 50_000
    assert read(server.url + "/a.txt", **LINE_BY_LINE) == LINES
    ranges = [asked for _, asked in server.asked]
    starts = range(50_000, len(TEXT), 50_000)
    assert ranges == [None, None, *(f"bytes={start}-" for start in starts)]
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == len(starts) and said.out == ""
    for line, start in zip(lines, starts):  # of which each is a first failure
        lost = f"{server.url}/a.txt: connection lost at byte {start} (ConnectionError: the file"
        assert line.startswith(lost) and re.search(r"\), attempt 2 of 8 in 0\.[3-7] s$", line)


@pytest.mark.parametrize("length", ["chunks", "untold"])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_line_that_drops_is_no_end_where_the_length_is_not_told(server, length, ranges, waits):
    server.files |= {"/a.txt": TEXT, "/empty.txt": b""}
    server.length, server.ranges = length, ranges
    assert read(server.url + "/a.txt", **LINE_BY_LINE) == LINES and not waits
    server.cuts = [0, 50_000, 110_000, 90_000, 105_000, 160_000]  # the first asks for the size
    assert read(server.url + "/a.txt", **LINE_BY_LINE) == LINES and waits
    assert not server.cuts
    with pytest.raises(UserError, match="holds no text"):
        read(server.url + "/empty.txt")


def test_compressed_text_of_a_server_without_ranges(server):
    server.files["/a.txt.gz"] = gzip.compress(TEXT, 0)
    server.ranges = False
    server.cuts = [None, 100_000, None]  # of the answers in turn: the second stops in the middle
    assert read(server.url + "/a.txt.gz", **LINE_BY_LINE) == LINES
    assert [asked for _, asked in server.asked] == [None, None, "bytes=100000-"]


def test_errors_that_pass_are_waited_for_ever_longer(server, waits, capsys):
    server.files["/a.txt"] = b"text"
    server.failures = [503, 429, 500]
    assert read(server.url + "/a.txt") == ["text"]
    assert len(waits) == 3 and waits[0] < waits[1] < waits[2]
    said = [f"attempt {n} of 8 in {wait:.1f} s" for n, wait in enumerate(waits, 2)]
    for line, code, again in zip(capsys.readouterr().err.splitlines(), (503, 429, 500), said):
        assert re.fullmatch(rf"{server.url}/a.txt: failed \(.* says {code} .*\), {again}", line)
    assert read(server.url + "/a.txt") == ["text"] and capsys.readouterr().err == ""


def test_what_does_not_pass_is_one_clear_error(server, waits):
    with pytest.raises(UserError, match=rf"^there is no file or folder {server.url}/no.txt$"):
        read(server.url + "/no.txt")
    server.failures = [403]
    with pytest.raises(UserError, match=r"no.txt may not be read, check the credentials: .* 403"):
        read(server.url + "/no.txt")
    server.failures = [400]
    with pytest.raises(UserError, match=r"cannot read .*no.txt: 400 Bad Request"):
        read(server.url + "/no.txt")
    assert waits == []
    server.failures = [503] * 8
    with pytest.raises(UserError, match=r"no.txt: 8 tries failed, last .* 503 Service") as error:
        read(server.url + "/no.txt")
    assert "\n" not in str(error.value) and len(waits) == 7


def test_a_file_that_changes_meanwhile_is_noticed(server):
    server.files["/a.txt"] = TEXT
    source = TextSource(path=server.url + "/a.txt", document="line")
    files = find_files(source)
    server.tag = '"two"'
    with pytest.raises(UserError, match=r"a.txt changed while it was read"):
        list(blocks(source, files))


def test_numbered_shards_and_their_hash(server, tmp_path):
    for number in range(8, 11):
        server.files[f"/part-{number:03d}.txt"] = f"text {number}".encode()
    url = server.url + "/part-{008..010}.txt"
    assert read(url) == ["text 8", "text 9", "text 10"]
    first = content_hash(TextSource(path=url), tmp_path)
    assert content_hash(TextSource(path=url), tmp_path) == first
    server.tag = '"two"'
    assert content_hash(TextSource(path=url), tmp_path) != first


def test_reading_goes_on_in_the_middle_with_one_request(server, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.files.reading.BLOCK", 30_000)
    server.files["/a.jsonl"] = b"".join(b'{"text": "%s"}\n' % line.encode() for line in LINES)
    source = JsonlSource(path=server.url + "/a.jsonl")
    files = find_files(source)
    whole = list(blocks(source, files))
    server.asked.clear()
    rest = list(blocks(source, files, whole[2].after))
    assert rest == whole[3:] and len(rest) > 4
    assert server.asked == [("/a.jsonl", f"bytes={rest[0].start}-")]
    assert next(texts_of(source, rest[0])) == LINES[rest[0].line - 1]


def test_parquet_of_a_web_server_reads_its_end_first(server):
    table = io.BytesIO()
    pq.write_table(pa.table({"text": LINES}), table, row_group_size=1000, compression="none")
    server.files["/a.parquet"] = table.getvalue()
    server.cut = 60_000
    source = ParquetSource(path=server.url + "/a.parquet")
    files = find_files(source)
    found = list(blocks(source, files))
    assert [block.start for block in found] == [0, 1, 2, 3]
    assert list(read_documents(source)) == LINES
    assert list(blocks(source, files, found[1].after)) == found[2:]


class FakeStore(MemoryFileSystem):
    """Objects in memory; every third request fails, and reads break in the middle."""

    protocol = "fake"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    calls = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("fake://", "memory://"))

    @classmethod
    def fail(cls):
        FakeStore.calls += 1
        if FakeStore.calls % 3 == 0:
            raise TimeoutError("the store is busy")

    def info(self, path, **options):
        self.fail()
        return super().info(path, **options)

    def _open(self, path, mode="rb", **options):
        if "r" not in mode:
            return super()._open(path, mode, **options)
        self.fail()
        return Breaking(super()._open(path, mode).read())


class Breaking(io.BytesIO):
    def read(self, size=-1):
        FakeStore.fail()
        return super().read(min(size, 70_000))


@pytest.fixture
def fake():
    fsspec.register_implementation("fake", FakeStore, clobber=True)
    FakeStore.calls = 0
    FakeStore.store.clear()
    return fsspec.filesystem("fake")


def test_an_object_store_that_fails_now_and_then(fake, waits, tmp_path):
    MemoryFileSystem.pipe_file(fake, "/bucket/corpus/a.txt", TEXT)
    MemoryFileSystem.pipe_file(fake, "/bucket/corpus/b.txt", b"far away")
    assert read("fake://bucket/corpus/", **LINE_BY_LINE) == [*LINES, "far away"]
    assert read("fake://bucket/corpus/b*") == ["far away"]
    assert len(waits) > 3
    source = {"name": "text", "path": "fake://bucket/corpus", "document": "line"}
    options = {"validation": {"name": "none"}, "tokenizer": {"name": "bytes"}}
    prepared = prepare(DataConfig(train=source, cache_dir=str(tmp_path), **options))
    assert prepared.train.documents == len(LINES) + 1
    assert prepared.tokenizer.decode(prepared.train.read(4000, 0, 8)) == "far away"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"s3://b/a.txt: s3fs is not installed: pip install s3fs"):
        read("s3://b/a.txt")


def test_the_wait_is_a_minute_at_most():
    assert 60 <= sum(objects.FIRST_WAIT * 2**i for i in range(objects.DATA_TRIES - 1)) < 90
