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
from golden_cases import CASES, write_inputs

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


# ---- one run -----------------------------------------------------------------------------------


def arguments(changes, name, folder):
    """`key.path=value` arguments of a case in a folder."""

    def value(given):
        if given in ("CHAT", "PAIRS", "LABELED"):
            return str(folder / f"{given}.jsonl")
        if isinstance(given, str) and given.startswith("RUN:"):
            return str(folder / given.removeprefix("RUN:"))
        return given

    fixed = {"run.directory": str(folder), "run.name": name, "data.cache_dir": str(folder / "data")}
    return [f"{key}={json.dumps(value(given))}" for key, given in (fixed | changes).items()]


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
    return {
        "text": sha(text),
        "operations in any order": sha(json.dumps(sorted(operations(text).items()))),
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
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
    file.write_text(f'{{"fingerprint": {json.dumps(fingerprint())},\n"cases": {{\n{lines}\n}}}}\n')


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
