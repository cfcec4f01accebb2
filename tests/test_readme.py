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


def test_its_example_of_an_optimizer_is_the_manuals():
    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code in (ROOT / "docs" / "explanation" / "extend.md").read_text()


def test_its_table_of_figures_has_six_rows():
    rows = README.split("| question | jaxtrain | other |\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 1 + 6
