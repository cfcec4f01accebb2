"""`jaxtrain COMMAND`: a table of commands and their modules, which are imported when called.

This module's imports and the `arguments.py` of each folder import no JAX, so help is instant.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtrain import __version__
from jaxtrain.settings import Parser, UserError, command
from jaxtrain.train.field_help import all_fields, read_schema, section_help, shipped_configs

SHELLS = ("bash", "zsh", "fish")


class Command(NamedTuple):
    """An entry of the command table. `main` and `parser` are MODULE:FUNCTION below `jaxtrain.`."""

    group: str
    main: str
    parser: str
    summary: str
    first: tuple[str, ...] = ()  # arguments put before the typed ones
    joined: bool = False  # shares the help line of the command before it: help is one screen


COMMANDS = {
    "train": Command(
        "train", "main:main", "main:train_parser", "train a language model, or resume a run"
    ),
    "sweep": Command(
        "", "sweep.command:main", "sweep.arguments:sweep_parser",
        "search hyperparameters by many runs, with a report",
    ),
    "scaling": Command(
        "", "scaling.command:main", "scaling.arguments:scaling_parser",
        "fit scaling laws to many runs, predict a larger one",
    ),
    "estimate": Command(
        "", "main:main", "main:estimate_parser",
        "memory, communication, time of a step, without a GPU", ("--dry-run",),
    ),
    "launch": Command(
        "", "cluster.launch:main", "cluster.launch:launch_parser",
        "one job of several processes on this host",
    ),
    "config": Command(
        "", "cli:show_config", "cli:config_parser", "shipped configs, one resolved, or the schema"
    ),
    "prepare": Command(
        "data", "train.prepare:main", "train.arguments:prepare_parser",
        "tokenize text ahead of training",
    ),
    "show-data": Command(
        "", "train.show_data:main", "train.arguments:show_data_parser",
        "rows of a run's batches, decoded",
    ),
    "search-growth": Command(
        "", "train.search_growth:main", "train.arguments:search_growth_parser",
        "train.phases by short proxy runs",
    ),
    "filter": Command(
        "", "train.filter_data:main", "train.arguments:filter_parser",
        "filter a text, write what is kept",
    ),
    "score": Command(
        "", "evaluation.score:main", "evaluation.arguments:score_parser",
        "score documents by a trained model",
    ),
    "generate": Command(
        "model", "inference.generate:main", "inference.arguments:generate_parser",
        "continue a prompt",
    ),
    "chat": Command(
        "", "inference.generate:main", "inference.arguments:chat_parser", "chat in the terminal",
        ("--chat",), joined=True,
    ),
    "serve": Command(
        "", "inference.server.serve:main", "inference.server.arguments:serve_parser",
        "HTTP API", joined=True,
    ),
    "evaluate": Command(
        "", "evaluation.evaluate:main", "evaluation.arguments:evaluate_parser",
        "validation loss, or CORE and other tasks",
    ),
    "search-rope": Command(
        "", "evaluation.search_rope:main", "evaluation.arguments:search_rope_parser",
        "RoPE scaling for a longer context (LongRoPE)",
    ),
    "lm-eval": Command(
        "", "evaluation.lm_eval:main", "evaluation.arguments:lm_eval_parser",
        "tasks of EleutherAI's lm-evaluation-harness",
    ),
    "import": Command(
        "", "runs.convert:import_main", "runs.arguments:import_parser",
        "a Hugging Face checkpoint becomes a run",
    ),
    "export": Command(
        "", "runs.convert:export_main", "runs.arguments:export_parser",
        "a run becomes a Hugging Face checkpoint or a GGUF file",
    ),
    "quantize": Command(
        "", "compress.quantize:main", "compress.arguments:quantize_parser",
        "a model's matrices in 8 or 4 bits",
    ),
    "prune": Command(
        "", "compress.prune:main", "compress.arguments:prune_parser",
        "set weights of a trained model to zero",
    ),
    "report": Command(
        "runs", "runs.report:main", "runs.arguments:report_parser", "a page about a run"
    ),
    "compare": Command(
        "", "runs.compare:main", "runs.arguments:compare_parser", "runs side by side",
        joined=True,
    ),
    "ui": Command(
        "", "runs.page.command:main", "runs.arguments:ui_parser", "a live page", joined=True
    ),
    "merge": Command(
        "", "runs.merge:main", "runs.arguments:merge_parser", "several models become one"
    ),
    "shrink": Command(
        "", "compress.shrink:main", "compress.arguments:shrink_parser",
        "a model with fewer layers, heads, hidden channels",
    ),
    "completion": Command(
        "shell", "cli:show_completion", "cli:completion_parser",
        "a script that completes commands and fields",
    ),
}  # fmt: skip
EXAMPLE = "jaxtrain train --config quickstart"


def overview() -> str:
    """The help screen: the commands by group, and a first example."""
    lines = [f"jaxtrain {__version__}: {EXAMPLE}; COMMAND --help says more"]
    rows: list[list[str]] = []
    for name, one in COMMANDS.items():
        if one.joined:
            rows[-1] = [rows[-1][0], f"{rows[-1][1]}, {name}", f"{rows[-1][2]}; {one.summary}"]
        else:
            rows.append([one.group, name, one.summary])
    lines += [f"  {group:6s} {names:15s} {summary}" for group, names, summary in rows]
    return "\n".join(lines)


def find(target: str) -> Callable[..., Any]:
    """Import and return MODULE:FUNCTION below `jaxtrain.`."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(f"jaxtrain.{module}"), function)


@command
def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. `jaxtrain --config ...` is `jaxtrain train ...`."""
    words = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:
        complete()
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        topic = words[1] if len(words) > 1 else ""
        if topic in COMMANDS:
            return main([topic, "--help"])
        print(section_help(topic) if topic else overview())
        return 0 if words else 2
    if name == "--version":
        print(f"jaxtrain {__version__}")
        return 0
    if name.startswith("-") or "=" in name:
        name, words = "train", ["train", *words]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"jaxtrain {name}: no such command; {hint}")
    one, arguments = COMMANDS[name], words[1:]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if not {"-h", "--help"}.isdisjoint(own):  # before anything heavy is imported
        find(one.parser)().parse_args(own)
    return find(one.main)([*one.first, *arguments])


# ---- commands of this module -------------------------------------------------------------------


def config_parser() -> Parser:
    """Parser of `jaxtrain config`."""
    parser = Parser(
        "jaxtrain config",
        description="The shipped configurations; with a NAME that one, resolved.",
    )
    parser.add_argument("config", nargs="?", metavar="NAME", help="a shipped config or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="override a field"
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON schema, for editors")
    return parser


@command
def show_config(argv: list[str] | None = None) -> int:
    """Print the schema, a resolved configuration, or the list of shipped ones."""
    a = config_parser().parse_intermixed_args(argv)
    if a.schema:
        return print(find("config:json_schema")(), end="") or 0
    if a.config:
        return find("main:main")(["--config", a.config, *a.overrides, "--print-config"])
    for name, path in shipped_configs().items():
        first = path.read_text().partition("\n")[0].lstrip("# ")
        print(f"{name:18s} {first}")
    return 0


def completion_parser() -> Parser:
    """Parser of `jaxtrain completion`."""
    parser = Parser(
        "jaxtrain completion",
        description="Print the script that completes `jaxtrain` in a shell: in bash, "
        'eval "$(jaxtrain completion bash)".',
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


@command
def show_completion(argv: list[str] | None = None) -> int:
    """Print argcomplete's script for a shell."""
    a = completion_parser().parse_args(argv)
    print(importlib.import_module("argcomplete").shellcode(["jaxtrain"], shell=a.shell))
    return 0


def complete() -> None:
    """Answer the shell's completion request, which argcomplete reads from the environment; exit."""
    argcomplete = importlib.import_module("argcomplete")
    argparse = importlib.import_module("argparse")
    parser = argparse.ArgumentParser("jaxtrain")
    commands = parser.add_subparsers(dest="command")
    for name, one in COMMANDS.items():
        commands.add_parser(name, parents=[find(one.parser)()], add_help=False, help=one.summary)
    argcomplete.autocomplete(parser, default_completer=candidates)


def candidates(prefix: str, action: Any, **_: Any) -> list[str]:
    """Completions of an argument: names of configs, fields, values of a field, or files."""
    if action.dest == "config":
        return [*shipped_configs(), *files(prefix)]
    if action.dest != "overrides":
        return files(prefix)
    fields = list(all_fields(read_schema()))
    key, equals, _rest = prefix.partition("=")
    if not equals:
        return list(dict.fromkeys(f"{f.path}=" for f in fields if "NAME" not in f.path))
    values = [value for f in fields if f.path == key for value in f.type.split(" | ")]
    return [f"{key}={value}" for value in dict.fromkeys(values) if " " not in value]


def files(prefix: str) -> list[str]:
    return importlib.import_module("argcomplete.completers").FilesCompleter()(prefix)


if __name__ == "__main__":
    sys.exit(main())
