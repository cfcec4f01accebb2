"""The README is a front page; its commands are tested with the manual's (tests/test_docs.py)."""

import re
from pathlib import Path

import jaxtrain

ROOT = Path(jaxtrain.__file__).parents[1]
README = (ROOT / "README.md").read_text()
TOUR = re.compile(r"<!-- tour -->.*?<!-- end -->", re.DOTALL)


def test_its_length():
    text = re.sub(r"\]\([^)]*\)", " ", TOUR.sub("", README))  # without targets of links
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert 900 <= len(words) <= 1200, len(words)


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
    own_loss, optimizer = python_of("README.md")
    assert own_loss in python_of("docs/reference/api.md")
    assert optimizer in (ROOT / "docs" / "howto" / "extend.md").read_text()


def test_training_with_a_loss_of_ones_own_works_as_printed_in_15_lines(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code = python_of("README.md")[0]
    assert sum(map(bool, code.splitlines())) <= 15
    changes = {"100": "3", "tokens=40": "tokens=2",
               '"model.depth=2"': '"model.depth=1", "optim.schedule.warmup_steps=0"'}  # fmt: skip
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
