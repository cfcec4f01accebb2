"""The README is a front page; its commands are tested with the manual's (tests/test_docs.py)."""

import re
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.cluster import started_by
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.train.run_directory import final_message

ROOT = Path(jaxtrain.__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_its_length():
    assert 900 <= len(README.split()) <= 1200  # as `wc -w` counts


def test_it_begins_with_one_sentence_and_one_picture():
    title, sentence, picture = README.split("\n\n")[:3]
    assert title == "# jaxtrain" and sentence.count(".") == 1
    assert picture.startswith("![") and README.count("![") == 1


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def python_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_its_python_is_the_manuals():
    (own_loss,) = python_of("README.md")
    assert own_loss in python_of("docs/reference/api.md")


def test_its_output_is_a_part_of_the_first_runs_and_ends_as_a_run_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the first command's run may be in the checkout, with its sample
    printed, whole = (
        re.findall(r"```text\n(model .*?)```", (ROOT / page).read_text(), flags=re.DOTALL)[0]
        for page in ("README.md", "docs/tutorials/first-run.md")
    )
    assert set(printed.splitlines()) <= set(whole.splitlines())
    monkeypatch.setattr(started_by, "program", lambda: ["uv", "run", "jaxtrain"])
    c = resolve(load_config(find_config("quickstart")), 768)
    page = c.run_dir / "report.html"
    assert printed.endswith(final_message(c, c.train.steps, page, talks=False) + "\n")


@pytest.mark.slow
def test_training_with_a_loss_of_ones_own_works_as_printed_in_15_lines(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code = python_of("README.md")[0]
    assert sum(map(bool, code.splitlines())) <= 15
    changes = {"100": "3", "tokens=40": "tokens=2",
               '"model.depth=2"': '"model.depth=1", "model.width=32", "model.head_dim=8", '
               '"optim.schedule.warmup_steps=0"'}  # fmt: skip
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    space = {}
    exec(code, space)
    assert len(space["losses"]) == 3 and space["losses"][-1] < space["losses"][0]
    assert capsys.readouterr().out


def test_its_table_of_figures_has_six_rows():
    rows = README.split("| question | jaxtrain | other |\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 1 + 6
