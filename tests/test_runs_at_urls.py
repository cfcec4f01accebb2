"""Runs whose directory is a URL: published whole, read back by checksum."""

import errno
import json
import os
import shutil

import pytest
from s3_server import DENIED, SECRET, SHORT
from test_mirror import save, tree
from test_object_store import holds_no_secret, killed_at
from tiny import NANOCHAT, WHOLE, assert_same_run, random_run, run_overrides

from jaxtrain.cli import main as cli
from jaxtrain.config import load_config
from jaxtrain.main import main
from jaxtrain.runs.config import RunConfig
from jaxtrain.runs.publish import Publisher, take_samples
from jaxtrain.settings import UserError
from jaxtrain.storage import fetch, objects
from jaxtrain.storage.fetch import fetch_model, local_copy, send_results, sent_there
from jaxtrain.storage.location import local
from jaxtrain.storage.objects import RemoteFolder


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(fetch, "WAIT", 0.01)


def write(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def run_with_model(folder, text="weights"):
    save(folder, 3)
    write(folder, "env.json", "{}")
    write(folder, "report.html", "<html>")
    write(folder, "samples/step_000002.txt", "sample")
    write(folder, "model/config.yaml", "run: {name: a}\n")
    write(folder, "model/model.safetensors", text * 1000)
    return folder


def publish(folder, url, say=pytest.fail):
    one = Publisher(folder, url, say)
    one.look()
    return one


def test_a_run_is_published_and_read_back_by_checksum(tmp_path, s3):
    url, run = f"{s3.bucket()}/runs/a", run_with_model(tmp_path / "a")
    one = publish(run, url)
    copy = local_copy(url)
    assert copy.name == "a" and not (copy / "model").exists()
    assert (copy / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    fetch_model(copy)
    assert (copy / "model" / "model.safetensors").read_bytes() == b"weights" * 1000
    puts = lambda: [r.key for r in s3.requests if r.method == "PUT"]
    assert puts()[-1].endswith("/files.json")
    s3.requests.clear()
    one.look()
    assert puts() == []  # nothing is new
    publish(run, url)  # another session, which writes its own report
    assert [key.rpartition("/")[2] for key in puts()] == ["report.html"]
    s3.requests.clear()
    write(run, "model/model.safetensors", "others" * 1000)
    (run / "samples" / "step_000002.txt").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "kind": "train", "time": 1.0}\n{"torn')
    one.look()
    assert [key.rpartition("/")[2] for key in sorted(puts())] == [
        "files.json", "metrics.jsonl", "model.safetensors"
    ]  # fmt: skip
    fetch_model(local_copy(url))
    assert (copy / "model" / "model.safetensors").read_bytes() == b"others" * 1000
    assert (copy / "metrics.jsonl").read_text().endswith('"time": 1.0}\n')
    assert not (copy / "samples" / "step_000002.txt").exists()


@pytest.mark.slow
def test_a_reader_never_sees_half_of_a_run(tmp_path, s3):
    url, run = f"{s3.bucket()}/a", run_with_model(tmp_path / "a")
    s3.fault = lambda r: DENIED if r.method == "PUT" and r.key.endswith("files.json") else None
    said = []
    publish(run, url, said.append)
    assert len(said) == 1 and "PermissionError: AccessDenied" in said[0]
    s3.reset()
    one = publish(run, url)
    write(run, "model/model.safetensors", "others" * 1000)
    s3.fault = lambda r: DENIED if r.method == "PUT" and r.key.endswith("files.json") else None
    one.say = said.append
    one.look()  # the new weights are there, and nothing says so
    s3.reset()
    with pytest.raises(UserError, match=r"model.safetensors is not as it was written"):
        fetch_model(local_copy(url))
    one.look()
    fetch_model(local_copy(url))


def test_an_end_that_does_not_arrive_is_an_error_that_names_the_local_run(tmp_path, s3):
    url, run = f"{s3.bucket()}/a", run_with_model(tmp_path / "a")
    s3.fault = lambda r: DENIED
    said = []
    with pytest.raises(UserError, match=f"the run is complete in {run}"), Publisher(
        run, url, said.append
    ):  # fmt: skip
        pass
    assert len(said) == 1 and SECRET not in said[0]


@pytest.mark.slow
def test_what_is_cut_on_the_way_is_not_used(tmp_path, s3):
    url, run = f"{s3.bucket()}/a", run_with_model(tmp_path / "a")
    publish(run, url)
    s3.fault = lambda r: SHORT if r.method == "GET" and "safetensors" in r.key else None
    copy = local_copy(url)
    with pytest.raises(UserError, match="cannot be read"):
        fetch_model(copy)
    assert not list(copy.rglob("*.safetensors"))


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, s3, monkeypatch):
    url, run = f"{s3.bucket()}/a", run_with_model(tmp_path / "a")
    publish(run, url)
    copy = local_copy(url)
    before = tree(copy)

    def full(self, name, to):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RemoteFolder, "fetch", full)
    with pytest.raises(UserError, match="No space left on device; name another disk with JAXTR"):
        fetch_model(copy)
    assert tree(copy) == before


def test_folders_without_a_list_are_taken_as_they_are(tmp_path, s3):
    url = f"{s3.bucket()}/model"
    remote = RemoteFolder(url)
    remote.write("config.json", b"{}")
    remote.write("model.safetensors", b"1")
    copy = local_copy(url)
    assert tree(copy)["model.safetensors"] == b"1"
    s3.requests.clear()
    remote.write("model.safetensors", b"2")
    assert tree(local_copy(url))["model.safetensors"] == b"2"
    assert not any(r.method == "GET" and r.key.endswith("config.json") for r in s3.requests)
    with pytest.raises(UserError, match="there is nothing there"):
        local_copy(f"{url}-other")


@pytest.mark.slow
def test_results_and_exports_go_to_urls(tmp_path, s3):
    url, run = f"{s3.bucket()}/a", run_with_model(tmp_path / "a")
    publish(run, url)
    copy = local_copy(url)
    write(copy, "tasks.json", "{}")
    send_results(copy, copy / "tasks.json", tmp_path / "elsewhere.json")
    send_results(run, run / "report.html")  # no copy of anything
    shutil.rmtree(copy)
    assert (local_copy(url) / "tasks.json").read_text() == "{}"
    with sent_there(f"{url}/export") as path:
        write(path, "config.json", "{}")
        write(path, "model.safetensors", "weights")
    assert [r.key for r in s3.requests if r.method == "PUT"][-1].endswith("export/config.json")
    with pytest.raises(UserError, match="is there already"), sent_there(f"{url}/export"):
        pass


def test_an_export_to_a_url_is_a_start_from_there(tmp_path, s3, capsys):
    url, run = s3.bucket(), random_run(tmp_path / "run", NANOCHAT)
    assert cli(["export", str(run), f"{url}/hf"]) == 0
    assert f"exported {url}/hf as nanochat" in capsys.readouterr().out
    assert cli(["export", str(run), f"{url}/hf"]) == 2
    assert f"{url}/hf is there already" in capsys.readouterr().err
    config = load_config(None, [f"train.init_from={url}/hf", "data.train.path=tinyshakespeare"])
    assert config.train.init_from == f"{url}/hf" and config.model.hidden == 48
    assert [p.name for p in tmp_path.glob("cache/copies/*/*/*.safetensors")] == [
        "model.safetensors"
    ]  # fmt: skip


def test_samples_before_a_resume_come_along(tmp_path, s3):
    url, run = f"{s3.bucket()}/a", run_with_model(tmp_path / "a")
    write(run, "samples/step_000009.txt", "of steps that are lost")
    publish(run, url)
    save(tmp_path / "b", 3)
    take_samples(tmp_path / "b", url)
    assert [p.name for p in (tmp_path / "b" / "samples").iterdir()] == ["step_000002.txt"]


@pytest.mark.parametrize(
    "url", ["s3://KEY:hunter2@bucket/x", "gs://bucket/x?token=hunter2", "https://u:hunter2@host/x"]
)
def test_a_url_with_a_secret_is_refused_without_it(tmp_path, capsys, url):
    assert main(run_overrides(tmp_path, run__directory=url)) == 2
    assert cli(["compare", url, url]) == 2
    assert main([*run_overrides(tmp_path), f"train.init_from={url}"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 3 and "hunter2" not in err
    twice = "run.directory=s3://KEY:hunter2@bucket/x"
    assert main([*run_overrides(tmp_path), twice]) == 2
    assert "hunter2" not in capsys.readouterr().err


def test_the_local_folder_of_a_url_is_its_own(tmp_path):
    config = RunConfig(directory="s3://bucket/runs/", name="a")
    assert config.url == "s3://bucket/runs/a"
    assert config.folder.parent == tmp_path / "cache" / "runs"
    assert RunConfig(directory="s3://bucket/runs").folder == config.folder
    assert RunConfig().url is None and str(RunConfig().folder) == "runs"
    assert str(local("runs/a")) == "runs/a"


def test_two_places_for_checkpoints_are_refused(tmp_path, capsys):
    far = {"run__directory": "s3://bucket/x", "checkpoint__mirror__url": "s3://bucket/y"}
    assert main(run_overrides(tmp_path, **far)) == 2
    assert main([*run_overrides(tmp_path), "checkpoint.mirror.every=5"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "leave it out, run.directory=s3://bucket/x" in first and "name a URL" in second


# ---- with a run ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_at_a_url_from_its_start_to_an_export(tmp_path, s3, whole, capsys):
    url = s3.bucket()
    fields = WHOLE | {"run__directory": f"{url}/runs"}
    killed_at(s3, "/tiny/checkpoints/6/", "jaxtrain.main", *run_overrides(tmp_path, **fields))
    shutil.rmtree(tmp_path / "cache")  # another machine
    assert main(run_overrides(tmp_path, **fields)) == 0
    out = capsys.readouterr().out
    assert "checkpoint 3 is restored from there" in out.replace("\n", " ")
    assert f"model    {url}/runs/tiny/model" in out
    shutil.rmtree(tmp_path / "cache")
    run = f"{url}/runs/tiny"
    copy = local_copy(run)
    fetch_model(copy)
    assert_same_run(copy, whole)
    assert sorted(p.name for p in (copy / "samples").iterdir()) == sorted(
        p.name for p in (whole / "samples").iterdir()
    )
    assert holds_no_secret(tmp_path / "cache")
    asked = ["--prompt", "a", "--tokens", "4", "--temperature", "0"]
    said = []
    for source in (run, str(whole)):
        for step in ([], ["--step", "3"]):
            assert cli(["generate", source, *asked, *step]) == 0
            said.append(capsys.readouterr().out)
    assert said[:2] == said[2:]
    assert cli(["generate", run, *asked, "--step", "4"]) == 2
    assert "no checkpoint of step 4; there are 3, 6" in capsys.readouterr().err
    assert cli(["compare", run, str(whole)]) == 0
    assert cli(["report", run]) == 0
    started = {"train__init_from": run, "run__name": "next", "train__steps": 1}
    assert main(run_overrides(tmp_path / "local", **started)) == 0
    assert json.loads((tmp_path / "local" / "next" / "env.json").read_text())
    assert s3.environment["AWS_SECRET_ACCESS_KEY"] not in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["file://", "local://"])
def test_a_url_of_this_machines_own_files_is_a_path(tmp_path, scheme):
    config = load_config(None, [f"run.directory={scheme}{tmp_path}", "run.name=a"])
    assert config.run.folder == tmp_path and config.run.url is None
