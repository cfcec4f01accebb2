"""The whole command on a tiny configuration: what it writes, resumes, survives and refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Event
from unittest.mock import MagicMock, Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import LONG
from tiny import (
    QUICK,
    SAMPLES,
    assert_same_run,
    batch,
    mesh_of,
    rows_of,
    run_overrides,
    same,
    steps_of,
    whole_overrides,
)

import jaxtrain
from jaxtrain import data
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import load_config
from jaxtrain.data.tokenizer.tokenizer import build_tokenizer
from jaxtrain.main import main
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train import program
from jaxtrain.train.events import PhaseEnd
from jaxtrain.train.run_steps import Running, run_steps
from jaxtrain.train.step import State
from jaxtrain.train.stop_signal import StopSignal

ROOT = Path(__file__).parents[1]


def refused(capfd, arguments):
    """The one line of a command that fails with code 2."""
    capfd.readouterr()
    assert main(arguments) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err and "Event loop" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")


# ---- what a run leaves -----------------------------------------------------------------------


def test_a_run_directory_holds_all_that_the_next_command_needs(whole):
    names = {p.name for p in whole.iterdir()}
    files = {"config.yaml", "env.json", "metrics.jsonl", "report.html"}
    assert names >= files | {"checkpoints", "model", "samples", "tokenizer"}
    assert steps_of(whole) == [3, 6]
    assert {p.name for p in (whole / "samples").iterdir()} == {"step_000004.txt", "step_000006.txt"}
    assert {p.name for p in (whole / "model").iterdir()} == {
        "config.yaml", "model.safetensors", "tokenizer.model", "tokenizer.model.sha256"
    }  # fmt: skip
    assert "<svg" in (whole / "report.html").read_text()
    assert json.loads((whole / "env.json").read_text())["versions"]["jax"] == jax.__version__
    assert not list(whole.rglob("*.part"))


def test_the_rows_tell_the_run(whole):
    train_rows, validation = rows_of(whole), rows_of(whole, "validation")
    assert [row["step"] for row in train_rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["tokens"] == row["step"] * 8 * 32 for row in train_rows)
    assert train_rows[0]["loss"] == pytest.approx(np.log(384), abs=0.1)
    assert train_rows[-1]["loss"] < train_rows[0]["loss"] - 0.01
    assert [row["step"] for row in validation] == [2, 4, 6]
    for row in validation:
        assert row["perplexity"] == pytest.approx(np.exp(row["loss"]), rel=1e-5)
    assert rows_of(whole, "event")[-1]["status"] == "finished"


@pytest.mark.slow
def test_validation_and_samples_find_their_programs(tmp_path):
    """A thread has compiled them, whose compilations are not logged here, while steps ran."""
    arguments = run_overrides(tmp_path, **SAMPLES | QUICK)
    code = (
        "import jax, sys\nfrom jaxtrain.main import main\n"
        f"with jax.log_compiles(): sys.exit(main({arguments}))"
    )
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    made = re.findall(r"Finished XLA compilation of jit\((\w+)\)", done.stderr)
    assert "train_step" in made and not {"add_batch", "complete"} & set(made)
    assert len(list(tmp_path.rglob("samples/*.txt"))) == 1


def test_what_fails_beside_the_steps_is_left_to_its_turn():
    done, go_on = [], Event()
    jobs = {
        "fails": lambda: lambda: done.append(1 / len(done)),
        "cannot be lowered": lambda: [].pop(),
        "waits": lambda: lambda: done.append(go_on.wait(LONG)),
    }
    compiler = program.BackgroundCompiler(mesh_of(), jobs)
    compiler.compile()
    compiler.wait("cannot be lowered")
    compiler.wait("fails")
    compiler.wait("nothing of that name")
    assert not done and isinstance(compiler.done["fails"].exception(), ZeroDivisionError)
    go_on.set()
    compiler.wait("waits")
    assert done == [True]


def test_a_batch_of_another_shape_has_a_program_of_its_own(tmp_path):
    made, given = [], iter([batch(2, 8), batch(2, 4), batch(2, 4)])

    def make_program(state, one):
        shape = made.append(one.tokens_BT.shape) or made[-1]
        compiled = Mock(facts={}, side_effect=lambda state, other: (state, {}))
        compiled.fits = lambda other: other.tokens_BT.shape == shape
        return compiled

    guard = Mock(look=lambda metrics, wait=False: None)
    feed = Mock(take=lambda: next(given), statistics=dict, ended=list)
    stop, end = Mock(spec=StopSignal, after=lambda step: False), Mock(spec=PhaseEnd, step=3)
    parts = Running(
        3, end, tmp_path, feed, make_program, guard, MagicMock(), [], Mock(), Coordinator(), stop
    )
    state = State({}, {}, jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), {})
    assert run_steps(parts, make_program(state, batch(2, 8)), state, 0)[1:] == (3, False)
    assert made == [(2, 8), (2, 4)]


# ---- resuming --------------------------------------------------------------------------------


def test_resumed_is_uninterrupted_bit_for_bit(whole, copy, capfd):
    """As after a SIGKILL behind the checkpoint of step 3: what came later is stale or torn."""
    shutil.rmtree(copy / "checkpoints" / "6")
    shutil.rmtree(copy / "model")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "ki')
    assert main(whole_overrides(copy)) == 0
    assert "steps 3 to 6" in capfd.readouterr().out
    assert_same_run(copy, whole)
    assert steps_of(copy) == [3, 6]


@pytest.mark.slow
def test_resumed_on_another_mesh_and_with_other_microbatches(whole, copy):
    """How a run is executed may change: the numbers stay up to rounding."""
    shutil.rmtree(copy / "checkpoints" / "6")
    changes = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    changes |= {"train__device_batch_size": 2, "eval__every": "null", "sample__every": "null"}
    assert main(whole_overrides(copy, **changes)) == 0
    for mine, other in zip(rows_of(copy), rows_of(whole), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again_and_has_its_result(whole, copy, capfd):
    result = jaxtrain.train(load_config(None, whole_overrides(copy)))
    assert "steps 6 to 6" in capfd.readouterr().out
    assert_same_run(copy, whole)
    last = rows_of(whole, "validation")[-1]
    assert result.metrics == {name: last[name] for name in ("loss", "perplexity", "bpb")}
    assert result.directory == copy
    loaded = jaxtrain.load(result.directory)
    same(loaded.params, jax.device_get(result.params))


@pytest.mark.slow
def test_the_model_is_saved_before_the_last_sample(copy, monkeypatch):
    """Sampling may take long, and be stopped."""
    shutil.rmtree(copy / "model")
    module = sys.modules["jaxtrain.train.evaluator"]

    def stopped(*_):
        raise RuntimeError("stopped")

    monkeypatch.setattr(module, "write_samples", stopped)
    with pytest.raises(RuntimeError, match="stopped"):
        main(whole_overrides(copy))
    assert (copy / "model" / "model.safetensors").exists()


# ---- the data --------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_source_that_has_had_its_epochs_is_said_once(tmp_path, capfd):
    """At its step, on the screen and in the metrics; and not again by the run that goes on."""
    lines = [f"{i} of a hundred lines" for i in range(100)]
    (tmp_path / "few.txt").write_text("\n".join(lines[:60]))
    (tmp_path / "many.txt").write_text("\n".join(lines * 9))
    source = lambda name: f"source: {{name: text, path: {tmp_path}/{name}.txt, document: line}}"
    sources = f"{{few: {{{source('few')}, max_epochs: 1}}, many: {{{source('many')}}}}}"
    changes = {"data__train__name": "mixture", "data__train__sources": sources}
    changes |= {"data__tokenizer__name": "bytes", "data__validation__name": "none"} | QUICK
    overrides = run_overrides(tmp_path, **changes, train__steps=16, checkpoint__every=12)
    overrides = [o for o in overrides if not o.startswith("data.tokenizer.vocab_size")]
    assert main(overrides) == 0
    (event,) = [row for row in rows_of(tmp_path / "tiny", "event") if "data" in row]
    said = "source few has had its max_epochs, 1; the others take its share"
    assert event["data"] == said and 1 < event["step"] < 12
    printed = [line for line in capfd.readouterr().out.splitlines() if said in line]
    assert printed == [f"step {event['step']:>5}/16  event  {said}"]
    shutil.rmtree(tmp_path / "tiny" / "checkpoints" / "16")
    assert main(overrides) == 0
    out = capfd.readouterr().out
    assert "steps 12 to 16" in out and said not in out


# ---- bad input -------------------------------------------------------------------------------


def test_a_run_of_another_configuration_is_refused(copy, capfd):
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    message = refused(capfd, whole_overrides(copy, model__hidden=64, optim__matrix_lr=0.01))
    assert str(copy) in message and "set run.name" in message.lower()
    assert "model.hidden: 48 -> 64" in message
    assert re.search(r"optim\.matrix_lr: \S+ -> 0\.01", message)
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_of_many_differences_six_are_listed(copy, capfd):
    fields = ("window_pattern=S", "rope_base=9", "logit_softcap=9", "qk_scale=2", "norm_eps=0.1",
              "value_embeddings=true", "smear=true", "backout=true")  # fmt: skip
    changes = dict(f"model__{field}".split("=") for field in fields)
    message = refused(capfd, whole_overrides(copy, **changes))
    assert message.count(" -> ") == 6 and re.search(r"; and \d+ more\. Set run\.name", message)


def test_another_tokenizer_is_refused(copy, capfd):
    (copy / "tokenizer" / "tokenizer.model").unlink()
    bytes_config = load_config(None, ["data.tokenizer.name=bytes"]).data.tokenizer
    build_tokenizer(bytes_config, ()).save(copy / "tokenizer")
    assert "was trained with another tokenizer; set run.name" in refused(
        capfd, whole_overrides(copy)
    )


def damage(folder):
    """Half of every data file of a checkpoint."""
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_damaged_checkpoint_is_named_with_the_one_before(copy, capfd):
    damage(copy / "checkpoints" / "6")
    message = refused(capfd, whole_overrides(copy))
    assert f"checkpoint {copy / 'checkpoints' / '6'} cannot be read" in message
    assert "delete that folder to go on from step 3" in message


def test_a_damaged_only_checkpoint_says_so(copy, capfd):
    shutil.rmtree(copy / "checkpoints" / "6")
    damage(copy / "checkpoints" / "3")
    assert "there is none before it" in refused(capfd, whole_overrides(copy))


@pytest.mark.slow
def test_a_nan_names_step_checkpoint_and_gradient(tmp_path, capfd):
    message = refused(
        capfd,
        run_overrides(
            tmp_path, train__steps=20, checkpoint__every=1, optim__name="adamw",
            optim__learning_rate=1e30, optim__schedule__warmup_steps=2, model__logit_softcap="null",
        ),
    )  # fmt: skip
    step, saved = re.match(
        r"step (\d+): the loss is (?:nan|inf); the last good checkpoint is (\d+);", message
    ).groups()
    assert int(saved) < int(step) <= 4
    assert re.search(r"the largest gradient is that of [a-z_/0]+ \(norm ", message)
    assert "lower the learning rate" in message.lower()
    # That checkpoint is good, and what went wrong is on record.
    assert np.isfinite(load_saved(tmp_path / "tiny", step=int(saved)).params["embed"]).all()
    assert rows_of(tmp_path / "tiny", "event")[-1]["status"].startswith("failed: DivergedError")


@pytest.mark.slow
def test_a_batch_without_labels_is_an_error(tmp_path, capfd, monkeypatch):
    real = data.train_batches

    def unlabelled(*args, **kwargs):
        loader = real(*args, **kwargs)
        take = type(loader).__next__

        class Without(type(loader)):
            def __next__(self):
                batch = take(self)
                third = self.get_state()["position"]["step"] >= 3
                return batch._replace(weights_BT=batch.weights_BT * (not third))

        loader.__class__ = Without
        return loader

    monkeypatch.setattr(data, "train_batches", unlabelled)
    message = refused(capfd, run_overrides(tmp_path, **QUICK))
    assert re.fullmatch(r"step \d: no token of the batch has a label, .* --step \d`.*", message)


@pytest.mark.slow
def test_data_that_cannot_be_trained_on(tmp_path, capfd):
    corpus = tmp_path / "corpus.txt"

    def message(**changes):
        fields = {"data__train__path": corpus, "data__tokenizer__name": "bytes"} | changes
        lines = [x for x in run_overrides(tmp_path, **fields) if "vocab_size" not in x]
        return refused(capfd, lines)

    assert "corpus.txt" in message()
    corpus.write_text("short\n" * 4)
    assert "fewer than one row of sequence_length 32" in message()
    corpus.write_bytes(b"fine \xff not fine" * 100)
    assert re.search(r"corpus\.txt is not UTF-8 text: bad byte at offset 5", message())
    corpus.write_text("long enough\n" * 400)
    assert "does not divide over 8 devices" in message(train__batch_size=12)


@pytest.mark.slow
def test_a_run_that_saved_nothing_does_not_bind_its_directory(tmp_path, monkeypatch, capfd):
    def push(*_):
        raise UserError("stop here")

    monkeypatch.setattr(MetricsWriter, "push", push)
    assert refused(capfd, run_overrides(tmp_path, **QUICK)) == "stop here"
    assert (tmp_path / "tiny" / "config.yaml").is_file()
    other = run_overrides(tmp_path, **QUICK, optim__learning_rate=0.01)
    assert refused(capfd, other) == "stop here"


def test_what_can_be_known_before_the_data_is_prepared_leaves_nothing(tmp_path, capfd):
    cache = {"data__cache_dir": tmp_path / "cache"}
    learned = {"model__position_embedding": "learned", "model__context_length": 8}
    message = refused(capfd, run_overrides(tmp_path, **cache, **learned))
    assert "positions are learned up to 8, but train.sequence_length is 32" in message
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_the_text_cannot_fill(tmp_path, capfd):
    message = refused(capfd, run_overrides(tmp_path, data__tokenizer__vocab_size=300))
    assert "vocab_size is 300, but the bytes and letters of this text need at least" in message


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cudnn", "fa4"])
def test_a_backend_that_cannot_serve_is_refused_with_its_reason(tmp_path, capfd, backend):
    message = refused(capfd, run_overrides(tmp_path, model__attention=backend))
    assert re.match(rf"model\.attention: {backend} cannot serve float32.*: needs", message)


# ---- the rest of the switches ----------------------------------------------------------------


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_old_checkpoints_go_and_some_are_kept(tmp_path):
    """Of a run of two phases: the rows of its first step are half as long, its programs two."""
    fields = {"checkpoint__every": 1, "checkpoint__keep": 1, "checkpoint__keep_every": 2} | QUICK
    fields["data__length_ramp"] = "{start: 16, tokens: 256}"
    assert main(run_overrides(tmp_path, **fields)) == 0
    assert steps_of(tmp_path / "tiny") == [2, 4, 6]
    with Checkpointer(tmp_path / "tiny", CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() == 6
    programs = [row for row in rows_of(tmp_path / "tiny", "event") if "step_bytes" in row]
    assert [row["step"] for row in programs] == [0, 1]
    assert programs[0]["step_bytes"] != programs[1]["step_bytes"]


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_packed_documents_and_no_validation(tmp_path):
    fields = {
        "data__packing__name": "padded", "data__train__document": "paragraph",
        "data__validation__name": "none", "model__document_mask": True,
    }  # fmt: skip
    assert main(run_overrides(tmp_path, **fields | QUICK, train__steps=2)) == 0
    assert len(rows_of(tmp_path / "tiny")) == 2
    assert rows_of(tmp_path / "tiny", "validation") == []


@pytest.mark.slow
def test_stages_of_the_data_change_the_rows_of_a_step(tmp_path, capfd, monkeypatch):
    """Resumed on the other side of a stage's end: the rest is as if nothing had happened."""
    packing = "{name: best_fit, carry_tails: true}"
    fields = {
        "data__stages": "[{tokens: 1024, sequence_length: 16}, {}]", "data__packing": packing,
        "data__train__document": "paragraph", "data__validation__name": "none",
        "checkpoint__every": 1, "checkpoint__keep": 9, "train__steps": 3,
        "train__device_batch_size": 4, "train__batch_size": 32,
    } | QUICK  # fmt: skip
    module, shapes = sys.modules["jaxtrain.train.program"], []
    real = module.compile_step
    note = lambda step, state, batch, *rest: (
        shapes.append(batch.tokens_BT.shape) or real(step, state, batch, *rest)
    )
    monkeypatch.setattr(module, "compile_step", note)
    assert main(run_overrides(tmp_path, **fields, data__workers=0)) == 0
    assert shapes == [(1, 64, 16), (1, 32, 32)]
    whole = rows_of(tmp_path / "tiny")
    assert [row["tokens"] for row in whole] == [1024, 2048, 3072]
    assert whole[-1]["data_crop"] == 0 and whole[-1]["data_fill"] == 1
    for name in ("2", "3"):
        shutil.rmtree(tmp_path / "tiny" / "checkpoints" / name)
    shutil.rmtree(tmp_path / "tiny" / "model")
    assert main(run_overrides(tmp_path, **fields, data__workers=4)) == 0
    assert rows_of(tmp_path / "tiny") == whole
    bad = fields | {"data__stages": "[{sequence_length: 5}]", "run__name": "bad"}
    assert "stage 1 has sequence_length 5, which does not divide train.sequence_length 32" in (
        refused(capfd, run_overrides(tmp_path, **bad))
    )
