"""python -m benchmarks step --config gpt_d12 --record

Measure on random data and print one table: our rates, the floor, the peers. No corpus is needed.
"""

import argparse
import functools
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtrain_kernels.matmul.few_rows import preferring

from benchmarks.at_scale import bench_at_scale
from benchmarks.attention import bench_attention
from benchmarks.case_study import bench_case_study
from benchmarks.check import check_records
from benchmarks.compress import Asked, add_compress, bench_compress
from benchmarks.compress import make_page as make_compression_page
from benchmarks.compress_recipes import bench_recipes
from benchmarks.compress_runs import Texts
from benchmarks.curves import draw_curves
from benchmarks.data import bench_data
from benchmarks.decode import bench_decode
from benchmarks.decode_models import COMPUTE, bench_decode_models
from benchmarks.engine import MEGAKERNEL, add_engine, bench_engine, loads_of
from benchmarks.engine_drafts import bench_drafts, is_drafted
from benchmarks.figures import update_figure_pages
from benchmarks.filters import bench_filters
from benchmarks.finetune import bench_finetune
from benchmarks.flags import bench_flags
from benchmarks.huggingface import train_huggingface
from benchmarks.importing import bench_import
from benchmarks.kernels import bench_loss
from benchmarks.ladder import Asked as AskedRungs
from benchmarks.ladder import climb
from benchmarks.ladder_page import make_page as make_ladder_page
from benchmarks.matmuls import bench_matmuls
from benchmarks.memory import bench_longest, bench_techniques
from benchmarks.modded_nanogpt import train_modded_nanogpt
from benchmarks.nanochat import train_nanochat
from benchmarks.optimizers import bench_optimizers
from benchmarks.options import check_options
from benchmarks.packing import bench_packing
from benchmarks.peers import nanochat_step
from benchmarks.plans import bench_plans
from benchmarks.population import bench_population
from benchmarks.products import bench_products
from benchmarks.projection import project
from benchmarks.quickstart import bench_quickstart
from benchmarks.race import SAME, draw, race
from benchmarks.record import BENCHMARKS, RESULTS, stem, write
from benchmarks.remote_loader import bench_remote_loader
from benchmarks.rows import bench_rows
from benchmarks.serve_soak import bench_serve_soak
from benchmarks.simulate import bench_simulate
from benchmarks.soak import bench_loader
from benchmarks.step import bench_memory, bench_step
from benchmarks.switches import bench_switches
from benchmarks.tables import screen, table_of, update_pages
from benchmarks.tasks import bench_tasks
from benchmarks.tune import tune_attention
from benchmarks.verdict_page import make_page
from benchmarks.verdicts import train_verdicts
from jaxtrain.cluster.runtime import take_memory
from jaxtrain.config.overrides import check_once
from jaxtrain.estimate.arguments import add_preflight
from jaxtrain.estimate.dry_run import preflight_of
from jaxtrain.estimate.dry_run_report import report
from jaxtrain.model.kv_cache import CACHE_DTYPES
from jaxtrain.settings import TINY, Parser, command, real, whole

WHAT = {
    "step": "the train step of a configuration, one microbatch a step",
    "case-study": "from raw text to chat, seconds of each part: case-study h200 --data FOLDER",
    "check": "the records of a CPU measured again, and the figures that moved: check [--only NAME]",
    "at-scale": "1T and 10T tokens on 1,024 GPUs, computed from records and public prices",
    "attention": "attention backends and peers over the benchmark shapes: attention [NAME ...]",
    "compress": "loss, bytes and decode rate by method: compress RUN, --shape, alone the page",
    "data": "tokenizers, preparing, reading, packing: data data.train.path=... (text, JSONL, ...)",
    "decode": "one query a row against a KV cache: decode [NAME ...]; --config: whole models",
    "engine": "tokens/s and time to first token of the inference engine: engine --batch 1 32; "
    "speculative decoding: engine RUN",
    "filters": "what each filter removes of a text, and its speed: filters data.train.path=...",
    "finetune": "LoRA and QLoRA on random weights, beside peft: finetune --config llama_8b",
    "import": "a synthetic Hugging Face checkpoint read: import [NAME], default llama_8b",
    "kernels": "loss, matmul and rows, one after another",
    "ladder": "from a 2019 baseline to the full stack: ladder --scale quick, alone the page",
    "loader": "the loader's memory over --minutes of reading: loader data.train.path=...",
    "loss": "linear + cross-entropy backends over the benchmark shapes: loss [NAME ...]",
    "matmul": "float8, ReLU^2, symmetric and integer matmuls over the shapes: matmul [NAME ...]",
    "remote-loader": "batches of a store on the disk, and at a URL that is 20 ms away",
    "rows": "the passes over activations over the benchmark shapes: rows [NAME ...]",
    "huggingface": "its Trainer and GPT-2 on our rows: huggingface run.name=... key.path=...",
    "nanochat": "a checkout of it trained on our rows: nanochat CHECKOUT run.name=... key.path=...",
    "modded-nanogpt": "its recipe on our rows: modded-nanogpt CHECKOUT run.name=... key.path=...",
    "curves": "one picture of seconds and memory to a loss: curves RECORD [RECORD ...]",
    "packing": "what packing crops, pads, never uses, beside nanochat's: packing [data.train...]",
    "plans": "memory and seconds to the first batch of a plan of 10^8 documents: plans [1e8]",
    "population": "N small models at once beside one after another: population --members 1 4 16",
    "memory": "what a step needs: here, or on --devices N virtual ones; --techniques, --longest",
    "optim": "an update of every optimizer on a configuration's parameters: optim [NAME ...]",
    "products": "a step's matmuls at the power limit: XLA, cuBLASLt's candidates, ours",
    "projection": "hours to GPT-2's CORE on eight GPUs, computed from records",
    "quickstart": "the quickstart's run on this machine, three seeds",
    "race": "runs compared that differ in their optimizer alone: race RUN [RUN ...]",
    "simulate": "rendezvous of many processes, checksums of 10^5 files: simulate [64 1024]",
    "serve-soak": "jaxtrain serve under --clients for --minutes: serve-soak [RUN], default random",
    "tasks": "the shapes of CORE: packed rows against one example per forward",
    "verdicts": "what each technique gains: verdicts SCALE [NAME ...] trains, alone makes the page",
    "table": "regenerate the tables in docs/benchmarks/ from benchmarks/results/",
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    lines = [f"  {name:10s} {what}" for name, what in WHAT.items()]
    parser = Parser(
        "python -m benchmarks",
        description="Measure on random data, beside the peers and the physical floor.",
        epilog="\n".join(["benchmarks:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=WHAT, help="benchmark, see below")
    parser.add_argument(
        "--config", action="append", help="YAML or bare name; may be given again (gpt_d12)"
    )
    parser.add_argument("--record", action="store_true", help="write the figures as JSON")
    parser.add_argument("--variant", help="name of what is special about these figures (bf16)")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="attention: measure tilings too, and renew the table that backends are chosen by; "
        "verdicts: learning rates first; ladder: those of both ends first",
    )
    parser.add_argument("--profile", action="store_true", help="step, engine: list its kernels")
    parser.add_argument(
        "--switches",
        action="store_true",
        help="step: with all our kernels, without, with each alone, in float8; or --variant A,B",
    )
    parser.add_argument(
        "--flags",
        action="store_true",
        help="step: with each set of XLA's options (cluster/xla_flags.py), or one --variant",
    )
    parser.add_argument(
        "--peer",
        type=Path,
        metavar="CHECKOUT",
        help="step, engine: nanochat's own is timed first, by a process of its own (needs torch)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of what is written; default benchmarks/results, runs/bench for a profile, "
        "the package for --tune",
    )
    parser.add_argument(
        "--minutes", type=real(TINY, "above 0"), help="loader, serve-soak: how long, default 10"
    )
    parser.add_argument("--clients", type=whole(1), help="serve-soak: at a time, default 200")
    parser.add_argument(
        "--techniques", action="store_true", help="memory: each technique's bytes and rate"
    )
    parser.add_argument(
        "--longest", action="store_true", help="memory: the longest row that a device trains on"
    )
    add_preflight(parser)
    parser.add_argument(
        "--workers",
        type=whole(1),
        help="verdicts, ladder: runs that share the device (1); compress: GPUs, a row at a time on "
        "each",
    )
    parser.add_argument(
        "--time-only", action="store_true",
        help="verdicts, ladder: renew the seconds and bytes of records; losses stay",
    )  # fmt: skip
    parser.add_argument(
        "--scale", help="ladder: of ladder.yaml: quick (a CPU), d4, gpt2_124m, gpt_d12"
    )
    parser.add_argument(
        "--remove", action="store_true", help="ladder: the top without each rung (of --only)"
    )
    add_compress(parser)
    parser.add_argument(
        "--prompts", type=whole(1), nargs="+",
        help="decode --config: tokens held (2048 16384); engine: of a prompt, the first (512)",
    )  # fmt: skip
    parser.add_argument(
        "--batches", "--batch", type=whole(1), nargs="+",
        help="decode --config: rows (8); engine: requests at once (1 32 256)",
    )  # fmt: skip
    add_engine(parser)
    parser.add_argument(
        "--cache-dtypes", nargs="+", choices=(COMPUTE, *CACHE_DTYPES),
        help="decode --config: of keys and values (compute int8); engine (compute)",
    )  # fmt: skip
    parser.add_argument(
        "--recipes", nargs="*", metavar="NAME",
        help="compress: train the models of compress_recipes.yaml, or of these of its tables",
    )  # fmt: skip
    parser.add_argument(
        "--folder",
        type=Path,
        help="compress --recipes, case-study: of the models; default runs/recipes, runs/case_NAME",
    )
    parser.add_argument(
        "--data", type=Path, help="case-study: folder with corpus, held, chat, pairs (and core)"
    )
    parser.add_argument("--shrink", action="store_true", help="case-study: a tiny model, for a CPU")
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="NAME",
        help="check: records whose file name has one of these; ladder: rungs; compress, finetune: "
        "rows",
    )  # fmt: skip
    parser.add_argument(
        "--depth", type=whole(1), action="append",
        help="population: layers, may be given again; without --config of the verdicts' d4 (4)",
    )  # fmt: skip
    parser.add_argument(
        "--members", type=whole(1), nargs="+", help="population: models at once (1 2 4 8 16)"
    )
    parser.add_argument(
        "--steps",
        type=whole(1),
        help="population: of a run that the compile time is a part of; ladder: of the baseline",
    )
    parser.add_argument(
        "--note", help="population, simulate: a note on the machine, kept in the record"
    )
    parser.add_argument(
        "--baseline",
        help="race: name of the run to beat, default the best AdamW; curves: default the records'",
    )
    parser.add_argument(
        "--differ", action="append", default=[], choices=SAME,
        help="race: the runs may differ in this section too, as kernels do in model",
    )  # fmt: skip
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value | RUN | NAME",
        help="override a field; race: a run directory; optim: an optimizer; kernels: a shape or "
        "backend",
    )
    return parser.parse_intermixed_args(argv)


def measure(a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the records of a command line as they are measured; a long one again after each row."""
    step = {"loss": bench_loss, "matmul": bench_matmuls, "rows": bench_rows}
    kernels = step | {"attention": bench_attention, "decode": bench_decode}
    whole = {
        "optim": bench_optimizers,
        "products": bench_products,
        "finetune": functools.partial(bench_finetune, only=a.only or ()),
        "tasks": bench_tasks,
    }
    if a.tune and a.what == "attention":
        yield tune_attention(a.out, a.variant, a.overrides)
    elif a.what == "decode" and a.config:
        loads = a.prompts or (2048, 16384), a.batches or (8,), a.cache_dtypes or (COMPUTE, "int8")
        for config in a.config:
            yield from bench_decode_models(config, a.overrides, a.variant, *loads)
    elif a.what in kernels:
        yield from kernels[a.what](a.variant, a.overrides)
    elif a.what == "kernels":
        for bench in step.values():
            yield from bench(a.variant)
    elif a.what == "import":
        yield bench_import(a.variant, a.overrides)
    elif a.what == "data":
        yield bench_data(a.overrides, a.variant)
    elif a.what == "loader":
        yield bench_loader(a.overrides, a.variant, 10 if a.minutes is None else a.minutes)
    elif a.what == "serve-soak":
        yield from bench_serve_soak(a.overrides, a.variant, a.clients or 200, a.minutes or 10)
    elif a.what == "compress":
        if a.recipes is not None:
            yield from bench_recipes(a.recipes, a.folder or Path("runs/recipes"))
            return
        texts = Texts(a.text, a.calibration, a.sequences or Texts().sequences)
        asked = Asked(a.overrides, a.also or (), a.shape or (), a.core, a.variant, texts, a.workers,
                      a.only or ())  # fmt: skip
        yield from bench_compress(asked)
    elif a.what == "at-scale":
        yield from bench_at_scale()
    elif a.what == "plans":
        yield bench_plans(a.overrides, a.variant)
    elif a.what == "simulate":
        yield bench_simulate(a.overrides, a.variant, a.note)
    elif a.what == "remote-loader":
        yield bench_remote_loader(a.variant)
    elif a.what == "packing":
        yield bench_packing(a.overrides, a.variant)
    elif a.what == "filters":
        yield bench_filters(a.overrides, a.variant)
    elif a.what == "case-study":
        yield bench_case_study(a.overrides, a.data, a.folder, a.shrink)
    elif a.what == "projection":
        yield project()
    elif a.what == "quickstart":
        yield bench_quickstart(a.overrides, a.variant)
    elif a.what == "population":
        for config in a.config or [None]:
            for depth in a.depth or [None]:
                members = a.members or (1, 2, 4, 8, 16)
                yield from bench_population(
                    config, depth, members, a.steps, a.overrides, a.variant, a.note
                )
    elif a.what == "engine" and is_drafted(a):
        yield from bench_drafts(a)
    elif a.what == "race":
        yield race([Path(run) for run in a.overrides], a.baseline, a.differ, a.variant)
    else:
        folder = (a.out or Path("runs/bench")) if a.profile else None
        for config in a.config or ["gpt_d12"]:
            if a.what == "step":
                if a.switches:
                    yield from bench_switches(config, a.overrides, a.variant, folder, a.peer)
                elif a.flags:
                    yield from bench_flags(config, a.overrides, a.variant)
                else:
                    peer_records = nanochat_step(a.peer, config, a.overrides) if a.peer else []
                    for record in bench_step(config, a.overrides, a.variant, folder):
                        yield record | ({"beside": peer_records} if peer_records else {})
            elif a.what == "engine":
                with preferring(None if a.few_rows == MEGAKERNEL else a.few_rows):
                    yield from bench_engine(config, a.overrides, a.variant, loads_of(a), folder)
            elif a.what in whole:
                yield from whole[a.what](config, a.overrides, a.variant)
            elif a.techniques:
                yield from bench_techniques(config, a.overrides, a.variant)
            else:
                yield memory_of(a)(config, a.overrides, a.variant)


def asked(a: argparse.Namespace) -> bool:
    """Whether a `compress` command line names something to measure."""
    return bool(a.overrides or a.shape) or a.recipes is not None


def rungs_asked(a: argparse.Namespace) -> AskedRungs:
    """The rungs and options that a `ladder` command line asks for."""
    flags = {"tune": a.tune, "remove": a.remove, "time_only": a.time_only, "record": a.record}
    names = tuple(a.only or ()), a.steps, a.workers or 1
    return AskedRungs(a.scale, tuple(a.overrides), *names, **flags, out=a.out)


def dry_run(
    a: argparse.Namespace, config: str, overrides: Sequence[str], variant: str | None
) -> dict[str, Any]:
    """The record of a dry run. Its variant names the precision and the overrides."""
    record = preflight_of(a, config, overrides)
    named = f"{record['variant']}, {variant}" if variant else record["variant"]
    return record | {"variant": named}


def memory_of(a: argparse.Namespace) -> Callable[..., dict[str, Any]]:
    """The benchmark behind `memory` with these options: (config, overrides, variant) -> record."""
    if a.devices is not None or a.fit is not None:
        return functools.partial(dry_run, a)
    if a.longest:
        limit = int(a.memory * 2**30) if a.memory else None
        return functools.partial(bench_longest, memory=limit)
    return bench_memory


def train_beside(a: argparse.Namespace, config: str) -> Path:
    """Train a peer on the data of a configuration; returns the run directory."""
    if a.what == "huggingface":
        return train_huggingface(config, a.overrides)
    checkout, *overrides = a.overrides or [""]
    train = train_nanochat if a.what == "nanochat" else train_modded_nanogpt
    return train(Path(checkout), config, overrides)


def command_line(argv: list[str] | None) -> str:
    """The command of a measurement as stored in its record, without output folders."""
    words = list(sys.argv[1:] if argv is None else argv)
    for option in ("--out", "--folder"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    return shlex.join(["python", "-m", "benchmarks", *words])


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after one line about what the user can fix."""
    arguments = parse(argv)
    check_options(arguments)
    check_once([one for one in arguments.overrides if "=" in one])
    console = screen()
    if arguments.what in ("nanochat", "modded-nanogpt", "huggingface"):
        for config in arguments.config or ["gpt_d12"]:
            console.print(train_beside(arguments, config), "is ready for `race`")
        return 0
    if arguments.what == "curves":
        folder = arguments.out or BENCHMARKS
        path = draw_curves(arguments.overrides, arguments.baseline, folder)
        console.print(path.name, "is drawn")
        return 0
    if arguments.what == "verdicts":
        if arguments.overrides:
            workers = arguments.workers or 1
            only = arguments.time_only
            flags = {"time_only": only, "tune": arguments.tune}
            train_verdicts(arguments.overrides, workers, arguments.record, arguments.out, **flags)
        console.print(make_page().name, "is current")
        return 0
    if arguments.what == "ladder":
        if arguments.scale:
            climb(rungs_asked(arguments))
        console.print(make_ladder_page().name, "is current")
        return 0
    if arguments.what == "compress" and not asked(arguments):
        console.print(make_compression_page().name, "is current")
        return 0
    if arguments.what == "table":
        pages = [*update_pages(), *update_figure_pages()]
        console.print(*(page.name for page in pages), "are current")
        return 0
    if arguments.what == "check":
        return check_records(arguments.only or (), arguments.record, console)
    for _, same in itertools.groupby(measure(arguments), stem):
        for record in same:
            record.setdefault("command", command_line(argv))
            if arguments.record:
                path = write(record, arguments.out or RESULTS)
                record["file"] = path.name
        if arguments.record and arguments.what == "race":
            names = record["bench"], record["config"], *filter(None, [record["variant"]])
            figure = f"{'-'.join(names)}.png"
            draw(record, (arguments.out or BENCHMARKS) / figure)
        console.print(report(record) if record["bench"] == "preflight" else table_of(record))
    return 0


if __name__ == "__main__":
    # Compile time is measured, so the compilation cache of earlier runs must not be used.
    jax.config.update("jax_enable_compilation_cache", False)
    take_memory()
    sys.exit(main())
