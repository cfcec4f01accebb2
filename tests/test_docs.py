"""The manual: its commands are parsed by the real parsers, its Python runs, its tables are true."""

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import get_args

import pytest
import tour
import yaml

import jaxtrain
from jaxtrain import cli
from jaxtrain.config import Config, find_config, load_config
from jaxtrain.config.fields import tag_of, variants_of
from jaxtrain.model.sections import Remat
from jaxtrain.parallel.mesh import AXES
from jaxtrain.settings import Parser, UserError
from jaxtrain.storage import fetch
from jaxtrain.sweep.config import SweepConfig
from jaxtrain.sweep.load import find_sweep, load_sweep
from jaxtrain.train.growth import GROWTHS

ROOT = Path(jaxtrain.__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OTHERS = (
    "pip install",
    "curl ",  # tests/inference/test_server.py runs these
    "lm_eval ",
    "sbatch ",
    "kubectl ",
    "HOSTS=",
    "python launch/",
    "uv run pytest",
    "uv run python -m jaxtrain.config",
)


def blocks(path, *kinds):
    """The fenced blocks of a page, of these languages."""
    return [text for kind, text in FENCE.findall(path.read_text()) if kind in kinds]


def commands_of(path):
    lines = "".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


COMMANDS = [
    pytest.param(command, id=f"{path.stem}: {command}"[:100])
    for path in [*PAGES, ROOT / "README.md"]
    for command in commands_of(path)
]


class Parsed(BaseException):
    """The arguments of a command, in the place of doing what they ask for."""


@pytest.fixture
def parse(monkeypatch):
    """(command line as words) -> what the command's own parser made of it."""

    def instead(method):
        def parse_and_stop(self, *arguments):
            raise Parsed(method(self, *arguments))

        return parse_and_stop

    monkeypatch.setattr(fetch, "local_copy", Path)  # of a URL
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(Parser, name, instead(getattr(argparse.ArgumentParser, name)))

    def run(main, words):
        try:
            code = main(words)
        except Parsed as found:
            return found.args[0]
        raise AssertionError(f"exit code {code}, and nothing was parsed: {words}")

    return run


def check(parse, words):
    """A command of ours: the program, its options, and every field that it sets."""
    if words[:3] == ["python", "-m", "benchmarks"]:
        return parse(importlib.import_module("benchmarks.__main__").main, words[3:])
    assert words[0] == "jaxtrain" and words[1] in cli.COMMANDS, words
    if words[-1] in ("--help", "-h"):
        return None
    if words[1] == "sweep":
        arguments = parse(cli.main, words[1:])
        load_sweep(find_sweep(arguments.sweep), arguments.overrides)
        return arguments
    if words[1] == "launch":
        first = words.index("--")
        command = words[words.index("--command") + 1] if "--command" in words else "train"
        return check(parse, ["jaxtrain", command, *words[first + 1 :]])
    arguments = parse(cli.main, words[1:])
    fields = [word for word in words[2:] if re.match(r"[a-z_]+(\.\w+)+=", word)]
    given = ("train.init_from=", "finetune.init_adapter=")  # may be what nobody has here
    local = [word for word in fields if not word.startswith(given)]
    if len(local) < len(fields) and getattr(arguments, "config", "") == "continue":
        local += ["train.init_from=null"]
    config = getattr(arguments, "config", None)
    path = None
    if config and not config.startswith("configs/mine"):
        path = find_config(config)
    load_config(path, local)
    return arguments


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_and_can_be_pasted(command, parse, monkeypatch):
    """Options are parsed, configurations and fields looked up; nothing runs.

    zsh takes an unquoted * ? [ { ~ ^ for a pattern, fails where no file matches, and knows no
    comments when it is interactive.
    """
    outside = re.sub(r"'[^']*'|\"[^\"]*\"| > [\w./-]+$", "''", command)
    assert not re.search(r"[*?\[\]{}~^#!<>]", outside), command
    assert not re.search(r"\b(NAME|RUN|CONFIG|DIR|I|OWNER|PATH|FOLDER)\b", outside), command
    if f"{command}\n".startswith(OTHERS):
        named = [word for word in shlex.split(command) if word.startswith(("launch/", "tests/"))]
        assert all((ROOT / word).exists() for word in named)
        return
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    words = words[words.index("jaxtrain") :] if words[0] in ("uv", "pip") else words
    check(parse, words)


def test_the_parsing_notices_what_is_wrong(parse, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"train\.stepps"):
        check(parse, shlex.split("jaxtrain train --config quickstart train.stepps=3"))
    with pytest.raises(UserError, match="no_such"):
        check(parse, shlex.split("jaxtrain train --config no_such"))
    with pytest.raises(AssertionError, match="exit code 2"):
        check(parse, shlex.split("jaxtrain generate runs/quickstart --temprature 1"))
    assert len(COMMANDS) > 60 and capsys.readouterr().err


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_yaml_blocks_are_configurations(path):
    for text in blocks(path, "yaml"):
        tree = yaml.safe_load(text)
        (SweepConfig if "parameters" in tree else Config).model_validate(tree)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.stem)
def test_fields_in_the_text_exist(path):
    """`section.field` and `section.field=value` in backticks."""
    sections = "|".join(Config.model_fields)
    for name in re.findall(rf"`((?:{sections})(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`", path.read_text()):
        if name not in ("model.n_layer", "metrics.jsonl"):  # another stack, a file
            assert exists(Config, name.split(".")), f"{path.name}: {name}"


def exists(model, parts):
    """Whether some variant of the section has that field."""
    if parts[0] not in model.model_fields:
        return False
    variants = variants_of(model.model_fields[parts[0]])
    if len(parts) == 1 or not variants:
        return True  # the rest are keys of a dictionary
    return any(exists(variant, parts[1:]) for variant in variants)


# What a practitioner types into the search box: whole words, in any case.
TERMS = """tensor parallel(ism)|sequence parallel(ism)|data parallel(ism)|pipeline parallel(ism)
context parallel(ism)|ring attention|expert parallel(ism)|FSDP|ZeRO|gradient accumulation
activation checkpointing|gradient checkpointing|KV cache|sequence packing|loss masking|LoRA|QLoRA
DoRA|IA3|prefix tuning|prompt tuning|DPO|KTO|ORPO|IPO|mixture of experts|low-communication|DiLoCo
float8|FP8|delayed scaling|loss scaling|mixed precision|bfloat16|supervised fine-tuning
chat template|continued pretraining|deduplication|MinHash|decontamination|tokenizer
learning rate schedule|learning rate|warmup|WSD|cosine|weight decay|gradient clipping|EMA
exponential moving average|Muon|AdamW|perplexity|bits per byte|lm-evaluation-harness|Hugging Face
safetensors|checkpoint|out of memory|NaN|loss spike(s)|SLURM|Kubernetes|multi-node|fault tolerance
CPU offload|curriculum|MFU|few-shot|streaming|fill in the middle|importance sampling
gradient norm|sliding window|stochastic depth|multi-token prediction|quantization-aware training
z-loss|muP|reference model|TensorBoard|dry run"""


@pytest.mark.parametrize("term", re.split(r"[|\n]", TERMS))
def test_a_standard_term_is_in_the_manual(term):
    words = re.sub(r"\\\((\w+)\\\)", r"(\1)?", re.escape(term)).replace(r"\ ", r"\s+")
    pages = [path for path in PAGES if "fields" not in path.parts]
    found = re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE)
    assert any(found.search(path.read_text()) for path in pages), term


KINDS = re.compile(r"^\| `([a-z_.]+\.name)` .*\n\|[-| ]+\n((?:\|.*\n)+)", re.MULTILINE)
TABLES = [
    pytest.param(path, *found, id=f"{path.stem} {found[0]}")
    for path in PAGES
    if path.stem != "preferences"  # those objectives alone
    for found in KINDS.findall(path.read_text())
]


def test_the_page_about_sweeps_has_the_shipped_one_and_all_kinds():
    page = ROOT / "docs" / "howto" / "sweep.md"
    [shown] = blocks(page, "yaml")
    assert (ROOT / "configs" / "sweeps" / "quickstart.yaml").read_text().endswith(f"\n{shown}")
    for heading in ("parameter", "sampler", "pruner"):
        table = rf"^\| {heading} .*\n\|[-| ]+\n((?:\|.*\n)+)"
        [rows] = re.findall(table, page.read_text(), flags=re.MULTILINE)
        field = SweepConfig.model_fields["parameters" if heading == "parameter" else heading]
        names = re.findall(r"^\| `(\w+)`", rows, flags=re.MULTILINE)
        assert sorted(names) == sorted(str(tag_of(kind)) for kind in variants_of(field))


def first_column(rows):
    """The names in backticks of the first cell of each row."""
    return [name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def kinds_of(path):
    """What a field a.b.name of some variant may be."""
    models = [Config]
    for part in path.split(".")[:-1]:
        given = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [variant for field in given for variant in variants_of(field)]
    return {tag_of(model) for model in models} - {None}


@pytest.mark.parametrize(("page", "field", "rows"), TABLES)
def test_a_table_of_kinds_has_all_that_there_are(page, field, rows):
    assert sorted(first_column(rows)) == sorted(kinds_of(field))


@pytest.mark.parametrize(
    ("page", "heading", "there_are"),
    [
        ("howto/memory.md", "`model.remat`", get_args(Remat)),
        ("howto/phases.md", "`grow`", GROWTHS),
        ("howto/filter.md", "`name`", kinds_of("data.train.filters.name")),
        ("howto/parallelism.md", "axis", [f"mesh.{axis}" for axis in AXES]),
    ],
)
def test_a_table_of_choices_has_all_that_there_are(page, heading, there_are):
    text = (ROOT / "docs" / page).read_text()
    [rows] = re.findall(rf"^\| {heading} .*\n\|[-| ]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert sorted(re.findall(r"^\| `([\w.]+)`", rows, flags=re.MULTILINE)) == sorted(there_are)


@pytest.mark.parametrize("page", tour.PAGES)
def test_the_tour_is_true(page):
    text = (ROOT / page).read_text()
    assert tour.MARKERS.search(text)
    tables = (tour.MARKERS.search(found)[0] for found in (text, tour.renewed(page)))
    shown, true = (re.findall(r"\| \**([\d,]+)\** \|", table) for table in tables)
    number = lambda digits: int(digits.replace(",", ""))
    assert len(shown) == len(true) == len(tour.TOUR) + 1
    for old, new in zip(shown, true, strict=True):  # a patch of some lines need not renew it
        within = max(10, number(new) // 10)
        assert abs(number(old) - number(new)) <= within, "stale: uv run python tests/tour.py"


def test_every_page_is_reached_and_every_link_leads_somewhere():
    for path in PAGES:
        for name in re.findall(r"\{doc\}`(?:[^`<]*<)?([^`>]+)>?`", path.read_text()):
            target = (path.parent / name).resolve()
            notebook = ROOT / "notebooks" / f"{target.name}.ipynb"
            assert target.with_suffix(".md").is_file() or notebook.is_file(), f"{path}: {name}"


# ---- the pages that are generated ----------------------------------------------------------------


def test_the_reference_of_the_configuration_has_every_field(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    pytest.importorskip("docutils")
    from config_reference import of_section

    from jaxtrain.config import fields

    for section in Config.model_fields:
        text = "\n".join(of_section(section))
        page = ROOT / "docs" / "reference" / "fields" / f"{section}.md"
        assert f"{{config-reference}} {section}" in page.read_text()
        for path, field, _ in fields(Config):
            if path.startswith(f"{section}.") and field.description:
                assert f".{path.rsplit('.', 1)[1]}`" in text, path
    sys.modules.pop("config_reference")
