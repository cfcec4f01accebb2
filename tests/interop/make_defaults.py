"""Writes defaults.json beside it: what transformers reads from a config.json that says nothing.

In an environment with transformers==5.23.0:
    python tests/interop/make_defaults.py

Of each family: `fields`, the defaults of the class, and `whole`, the
configuration that they come to, as transformers saves it with every key.
"""

import dataclasses
import json
from pathlib import Path

import transformers

FAMILIES = [
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2",
    "nanochat",
]  # fmt: skip


def of(model_type):
    config = transformers.CONFIG_MAPPING[model_type]
    own = config.__annotations__.keys() | {"tie_word_embeddings"}
    fields = {f.name: f.default for f in dataclasses.fields(config) if f.name in own}
    return {"fields": fields, "whole": config().to_dict()}


def main():
    facts = {model_type: of(model_type) for model_type in FAMILIES}
    facts["versions"] = f"transformers {transformers.__version__}"
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    Path(__file__).with_name("defaults.json").write_text(text)


if __name__ == "__main__":
    main()
