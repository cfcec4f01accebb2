import sys

import pytest

from jaxtrain.data import DataConfig, prepare
from jaxtrain.data.sources import SHAKESPEARE
from jaxtrain.settings import UserError


def text_of(store, tokenizer):
    return [
        tokenizer.decode(store.read(i, 0, int(length))) for i, length in enumerate(store.lengths)
    ]


def config(tmp_path, **options):
    return DataConfig(**{"cache_dir": str(tmp_path / "cache"), **options})


def test_the_default_is_nanogpt_s_split_of_tiny_shakespeare(tmp_path):
    prepared = prepare(config(tmp_path))
    text = SHAKESPEARE.read_text()
    cut = int(len(text) * 0.9)
    assert text_of(prepared.train, prepared.tokenizer) == [text[:cut]]
    assert text_of(prepared.validation, prepared.tokenizer) == [text[cut:]]
    assert prepared.tokenizer.vocab_size == 512
    assert prepared.train.bytes == cut


def test_what_is_cached_is_not_done_again(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 100)
    options = {"train": {"name": "text", "path": str(path)}, "tokenizer": {"name": "bytes"}}
    stages = []
    note = lambda stage, done, total: stages.append(stage)
    first = prepare(config(tmp_path, **options), progress=note)
    assert set(stages) == {"tokenizer", "train", "validation"}
    stages.clear()
    with monkeypatch.context() as patch:
        module = sys.modules["jaxtrain.data.prepare"]  # the function hides it in the package
        patch.setattr(module, "build_tokenizer", None)
        patch.setattr(module, "write_store", None)
        moved = path.rename(tmp_path / "b.txt")
        options["train"] = {"name": "text", "path": str(moved)}
        again = prepare(config(tmp_path, seed=5, **options), progress=note)
    assert stages == [] and again.directory == first.directory
    moved.write_text("other text " * 100)
    assert prepare(config(tmp_path, **options)).directory != first.directory
    changed = config(tmp_path, **options, validation={"name": "tail", "fraction": 0.2})
    assert prepare(changed, progress=note).directory != first.directory
    assert "train" in stages


def test_the_documents_split_follows_the_text(tmp_path):
    def split(lines, name):
        path = tmp_path / name
        path.write_text("\n".join(lines))
        prepared = prepare(
            config(
                tmp_path,
                train={"name": "text", "path": str(path), "document": "line"},
                validation={"name": "documents", "fraction": 0.2},
                tokenizer={"name": "bytes"},
            )
        )
        return [set(text_of(s, prepared.tokenizer)) for s in (prepared.train, prepared.validation)]

    lines = [f"line number {i}" for i in range(200)]
    train, validation = split(lines, "a.txt")
    assert train | validation == set(lines) and not train & validation
    assert 15 < len(validation) < 65
    more_train, more_validation = split(["a new line", *lines[::-1]], "b.txt")
    assert train <= more_train and validation <= more_validation


def test_validation_from_a_source_of_its_own_or_none(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 10)
    source = lambda name: {"name": "text", "path": str(tmp_path / name)}
    options = {"train": source("a.txt"), "tokenizer": {"name": "bytes"}}
    own = {"name": "source", "source": source("b.txt")}
    prepared = prepare(config(tmp_path, **options, validation=own))
    assert text_of(prepared.train, prepared.tokenizer) == ["a.txt" * 10]
    assert text_of(prepared.validation, prepared.tokenizer) == ["b.txt" * 10]
    assert prepare(config(tmp_path, **options, validation={"name": "none"})).validation is None


def test_splits_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    jsonl = {"name": "jsonl", "path": str(tmp_path / "a.jsonl")}
    options = {"tokenizer": {"name": "bytes"}}
    with pytest.raises(UserError, match="tail needs a text source, not jsonl; use documents"):
        prepare(config(tmp_path, train=jsonl, **options))
    with pytest.raises(UserError, match=r"the (train|validation) split has no documents"):
        prepare(config(tmp_path, train=jsonl, **options, validation={"name": "documents"}))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    folder = {"name": "text", "path": str(tmp_path)}
    with pytest.raises(UserError, match=r"tail needs a single file, but .* has more"):
        prepare(config(tmp_path, train=folder, **options))


def test_the_cache_directory_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "elsewhere"))
    path = tmp_path / "a.txt"
    path.write_text("some text " * 10)
    source = {"name": "text", "path": str(path)}
    prepared = prepare(DataConfig(train=source, tokenizer={"name": "bytes"}))
    assert (tmp_path / "elsewhere") in prepared.directory.parents


def test_a_ready_tokenizer_counts_by_its_content(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 10)
    source = {"name": "text", "path": str(tmp_path / "a.txt")}
    trained = prepare(config(tmp_path, tokenizer={"name": "sentencepiece", "vocab_size": 400}))
    paths = []
    for folder in ("one", "two"):
        trained.tokenizer.save(tmp_path / folder)
        tokenizer = {"name": "sentencepiece", "path": str(tmp_path / folder / "tokenizer.model")}
        prepared = prepare(config(tmp_path, train=source, tokenizer=tokenizer))
        paths.append(prepared.directory)
        assert prepared.tokenizer.fingerprint == trained.tokenizer.fingerprint
    assert paths[0] == paths[1]


def test_a_vocabulary_that_learns_the_text_by_heart_is_refused(tmp_path):
    text = tmp_path / "short.txt"
    words = [f"{a}{b}{c} " for a in "bcdfgh" for b in "aeiou" for c in "klmnprst"]
    text.write_text("".join(words) * 2)
    settings = DataConfig.model_validate(
        {
            "train": {"name": "text", "path": str(text)},
            "tokenizer": {"name": "sentencepiece", "vocab_size": 600},
            "cache_dir": str(tmp_path / "cache"),
        }
    )
    with pytest.raises(UserError, match="vocab_size 600 is larger than the training text supports"):
        prepare(settings)
