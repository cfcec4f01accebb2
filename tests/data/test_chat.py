"""Conversations: their shapes, what templates make of them, and which tokens are learned."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from chat_cases import (
    CONVERSATIONS,
    PLAIN,
    SPECIALS,
    TEMPLATES,
    WITH_SYSTEM,
    make_tokenizer,
    said,
    write_lines,
)

from jaxtrain.data import DataConfig, make_chat, prepare, train_batches, validation_batches
from jaxtrain.data.batches.loader import stores_of
from jaxtrain.data.chat.chat import make_reader
from jaxtrain.data.chat.conversations import fit_stores
from jaxtrain.data.chat.messages import conversation, conversations
from jaxtrain.data.chat.template import DEFAULT_TEMPLATE
from jaxtrain.data.records import Conversation
from jaxtrain.data.show import show_rows
from jaxtrain.data.store.encode import pack_loss_mask, token_type, unpack_loss_mask
from jaxtrain.data.store.prepare import join_stores
from jaxtrain.data.tokenizer.tokenizer import (
    byte_tokenizer,
    huggingface_tokenizer,
    sentencepiece_tokenizer,
    train_sentencepiece,
)
from jaxtrain.settings import UserError

GOLDEN = json.loads((Path(__file__).parents[1] / "interop" / "golden_chat.json").read_text())
TOKENIZER = huggingface_tokenizer(make_tokenizer().encode())
NAMES = {i: name for name, i in TOKENIZER.specials.items()}
SHAKESPEARE = "We are accounted poor citizens, the patricians good. " * 40


def chat_of(name, tokenizer=TOKENIZER):
    return make_chat(TEMPLATES[name], SPECIALS.get(name, PLAIN), tokenizer)


def written(ids, tokenizer=TOKENIZER, names=NAMES):
    return b"".join(names.get(i, "").encode() or tokenizer.pieces[i] for i in ids).decode()


def learned(chat, messages, tokenizer=TOKENIZER, names=NAMES):
    """The texts of a conversation, and of each the runs of marked tokens."""
    found = []
    for document in chat.documents([Conversation(messages)])[0]:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], document.marks, [0]])))
        runs = [document.ids[a:b] for a, b in zip(edges[::2], edges[1::2])]
        found.append([written(run, tokenizer, names) for run in runs])
    return found


# ---- shapes ----------------------------------------------------------------------------------


def test_all_shapes_become_messages():
    both = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    system = {"role": "system", "content": "s"}
    of = lambda record: conversation(record, "here").messages
    assert of({"messages": both}) == both
    human = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert of({"conversations": [{"from": "system", "value": "s"}, *human]}) == [system, *both]
    assert of({"instruction": "a", "output": "b"}) == both
    record = {"instruction": "x", "input": "y", "output": "b", "system": "s"}
    assert of(record)[:2] == [system, {"role": "user", "content": "x\n\ny"}]
    parts = [{"type": "text", "text": "a"}]
    assert of({"messages": [{"role": "user", "content": parts}, both[1]]}) == both
    greeting = {"role": "assistant", "content": "hello"}
    assert of({"messages": [system, greeting, *both]}) == [system, *both]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert of({"messages": [both[0], call]})[1] == call | {"content": ""}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "f line 7 is not valid JSON"),
        ('{"text": "x"}', "f line 7 is not a conversation: .* it has text"),
        ("3", "f line 7 is not a conversation"),
        (
            '{"messages": [{"role": "alien", "content": ""}]}',
            "role 'alien' is not known",
        ),
        ('{"messages": [{"role": ["user"], "content": ""}]}', "role .* is not known"),
        ('{"messages": [{"role": "user", "content": 3}]}', "the content is int, not a string"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "has no answer of the assistant"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "has no answer"),
        ('{"instruction": "\\ud800", "output": "x"}', "has a character that is not Unicode"),
        ('{"instruction": "\ufdd0", "output": "x"}', r"has U\+FDD0"),
        ("[{}", "f is not valid JSON"),
        ("[3]", "f entry 1 is not a conversation"),
    ],
)
def test_what_is_no_conversation_is_named(line, reason):
    with pytest.raises(UserError, match=reason):
        list(conversations(line, "f", 7))


# ---- templates -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_tokens_are_those_of_transformers(name):
    """The last text of a conversation is the whole of it; its tokens are those of transformers."""
    chat = chat_of(name)
    for messages, expected in zip([*CONVERSATIONS, WITH_SYSTEM], GOLDEN[name]):
        if expected is None:
            with pytest.raises(UserError, match="template refuses the conversation that begins"):
                chat.documents([Conversation(messages)])
            continue
        ids = chat.documents([Conversation(messages)])[0][-1].ids.tolist()
        begin = [] if expected["ids"][0] != chat.start else [chat.start]
        assert begin + ids == expected["ids"]
        assert written(begin + ids) == expected["text"]


# What a model has to say itself, by template: the content and what ends it.
ANSWERS = {
    "llama3": lambda x: x.strip() + "<|eot|>",
    "qwen2": lambda x: x + "<|im_end|>",
    "gemma": lambda x: x.strip() + "<end_of_turn>",
    "zephyr": lambda x: x + "</s>",
    "mistral": lambda x: " " + x + "</s>",
    "generation": lambda x: x + "<|im_end|>",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_their_ends_are_learned_and_nothing_else(name):
    chat = chat_of(name)
    for messages in CONVERSATIONS:
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert learned(chat, messages) == [list(map(ANSWERS[name], answers))]


def test_a_template_that_forgets_thoughts_makes_a_text_of_each_answer():
    chat = chat_of("qwen3")
    first, second = "<think>\nhm\n</think>\n\nSo.", "<think>\nwell\n</think>\n\nYes."
    texts = [document.ids for document in chat.documents([Conversation(CONVERSATIONS[2])])[0]]
    assert learned(chat, CONVERSATIONS[2]) == [[first + "<|im_end|>"], [second + "<|im_end|>"]]
    assert "hm" in written(texts[0]) and "hm" not in written(texts[1])
    assert "assistant\nSo.<|im_end|>" in written(texts[1])


def test_the_mask_is_that_of_transformers():
    chat = chat_of("generation")
    for messages, mask in zip(CONVERSATIONS, GOLDEN["llama"]["masks"]):
        ((document,),) = chat.documents([Conversation(messages)])
        assert [0, *document.marks] == mask


def test_a_prompt_ends_where_the_answer_begins():
    for name in ANSWERS:
        chat = chat_of(name)
        ((document,),) = chat.documents([Conversation(CONVERSATIONS[0])])
        prompt = chat.prompt(CONVERSATIONS[0][:1])
        starts = 1 + int(np.argmax(document.marks))
        assert prompt.tolist() == [chat.start, *document.ids][:starts]
        assert document.ids[document.marks][-1] == chat.end


def test_the_built_in_template_serves_every_tokenizer():
    model = train_sentencepiece([SHAKESPEARE], 280, 10_000)
    for tokenizer in (byte_tokenizer(), sentencepiece_tokenizer(model), TOKENIZER):
        chat = make_chat(DEFAULT_TEMPLATE, {}, tokenizer)
        names = {i: name for name, i in tokenizer.specials.items()}
        bos = names[tokenizer.bos_id]
        for messages in [*CONVERSATIONS, WITH_SYSTEM]:
            answers = [m["content"] + bos for m in messages if m["role"] == "assistant"]
            assert learned(chat, messages, tokenizer, names) == [answers]
        assert (chat.start, chat.end) == (tokenizer.bos_id, tokenizer.bos_id)


def mistral_like():
    """A sentencepiece model as Mistral's: BOS, EOS and a space before every text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SHAKESPEARE]), model_writer=model, model_type="bpe",
        vocab_size=300, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece_tokenizer(model.getvalue())


def test_a_tokenizer_is_called_once_for_many_conversations():
    """A call starts a thread for each core; one a conversation took minutes for a few megabytes."""
    model = sentencepiece_tokenizer(train_sentencepiece([SHAKESPEARE], 280, 10_000))
    calls = []

    def encode_batch(texts):
        calls.append(len(texts))
        return model.encode_batch(texts)

    chat = make_chat(DEFAULT_TEMPLATE, {}, dataclasses.replace(model, encode_batch=encode_batch))
    texts = [Conversation(messages) for messages in CONVERSATIONS]
    alone = [chat.documents([text])[0] for text in texts]
    calls.clear()
    together = chat.documents(texts)
    assert len(calls) == 1 and calls[0] > len(texts)
    for a, b in zip(alone, together, strict=True):
        for one, other in zip(a, b, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.marks, other.marks)
    assert chat.documents([]) == []


def test_sentencepiece_with_spaces_in_front():
    tokenizer = mistral_like()
    assert tokenizer.prefix == b" "
    chat, names = chat_of("mistral", tokenizer), {1: "<s>", 2: "</s>"}
    (found,) = learned(chat, CONVERSATIONS[1], tokenizer, names)
    said_ = [m["content"] for m in CONVERSATIONS[1] if m["role"] == "assistant"]
    assert found == [f" {content}</s>" for content in said_]
    assert (chat.start, chat.end) == (1, 2)


def test_spaces_have_a_place_in_the_text_too():
    """Llama 3's post-processor gives tokens of spaces none: answers would have holes."""
    (pieces,) = make_reader(TOKENIZER).encode(["a  b"])
    assert (pieces.ends - pieces.starts).tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "without a special token"),
        ("{% for m in messages %}{{ m.content }}<|none|>{% endfor %}", "without a special token"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}</s>"
            "{% endfor %}",
            "inside the generation block",
        ),
        ("{% for %}", "is not valid Jinja"),
        ("{{ messages[9].content.x }}", "refuses the conversation that begins 'a'"),
        ("{{ raise_exception('no') }}", "refuses the conversation that begins 'a': no"),
        ("{{ messages.append(1) }}", "refuses"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, reason):
    with pytest.raises(UserError, match=reason):
        make_chat(template, PLAIN, TOKENIZER)


def test_a_template_that_changes_questions_is_refused():
    """Mistral Nemo's writes the system prompt into the last question only while it is the last."""
    nemo = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
        "{{ messages[0].content if loop.last and messages[0].role == 'system' }}{{ m.content }}"
        "[/INST]{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    chat = make_chat(nemo, PLAIN, TOKENIZER)
    with pytest.raises(UserError, match="differently once they are answered"):
        chat.documents([Conversation(WITH_SYSTEM)])


def test_answers_are_found_where_the_tokenizer_changes_the_text():
    """With sentencepiece's defaults: NFKC, a space before texts, one space between words."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SHAKESPEARE]), model_writer=model, model_type="bpe",
        vocab_size=360, byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    tokenizer = sentencepiece_tokenizer(model.getvalue())
    chat, names = chat_of("mistral", tokenizer), {1: "<s>", 2: "</s>"}
    messages = [
        {"role": "user", "content": "  \u00bd  of   it?"},
        {"role": "assistant", "content": "\ufb01ne,  \uff21\u3000\u00b2"},
    ]
    assert learned(chat, messages, tokenizer, names) == [[" fine, A 2</s>"]]


# ---- stores and batches ----------------------------------------------------------------------


def test_marks_are_the_highest_bit():
    for vocab, kind in ((257, "<u2"), (32768, "<u2"), (32769, "<u4"), (151_936, "<u4")):
        dtype = token_type(vocab, marked=True)
        ids, marks = np.array([0, vocab - 1, vocab - 1]), np.array([True, False, True])
        back = unpack_loss_mask(pack_loss_mask(ids, marks, dtype))
        assert dtype == np.dtype(kind)
        assert back[0].tolist() == ids.tolist() and back[1].tolist() == marks.tolist()


def config_of(tmp_path, conversations=CONVERSATIONS, name="llama3", **changes):
    (tmp_path / "tokenizer.json").write_text(make_tokenizer())
    file = write_lines(tmp_path / "chat.jsonl", conversations)
    source = {"name": "chat", "path": str(file), "template": TEMPLATES[name]}
    source |= {"special": SPECIALS.get(name, PLAIN)} | changes
    tree = {"train": source, "validation": {"name": "none"}, "packing": {"name": "padded"}}
    tree |= {"tokenizer": {"name": "huggingface", "path": str(tmp_path / "tokenizer.json")}}
    return DataConfig.model_validate(tree | {"cache_dir": str(tmp_path / "cache")})


def answers_in(batch):
    """The runs of labels of a batch, as text."""
    found = []
    for targets, weights in zip(batch.targets_BT, batch.weights_BT):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], weights, [0]])))
        found += [written(targets[a:b]) for a, b in zip(edges[::2], edges[1::2])]
    return found


def test_batches_have_labels_for_answers_alone(tmp_path):
    config = config_of(tmp_path)
    prepared = prepare(config)
    with train_batches(prepared.train, config=config, batch_size=1, sequence_length=512) as loader:
        batch = next(loader)
    expected = [m["content"].strip() + "<|eot|>" for c in CONVERSATIONS for m in c[1::2]]
    documents = batch.segments_BT.max()
    assert documents >= 3 and sorted(set(answers_in(batch))) == sorted(expected)
    # Every document begins with its BOS, at position 0, and apart from the one before.
    begin = next(i for i, name in NAMES.items() if name == "<|begin|>")
    starts = (batch.tokens_BT == begin) & (batch.segments_BT > 0)
    assert starts.sum() == documents and (batch.positions_BT[starts] == 0).all()
    validation = list(validation_batches(prepared.train, batch_size=2, sequence_length=200))
    assert sorted(x for b in validation for x in answers_in(b)) == sorted(expected)


def test_long_conversations_are_cut_or_left_out_and_counted(tmp_path):
    long, short = said("Hi.", "word " * 60), said("Hm?", "No.")
    silent = said("Really? " * 60, "Yes.")
    for rule, expected in (("truncate", (1, 0, 1)), ("drop", (0, 2, 0))):
        config = config_of(tmp_path, [long, short, silent], too_long=rule)
        stores = stores_of(prepare(config).train)
        found = fit_stores(stores, config, 64)[1]["train"]
        assert found["conversations"] == 3
        assert (found["truncated"], found["dropped"], found["unanswered"]) == expected
        with train_batches(stores, config=config, batch_size=4, sequence_length=64) as loader:
            for _ in range(6):
                batch = next(loader)
                assert "Really" not in written(batch.tokens_BT.ravel())
                assert ("word" in written(batch.tokens_BT.ravel())) <= (rule == "truncate")
                assert batch.weights_BT.sum(1).all()
            cut, *out = expected
            figures = loader.statistics()
            assert figures["data_truncated"] == cut / 3 and figures["data_dropped"] == sum(out) / 3
    with (
        pytest.raises(UserError, match="none of the 3 conversations of train is left"),
        train_batches(stores, config=config, batch_size=4, sequence_length=8),
    ):
        pass


def test_conversations_that_are_mostly_cut_are_an_error(tmp_path):
    config = config_of(tmp_path, [said("Hi.", "word " * 200)])
    with (
        pytest.raises(UserError, match="train.sequence_length 64 would cut 94% of the tokens"),
        train_batches(prepare(config).train, config=config, batch_size=1, sequence_length=64),
    ):
        pass


def test_the_template_is_part_of_what_is_prepared(tmp_path):
    directories = {
        prepare(config_of(tmp_path, **changes)).directory
        for changes in ({}, {"name": "qwen2"}, {"too_long": "drop"})
    }
    assert len(directories) == 2  # the rule is applied later
    file = tmp_path / "own.jinja"
    for name in ("qwen2", "gemma"):
        file.write_text(TEMPLATES[name])
        directories.add(prepare(config_of(tmp_path, template=str(file))).directory)
    assert len(directories) == 4


def test_held_out_conversations_are_in_one_split_whole(tmp_path):
    many = [
        said(
            f"Think {i}.", "<think>\nhm\n</think>\n\nSo.", "Go on.", f"<think>\nx\n</think>\n\n{i}"
        )
        for i in range(60)
    ]
    config = config_of(tmp_path, many, "qwen3")
    tree = config.model_dump() | {"validation": {"name": "documents", "fraction": 0.3}}
    prepared = prepare(DataConfig.model_validate(tree))
    assert prepared.validation.documents % 2 == 0 and prepared.validation.documents > 4
    assert prepared.validation.documents + prepared.train.documents == 120


def test_an_array_in_a_json_file_is_read(tmp_path):
    config = config_of(tmp_path)
    records = [{"instruction": "a", "input": "", "output": "b"}] * 2
    (tmp_path / "all.json").write_text(json.dumps(records, indent=2))
    source = config.train.model_copy(update={"path": str(tmp_path / "all.json")})
    assert prepare(config.model_copy(update={"train": source})).train.documents == 2


def test_a_tokenizer_is_trained_on_what_is_said(tmp_path):
    many = [said(f"What is {i}?", "A number, I suppose. " * 20) for i in range(60)]
    tree = config_of(tmp_path, many).model_dump()
    tree["tokenizer"] = {"name": "sentencepiece", "vocab_size": 400}
    tree["train"] |= {"template": None, "special": {}}
    pieces = prepare(DataConfig.model_validate(tree)).tokenizer.pieces
    assert any(len(piece) > 6 and piece in b" A number, I suppose. A" for piece in pieces)
    assert not any(b"role" in piece or b'": "' in piece for piece in pieces)


def test_conversations_and_text_do_not_share_a_validation_split(tmp_path, store_of):
    store = prepare(config_of(tmp_path)).train
    with pytest.raises(UserError, match="give data.validation a source of its own"):
        join_stores([store, store_of([3, 4])])


def test_show_marks_what_is_learned(tmp_path):
    config = config_of(tmp_path, [*CONVERSATIONS, said("Q " * 300, "A.")])
    lines = "\n".join(show_rows(prepare(config), config, batch_size=1, sequence_length=480))
    answer = "<|end_header|>\n\n{+Two!<|eot|>+}<|start_header|>user"
    assert answer in lines and "<|begin|><|start_header|>user" in lines
    assert "% are learned" in lines and "4 conversations: 0 lose their end" in lines
    assert "1 because no answer would remain" in lines


def test_packing_must_be_padded(tmp_path):
    tree = config_of(tmp_path).model_dump() | {"packing": {"name": "concat"}}
    with pytest.raises(ValueError, match="set packing.name: padded"):
        DataConfig.model_validate(tree)
