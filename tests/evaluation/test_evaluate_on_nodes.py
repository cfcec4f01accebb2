"""What `evaluate --ray` gives to nodes, and that the figures are those of one host."""

import json
import pickle
from contextlib import nullcontext

import pytest
from task_cases import FIELDS
from tiny import random_run

from jaxtrain.evaluation import evaluate, tasks
from jaxtrain.evaluation.remote import RemoteModel, place_of_run
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json


class ModelsHere:
    """`NodeModels` without a cluster: what would travel is pickled; every call is a lost one's
    second."""

    made = 0

    def __init__(self, make):
        self.make = pickle.dumps(make)

    def map(self, things):
        ModelsHere.made += 1
        function = pickle.loads(self.make)()
        for thing in things:
            function(pickle.loads(pickle.dumps(thing)))
            yield pickle.loads(pickle.dumps(function(thing)))


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(ModelsHere, "made", 0)
    monkeypatch.setattr(evaluate, "NodeModels", ModelsHere)
    monkeypatch.setattr(tasks, "NodeModels", ModelsHere)
    monkeypatch.setattr(evaluate, "ray_cluster", lambda address: nullcontext(address))


@pytest.mark.slow
def test_nodes_answer_whole_tasks(model, bundle, tmp_path, nodes, capsys):
    answers = []
    for name, more in {"host": [], "nodes": ["--ray", "auto"]}.items():
        out = tmp_path / f"{name}.json"
        words = ["--tasks", "core", "--bundle", str(bundle), "--limit", "5", "--out", str(out)]
        assert evaluate.main([str(model.tokenizer_dir.parent), *words, *more]) == 0
        found = json.loads(out.read_text())
        for entry in found["tasks"].values():
            del entry["seconds"]
        answers.append(found)
    assert answers[0] == answers[1] and ModelsHere.made == 1


@pytest.mark.slow
def test_nodes_validate_blocks_of_batches(tmp_path, nodes, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "BLOCK", 3)
    text = ["data.validation.fraction=0.02", f"data.cache_dir={tmp_path}/cache"]
    run = random_run(tmp_path, [*FIELDS, *text])
    said = []
    for more in ([], ["--ray", "auto"]):
        assert evaluate.main([str(run), *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "bpb" in said[0] and ModelsHere.made == 1


def test_blocks_are_the_same_in_any_order(monkeypatch):
    monkeypatch.setattr(evaluate, "BLOCK", 4)
    blocks = evaluate.BlockSums(lambda: iter(range(10)), lambda some: [float(x) for x in some])
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], None]
    assert [blocks(number) for number in range(4)] == expected
    assert [blocks(number) for number in (2, 0, 3, 1)] == [expected[n] for n in (2, 0, 3, 1)]


def test_what_is_not_spread_is_refused(model, capsys):
    assert evaluate.main([str(model.tokenizer_dir.parent), "--needle", "64", "--ray", "auto"]) == 2
    assert "--ray spreads tasks or validation over nodes: leave out --needle" in (
        capsys.readouterr().err
    )


def test_a_node_without_the_run_or_the_data_is_named(tmp_path):
    with pytest.raises(UserError, match=r"node \S+ has no folder \S+; put the run on a disk that"):
        RemoteModel(str(tmp_path / "away"), None, (), ()).load()
    with pytest.raises(
        UserError, match=r"no folder \S+; data.cache_dir must be on a disk that all"
    ):
        evaluate.load_block_sums(RemoteModel("", None, (), ()), tmp_path / "away")


def test_nodes_take_a_run_from_its_url(tmp_path):
    """What the command reads is the copy of its host; a node makes one of its own."""
    assert place_of_run(tmp_path) == str(tmp_path)
    write_json(tmp_path / "source.json", {"url": "memory://runs/a", "files": {}})
    assert place_of_run(tmp_path) == "memory://runs/a"
