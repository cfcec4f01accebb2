"""Writes golden_prefix_tuning.npz beside it: prompts and prefixes as peft makes and
reads them, on the tiny models of tests/interop.

In the environment of make_golden.py:
    PYTHONPATH=tests/interop:tests/finetune python tests/finetune/make_golden_prefix_tuning.py

Each case: adapter_config.json, its tensor (random, float32), and the logits of the model with the
adapter for the prompts of hf_cases; and of a prefix with a projection the weights that train.
"""

import json
import tempfile
from pathlib import Path

import hf_cases as cases
import numpy as np
import peft
import torch
import transformers
from make_golden import base_model
from safetensors.torch import load_file

HERE = Path(__file__).parent
BASES = ("llama", "mistral window", "gpt2", "nanochat", "gemma3", "qwen3")
KINDS = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
TOKENS = 5


def main():
    facts, arrays = {}, {}
    tokens = torch.from_numpy(cases.prompts()[:1]).long()
    cases_of = [(f"{kind} {base}", base, kind, {}) for base in BASES for kind in KINDS]
    more = {"prefix_projection": True, "encoder_hidden_size": 7}
    for name, base, kind, fields in [*cases_of, ("prefix projected", "llama", "prefix", more)]:
        config = KINDS[kind](task_type="CAUSAL_LM", num_virtual_tokens=TOKENS, **fields)
        model = peft.get_peft_model(base_model(base), config).eval()
        torch.manual_seed(0)
        encoder = model.prompt_encoder["default"]
        with torch.no_grad():
            for key, x in encoder.named_parameters():
                x.copy_(torch.randn(x.shape) * 0.5)
                if fields:
                    arrays[f"{name}/weights/{key}"] = x.numpy()
            logits = model(tokens).logits[:, -tokens.shape[1] :].numpy()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            saved = json.loads((Path(folder) / "adapter_config.json").read_text())
            tensors = load_file(Path(folder) / "adapter_model.safetensors")
        assert list(tensors) == ["prompt_embeddings"], list(tensors)
        facts[name] = {"config": saved, "base": base}
        arrays[f"{name}/logits"] = np.float32(logits)
        arrays[f"{name}/tensor"] = tensors["prompt_embeddings"].numpy()
        print(name, np.abs(logits).max(), arrays[f"{name}/tensor"].shape)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    facts["versions"] = f"{versions}, peft {peft.__version__}"
    file = HERE / "golden_prefix_tuning.npz"
    np.savez_compressed(file, facts=json.dumps(facts), **arrays)
    print(facts["versions"], file.stat().st_size)


if __name__ == "__main__":
    main()
