"""After training: generate and evaluate on a run directory, a model folder and a checkpoint."""

import numpy as np
import pytest
from tiny import rows_of, same

from jaxtrain.config import load_config
from jaxtrain.data.tokenizer.tokenizer import build_tokenizer
from jaxtrain.evaluation import evaluate
from jaxtrain.inference import generate
from jaxtrain.runs.saved import load_saved


def test_the_last_model_is_the_last_checkpoint(whole):
    final, checkpoint = load_saved(whole), load_saved(whole, step=6)
    same(final.params, checkpoint.params)
    earlier = load_saved(whole, step=3)
    assert (np.asarray(earlier.params["embed"]) != np.asarray(final.params["embed"])).any()


@pytest.mark.slow
def test_generate_continues_prompts(whole, capsys):
    command = [str(whole), "--tokens", "8", "--seed", "3", "--prompt", "ROMEO:", "--prompt", "I"]
    assert generate.main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("ROMEO:") and "\n---\nI" in first
    assert generate.main(command) == 0
    assert capsys.readouterr().out == first
    assert generate.main([*command, "--seed", "4"]) == 0
    assert capsys.readouterr().out != first


@pytest.mark.slow
def test_generate_reads_a_model_folder_and_a_checkpoint(whole, capsys):
    greedy = ["--tokens", "8", "--temperature", "0"]
    assert generate.main([str(whole), *greedy]) == 0
    final = capsys.readouterr().out
    assert generate.main([str(whole / "model"), *greedy]) == 0
    assert capsys.readouterr().out == final
    assert generate.main([str(whole), "--step", "6", *greedy]) == 0
    assert capsys.readouterr().out == final


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "5"], "no checkpoint of step 5; there are 3, 6"),
        (["--tokens", "0"], "--tokens: got '0', must be a whole number from 1"),
        (["--temperature", "-1"], "--temperature: got '-1', must be a number from 0 on"),
        (["--top-k", "0"], "--top-k: got '0', must be a whole number from 1"),
        (["--top-p", "2"], "--top-p: got '2', must be a number above 0 and at most 1"),
    ],
)
def test_generate_refuses(whole, capsys, arguments, message):
    assert generate.main([str(whole), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path, capsys):
    for command in (generate.main, evaluate.main):
        assert command([str(tmp_path)]) == 2
        assert "is not a run directory or a model folder" in capsys.readouterr().err


def test_a_damaged_model_is_named(copy, capsys):
    file = copy / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert generate.main([str(copy)]) == 2
    assert f"{file} cannot be read as safetensors" in capsys.readouterr().err


def test_evaluate_gives_the_last_validation(whole, capsys):
    assert evaluate.main([str(whole)]) == 0
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    last = rows_of(whole, "validation")[-1]
    for name in ("loss", "perplexity", "bpb"):
        assert float(shown[name]) == pytest.approx(last[name], rel=1e-3)


@pytest.mark.slow
def test_evaluate_takes_overrides_and_refuses_another_tokenizer(whole, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be\n" * 50)
    source = ["data.validation.name=source", "data.validation.source.name=text"]
    source += [f"data.validation.source.path={tmp_path / 'text.txt'}"]
    assert evaluate.main([str(whole), "--step", "3", *source]) == 0
    assert "bpb" in capsys.readouterr().out
    assert evaluate.main([str(whole), "data.tokenizer.name=bytes"]) == 2
    assert "differs from the tokenizer that the model was trained with" in capsys.readouterr().err
    assert evaluate.main([str(whole), "data.validation.name=none"]) == 2
    assert "data.validation is none" in capsys.readouterr().err


def test_a_model_with_another_tokenizer_beside_it_is_refused(copy, capsys):
    (copy / "model" / "tokenizer.model").unlink()
    bytes_config = load_config(None, ["data.tokenizer.name=bytes"]).data.tokenizer
    build_tokenizer(bytes_config, ()).save(copy / "model")
    assert generate.main([str(copy)]) == 2
    assert (
        "was trained with another tokenizer than the one in its folder" in capsys.readouterr().err
    )
