"""Prepared data in a bucket of S3, through s3fs: batches and a run as those of a disk."""

import time
from itertools import cycle

import fsspec
import numpy as np
import pytest
from s3_server import CUT, DENIED, EXPIRED, INTERNAL, SECRET, SHORT, SKEWED, SLOW_DOWN
from test_remote_store import batches_of, config
from tiny import QUICK, rows_of, run_overrides, weights_of

from jaxtrain.cli import main
from jaxtrain.data.batches import concat, read_ahead
from jaxtrain.data.store import blocks
from jaxtrain.storage import objects

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.01)
    for one in (blocks, concat, read_ahead):
        monkeypatch.setattr(one, "BLOCK_TOKENS", 1 << 13)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    lines = (f"document {i} " + "and so on " * (i % 40) for i in range(600))
    path.write_text("\n".join([*lines, "a long one " * 3000]))
    return {"name": "text", "path": str(path), "document": "line"}


def test_a_bucket_gives_the_batches_of_a_disk_through_faults(s3, text, tmp_path):
    url = f"{s3.bucket()}/prepared"
    faults = cycle([None, SLOW_DOWN, None, None, CUT, None, INTERNAL, SHORT, None])

    def far_away(request):
        time.sleep(0.02)
        return next(faults) if request.method in ("PUT", "GET") else None

    s3.fault = far_away
    here = batches_of(config(tmp_path / "here", text, url=None))
    for name in ("there", "elsewhere"):  # the host that prepares, and one that reads alone
        found = batches_of(config(tmp_path / name, text, url=url))
        np.testing.assert_array_equal(here[0], found[0])
        np.testing.assert_array_equal(here[1], found[1])
        assert here[2] == found[2]
        assert not list((tmp_path / name).rglob("*.array_record"))
    ranges = {r.headers["Range"] for r in s3.requests if "/tokens/" in r.key and r.method == "GET"}
    assert len(ranges) > 3
    last = [request.key for request in s3.requests if request.method == "PUT"][-1]
    assert last.count("/") == 3 and last.endswith(".json")  # what names an entry comes after it


@pytest.mark.parametrize(
    ("fault", "check"),
    [(DENIED, "credentials"), (EXPIRED, "credentials"), (SKEWED, "clock of this host")],
)
def test_rights_that_end_in_the_middle_are_one_line_and_nothing_is_lost(
    s3, text, tmp_path, capsys, fault, check
):
    url, done = f"{s3.bucket()}/prepared", []
    s3.fault = lambda r: fault if r.method == "PUT" and (done.append(r) or len(done) > 3) else None
    fields = ["data.tokenizer.name=bytes", f"data.cache_dir={url}"]
    fields += [f"data.local_cache.path={tmp_path}/blocks"]
    fields += [f"data.train.{key}={value}" for key, value in text.items()]
    assert main(["prepare", *fields]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"may not be written, check the {check}: " in err
    assert SECRET not in out + err and len(done) == 4
    s3.reset()
    assert main(["prepare", *fields]) == 0
    other = [*fields[:1], f"data.cache_dir={url}-whole", *fields[2:]]
    assert main(["prepare", *other]) == 0
    filesystem, root = fsspec.url_to_fs(url)
    found = [filesystem.find(folder) for folder in (root, f"{root}-whole")]
    assert len(found[0]) == len(found[1]) > 4
    assert [*map(filesystem.cat_file, found[0])] == [*map(filesystem.cat_file, found[1])]


@pytest.mark.usefixtures("one_device")
def test_a_run_reads_a_bucket_as_it_reads_a_disk(s3, text, tmp_path):
    """The commands, as one gives them: `prepare` once, then `train`."""
    places = {"here": str(tmp_path / "cache"), "there": f"{s3.bucket()}/prepared"}
    for name, url in places.items():
        fields = run_overrides(tmp_path / name, **QUICK, eval__every=3,
            data__tokenizer__name="bytes", data__cache_dir=url,
            data__local_cache__path=tmp_path / "blocks",
            data__validation__name="documents", data__validation__fraction=0.1,
            **{f"data__train__{key}": value for key, value in text.items()})  # fmt: skip
        fields.remove("data.tokenizer.vocab_size=384")
        assert main(["prepare", *fields]) == 0
        puts = sum(request.method == "PUT" for request in s3.requests)
        assert main(["train", *fields]) == 0
        assert sum(request.method == "PUT" for request in s3.requests) == puts
    assert any("/tokens/" in request.key for request in s3.requests)
    runs = [tmp_path / name / "tiny" for name in places]
    for kind, count in (("train", 6), ("validation", 2)):
        here, there = (rows_of(run, kind) for run in runs)
        assert here == there and len(here) >= count
    here, there = map(weights_of, runs)
    assert all(np.array_equal(here[name], there[name]) for name in here)
