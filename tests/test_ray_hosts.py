"""Hosts of a Ray cluster that share no folder of data, and the loss of the head node."""

import subprocess

import fsspec
import pytest
from ray_cases import (
    FILTERS,
    Cluster,
    config,
    drive,
    driver,
    files_of,
    mixture,
    small_blocks,
    write_corpus,
    yaml_of,
)

from jaxtrain.data import prepare

pytestmark = pytest.mark.slow

# Of Python on the nodes: the folder of the command's host is not there, also for Arrow, which opens
# files by itself.
AWAY = """
import sys
def audit(event, args):
    if event == "open":
        check(args[0])
def check(path):
    if str(path).startswith({folder!r}):
        raise FileNotFoundError(2, "No such file or directory", path)
def init(self, source, *args, **options):
    check(source)
    whole(self, source, *args, **options)
if "default_worker.py" in str(sys.orig_argv):
    sys.addaudithook(audit)
    from pyarrow.parquet import ParquetFile
    whole, ParquetFile.__init__ = ParquetFile.__init__, init
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A cluster of two nodes with caches of their own, and the folder that both lack."""
    here, folder = tmp_path_factory.mktemp("host"), tmp_path_factory.mktemp("nodes")
    (folder / "sitecustomize.py").write_text(AWAY.format(folder=str(here)))
    paths = {"PYTHONPATH": str(folder)}
    made = Cluster([paths | {"JAXTRAIN_CACHE": str(folder / name)} for name in "ab"])
    yield made, here
    made.process.communicate(timeout=60)


def stored(url):
    filesystem, root = fsspec.url_to_fs(url)
    found = filesystem.find(root)
    return {name.removeprefix(root): filesystem.cat_file(name) for name in found}


def test_nodes_without_the_folder_make_the_bytes_of_one_host(hosts, s3, monkeypatch):
    (cluster, here), bucket = hosts, s3.bucket()
    train = mixture(here)
    small_blocks(monkeypatch)
    c = config(f"{bucket}/one", train)
    prepare(
        c.model_copy(
            update={"local_cache": c.local_cache.model_copy(update={"path": str(here / "one")})}
        )
    )
    fields = [f"data.cache_dir={bucket}/nodes", f"data.local_cache.path={here}/blocks"]
    words = [
        "prepare",
        "--config",
        yaml_of(here, train),
        *fields,
        "--ray",
        cluster.address,
    ]
    said = drive(here, "", *words)
    assert said.returncode == 0, said.stderr
    one, nodes = stored(f"{bucket}/one"), stored(f"{bucket}/nodes")
    assert one == nodes and any("/tokens/" in name for name in one)
    reports = [path.read_text() for path in (here / "blocks").rglob("*.filters.json")]
    assert any('"in lines"' in text for text in reports)  # what the two sources have in common


def test_without_its_head_node_a_command_is_one_line_and_goes_on_elsewhere(
    tmp_path, hosts, monkeypatch
):
    """Half of the filtering is saved when the head is lost; the other cluster does the rest."""
    corpus = write_corpus(tmp_path)
    words = ["prepare", "--config", yaml_of(tmp_path, corpus), "data.cache_dir=cache", "--ray"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    lost = subprocess.Popen(driver("_save waits", *words, hosts[0].address), **pipes)
    assert any("three are saved" in line for line in iter(lost.stdout.readline, ""))
    hosts[0].ask("behead")
    _, said = lost.communicate(timeout=60)
    assert lost.returncode == 2 and said.count("\n") == 1
    assert said.startswith(f"error: --ray {hosts[0].address}: the head node is gone")
    found = files_of(tmp_path / "cache")
    assert sum("verdicts-" in name for name in found) == 3 and not any(
        "/train/" in n for n in found
    )
    said = drive(tmp_path, "", *words, "local")
    assert said.returncode == 0, said.stderr
    small_blocks(monkeypatch)
    prepare(config(tmp_path / "host", corpus, FILTERS))
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "host")
