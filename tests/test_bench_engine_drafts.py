"""The bench of speculative decoding: who guesses, how much is right, and what it is worth."""

import importlib
import json

import pytest
from test_bench_engine import SMALL
from tiny import byte_model, random_run

from benchmarks import engine_drafts

main = importlib.import_module("benchmarks.__main__").main


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(engine_drafts, "REPEATS", 1)
    monkeypatch.setattr(engine_drafts, "TEXTS", 2)
    monkeypatch.setattr(engine_drafts, "TEMPERATURES", (0.0,))


@pytest.mark.slow
def test_a_run_is_measured_on_held_out_text(tmp_path, capsys):
    text = tmp_path / "held.txt"
    text.write_text("To be, or not to be, that is the question: whether 'tis nobler.\n\n" * 40)
    run = random_run(tmp_path / "run", byte_model(64, "objective.name=mtp", "run.name=small"))
    argv = ["engine", str(run), "--text", str(text), "--prompts", "16", "--new", "12"]
    assert main([*argv, "--drafts", "1", "--record", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "engine_drafts-small-fp32-cpu.json").read_text())
    assert result["workload"]["text"] == "held.txt" and result["workload"]["trained_steps"] == 1
    plain, by_text, by_module = result["rows"]
    assert [row["backend"] for row in result["rows"]] == [
        "no guesses", "text, 1 a step", "module, 1 a step",
    ]  # fmt: skip
    assert {row["shape"] for row in result["rows"]} == {"1 x (16 + 12)"}
    assert (plain["guesses"], plain["acceptance"], plain["tokens_per_check"]) == (0, None, 1)
    assert plain["speedup"] == 1 and all(row["same_text"] == 1 for row in result["rows"])
    # A check brings its own token and those that were guessed right: 11 tokens behind the first.
    right = by_module["acceptance"] * by_module["guesses"]
    assert 22 - right == pytest.approx(22 / by_module["tokens_per_check"])
    assert 0 < by_module["guesses"] <= 22 and by_text["decode_tokens_per_s"] > 0
    assert "engine_drafts small" in capsys.readouterr().out


@pytest.mark.slow
def test_random_weights_are_called_untrained(tmp_path):
    argv = ["engine", "--config", "gpt_d12", *SMALL, "objective.name=mtp", "--draft-mtp"]
    argv += ["--prompts", "16", "--new", "6", "--drafts", "1", "--record"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "engine_drafts-gpt_d12-fp32-cpu.json").read_text())
    assert result["workload"]["trained_steps"] == 0 and len(result["rows"]) == 3


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("runs/a --batch 3", "--batches is for bench engine without a RUN"),
        ("--config gpt_d12 --text a.txt", "--text is for bench engine with a RUN"),
        ("runs/a --config gpt_d12", "a RUN or --config, not both"),
        ("--draft-mtp --text a.txt", "random weights read random tokens"),
        ("runs/nowhere", "not a run directory"),
    ],
)
def test_what_it_does_not_read_is_one_line(argv, reason, capsys):
    assert main(["engine", *argv.split()]) == 2
    assert reason in capsys.readouterr().err
