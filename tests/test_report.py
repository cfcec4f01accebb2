import json
import math
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from jaxtrain.runs import report, report_charts
from jaxtrain.runs.report_data import _lengths
from jaxtrain.settings import visible

VOID = {"meta", "rect", "circle", "path"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order; keeps what the page refers to."""

    def __init__(self):
        super().__init__()
        self.stack, self.tags, self.references = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def parse(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.stack == []
    return parser


def write_run(folder, steps=600, end="finished", validation=True):
    folder.mkdir(parents=True, exist_ok=True)
    start = {"event": "start", "total_steps": 600, "parameters": 123_456_789}
    rows = [{"step": 0, "kind": "event", "time": 0.0} | start]
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "kind": "train",
            "time": step * 1.5,
            "loss": 3 + 8 * math.exp(-step / 50),
        }
        row |= {"lr": 0.01, "tokens": step * 1000, "tokens_per_s": 1000.0 + step % 7, "mfu": 0.41}
        rows.append(row | {"grad_norm": 1.0, "memory_bytes": 2**30})
        if validation and step % 100 == 0:
            loss = 3.5 if step == 300 else 4.0
            rows.append(
                {"step": step, "kind": "validation", "time": step * 1.5, "loss": loss, "bpb": 1.2}
            )
    if end:
        rows.append({"step": steps, "kind": "event", "time": 1.0, "event": "end", "status": end})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_full_run(tmp_path):
    run = write_run(tmp_path / "my <run>")
    (run / "config.yaml").write_text("note: <script>alert(1)</script> & more\n")
    env = {"device_kind": "NVIDIA <H200>", "device_count": 8, "versions": {"jax": "0.11"}}
    (run / "env.json").write_text(json.dumps(env | {"memory_bytes": 2**31}))
    (run / "samples").mkdir()
    for step in (100, 1000):
        (run / "samples" / f"step_{step:06d}.txt").write_text(f"<|bos|> at {step}")
    page = report.write_report(run).read_text()
    parsed = parse(page)
    assert parsed.references == [] and "url(" not in page and "script" not in parsed.tags
    # Two of loss, then bits per byte, lr, tokens/s, MFU, gradient norm and memory.
    assert parsed.tags.count("figure") == 8
    assert "my &lt;run&gt;" in page and "8 x NVIDIA &lt;H200&gt;" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert page.index("&lt;|bos|&gt; at 1000") < page.index("&lt;|bos|&gt; at 100<")
    assert "<summary>step 1000</summary>" in page
    assert "best 3.5000 at step 300" in page
    for text in ("123M", "41.0%", "1,003", "2.0 GiB", "600K", ">finished<"):
        assert text in page
    assert len(page) < 600_000


@pytest.mark.slow
def test_a_long_run_stays_small(tmp_path):
    run = write_run(tmp_path / "run", steps=20_000)
    (run / "samples").mkdir()
    for step in range(100):
        (run / "samples" / f"step_{step:06d}.txt").write_text("&" * 50_000)
    page = report.write_report(run).read_text()
    assert len(page) < 1_500_000
    assert "step 99<" in page and "step 0<" not in page


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_just_begun_or_was_killed(tmp_path, steps):
    run = write_run(tmp_path / "run", steps=steps, end=None, validation=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ki')
    (run / "env.json").write_text("{")
    page = report.write_report(run).read_text()
    parsed = parse(page)
    assert "no end recorded: still running, or killed" in page
    assert parsed.tags.count("figure") == (7 if steps else 0)
    assert not re.search(r"\b(nan|inf)\b", page)


def test_values_that_are_not_finite_are_left_out_and_named(tmp_path):
    run = write_run(tmp_path / "run", steps=50, end="failed: ValueError: <no> label")
    with (run / "metrics.jsonl").open("a") as file:
        row = {"step": 51, "kind": "train", "time": 99.0, "loss": None, "nonfinite": ["loss"]}
        file.write(json.dumps(row) + "\n")
    page = report.write_report(run).read_text()
    parse(page)
    assert "1 rows hold values that are not finite (loss), the first at step 51." in page
    assert 'class="status failed">failed: ValueError: &lt;no&gt; label<' in page


def test_resumes_are_counted(tmp_path):
    run = write_run(tmp_path / "run", steps=20, end=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "kind": "event", "time": 40.0, "event": "start"}\n')
    assert "resumed 1 time<" in report.write_report(run).read_text()


def test_the_command_line(tmp_path, capsys):
    assert report.main([str(write_run(tmp_path / "run", steps=5))]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    assert report.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "is not a run: it has no metrics.jsonl" in error and error.count("\n") == 1


def test_ticks_are_round_and_inside():
    assert report_charts.ticks(0, 1500, 6) == [0, 500, 1000, 1500]
    assert report_charts.ticks(2.9, 7.1) == [3, 4, 5, 6, 7]
    assert report_charts.ticks(0, 0.0213) == [0, 0.005, 0.01, 0.015, 0.02]


def test_thinning_keeps_the_extremes():
    ys = [0.0] * 10_000
    ys[5_000], ys[7_000] = 9.0, -9.0
    points = report_charts.thinned(range(10_000), ys)
    assert (5_000, 9.0) in points and (7_000, -9.0) in points
    assert len(points) <= report_charts.MAX_POINTS
    assert [x for x, _ in points] == sorted(x for x, _ in points)


@pytest.mark.parametrize(
    "count, text", [(950, "950"), (999_999, "1.00M"), (123_456_789, "123M"), (7.864e9, "7.86B")]
)
def test_format_count(count, text):
    assert report.format_count(count) == text


def titles(page):
    return [unescape(title) for title in re.findall(r"<figcaption>([^<]*)", page)]


def write_rows(folder, rows, **start):
    """A run of a few training rows with these values."""
    folder.mkdir()
    event = {"step": 0, "kind": "event", "time": 0.0, "event": "start"} | start
    lines = [event, *({"step": i, "kind": "train", "time": i} | row for i, row in enumerate(rows))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return report.write_report(folder).read_text()


def test_preferences_have_charts_of_their_order_and_margin(tmp_path):
    row = {"loss": 0.6, "accuracy": 0.75, "reward_margin": 0.2}
    row |= {"reward_chosen": 0.1, "reward_rejected": -0.1}
    page = write_rows(tmp_path / "run", [row, row])
    assert {"Loss (nats per pair) by step", "Pairs in the right order (%)", "Rewards"} < set(
        titles(page)
    )
    assert "Reward margin, chosen over rejected" in titles(page)
    parse(page)
    assert '<i class="rejected">rejected</i>' in page and "chosen 0.1, rejected -0.1" in page
    assert "Rewards" not in write_rows(tmp_path / "other", [{"loss": 0.6}] * 2)


@pytest.mark.parametrize("experts", [4, 200])
def test_experts_have_charts_of_their_load(tmp_path, experts):
    row = {"loss": 3.0, "expert_load_max": 1.5, "expert_load_min": 0.25}
    loads = {f"expert_load_{i}": 0.5 + i / experts for i in range(experts)}
    page = write_rows(tmp_path / "run", [row | loads] * 2)
    parse(page)
    assert "Expert load, of the mean (extremes of all layers)" in titles(page)
    assert page.count('class="bar"') == min(experts, 64)
    more = "; 136 more are not drawn" if experts == 200 else ""
    assert f"Load of each expert at the end, of the mean (mean of all layers){more}" in titles(page)


def test_an_adapter_has_a_chart_of_its_share(tmp_path):
    trained = {"embed": [0, 900], "blocks/attention/q": [10, 100], "prompt": [20, 0]}
    page = write_rows(tmp_path / "run", [{"loss": 3.0}] * 2, trained=trained)
    parse(page)
    title = "What trains: 30 parameters, 3.00% of the model's 1.00K (here % of each matrix)"
    assert title in titles(page) and page.count('class="bar"') == 2
    assert "<th>blocks/attention/q</th><td>10</td>" in page and "<th>prompt</th><td>2</td>" in page
    assert "What trains" not in write_rows(tmp_path / "other", [{"loss": 3.0}] * 2, trained={})


@pytest.mark.parametrize("lengths", [[0] * 9 + [1], [1] + [0] * 9, [0, 0, 3, 0, 1, 0]])
def test_documents_have_a_bar_for_each_length_up_to_the_longest(lengths):
    counts = {str(2 << i): count for i, count in enumerate(lengths)}
    figure = _lengths("text", counts)
    parse(figure)
    shown = re.findall(r"<th>([\d,]+)</th><td>(\d+)</td>", figure)
    there = [i for i, count in enumerate(lengths) if count]
    assert shown == [(f"{2 << i:,}", str(lengths[i])) for i in range(there[0], there[-1] + 1)]
    widths = [float(width) for width in re.findall(r"width: ([\d.]+)%", figure)]
    assert widths == pytest.approx([100 * int(n) / max(lengths) for _, n in shown], abs=0.1)


def test_no_document_has_no_chart_of_lengths():
    assert _lengths("text", {"2": 0, "4": 0}) == ""


CONTROL = "a\x00b\x1b[2Jc\x07\x7f\x9b31m\rd\r\n\te"
SHOWN = "a\u2400b\u241b[2Jc\u2407\u2421\ufffd31m\u240dd\r\n\te"


def test_control_characters_are_symbols_in_samples_and_on_the_terminal(tmp_path):
    assert visible(CONTROL) == SHOWN and visible(SHOWN) == SHOWN
    run = write_run(tmp_path / "run", steps=2)
    (run / "samples").mkdir()
    (run / "samples" / "step_000002.txt").write_bytes(CONTROL.encode())
    page = report.write_report(run).read_bytes()
    assert b"\x00" not in page and b"\x1b" not in page and "\u241b[2Jc".encode() in page
