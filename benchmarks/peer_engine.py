"""Text generation by other stacks, for `bench engine`: one JSON line per batch size.

    python benchmarks/peer_engine.py transformers '{"batches": [1, 32], "prompt": 512, "new": 256,
        "many": 32, "repeats": 3, "model": {"hidden_size": 768, ...}}'
    python benchmarks/peer_engine.py nanochat '{..., "model": {"n_layer": 12, ...},
        "checkout": "PATH"}'

model: arguments of transformers' LlamaConfig, or of nanochat's GPTConfig. transformers:
LlamaForCausalLM in bfloat16 with a static cache. Prefill is eager; a decode step, including argmax,
is compiled by torch.compile(mode="reduce-overhead"), which replays CUDA graphs. nanochat: model and
Engine of the checkout, unchanged. Weights and prompts are random, decoding is greedy, and there is
no stop token. Compile time is measured separately; figures are medians of the repeats. Without a
GPU everything is float32, and decoding is eager if nothing compiles.
"""

import gc
import importlib.util
import inspect
import itertools
import json
import statistics
import subprocess
import sys
import time
import types

import torch

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
WARM_UP = 5  # tokens, in which a step is compiled, recorded and replayed


def tidy():
    """Free the memory of the previous batch, and reset the peak."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Transformers:
    """LlamaForCausalLM with random weights."""

    shares_a_prompt = False

    def __init__(self, settings):
        import transformers

        config = transformers.LlamaConfig(
            **settings["model"], attn_implementation="sdpa", use_cache=True
        )
        torch.set_default_dtype(DTYPE)
        with torch.device(DEVICE):
            self.model = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        self.cache_class, self.vocab_size = transformers.StaticCache, config.vocab_size
        self.length = settings["prompt"] + settings["new"]
        self.ways = "torch.compile, CUDA graphs" if CUDA else "torch.compile"
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        inputs = inspect.signature(self.model.forward).parameters
        self.positioned = "cache_position" in inputs  # else the cache counts its tokens

    @property
    def name(self):
        return f"transformers, {self.ways}"

    def prepare(self, batch):
        """Make a cache for `batch` sequences, and the function that decodes with it."""
        self.cache = self.best = self.step = None
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        tidy()
        every = {
            "config": self.model.config, "max_batch_size": batch, "max_cache_len": self.length,
            "device": DEVICE, "dtype": DTYPE,
        }  # fmt: skip
        known = inspect.signature(self.cache_class.__init__).parameters
        cache = self.cache_class(**{key: x for key, x in every.items() if key in known})

        def best(ids_BT, position_T):
            more = {"cache_position": position_T} if self.positioned else {}
            found = self.model(
                input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1, **more
            )
            return found.logits[:, -1].argmax(-1, keepdim=True)

        self.cache, self.best = cache, best
        self.step = torch.compile(best, mode="reduce-overhead", dynamic=False)

    @torch.no_grad()
    def tokens(self, prompts_BT, new):
        """Yields each row's first token, then each row's tokens."""
        T = prompts_BT.shape[1]
        self.cache.reset()
        found = [self.best(prompts_BT, torch.arange(T, device=DEVICE))]
        yield found[0].tolist()
        position = torch.full((1,), T, device=DEVICE)
        for _ in range(new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(self.decode(found[-1], position).clone())
            position += 1
        yield torch.cat(found, dim=1).tolist()

    def decode(self, ids_B1, position_1):
        try:
            return self.step(ids_B1, position_1)
        except Exception as error:
            if CUDA or self.step is self.best:
                raise
            print(f"  not compiled: {type(error).__name__}", file=sys.stderr)
            self.step, self.ways = self.best, "eager"
            return self.step(ids_B1, position_1)


class Nanochat:
    """nanochat's Engine with its model and random weights."""

    shares_a_prompt = True

    def __init__(self, settings):
        sys.path.insert(0, settings["checkout"])
        for package in ("rustbpe", "tiktoken"):  # imported by its tokenizer, which is not used here
            if importlib.util.find_spec(package) is None:
                sys.modules[package] = types.ModuleType(package)
        from nanochat import flash_attention
        from nanochat.engine import Engine
        from nanochat.gpt import GPT, GPTConfig

        config = GPTConfig(**settings["model"])
        with torch.device("meta"):
            model = GPT(config)
        model.to_empty(device=DEVICE)
        model.init_weights()
        self.model, self.vocab_size = model.eval(), config.vocab_size
        no_token = types.SimpleNamespace(
            encode_special=lambda name: -1, get_bos_token_id=lambda: -1
        )
        self.engine = Engine(self.model, no_token)
        self.name = f"nanochat, {'FA3' if flash_attention.USE_FA3 else 'SDPA'}"
        git = ["git", f"--git-dir={settings['checkout']}/.git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        self.versions = {"torch": torch.__version__, "nanochat": commit or "unknown"}

    def prepare(self, batch):
        """Free memory. Nothing is compiled, and the cache is made with the prompts."""
        tidy()

    def tokens(self, prompts_BT, new):
        """Yields each row's first token, then each row's tokens. All rows use the first prompt."""
        prompt, batch = prompts_BT[0].tolist(), len(prompts_BT)
        columns = self.engine.generate(prompt, batch, max_tokens=new, temperature=0.0)
        found = [next(columns)[0]]
        yield [[token] for token in found[0]]
        # The generator is not exhausted: it would compute logits of one more step.
        found += [column for column, _ in itertools.islice(columns, new - 1)]
        yield [list(row) for row in zip(*found)]


def seconds(peer, prompts_BT, new):
    """Seconds to the first token, and to the last one."""
    if CUDA:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    times = [time.perf_counter() - begin for _ in peer.tokens(prompts_BT, new)]
    return times[0], times[-1]


def prompts_of(peer, batch, tokens):
    return torch.randint(0, peer.vocab_size, (batch, tokens), device=DEVICE)


def rate(peer, batch, s):
    """A row: tokens/s of a batch of requests."""
    peer.prepare(batch)
    begin = time.perf_counter()
    seconds(peer, prompts_of(peer, batch, s["prompt"]), min(WARM_UP, s["new"]))
    compiling = time.perf_counter() - begin
    runs = [
        seconds(peer, prompts_of(peer, batch, s["prompt"]), s["new"]) for _ in range(s["repeats"])
    ]
    total = statistics.median(last for _, last in runs)
    each = statistics.median((last - first) / max(s["new"] - 1, 1) for first, last in runs)
    return {
        "tokens_per_s": batch * s["new"] / total,
        "ms": 1e3 * each,
        "decode_tokens_per_s": batch / each,
        "first_token_ms": 1e3 * statistics.median(first for first, _ in runs),
        "compile_s": compiling,
    }


def first_tokens(peer, s):
    """A row: milliseconds to the first token of a lone request, and of many concurrent ones."""

    def ms(batch):
        peer.prepare(batch)
        times = [
            seconds(peer, prompts_of(peer, batch, s["prompt"]), 1)[0]
            for _ in range(1 + s["repeats"])
        ]
        return 1e3 * statistics.median(times[1:])

    found = {"alone_ms": ms(1)}
    if not peer.shares_a_prompt:
        all_ms = ms(s["many"])
        found |= {"median_ms": all_ms, "last_ms": all_ms}
    return found


def measured(measure, *arguments):
    """The figures of a measurement with peak memory; `failed` if it runs out of memory."""
    try:
        found = measure(*arguments)
    except torch.OutOfMemoryError:
        return {"ms": None, "failed": "out of memory"}
    return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if CUDA else {})


def graph_skips():
    """How often torch.compile has skipped CUDA graphs."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def main():
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    peer = {"transformers": Transformers, "nanochat": Nanochat}[kind](settings)
    matrices = [m.weight for m in peer.model.modules() if isinstance(m, torch.nn.Linear)]
    facts = {
        "weight_bytes": sum(w.nbytes for w in matrices),
        "matmul_parameters": sum(w.numel() for w in matrices),
        "versions": peer.versions,
    }

    def say(row, found):
        label = {"backend": peer.name if CUDA else f"{peer.name}, CPU"}
        print(json.dumps(row | label | found | facts), flush=True)

    for batch in settings["batches"]:
        found = measured(rate, peer, batch, settings)
        found |= {"graph_skips": graph_skips()} if CUDA and kind == "transformers" else {}
        say({"name": "engine", "shape": f"{batch} x ({settings['prompt']} + {settings['new']})"},
            found)  # fmt: skip
    row = {"name": "first_token", "shape": f"{settings['many']} x {settings['prompt']}"}
    say(row, measured(first_tokens, peer, settings))


if __name__ == "__main__":
    main()
