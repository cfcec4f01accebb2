"""The ladder: rungs that resolve, removals, the search for a loss, seconds to it, and the page."""

import jax
import pytest

from benchmarks.ladder import BASELINE, WITHOUT, Trainer, read_ladders
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.runs.job import leaves
from jaxtrain.settings import UserError

LADDERS = read_ladders()
CELLS = [(which, name) for which, one in LADDERS.items() for name in one.names]
REMOVALS = [(which, name) for which, one in LADDERS.items() for name in one.removals]


def trainer(which, tmp_path, **changes):
    return Trainer(LADDERS[which], ("data.train.path=corpus",), 1, tmp_path / "done.jsonl", **changes)


def config_of(job):
    return load_config(find_config(job.config), [*job.overrides, f"train.steps={job.steps}"])


def fields(c):
    return leaves(c.model_dump(mode="json"))


def differing(a, b):
    a, b = fields(a), fields(b)
    return {key for key in a | b if a.get(key) != b.get(key)}


@pytest.mark.parametrize("which, name", CELLS + REMOVALS)
def test_every_rung_is_a_configuration(which, name, tmp_path):
    c = config_of(trainer(which, tmp_path).job(name, 0, 1.0))
    resolve(c, 8192, jax.devices()[:1])  # what does not go together is refused here


@pytest.mark.parametrize("which", LADDERS)
def test_every_rung_changes_what_it_names(which, tmp_path):
    ladder, train = LADDERS[which], trainer(which, tmp_path)
    configs = [config_of(train.job(name, 0, 1.0)) for name in ladder.names]
    for rung, below, c in zip(ladder.rungs[1:], configs, configs[1:]):
        keys = [line.partition("=")[0] for line in rung.lines(which)]
        assert differing(below, c), rung.name
        for field in differing(below, c):
            assert any(f"{field}.".startswith(f"{key}.") for key in keys), (rung.name, field)


@pytest.mark.parametrize("which", LADDERS)
def test_the_shipped_rung_is_the_shipped_configuration(which, tmp_path):
    """With the sizes of the scale, and nothing else."""
    ladder, train = LADDERS[which], trainer(which, tmp_path)
    job = train.job(ladder.scale.shipped, 0, 1.0)
    size = ladder.scale.size
    given = [*map(size.filled, size.overrides), "data.train.path=corpus", f"train.steps={size.steps}"]
    assert differing(config_of(job), load_config(find_config(size.config), given)) == set()


def test_the_speedrun_is_on_the_ladder_of_its_size(tmp_path):
    """At gpt_d12 nothing differs from the shipped file but steps and where they change."""
    job = trainer("gpt_d12", tmp_path).job("progressive stacking", 0, 1300 / 150)
    c = load_config(find_config("gpt_d12_speedrun"), ["data.train.path=corpus"])
    assert job.steps == 1300 and differing(config_of(job), c) == set()


@pytest.mark.parametrize("which, name", REMOVALS)
def test_a_removal_differs_from_the_top_by_its_rungs_fields(which, name, tmp_path):
    ladder, train = LADDERS[which], trainer(which, tmp_path)
    top = config_of(train.job(ladder.names[-1], 0, 1.0))
    found = differing(top, config_of(train.job(name, 0, 1.0)))
    dropped = ladder.dropped(name.removeprefix(WITHOUT))
    lines = [line for rung in ladder.rungs if rung.name in dropped for line in rung.lines(which)]
    keys = [line.partition("=")[0] for line in lines]
    assert found, name
    for field in found:
        assert any(f"{field}.".startswith(f"{key}.") for key in keys), field
