"""Command lines and files that no command may take: what each is, and words of the one line."""

from typing import NamedTuple

COMMANDS = {
    "main": "jaxtrain.main", "prepare": "jaxtrain.train.prepare",
    "generate": "jaxtrain.inference.generate", "evaluate": "jaxtrain.evaluation.evaluate",
    "score": "jaxtrain.evaluation.score", "harness": "jaxtrain.evaluation.lm_eval",
    "report": "jaxtrain.runs.report", "launch": "jaxtrain.cluster.launch",
    "data": "jaxtrain.cli", "interop": "jaxtrain.cli", "compare": "jaxtrain.runs.compare",
    "bench": "benchmarks.__main__", "serve": "jaxtrain.inference.server.serve",
}  # fmt: skip


class Case(NamedTuple):
    """Files are bytes, or functions of what stands there; paths are below the folder of the call,
    which holds `run` (a trained model of bytes) and `hf` (the same as a checkpoint)."""

    command: str
    arguments: list
    words: str
    files: dict


def case(command, arguments, words, **files):
    return Case(command, arguments.split() if type(arguments) is str else arguments, words, files)


def file(command, arguments, words, path, content):
    listed = arguments.split() if type(arguments) is str else arguments
    return Case(command, listed, words, {path: content})


# ---- the configuration -----------------------------------------------------------------------

SHOW = ["--print-config"]
BOOLEAN, BITS, FINITE = "not true or false", "beyond 64 bits", "should be a finite number"
WHOLE_FIELDS = (
    "train.steps", "train.batch_size", "train.sequence_length", "model.depth", "model.width",
    "model.heads", "run.seed", "data.seed", "eval.every", "eval.tokens", "sample.tokens",
    "sample.top_k", "checkpoint.keep", "metrics.every", "data.workers", "mesh.data",
    "data.tokenizer.vocab_size", "optim.schedule.warmup_steps", "model.moe.experts",
)  # fmt: skip
REAL_FIELDS = (
    "sample.temperature", "sample.top_p", "optim.matrix_lr", "optim.weight_decay",
    "train.tokens_per_parameter", "train.z_loss", "model.norm_eps", "model.rope_base",
    "model.logit_softcap", "data.validation.fraction", "processes.start_timeout", "optim.clip_norm",
)  # fmt: skip


def fields():
    for field in WHOLE_FIELDS:
        yield case("main", [*SHOW, f"{field}="], "there is no value")
        yield case("main", [*SHOW, f"{field}=true"], BOOLEAN)
        yield case("main", [*SHOW, f"{field}=-1"], "greater than")
        yield case("main", [*SHOW, f"{field}=1.5"], "valid integer")
        yield case("main", [*SHOW, f"{field}=99999999999999999999"], BITS)
    for field in REAL_FIELDS:
        yield case("main", [*SHOW, f"{field}=nan"], FINITE)
        yield case("main", [*SHOW, f"{field}=.inf"], FINITE)
        yield case("main", [*SHOW, f"{field}=false"], BOOLEAN)
        yield case("main", [*SHOW, f"{field}=-1"], "greater than")
    for name in ("../../escape", "/escape", "..", ".", "a/../../b", '""'):
        yield case("main", [*SHOW, f"run.name={name}"], "run.name")
    for text, words in OVERRIDES.items():
        yield case("main", [*SHOW, *(text if type(text) is tuple else (text,))], words)


OVERRIDES = {
    'run.name="a\\0b"': "NUL", 'run.directory="\\ud800"': "UTF-8", f"run.name={'x' * 300}": "255",
    'data.train.path="a\\0b"': "NUL", 'data.cache_dir="\\0"': "NUL",
    'sample.prompts=["\\ud800"]': "UTF-8", f"train.steps={'9' * 5000}": BITS,
    "train.steps=0xfffffffffffffffffffff": BITS, f"model={'[' * 3000}": "nested too deep",
    f"model={'[' * 200}{']' * 200}": "levels", "model.depth=100000000": "less than or equal",
    "train.steps=3000000000": "less than or equal", "model.hidden=1000000000000": "fit nowhere",
    "train.batch_size=100000000": "tokens a step", "train.tokens_per_parameter=1e300": "less than",
    ("train.steps=5", "train.steps=6"): "given twice",
    ("data.train.path=a.jsonl", "data.train.path=b.jsonl"): "quote {a..b}",
    ("model={depth: 2}", "model.depth=3"): "given twice",
    ("model.depth=3", "model={width: 64}"): "given twice",
    "model={depth: 2, depth: 3}": "given twice", "model={depth: }": "has no value",
    "sample.prompts=[a": "not readable as YAML", "optim=!!python/name:os.system": "YAML_OR_FIELD",
    "optim.multipliers={embedding: true}": BOOLEAN, "optim.multipliers={embedding: .nan}": FINITE,
    "train.steps=1:30": "valid integer", "=3": "key.path=value", "train..steps=3": "key.path=value",
    "train.steps": "key.path=value", "nonsense=1": "no such field", "model=true": "is a section",
}  # fmt: skip
OVERRIDES["optim=!!python/name:os.system"] = "is a section"

LAUGHS = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (i + 1, i + 1, b", ".join([b"*a%d" % i] * 9)) for i in range(9)
)
YAML = {
    b"model: {depth: 2": "while parsing a flow mapping",
    b"\xff\xfe\x00": "not readable as YAML",
    b"just text": "expected `section",
    b"- a\n": "expected `section",
    b"3": "expected `section",
    b"false": "expected `section",
    b"!!python/object/apply:os.getcwd []": "constructor",
    b"model:\n  depth: 2\n  depth: 3\n": "depth is given twice",
    b"train:\n  steps:\n": "no value",
    b"model:\n": "model has no value",
    b"sample: {prompts: [a, b, ]}\nrun:\n": "run has no value",
    b"sample:\n  prompts:\n  - a\n  -\n": "no value",
    b"a: " + b"[" * 5000: "nested too deep",
    b"a: " + b"[" * 200 + b"]" * 200: "levels",
    LAUGHS: "more than 100,000 values",
    b"a: &a [*a]": "an alias stands for",
    b"a: 'x\0y'": "special characters",
    b"train: {steps: " + b"9" * 5000 + b"}": BITS,
    b"train: {steps: yes}": BOOLEAN,
    b"sample: {temperature: .nan}": FINITE,
    b"{? [a]: b}": "unhashable key",
    b"1: 2": "the key 1 is no text",
    b"on: 2": "the key True is no text",
    b"run: {name: ../x}": "inside run.directory",
    b"a: *nothing": "undefined alias",
    b"%YAML 9.9\n---\na: 1": "not readable as YAML",
}


def yaml_files():
    for content, words in YAML.items():
        yield file("main", "--config c.yaml --print-config", words, "c.yaml", content)
    for name in ("", "nowhere.yaml", "x" * 300, "run", "quickstrt"):
        words = "File name too long" if len(name) > 255 else f"config {name}: no such file"
        yield case("main", ["--config", name, *SHOW], words)
        yield case("prepare", ["--config", name], words)


# ---- arguments -------------------------------------------------------------------------------

WHOLE = "must be a whole number from"
ARGUMENTS = {
    "main": {
        "--nope": "unrecognized", "--config": "expected one argument", "--dry-run": "--dry-run",
        "--dry-run --config quickstart --devices x": WHOLE, "--devices 8": "is for --dry-run",
        "--fit -3 --config quickstart": WHOLE, "--memory nan --dry-run": "must be a number above",
        "--processes 2": "missing", "--process 0 --processes 0 --coordinator a:1": WHOLE,
        "--process 5 --processes 2 --coordinator a:1": "must be 0 to 1",
        "--dry-run --config quickstart --device T4000": "has no figures", "\udcff": "not UTF-8",
    },
    "prepare": {"--nope": "unrecognized", "x": "key.path=value", "\udcff=1": "not UTF-8"},
    "generate": {
        "": "required: run", "run --tokens 0": WHOLE, "run --tokens -5": WHOLE,
        "run --tokens x": WHOLE, "run --tokens 1e9": WHOLE, "run --tokens 99999999999": WHOLE,
        "run --temperature nan": "must be a number from 0", "run --temperature -1": "from 0",
        "run --temperature inf": "from 0", "run --temperature 1e999": "from 0",
        "run --top-k 0": WHOLE, "run --top-k 1.5": WHOLE, "run --top-p 0": "above 0",
        "run --top-p nan": "above 0", "run --top-p 1.1": "at most 1", "run --seed -1": WHOLE,
        f"run --seed {10**30}": WHOLE, f"run --seed {2**63}": WHOLE, "run --step -1": WHOLE,
        "run --step 7": "nothing was saved yet", "run --cache-dtype int4": "invalid choice",
        "run --prompt \udcff": "not UTF-8", "run --system a\0b": "NUL", "run --system x": "--chat",
        "run --drafts 17": WHOLE, "run --draft-run nowhere --drafts 1": "not a run directory",
        "run --chat --prompt a": "use jaxtrain generate", "run extra": "unrecognized",
        "nowhere": "not a run directory", "hf": "not a run directory", f"{'x' * 300}": "name too",
        "run/model/config.yaml": "not a run directory", "run --tokens": "expected one argument",
    },
    "serve": {
        "": "required: run", "run --port -1": WHOLE, "run --port 70000": WHOLE,
        "run --max-tokens 0": WHOLE, "run --max-concurrency 0": WHOLE, "run --max-queue -1": WHOLE,
        "run --max-body 0": "above 0", "run --timeout nan": "above 0", "run --drain -1": "from 0",
        "run --context 0": WHOLE, "run --pooling max": "invalid choice", "run --drafts 17": WHOLE,
        "run --api-key-file a --api-key-env B": "not allowed with", "run --step -1": WHOLE,
        "run --api-key-file nowhere": "there is no file", "run --api-key-env NOPE": "holds no key",
        "nowhere --port 0": "not a run directory", "hf --port 0": "not a run directory",
        "run --port 0 --step 7": "nothing was saved yet", "run --host no.host.invalid": "--host",
        "run --port 0 --tensor 3": "does not divide", "run --port 0 --draft-run hf": "not a run",
        "run --port 0 --draft-run run": "draft_run needs drafts", "run extra": "unrecognized",
        "run --api-key \udcff": "not UTF-8", "run --name \udcff": "not UTF-8",
        "run --tensor 0": WHOLE, "run --cache-dtype int4": "invalid choice",
    },
    "evaluate": {
        "": "required", "run --step -1": WHOLE, "run --tasks core --limit 0": WHOLE,
        "run train.steps=5": "takes other values of", "run model.depth=3": "takes other values of",
        "run optim.matrix_lr=1": "takes other values of", "run run.seed=3": "takes other values of",
        "run data.seed=3": "takes other values of", "run eval.tokens=5": "takes other values of",
        "run data.packing.name=padded": "takes other values of", "run eval.batch_size=": "no value",
        "run eval.batch_size=0": "greater than", "run eval.batch_size=true": BOOLEAN,
        "run eval.batch_size=2 eval.batch_size=3": "given twice", "run nope": "key.path=value",
        "run --tasks x --bundle nowhere": "no evaluation bundle", "run --tasks no.yaml": "cannot",
        "run --tasks core data.seed=1": "takes other values of", "nowhere": "not a run directory",
        "run data.validation.name=none": "data.validation is none", "run --limit x": WHOLE,
        "run data.train.path=nowhere.txt": "nowhere.txt", "run mesh.data=3": "does not divide",
    },
    "score": {
        "": "required", "run --score el2n": "required: --out", "run --out x.jsonl.zst": "--score",
        "run --score nope --out x.jsonl.zst": "no such score", "run --score , --out x": "none of",
        "run --score el2n --out x.txt": "has to end in", "nowhere --score el2n --out x": "not a",
        "run --score el2n --out x.jsonl.zst --clusters 0": WHOLE,
        "run --score el2n --out x.jsonl.zst train.steps=3": "takes other values of",
        "run --score el2n --out x.jsonl.zst data.train.path=no.txt": "no.txt",
    },
    "compare": {
        "": "required: RUN", "run": "two runs or more", "run nowhere": "not a run directory",
    },
    "report": {"": "required", "nowhere": "is not a run", "run": "no metrics", "--x": "required"},
    "launch": {
        "": "--processes is required", "--processes 0 --": WHOLE, "--processes -1 --": WHOLE,
        "--processes x --": WHOLE, "--processes 99999999 --": WHOLE, "--nope": "unrecognized",
        "--processes 1 --port 70000 --": WHOLE, "--processes 1 --command nope --": "invalid choice",
        "--processes 1 --devices-per-process 0 --": WHOLE, "--processes 1 x": "unrecognized",
    },
    "data": {
        "nope": "no such command", "show-dat": "did you mean show-data?",
        "show-data": "required: config",
        "show-data nowhere": "no such file", "show-data quickstart --step -4": WHOLE,
        "show-data quickstart --rows -1": WHOLE, "show-data quickstart --rows 0": WHOLE,
        "show-data quickstart --characters -1": WHOLE, "show-data quickstart --step 1e3": WHOLE,
        "show-data quickstart train.steps=5 --step 5": "the run has 5 steps",
        "filter c --out o": "no such file",
        "filter quickstart": "required: --out", "filter quickstart --out o --samples -1": WHOLE,
        "show-data quickstart train.steps=": "no value",
        "show-data quickstart data.train.path=nofile": "nofile",
        "show-data quickstart train.steps=1000 --step 999999999": "the run has 1000 steps",
    },
    "interop": {
        "nope": "no such command", "import": "required",
        "export run": "out",
        "import nowhere out": "is not a folder", "import run out": "no config.json",
        "export nowhere out": "not a run", "export hf out": "not a run",
        "export run out --dtype int3": "invalid choice", "export run out --family bert": "invalid",
        "export run out --shard-bytes 0": WHOLE, "export run out --shard-bytes x": WHOLE,
        "export run hf": "holds a checkpoint already", "import hf run": "is there already",
    },
    "bench": {
        "": "required: what", "nope": "invalid choice",
        "step --minutes 3": "is for bench serve-soak, loader",
        "loader --minutes -1": "above 0", "loader --minutes nan": "above 0",
        "race nowhere": "is not a run",
        "memory --devices 0": "0 devices", "memory --devices x": WHOLE, "race run": "is not a run",
        "step --config nowhere": "no such file", "import nope": "no shape", "optim nope": "nope",
        "memory --longest --memory 0": "above 0", "attention nope": "nope", "flags": "invalid",
    },
    "harness": {"": "required", "run": "required: --tasks", "run --tasks x --limit 0": WHOLE},
}  # fmt: skip


def arguments():
    for command, lines in ARGUMENTS.items():
        for line, words in lines.items():
            yield case(command, line, words)
