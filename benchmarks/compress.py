"""Costs and savings of each compression method: docs/reference/compression.md.

python -m benchmarks compress RUN [RUN ...] --also qat=runs/x pruned=runs/y --record
python -m benchmarks compress RUN --text held.txt --calibration other.txt --record
python -m benchmarks compress --shape llama_8b --workers 2 --record   a row at a time on each GPU
python -m benchmarks compress RUN --only none int4 float8 --record   these rows
python -m benchmarks compress --recipes [NAME ...] --record  trains by compress_recipes.yaml
python -m benchmarks compress                        makes the page from the records
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import compress_recipes
from benchmarks.compress_runs import PATTERN, PLAIN, Job, Outcome, Texts, line_of, run_all
from benchmarks.importing import SHAPES
from benchmarks.record import BENCHMARKS, RESULTS, describe
from jaxtrain.compress.methods import METHODS
from jaxtrain.runs.metrics import format_bytes
from jaxtrain.runs.saved import folder_of, load_resolved
from jaxtrain.settings import UserError, whole
from jaxtrain.weights.stored import STORED

PAGE = BENCHMARKS.parent / "docs" / "reference" / "compression.md"
BENCH = "compress_methods"  # prefix of its record files
HEAD = f"""# Compression

<!-- Made by `python -m benchmarks compress` from benchmarks/results/{BENCH}-*.json and
{compress_recipes.BENCH}-*.json there. Do not edit. -->

Each row is a method of {{doc}}`jaxtrain quantize <../howto/quantize>`, or a model that was trained
at a small size. The first row is the original in the compute dtype of the device: float32 on a CPU,
bfloat16 on a GPU. Its file has the float32 weights of training. Tokens per second count the decoded
tokens of all rows of the batch, without the prompt. `{PATTERN}` is SparseGPT without
recovery; its zeros are stored and multiplied like other weights. `--shape` measures random weights,
which have no loss. A device without a section was not measured.

The CPU was shared with other work while it was measured: `none` and `{PATTERN}` compute the same
number of products, so that the difference of their rates is noise.

`python -m benchmarks compress RUN --record` measures a run or a model folder, and
`--shape llama_8b` random weights; `--recipes` trains the models of
`benchmarks/compress_recipes.yaml`. `python -m benchmarks compress` makes this page.
"""
RECIPES_HEAD = """## Trained small

Each row is one run of a model in `benchmarks/compress_recipes.yaml`, which has its command. Steps
count from the model that the row started from. Two runs that differ in their seed alone end about
0.01 bits per byte apart.
"""


def add_compress(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compress`: its models, and the texts that they are measured on."""
    parser.add_argument(
        "--also", nargs="+", action="extend", metavar="LABEL=FOLDER",
        help="compress: models beside RUN, as qat=runs/x",
    )  # fmt: skip
    parser.add_argument(
        "--shape", nargs="+", action="extend", help="compress: random weights, as llama_8b"
    )
    parser.add_argument(
        "--core", type=whole(1), help="compress: CORE, so many examples a task ($JAXTRAIN_CORE)"
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="compress, engine RUN: held-out text to measure on; default the run's",
    )
    parser.add_argument(
        "--calibration", type=Path, help="compress: default the run's training text"
    )
    parser.add_argument(
        "--sequences", type=whole(1), help="compress: of the calibration text, default 128"
    )


class Asked(NamedTuple):
    """The models, texts and rows that a command line asks for."""

    runs: Sequence[str]
    also: Sequence[str] = ()  # LABEL=FOLDER
    shapes: Sequence[str] = ()
    core: int | None = None
    variant: str | None = None
    texts: Texts = Texts()
    gpus: int | None = None  # number of GPUs that measure rows, each one at a time
    only: Sequence[str] = ()  # rows; default all


def jobs_of(folder: str, asked: Asked, shape: bool = False) -> list[Job]:
    """The requested rows of one model. Raises UserError for an unknown run, shape or row, and for a
    malformed LABEL=FOLDER."""
    jobs = all_jobs(folder, asked, shape)
    labels = [job.label for job in jobs]
    if unknown := set(asked.only) - set(labels):
        raise UserError(
            f"compress: {folder} has no row {'; '.join(sorted(unknown))}. It has: "
            f"{'; '.join(labels)}"
        )
    return [job for job in jobs if not asked.only or job.label in asked.only]


def all_jobs(folder: str, asked: Asked, shape: bool) -> list[Job]:
    """A job for each method, then one for each model of `--also`."""
    if shape:
        if folder not in SHAPES:
            raise UserError(f"compress: there is no shape {folder}; there are {', '.join(SHAPES)}")
        forms = [method for method in METHODS if method in STORED]  # one method per storage format
        names = [PLAIN, *forms]
        return [Job(x, folder, None if x == PLAIN else x, shape=True) for x in names]
    folder_of(Path(folder))
    core, texts = asked.core, asked.texts
    jobs = [Job(PLAIN, folder, None, False, core, texts)]
    jobs += [Job(x, folder, x, False, core, texts) for x in (*METHODS, PATTERN)]
    for one in asked.also:
        label, equals, path = one.partition("=")
        if not (label and equals and path):
            raise UserError(f"--also {one}: it has to be LABEL=FOLDER, as in qat=runs/x")
        folder_of(Path(path))
        jobs.append(Job(label, path, None, False, core, texts))
    return jobs


def bench_compress(asked: Asked) -> Iterator[dict[str, Any]]:
    """Yield the record of each run and shape, again after each row."""
    if asked.also and len(asked.runs) != 1:
        raise UserError("--also goes with one RUN, the model that they are compared with")
    for text in (asked.texts.held_out, asked.texts.calibration):
        if text and not text.is_file():
            raise UserError(f"compress: {text} is no file")
    plans = [(name_of(folder), jobs_of(folder, asked)) for folder in asked.runs]
    plans += [(name, jobs_of(name, asked, shape=True)) for name in asked.shapes]
    for config, jobs in plans:
        outcomes = []
        for i, (job, outcome) in enumerate(run_all(jobs, asked.gpus)):
            print(f"{config} {i + 1}/{len(jobs)} {job.label}: {line_of(outcome)}", flush=True)
            outcomes.append((job, outcome))
            if any(not outcome.error for _, outcome in outcomes):
                yield record_of(config, outcomes, asked)
        if all(outcome.error for _, outcome in outcomes):
            raise UserError(f"compress {config}: no method gave a figure: {outcomes[0][1].error}")


def name_of(folder: str) -> str:
    """The name of a run. Raises UserError for a folder that is no run."""
    return load_resolved(folder_of(Path(folder)) / "config.yaml").run.name


def record_of(config: str, outcomes: Sequence[tuple[Job, Outcome]], asked: Asked) -> dict[str, Any]:
    """The record: a row per method; a failed one has its `error`."""
    good = next(outcome for _, outcome in outcomes if not outcome.error)
    texts = {f"{key}_text": value and Path(value).name for key, value in (
        ("held", asked.texts.held_out), ("calibration", asked.texts.calibration))}  # fmt: skip
    workload = texts | {"sequences": asked.texts.sequences, "core_examples": asked.core}
    workload |= {"cpus": good.env["cpu_count"], "dtype": good.figures["dtype"]}
    rows = [{"name": job.label} | o.figures | ({"error": o.error} if o.error else {})
            for job, o in outcomes]  # fmt: skip
    record = describe(BENCH, config, asked.variant or "", workload, 1, good.env)
    return record | {"rows": rows}


def make_page(path: Path = PAGE, folder: Path = RESULTS) -> Path:
    """Write the page from the records."""
    files = sorted(folder.glob(f"{BENCH}-*.json"))
    parts = [section(json.loads(file.read_text()), file.name) for file in files]
    made = sorted(folder.glob(f"{compress_recipes.BENCH}-*.json"))
    parts += [RECIPES_HEAD] * bool(made)
    parts += [recipe_section(json.loads(file.read_text()), file.name) for file in made]
    path.write_text("\n".join([HEAD, *parts]))
    return path


def recipe_section(record: dict[str, Any], file: str) -> str:
    """The table of one recipe."""
    lines = [
        f"### {record['variant'].replace('_', ' ')}\n",
        f"| {record['config']} | steps | parameters | bits per byte | in memory |",
        "|---" * 5 + "|",
    ]
    for row in record["rows"]:
        cells = [row["error"], "-", "-"] if "error" in row else [
            number(row, "parameters", ",d"), number(row, "bpb", ".4f"), size(row, "memory_bytes"),
        ]  # fmt: skip
        lines.append(f"| {row['name']} | {row['steps']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`benchmarks/results/{file}` has these figures."]) + "\n"


def section(record: dict[str, Any], file: str) -> str:
    """The table of one record."""
    columns = {
        "bits per byte": lambda row: number(row, "bpb", ".4f"),
        "CORE": lambda row: number(row, "core", ".4f"),
        "on disk": lambda row: size(row, "disk_bytes"),
        "in memory": lambda row: size(row, "memory_bytes"),
        "tokens/s, batch 1": lambda row: number(row, "tokens_per_s_1", ",.0f"),
        "batch 32": lambda row: number(row, "tokens_per_s_32", ",.0f"),
    }
    # Omit columns without a value in any row.
    shown = {k: v for k, v in columns.items() if any(v(row) != "-" for row in record["rows"])}
    work = record["workload"]
    where = f"{work['cpus']} CPU cores" if record["device"] == "cpu" else record["device"]
    title = " ".join(filter(None, [record["config"], record["variant"]]))
    lines = [
        f"## {title}, {where}\n",
        f"| method | {' | '.join(shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for row in record["rows"]:
        name = f"none, {row['dtype']}" if row["name"] == PLAIN and "dtype" in row else row["name"]
        cells = [row["error"]] + ["-"] * (len(shown) - 1) if "error" in row else [
            cell(row) for cell in shown.values()
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(record, file)]) + "\n"


def source(record: dict[str, Any], file: str) -> str:
    """A sentence on the file of the figures, and on the text that they were measured on."""
    record_line = f"`benchmarks/results/{file}` has these figures."
    if all("bpb" not in row for row in record["rows"]):
        return record_line
    held_out = record["workload"]["held_text"]
    text = f"`{held_out}`" if held_out else "the run's validation text"
    return f"{record_line} Bits per byte are measured on {text}."


def number(row: dict[str, Any], key: str, form: str) -> str:
    return f"{row[key]:{form}}" if key in row else "-"


def size(row: dict[str, Any], key: str) -> str:
    return format_bytes(row[key]) if row.get(key) else "-"
