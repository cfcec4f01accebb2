"""The soak test of `jaxtrain serve`: a short one, and what it would find."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from tiny import byte_model, random_run

from benchmarks import serve_soak
from benchmarks.__main__ import main
from benchmarks.serve_soak import (
    LONGEST,
    PROMPTS,
    Load,
    Reply,
    body_of,
    faults_of,
    save_random,
    wait_until_idle,
)
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError

FINE = {
    "answers": 10, "lost": 0, "crossed": 0, "different": 0, "ties_allowed": 0, "taken_garbage": 0,
    "held_running": 0, "held_pages_used": 0, "first_mib": 600.0, "last_mib": 640.0, "exit_code": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lost": 2}, "2 lost"),
        ({"crossed": 1}, "1 crossed"),
        ({"different": 1}, "1 different"),
        ({"taken_garbage": 3}, "3 taken_garbage"),
        ({"held_pages_used": 4}, "held in the end: 4 pages_used"),
        ({"last_mib": 700.0}, "the memory grew by 100 MiB"),
        ({"exit_code": 1}, "exit code 1 after SIGTERM"),
        ({"answers": 0}, "no answer at all"),
    ],
)
def test_a_fault_is_found(changes, words):
    assert faults_of(FINE, []) == []
    assert faults_of(FINE | changes, ["an example"]) == [words, "an example"]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(200, "one", 3, 0.1, 0.2), "answers"),
        (Reply(200, "two", 3, 0.1, 0.2), "crossed"),
        (Reply(200, "six", 3, 0.1, 0.2), "different"),
        (Reply(500, "one", 3, 0.1, 0.2), "lost"),
        (Reply(0, "", 0, 0.1, 0.2), "lost"),
    ],
)
def test_an_answer_is_held_to_the_lone_one(monkeypatch, reply, kind):
    async def complete(port, body):
        return reply

    monkeypatch.setattr("benchmarks.serve_soak.complete", complete)
    load = Load(1, "a")
    load.alone = ["one", "two"]
    asyncio.run(load.check_answer(0, True))
    assert load.tally.counts[kind] == 1


def test_without_a_run_a_random_model_is_served(tmp_path):
    save_random(str(tmp_path))
    longest = max(len(body_of("a", i, False)["prompt"]) for i in range(PROMPTS)) + LONGEST + 1
    assert load_saved(tmp_path).config.model.context_length >= longest


def test_it_waits_until_nothing_is_compiled_any_more(monkeypatch):
    busy = [97.0, 55.0, 3.0, 90.0]
    wait_until_idle(SimpleNamespace(cpu_percent=lambda _: busy.pop(0)))
    assert busy == [90.0]
    monkeypatch.setattr(serve_soak, "START", 0.0)
    with pytest.raises(UserError, match="busy for 0 s"):
        wait_until_idle(SimpleNamespace(cpu_percent=lambda _: 99.0))


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve_soak, "PROMPTS", 6)
    monkeypatch.setattr(serve_soak, "LONGEST", 12)
    run = random_run(tmp_path / "tiny", byte_model(256, "model.depth=1", "model.window_pattern=L"))
    options = ["--clients", "3", "--minutes", "0.1", "--record", "--out", str(tmp_path)]
    assert main(["serve-soak", str(run), *options]) == 0, capsys.readouterr().err
    [file] = tmp_path.glob("serve_soak-tiny-*.json")
    [row] = json.loads(file.read_text())["rows"]
    assert row["answers"] > 10 and row["left"] and row["garbage"]
    assert row["request_p99_ms"] >= row["request_p50_ms"] >= row["first_token_p50_ms"] > 0
