"""Host work on a Ray cluster: the bytes of one host, whatever the nodes, and after losses."""

import json
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_quality import prose

from jaxtrain.cli import main
from jaxtrain.cluster import ray_cluster as on_ray
from jaxtrain.cluster import ray_worker
from jaxtrain.data import DataConfig, prepare
from jaxtrain.data.filters.filtered import filter_into
from jaxtrain.settings import UserError

pytestmark = pytest.mark.slow
FILTERS = [{"name": "gopher_quality"}, {"name": "near_duplicates"}, {"name": "exact_duplicates"}]


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1, wait=False) for _ in range(4)]
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line == "kill\\n":
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
    else:
        nodes.append(cluster.add_node(num_cpus=1))
    print(len(nodes), flush=True)
cluster.shutdown()
"""


class Cluster:
    """A head without cores and four nodes with one, in a process of its own: here runs jax, and
    Ray forks."""

    def __init__(self):
        line = [sys.executable, "-c", CLUSTER]
        env = os.environ | on_ray.SETTINGS
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(line, text=True, env=env, **pipes)
        said = iter(self.process.stdout.readline, "")
        self.address = next(line.split()[1] for line in said if line.startswith("address"))

    def ask(self, what):
        """Kill the first node, or add one; how many there are."""
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    yield made
    made.process.communicate(timeout=60)


@pytest.fixture
def corpus(tmp_path):
    """Documents of 20 to 160 words, some twice."""
    draw = random.Random(1)
    texts = [prose(draw.randrange(20, 160), i) for i in range(500)]
    rows = [{"text": text, "id": i} for i, text in enumerate(texts + texts[5:300:7])]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def small(monkeypatch):
    """Many blocks of little text, and everything that is done is written down."""
    monkeypatch.setattr("jaxtrain.data.files.reading.BLOCK", 3000)
    monkeypatch.setattr("jaxtrain.data.store.encode.BATCH", 3000)
    monkeypatch.setattr("jaxtrain.data.store.store.SHARD_TOKENS", 50_000)


def config(folder, corpus, filters=()):
    return DataConfig(
        train={"name": "jsonl", "path": str(corpus), "filters": filters},
        validation={"name": "documents", "fraction": 0.1},
        tokenizer={"name": "huggingface", "vocab_size": 300},
        cache_dir=str(folder),
    )


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_store_has_the_same_bytes_after_a_node_was_killed(tmp_path, cluster, corpus, small):
    killed = []

    def progress(stage, done, total):
        if stage == "tokens" and done > total / 3 and not killed:
            killed.append(cluster.ask("kill"))

    prepare(config(tmp_path / "host", corpus, FILTERS))
    with on_ray.ray_cluster(cluster.address):
        prepare(config(tmp_path / "nodes", corpus, FILTERS), progress=progress)
    assert killed == [3] and cluster.ask("add") == 4
    here, there = files_of(tmp_path / "host"), files_of(tmp_path / "nodes")
    assert here == there and sum(name.endswith("record") for name in here) > 3


def yaml_of(folder, corpus):
    """A file with `config`, whose cache is beside it."""
    c = config(folder / "cache", corpus, FILTERS)
    (folder / "c.yaml").write_text(json.dumps({"data": c.model_dump(mode="json")}))
    return folder / "c.yaml"


DRIVER = """
import os, sys
from jaxtrain.data.files import reading
from jaxtrain.data.filters import filtering
from jaxtrain.data.store import encode, prepare, store
reading.BLOCK = encode.BATCH = 3000
store.SHARD_TOKENS, filtering.COMMIT_SECONDS = 50_000, 0
saved = []
def counted(write):
    def counting(*args):
        write(*args)
        saved.append(args)
        if len(saved) == 3:
            os.kill(os.getpid(), 9)
    return counting
if sys.argv[1] in ("_save", "_commit"):
    module = filtering if sys.argv[1] == "_save" else prepare
    setattr(module, sys.argv[1], counted(getattr(module, sys.argv[1])))
from jaxtrain.cli import main
sys.exit(main(sys.argv[2:]))
"""


def drive(dies, *words):
    """The command in a process of its own, which dies at the third note of a kind, or at none."""
    line = [sys.executable, "-c", DRIVER, dies, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_the_same_command_goes_on_after_its_process_was_killed(tmp_path, cluster, corpus, small):
    """Once while it filters, once while it tokenizes."""
    prepare(config(tmp_path / "host", corpus, FILTERS))
    words = ["prepare", "--config", yaml_of(tmp_path, corpus), "--ray", cluster.address]
    for dies in ("_save", "_commit"):
        assert drive(dies, *words).returncode == -signal.SIGKILL
    assert [*(tmp_path / "cache").rglob("done.json")]
    said = drive("", *words)
    assert said.returncode == 0, said.stderr
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "host")


def test_what_a_task_raises_is_one_line_and_a_process_that_dies_too(cluster, monkeypatch):
    monkeypatch.setattr(on_ray, "RETRIES", 0)
    with on_ray.ray_cluster(cluster.address) as nodes:
        assert list(nodes.map(abs, range(-20, 0))) == [*range(20, 0, -1)]
        with pytest.raises(RuntimeError, match="bad operand type"):
            list(nodes.map(abs, ["x"]))
        with pytest.raises(UserError, match="a part of the work was lost 1 times"):
            list(nodes.map(os._exit, [3]))


def test_filter_on_a_cluster_of_this_host(tmp_path, corpus, small):
    filter_into(config(tmp_path / "cache", corpus, FILTERS), tmp_path / "host", lambda *_: None)
    words = ["filter", yaml_of(tmp_path, corpus), "--out", tmp_path / "nodes", "--ray", "local"]
    said = drive("", *words)
    assert said.returncode == 0, said.stderr
    assert files_of(tmp_path / "host") == files_of(tmp_path / "nodes")


# ---- without a cluster -------------------------------------------------------------------------


def ray_of_this_process():
    """Ray's functions that the project calls; a task runs when its result is asked for."""
    tasks = []

    def remote(**options):
        assert options["max_retries"] > 0 and options["num_cpus"] == 1
        return lambda f: SimpleNamespace(remote=lambda *given: tasks.append(f) or (f, given))

    def get(result):
        function, given = result
        return function(*given)

    return tasks, SimpleNamespace(
        remote=remote, get=get, put=lambda x: x, init=lambda *_, **__: None,
        shutdown=lambda: None, cluster_resources=lambda: {"CPU": 2.0},
    )  # fmt: skip


@pytest.mark.default_tier
def test_a_command_gives_its_blocks_to_the_cluster(tmp_path, corpus, small, monkeypatch):
    """With a Ray that runs everything here."""
    yaml, files = yaml_of(tmp_path, corpus), {}
    errors = SimpleNamespace(RayError=ZeroDivisionError, RayTaskError=ZeroDivisionError)
    for name, words in {"host": [], "nodes": ["--ray", "local"]}.items():
        tasks, stand_in = ray_of_this_process()
        monkeypatch.setitem(sys.modules, "ray", stand_in)
        monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
        monkeypatch.setattr(on_ray, "find_spec", lambda name: errors)
        assert main(["filter", str(yaml), "--out", str(tmp_path / name), *words]) == 0
        files[name] = files_of(tmp_path / name)
        assert (len(tasks) > 20) == (name == "nodes")
    assert files["host"] == files["nodes"]


@pytest.mark.default_tier
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


@pytest.mark.default_tier
def test_a_node_with_other_code_is_named():
    other = ray_worker.code_and_packages() | {"numpy": "1.0"}
    value, error = pickle.loads(ray_worker.run_and_pack(other, lambda: 1))
    assert value is None and re.fullmatch(
        r"--ray: node \S+ has numpy \S+, this command 1.0; install the same on all nodes",
        str(error),
    )


@pytest.mark.default_tier
def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    with (
        pytest.raises(UserError, match=r"pip install 'jaxtrain\[ray\]'"),
        on_ray.ray_cluster("auto"),
    ):
        pass
