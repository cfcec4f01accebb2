"""jaxtrain search-growth: candidates of equal cost, a search that goes on, the best phases."""

import json

import pytest
import yaml
from tiny import run_overrides

from jaxtrain.config import load_config
from jaxtrain.train import search_growth
from jaxtrain.train.search_growth import Candidate, candidates, equal_steps, main

FLOPS = {1: 10.0, 2: 20.0, 4: 40.0}


def test_candidates_are_the_whole_model_and_each_sequence_of_depths():
    found = [one.label for one in candidates([2, 1], [0.5], ["stack"])]
    assert found == ["whole", "1_0.5_stack", "2_0.5_stack", "1-2_0.5_stack"]


def test_a_candidate_has_its_share_of_small_steps_and_costs_the_same():
    one = Candidate((1, 2), 0.5, "stack")
    steps = equal_steps(one, 100, 4, FLOPS)
    first, second = one.phases(steps)
    assert (first["model"], second["model"]) == ({"depth": 1}, {"depth": 2})
    assert second["until"] == pytest.approx(steps / 2, abs=1)
    ends = [0, first["until"], second["until"], steps]
    cost = sum((b - a) * FLOPS[d] for a, b, d in zip(ends, ends[1:], (1, 2, 4)))
    assert cost == pytest.approx(100 * FLOPS[4], rel=0.02)
    assert equal_steps(Candidate((), 0.0, ""), 100, 4, FLOPS) == 100


def arguments(tmp_path, **more):
    fields = {"model__depth": 4, "model__value_embeddings": False, "model__window_pattern": "L"}
    given = run_overrides(tmp_path, **fields, **more)
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    return path, [str(path), *given, "--depths", "1", "--shares", "0.5", "--grow", "stack"]


def test_a_search_goes_on_and_writes_the_phases_of_the_best(tmp_path, capfd, monkeypatch):
    seen = []

    def loss(path, overrides, folder, one, steps):
        if len(seen) == 1:
            seen.append("stopped")
            raise KeyboardInterrupt
        seen.append(one.label)
        return {"whole": 3.0, "1_0.5_stack": 2.5}[one.label]

    monkeypatch.setattr(search_growth, "proxy_loss", loss)
    path, words = arguments(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        main([*words, "--steps", "10"])
    assert main([*words, "--steps", "10"]) == 0
    assert seen == ["whole", "stopped", "1_0.5_stack"]
    out = capfd.readouterr().out
    assert "growth   2/2 1_0.5_stack: " in out and "best: 1_0.5_stack" in out
    best = yaml.safe_load((tmp_path / "tiny-growth" / "best.yaml").read_text())["train"]
    given = [f"train.steps={best['steps']}", f"train.phases={json.dumps(best['phases'])}"]
    (phase,) = load_config(path, given).train.phases
    assert best["steps"] > 6 and phase.until == round(best["steps"] / 2)
    assert phase.model == {"depth": 1} and phase.grow == "stack"


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--depths", "4"], "--depths 4: a first depth must be"), (["--shares", "1"], "--shares 1:")],
)
def test_a_search_that_cannot_be_is_refused(tmp_path, capfd, more, message):
    _, words = arguments(tmp_path)
    assert main([*words, "--steps", "10", *more]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_real_proxy_runs_have_losses_of_their_own(tmp_path):
    _, words = arguments(tmp_path)
    assert main([*words, "--steps", "4"]) == 0
    found = json.loads((tmp_path / "tiny-growth" / "results.json").read_text())
    assert len(found) == 2 and len({*found.values()}) == 2
