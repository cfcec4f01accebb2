"""nanochat's own train step, for `bench step --peer CHECKOUT`: one JSON line.

    python benchmarks/peer_nanochat.py CHECKOUT DEPTH ROWS TOKENS [fp8]

Model, initial weights, optimizer and float8 layers are the checkout's, set up as in its
base_train.py: bfloat16, torch.compile of the model, vocabulary 32768. Attention is FlashAttention 4
if flash_attn.cute is installed (as a custom op that torch.compile does not trace), else what the
checkout finds. Tokens are random and already on the device; one microbatch per step; medians of
three windows of ten steps, with a synchronization after each window.
"""

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as base_train.py

import torch

VOCAB, HEAD_DIM = 32768, 128
BATCHES, WARM_UP, STEPS, WINDOWS = 16, 5, 10, 3


def flash_attention_4():
    """FlashAttention 4 with the interface that nanochat's model calls."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def sides(window, tokens):
        return (window, 0) if 0 <= window < tokens else (None, None)

    @torch.library.custom_op("peer::fa4_forward", mutates_args=())
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = sides(window, q.shape[1])
        found = _flash_attn_fwd(
            q, k, v, causal=True, window_size_left=left, window_size_right=right, return_lse=True
        )
        return found[0], found[1]

    @forward.register_fake
    def _(q, k, v, window):
        B, T, N, _ = q.shape
        return torch.empty_like(q), q.new_empty((B, N, T), dtype=torch.float32)

    @torch.library.custom_op("peer::fa4_backward", mutates_args=())
    def backward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
        lse: torch.Tensor, window: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        left, right = sides(window, q.shape[1])
        dq, dk, dv = _flash_attn_bwd(
            q, k, v, out, dout, lse, causal=True, window_size_left=left, window_size_right=right
        )[:3]
        return dq, dk, dv

    @backward.register_fake
    def _(q, k, v, out, dout, lse, window):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def keep(ctx, inputs, output):
        q, k, v, ctx.window = inputs
        ctx.save_for_backward(q, k, v, *output)

    def pull(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(q, k, v, out, dout.contiguous(), lse, ctx.window), None

    forward.register_autograd(pull, setup_context=keep)
    return lambda q, k, v, causal, window_size: forward(
        q.contiguous(), k.contiguous(), v.contiguous(), window_size[0]
    )[0]


def build(depth, tokens, fp8, weight_decay=0.28, **rates):
    """nanochat's model and optimizer on the GPU, the name of its attention, and FLOPs per token."""
    from nanochat import flash_attention as checkout
    from nanochat.gpt import GPT, GPTConfig

    attention = "FA3" if checkout.USE_FA3 else "SDPA"
    has = importlib.util.find_spec
    if has("flash_attn") and has("flash_attn.cute"):
        checkout.flash_attn.flash_attn_func, attention = flash_attention_4(), "FA4"
    width = -(-64 * depth // HEAD_DIM) * HEAD_DIM
    heads = width // HEAD_DIM
    config = GPTConfig(
        sequence_len=tokens, vocab_size=VOCAB, n_layer=depth, n_head=heads, n_kv_head=heads,
        n_embd=width,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cuda")
    model.init_weights()
    flops = model.estimate_flops()  # before conversion, since it does not count float8 layers
    if fp8:
        from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training

        large = lambda mod, name: (
            isinstance(mod, torch.nn.Linear)
            and all(n % 16 == 0 and n >= 128 for n in (mod.in_features, mod.out_features))
        )
        recipe = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model, config=recipe, module_filter_fn=large)
    model = torch.compile(model, dynamic=False)
    optimizer = model.setup_optimizer(weight_decay=weight_decay, **rates)
    return model, optimizer, attention, flops


def main():
    checkout, depth, rows, tokens, *more = sys.argv[1:]
    sys.path.insert(0, checkout)
    depth, rows, tokens, fp8 = int(depth), int(rows), int(tokens), more == ["fp8"]
    torch.manual_seed(42)
    torch.set_float32_matmul_precision("high")
    model, optimizer, attention, flops = build(depth, tokens, fp8)
    ids = torch.randint(0, VOCAB, (BATCHES, rows, tokens + 1), device="cuda")

    def step(i):
        batch = ids[i % BATCHES]
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    begin = time.perf_counter()
    step(0)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin
    for i in range(WARM_UP):
        step(i)
    gc.collect()
    gc.disable()  # as in base_train.py, since a collection stops steps for half a second
    times = []
    for _ in range(WINDOWS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(STEPS):
            loss = step(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / STEPS)
    ms = 1e3 * statistics.median(times)
    git = ["git", "-C", checkout, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    metrics = {
        "tokens_per_s": 1e3 * rows * tokens / ms,
        "ms": ms,
        "mfu": flops * rows * tokens / (ms / 1e3) / 989e12,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "compile_s": compile_s,
        "loss": loss.item(),
    }
    name = f"nanochat, {attention}{', FP8' if fp8 else ''}, batch {rows}"
    versions = {"torch": torch.__version__, "nanochat": commit}
    print(json.dumps({"peer": name, "metrics": metrics, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
