"""The notebooks: their cells compile, their commands are valid, and they run at a tiny size."""

import argparse
import ast
import json
import re
import shlex
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from tiny import CACHE, FEW_PARTS, assignments, random_params

import jaxtrain
from jaxtrain.cli import main as cli
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.model import Transformer, split
from jaxtrain.runs.saved import save_model

FOLDER = Path(jaxtrain.__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
WITH_COMMANDS = ["finetune_t4", "quickstart"]  # the others call the Python API
COMMAND = re.compile(r"^!(python -c|jaxtrain (?P<command>[\w-]+)) ?(?P<rest>.*)$")


def cells_of(name):
    """(tags, source) of the code cells."""
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in book["cells"]]
    assert len(ids) == len(set(ids))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return [(cell["metadata"].get("tags", []), "".join(cell["source"])) for cell in code]


def as_python(source):
    """IPython's `!command` as a call of `shell` with an f-string; `%pip` does nothing."""
    lines = []
    for line in source.split("\n"):
        if line.startswith("%"):
            assert line.startswith("%pip install "), line
            line = "pass"
        elif line.startswith("!"):
            line = f"shell(f{line!r})"
        lines.append(line)
    return "\n".join(lines)


def run_notebook(name, shell, changes=None):
    """Execute all cells but the installation; `changes` come behind the parameters."""
    space = {"shell": shell}
    for tags, source in cells_of(name):
        if "install" not in tags:
            exec(compile(as_python(source), name, "exec"), space)
        if "parameters" in tags:
            assert (changes or {}).keys() <= space.keys()
            space |= changes or {}


def parsed(line):
    """(command, arguments) of a line; no command: Python."""
    match = COMMAND.match(line)
    assert match, f"no command that a test can run: {line}"
    return match["command"], shlex.split(match["rest"])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_only_the_public_api_is_used_and_the_options_are_fields(name):
    space = {}
    for tags, source in cells_of(name):
        tree = ast.parse(as_python(source))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] != "jaxtrain"
            if isinstance(node, ast.Import):
                assert all(not alias.name.startswith("jaxtrain.") for alias in node.names)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxtrain":
                assert node.attr in jaxtrain.__all__
        if "parameters" in tags:
            exec(compile(tree, name, "exec"), space)
    options = [value for key, value in space.items() if key.endswith("OPTIONS")]
    assert options
    for given in options:
        load_config(None, given.split() if isinstance(given, str) else given)


def test_every_notebook_is_in_the_manual():
    page = (FOLDER.parent / "docs" / "tutorials" / "index.md").read_text()
    assert sorted(re.findall(r"^notebooks/(\w+)$", page, flags=re.MULTILINE)) == NOTEBOOKS


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_cell_compiles_and_every_command_is_one(name, tmp_path, monkeypatch, capsys):
    """With what is in the notebooks: files, configurations and fields are looked up, not run."""
    monkeypatch.chdir(tmp_path)
    commands = []
    space = {"shell": commands.append}
    for tags, source in cells_of(name):
        tree = ast.parse(as_python(source))
        calls = [n for n in tree.body if isinstance(n, ast.Expr) and "shell" in ast.dump(n)]
        if "parameters" in tags:
            exec(compile(tree, name, "exec"), space)
        for node in tree.body:  # the commands, and the plain values that they need
            if node in calls or (isinstance(node, ast.Assign) and not tags and calls):
                read = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                if {n.id for n in read if isinstance(n.ctx, ast.Load)} <= space.keys():
                    exec(compile(ast.Module([node], []), name, "exec"), space)
    written = len(re.findall("!(python|jaxtrain) ", "".join(s for _, s in cells_of(name))))
    assert len(commands) == written
    names = [command for command, _ in map(parsed, commands)]
    assert names.count("train") >= 1 and "generate" in names
    for command, arguments in map(parsed, commands):
        if command == "train":
            check_training(arguments)
        elif command:  # well-formed, but there is no such run here
            assert cli([command, *arguments]) == 2
            assert "is not a run directory" in capsys.readouterr().err
        else:
            compile(arguments[0], name, "exec")


def check_training(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("overrides", nargs="*")
    a = parser.parse_intermixed_args(arguments)
    from_hub = [line for line in a.overrides if line.startswith("train.init_from=")]
    local = [line for line in a.overrides if line not in from_hub]
    resolve(load_config(find_config(a.config), local), 512)
    assert all(re.fullmatch(r"train.init_from=[\w.-]+/[\w.-]+", line) for line in from_hub)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_install_cell_takes_the_release_file_or_the_checkout(name, tmp_path, monkeypatch):
    [source] = [source for tags, source in cells_of(name) if "install" in tags]
    assert "..." not in source and "OWNER" not in source
    lines = [f"pip(f{x!r})" if x.startswith("%pip") else x for x in source.split("\n")]

    def installed():
        given = []
        exec(compile("\n".join(lines), name, "exec"), {"pip": given.append})
        return shlex.split(given[0])[3]

    monkeypatch.chdir(FOLDER)
    assert Path(installed().removesuffix("[hf]")) == FOLDER.parent
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"upload jaxtrain-VERSION-py3-none-any\.whl"):
        installed()
    (tmp_path / "jaxtrain-0.1.0-py3-none-any.whl").touch()
    assert installed().startswith(str(tmp_path / "jaxtrain-0.1.0-py3-none-any.whl"))


# ---- at a tiny size ------------------------------------------------------------------------------


def in_process(line):
    """A command as the shell would run it; it has to succeed."""
    command, arguments = parsed(line)
    if command:
        assert cli([command, *arguments]) == 0, line
    else:
        exec(arguments[0], {})


TINY = {
    "data.cache_dir": CACHE, "model.depth": 1, "model.width": 32, "model.head_dim": 8,
    "model.hidden": 48, "train.sequence_length": 128, "train.batch_size": 8, "train.steps": 2,
    "train.device_batch_size": 1, "metrics.tensorboard": False, "metrics.every": 1,
    "sample.tokens": 8, "eval.tokens": 256, "eval.every": "null", "checkpoint.every": "null",
}  # fmt: skip


def options(**changes):
    fields = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    return " ".join(f"{key}={value}" for key, value in fields.items())


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_the_quickstart_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    some = options(data__tokenizer__vocab_size=384, optim__schedule__warmup_steps=0)
    run_notebook("quickstart", in_process, {"OPTIONS": some})
    assert len(plt.gca().lines) == 2 and len(plt.gca().lines[0].get_xdata()) == 2
    plt.close("all")
    out = capfd.readouterr().out
    assert out.count("ROMEO:") == 2  # the run's own sample, and the notebook's
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_own_text_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    some = options(data__tokenizer__vocab_size=384, data__validation__fraction=0.3)
    run_notebook("own_text", in_process, {"FILES": 20, "OPTIONS": some.split()})
    assert len(plt.gca().lines) == 2
    plt.close("all")
    assert "for key of keys:" in capfd.readouterr().out
    assert (tmp_path / "runs" / "own_text" / "model").is_dir()


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_own_loss_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    small = ["model.depth=1", "model.width=32", "model.head_dim=8"]
    run_notebook("own_loss", in_process, {"STEPS": 3, "ROWS": 8, "OPTIONS": small})
    assert [len(line.get_xdata()) for line in plt.gca().lines] == [3, 3]
    plt.close("all")
    assert capfd.readouterr().out.count("of the answers are right") == 2
    assert (tmp_path / "sorter" / "model").is_dir()


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_the_comparison_of_optimizers_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rates = {"muon": ("matrix_lr", [0.02]), "lion": ("learning_rate", [0.0002, 0.0005])}
    some = options(data__tokenizer__vocab_size=384, optim__schedule__warmup_steps=0)
    run_notebook("optimizers", in_process, {"RATES": rates, "OPTIONS": some.split()})
    assert len(plt.gca().lines) == 2
    plt.close("all")
    out = capfd.readouterr().out
    assert "lion-0.0002" in out and "optim.name" in out


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_preferences_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    steps = [
        "train.steps=2",
        "metrics.every=1",
        "metrics.tensorboard=false",
        f"data.cache_dir={CACHE}",
    ]
    small = ["model.depth=1", "model.width=32", "model.head_dim=8", *assignments(**FEW_PARTS)]
    changes = {"ASKED": 2, "SFT_OPTIONS": [*steps, *small], "DPO_OPTIONS": steps}
    run_notebook("dpo", in_process, changes)
    assert [len(line.get_xdata()) for line in plt.gca().lines] == [2, 2]
    plt.close("all")
    assert capfd.readouterr().out.count("answers are chatty") == 2


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_the_fine_tuning_runs_from_a_model_of_the_same_family(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    some = options(model__kv_heads=2, model__vocab_multiple=64, train__precision="float32")
    whole = [*some.split(), "finetune.name=full", "data.tokenizer.name=bytes"]
    some += " finetune.rank=2"
    tokenizer = byte_tokenizer()
    c = resolve(load_config(find_config("llama_1b_lora_t4"), whole), tokenizer.vocab_size)
    _, specs = split(Transformer(c.model, tokenizer.vocab_size))
    save_model(tmp_path / "base", c, random_params(specs), tokenizer)
    run_notebook("finetune_t4", in_process, {"OPTIONS": some, "MODEL": "base"})
    plt.close("all")
    out = capfd.readouterr().out
    assert "activations and scratch" in out and "tune     lora" in out
    assert "exported exported as llama" in out
    assert {"config.json", "model.safetensors"} <= {p.name for p in Path("exported").iterdir()}
    assert (tmp_path / "adapter.zip").is_file()
