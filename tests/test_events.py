"""Events at the end of a run."""

from unittest.mock import Mock

import pytest

from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.train.evaluator import Evaluator
from jaxtrain.train.events import Checkpoint, SavedModel
from jaxtrain.train.step import State


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("finished", [True, False])
def test_a_trial_keeps_its_state_only_where_it_is_stopped(final, finished):
    state, evaluator, save = Mock(spec=State), Mock(spec=Evaluator), Mock()
    for event in (
        Checkpoint(CheckpointConfig(final=final), save),
        SavedModel(evaluator, final),
    ):
        event.at_end(7, state, finished=finished, sound=True)
    assert save.called == (final or not finished)
    assert evaluator.save_model.called == (final and finished)
