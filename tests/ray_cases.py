"""A local Ray cluster, a text for it, and commands that die on the way."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jaxtrain.cluster import ray_cluster as on_ray
from jaxtrain.data import DataConfig

WORDS = (
    "river mountain letter market doctor winter animal paper silver the and to that with of "
    "village teacher harbor candle bridge history window stone forest morning travel"
)
FILTERS = [{"name": "gopher_quality"}, {"name": "near_duplicates"}, {"name": "exact_duplicates"}]
ONE_DEVICE = {"JAX_NUM_CPU_DEVICES": "1"}  # of a node: programs for eight take longer to compile


CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "no_monitor": True,
    "_system_config": {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3}})
add = lambda env: cluster.add_node(num_cpus=1, wait=False, env_vars=env)
environments = json.loads(sys.argv[1])
nodes = [add(env) for env in environments]
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line == "kill\\n":
        lost = min(nodes, key=lambda node: node.node_id)
        nodes.remove(lost)
        cluster.remove_node(lost, allow_graceful=False)
    elif line == "behead\\n":
        cluster.remove_node(cluster.head_node, allow_graceful=False)
    else:
        nodes.append(cluster.add_node(num_cpus=1, env_vars=environments[-1]))
    print(len(nodes), flush=True)
cluster.shutdown()
"""


class Cluster:
    """A head without cores and some nodes with one, in a process of its own: here runs jax, and
    Ray forks. environments: variables of each node."""

    def __init__(self, environments=(ONE_DEVICE,) * 3):
        line = [sys.executable, "-c", CLUSTER, json.dumps(environments)]
        env = os.environ | on_ray.SETTINGS
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(line, text=True, env=env, **pipes)
        said = iter(self.process.stdout.readline, "")
        self.address = next(line.split()[1] for line in said if line.startswith("address"))

    def ask(self, what):
        """Kill the node whose id is lowest or the head, or add one; how many there are but it."""
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def documents(seed=1):
    """Rows with a text of 20 to 160 words, some twice."""
    draw = random.Random(seed)
    text = lambda: " ".join(draw.choices(WORDS.split(), k=draw.randrange(20, 160)))
    texts = [text() for _ in range(500)]
    return [{"text": text, "id": i} for i, text in enumerate(texts + texts[5:300:7])]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_corpus(tmp_path):
    return write_rows(tmp_path / "text.jsonl", documents())


def write_parquet(tmp_path, rows):
    """Rows in small row groups, and the filters that keep two of them out as an evaluation set."""
    path = tmp_path / "text.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=6)
    asked = write_rows(tmp_path / "asked.jsonl", rows[2:4])
    return path, [{"name": "decontaminate", "against": [str(asked)]}, *FILTERS]


def mixture(tmp_path):
    """A source of JSONL and one of Parquet that have 40 documents in common."""
    parquet, filters = write_parquet(tmp_path, documents(2)[:40] + documents()[:40])
    source = lambda path, some: {"source": source_of(path, some)}
    sources = {"lines": source(write_corpus(tmp_path), ()), "rows": source(parquet, filters)}
    return {"name": "mixture", "sources": sources, "filters": FILTERS[1:]}


def small_blocks(monkeypatch):
    """Many blocks of little text, and everything that is done is written down."""
    monkeypatch.setattr("jaxtrain.data.files.reading.BLOCK", 3000)
    monkeypatch.setattr("jaxtrain.data.store.encode.BATCH", 3000)
    monkeypatch.setattr("jaxtrain.data.store.store.SHARD_TOKENS", 50_000)


def source_of(path, filters=()):
    return {"name": path.suffix.removeprefix("."), "path": str(path), "filters": filters}


def config(folder, corpus, filters=()):
    """corpus: a file, or all of `data.train`."""
    return DataConfig(
        train=corpus if isinstance(corpus, dict) else source_of(corpus, filters),
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


def yaml_of(folder, corpus):
    """A file with `config`, whose cache is beside it."""
    c = config(folder / "cache", corpus, FILTERS)
    (folder / "c.yaml").write_text(json.dumps({"data": c.model_dump(mode="json")}))
    return folder / "c.yaml"


DRIVER = """
import os, sys, time
from jaxtrain.cluster import ray_cluster as on_ray
from jaxtrain.data.files import reading
from jaxtrain.data.filters import filtering
from jaxtrain.data.store import encode, prepare, store
reading.BLOCK = encode.BATCH = 3000
store.SHARD_TOKENS, filtering.COMMIT_SECONDS = 50_000, 0
saved = []
def counted(write):
    def counting(*args):
        result = write(*args)
        saved.append(args)
        if len(saved) == 3:
            os.kill(os.getpid(), 9)
        return result
    return counting
if sys.argv[1] == "_save waits":
    on_ray.HEAD_GONE, save = 3.0, filtering._save
    def waiting(*args):
        saved.append(save(*args))
        if len(saved) == 3:
            print("three are saved", flush=True)
            time.sleep(60)
        return saved[-1]
    filtering._save = waiting
elif sys.argv[1] in ("_save", "_commit"):
    module = filtering if sys.argv[1] == "_save" else prepare
    setattr(module, sys.argv[1], counted(getattr(module, sys.argv[1])))
from jaxtrain.cli import main
sys.exit(main(sys.argv[2:]))
"""


def driver(dies, *words):
    """A command that dies at the third note of a kind, or waits there, or does neither."""
    return [sys.executable, "-c", DRIVER, dies, *map(str, words)]


def drive(cwd, dies, *words):
    """The command in a process of its own."""
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": cwd}
    return subprocess.run(driver(dies, *words), **options)
