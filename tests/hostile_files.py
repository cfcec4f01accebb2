"""Files that no command may take: damaged models, checkpoints of others, text, templates, tasks."""

import gzip
import json
import zlib

from hostile_cases import SHOW, arguments, fields, file, yaml_files

# ---- a trained model that is damaged ---------------------------------------------------------

USERS = ("generate run", "evaluate run", "interop export run out")


def cut(at):
    return lambda old: old[: int(len(old) * at)]


def flipped(at):
    index = lambda old: int(len(old) * at)
    return lambda old: old[: index(old)] + bytes([old[index(old)] ^ 4]) + old[index(old) + 1 :]


def header(change):
    """A safetensors file with another header; its length is that of the new one."""

    def changed(old):
        size = int.from_bytes(old[:8], "little")
        text = change(json.loads(old[8 : 8 + size]))
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        return len(text).to_bytes(8, "little") + text + old[8 + size :]

    return changed


def entry(**changes):
    """The first tensor with other facts."""

    def change(tree):
        name = next(name for name in tree if name != "__metadata__")
        return tree | {name: tree[name] | changes}

    return header(change)


def twice(tree):
    text, name = json.dumps(tree), next(name for name in tree if name != "__metadata__")
    return f"{text[:-1]}, {json.dumps(name)}: {json.dumps(tree[name])}}}".encode()


def overlapping(tree):
    names = [name for name in tree if name != "__metadata__"]
    same = [n for n in names if tree[n]["shape"] == tree[names[0]]["shape"]]
    other = next((n for n in names if n != names[0] and len(same) < 2), same[-1])
    return tree | {other: tree[names[0]]}


HEADERS = {
    "length 2^63": (lambda old: b"\0" * 7 + b"\x80" + old[8:], "a header of"),
    "length 2^64-1": (lambda old: b"\xff" * 8 + old[8:], "a header of"),
    "no bytes": (lambda old: b"", "safetensors"), "four bytes": (lambda old: old[:4], "header"),
    "a list": (header(lambda tree: []), "is no object"), "cut": (cut(0.9), "is cut off"),
    "a number": (header(lambda tree: 3), "is no object"), "more": (lambda x: x + b"x", "follow"),
    "no JSON": (header(lambda tree: b"{" * 30), "is not valid JSON"),
    "deep": (header(lambda tree: b"[" * 5000), "nested too deep"),
    "digits": (header(lambda tree: b'{"a": ' + b"9" * 5000 + b"}"), "is not valid JSON"),
    "latin": (header(lambda tree: b'{"\xff": 1}'), "is not valid JSON"),
    "negative offsets": (entry(data_offsets=[-8, 8]), "that agree"),
    "text offsets": (entry(data_offsets=["0", "8"]), "that agree"),
    "one offset": (entry(data_offsets=[0]), "that agree"), "null": (entry(dtype=None), "agree"),
    "backwards": (entry(data_offsets=[8, 0]), "that agree"), "true": (entry(shape=[True]), "agree"),
    "shape beyond": (entry(shape=[10**12, 10**12]), "that agree"),
    "negative shape": (entry(shape=[-1, -4]), "that agree"), "text": (entry(shape="3"), "agree"),
    "entry": (header(lambda tree: tree | {"x": 3}), "that agree"),
    "twice": (header(twice), "twice"),
    "overlap": (header(overlapping), ""),
    "metadata": (header(lambda t: t | {"__metadata__": 3}), ""),
    "flipped": (flipped(0.8), "is damaged"),
}  # fmt: skip
CONFIGS = {
    "empty": (lambda old: b"", "is cut short"), "half": (cut(0.5), "is cut short"),
    "end": (lambda old: old[:-5], "is cut short"), "latin": (lambda old: old + b"\xff", "damaged"),
    "a tenth": (cut(0.1), "is cut short"), "text": (lambda old: b"x\n...\n", "holds no sections"),
    "key": (lambda old: old.replace(b"model:", b"modle:"), "config.yaml"),
    "value": (lambda old: old.replace(b"depth: ", b"depth: x"), "is damaged: model.depth"),
    "twice": (lambda old: old.replace(b"model:", b"run: {}\nmodel:"), "run is given twice"),
}  # fmt: skip


def damaged_runs():
    for user in USERS:
        command, *rest = user.split()
        for damage, words in CONFIGS.values():
            yield file(command, rest, words, "run/model/config.yaml", damage)
    for command in ("generate run", "interop export run out"):
        name, *rest = command.split()
        for damage, words in HEADERS.values():
            yield file(name, rest, words, "run/model/model.safetensors", damage)
        yield file(name, rest, "damaged", "run/model/tokenizer.bytes", b"other")
    start = [*SHOW, "train.init_from=run"]
    for damage, words in CONFIGS.values():
        if words != "is damaged: model.depth":
            yield file(
                "main", start, words.replace("config.yaml", ""), "run/model/config.yaml", damage
            )


# ---- checkpoints of others -------------------------------------------------------------------


def hf(**changes):
    return lambda old: json.dumps(json.loads(old) | changes).encode()


def infinite(old):
    return json.dumps(json.loads(old) | {"rms_norm_eps": float("inf")}).encode()


INDEX = "hf/model.safetensors.index.json"
HF_CONFIGS = {
    "depth": hf(num_hidden_layers=10**9), "huge": hf(hidden_size=2**40), "eps": infinite,
    "true": hf(num_hidden_layers=True), "text": hf(hidden_size="64"), "null": hf(vocab_size=None),
    "negative": hf(num_attention_heads=-4), "kind": hf(model_type=["llama"]),
    "act": hf(hidden_act=7), "rope": hf(rope_theta=-1), "list": lambda old: b"[]",
    "torn": cut(0.5), "deep": lambda old: b"[" * 5000, "digits": lambda old: b"9" * 5000,
    "latin": lambda old: b"\xff" + old, "none": lambda old: b"", "dtype": hf(torch_dtype={"a": 1}),
}  # fmt: skip


def checkpoints():
    into = "import hf out"
    for name, damage in HF_CONFIGS.items():
        if name != "dtype":
            yield file("interop", into, "", "hf/config.json", damage)
    for damage, words in HEADERS.values():
        yield file("interop", into, words, "hf/model.safetensors", damage)
    for name in ("../run/model/model.safetensors", "/etc/passwd", "..", "", "a\0b"):
        index = json.dumps({"weight_map": {"a": name}}).encode()
        yield file("interop", into, "not a file in that folder", INDEX, index)
    for text in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{", "[" * 5000):
        yield file("interop", into, "index.json", INDEX, text.encode())
    for damage in (cut(0.5), lambda old: b"", lambda old: b"[]", lambda old: b"{}", flat_tokenizer):
        yield file("interop", into, "tokenizer", "hf/tokenizer.json", damage)
    for text in (b"{", b"[]", b"\xff", b"[" * 5000):
        yield file("interop", into, "generation_config", "hf/generation_config.json", text)


def flat_tokenizer(old):
    tree = json.loads(old)
    tree["model"]["vocab"] = {"a": 10**12}
    return json.dumps(tree).encode()


# ---- text ------------------------------------------------------------------------------------

DATA = ["data.tokenizer.name=bytes", "data.validation.name=none", "data.prepare_workers=1"]


def prepared(kind, words, name, content, *more):
    arguments = [*DATA, f"data.train.name={kind}", f"data.train.path={name}", *more]
    return file("prepare", arguments, words, name, content)


def pair(prompt, chosen, rejected):
    return json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}).encode() + b"\n"


def talk(*turns):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": x} for i, x in enumerate(turns)]
    return json.dumps({"messages": messages}).encode() + b"\n"


JSONL = {
    b"{": "line 1 is not valid JSON", b"3\n": "is not a JSON object", b"[]\n": "not a JSON object",
    b'{"text": 3}\n': "is int, not a string", b'{"body": "x"}\n': "no field 'text'",
    b'{"text": "\\ud800"}\n': "not Unicode", b"[" * 5000: "not valid JSON", b"\n\n": "no text",
    b'{"text": ' + b"9" * 5000 + b"}": "not valid JSON", b'{"text": "\xff"}\n': "not UTF-8",
    b'{"text": "a"}\n{"text"': "line 2", b"": "", b'{"text": null}': "not a string",
}  # fmt: skip
CHATS = {
    b"{": "not valid JSON", b"3\n": "not a conversation", b"[" * 5000: "nested too deep",
    b'{"messages": 3}\n': "not a conversation", b'{"messages": []}\n': "no answer",
    b'{"messages": [3]}\n': "not an object", talk("a"): "no answer of the assistant",
    b'{"messages": [{"role": "x", "content": "a"}]}\n': "role 'x' is not known",
    b'{"messages": [{"role": "user", "content": 3}]}\n': "not a string", b"": "",
    b'{"messages": [{"role": ["user"], "content": "a"}]}\n': "is not known",
    b'{"prompt": "a", "completion": "b", "label": true}\n': "label",
    b'{"instruction": 3, "output": "b"}\n': "is int", b"9" * 5000: "not valid JSON",
    talk("\ud800", "b"): "not Unicode", talk("a", ""): "none of its 1 conversations is left",
    b'{"instruction": "a", "output": "b", "history": 3}\n': "history must be",
    b'{"instruction": "a", "output": "b", "tools": "{"}\n': "tools is a string",
}  # fmt: skip
TEMPLATES = {
    "{{ 1 / 0 }}": "ZeroDivisionError", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "Recurs",
    "{% for i in range(10000000000) %}{% endfor %}": "Range", "{{ 'a' * 10000000000 }}": "makes",
    "{{ 10 ** 100000000 }}": "makes", "{% if %}": "is not valid Jinja", "{{": "is not valid Jinja",
    "{{ messages[9].content }}": "refuses", "{{ raise_exception('no') }}": "no", "{{ ''.x.y }}": "",
    "{{ ().__class__.__mro__ }}": "", "{{ messages }}": "answers cannot be located",
    "{% include 'x' %}": "", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "is not valid Jinja",
}  # fmt: skip
PAIRS = {
    pair("a", "b", "b") * 60: "are the same answer", pair("", "", "") * 3: "are the same answer",
    pair("", "", "b") * 3: "are empty",
    b'{"chosen": "a"}\n': "no preference", b"{": "not valid JSON",
    pair("a", 3, "b"): "not a string", b"3\n": "no preference",
    pair("a", "b", None): "not a string",
    b'{"prompt": "a", "completion": "b", "label": 3}\n': "must be true or false",
    b'{"prompt": "a", "completion": "b", "label": true}\n': "there is none", b"": "",
    b"[" * 5000: "nested too deep",
    pair("a", "b", "c") + b'{"prompt": "a", "completion": "b", "label": true}\n': "one kind",
}  # fmt: skip


def texts():
    for content, words in JSONL.items():
        yield prepared("jsonl", words, "t.jsonl", content)
    for content, words in CHATS.items():
        yield prepared("chat", words, "t.jsonl", content)
    for content, words in PAIRS.items():
        yield prepared("preference", words, "t.jsonl", content)
    for text, words in TEMPLATES.items():
        template = f"data.train.template={json.dumps(text)}"
        yield prepared("chat", words, "t.jsonl", talk("a", "b") * 3, template)
    empty = "data.train.template=empty.jinja"
    for content, words in ((b"", "is empty"), (b" \n", "is empty"), (b"\xff", "not UTF-8")):
        found = prepared("chat", words, "t.jsonl", talk("a", "b") * 3, empty)
        yield found._replace(files=found.files | {"empty.jinja": content})
    for content in (b"", b"x", gzip.compress(b"abc" * 100)[:20], b"\x1f\x8b" + b"\0" * 30):
        yield prepared("text", "", "t.txt.gz", content)
    for ending in (".xz", ".zst"):
        yield prepared("text", "damaged", f"t.txt{ending}", b"nothing compressed")
    yield prepared("text", "not UTF-8", "t.txt", b"\xff")
    yield prepared("text", "holds no text", "t.txt", b"")
    yield prepared("parquet", "not a Parquet file", "t.parquet", b"PAR1")
    yield prepared("parquet", "not a Parquet file", "t.parquet", b"")
    good = b"some text\n"
    yield prepared("text", "cannot be written", "t.txt", good, "data.cache_dir=/proc/x")
    yield prepared("text", "t.txt", "t.txt", good, "data.cache_dir=t.txt")
    yield prepared("text", "", "t.txt", good, "data.validation.name=tail")
    tokenizer = ["data.tokenizer.name=huggingface", "data.tokenizer.path=k.json"]
    for content in (b"", b"{}", b"[]", b"[" * 5000, b'{"model": 3}', b"\xff"):
        found = prepared("text", "k.json", "t.txt", good, *tokenizer)
        listed = [x for x in found.arguments if x != DATA[0]]
        yield found._replace(arguments=listed, files=found.files | {"k.json": content})
    for content in (b"", b"\0" * 100, zlib.compress(b"x")):
        found = prepared("text", "m.model", "t.txt", good, "data.tokenizer.path=m.model")
        listed = [x for x in found.arguments if x != DATA[0]]
        yield found._replace(arguments=listed, files=found.files | {"m.model": content})


# ---- tasks and reports -----------------------------------------------------------------------

TASK = b"icl_tasks:\n- {label: a, dataset_uri: a.jsonl, num_fewshot: [0], random_baseline: 0, "
TASK += b"icl_task_type: language_modeling}\n"
TASKS = {
    b"": "expected `icl_tasks:`",
    b"[": "not readable as YAML",
    b"icl_tasks: 3": "expected",
    b"icl_tasks: [3]": "Task",
    b"icl_tasks: [{label: a}]": "field required",
    b"\xff": "YAML",
    TASK.replace(b"[0]", b"[true]"): "Task",
    TASK.replace(b"baseline: 0", b"baseline: .nan"): "Task",
}
EXAMPLES = {
    b"{": ":1 is not valid JSON", b"3": "is missing or wrong", b"[" * 5000: "nested",
    b"\xff": "JSON",
    b'{"context": "a", "continuation": " "}': "is empty", b"": "", b"9" * 5000: "not valid JSON",
}  # fmt: skip


def tasks():
    for content, words in TASKS.items():
        yield file("evaluate", "run --tasks t.yaml", words, "t.yaml", content)
    for content, words in EXAMPLES.items():
        found = file("evaluate", "run --tasks t.yaml", words, "t.yaml", TASK)
        yield found._replace(files=found.files | {"a.jsonl": content})
    for ending, data in {
        "tar.xz": b"\xfd7zXZ\x00\x00\x04", "tar.gz": b"\x1f\x8b\x08", "zip": b"PK\x03\x04",
        "tar": b"x",
        "zip.txt": b"x",
    }.items():  # fmt: skip
        line = f"run --tasks core --bundle b.{ending}"
        yield file("evaluate", line, "cannot be unpacked", f"b.{ending}", data + b"\0" * 40)


CASES = [
    *fields(), *yaml_files(), *arguments(), *damaged_runs(), *checkpoints(), *texts(), *tasks(),
]  # fmt: skip
