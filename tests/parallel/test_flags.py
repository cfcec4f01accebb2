"""XLA's options: what this XLA does not know never reaches a compilation of ours."""

import pytest

from jaxtrain.bench.flags import bench_flags
from jaxtrain.parallel import SETS, check_options, known_options
from jaxtrain.parallel.flags import complaint
from jaxtrain.settings import UserError


def test_every_option_of_the_sets_is_known_here():
    for name, options in SETS.items():
        assert known_options((name,)) == options


def test_an_option_that_this_xla_does_not_know_is_left_out(monkeypatch):
    known = {"xla_gpu_enable_latency_hiding_scheduler": True}
    monkeypatch.setitem(SETS, "newer", known | {"xla_gpu_of_another_version": True})
    assert known_options(("newer",)) == known
    assert "No such compile option" in complaint("xla_gpu_of_another_version", True)


def test_a_users_unknown_option_is_an_error():
    check_options({"xla_gpu_enable_command_buffer": ""})
    with pytest.raises(UserError, match="train.compiler_options: No such compile option: 'xla_no'"):
        check_options({"xla_no": True})


def test_flags_of_no_such_set():
    with pytest.raises(UserError, match="no set of flags fast; there are default, in_order"):
        next(bench_flags("quickstart", [], "fast"))
