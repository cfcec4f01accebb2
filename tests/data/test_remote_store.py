"""Prepared data at a URL: batches as those of a folder, a bounded cache, and what goes wrong."""

import re
import threading
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxtrain.data import DataConfig, prepare, stores_of, train_batches, validation_batches
from jaxtrain.data.batches import concat, read_ahead
from jaxtrain.data.store import blocks, remote_store
from jaxtrain.data.store import prepare as module
from jaxtrain.data.store.block_cache import BlockCache, crc32_of
from jaxtrain.settings import UserError
from jaxtrain.storage import objects

URL = "faulty://bucket/prepared"
SIZES = {"batch_size": 8, "sequence_length": 64}


class FaultyStore(MemoryFileSystem):
    """Objects in memory; each range that is asked for meets the next of `faults`."""

    protocol = "faulty"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    faults: ClassVar = []
    ranges: ClassVar = []
    most_writes = 10**9

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        data = super().cat_file(path, start, end, **options)
        if start is None:
            return data
        self.ranges.append((path, start, end))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        return data if fault is None else fault(data)

    def pipe_file(self, path, value, **options):
        FaultyStore.most_writes -= 1
        if FaultyStore.most_writes < 0:
            raise PermissionError("no more")
        super().pipe_file(path, value, **options)


class NoCredentialsError(Exception):
    """Of botocore, by its name."""


@pytest.fixture
def store(monkeypatch):
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    for name in ("store", "faults", "ranges"):
        getattr(FaultyStore, name).clear()
    monkeypatch.setattr(FaultyStore, "most_writes", 10**9)
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.001)
    for one in (blocks, concat, read_ahead):
        monkeypatch.setattr(one, "BLOCK_TOKENS", 1 << 13)
    return FaultyStore


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    lines = (f"document {i} " + "and so on " * (i % 40) for i in range(600))
    path.write_text("\n".join([*lines, "a long one " * 3000]))
    return {"name": "text", "path": str(path), "document": "line"}


def config(folder: Path, train, url: str | None = URL, **options):
    fields = {"train": train, "tokenizer": {"name": "bytes"}, "cache_dir": url or str(folder)}
    fields |= {"validation": {"name": "documents", "fraction": 0.1}}
    return DataConfig(**fields | {"local_cache": {"path": str(folder)}} | options)


def batches_of(c: DataConfig, count: int = 30):
    prepared = prepare(c)
    with train_batches(prepared.train, config=c, **SIZES) as loader:
        found = [np.stack(next(loader)[:3]) for _ in range(count)]
        state = loader.get_state()
    held_out = []
    if prepared.validation is not None:
        batches = validation_batches(prepared.validation, **SIZES)
        held_out = [np.stack(batch[:3]) for batch in batches]
    return np.stack(found), np.array(held_out), state


@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
@pytest.mark.slow
def test_batches_are_those_of_a_folder(store, text, tmp_path, packing):
    options = {"packing": {"name": packing}}
    here = batches_of(config(tmp_path / "here", text, url=None, **options))
    far = batches_of(config(tmp_path / "there", text, **options))
    again = batches_of(config(tmp_path / "elsewhere", text, **options))
    for other in (far, again):
        np.testing.assert_array_equal(here[0], other[0])
        np.testing.assert_array_equal(here[1], other[1])
        assert here[2] == other[2]  # a run goes on with either
    assert len({key for key, *_ in store.ranges}) > 1
    assert not list((tmp_path / "there").rglob("*.array_record"))


def test_another_host_filters_and_tokenizes_nothing(store, text, tmp_path, monkeypatch):
    filtered = text | {"filters": [{"name": "exact_duplicates"}]}
    parts = {"one": {"source": filtered}, "two": {"source": text}}
    train = {"name": "mixture", "sources": parts}
    first = prepare(config(tmp_path / "a", train))
    for name in ("_prepare", "block_pool"):
        monkeypatch.setattr(module, name, None)
    second = prepare(config(tmp_path / "b", train))
    assert second.filters == first.filters and second.filters["one"]["read"]
    for name, one in stores_of(first.train).items():
        np.testing.assert_array_equal(one.lengths, second.train[name].lengths)
    parts = [(i, 0, 9) for i in range(first.validation.documents)]
    for one, two in zip(first.validation.read_many(parts), second.validation.read_many(parts)):
        np.testing.assert_array_equal(one, two)


def test_an_upload_that_stops_goes_on_and_is_not_seen_before(store, text, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "OBJECT_BLOCKS", 2)
    monkeypatch.setattr("jaxtrain.data.store.block_source.OBJECT_BLOCKS", 2)
    c = config(tmp_path, text)
    store.most_writes = 5
    with pytest.raises(UserError, match=r"faulty://bucket/prepared/.* may not be written"):
        prepare(c)
    names = [path for path in store.store if "/tokens/" in path]
    assert names and not [path for path in store.store if path.endswith((".json", "lengths.npy"))]
    written = {path: store.store[path] for path in names}
    store.most_writes = 10**9
    prepared = prepare(c)
    assert all(store.store[path] is written[path] for path in names)
    assert prepared.train.documents + prepared.validation.documents == 601
    assert not list(tmp_path.rglob("*.array_record"))  # moved, not copied


def test_faults_that_pass_are_retried(store, text, tmp_path, capsys):
    c = config(tmp_path, text)
    prepared = prepare(c)
    store.faults += [ConnectionError("500 Internal Server Error"), lambda data: data[:-7]]
    store.faults += [lambda data: bytes(len(data)), TimeoutError("too long")]
    read = prepared.train.read(0, 0, 8)
    assert prepared.tokenizer.decode(read) == "document"
    said = capsys.readouterr().err
    assert "500 Internal Server Error" in said and "bytes have arrived" in said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (FileNotFoundError("gone"), r"there is no file or folder faulty://\S+/tokens/00000$"),
        (lambda data: data[::-1], r"tokens/00000: block 0 is not as it was written .*; delete "),
        (PermissionError("403"), r"tokens/00000 may not be read, check the credentials: 403$"),
        (TimeoutError("no route"), r"cannot read .*: 8 tries failed, last TimeoutError: no route$"),
        (OSError("GET https://a/b?sig=hunter2"), r"8 tries failed, last OSError: GET https://a/b$"),
        (NoCredentialsError("none"), r"tokens/00000 may not be read, check the credentials: none$"),
    ],
)
def test_faults_that_stay_are_one_line(store, text, tmp_path, fault, said):
    prepared = prepare(config(tmp_path, text))
    store.faults += [fault] * 50
    with pytest.raises(UserError, match=said) as caught:
        prepared.train.read(0, 0, 8)
    assert "\n" not in str(caught.value)
    store.faults.clear()
    assert prepared.tokenizer.decode(prepared.train.read(0, 0, 8)) == "document"


def test_a_damaged_manifest_is_one_line(store, text, tmp_path):
    c = config(tmp_path, text)
    prepare(c)
    (path,) = (path for path in store.store if path.endswith("train/manifest.json"))
    store.store[path].seek(0)
    data = store.store[path].read().replace(b'"bos_id": 256', b'"bos_id": 255')
    MemoryFileSystem.pipe_file(store(), path, data)
    with pytest.raises(UserError, match=r"train/manifest.json is damaged; delete faulty://"):
        prepare(c)


def test_a_block_that_is_damaged_on_the_disk_is_fetched_again(store, text, tmp_path):
    c = config(tmp_path, text)
    prepare(c).train.read(0, 0, 8)
    (path,) = (tmp_path / "blocks").glob("*/0*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    count = len(store.ranges)
    again = prepare(c)
    assert again.tokenizer.decode(again.train.read(0, 0, 8)) == "document"
    assert len(store.ranges) == count + 1
    third = prepare(c)
    assert third.tokenizer.decode(third.train.read(0, 0, 8)) == "document"
    assert len(store.ranges) == count + 1


def test_secrets_and_places_that_cannot_be_written_are_refused(tmp_path, text):
    for url in (
        "s3://me:secret@bucket/x",
        "s3://bucket/x?token=1",
        "https://a.b/c",
        "a://b::c://d",
    ):
        with pytest.raises(ValueError, match="cache_dir") as caught:
            config(tmp_path, text, url=url)
        assert "it must not hold" in str(caught.value) or "there are no" in str(caught.value)
    with pytest.raises(ValueError, match="skip_damaged"):
        config(tmp_path, text, skip_damaged=True)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.slow
def test_blocks_are_fetched_once_an_epoch_and_before_they_are_needed(
    store, text, tmp_path, monkeypatch, packing
):
    monkeypatch.setattr(read_ahead, "SLOTS", 2)
    monkeypatch.setattr(read_ahead, "POLL", 0.001)
    options = {"packing": {"name": packing}, "shuffle": {"name": "blocks", "window": 2}}
    options |= {"validation": {"name": "none"}, "prefetch": 1}
    here = batches_of(config(tmp_path / "here", text, url=None, **options), 300)
    c = config(tmp_path / "there", text, **options)
    prepared = prepare(c)
    source = prepared.train.records.source
    total = prepared.train.tokens * prepared.train.dtype.itemsize
    cache = {"path": str(tmp_path / "there"), "max_bytes": total * 2 // 3}
    monkeypatch.setattr(source.cache, "max_bytes", total * 2 // 3)
    assert len(source) > 8
    c = config(tmp_path / "there", text, **options | {"local_cache": cache})
    with train_batches(prepared.train, config=c, **SIZES) as loader:
        found = []
        for _ in range(300):
            found.append(np.stack(next(loader)[:3]))
            time.sleep(0.002)  # the training step
            if loader.statistics()["data_epochs"] < 0.8:
                early = source.fetched, source.waits
    np.testing.assert_array_equal(here[0][: len(found)], found)
    assert early[0] <= len(source) + 4
    assert early[1] <= 6  # at the start
    assert sum(size for _, size, _ in source.cache.entries()) <= total * 2 // 3


def test_a_cache_without_room_for_what_is_mixed_is_refused(store, text, tmp_path):
    cache = {"local_cache": {"path": str(tmp_path), "max_bytes": 1000}}
    c = config(tmp_path, text, **cache)
    train = prepare(c).train
    with pytest.raises(
        UserError, match=r"max_bytes=1,000 is too little: .*data.shuffle.name=blocks"
    ):
        train_batches(train, config=c, **SIZES)
    c = config(tmp_path, text, shuffle={"name": "blocks"}, **cache)
    with pytest.raises(UserError, match=r"too little: two windows of data.shuffle.window=256"):
        train_batches(train, config=c, **SIZES)


def block(number: int) -> bytes:
    return bytes([number]) * 1000


def read(cache: BlockCache, number: int, fetch=None):
    data = block(number)
    found, filed = cache.read(f"s/{number}", 1000, crc32_of(data), fetch or (lambda: data))
    assert bytes(found) == data
    return filed


def test_the_cache_is_bounded_and_what_was_used_longest_ago_goes_first(tmp_path):
    cache = BlockCache(tmp_path, 10_000)
    for number in range(9):
        assert read(cache, number)
        cache.touch("s/0")
        assert sum(size for _, size, _ in cache.entries()) <= 10_000
    other = BlockCache(tmp_path, 10_000)
    for number in range(9, 30):
        assert read(other, number)
        cache.touch("s/0")
        assert sum(size for _, size, _ in cache.entries()) <= 10_000
    assert cache.touch("s/0") and cache.touch("s/29") and not cache.touch("s/5")


def test_processes_of_a_host_fetch_a_block_once(tmp_path):
    caches = [BlockCache(tmp_path, 10**6) for _ in range(8)]
    fetched, ready = [], threading.Barrier(8)

    def fetch():
        fetched.append(1)
        return block(7)

    def work(cache):
        ready.wait()
        read(cache, 7, fetch)

    threads = [threading.Thread(target=work, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1


def test_a_full_disk_is_one_line_and_the_blocks_stay_in_memory(tmp_path, monkeypatch, capsys):
    cache = BlockCache(tmp_path, 10**6)
    assert read(cache, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert not read(cache, 2) and not read(cache, 3)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.match(r"data.local_cache: .* cannot be written \(No space left on device\): ", said)
    monkeypatch.undo()
    assert read(cache, 4)
