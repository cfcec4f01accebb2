"""Reads texts with transformers: run_tokenizers.py TEXTS.json FOLDER... writes FOLDER/read.json.

Special tokens that are written out in a text are text. It needs transformers, but not torch.
"""

import json
import sys
from pathlib import Path

import transformers


def main(texts_file, *folders):
    texts = json.loads(Path(texts_file).read_text())
    for folder in map(Path, folders):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        options = {"add_special_tokens": False, "split_special_tokens": True}
        ids = [tokenizer(text, **options)["input_ids"] for text in texts]
        found = {"ids": ids, "version": transformers.__version__}
        (folder / "read.json").write_text(json.dumps(found))


main(*sys.argv[1:])
