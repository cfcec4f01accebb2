"""Writes golden.npz beside it: adapters as peft makes and reads them, on the tiny models of
tests/interop, and 4-bit codes of bitsandbytes.

In an environment with torch==2.13.0 (the CPU build is enough), transformers==5.23.0, peft==0.21.2,
bitsandbytes==0.50.2 and numpy:
    PYTHONPATH=tests/interop python tests/finetune/make_golden.py

Each case of CASES: adapter_config.json, its tensors (random, float32), and the logits of the model
with the adapter for the prompts of hf_cases.
"""

import json
import tempfile
from pathlib import Path

import bitsandbytes
import hf_cases as cases
import numpy as np
import peft
import torch
import transformers
from bitsandbytes import functional as bnb
from safetensors.torch import load_file

HERE = Path(__file__).parent
CASES = {
    "plain": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rslora": ("qwen2", {"r": 4, "lora_alpha": 3, "use_rslora": True}
               | {"target_modules": ["q_proj", "v_proj"]}),
    "dora": ("llama", {"r": 4, "lora_alpha": 6, "use_dora": True}
             | {"target_modules": ["k_proj", "o_proj", "down_proj", "gate_proj"]}),
    "gpt2": ("gpt2", {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True}
             | {"target_modules": ["c_attn", "c_fc", "mlp.c_proj"]}),
    "nanochat": ("nanochat", {"r": 4, "lora_alpha": 8, "use_dora": True}
                 | {"target_modules": ["q_proj", "k_proj", "fc1"]}),
}  # fmt: skip


def base_model(name):
    model_type, fields = cases.CASES[name]
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    facts, _ = cases.golden()
    values = cases.weights(facts[name]["shapes"])
    wrong = model.load_state_dict({k: torch.from_numpy(x) for k, x in values.items()}, strict=False)
    assert not wrong.unexpected_keys, wrong
    model.tie_weights()
    return model


def main():
    facts, arrays = {}, {}
    tokens = torch.from_numpy(cases.prompts()).long()
    for name, (base, fields) in CASES.items():
        config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
        model = peft.get_peft_model(base_model(base), config).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for key, x in model.named_parameters():
                if "lora_A" in key or "lora_B" in key:
                    x.copy_(torch.randn(x.shape) * 0.3)
                elif "magnitude" in key:
                    x.mul_(1 + 0.3 * torch.rand(x.shape))
            logits = model(tokens).logits.numpy()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            saved = json.loads((Path(folder) / "adapter_config.json").read_text())
            tensors = load_file(Path(folder) / "adapter_model.safetensors")
        facts[name] = {"config": saved, "base": base}
        arrays[f"{name}/logits"] = np.float32(logits)
        arrays |= {f"{name}/tensors/{k}": x.numpy() for k, x in tensors.items()}
        print(name, np.abs(logits).max(), sorted(tensors)[:3])
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    versions += f", peft {peft.__version__}"
    w = np.random.default_rng(0).normal(size=(272, 64)).astype(np.float16).astype(np.float32)
    packed, state = bnb.quantize_4bit(
        torch.from_numpy(w), quant_type="nf4", compress_statistics=True
    )
    arrays["nf4/codes"] = packed.numpy().reshape(-1)
    arrays["nf4/scales"], arrays["nf4/steps"] = state.absmax.numpy(), state.state2.absmax.numpy()
    arrays["nf4/mean"], arrays["nf4/values"] = state.offset.numpy(), state.code.numpy()
    arrays["nf4/dynamic"] = state.state2.code.numpy()
    arrays["nf4/whole"] = bnb.dequantize_4bit(packed, state).numpy()[::8]
    versions += f", bitsandbytes {bitsandbytes.__version__}"
    facts["versions"] = versions
    np.savez_compressed(HERE / "golden.npz", facts=json.dumps(facts), **arrays)
    print(versions, (HERE / "golden.npz").stat().st_size)


if __name__ == "__main__":
    main()
