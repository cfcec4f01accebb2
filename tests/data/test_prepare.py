import importlib
import json
import lzma
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jaxtrain.data import DataConfig, damaged_shards, describe_stores, prepare, read_documents
from jaxtrain.data.files.sources import SHAKESPEARE, TextSource
from jaxtrain.data.store.cache import locked
from jaxtrain.data.store.splits import first_texts, training_texts
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
    assert set(stages) == {"tokenizer", "tokens"}
    stages.clear()
    with monkeypatch.context() as patch:
        module = sys.modules["jaxtrain.data.store.prepare"]
        patch.setattr(module, "build_tokenizer", None)
        patch.setattr(module, "block_pool", None)
        moved = path.rename(tmp_path / "b.txt")
        options["train"] = {"name": "text", "path": str(moved)}
        again = prepare(config(tmp_path, seed=5, **options), progress=note)
    assert stages == [] and again.directory == first.directory
    moved.write_text("other text " * 100)
    assert prepare(config(tmp_path, **options)).directory != first.directory
    changed = config(tmp_path, **options, validation={"name": "tail", "fraction": 0.2})
    assert prepare(changed, progress=note).directory != first.directory
    assert "tokens" in stages


@pytest.mark.slow
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
    with pytest.raises(
        UserError, match="tail needs a text source, not jsonl; use data.validation.name"
    ):
        prepare(config(tmp_path, train=jsonl, **options))
    for _ in range(2):  # the second goes on from what the first has left
        with pytest.raises(UserError, match=r"the (train|validation) split has no documents"):
            prepare(config(tmp_path, train=jsonl, **options, validation={"name": "documents"}))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    folder = {"name": "text", "path": str(tmp_path)}
    with pytest.raises(UserError, match=r"tail needs a single file, but .* has more; use data"):
        prepare(config(tmp_path, train=folder, **options))


def test_the_cache_directory_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "elsewhere"))
    path = tmp_path / "a.txt"
    path.write_text("some text " * 10)
    source = {"name": "text", "path": str(path)}
    prepared = prepare(DataConfig(train=source, tokenizer={"name": "bytes"}))
    assert (tmp_path / "elsewhere") in prepared.directory.parents


@pytest.mark.slow
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


# ---- many processes --------------------------------------------------------------------------

SMALL = {
    "jaxtrain.data.store.prepare.ALONE": 0,
    "jaxtrain.data.store.store.SHARD_TOKENS": 4000,
    "jaxtrain.data.files.reading.BLOCK": 700,
    "jaxtrain.data.store.encode.BATCH": 1500,
}


@pytest.fixture
def small(monkeypatch):
    """Blocks, batches and shards of a few documents."""
    for name, value in SMALL.items():
        module, _, attribute = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), attribute, value)


@pytest.fixture
def corpus(tmp_path):
    """Documents of 1 to 2,000 characters in a compressed and a plain file."""
    draw = random.Random(0)
    text = SHAKESPEARE.read_text()
    parts = [text[draw.randrange(90_000) :][: draw.randrange(1, 2000)] for _ in range(60)]
    lines = [json.dumps({"text": part}) + "\n" for part in parts]
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress("".join(lines[:25]).encode()))
    (tmp_path / "b.jsonl").write_text("".join(lines[25:]))
    return {
        "train": {"name": "jsonl", "path": f"{tmp_path}/*.jsonl*"},
        "validation": {"name": "documents", "fraction": 0.2},
        "tokenizer": {"name": "huggingface", "vocab_size": 300},
    }, parts


def files_of(prepared):
    return {
        str(path.relative_to(prepared.directory)): path.read_bytes()
        for path in prepared.directory.rglob("*")
        if path.is_file() and path.name != "lock"
    }


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path, small, corpus):
    options, parts = corpus
    made = [
        prepare(DataConfig(**options, cache_dir=str(tmp_path / str(count)), prepare_workers=count))
        for count in (1, 3)
    ]
    files = [files_of(prepared) for prepared in made]
    assert files[0] == files[1]
    assert sum(name.endswith("record") for name in files[0]) > 6
    texts = {name: text_of(getattr(made[0], name), made[0].tokenizer)
             for name in ("train", "validation")}  # fmt: skip
    assert sorted(texts["train"] + texts["validation"]) == sorted(parts)
    assert [part for part in parts if part in texts["train"]] == texts["train"]  # in their order


@pytest.mark.parametrize("commits, seconds, shard", [(1, 10, 4000), (4, 10, 4000), (5, 0, 9000)])
@pytest.mark.quick("4-10-4000")
def test_an_interrupted_preparation_goes_on_after_its_last_commit(
    tmp_path, small, corpus, commits, seconds, shard, monkeypatch
):
    """At the end of a shard, and inside of one when it is time."""
    options, _ = corpus
    monkeypatch.setattr("jaxtrain.data.store.store.SHARD_TOKENS", shard)
    expected = files_of(prepare(config(tmp_path / "whole", **options, prepare_workers=1)))
    module = sys.modules["jaxtrain.data.store.prepare"]
    commit, sizes, done = module._commit, [], []

    def note(note, writers, state, full):
        commit(note, writers, state, full)
        sizes.append(state["size"])

    def stop(stage, size, total):
        if len(sizes) == commits and size > sizes[-1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "COMMIT_SECONDS", seconds)
    monkeypatch.setattr(module, "_commit", note)
    options |= {"cache_dir": str(tmp_path / "cache"), "prepare_workers": 1}
    with pytest.raises(KeyboardInterrupt):
        prepare(DataConfig(**options), progress=stop)
    again = prepare(DataConfig(**options), progress=lambda *args: done.append(args))
    assert 0 < sizes[commits - 1] < done[0][1] < sizes[commits - 1] + 5000
    assert files_of(again) == expected


@pytest.mark.slow
def test_what_was_killed_goes_on_and_leaves_no_process_behind(tmp_path, small, corpus):
    options, _ = corpus
    options |= {"cache_dir": str(tmp_path / "cache"), "prepare_workers": 2}
    script = f"""
import importlib, os, psutil
from jaxtrain.data import DataConfig
from jaxtrain.data import prepare
for name, value in {SMALL!r}.items():
    module, _, attribute = name.rpartition(".")
    setattr(importlib.import_module(module), attribute, value)
def progress(stage, size, total):
    if stage == "tokens" and size > 25_000:
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        os.kill(os.getpid(), 9)
prepare(DataConfig(**{options!r}), progress=progress)
"""
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.returncode == -signal.SIGKILL
    children = [int(pid) for pid in run.stdout.split()]
    notes = list(Path(options["cache_dir"]).rglob("done.json"))
    assert len(children) == 2 and len(notes) == 1
    reached = json.loads(notes[0].read_text())["size"]
    assert 0 < reached <= 25_000
    first = []
    again = prepare(DataConfig(**options), progress=lambda *args: first.append(args))
    assert first[0][:2] > ("tokens", reached) and not notes[0].exists()
    options |= {"cache_dir": str(tmp_path / "whole"), "prepare_workers": 1}
    assert files_of(again) == files_of(prepare(DataConfig(**options)))
    while any(map(psutil.pid_exists, children)):  # or they go on without a parent
        time.sleep(0.1)


def test_a_kill_loses_seconds_of_a_small_text(tmp_path, corpus, monkeypatch):
    """0.7 GB once were a shard, before whose end nothing was kept."""
    options, _ = corpus
    options |= {"cache_dir": str(tmp_path / "cache"), "prepare_workers": 1}
    module = sys.modules["jaxtrain.data.store.prepare"]
    for name in ("jaxtrain.data.files.reading.BLOCK", "jaxtrain.data.store.encode.BATCH"):
        monkeypatch.setattr(name, 700)
    clock = iter(range(0, 10**6, 3))  # a batch takes 3 seconds
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    sizes = []

    def stop(stage, size, total):
        sizes.append(size if stage == "tokens" else 0)
        if sizes.count(0) < len(sizes) - 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(DataConfig(**options), progress=stop)
    (note,) = (tmp_path / "cache").rglob("done.json")
    assert json.loads(note.read_text())["size"] in sizes[-6:-1]  # 15 seconds
    part = note.parent / "train" / "00000-00000.npz"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match=r"00000.npz is missing or cut short; delete .* again"):
        prepare(DataConfig(**options))


@pytest.mark.slow
def test_an_error_of_another_process_and_its_death_are_one_line(tmp_path, small, corpus):
    options, _ = corpus
    (tmp_path / "c.jsonl").write_text('{"txt": 1}\n')
    with pytest.raises(UserError, match=r"c.jsonl line 1 has no field 'text'; it has: txt"):
        prepare(config(tmp_path, **options, prepare_workers=2))
    from jaxtrain.data.pool import process_pool

    with (
        pytest.raises(UserError, match="a process that prepares data died with exit code 3"),
        process_pool(2) as mapped,
    ):
        list(mapped(sys.exit, [3]))


def test_a_vocabulary_is_trained_on_a_random_part_of_the_text(tmp_path, small, corpus):
    options, parts = corpus
    options |= {"cache_dir": str(tmp_path), "validation": {"name": "none"}}
    everything = training_texts(DataConfig(**options), 10**6)
    assert sorted(everything) == sorted(parts)
    some = training_texts(DataConfig(**options), 6000)
    assert 6000 <= sum(map(len, some)) < 9000
    places = [parts.index(text) for text in some]
    assert min(places) < 20 and max(places) > 40  # not the first bytes
    assert training_texts(DataConfig(**options), 6000) == some
    whole = training_texts(DataConfig(validation={"name": "none"}), 10**7)
    assert "".join(whole) == next(read_documents(TextSource()))


@pytest.mark.slow
def test_nanochats_vocabulary_is_trained_on_the_beginnings_of_documents(tmp_path, small, corpus):
    options, parts = corpus
    options |= {"cache_dir": str(tmp_path), "validation": {"name": "none"}}
    begun = list(first_texts(DataConfig(**options), 10**6, 30))
    assert sorted(begun) == sorted(part[:30] for part in parts)
    some = list(first_texts(DataConfig(**options), 6000, 10**6))
    assert sum(map(len, some[:-1])) < 6000 <= sum(map(len, some)) and set(some) <= set(parts)
    many = options["tokenizer"] | {"name": "nanochat"}
    held_out = options | {"validation": {"name": "documents", "fraction": 0.5}}
    prepared = prepare(config(tmp_path, **held_out | {"tokenizer": many}))
    assert prepared.tokenizer.vocab_size == 300
    kept = set(first_texts(DataConfig(**held_out), 10**6, 10**6))
    assert kept == set(text_of(prepared.train, prepared.tokenizer))


def test_a_vocabulary_too_large_is_refused_before_it_is_trained(tmp_path, corpus, monkeypatch):
    options, _ = corpus
    monkeypatch.setattr("jaxtrain.data.tokenizer.tokenizer.train_bpe", None)
    options["tokenizer"] = {"name": "huggingface", "vocab_size": 20_000}
    with pytest.raises(UserError, match=r"20000 is larger than .* it has \d+ bytes; use at most"):
        prepare(config(tmp_path, **options))


def test_a_vocabulary_of_no_text_is_not_called_too_large(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    train = {"name": "jsonl", "path": str(tmp_path / "empty.jsonl")}
    with pytest.raises(UserError, match=r"empty.jsonl holds no text"):
        prepare(config(tmp_path, train=train, validation={"name": "none"}))


def test_damaged_shards_are_an_error_or_left_out_and_counted(tmp_path, small, corpus):
    options, _ = corpus
    options |= {"cache_dir": str(tmp_path / "cache"), "prepare_workers": 1}
    whole = prepare(DataConfig(**options))
    (whole.directory / "train" / "00001.array_record").write_bytes(b"")
    with pytest.raises(UserError, match=r"00001.array_record is missing or cut short; delete"):
        prepare(DataConfig(**options))
    left = prepare(DataConfig(**options, skip_damaged=True))
    (path, lost), *_ = left.train.skipped.items()
    assert lost > 0 and left.train.documents == whole.train.documents - lost
    line = f"{path} is damaged: its {lost} documents are left out"
    assert path.endswith("00001.array_record") and damaged_shards(left) == [line]
    assert damaged_shards(whole) == []
    assert describe_stores({"train": left.train})["train"]["skipped"] == {
        "00001.array_record": lost
    }


def test_a_process_that_waits_for_another_says_so(tmp_path):
    said = []

    def second():
        with locked(tmp_path, lambda *words: said.append(words)):
            said.append("in")

    waiter = threading.Thread(target=second)
    with locked(tmp_path, lambda *words: said.append("first")):
        waiter.start()
        while not said:
            time.sleep(0.01)
    waiter.join()
    assert said == [("waiting for another process that prepares the same data", 0, None), "in"]


def test_a_cache_that_cannot_be_written_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 10)
    source = {"name": "text", "path": str(tmp_path / "a.txt")}
    options = config(tmp_path, train=source, tokenizer={"name": "bytes"})
    first = prepare(options)
    (first.directory / "lock").unlink()
    again = prepare(options)  # takes no lock, which would write one
    assert again.train.tokens == first.train.tokens and not (first.directory / "lock").exists()
