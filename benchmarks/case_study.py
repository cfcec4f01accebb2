"""Case study: a model from raw text to chat on one GPU, with the seconds of each part.

    python -m benchmarks case-study h200 --data FOLDER --folder runs/case --record
    python -m benchmarks case-study h200 --shrink                    a tiny model on a CPU

FOLDER has corpus/ and held/ (JSON lines with `text`), chat/ (conversations), pairs/ (chosen and
rejected answers), and optionally core/ (the CORE bundle). Each part is one `jaxtrain` command in
its own process. The same command resumes an interrupted study: finished parts are not repeated,
and the seconds of both attempts count.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import describe
from jaxtrain.data.files.reading import read_documents
from jaxtrain.data.files.sources import JsonlSource
from jaxtrain.runs.compare import rate_of, read_run
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json

FILTERS = "[{name: exact_duplicates}, {name: gopher_quality}, {name: near_duplicates}]"
QUESTIONS = ("What is the capital of France?", "How many days has a week?", "Write a short poem.")
HEARTBEAT = 2.0  # seconds between two writes of a part's elapsed time


class Study(NamedTuple):
    """The settings of one case study: overrides of its commands, by part."""

    config: str
    pretrain: tuple[str, ...]
    sft: tuple[str, ...]
    dpo: tuple[str, ...]
    quantize: tuple[str, ...]
    tokens: int = 128  # per answer


# 1.5 epochs of 100M tokens: beyond four epochs, repeated text helps less (arXiv:2305.16264).
STUDIES = {
    "h200": Study(
        "gpt_d12",
        ("train.steps=1200", "train.batch_size=64", "train.device_batch_size=32",
         "eval.every=400", "checkpoint.every=400"),
        ("train.sequence_length=1024", "train.batch_size=32", "train.device_batch_size=32",
         "train.steps=600", "optim.learning_rate=3e-4", "eval.every=150"),
        ("train.sequence_length=1024", "train.batch_size=16", "train.device_batch_size=8",
         "train.steps=200", "optim.learning_rate=5e-6"),
        ("--method", "gptq", "--sequences", "128"),
    )
}  # fmt: skip
SMALL = ("train.sequence_length=128", "train.batch_size=4", "train.device_batch_size=4",
         "train.steps=3", "eval.every=null")  # fmt: skip
SHRUNK = Study(
    "gpt_d12",
    (*SMALL, "model.depth=2", "model.width=64", "model.head_dim=32", "eval.tokens=1024",
     "data.tokenizer.vocab_size=512", "checkpoint.every=null", "sample.every=null"),
    (*SMALL, "sample.prompts=[]"),
    (*SMALL, "sample.prompts=[]"),
    ("--method", "int4", "--group-size", "32"),
    tokens=8,
)  # fmt: skip


class Part(NamedTuple):
    """One command of a study; `figures` reads its result metrics."""

    name: str
    arguments: tuple[str, ...]
    figures: Callable[[], dict[str, Any]] = dict


def parts_of(study: Study, data: Path, out: Path) -> list[Part]:
    """The commands from raw text to chat, in order."""
    model = lambda name: str(out / name)
    cache = f"data.cache_dir={out / 'cache'}"
    validation = f"{{name: source, source: {{name: jsonl, path: {data / 'held'}}}}}"
    base = (
        "data.train.name=jsonl", f"data.train.path={out / 'filtered'}",
        f"data.validation={validation}", cache, *study.pretrain,
    )  # fmt: skip
    named = lambda name: (f"run.name={name}", f"run.directory={out}")
    texts = "--text", str(out / "held.txt"), "--calibration", str(out / "calibration.txt")
    core = data / "core"
    asked = [word for question in QUESTIONS for word in ("--prompt", question)]
    parts = [
        Part("filter", ("filter", study.config, "data.train.name=jsonl",
             f"data.train.path={data / 'corpus'}", f"data.train.filters={FILTERS}",
             cache, "--out", model("filtered"))),
        Part("prepare", ("prepare", "--config", study.config, *base)),
        Part("pretrain", ("train", "--config", study.config, *base, *named("base")),
             lambda: last_validation(out / "base")),
        Part("evaluate", ("evaluate", model("base"))),
        Part("core", ("evaluate", model("base"), "--tasks", "core", "--bundle", str(core)),
             lambda: read_tasks(out / "base" / "tasks.json")),
        Part("sft", ("train", "--config", "sft_small", f"train.init_from={model('base')}",
             f"data.train.path={data / 'chat'}", cache, *named("sft"), *study.sft),
             lambda: last_validation(out / "sft")),
        Part("dpo", ("train", "--config", "dpo_small", f"train.init_from={model('sft')}",
             f"data.train.path={data / 'pairs'}", "data.train.refused=drop", cache, *named("dpo"),
             *study.dpo),
             lambda: last_validation(out / "dpo")),
        Part("quantize", ("quantize", model("dpo"), *study.quantize, *texts, "--out",
             model("quantized")), lambda: read_quantized(out / "quantized")),
        Part("chat", ("chat", model("quantized"), *asked, "--temperature", "0",
             "--tokens", str(study.tokens))),
    ]  # fmt: skip
    return [part for part in parts if part.name != "core" or core.is_dir()]


def last_validation(run: Path) -> dict[str, Any]:
    """The last losses of a run, its training tokens, and its median rate."""
    rows = read_run(run).rows
    checks = [row for row in rows if row["kind"] == "validation"]
    trained = [row for row in rows if row["kind"] == "train"]
    names = ("loss", "bpb", "accuracy")
    last = checks[-1] if checks else trained[-1]
    return {name: last[name] for name in names if name in last} | {
        "tokens": trained[-1].get("tokens"),
        "tokens_per_s": rate_of(trained),
    }


def read_tasks(path: Path) -> dict[str, Any]:
    return {"core": json.loads(path.read_text()).get("core")}


def read_quantized(folder: Path) -> dict[str, Any]:
    """Bits per byte and sizes before and after quantization."""
    facts = json.loads((folder / "quantization.json").read_text())
    return {name: facts[name] for name in ("before", "after")}


# ---- running ---------------------------------------------------------------------------------


def write_texts(data: Path, out: Path, most: int = 2000) -> None:
    """Write the calibration text, and the held-out text that the quantized model is measured on."""
    for folder, name in (("corpus", "calibration.txt"), ("held", "held.txt")):
        lines = islice(read_documents(JsonlSource(path=str(data / folder))), most)
        (out / name).write_text("\n\n".join(lines))


def run_part(part: Part, out: Path, done: dict[str, Any]) -> None:
    """Run one part with its output in a log file. Its seconds are saved while it runs, and added
    to those of earlier attempts."""
    entry = done.setdefault(part.name, {"seconds": 0.0})
    before, begun = entry["seconds"], time.perf_counter()
    command = [sys.executable, "-m", "jaxtrain.cli", *part.arguments]
    with (out / f"{part.name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT)
                    break
                except subprocess.TimeoutExpired:
                    entry["seconds"] = before + time.perf_counter() - begun
                    write_json(out / "study.json", done)
        finally:  # on SIGTERM, a training run saves a checkpoint before it exits
            process.terminate()
            process.wait()
    entry["seconds"] = round(before + time.perf_counter() - begun, 1)
    if code:
        write_json(out / "study.json", done)
        last = (out / f"{part.name}.log").read_text().strip().splitlines()[-1:]
        raise UserError(f"case-study: {part.name} failed ({out / part.name}.log): {' '.join(last)}")
    entry |= {"figures": part.figures(), "done": True}
    write_json(out / "study.json", done)


def bench_case_study(
    names: Sequence[str], data: Path | None, folder: Path | None, shrink: bool
) -> dict[str, Any]:
    """A record with a row for each part. `seconds` are wall-clock, with compiling and loading.

    Raises UserError for an unknown study, for missing data and for a part that fails.
    """
    if len(names) != 1 or names[0] not in STUDIES:
        raise UserError(f"case-study: name one of {', '.join(STUDIES)}")
    out = folder or Path("runs") / ("case_shrunk" if shrink else f"case_{names[0]}")
    out.mkdir(parents=True, exist_ok=True)
    if data is None:
        if not shrink:
            raise UserError("case-study: --data FOLDER is missing, with corpus, held, chat, pairs")
        data = tiny_data(out / "data")
    if missing := [x for x in ("corpus", "held", "chat", "pairs") if not (data / x).is_dir()]:
        raise UserError(f"case-study: {data} has no folder {missing[0]}")
    state = out / "study.json"
    done: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
    write_texts(data, out)
    parts = parts_of(SHRUNK if shrink else STUDIES[names[0]], data, out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the child process ends too
    for part in parts:
        if not done.get(part.name, {}).get("done"):
            print(f"{part.name}: jaxtrain {' '.join(part.arguments)}", flush=True)
            run_part(part, out, done)
        print(f"{part.name}: {done[part.name]['seconds']:,.1f} s", flush=True)
    env = json.loads((out / "base" / "env.json").read_text())
    record = describe("case_study", names[0], "shrunk" if shrink else "", {}, 1, env)
    rows = [{"name": part.name, **done[part.name]["figures"], "seconds": done[part.name]["seconds"]}
            for part in parts]  # fmt: skip
    total = round(sum(row["seconds"] for row in rows), 1)
    answers = (out / "chat.log").read_text().splitlines()
    return record | {"metrics": {"seconds": total}, "rows": rows, "answers": answers}


def tiny_data(folder: Path) -> Path:
    """Write files of each kind with a few hundred short documents from tiny Shakespeare."""
    import jaxtrain.data

    text = (Path(jaxtrain.data.__file__).parent / "tinyshakespeare.txt").read_text()
    scenes = [text[i : i + 1000] for i in range(0, 300_000, 1000)]
    turn = lambda role, content: {"role": role, "content": content}
    talk = [
        [turn("user", f"What is {i} and 1?"), turn("assistant", f"It is {i + 1}.")]
        for i in range(200)
    ]
    kinds = {
        "corpus": [{"text": scene} for scene in scenes[:250]],
        "held": [{"text": scene} for scene in scenes[250:]],
        "chat": [{"messages": messages} for messages in talk],
        "pairs": [{"prompt": "Equal?", "chosen": "No.", "rejected": "No."}, *(
                  {"prompt": one["content"], "chosen": two["content"], "rejected": "No."}
                  for one, two in talk)],
    }  # fmt: skip
    for kind, rows in kinds.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / kind / "part.jsonl").write_text(lines)
    return folder
