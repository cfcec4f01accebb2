"""Digests of the pages of a text."""

import pytest

from jaxtrain.inference.engine.pages import page_digests


@pytest.mark.parametrize("known", [0, 1, 2, 3])
@pytest.mark.parametrize("adapter", [None, "one"])
def test_digests_that_are_known_are_continued(known, adapter):
    tokens = list(range(100, 114))
    whole = page_digests(tokens, 4, adapter)
    assert len(set(whole)) == 3
    assert page_digests(tokens, 4, adapter, whole[:known]) == whole
    assert page_digests(tokens[:9], 4, adapter, whole[:known]) == whole[:2]


def test_a_digest_depends_on_all_tokens_before_it_and_on_the_adapter():
    tokens = list(range(12))
    other = page_digests([*tokens[:3], 50, *tokens[4:]], 4)
    assert not set(other) & set(page_digests(tokens, 4))
    assert not set(page_digests(tokens, 4, "one")) & set(page_digests(tokens, 4))
