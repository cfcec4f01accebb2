"""The page of `jaxtrain ui`: its answers, what it refuses, and files that grow under it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from page_cases import ROW, make_run, served, write_rows
from starlette.testclient import TestClient
from tiny import QUICK, assignments

from jaxtrain.runs.lock import RunLock
from jaxtrain.runs.page import dry_run as estimates
from jaxtrain.runs.page.app import Page, page_app
from jaxtrain.runs.page.command import listening, main
from jaxtrain.runs.page.folder import RunFolder
from jaxtrain.runs.page.tail import AT_ONCE, Tail

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def runs(tmp_path):
    """A folder with two runs, and a secret outside of it."""
    folder = tmp_path / "runs"
    make_run(folder, "first")
    make_run(folder, "second", steps=60, end=None, floor=1.5, lr=0.02)
    make_run(tmp_path, "outside")
    return folder


@pytest.fixture
def client(runs):
    return TestClient(page_app(runs), base_url="http://127.0.0.1")


# ---- the list ------------------------------------------------------------------------------------


def test_the_list_says_how_each_run_stands(runs, client):
    make_run(runs, "broken", end="failed: NonFinite: loss")
    make_run(runs / "sweep", "trial-1")
    (runs / "imported").mkdir()
    (runs / "imported" / "config.yaml").write_text("{}")
    (runs / "notes").mkdir()
    found = {run["name"]: run for run in client.get("/api/runs").json()}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {
        "first": "finished", "second": "died", "broken": "failed", "sweep/trial-1": "finished",
        "imported": "model",
    }  # fmt: skip
    assert (found["second"]["step"], found["second"]["total_steps"]) == (60, 100)
    assert found["broken"]["status"] == "failed: NonFinite: loss"


def test_a_run_that_a_process_holds_is_running(runs, client):
    lock = RunLock(runs / "second", timeout=100.0)
    lock.take()
    try:
        found = {run["name"]: run for run in client.get("/api/runs").json()}
        assert found["second"]["state"] == "running"
        assert found["second"]["holder"] == f"process {os.getpid()} on {socket.gethostname()}"
        labels = client.get("/api/details", params={"run": "second"}).json()["commands"]
        assert {"label": "Stop after a checkpoint", "command": f"kill {os.getpid()}"} in labels
    finally:
        lock.release()
    assert RunFolder(runs).summary("second").state == "died"


def test_a_lock_of_another_machine_counts_while_it_is_touched(runs):
    lock = RunLock(runs / "second", timeout=100.0)
    lock.take()
    lock.release()
    path = runs / "second" / "lock.1"
    path.write_text(json.dumps(lock.me._replace(machine="another", host="far")._asdict()))
    folder = RunFolder(runs)
    assert folder.summary("second").state == "running"
    os.utime(path, (0, 0))
    assert folder.summary("second").state == "died"


# ---- rows that come ------------------------------------------------------------------------------


def test_a_tail_gives_what_is_new_and_waits_for_whole_lines(tmp_path):
    run = make_run(tmp_path, "run", steps=20, end=None)
    tail = Tail(run / "metrics.jsonl")
    assert len(tail.look().rows) == 4 and tail.look().rows == []
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "kind": "train", ')
        file.flush()
        assert tail.look() == (False, [], 0, False)
        file.write('"time": 3.0, "loss": NaN}\nno row\n')
    news = tail.look()
    assert news.rows == [{"step": 30, "kind": "train", "time": 3.0, "loss": None}]
    assert news.damaged == 1 and not news.reset


@pytest.mark.parametrize("longer", [False, True])
def test_a_tail_begins_anew_when_a_run_goes_back(tmp_path, longer):
    run = make_run(tmp_path, "run", steps=20, end=None)
    tail = Tail(run / "metrics.jsonl")
    tail.look()
    again = make_run(tmp_path, "again", steps=60 if longer else 10, floor=1.0)
    text = (again / "metrics.jsonl").read_bytes()
    with (run / "metrics.jsonl").open("rb+") as file:  # the same inode
        file.write(text)
        file.truncate()
    news = tail.look()
    assert news.reset and len(news.rows) == text.count(b"\n")
    (again / "metrics.jsonl").replace(run / "metrics.jsonl")
    assert tail.look().reset  # another file: whether it begins with the same rows is not known
    (run / "metrics.jsonl").unlink()
    assert tail.look() == (True, [], 0, False)


def test_a_long_history_comes_in_parts(tmp_path):
    run = make_run(tmp_path, "run")
    row = ROW | {"step": 1, "time": 1.0, "text": ["x" * 1000]}
    write_rows(run, [row] * 3000 + [row | {"text": ["x" * (2 * AT_ONCE)]}, row])
    tail, rows, more = Tail(run / "metrics.jsonl"), 0, True
    while more:
        _, found, damaged, more = tail.look()
        rows += len(found)
    assert (rows, damaged) == (3002, 0)


def test_the_stream_has_all_rows_then_those_that_come(runs):
    async def listen():
        page = Page(RunFolder(runs))
        news = page.news({"second": Tail(runs / "second" / "metrics.jsonl")})
        first = [await anext(news) for _ in range(3)]
        write_rows(runs / "second", [ROW | {"step": 70, "time": 7.0}], "a")
        then = [await anext(news)]
        while "70" not in then[-1] or "event: rows" not in then[-1]:
            then.append(await anext(news))
        await news.aclose()
        return first, then[-1]

    (listed, rows, ready), last = asyncio.run(listen())
    assert listed.startswith("event: runs\n") and ready.startswith("event: ready\n")
    found = json.loads(rows.split("data: ")[1])
    assert found["reset"] and len(found["rows"]) == 9 and found["run"] == "second"
    found = json.loads(last.split("data: ")[1])
    assert not found["reset"] and [row["step"] for row in found["rows"]] == [70]


def test_the_stream_arrives_over_http(runs):
    path = "/api/events?run=first"
    with served(page_app(runs)) as url, httpx.stream("GET", f"{url}{path}", timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        kinds = [next(line for line in lines if line.startswith("event")) for _ in range(3)]
    assert kinds == ["event: runs", "event: rows", "event: ready"]


# ---- one run, and several ------------------------------------------------------------------------


def test_details_have_data_files_and_commands(runs, client):
    found = client.get("/api/details", params={"run": "first"}).json()
    assert found["data"]["web"]["tokens"] == 1000 and "learning_rate" in found["config"]
    assert found["commands"][0]["command"] == "jaxtrain train --config quickstart run.name=first"
    assert not found["report"]
    assert client.get("/report", params={"run": "first"}).status_code == 404


def test_samples_by_step(client):
    assert client.get("/api/samples", params={"run": "first"}).json() == {"steps": [50, 100]}
    found = client.get("/api/samples", params={"run": "first", "step": "50"})
    assert found.json() == {"text": "first writes at 50"}
    for step in ("7", "x", "../50"):
        found = client.get("/api/samples", params={"run": "first", "step": step})
        assert found.status_code == 404


def test_figures_and_settings_that_differ(runs, client):
    found = client.get("/api/compare?run=first&run=second").json()
    assert [run["name"] for run in found["runs"]] == ["first", "second"] == found["names"]
    assert found["differences"] == {"optim.learning_rate": [0.01, 0.02]}
    assert found["runs"][1]["at_step"] < found["runs"][0]["at_step"]
    write_rows(runs / "second", [])
    found = client.get("/api/compare?run=first&run=second").json()
    assert "no loss in common" in found["error"] and "optim.learning_rate" in found["differences"]


def test_what_someone_else_has_written_does_no_harm(runs, client):
    """Files of other types than ours: an answer all the same, of the types that the page takes."""
    odd = runs / "first"
    start = {"step": 0, "kind": "event", "time": 0, "event": "start", "total_steps": "<b>"}
    train = {"step": 1, "kind": "train", "time": 1, "loss": [1], "tokens_per_s": None}
    write_rows(odd, [start, train, {"step": 2, "kind": "validation", "time": 2, "bpb": None}])
    (odd / "data.json").write_text(
        '{"a": 3, "b": {"tokens": "x", "lengths": {"2": []}, "bytes": 1}}'
    )
    (odd / "env.json").write_text('{"command": 3, "when": NaN}')
    (odd / "tasks.json").write_text("[]")
    text = (odd / "config.yaml").read_text()
    (odd / "config.yaml").write_text(text + "when: 2026-01-01\nrate: .inf\n")
    [found] = [run for run in client.get("/api/runs").json() if run["name"] == "first"]
    assert (found["step"], found["total_steps"], found["loss"]) == (1, None, None)
    details = client.get("/api/details?run=first").json()
    assert details["data"] == {"b": {"bytes": 1}} and details["tasks"] == {}
    found = client.get("/api/compare?run=first&run=second").json()
    assert found["differences"]["rate"] == ["inf", None]


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["..", "../outside", "first/../../outside", "/etc", "no", "a\0b"])
@pytest.mark.parametrize("path", ["details", "samples", "compare", "events"])
def test_no_path_leads_outside(client, name, path):
    found = client.get(f"/api/{path}", params={"run": name})
    assert found.status_code == 400 and found.json()["error"].startswith("no run ")


def test_an_absolute_path_inside_is_no_name(runs, client):
    found = client.get("/api/details", params={"run": str(runs / "first")})
    assert found.status_code == 400


def test_links_that_lead_outside_are_not_there(runs, client, tmp_path):
    (runs / "linked").symlink_to(tmp_path / "outside")
    secret = tmp_path / "secret.html"
    secret.write_text("a secret")
    (runs / "first" / "report.html").symlink_to(secret)
    (runs / "first" / "samples" / "step_000007.txt").symlink_to(secret)
    (runs / "second" / "metrics.jsonl").unlink()
    (runs / "second" / "metrics.jsonl").symlink_to(tmp_path / "outside" / "metrics.jsonl")
    names = {run["name"] for run in client.get("/api/runs").json()}
    assert names == {"first"}
    for path in ("details?run=linked", "details?run=first", "samples?run=first&step=7"):
        found = client.get(f"/api/{path}")
        assert found.status_code == 400 and "secret" not in found.text
    assert client.get("/report?run=first").status_code == 400
    assert client.get("/api/events?run=second").status_code == 400
    assert client.get("/api/compare?run=first&run=second").status_code == 400


@pytest.mark.parametrize("name", ["..%2Fapp.py", "../app.py", "%2e%2e/app.py", "no.js"])
def test_only_our_own_files_are_served(client, name):
    assert client.get(f"/static/{name}").status_code == 404


def test_every_answer_allows_nothing_from_elsewhere(runs, client):
    (runs / "first" / "report.html").write_text("<script>alert(1)</script>")
    for path in ("/", "/static/app.js", "/api/runs", "/no", "/api/details?run=.."):
        found = client.get(path)
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
    policy = client.get("/report?run=first").headers["content-security-policy"]
    assert "sandbox" in policy and "script-src" not in policy and "default-src 'none'" in policy


def test_the_page_names_no_other_host_and_nothing_inline(client):
    page = client.get("/").text
    assert "http" not in page and "<style" not in page and " style=" not in page
    assert page.count("<script") == page.count('<script src="/static/')


def test_a_request_under_another_name_is_refused(client):
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/api/runs", headers={"Host": "localhost:8765"}).status_code == 200


def test_a_form_of_another_site_is_refused(client):
    body = json.dumps({"config": "quickstart"})
    for headers in ({"Content-Type": "text/plain"}, JSON | {"Origin": "http://evil.example"}):
        found = client.post("/api/estimate", content=body, headers=headers)
        assert found.status_code == 400 and "the request" in found.json()["error"]


# ---- the dry run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"config": "no"}, "no config 'no'"),
        ({"config": "../secret.yaml"}, "no config"),
        ({"config": "run:../outside"}, "no run"),
        ({"config": "quickstart", "overrides": "--print-config"}, "override '--print-config'"),
        ({"config": "quickstart", "overrides": "steps"}, "must be key.path=value"),
        ({"config": 3}, "config must be a string"),
    ],
)
def test_what_the_form_may_not_ask(client, asked, said):
    found = client.post("/api/estimate", json=asked)
    assert found.status_code == 400 and said in found.json()["error"]


def test_the_form_becomes_a_command_line(runs):
    folder = RunFolder(runs)
    asked = {"config": "run:first", "overrides": " a.b=1  c.d=x ", "device": "T4", "devices": "2"}
    config = f"--config={runs / 'first' / 'config.yaml'}"
    expected = [config, "a.b=1", "c.d=x", "--json", "--device=T4", "--devices=2"]
    assert estimates.arguments_of(folder, asked) == expected


def test_an_estimate_is_rates_and_hours():
    record = {
        "advice": None, "device": "T4", "device_count": 2,
        "workload": {
            "mesh": {"data": 2}, "parameters": 10, "steps": 3600, "batch_size": 4,
            "sequence_length": 25,
        },
        "metrics": {
            "fits": True, "total_bytes": 5, "device_bytes": 9, "compute_ms": 600.0,
            "near_ms": 300.0, "far_ms": 100.0, "parameters_bytes": 3, "frozen_bytes": 0,
            "reference_bytes": 0, "states_bytes": 1, "copy_bytes": 1, "gradients_bytes": 0,
            "activations_bytes": 0,
        },
    }  # fmt: skip
    found = estimates.answer_of(record)
    assert found["ms"] == [1000.0, 600.0] and found["hours"] == pytest.approx([1.0, 0.6])
    assert found["tokens_per_s"] == pytest.approx([100, 100 / 0.6])
    assert found["parts"] == {"parameters": 3, "states": 1, "copy": 1}


def test_what_the_estimate_says_is_one_line(client, monkeypatch):
    script = "import sys; print('a\\nerror: no such device\\n', file=sys.stderr); sys.exit(2)"
    start = asyncio.create_subprocess_exec

    async def instead(program, *arguments, **options):
        return await start(sys.executable, "-c", script, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", instead)
    found = client.post("/api/estimate", json={"config": "quickstart", "device": "X"})
    assert found.status_code == 400 and found.json() == {"error": "no such device"}


@pytest.mark.slow
def test_a_dry_run_of_a_shipped_config(client):
    overrides = " ".join(assignments(model__depth=1, model__width=64, train__steps=100, **QUICK))
    asked = {"config": "quickstart", "overrides": overrides, "device": "T4"}
    found = client.post("/api/estimate", json=asked)
    assert found.status_code == 200 and found.json()["fits"] and found.json()["steps"] == 100
    assert found.json()["hours"][0] > 0


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_refuses_what_it_cannot_serve(tmp_path, capsys):
    assert main([str(tmp_path / "no")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    with listening(0) as taken:
        taken.listen()
        assert main([str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "take another, or 0 for any" in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main([str(tmp_path)]) == 2
    assert "needs uvicorn: uv sync --extra serve" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(runs):
    command = [sys.executable, "-m", "jaxtrain.cli", "ui", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().decode().split()[1]
        assert url.startswith("http://127.0.0.1:")
        try:
            with httpx.stream("GET", f"{url}api/events?run=first", timeout=60) as answer:
                next(answer.iter_lines())
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0 and process.stderr.read() == b""
        finally:
            process.kill()
