"""LoRA with Hugging Face's peft and transformers, for `bench finetune`: one JSON line per shape.

    python benchmarks/peer_finetune.py 2048x4 8192x1

The shape of Llama 3 8B with random bfloat16 weights, LoRA r16 on all matrices of the blocks, AdamW,
gradient checkpointing, scaled-dot-product attention (FlashAttention where torch has it).
"""

import gc
import json
import statistics
import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    rope_theta=500000.0, use_cache=False,
)  # fmt: skip


def build(**changes):
    """The model with LoRA adapters, on the GPU."""
    config = LlamaConfig(**(SHAPE | changes), attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=MATRICES))
    return model.train()


def measure(model, length, batch):
    """Median milliseconds of a step, and the peak of allocated bytes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
    tokens = torch.randint(0, SHAPE["vocab_size"], (4, batch, length), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    def step(ids):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = []
    for i in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(tokens[i % 4])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[3:]), torch.cuda.max_memory_allocated()


def main():
    model = build()
    for shape in sys.argv[1:]:
        length, batch = (int(x) for x in shape.split("x"))
        row = {"name": "LoRA r16", "shape": f"T {length}, batch {batch}", "backend": "peft"}
        try:
            ms, peak = measure(model, length, batch)
            row |= {"ms": ms, "tokens_per_s": 1e3 * length * batch / ms, "total_bytes": peak}
        except torch.cuda.OutOfMemoryError:
            row |= {"ms": None, "failed": "out of memory"}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
