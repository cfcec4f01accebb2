"""Figures of the documents name their records, and `check` notices a figure that moved."""

import importlib
import io
import json
import sys

import pytest
from rich.console import Console

from benchmarks import check, figures, record
from benchmarks.check import ALLOWED, check_records, compare, kind_of
from benchmarks.figures import sections_of

main = importlib.import_module("benchmarks.__main__")


@pytest.mark.parametrize("section", figures.all_sections(), ids=lambda s: f"{s.page}: {s.title}")
def test_every_figure_has_a_record_with_its_command_or_a_reason(section):
    assert not figures.problems(section)


def one_section(text):
    (section,) = sections_of("page.md", text)
    return section


def test_a_figure_without_a_record_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    (tmp_path / "old-cpu.json").write_text(json.dumps({"when": "2026-01-01"}))
    (tmp_path / "new-cpu.json").write_text(json.dumps({"when": "2026-12-01"}))
    (tmp_path / "good-cpu.json").write_text(json.dumps({"when": "2026-12-01", "command": "x"}))
    text = "# Speed\n\n{}A step takes 3.5 ms.\n"
    lacks = lambda marker: figures.problems(one_section(text.format(marker)))
    assert "'3.5 ms' has no record" in lacks("")[0]
    assert "there is no record gone.json" in lacks("<!-- figures: gone.json -->\n")[0]
    assert "new-cpu.json has no command" in lacks("<!-- figures: {new,old}-cpu.json -->\n")[0]
    for marker in (
        "old-cpu.json",
        "good-*.json",
        "command: jaxtrain train",
        "not measured: a rule",
    ):
        assert not lacks(f"<!-- figures: {marker} -->\n")
    assert not lacks("`benchmarks/results/good-cpu.json` has it. ")


def test_a_marker_holds_for_the_sections_below_its_own():
    marked = "# One\n<!-- figures: command: x -->\n"
    (below,) = sections_of("page.md", f"{marked}## Two\n3.5 ms\n")
    assert below.title == "Two" and below.words == (("command", "x"),)
    (marked_section,) = sections_of("page.md", f"{marked}# Two\n3.5 ms\n")
    assert not marked_section.words


def test_numbers_in_code_and_names_of_papers_are_no_figures():
    text = "# One\n`x=0.25` (arXiv:2309.00071)\n```bash\nsleep 3.55\n# 4 s\n```\nPython 3.12\n"
    assert not list(sections_of("page.md", text))


def test_the_pages_are_made_of_the_records(tmp_path):
    made = figures.update_figure_pages(tmp_path / "index.md", tmp_path / "not.md")
    for path, page in zip(made, (figures.INDEX, figures.NOT_MEASURED)):
        assert path.read_text() == page.read_text(), "python -m benchmarks table"


def test_a_device_is_not_measured_until_a_record_has_it():
    def names(*records):
        page = figures.not_measured_page(records, [])
        return page.partition("without a measurement")[2]

    assert "- T4\n" in names() and "- H100\n" in names() and "- TPU v6e\n" in names()
    cpu = {"bench": "step", "device": "cpu", "device_count": 1}
    t4 = {"bench": "step", "device": "Tesla T4", "device_count": 8}
    assert "- T4\n" not in names(cpu, t4) and "- H100\n" in names(t4)
    assert "- T4\n" in names(t4 | {"bench": "preflight"})  # computed, not measured
    assert "- Tesla T4, at most 8 at once" in figures.not_measured_page([cpu, t4], [])


def record_of(rows, bench="packing", **more):
    return {
        "bench": bench,
        "file": f"{bench}-random-cpu.json",
        "device": "cpu",
        "rows": rows,
    } | more


@pytest.mark.parametrize(
    "metric, was, now, verdict",
    [
        ("crop", 0.02, 0.02, "same"),
        ("crop", 0.02, 0.0201, "moved"),  # counted: exact
        ("bpb", 2.078, 2.082, "same"),
        ("bpb", 2.078, 2.084, "moved"),
        ("tokens_per_s", 100.0, 60.0, "same"),
        ("tokens_per_s", 100.0, 190.0, "same"),
        ("tokens_per_s", 100.0, 40.0, "moved"),
        ("tokens_per_s", 100.0, 210.0, "moved"),
        ("step_bytes", 1000, 1010, "same"),
        ("step_bytes", 1000, 1100, "moved"),
    ],
)
def test_a_figure_moves_by_more_than_the_default_of_its_kind(metric, was, now, verdict):
    old, new = (record_of([{"name": "one", metric: x}]) for x in (was, now))
    (figure,) = compare(old, new)
    assert (figure.metric, figure.verdict) == (f"one {metric}", verdict)


def test_the_spread_of_seeds_comes_before_the_default():
    rows = lambda *losses: [{"name": "q", "seed": i, "bpb": x} for i, x in enumerate(losses)]
    old = record_of(rows(2.06, 2.07, 2.08))
    verdict = lambda *losses: next(compare(old, record_of(rows(*losses)))).verdict
    assert verdict(2.08, 2.09) == "same" and verdict(2.10, 2.10) == "moved"
    (gone,) = compare(old, record_of([]))
    assert gone.verdict == "moved: it is not measured any more"


def test_times_that_a_dry_run_computes_are_no_times():
    assert [kind_of(x, "preflight") for x in ("compute_ms", "total_bytes", "compile_s")] == [
        "bytes", "bytes", "time",
    ]  # fmt: skip
    assert kind_of("ms", "step") == kind_of("watts", "rows") == "time" and set(ALLOWED) == {
        "time",
        "loss",
        "bytes",
        "count",
    }


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Records of a benchmark that is a script: its first argument is what it measures now."""
    script = (
        "import json, sys; out = sys.argv[sys.argv.index('--out') + 1];"
        "json.dump({'bench': 'packing', 'rows': [{'name': 'one', 'crop': float(sys.argv[1])}]},"
        "open(out + '/packing-random-cpu.json', 'w'))"
    )
    run = check.subprocess.run
    instead = lambda command, **more: run([sys.executable, "-c", script, *command[3:]], **more)
    monkeypatch.setattr(check.subprocess, "run", instead)
    folder = tmp_path / "results"
    folder.mkdir()

    def keep(name, **more):
        (folder / name).write_text(json.dumps(record_of([{"name": "one", "crop": 0.5}], **more)))
        return folder

    return keep


def lines_of(folder, *only, record=False):
    console = Console(width=200, file=io.StringIO())
    code = check_records(only, record, console, folder)
    return code, console.file.getvalue()


def test_a_record_is_measured_again_by_its_command(results):
    folder = results("packing-random-cpu.json", command="python -m benchmarks 0.5")
    code, text = lines_of(folder)
    assert code == 0 and "1 figures are the same, 0 moved" in text
    results("packing-random-cpu.json", command="python -m benchmarks 0.7")
    code, text = lines_of(folder, "random")
    assert code == 1 and "one crop" in text and "0.7" in text and "1 moved" in text


def test_what_does_not_run_here_says_why(results):
    folder = results("packing-other-cpu.json")
    results("step-gpt_d12-nvidia_h200.json", device="NVIDIA H200", command="python -m benchmarks 1")
    results("packing-text-cpu.json", command="python -m benchmarks no_number")
    code, text = lines_of(folder)
    assert code == 0 and "3 records were not run" in text
    assert "its command was not kept" in text and "it is of NVIDIA H200" in text
    assert "could not convert string" in text
    with pytest.raises(check.UserError, match="no record's file name has loader in it"):
        lines_of(folder, "loader")


def test_record_replaces_what_moved(results, monkeypatch):
    folder, written = results("packing-random-cpu.json", command="python -m benchmarks 0.7"), []
    monkeypatch.setattr(check, "write", lambda new, out: written.append((new, out)))
    assert lines_of(folder, record=True)[0] == 1
    ((new, out),) = written
    assert out == folder and new["rows"][0]["crop"] == 0.7


def test_a_record_keeps_the_command_that_made_it(tmp_path, monkeypatch):
    made = {"bench": "packing", "config": "random", "variant": "", "device": "cpu",
            "device_count": 1, "rows": [], "peers": []}  # fmt: skip
    monkeypatch.setattr(main, "bench_packing", lambda *_: dict(made))
    out = tmp_path / "out"
    argv = ["packing", "data.seed=1", "--variant", "two words", "--record", "--out", str(out)]
    assert main.main(argv) == 0
    (found,) = record.read_results(out)
    assert found["command"] == (
        "python -m benchmarks packing data.seed=1 --variant 'two words' --record"
    )
