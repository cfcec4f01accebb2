"""Writes golden.npz beside it: tiny random models of each family, run by transformers.

In an environment with torch==2.13.0 (the CPU build is enough), transformers==5.23.0 and numpy:
    python tests/interop/make_golden.py

Each case of hf_cases.py: config.json as transformers saves it, name and shape of each tensor,
float32 logits of two rows of random tokens, and the eight tokens that greedy decoding adds to each.
The weights come from a seed (hf_cases.weights) and are not stored.
"""

import json
import tempfile
from pathlib import Path

import hf_cases as cases
import numpy as np
import torch
import transformers
from safetensors import safe_open


def run(model_type, fields):
    """(config.json, shapes, logits, greedy tokens) of one case."""
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        saved = json.loads((Path(folder) / "config.json").read_text())
    values = {name: torch.from_numpy(x) for name, x in cases.weights(shapes).items()}
    wrong = model.load_state_dict(values, strict=False)
    assert not wrong.unexpected_keys, wrong
    assert set(wrong.missing_keys) <= {"lm_head.weight"}, wrong
    model.tie_weights()
    tokens = torch.from_numpy(cases.prompts()).long()
    with torch.no_grad():
        logits = model(tokens).logits.numpy()
        for _ in range(cases.NEW):  # without a cache: nothing to be wrong about
            best = model(tokens).logits[:, -1].argmax(-1)
            tokens = torch.cat([tokens, best[:, None]], 1)
    return saved, shapes, logits, tokens[:, cases.T :].numpy()


def main():
    facts, arrays = {}, {}
    for name, (model_type, fields) in cases.CASES.items():
        saved, shapes, logits, greedy = run(model_type, fields)
        facts[name] = {"config": saved, "shapes": shapes}
        arrays[f"{name}/logits"] = np.float32(logits)
        arrays[f"{name}/greedy"] = np.int32(greedy)
        print(name, np.abs(logits).max(), greedy.tolist())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    facts["versions"] = versions
    np.savez_compressed(cases.HERE / "golden.npz", facts=json.dumps(facts), **arrays)
    print(versions, (cases.HERE / "golden.npz").stat().st_size)


if __name__ == "__main__":
    main()
