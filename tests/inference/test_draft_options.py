"""Speculative decoding by the options of `generate`, `chat` and `serve`: the same ones, the same
text."""

import io
import sys

import pytest
from server_cases import TEMPLATE
from tiny import FEW_PARTS, assignments, byte_model, random_run

from jaxtrain.cli import COMMANDS
from jaxtrain.cli import main as jaxtrain
from jaxtrain.inference import generate
from jaxtrain.inference.arguments import DraftOptions, asked_drafts, chat_parser, generate_parser
from jaxtrain.inference.engine import EngineOptions
from jaxtrain.inference.server.arguments import serve_parser
from jaxtrain.runs.saved import load_saved

PARSERS = (generate_parser(), chat_parser(), serve_parser())
OPTIONS = ("--drafts", "--draft-run", "--draft-mtp")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model with a module of multi-token prediction, and a chat template."""
    folder = tmp_path_factory.mktemp("drafts")
    (folder / "template.jinja").write_text(TEMPLATE)
    talk = f"data.train={{name: chat, path: x.jsonl, template: {folder / 'template.jinja'}}}"
    fields = byte_model(64, "train.precision=float32", "objective.name=mtp", talk)
    fields += ["model.depth=1", *assignments(**FEW_PARTS)]
    return random_run(folder / "run", [*fields, "data.packing.name=padded"])


def printed(capsys, monkeypatch, *argv):
    """What the command prints, to whom two questions are typed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd now?\n/quit\n"))
    assert jaxtrain([*map(str, argv)]) == 0
    return capsys.readouterr().out


def engines(monkeypatch):
    """The engines that a command makes from now on."""
    made = []

    class Watched(generate.Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    for module in (generate, sys.modules["jaxtrain.inference.engine.load"]):
        monkeypatch.setattr(module, "Engine", Watched)
    return made


def test_the_commands_have_the_same_options_and_explain_them():
    for parser in PARSERS:
        given = [*OPTIONS[:1], "3", "--draft-mtp", "--draft-run", "small", "run"]
        asked = asked_drafts(parser.parse_args(given))
        assert asked == DraftOptions(3, asked.draft_run, True)
        assert str(asked.draft_run) == "small"
        assert asked_drafts(parser.parse_args(["run"])) == generate.NO_DRAFTS
        words = " ".join(parser.format_help().split())
        assert "--drafts N draft tokens per step (speculative decoding; default 0)" in words
        assert all(name in words for name in OPTIONS)
    assert DraftOptions._field_defaults.items() <= EngineOptions._field_defaults.items()
    assert {"generate", "chat", "serve"} <= COMMANDS.keys()


def test_the_engine_of_a_batch_has_them(run):
    model = generate.model_of(load_saved(run))
    requests = generate.make_requests(model, ["To be"], generate.Sampling(4))
    engine = generate.make_engine(model, requests, drafts=DraftOptions(2, None, True))
    assert engine.options.drafts == 2 and engine.state.last is not None
    engine = generate.make_engine(model, requests, drafts=DraftOptions(2, run))
    assert engine.options.drafts == 2 and len(engine.models[1]) == 2


HOW = {"text": ["--drafts", 3], "module": ["--drafts", 2, "--draft-mtp"], "model": ["--drafts", 2]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "how"),
    [("generate", "text"), ("generate", "model"), ("answer", "module"), ("chat", "module")],
)
def test_the_text_is_that_without(run, command, how, capsys, monkeypatch):
    argv = ["--tokens", 12, "--temperature", 0.5]
    argv += ["--chat"] if command == "answer" else []
    argv += [] if command == "chat" else ["--prompt", "To be, be, be", "--prompt", "or not"]
    argv = ["generate" if command == "answer" else command, run, *argv]
    given = [*HOW[how], *(["--draft-run", run] if how == "model" else [])]
    plain = printed(capsys, monkeypatch, *argv)
    made = engines(monkeypatch)
    assert printed(capsys, monkeypatch, *argv, *given) == plain
    (engine,) = made
    assert engine.options.drafts == given[1]
    assert engine.stats().drafts > 0 or how == "text"  # which may hold nothing twice


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--draft-mtp", "the draft tokens per step; set drafts"),
        ("--draft-run {run}", "the draft tokens per step; set drafts"),
        ("--drafts 2 --draft-mtp --draft-run {run}", "leave out one of them"),
    ],
)
@pytest.mark.parametrize("command", ["generate --prompt a", "chat"])
@pytest.mark.quick("generate --prompt a---draft-run {run}-the draft tokens per step; set drafts")
def test_what_does_not_go_together_is_one_line(run, command, given, reason, capsys):
    assert jaxtrain([*command.split(), str(run), *given.format(run=run).split()]) == 2
    assert reason in capsys.readouterr().err
