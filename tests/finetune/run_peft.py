"""Loads adapter folders with peft, in a Python that has torch; see test_peft.py.

python run_peft.py TOKENS.npy BASE ADAPTER...: each adapter's folder gets logits.npy.
"""

import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers


def main(tokens_file, base, *adapters):
    tokens = torch.from_numpy(np.load(tokens_file)).long()
    for folder in map(Path, adapters):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        model = peft.PeftModel.from_pretrained(model, folder).eval()
        with torch.no_grad():
            np.save(folder / "logits.npy", model(tokens).logits.numpy())


main(*sys.argv[1:])
