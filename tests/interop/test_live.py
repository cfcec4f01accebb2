"""Exported checkpoints, opened by transformers itself.

Needs a Python with torch and transformers: this one, or the one that JAXTRAIN_TORCH_PYTHON names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_cases import CASES, VOCAB, prompts
from test_families import ARRAYS, build, logits_of, write_checkpoint

from jaxtrain.cli import main as interop
from jaxtrain.interop.configs import fitting_family
from jaxtrain.interop.export import export_weights
from jaxtrain.interop.load import load_checkpoint, open_checkpoint
from jaxtrain.runs.saved import load_saved

SCRIPT = Path(__file__).with_name("run_transformers.py")
HERE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
PYTHON = os.environ.get("JAXTRAIN_TORCH_PYTHON", sys.executable if HERE else "")


@pytest.mark.skipif(not PYTHON, reason="needs torch and transformers (JAXTRAIN_TORCH_PYTHON)")
def test_transformers_opens_what_we_export(own_model, tmp_path):
    """Every family, and a model of our own with its tokenizer; no key missing or unexpected."""
    folders = {name: tmp_path / name.replace(" ", "_") for name in CASES}
    for name, folder in folders.items():
        source = open_checkpoint(write_checkpoint(tmp_path / "in" / name, name))
        c, _, specs = build(source)
        family, config = fitting_family(c, VOCAB, source.family.model_type)
        folder.mkdir()
        params = load_checkpoint(source, specs)
        export_weights(folder, family, config, specs, params, np.dtype("float32"), c.head_dim, 9999)
    own = tmp_path / "own"
    assert interop(["export", str(own_model), str(own)]) == 0
    tokens = prompts()
    np.save(tmp_path / "tokens.npy", tokens)
    command = [PYTHON, str(SCRIPT), str(tmp_path / "tokens.npy"), *map(str, folders.values())]
    subprocess.run([*command, str(own)], check=True)
    for name, folder in folders.items():
        np.testing.assert_allclose(
            np.load(folder / "logits.npy"), ARRAYS[f"{name}/logits"], rtol=0, atol=1e-4
        )
    saved = load_saved(own_model)
    logits = logits_of(saved.graphdef, saved.params, tokens)
    np.testing.assert_allclose(np.load(own / "logits.npy"), logits, rtol=0, atol=1e-4)
    seen, text = json.loads((own / "encoded.json").read_text()), "To be, or not to be"
    assert seen["ids"] == saved.tokenizer.encode(text).tolist() and seen["text"] == text
    assert (seen["bos"], seen["eos"]) == (256, 256)
