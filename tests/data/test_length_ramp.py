"""Rows that grow: the stages that a ramp stands for, and a run through them that is resumed."""

import os
import signal

import pytest
from tiny import QUICK, assert_same_run, run_overrides

from jaxtrain.data.batches.ramps import LengthRamp, length_stages
from jaxtrain.main import main
from jaxtrain.settings import UserError
from jaxtrain.train import feed


def test_each_length_has_an_equal_part_and_the_last_goes_on():
    stages = length_stages(LengthRamp(start=8, tokens=600), 32)
    assert [(s.sequence_length, s.tokens) for s in stages] == [(8, 300), (16, 300), (None, None)]


@pytest.mark.parametrize(("start", "length"), [(12, 32), (32, 32), (64, 32)])
def test_a_start_that_does_not_double_to_the_length_is_refused(start, length):
    with pytest.raises(UserError, match=r"data\.length_ramp\.start=.*must become"):
        length_stages(LengthRamp(start=start, tokens=600), length)


def test_a_ramp_and_stages_are_one_too_many(tmp_path, capfd):
    given = {"data__length_ramp": "{start: 16, tokens: 512}", "data__stages": "[{tokens: 64}, {}]"}
    assert main(run_overrides(tmp_path, **given)) == 2
    assert "data.length_ramp makes the stages" in capfd.readouterr().err


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_through_the_phases_is_the_same_when_it_is_resumed(tmp_path):
    """Steps of 256 tokens: two of rows of 16, and then of 32."""
    ramp = {"data__length_ramp": "{start: 16, tokens: 512}", "sample__prompts": "['']"} | QUICK
    assert main(run_overrides(tmp_path / "whole", **ramp)) == 0
    stopped = run_overrides(tmp_path / "parts", **ramp, checkpoint__every=1)
    take = feed.Feed.take

    def kill_at_the_second(self):
        batch = take(self)
        if batch.tokens_BT.shape[1] == 16 and self.position["position"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed.Feed, "take", kill_at_the_second)
        assert main(stopped) == 0
    assert main(stopped) == 0
    assert_same_run(tmp_path / "parts" / "tiny", tmp_path / "whole" / "tiny")
