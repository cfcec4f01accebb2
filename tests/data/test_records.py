"""What records say beside what is said: labels, system, tools, history; and what is refused."""

import json

import pytest
from chat_cases import PLAIN, SPECIALS, TEMPLATES, make_tokenizer, said, talk_config

from jaxtrain.data import DataConfig, counts_phrase, fit_stores, make_chat, prepare
from jaxtrain.data.batches.loader import stores_of
from jaxtrain.data.chat.conversations import dropped_shares
from jaxtrain.data.chat.messages import conversation
from jaxtrain.data.preference.preferences import encode_preferences, preferences
from jaxtrain.data.records import Conversation
from jaxtrain.data.tokenizer.tokenizer import huggingface_tokenizer
from jaxtrain.settings import UserError

TOKENIZER = huggingface_tokenizer(make_tokenizer().encode())
TALK = said("q", "first", "r", "second")
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather"}}]}
# As Hermes writes tools and calls.
CALLING = (
    "{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' if tools }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ 'CALL ' + m.tool_calls | tojson if m.tool_calls }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def chat_of(name):
    return make_chat(TEMPLATES.get(name, name), PLAIN, TOKENIZER)


def learned(chat, record):
    """What is learned of each text of a record."""
    found = chat.documents([conversation(record, "here")])[0]
    return [TOKENIZER.decode(document.ids[document.marks]).strip() for document in found]


def with_labels(**labels):
    """A conversation whose first answer has them."""
    return {"messages": [TALK[0], TALK[1] | labels, *TALK[2:]]}


# ---- labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [{"weight": 0}, {"train": False}, {"weight": 1, "train": False}])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "generation"])
def test_an_answer_that_is_not_to_be_learned_has_no_loss(name, labels):
    chat = chat_of(name)
    (found,) = learned(chat, with_labels(**labels))
    assert found.endswith("second") and "first" not in found
    whole = learned(chat, with_labels(weight=1, train=True))
    assert whole == learned(chat, {"messages": TALK}) and "first" in "".join(whole)
    last = {"messages": [*TALK[:3], TALK[3] | labels]}
    (document,) = chat.documents([conversation(last, "here")])[0]
    assert "second" not in TOKENIZER.decode(document.ids)  # nothing is learned behind the first
    assert learned(chat, {"messages": [TALK[0], TALK[1] | labels]}) == []


def test_two_blocks_of_one_answer_are_both_left_out():
    block = "{% generation %}"
    template = TEMPLATES["generation"].replace(block, block + "!{% endgeneration %}" + block)
    (found,) = learned(chat_of(template), with_labels(weight=0))
    assert found == "!second"


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"weight": 0.5}, "here, message 2: weight is 0.5; it must be 0 or 1"),
        ({"train": "false"}, "here, message 2: train is 'false'; it must be true or false"),
    ],
)
def test_a_label_that_is_none_is_refused(labels, reason):
    with pytest.raises(UserError, match=reason):
        conversation(with_labels(**labels), "here")


def test_conversations_without_a_learned_answer_are_left_out_and_counted(tmp_path):
    silent = {"messages": [TALK[0], TALK[1] | {"weight": 0}]}
    empty = {"messages": said("q", "  ")}
    config = talk_config(tmp_path, [silent, {"messages": TALK}, empty])
    stores = stores_of(prepare(config).train)
    assert stores["train"].documents == 1
    for _ in range(2):  # from the cache the second time
        count = fit_stores(stores_of(prepare(config).train), config, 512)[1]["train"]
        assert count["conversations"] == 3 and count["unanswered"] == 2
        assert (count["truncated"], count["dropped"], count["refused"]) == (0, 0, 0)
    assert "3 conversations: " in counts_phrase(count) and "2 because no answer" in counts_phrase(
        count
    )
    config = talk_config(tmp_path, [silent, silent])
    with pytest.raises(UserError, match=r"records.jsonl: none of its 2 conversations is left: 2 h"):
        prepare(config)


def test_a_judged_answer_with_weight_0_is_refused():
    record = {"prompt": "q", "chosen": [TALK[1] | {"weight": 0}], "rejected": "b"}
    texts = [text for text, _ in preferences(json.dumps(record), "f", 1)]
    with pytest.raises(UserError, match="nothing is learned of the last answer .* weight 0"):
        encode_preferences(chat_of("qwen2"), texts)


# ---- system, tools, history --------------------------------------------------------------------


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_system_beside_the_messages_is_the_first_of_them(key):
    system = {"role": "system", "content": "s"}
    for record in (
        {key: TALK, "system": "s"},
        {key: [system, *TALK], "system": "s"},
        {key: [system, *TALK], "system": None},
    ):
        assert conversation(record, "here").messages == [system, *TALK]
    assert conversation({key: TALK, "system": ""}, "here").messages == TALK
    with pytest.raises(UserError, match="here has a field system and a different system message"):
        conversation({key: [system, *TALK], "system": "t"}, "here")
    with pytest.raises(UserError, match="here: system is int, not a string"):
        conversation({key: TALK, "system": 3}, "here")
    whole = {"chosen": TALK, "rejected": [*TALK[:3], TALK[1]], "system": "s"}
    ((pair, _),) = preferences(json.dumps(whole), "f", 1)
    assert len(pair.prompt) == 4 and pair.prompt[0] == system


def test_the_template_is_told_of_the_tools():
    chat = chat_of(CALLING)
    for tools in (TOOLS, json.dumps(TOOLS)):
        text = conversation({"messages": TALK, "tools": tools}, "here")
        assert text == Conversation(TALK, TOOLS)
        (document,) = chat.documents([text])[0]
        assert "Tools: " + json.dumps(TOOLS) in TOKENIZER.decode(document.ids)
        assert "Tools" not in TOKENIZER.decode(document.ids[document.marks])
        pair = {"prompt": "q", "chosen": "a", "rejected": "b", "tools": tools}
        texts = [text for text, _ in preferences(json.dumps(pair), "f", 1)]
        ((one, other),) = encode_preferences(chat, texts)
        for document in (one, other):
            assert "weather" in TOKENIZER.decode(document.ids)
    for tools in (None, [], "[]", ""):
        assert conversation({"messages": TALK, "tools": tools}, "here").messages == TALK
    for tools in ("weather", "{", ["weather"], {"name": "weather"}):
        with pytest.raises(UserError, match="here: tools "):
            conversation({"messages": TALK, "tools": tools}, "here")


def test_tool_calls_are_learned_or_refused():
    record = {"messages": [TALK[0], CALL]}
    (found,) = learned(chat_of(CALLING), record)
    assert found.startswith("CALL ") and "weather" in found
    for content in ("", "I will ask."):
        record = {"messages": [TALK[0], CALL | {"content": content}]}
        with pytest.raises(UserError, match="leaves out the tool_calls of .* begins 'q': use one"):
            learned(chat_of("qwen2"), record)


def test_history_is_what_was_said_before():
    record = {"instruction": "r", "input": "", "output": "second", "history": [["q", "first"]]}
    assert conversation(record, "here").messages == TALK
    assert conversation(record | {"history": None}, "here").messages == TALK[2:]
    for history in ("q", ["q"], [["q"]], [["q", None]], [["q", "a", "r"]]):
        with pytest.raises(UserError, match="here: history must be a list of pairs of strings"):
            conversation(record | {"history": history}, "here")


# ---- other shapes ------------------------------------------------------------------------------


def test_prompts_and_completions_are_conversations_whose_completion_is_learned():
    chat = chat_of("qwen2")
    for record in (
        {"prompt": "q", "completion": "first"},
        {"prompt": TALK[:1], "completion": TALK[1:2]},
        {"prompt": TALK[0], "completion": "first", "label": None},
    ):
        assert conversation(record, "here").messages == TALK[:2]
    record = {"prompt": TALK[:3], "completion": TALK[3:], "system": "s", "tools": TOOLS}
    assert learned(chat, record) == ["second"]
    messages, tools = conversation(record, "here")
    assert [m["content"] for m in messages] == ["s", "q", "first", "r", "second"] and tools == TOOLS
    assert conversation({"prompt": "q", "messages": TALK}, "here").messages == TALK


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": None, "completion": "a"}, "here, prompt is null, not a string or a list"),
        ({"prompt": "q", "completion": []}, "here, completion is list, not a string or a list"),
        ({"prompt": "q", "completion": TALK[:1]}, "here, completion does not end with an answer"),
        (
            {"prompt": "q", "completion": "a", "label": False},
            "here has prompt, completion and label: .* data.train.name=preference",
        ),
    ],
)
def test_a_prompt_or_a_completion_that_is_none_is_named(record, reason):
    with pytest.raises(UserError, match=reason):
        conversation(record, "here")


def test_dollys_context_is_part_of_what_is_asked():
    record = {"instruction": "q", "context": "c", "response": "a", "category": "closed_qa"}
    assert conversation(record, "here").messages == said("q\n\nc", "a")
    for context in ("", None):
        assert conversation(record | {"context": context}, "here").messages == said("q", "a")
    with pytest.raises(UserError, match="here: response is null, not a string"):
        conversation(record | {"response": None}, "here")


# ---- what is no text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"instruction": None, "output": "x"}, "here: instruction is null, not a string"),
        ({"instruction": "q", "input": 3, "output": "x"}, "here: input is int, not a string"),
        ({"instruction": "q", "output": None}, "here: output is null, not a string"),
        ({"instruction": "q", "output": "x", "system": 3}, "here: system is int, not a string"),
        ({"messages": TALK, "images": ["x.png"]}, "here has images: models here read text only"),
        (
            {"messages": [TALK[0] | {"content": [{"type": "text", "text": None}]}, TALK[1]]},
            "here, message 1, a part of the content: text is null, not a string",
        ),
        (
            {"messages": [TALK[0] | {"content": [{"type": "image_url"}]}, TALK[1]]},
            "here, message 1: the content has a part of type 'image_url': models here read text",
        ),
        ({"messages": [TALK[0] | {"content": None}, TALK[1]]}, "message 1: the content is null"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused(record, reason):
    with pytest.raises(UserError, match=reason):
        conversation(record, "here")


# ---- what the template refuses -----------------------------------------------------------------


def test_what_a_template_refuses_is_named_or_left_out_and_counted(tmp_path):
    """Gemma's template has no system message."""
    records = [{"messages": TALK}, {"messages": TALK, "system": "s"}, {"messages": TALK[:2]}]
    options = {"template": TEMPLATES["gemma"], "special": SPECIALS["gemma"]}
    with pytest.raises(
        UserError, match=r"records.jsonl line 2: .* System role .*refused=drop leav"
    ):
        prepare(talk_config(tmp_path, records, **options))
    config = talk_config(tmp_path, records, **options, refused="drop")
    stores = stores_of(prepare(config).train)
    count = fit_stores(stores, config, 512)[1]["train"]
    assert stores["train"].documents == 2
    assert (count["conversations"], count["refused"], count["unanswered"]) == (3, 1, 0)
    assert counts_phrase(count).endswith(", 1 because the chat template refuses them")
    assert dropped_shares({"train": count})["data_dropped"] == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="none of its 1 conversations is left: .* refuses 1"):
        prepare(talk_config(tmp_path, records[1:2], **options, refused="drop"))


def test_pairs_that_a_template_refuses_are_named_or_left_out_and_counted(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    bad = {"chosen": TALK, "rejected": [*TALK[:3], TALK[2], TALK[3]]}
    options = {"name": "preference", "template": TEMPLATES["gemma"], "special": SPECIALS["gemma"]}
    with pytest.raises(UserError, match=r"records.jsonl line 2: .* Roles must alternate"):
        prepare(talk_config(tmp_path, [pair, bad, pair], **options))
    config = talk_config(tmp_path, [pair, bad, pair | {"chosen": "c"}], **options, refused="drop")
    views, counted = fit_stores(stores_of(prepare(config).train), config, 512)
    assert views["train"].documents == 2
    assert (counted["train"]["preferences"], counted["train"]["refused"]) == (3, 1)


def test_a_template_that_hides_its_answers_is_named_with_the_line(tmp_path):
    nemo = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
        "{{ messages[0].content if loop.last and messages[0].role == 'system' }}{{ m.content }}"
        "[/INST]{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    records = [{"messages": TALK}, {"messages": TALK, "system": "s"}]
    with pytest.raises(UserError, match=r"records.jsonl line 2: .* differently once they are"):
        prepare(talk_config(tmp_path, records, template=nemo, refused="drop"))


# ---- splits ------------------------------------------------------------------------------------


def split_of(folder, records, fraction, **changes):
    tree = talk_config(folder, records, **changes).model_dump()
    return DataConfig.model_validate(
        tree | {"validation": {"name": "documents", "fraction": fraction}}
    )


def test_a_split_that_takes_no_document_says_what_would(tmp_path):
    talks = [{"messages": said(f"{i}?", "a")} for i in range(60)]
    reason = (
        r"records.jsonl: the validation split has no documents: 1% of 60 conversations is none: "
        r"set data.validation.fraction=0.1, or data.validation.name=none"
    )
    for _ in range(2):  # the second time from what the first has left
        with pytest.raises(UserError, match=reason):
            prepare(split_of(tmp_path, talks, 0.01))
    prepared = prepare(split_of(tmp_path, talks, 0.1))
    assert prepared.validation is not None and prepared.validation.documents
    with pytest.raises(UserError, match="50% of 1 conversations is none: set a source of its own"):
        prepare(split_of(tmp_path, [{"messages": said("b?", "a")}], 0.5))
    with pytest.raises(
        UserError, match="the train split has no documents: 99% of 1 conversations is all"
    ):
        prepare(split_of(tmp_path, talks[:1], 0.99))
    pairs = [{"prompt": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(20)]
    with pytest.raises(UserError, match="1% of 20 preferences is none: .*fraction=0.5"):
        prepare(split_of(tmp_path, pairs, 0.01, name="preference"))
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n")
    lines = {"name": "text", "path": str(tmp_path / "lines.txt"), "document": "line"}
    tree = {"train": lines, "validation": {"name": "documents"}, "tokenizer": {"name": "bytes"}}
    with pytest.raises(
        UserError, match="lines.txt: the validation split has no documents: 1% of 3 docum"
    ):
        prepare(DataConfig.model_validate(tree | {"cache_dir": str(tmp_path / "cache")}))


def test_where_pairs_and_judged_answers_meet_is_named(tmp_path, monkeypatch):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    labeled = [{"prompt": "q", "completion": answer, "label": True} for answer in "ab"]
    named = r" line 3 is a labeled answer .*, but .*records.jsonl line 1 is a pair .*: the files of"
    with pytest.raises(UserError, match="records.jsonl" + named):
        prepare(talk_config(tmp_path, [pair, pair, *labeled], name="preference"))
    config = talk_config(tmp_path, [pair, pair], name="preference")
    (tmp_path / "records2.jsonl").write_text("\n\n" + "\n".join(map(json.dumps, labeled)))
    both = config.train.model_copy(update={"path": str(tmp_path / "records*.jsonl")})
    for batch in (1 << 20, 1):  # in one group of blocks, and in two
        monkeypatch.setattr("jaxtrain.data.store.encode.BATCH", batch)
        with pytest.raises(UserError, match="records2.jsonl" + named):
            prepare(config.model_copy(update={"train": both}))
