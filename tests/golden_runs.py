"""Golden runs: what must stay bit-identical while code is renamed and moved.

    uv run python tests/golden_runs.py record tests/golden_runs.json
    uv run python tests/golden_runs.py compare tests/golden_runs.json [--only NAME ...]

Each case is one short training run on a CPU. Recorded are its losses and gradient norms, a CRC-32
of each tensor that it saves, and the text that it samples. A name may be a pattern, as 'optim/*'.

`programs/*` are the training steps of shipped configs at their real size, lowered for an H200
without one: the SHA-256 of their StableHLO and of their kernels' code. Names of functions and
places in files are left out, so a rename or a move changes no hash.

The last bits of a run depend on the CPU's instructions and on the version of jax. Both are in the
record, and another CPU skips the runs. Programs depend on the version of jax alone.
"""

import argparse
import contextlib
import difflib
import fnmatch
import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).resolve().parent
RECORD = HERE / "golden_runs.json"
PROGRAMS = HERE / "golden_programs"  # the normalised texts, to show what differs
SKIPPED = 3  # exit code: nothing differs, but cases were left out
DEVICES = (1, 8)  # a process each


def product():
    """All that this file imports of the product, in one place: a move costs a line here."""
    from jaxtrain_kernels.dispatch import on_target

    from jaxtrain.config import find_config, load_config
    from jaxtrain.estimate import workload
    from jaxtrain.train.loop import train
    from jaxtrain.train.step import make_step

    return SimpleNamespace(
        find_config=find_config, load_config=load_config, train=train,
        on_target=on_target, workload=workload, make_step=make_step,
    )  # fmt: skip


# ---- the cases: all configuration keys are here ------------------------------------------------

LOOP = {
    "train.sequence_length": 32, "train.batch_size": 8, "train.steps": 2, "train.fit": False,
    "eval.tokens": 256, "eval.batch_size": 64, "eval.every": None, "sample.every": None,
    "sample.prompts": [], "checkpoint.every": None, "metrics.every": 1,
    "metrics.tensorboard": False,
}  # fmt: skip
BYTES = {"data.tokenizer.name": "bytes"}
TEXT = {"data.train.name": "text", "data.train.path": "tinyshakespeare"}
GPT = {"model.depth": 2, "model.width": 32, "model.head_dim": 8, "model.hidden": 48}
LLAMA = GPT | {
    "model.kv_heads": 2, "model.ffn": "swiglu", "model.qk_norm": False,
    "model.window_pattern": "L", "model.norm_gain": True, "model.embed_norm": False,
    "model.tied_head": True, "model.logit_softcap": None, "model.value_embeddings": False,
    "model.residual_scales": False, "model.smear": False, "model.backout": False,
    "model.init": "gpt2",
}  # fmt: skip
GPT2 = LLAMA | {
    "model.kv_heads": 4, "model.ffn": "gelu", "model.norm": "layer",
    "model.position_embedding": "learned", "model.qkv_bias": True,
    "model.out_bias": True, "model.ffn_bias": True,
}  # fmt: skip
MOE = GPT | {"model.moe": {"experts": 4, "hidden": 32, "every": 2, "aux_loss": 0.01}}
FP8 = GPT | {"model.width": 128, "model.hidden": 128, "model.head_dim": 32}
MUON = {"optim.schedule.warmup_steps": 0, "optim.momentum_warmup_steps": 2}
ADAMW = {"optim.name": "adamw", "optim.schedule.warmup_steps": 0}
THREE = {"train.steps": 3}
CHAT = {
    "data.train.name": "chat", "data.train.path": "CHAT", "data.validation.fraction": 0.3,
    "train.sequence_length": 128,
}  # fmt: skip
PAIRS = {
    "data.train.name": "preference", "data.train.path": "PAIRS", "data.validation.fraction": 0.3,
    "train.sequence_length": 128,
}  # fmt: skip
DOCUMENTS = {
    "data.train.document": "paragraph", "data.validation.name": "documents",
    "data.validation.fraction": 0.1,
}  # fmt: skip
PACKED = DOCUMENTS | {"data.packing.name": "best_fit", "model.document_mask": True}
MARKS = {
    "data.tokenizer.name": "sentencepiece", "data.tokenizer.vocab_size": 384,
    "data.tokenizer.special_tokens": ["<mask>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
}  # fmt: skip
TUNED = {"train.init_from": "RUN:start/llama"}  # with the model and the tokenizer of that run
TUNED_BIASES = {"train.init_from": "RUN:start/gpt2"}
RATE = {"optim.learning_rate": 0.01}  # of a few steps
LORA = TUNED | RATE | {"finetune.name": "lora", "finetune.rank": 2}
PREFERENCE = TUNED | PAIRS | RATE | ADAMW

# name -> (config that it begins with, devices, changes)
CASES: dict[str, tuple[str | None, int, dict[str, object]]] = {}


def add(name, changes, devices=1, config=None):
    CASES[name] = (config, devices, changes)


def pretrain(name, *changes, devices=1):
    """A new model of bytes."""
    merged = LOOP | BYTES | GPT | {k: v for part in changes for k, v in part.items()}
    add(name, (MUON if "optim.name" not in merged else {}) | merged, devices)


def tune(name, *changes, devices=1):
    """From a model of an earlier case, with its tokenizer."""
    merged = LOOP | {k: v for part in changes for k, v in part.items()}
    add(name, TEXT | merged if "data.train.name" not in merged else merged, devices)


# The quickstart as it is shipped, but for its length; both have all of the GPT's switches.
add("quickstart", {
    "train.steps": 20, "eval.every": None, "sample.every": None, "sample.tokens": 16,
    "sample.temperature": 0, "checkpoint.every": None, "metrics.every": 1,
    "metrics.tensorboard": False,
}, config="quickstart")  # fmt: skip
pretrain("start/llama", LLAMA, ADAMW, RATE)
pretrain("start/gpt2", GPT2, ADAMW, RATE)

SHIPPED = {
    "continue": TUNED | TEXT | DOCUMENTS,
    "dpo_small": TUNED | PAIRS,
    "gpt_d12": GPT | TEXT | BYTES | DOCUMENTS | {"train.device_batch_size": 4},
    "gpt_d24": GPT | TEXT | BYTES | DOCUMENTS | {"train.device_batch_size": 4},
    "llama_1b_lora_t4": TUNED | CHAT | LLAMA | {
        "model.vocab_multiple": 64, "model.rope_base": 100_000.0, "model.norm_eps": 1e-6,
        "train.precision": "auto",
    },
    "llama_8b": GPT | {"model.kv_heads": 2} | TEXT | BYTES | DOCUMENTS,
    "llama_tiny": GPT | {"model.kv_heads": 2} | BYTES,
    "lora_chat": TUNED | CHAT,
    "moe_tiny": GPT | BYTES,
    "quickstart": GPT | BYTES,
    "sft_small": TUNED | CHAT,
}  # fmt: skip
for _name, _changes in SHIPPED.items():
    add(f"config/{_name}", LOOP | _changes, config=_name)

for _name, _changes in {
    "gpt_samples": {"sample.prompts": ["", "To be"], "sample.tokens": 8, "sample.temperature": 0},
    "gpt_four_layers": {"model.depth": 4, "model.short_window": 5, "model.window_pattern": "SL"},
    "grouped_queries": {"model.kv_heads": 2},
    "geglu_post_norm": {"model.ffn": "geglu", "model.post_norm": True, "model.norm_gain": True,
                        "model.attention_softcap": 20.0, "model.qk_norm_gain": True},
    "document_mask": PACKED,
    "padded": DOCUMENTS | {"data.train.document": "line", "data.packing.name": "padded",
                           "model.document_mask": True, "train.sequence_length": 128},
    "scan_layers": {"model.depth": 4, "model.scan_layers": True},
    "remat_block": {"model.remat": "block"},
    "remat_dots": {"model.remat": "dots"},
    "remat_attention": {"model.remat": "attention"},
    "remat_ffn": {"model.remat": "ffn"},
    "ffn_tiles": {"model.ffn_tiles": 2},
    "bfloat16_embeddings": {"model.embedding_dtype": "bfloat16"},
    "rope_scaling": {"model.rope_scaling": {"name": "linear", "factor": 2.0}},
    "moe": MOE,
    "moe_softmax_shared": {"model.moe": {
        "experts": 4, "hidden": 32, "shared_experts": 1, "score_function": "softmax",
        "balance_bias": False}},
    "fp8_blocks": FP8 | {"model.fp8": "blocks"},
    "fp8_all": FP8 | {"model.fp8": "all"},
    "fp8_history": FP8 | {"model.fp8": "blocks", "model.fp8_history": 2} | THREE,
    **{f"init_{_init}": {"model.init": _init} for _init in ("gpt2", "depth_scaled", "orthogonal")},
    "init_mup": LLAMA | {"model.init": "mup", "model.tied_head": False, "model.base_width": 16},
    **{f"init_{_init}": {"model.init": _init, "model.block_norm": False}
       for _init in ("fixup", "tfixup", "rezero", "skipinit")},
}.items():  # fmt: skip
    pretrain(f"model/{_name}", ADAMW if _name != "init_mup" else MUON, _changes)

for _name, _changes in {
    "accumulation": {"train.device_batch_size": 2},
    "accumulation_moe": MOE | {"train.device_batch_size": 2},
    "bfloat16": {"train.precision": "bfloat16"},
    "float16": {"train.precision": "float16"} | LLAMA | ADAMW,
    "z_loss": {"train.z_loss": 1e-4},
    "clip_norm": {"optim.clip_norm": 0.1},
    "skip_nonfinite": {"train.on_nonfinite": "skip"},
    "loss_spike": {"train.loss_spike": {"action": "skip"}} | THREE,
    "masking": MARKS | {"data.augment.name": "masking"},
    "span_corruption": MARKS | PACKED | {"data.augment.name": "span_corruption"},
    "fill_in_the_middle": MARKS | PACKED | {"data.augment.name": "fill_in_the_middle"},
    "subword_splits": MARKS | {"data.augment.name": "subword_splits"},
    "stages": THREE | {"data.stages": [{"tokens": 256, "sequence_length": 16}, {}]},
}.items():
    pretrain(f"train/{_name}", ADAMW if "accum" not in _name else MUON, _changes)

for _name in ("muon", "adamw", "adafactor", "adamw8bit", "lamb", "lars", "lion", "sgd", "soap",
              "schedule_free"):  # fmt: skip
    pretrain(f"optim/{_name}", THREE, {"optim.name": _name, "optim.schedule.warmup_steps": 1})
for _name, _changes in {
    "muon_plain": {"optim.normuon": False, "optim.cautious_decay": False, "optim.nesterov": False,
                   "optim.orthogonalize": "newton_schulz", "optim.gram_newton_schulz": False},
    "muon_equilibrate": {"optim.equilibrate": True, "optim.renormalize": True},
    "adamw_bfloat16_states": {"optim.name": "adamw", "optim.state_dtype": "bfloat16"},
    "adamw8bit_blocks": {"optim.name": "adamw8bit", "optim.min_size": 16, "optim.block_size": 32},
    "soap_often": {"optim.name": "soap", "optim.precondition_frequency": 1},
    "adamw_groups": {"optim.name": "adamw", "optim.multipliers": {"embedding": 0.5},
                     "optim.decay_multipliers": {"head": 0.0},
                     "optim.batch_scaling.rule": "sqrt"},
    **{f"schedule_{_schedule}": LLAMA | {"optim.name": "sgd", "optim.schedule.name": _schedule,
                                         "model.depth": 1}
       for _schedule in ("constant", "linear", "cosine", "onecycle", "inverse_sqrt")},
}.items():  # fmt: skip
    pretrain(f"optim/{_name}", THREE, _changes)

for _name, _changes in {
    "full": TUNED | ADAMW | RATE,
    "lora": LORA,
    "lora_dora": LORA | {"finetune.dora": True},
    "lora_plus": LORA | {"finetune.lora_plus_ratio": 16},
    "lora_rslora_targets": LORA | {"finetune.rslora": True, "finetune.targets": ["q", "down"]},
    "lora_nf4": LORA | {"finetune.base_quantization": "nf4"},
    "lora_int8": LORA | {"finetune.base_quantization": "int8"},
    "lora_from_adapter": LORA | {"finetune.init_adapter": "RUN:finetune/lora"},
    "lora_chat": LORA | CHAT,
    "freeze": TUNED | RATE | {"finetune.name": "freeze", "finetune.trainable": ["ffn", "gain"],
                              "finetune.last_layers": 1},
    "freeze_int8": TUNED | RATE | {"finetune.name": "freeze",
                                   "finetune.trainable": ["embed", "gain"],
                                   "finetune.base_quantization": "int8"},
    "bitfit": TUNED_BIASES | RATE | {"finetune.name": "bitfit"},
    "ia3": TUNED | RATE | {"finetune.name": "ia3"},
    "adapter": TUNED | RATE | {"finetune.name": "adapter", "finetune.width": 4},
    "prompt": TUNED | RATE | {"finetune.name": "prompt", "finetune.virtual_tokens": 3},
    "prefix": TUNED | RATE | {"finetune.name": "prefix", "finetune.virtual_tokens": 3},
    "prefix_projection": TUNED | RATE | {"finetune.name": "prefix", "finetune.virtual_tokens": 3,
                                         "finetune.projection": 5},
}.items():  # fmt: skip
    tune(f"finetune/{_name}", THREE, _changes)

for _name, _changes in {
    "dpo": {"objective.name": "dpo"},
    "dpo_smoothed": {"objective.name": "dpo", "objective.label_smoothing": 0.1},
    "dpo_lora": {"objective.name": "dpo", "finetune.name": "lora", "finetune.rank": 2},
    "dpo_accumulated": {"objective.name": "dpo", "train.device_batch_size": 4},
    "ipo": {"objective.name": "ipo"},
    "ipo_sums": {"objective.name": "ipo", "objective.per_token": False},
    "orpo": {"objective.name": "orpo"},
    "kto": {"objective.name": "kto", "data.train.path": "JUDGED"},
}.items():
    tune(f"objective/{_name}", PREFERENCE, THREE, _changes)

EIGHT = {"train.batch_size": 16}
for _name, _changes in {
    "data": {},
    "fsdp": {"mesh.data": 4, "mesh.fsdp": 2},
    "fsdp_zero1": {"mesh.data": 1, "mesh.fsdp": 8, "mesh.zero": 1},
    "fsdp_zero2": {"mesh.data": 1, "mesh.fsdp": 8, "mesh.zero": 2},
    "fsdp_accumulated": {"mesh.data": 2, "mesh.fsdp": 4, "mesh.zero": 1,
                         "train.device_batch_size": 1},
    "fsdp_llama": LLAMA | ADAMW | {"mesh.data": 2, "mesh.fsdp": 4},
    "tensor": LLAMA | {"mesh.data": 4, "mesh.tensor": 2},
    "context": LLAMA | {"mesh.data": 4, "mesh.context": 2},
    "expert": MOE | {"mesh.data": 4, "mesh.expert": 2},
    "pipeline": LLAMA | {"mesh.data": 4, "mesh.pipeline": 2, "train.device_batch_size": 2},
    "pipeline_repeats": LLAMA | {"mesh.data": 4, "mesh.pipeline": 2, "model.depth": 4,
                                 "mesh.pipeline_repeats": 2, "train.device_batch_size": 2},
    "pipeline_context_expert": LLAMA | MOE | {
        "mesh.data": 1, "mesh.pipeline": 2, "mesh.context": 2, "mesh.expert": 2,
        "model.moe": {"experts": 4, "hidden": 32}, "train.device_batch_size": 4},
    "fsdp_adamw8bit": {"mesh.data": 1, "mesh.fsdp": 8, "optim.name": "adamw8bit",
                       "optim.min_size": 16, "optim.block_size": 32},
    "diloco": THREE | {"train.local_sgd": {"name": "diloco", "every": 2}},
    "diloco_int8": THREE | {"train.local_sgd": {"name": "diloco", "every": 2, "compress": "int8"}},
    "diloco_fp8": THREE | {"train.local_sgd": {"name": "diloco", "every": 2, "compress": "fp8"}},
    "diloco_fragments": THREE | {"train.local_sgd": {"name": "diloco", "every": 2, "fragments": 2},
                                 "mesh.data": 4, "mesh.fsdp": 2},
    "gossip": THREE | {"train.local_sgd": {"name": "gossip"}},
}.items():  # fmt: skip
    pretrain(f"mesh/{_name}", EIGHT, _changes, devices=8)

# name -> (config, changes): lowered at its real size, on one device
LOWERED = {
    "programs/gpt_d12": ("gpt_d12", {}),
    "programs/gpt_d24": ("gpt_d24", {}),
}
H200 = ("cuda", (9, 0), "NVIDIA H200")

# Of the rows of metrics.jsonl: kind -> values.
VALUES = {
    "train": ("loss", "grad_norm", "lr", "loss_scale", "skipped", "reward_margin", "divergence"),
    "validation": ("loss", "bits_per_byte"),
}
METRICS, MODEL, SAMPLES = "metrics.jsonl", "model", "samples"


def conversation(i):
    asked = {"role": "user", "content": f"What is {i} and {i}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"It is {2 * i}."}]}


def write_inputs(folder):
    """The files that stand for words in capitals in the cases."""
    pairs = [{"prompt": f"Is {i} a number?", "chosen": "yes", "rejected": "no"} for i in range(24)]
    judged = [
        {"prompt": f"Is {i} a number?", "completion": "yes" if good else "no", "label": good}
        for i in range(24)
        for good in (True, False)
    ]
    files = {"CHAT": map(conversation, range(40)), "PAIRS": pairs, "JUDGED": judged}
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


# ---- one run -----------------------------------------------------------------------------------


def arguments(changes, name, folder):
    """`key.path=value` arguments of a case in a folder."""

    def value(given):
        if given in ("CHAT", "PAIRS", "JUDGED"):
            return str(folder / f"{given}.jsonl")
        if isinstance(given, str) and given.startswith("RUN:"):
            return str(folder / given.removeprefix("RUN:"))
        return given

    place = {"run.directory": str(folder), "run.name": name, "data.cache_dir": str(folder / "data")}
    return [f"{key}={json.dumps(value(given))}" for key, given in (place | changes).items()]


def run_case(name, folder):
    """What is recorded of a case."""
    p = product()
    config, _, changes = CASES[name]
    path = p.find_config(config) if config else None
    p.train(p.load_config(path, arguments(changes, name, folder)))
    return found_in(folder / name)


def found_in(run_dir):
    rows = [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]
    found = {
        f"{kind} {value}": [row[value] for row in rows if row["kind"] == kind and value in row]
        for kind, values in VALUES.items()
        for value in values
    }
    found = {key: values for key, values in found.items() if values}
    for file in sorted((run_dir / MODEL).rglob("*.safetensors")):
        key = file.relative_to(run_dir / MODEL).as_posix()
        found[key], found[f"{key} sum of |x|"] = checksums(file)
    for file in sorted((run_dir / SAMPLES).glob("*")):
        found[f"sample {file.name}"] = file.read_text()
    return found


def checksums(file):
    """({tensor: CRC-32}, the sum of magnitudes of those in float32)."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    crcs, total = {}, 0.0
    for name, tensor in sorted(header.items()):
        begin, end = tensor["data_offsets"]
        part = data[start + begin : start + end]
        crcs[name] = f"{zlib.crc32(part):08x}"
        if tensor["dtype"] == "F32":
            total += float(np.abs(np.frombuffer(part, "<f4").astype(np.float64)).sum())
    return crcs, total


# ---- one program -------------------------------------------------------------------------------


def lower_program(name):
    """The normalised text of a training step as an H200 gets it; only shapes, no arrays."""
    import jax

    p = product()
    config, changes = LOWERED[name]
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    with p.on_target(*H200):
        w = p.workload.load_workload(config, overrides, jax.devices()[:1], accumulated=True)
        given = p.workload.abstract_state(w), p.workload.batch_shapes(w)
        given = *given, p.workload.new_hyperparams(w), p.workload.abstract_frozen(w)
        with jax.set_mesh(w.mesh):
            traced = p.make_step(w.spec, w.mesh).trace(*given)
            lowered = traced.lower(lowering_platforms=("cuda",))
    return normalized(lowered)


def normalized(lowered):
    """StableHLO without names and places; kernels' code as hashes of their text without them."""
    from jaxlib.mlir import ir

    kernels = []

    def visit(op):
        attributes = op.attributes
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in attributes:
            config = attributes["mhlo.backend_config"]
            if isinstance(config, ir.DictAttr) and "module" in config:
                kernels.append(kernel_hash(config["module"].value_bytes))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    left = iter(kernels)
    text = re.sub(
        r'kernel_hash = "[^"]*", module = "[^"]*"', lambda _: f"kernel {next(left)}",
        lowered.as_text(),
    )  # fmt: skip
    assert next(left, None) is None, "a kernel's code stands elsewhere in the text now"
    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    text = re.sub(r"^module @\S+", "module @step", text)
    names = re.findall(r"func\.func (?:private|public) @([\w.$-]+)", text)
    short = {name: f"f{i}" for i, name in enumerate(names)}
    return re.sub(r"@([\w.$-]+)", lambda m: "@" + short.get(m[1], m[1]), text)


def kernel_hash(bytecode):
    """SHA-256 of a Mosaic kernel's code, which is MLIR's bytecode with places in our files."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        text = module.operation.get_asm(enable_debug_info=False)
    text = re.sub(r'mosaic_gpu\.dump_basename = "[^"]*"', "", text)  # has a counter in it
    names = re.findall(r"^module @([\w.$-]+)", text, re.M)
    names += re.findall(r'\bsym_name = "([^"]*)"', text)
    short = {name: f"k{i}" for i, name in enumerate(dict.fromkeys(names))}
    named = lambda m: m[1] + short.get(m[2], m[2])
    text = re.sub(r"(@)([\w.$-]+)", named, text)
    text = re.sub(r'(\bsym_name = ")([^"]*)', named, text)
    return hashlib.sha256(text.encode()).hexdigest()


def operations(text):
    """How often each operation with these types occurs, whatever values it is of."""
    lines = (re.sub(r"[%@][\w#:]+", "_", line).strip() for line in text.splitlines())
    return Counter(line for line in lines if not line.startswith(("func.func", "return")))


def digest(text):
    functions = re.split(r"^  (?=func\.func)", text, flags=re.M)
    sha = lambda part: hashlib.sha256(part.encode()).hexdigest()
    bag = json.dumps(sorted(operations(text).items()))
    return {
        "text": sha(text),
        "operations in any order": sha(bag),
        "functions": [sha(part)[:16] for part in functions],
    }


def text_file(name):
    return PROGRAMS / f"{name.split('/')[-1]}.mlir.xz"


def show_difference(name, now, lines=24):
    """The first lines that differ from the recorded text."""
    if not text_file(name).is_file():
        return
    before = lzma.decompress(text_file(name).read_bytes()).decode()
    plain = lambda text: [re.sub(r"%[\w#:]+", "%", line) for line in text.splitlines()]
    found = difflib.unified_diff(plain(before), plain(now), "recorded", "now", n=0, lineterm="")
    for line, _ in zip(found, range(lines)):
        print("    " + line[:200])


# ---- all of them -------------------------------------------------------------------------------


def fingerprint():
    """What the last bits depend on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.M)
    flags = re.search(r"^flags\s*: (.*)$", text, re.M)
    return {
        "cpu": model[1] if model else "unknown",
        "instructions": hashlib.sha256((flags[1] if flags else "").encode()).hexdigest()[:12],
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    }


def needed(names):
    """With the cases that others start from, in the order of the table."""
    wanted = set(names)
    for name in reversed(CASES):
        if name in wanted:
            given = (v for v in CASES[name][2].values() if isinstance(v, str))
            wanted |= {v.removeprefix("RUN:") for v in given if v.startswith("RUN:")}
    return [name for name in CASES if name in wanted]


def environment(devices):
    """The same programs on every machine; small ones take longer to optimise than to run."""
    import jax

    flags = "--xla_cpu_multi_thread_eigen=false --xla_cpu_opt_preset=FAST_COMPILE"
    if jax.__version__.startswith("0.11."):  # a process ends at a flag that its XLA does not know
        flags += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    return os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": flags,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "MPLBACKEND": "agg",
        "JAX_COMPILATION_CACHE_DIR": str(Path.home() / ".cache" / "jaxtrain" / "golden"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }  # fmt: skip


def run_all(names):
    """(name, result, seconds) of each case and program, as they come."""
    by_devices = {
        devices: [name for name in needed(names) if CASES[name][1] == devices]
        for devices in DEVICES
    }
    by_devices[1] = [name for name in LOWERED if name in names] + by_devices[1]
    for devices, chosen in by_devices.items():
        if not chosen:
            continue
        command = [sys.executable, __file__, "work", *chosen]
        with subprocess.Popen(
            command, env=environment(devices), stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        ) as worker:
            for line in worker.stdout or ():
                name, result, seconds = json.loads(line)
                if name in names:
                    yield name, result, seconds
        if worker.returncode:
            raise SystemExit(f"a process of {devices} devices ended with {worker.returncode}")


def work(names):
    """In a process of its own: a JSON line for each case."""
    out = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_inputs(folder)
        for name in names:
            begun, said = time.perf_counter(), io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    if name in LOWERED:
                        result = {"program": lower_program(name)}
                    else:
                        result = run_case(name, folder)
            except (Exception, SystemExit) as error:
                print(said.getvalue()[-2000:], file=sys.stderr)
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
            line = json.dumps([name, result, time.perf_counter() - begun])
            print(line, file=out, flush=True)


def chosen(patterns):
    known = [*LOWERED, *CASES]
    if not patterns:
        return known
    found = [name for name in known if any(fnmatch.fnmatch(name, p) for p in patterns)]
    if not found:
        raise SystemExit(f"--only: no such case; there are {', '.join(known)}")
    return found


def write_record(file, cases):
    """A line for each case, in the order of the tables."""
    order = {name: cases[name] for name in [*LOWERED, *CASES] if name in cases}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in order.items())
    head = json.dumps(fingerprint())
    file.write_text(f'{{"fingerprint": {head},\n"cases": {{\n{lines}\n}}}}\n')


def record(file, patterns):
    begun, cases, failed = time.perf_counter(), {}, 0
    if patterns and file.is_file():
        cases = json.loads(file.read_text())["cases"]
    for name, result, seconds in run_all(chosen(patterns)):
        note = result.get("error", "recorded")
        failed += "error" in result
        if "program" in result:
            text = result["program"]
            packed = lzma.compress(text.encode(), preset=9)
            if file.resolve() == RECORD and len(packed) < 200_000:
                PROGRAMS.mkdir(exist_ok=True)
                text_file(name).write_bytes(packed)
            result, note = digest(text), f"recorded ({len(packed):,} bytes of text)"
        cases[name] = result
        print(f"{name}: {note} ({seconds:.1f} s)", flush=True)
        write_record(file, cases)
    print(f"{len(cases)} cases in {time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0


def differences(before, now):
    """What differs, and by how much."""
    if "error" in now:
        return [now["error"]]
    found = []
    for key in dict.fromkeys([*before, *now]):
        a, b = before.get(key), now.get(key)
        if a == b:
            continue
        if a is None or b is None:
            found.append(f"{key} is {'new' if a is None else 'gone'}")
        elif isinstance(a, dict):
            if Counter(a.values()) == Counter(b.values()):
                continue  # tensors of other names
            changed = [name for name in a if a[name] != b.get(name)]
            changed += [name for name in b if name not in a]
            named = ", ".join(changed[:3])
            found.append(f"{key}: {len(changed)} of {len(a)} tensors ({named})")
        elif isinstance(a, list) and key.startswith(tuple(VALUES)) and len(a) == len(b):
            i = next(i for i in range(len(a)) if a[i] != b[i])
            found.append(f"{key}[{i}] {a[i]} -> {b[i]} (by {b[i] - a[i]:.3g})")
        elif isinstance(a, float):
            found.append(f"{key} {a:.9g} -> {b:.9g} (by {b - a:.3g})")
        else:
            found.append(f"{key} {str(a)[:60]!r} -> {str(b)[:60]!r}")
    return found


def program_difference(before, now):
    if before["text"] == now["text"]:
        return []
    if before["operations in any order"] == now["operations in any order"]:
        return ["the same operations, in another order"]
    old, new = before["functions"], now["functions"]
    changed = [f"f{i - 1}" if i else "head" for i, x in enumerate(new) if x not in old]
    count = f"{len(old) - 1} -> {len(new) - 1} functions"
    return [f"{count}, new or changed: {', '.join(changed[:8])}"]


def reason_to_skip(recorded, here, program):
    """Why a case cannot be compared on this machine; None if it can."""
    for key in ("jax", "jaxlib") if program else here:
        if recorded[key] != here[key]:
            return f"recorded with {key} {recorded[key]}, this is {here[key]}"
    return None


def compare(file, patterns):
    saved, here = json.loads(file.read_text()), fingerprint()
    wanted, skipped = [], {}
    for name in chosen(patterns):
        reason = reason_to_skip(saved["fingerprint"], here, name in LOWERED)
        if reason is None:
            wanted.append(name)
        else:
            skipped.setdefault(reason, []).append(name)
    for reason, names in skipped.items():
        print(f"skipped {len(names)} cases ({names[0]} ...): {reason}")
    begun, bad = time.perf_counter(), 0
    for name, result, seconds in run_all(wanted):
        text, before = result.get("program"), saved["cases"].get(name)
        if before is None:
            found = ["not in the record"]
        elif text is not None:
            found = program_difference(before, digest(text))
        else:
            found = differences(before, result)
        bad += bool(found)
        said = f"differs ({'; '.join(found)})" if found else "same"
        print(f"{name}: {said} ({seconds:.1f} s)", flush=True)
        if found and text is not None:
            show_difference(name, text)
    print(f"{len(wanted)} compared, {bad} differ, in {time.perf_counter() - begun:.0f} s")
    return 1 if bad else SKIPPED if skipped else 0


def main(argv=None):
    parser = argparse.ArgumentParser("golden_runs", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path)
        command.add_argument("--only", nargs="+", metavar="NAME", help="cases, or patterns of them")
    commands.add_parser("work").add_argument("names", nargs="+")
    a = parser.parse_args(argv)
    if a.command == "work":
        work(a.names)
        return 0
    return (record if a.command == "record" else compare)(a.file, a.only)


if __name__ == "__main__":
    sys.exit(main())
