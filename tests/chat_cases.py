"""Chat templates of the shapes that models ship, a byte-level tokenizer, and conversations."""

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxtrain.data import DataConfig

SPECIAL = (
    *("<|begin|>", "<|eot|>", "<|start_header|>", "<|end_header|>", "<|im_start|>", "<|im_end|>"),
    *("<bos>", "<turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
)
VOCAB = 320  # of the model: some rows that no token has

# As Llama 3, Qwen 2 and 3, Gemma, Zephyr and Mistral write conversations.
TEMPLATES = {
    "llama3": """{{ bos_token }}{% for m in messages %}
{{ '<|start_header|>' + m['role'] + '<|end_header|>\n\n' + m['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}
""",
    "qwen2": """{% for m in messages %}
{% if loop.first and m['role'] != 'system' %}
{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}
{%- endif %}
{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
    "qwen3": """{% set ns = namespace(last=-1) %}
{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{% for m in messages %}
{% set content = m.content.split('</think>')[-1].lstrip('\n') %}
{% if m.role == 'assistant' and loop.index0 > ns.last %}
{% set before = m.content.split('</think>')[0] if '</think>' in m.content else '' %}
{% set thought = before.split('<think>')[-1].strip('\n') %}
{{ '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content + '<|im_end|>\n' }}
{%- else %}
{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}
{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}
""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "mistral": """{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}
""",
    "generation": """{% for m in messages %}
{{ '<|im_start|>' + m['role'] + '\n' }}
{%- if m['role'] == 'assistant' %}
{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
}
SPECIALS = {
    "llama3": {"bos_token": "<|begin|>", "eos_token": "<|eot|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
}
PLAIN = {"bos_token": "<s>", "eos_token": "</s>"}


def said(*contents, system=None):
    """Messages of a user and an assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents)]
    return [{"role": "system", "content": system}] * (system is not None) + messages


CONVERSATIONS = [
    said("Say it  twice.", "The other,  the  other.\n\n  Then the end."),
    said("One?", "Two!", "\u4e2d\u6587, \u00e9t\u00e9?", "\U0001f600 the\n", "And?", "  so  "),
    said("Think.", "<think>\nhm\n</think>\n\nSo.", "Go on.", "<think>\nwell\n</think>\n\nYes."),
]
WITH_SYSTEM = said("Who?", "Me.", system="Be brief.")


def make_tokenizer():
    """tokenizer.json: the 256 bytes, a few merges, SPECIAL; Llama 3's kind of post-processor."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("\u0120", "\u0120"), ("\u010a", "\u010a"), ("o", "the")]
    merges += [("\u0120", "the"), ("othe", "r")]
    vocabulary = {piece: i for i, piece in enumerate([*letters, *(a + b for a, b in merges)])}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    inner.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return inner.to_str()


def write_lines(path, conversations=CONVERSATIONS):
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    return path


def talk_config(folder, records, **changes):
    """A configuration on records as JSON lines; changes: fields of its source."""
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "tokenizer.json").write_text(make_tokenizer())
    source = {"name": "chat", "path": str(file), "template": TEMPLATES["qwen2"], "special": PLAIN}
    tree = {
        "train": source | changes,
        "validation": {"name": "none"},
        "tokenizer": {"name": "huggingface", "path": str(folder / "tokenizer.json")},
        "packing": {"name": "padded"},
        "cache_dir": str(folder / "cache"),
        "prepare_workers": 1,
    }
    return DataConfig.model_validate(tree)
