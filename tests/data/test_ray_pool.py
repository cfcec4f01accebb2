"""`--ray` without a cluster: what is asked of Ray, and what is said where there is none."""

import json
import pickle
import re
import shutil
import socket
import sys
import time
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray_cases import WORDS, config, files_of, small_blocks, write_corpus, yaml_of

from jaxtrain.cli import main
from jaxtrain.cluster import ray_cluster as on_ray
from jaxtrain.cluster import ray_worker
from jaxtrain.data import prepare
from jaxtrain.data.files import reading
from jaxtrain.data.files.sources import ParquetSource, find_files
from jaxtrain.data.filters.batch import TextBatch
from jaxtrain.data.filters.decontaminate import Decontaminate, filter_contaminated, write_ngrams
from jaxtrain.data.store import encode
from jaxtrain.settings import UserError


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path)


@pytest.fixture
def small(monkeypatch):
    small_blocks(monkeypatch)


def ray_of_this_process():
    """Ray's functions that the project calls; a task runs when its result is asked for."""
    tasks = []

    def remote(**options):
        assert options["max_retries"] > 0 and options["num_cpus"] == 1
        return lambda f: SimpleNamespace(remote=lambda *given: tasks.append(f) or (f, given))

    def get(result):
        function, given = result
        return function(*given)

    head = SimpleNamespace(gcs_address="127.0.0.1:1")
    return tasks, SimpleNamespace(
        remote=remote, get=get, put=lambda x: x, get_runtime_context=lambda: head,
        init=lambda *_, **__: None, shutdown=lambda: None, cluster_resources=lambda: {"CPU": 2.0},
    )  # fmt: skip


def test_a_command_gives_its_blocks_to_the_cluster(tmp_path, corpus, small, monkeypatch):
    """With a Ray that runs everything here."""
    yaml, files = yaml_of(tmp_path, corpus), {}
    names = ("RayError", "RayTaskError", "LocalRayletDiedError")
    errors = SimpleNamespace(**dict.fromkeys(names, ZeroDivisionError))
    for name, words in {"host": [], "nodes": ["--ray", "local"]}.items():
        tasks, stand_in = ray_of_this_process()
        monkeypatch.setitem(sys.modules, "ray", stand_in)
        monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
        monkeypatch.setattr(on_ray, "find_spec", lambda name: errors)
        assert main(["filter", str(yaml), "--out", str(tmp_path / name), *words]) == 0
        files[name] = files_of(tmp_path / name)
        assert (len(tasks) > 20) == (name == "nodes")
    assert files["host"] == files["nodes"]


def test_an_address_that_is_none_is_one_line(tmp_path, corpus, capsys):
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    for address, line in {
        f"127.0.0.1:{closed}": f"--ray 127.0.0.1:{closed} cannot be reached (Connection refused)",
        "ray://me:secret@head:10001": "--ray: expected HOST:PORT of the head node, auto or local",
        "me:secret@head:6379": "--ray: expected HOST:PORT of the head node, auto or local",
    }.items():
        words = ["filter", "quickstart", "--out", str(tmp_path / "out"), "--ray", address]
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {line}") and said.count("\n") == 1
        assert "secret" not in said and not (tmp_path / "out").exists()
    assert time.monotonic() - begin < 20


def test_a_node_with_other_code_is_named():
    mine = ray_worker.this_caller()
    other = mine._replace(code=mine.code | {"numpy": "1.0"})
    value, error = pickle.loads(ray_worker.run_and_pack(other, lambda: 1))
    assert value is None and re.fullmatch(
        r"--ray: node \S+ has numpy \S+, this command has 1.0; install the same version on all "
        "nodes",
        str(error),
    )


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    with (
        pytest.raises(UserError, match=r"install the wheel with \[ray\]"),
        on_ray.ray_cluster("auto"),
    ):
        pass


def test_a_node_gets_the_tokenizer_and_needs_no_folder(tmp_path, corpus):
    prepared = prepare(config(tmp_path / "cache", corpus))
    source, folder = config(tmp_path, corpus).train, prepared.directory / "tokenizer"
    group = list(reading.blocks(source, find_files(source)))
    here = encode.encode_blocks(encode.encode_job(source, folder), group)
    mark = on_ray.CURRENT.set(on_ray.RayCluster("local"))
    try:
        sent = pickle.dumps(encode.encode_job(source, folder))
    finally:
        on_ray.CURRENT.reset(mark)
    shutil.rmtree(tmp_path / "cache")
    assert encode.encode_blocks(pickle.loads(sent), group).train.ids == here.train.ids


@pytest.fixture
def on_nodes(monkeypatch):
    """What is made inside goes to nodes that share no disk with this host."""
    mark = on_ray.CURRENT.set(on_ray.RayCluster("auto"))
    yield
    on_ray.CURRENT.reset(mark)


def records(source, sent):
    found = [reading.records_of(source, one, reading.other_columns(source, one)) for one in sent]
    return [pair for some in found for pair in some]


def test_nodes_get_the_row_groups_of_a_parquet_file_that_they_lack(tmp_path, on_nodes):
    texts = [f"{i} text of some words " * (i % 9) or None for i in range(100)]
    others = {"by": [f"a{i % 3}" for i in range(100)], "tags": [[i] for i in range(100)]}
    path, kinds = tmp_path / "a.parquet", ({"compression": "zstd"}, {"use_dictionary": False})
    for options in kinds:
        pq.write_table(pa.table({"text": texts} | others), path, row_group_size=30, **options)
        source = ParquetSource(path=str(path))
        here = [one._replace(row_group=None) for one in reading.blocks(source, find_files(source))]
        expected = records(source, here)
        sent = pickle.dumps([*reading.blocks(source, find_files(source))])
        path.unlink()
        reading._parquet_file.cache_clear()
        assert records(source, pickle.loads(sent)) == expected
        assert len(here) == 4 and expected[0][1] == {"by": "a1", "tags": [1]}


def test_nodes_get_the_hashes_of_evaluation_sets(tmp_path, on_nodes):
    asked = " ".join(WORDS.split())
    (tmp_path / "asked.jsonl").write_text(json.dumps({"text": asked}) + "\n")
    filter = Decontaminate(against=(str(tmp_path / "asked.jsonl"),))
    sent = pickle.dumps(write_ngrams(filter, tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    batch = TextBatch(["a text", f"In it: {asked}."], [{}] * 2)
    assert filter_contaminated(pickle.loads(sent), batch).reasons.tolist() == [0, 1]
