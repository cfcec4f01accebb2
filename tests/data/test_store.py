import os
import shutil

import numpy as np
import pytest

from jaxtrain.data.pool import process_pool
from jaxtrain.data.store.store import RECORD_TOKENS, open_store, write_store
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.settings import UserError

TEXTS = ["one", "two \u00e9", "x" * (2 * RECORD_TOKENS + 5), "", "end"]
TOKENIZER = byte_tokenizer()


@pytest.fixture
def store(tmp_path):
    write_store(tmp_path / "train", TEXTS, TOKENIZER)
    return open_store(tmp_path / "train", tokenizer=TOKENIZER.fingerprint, verify=True)


def test_every_document_comes_back(store):
    assert store.documents == len(TEXTS)
    assert store.lengths.tolist() == [len(text.encode()) for text in TEXTS]
    assert store.tokens == store.bytes == sum(store.lengths)
    for index, text in enumerate(TEXTS):
        tokens = store.read(index, 0, int(store.lengths[index]))
        assert tokens.dtype == np.uint16 and TOKENIZER.decode(tokens) == text


def test_parts_of_long_documents_come_back(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(3 * RECORD_TOKENS))
    write_store(tmp_path / "train", ["a", text], TOKENIZER)
    store = open_store(tmp_path / "train")
    edge = RECORD_TOKENS
    for start, stop in ((0, 5), (edge - 2, edge + 2), (edge, 2 * edge), (5, 3 * edge), (7, 7)):
        assert TOKENIZER.decode(store.read(1, start, stop)) == text[start:stop]


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """A store of three shards, a document of 8,000 tokens in each."""
    monkeypatch.setattr("jaxtrain.data.store.store.SHARD_TOKENS", 10)
    write_store(tmp_path / "train", [letter * 8000 for letter in "abc"], TOKENIZER)
    return tmp_path / "train"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_shard_that_changed_since_is_named_or_left_out_and_counted(shards):
    whole = open_store(shards)
    assert whole.documents == 3 and whole.skipped == {}
    flip(shards / "00001.array_record", 9000)
    with pytest.raises(UserError, match=r"00001.array_record is damaged; .* data.skip_damaged"):
        open_store(shards)
    left = open_store(shards, skip_damaged=True)
    assert left.skipped == {str(shards / "00001.array_record"): 1}
    assert left.tokens == left.bytes == 16000 and left.lengths.tolist() == [8000, 8000]
    assert [TOKENIZER.decode(left.read(i, 0, 2)) for i in range(2)] == ["aa", "cc"]
    assert left.fingerprint != whole.fingerprint  # another stream: a run cannot go on unawares
    (shards / "00000.array_record").unlink()
    assert TOKENIZER.decode(open_store(shards, skip_damaged=True).read(0, 0, 2)) == "cc"
    (shards / "00002.array_record").unlink()
    with pytest.raises(UserError, match=r"every shard of .* is damaged.* prepared again$"):
        open_store(shards, skip_damaged=True)


def test_damage_that_keeps_size_and_time_is_named_when_it_is_read(shards):
    path = shards / "00001.array_record"
    before = path.stat()
    flip(path, 9000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    store = open_store(shards)
    assert TOKENIZER.decode(store.read(2, 0, 2)) == "cc"
    with pytest.raises(UserError, match=r"00001.array_record is damaged; delete .*hash mismatch"):
        store.read(1, 0, 2)
    assert len(open_store(shards, skip_damaged=True).skipped) == 1


def test_a_copy_is_checked_once(shards, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    manifest = copy / "manifest.json"
    os.utime(manifest, ns=(0, 0))  # as if it had come first
    assert open_store(copy).fingerprint == open_store(shards).fingerprint
    monkeypatch.setattr("hashlib.file_digest", None)
    assert open_store(copy).documents == 3


def total(directory):
    store = open_store(directory)
    return sum(int(store.read(i, 0, 8000).sum()) for i in range(store.documents))


@pytest.mark.slow
def test_many_processes_read_a_store_that_cannot_be_written(shards):
    for file in (*shards.iterdir(), shards):
        file.chmod(0o555 if file.is_dir() else 0o444)
    with process_pool(2) as mapped:
        assert list(mapped(total, [shards] * 6)) == [8000 * sum(b"abc")] * 6


def test_no_documents_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"the validation split has no documents"):
        write_store(tmp_path / "validation", [], TOKENIZER)
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer_is_refused(store):
    with pytest.raises(
        UserError,
        match=r"was written with tokenizer .* uses abcdef: one of them is damaged; delete",
    ):
        open_store(store.directory, tokenizer="abcdef")


def test_damage_is_named(store):
    directory = store.directory
    file = directory / "00000.array_record"
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    with pytest.raises(UserError, match=r"00000.array_record is missing or cut short; delete"):
        open_store(directory)
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match=r"00000.array_record is damaged; delete"):
        open_store(directory, verify=True)
    manifest = directory / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 3', '"format": 2'))
    with pytest.raises(UserError, match="has format 2, not 3; delete .* to have it prepared again"):
        open_store(directory)
    manifest.write_text(text[:20])
    with pytest.raises(UserError, match=r"manifest.json is damaged; delete"):
        open_store(directory)
    manifest.unlink()
    with pytest.raises(UserError, match="is not a token store"):
        open_store(directory)
