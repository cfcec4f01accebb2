import dataclasses
import json

import numpy as np
import pytest

from jaxtrain.data.store import RECORD_TOKENS, open_store, write_store
from jaxtrain.data.tokenizer import byte_tokenizer
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


def test_an_interrupted_store_leaves_no_name_and_goes_on_after_its_whole_shards(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("jaxtrain.data.store.SHARD_TOKENS", 10)
    monkeypatch.setattr("jaxtrain.data.store.BATCH_CHARACTERS", 8)
    texts = [f"text {i}" for i in range(9)]

    def crash():
        yield from texts[:6]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "train", crash(), TOKENIZER)
    assert not (tmp_path / "train").exists()
    encoded = []
    note = lambda batch: encoded.extend(batch) or TOKENIZER.encode_batch(batch)
    reports = []
    noting = dataclasses.replace(TOKENIZER, encode_batch=note)
    write_store(tmp_path / "train", texts, noting, reports.append)
    assert 0 < len(encoded) < len(texts) and reports[-1] == sum(map(len, texts))
    store = open_store(tmp_path / "train", verify=True)
    assert [TOKENIZER.decode(store.read(i, 0, 6)) for i in range(9)] == texts
    write_store(tmp_path / "other", texts, TOKENIZER)
    names = lambda name: sorted(path.name for path in (tmp_path / name).iterdir())
    assert names("train") == names("other") and sorted(tmp_path.iterdir()) == [
        tmp_path / "other",
        tmp_path / "train",
    ]
    manifests = [(tmp_path / n / "manifest.json").read_text() for n in ("train", "other")]
    assert json.loads(manifests[0])["documents"] == json.loads(manifests[1])["documents"] == 9


def test_no_documents_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"the validation split has no documents"):
        write_store(tmp_path / "validation", [], TOKENIZER)
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer_is_refused(store):
    with pytest.raises(UserError, match=r"was written with tokenizer .* uses abcdef; delete"):
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
    manifest.write_text(text.replace('"format": 1', '"format": 99'))
    with pytest.raises(UserError, match="has format 99, not 1; delete"):
        open_store(directory)
    manifest.write_text(text[:20])
    with pytest.raises(UserError, match=r"manifest.json is damaged; delete"):
        open_store(directory)
    manifest.unlink()
    with pytest.raises(UserError, match="is not a token store"):
        open_store(directory)
