"""Reads GGUF files with llama.cpp, in a Python that has llama-cpp-python; see test_gguf.py.

python run_llama_cpp.py TOKENS.npy TEXTS.json FILE...: each file gets FILE.logits.npy, float32
[rows, tokens, vocabulary], and FILE.ids.json, the ids of each text without BOS.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main(tokens_file, texts_file, *files):
    rows, texts = np.load(tokens_file), json.loads(Path(texts_file).read_text())
    for file in files:
        wide = llama_cpp.GGML_TYPE_F32  # keys and values are float16 by default
        model = llama_cpp.Llama(
            file, n_ctx=rows.shape[1], logits_all=True, verbose=False, type_k=wide, type_v=wide
        )
        logits = []
        for row in rows.tolist():
            model.reset()
            model.eval(row)
            logits.append(model.scores[: len(row)].copy())
        np.save(f"{file}.logits.npy", np.stack(logits))
        ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
        Path(f"{file}.ids.json").write_text(json.dumps(ids))


main(*sys.argv[1:])
