"""Reads checkpoint folders with transformers, in a Python that has torch; see test_live.py.

python run_transformers.py TOKENS.npy FOLDER...: each folder gets logits.npy, and encoded.json if it
has a tokenizer.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TEXT = "To be, or not to be"


def main(tokens_file, *folders):
    tokens = torch.from_numpy(np.load(tokens_file)).long()
    for folder in map(Path, folders):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys")), report
        with torch.no_grad():
            np.save(folder / "logits.npy", model.eval()(tokens).logits.numpy())
        if (folder / "tokenizer.json").exists():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            ids = tokenizer(TEXT)["input_ids"]
            facts = {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}
            facts |= {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
            (folder / "encoded.json").write_text(json.dumps(facts))


main(*sys.argv[1:])
