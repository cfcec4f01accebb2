"""Writes golden_chat.json beside it: what transformers makes of the conversations of chat_cases.py.

In an environment with torch==2.13.0 (the CPU build is enough), transformers==5.23.0 and numpy:
    python tests/interop/make_golden_chat.py

For each template the text and the tokens of each conversation, where the template allows it; for
the one that marks answers itself also their mask. With that mask the loss of a tiny llama over all
answers together, each conversation in a row of its own, and the norm of its gradient.
"""

import json
import sys
import tempfile
from pathlib import Path

import hf_cases
import numpy as np
import tokenizers
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import chat_cases as cases  # noqa: E402

MODEL = hf_cases.COMMON | {"vocab_size": cases.VOCAB, "max_position_embeddings": 512}


def written(tokenizer, name):
    """Text and tokens of each conversation that a template takes; null for the others."""
    found = []
    for messages in [*cases.CONVERSATIONS, cases.WITH_SYSTEM]:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # jinja2's
            found.append(None)
            print(name, "refuses:", error)
            continue
        ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        found.append({"text": text, "ids": ids})
    return found


def loss_of(tokenizer):
    """The config and the shapes of a llama; masks; loss over all answers and gradient norm."""
    config = transformers.CONFIG_MAPPING["llama"](**MODEL)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).train().float()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
    shapes = {name: list(x.shape) for name, x in model.state_dict().items()}
    values = {name: torch.from_numpy(x) for name, x in hf_cases.weights(shapes).items()}
    model.load_state_dict(values)
    # With trimmed offsets transformers finds no token where an answer begins with a space.
    inner = tokenizer.backend_tokenizer
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    masks, batches = [], []
    for messages in cases.CONVERSATIONS:
        one = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        masks.append([int(m) for m in one["assistant_masks"]])
        ids = torch.tensor([one["input_ids"]])
        batches.append((ids, torch.where(torch.tensor([masks[-1]]) > 0, ids, -100)))
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    total = 0.0
    for ids, labels in batches:
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    norm = np.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    facts = {"config": saved, "shapes": shapes, "masks": masks}
    return facts | {"count": count, "loss": total, "gradient_norm": float(norm)}


def main():
    facts = {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(cases.make_tokenizer())
        for name, template in cases.TEMPLATES.items():
            special = cases.SPECIALS.get(name, cases.PLAIN)
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), **special)
            tokenizer.chat_template = template
            facts[name] = written(tokenizer, name)
        facts["llama"] = loss_of(tokenizer)
    print(facts["versions"], facts["llama"]["loss"], facts["llama"]["gradient_norm"])
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in facts.items())
    (HERE / "golden_chat.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
    main()
