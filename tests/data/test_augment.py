"""What is changed at random in rows: it can be undone, and depends on seed, step and row alone."""

import dataclasses

import numpy as np
import pytest

from jaxtrain.cli import main
from jaxtrain.data import DataConfig, make_augment, train_batches
from jaxtrain.data.batches.augment import FILL_IN, MASK, AugmentRow, random_parts
from jaxtrain.data.tokenizer.tokenizer import (
    build_tokenizer,
    byte_tokenizer,
    load_tokenizer,
    sentencepiece_tokenizer,
    train_sentencepiece,
)
from jaxtrain.settings import UserError

T = 400
AUGMENTS = [
    {"name": "masking"},
    {"name": "masking", "loss": "masked", "rate": 0.3},
    {"name": "span_corruption"},
    {"name": "fill_in_the_middle"},
    {"name": "subword_splits"},
]


def tokenizer():
    """Bytes, pairs of some of them, and the special tokens."""
    pairs = tuple(f"{a}{b}".encode() for a in "abcde" for b in "abcde")
    plain = byte_tokenizer()
    names = (MASK, *FILL_IN)
    pieces = (*plain.pieces, *pairs, *(b"" for _ in names))
    specials = {name: len(pieces) - len(names) + i for i, name in enumerate(names)}
    return dataclasses.replace(plain, pieces=pieces, specials=specials)


def settings(**augment):
    return DataConfig.model_validate({"augment": augment}).augment


def changed(config, step=0, number=0, pieces=((1, 201), (202, T + 1)), ids=None):
    """(the row before, after it was changed); BOS is 256, the text are pairs of letters."""
    before = np.full(T + 1, 256, np.int32)
    for begin, end in pieces:
        before[begin:end] = 257 + np.random.default_rng(begin).integers(0, 25, end - begin)
    before = before if ids is None else ids
    row = AugmentRow(before.copy(), np.ones(T, np.float32), pieces, before[:-1].copy())
    make_augment(config, tokenizer(), 0)(step, 0, number, row)
    return before, row


def test_masking_hides_inputs_and_no_target():
    mask = tokenizer().specials[MASK]
    rows = [changed(settings(name="masking", rate=0.2), number=i) for i in range(40)]
    for before, row in rows:
        assert (row.ids == before).all() and row.weights.all()
        assert row.inputs[0] == row.inputs[201] == 256
    shown = np.stack([row.inputs for _, row in rows])
    other = np.stack([before[:-1] for before, _ in rows])
    assert abs((shown == mask).mean() - 0.2 * 0.8) < 0.02
    assert abs(((shown != mask) & (shown != other)).mean() - 0.2 * 0.1) < 0.01
    _, row = changed(settings(name="masking", loss="masked", random=0, kept=0))
    hidden = row.inputs == mask
    assert (row.weights[:-1] == hidden[1:]).all() and hidden.any()
    _, row = changed(settings(name="masking", loss="masked", rate=1, random=0, kept=1))
    assert (row.inputs == _[:-1]).all() and row.weights.sum() == T - 1  # all but the second BOS


def test_spans_are_hidden_and_asked_for():
    mask = tokenizer().specials[MASK]
    shares = []
    for number in range(20):
        before, row = changed(settings(name="span_corruption"), number=number)
        for begin, end in row.pieces:
            ids, marks = row.ids[begin:end], np.flatnonzero(row.ids[begin:end] == mask)
            half = len(marks) // 2
            first = marks[half]
            chunks = [
                np.split(part, np.flatnonzero(part == mask)) for part in np.split(ids, [first])
            ]
            shown, asked = chunks[0], chunks[1][1:]
            text = list(shown[0])
            for hidden, rest in zip(asked, shown[1:], strict=True):
                assert len(hidden) > 1  # no span is empty
                text += [*hidden[1:], *rest[1:]]
            assert (np.array(text) == before[begin : begin + len(text)]).all()
            assert len(text) == end - begin - 2 * half
            weights = row.weights[begin - 1 : end - 1]
            assert not weights[:first].any() and weights[first:].all()
            shares.append((len(ids) - first - half) / len(text))
        assert (row.inputs == row.ids[:-1]).all()
    assert abs(np.mean(shares) - 0.15) < 0.01
    before, row = changed(settings(name="span_corruption"), pieces=((1, 4), (5, T + 1)))
    assert (row.ids[1:4] == before[1:4]).all() and not row.weights[:3].any()
    drawn = random_parts(np.random.default_rng(0), 20, 6)
    assert drawn.sum() == 20 and len(drawn) == 6 and drawn.min() > 0


def test_the_middle_is_moved_and_comes_back():
    specials = tokenizer().specials
    prefix, suffix, middle = (specials[name] for name in FILL_IN)
    orders = {"psm": 0, "spm": 0, "as it was": 0}
    for number in range(60):
        before, row = changed(settings(name="fill_in_the_middle"), number=number)
        assert (row.inputs == row.ids[:-1]).all() and row.weights.all()
        for begin, end in row.pieces:
            ids = row.ids[begin:end].tolist()
            if middle not in ids:
                orders["as it was"] += 1
                assert ids == before[begin:end].tolist()
                continue
            s, m = ids.index(suffix), ids.index(middle)
            assert ids[0] == prefix
            orders["spm" if s == 1 else "psm"] += 1
            known = before[begin : end - 3].tolist()
            after = ids[s + 1 : m]
            # Where the suffix stands first, prefix and middle follow each other.
            joined = ids[1:s] + ids[m + 1 :] + after
            assert joined == known
    assert abs(orders["as it was"] - 60) < 20 and min(orders.values()) > 15
    _, row = changed(settings(name="fill_in_the_middle", rate=1), pieces=((1, 6), (7, T + 1)))
    assert row.ids[7] == prefix and prefix not in row.ids[:7]


def test_splits_write_the_same_text_with_more_tokens():
    pieces = tokenizer().pieces
    text = lambda ids: b"".join(pieces[i] for i in ids)
    before, row = changed(settings(name="subword_splits", rate=0.3))
    for begin, end in row.pieces:
        assert text(before[begin:end]).startswith(text(row.ids[begin:end]))
        assert abs((row.ids[begin:end] < 256).mean() - 0.6 / 1.3) < 0.12
    before, row = changed(
        settings(name="subword_splits", rate=1), ids=np.full(T + 1, 256, np.int32)
    )
    assert (row.ids == before).all()


@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
@pytest.mark.quick("{'name': 'masking'}", "{'name': 'subword_splits'}")
def test_a_change_depends_on_seed_step_and_row_alone(augment, store_of):
    store = store_of([150, 90, 400, 33, 220, 81, 64] * 3)
    store = dataclasses.replace(store, bos_id=256)
    letters = [np.frombuffer(record, "<u4") % 25 + 257 for record in store.records.data]
    store.records.data[:] = [ids.astype("<u4").tobytes() for ids in letters]

    def batches(count, processes=1, state=None, seed=0, **options):
        c = DataConfig.model_validate(
            {"augment": augment, "packing": {"name": "best_fit"}, "seed": seed} | options
        )
        change = make_augment(c.augment, tokenizer(), c.seed)
        loaders = [
            train_batches(store, config=c, batch_size=4, sequence_length=64, segments=True,
                          process_index=p, process_count=processes, state=state, augment=change)
            for p in range(processes)
        ]  # fmt: skip
        out = []
        for _ in range(count):
            some = [next(loader) for loader in loaders]
            out.append([np.concatenate(x) for x in zip(*some) if x[0] is not None])
        states = [loader.get_state() for loader in loaders]
        for loader in loaders:
            loader.close()
        return out, states[0]

    def same(a, b):
        return all(
            (x == y).all() for one, other in zip(a, b, strict=True) for x, y in zip(one, other)
        )

    whole, _ = batches(6)
    _, position = batches(3)
    assert same(batches(3, state=position)[0], whole[3:])
    assert same(batches(6, processes=2, workers=3)[0], whole)
    assert same(batches(6, workers=0)[0], whole)
    assert not same(batches(6, seed=1)[0], whole)
    augmented = batches(6)[0]
    augment = {"name": "none"}
    plain, _ = batches(6)
    assert not same(plain, augmented)
    for one, other in zip(plain, augmented):
        assert (one[3] == other[3]).all() and (one[4] == other[4]).all()
    with pytest.raises(UserError, match="augment"):
        batches(1, state=position)


def test_special_tokens_are_of_the_vocabulary(tmp_path):
    texts = ["the river runs through the <mask> old town and on to the sea " * 200]
    for kind in ("sentencepiece", "huggingface"):
        options = {"name": kind, "vocab_size": 290, "special_tokens": [MASK, *FILL_IN]}
        c = DataConfig.model_validate({"tokenizer": options})
        try:
            made = build_tokenizer(c.tokenizer, texts)
        except UserError as error:
            pytest.fail(str(error))
        made.save(tmp_path / kind)
        again = load_tokenizer(tmp_path / kind)
        assert set(again.specials) >= {MASK, *FILL_IN} and again.vocab_size == 290
        for index in again.specials.values():
            assert again.pieces[index] == b"" and index not in again.encode(texts[0])
        assert again.decode(again.encode(texts[0])) == texts[0]
    with pytest.raises(
        UserError, match=r"<mask>, which the tokenizer does not have \(it has <\|bos\|>\)"
    ):
        make_augment(settings(name="masking"), byte_tokenizer(), 0)
    assert make_augment(settings(name="none"), byte_tokenizer(), 0) is None
    assert sentencepiece_tokenizer(train_sentencepiece(texts, 300, 10**6)).specials.keys() == {
        "<s>"
    }


@pytest.mark.slow
def test_show_shows_what_the_model_sees(tmp_path, capsys):
    options = [f"data.cache_dir={tmp_path}", "data.augment.name=masking", "data.augment.rate=0.5"]
    options += ["data.tokenizer.special_tokens=['<mask>']", "train.sequence_length=64"]
    assert main(["show-data", "quickstart", "--rows", "1", *options]) == 0
    assert capsys.readouterr().out.count("<mask>") > 8
