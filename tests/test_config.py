"""The configuration: loading, messages, and what can be read of it."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import SHIPPED

import jaxtrain
from jaxtrain.config import (
    Config,
    fields,
    find_config,
    json_schema,
    load_config,
    tag_of,
    variants_of,
)
from jaxtrain.config.resolve import Resolved, override, resolve
from jaxtrain.main import main
from jaxtrain.optim import MuonConfig
from jaxtrain.settings import UserError, command

ROOT = Path(jaxtrain.__file__).parents[1]


# ---- loading ---------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_are_yaml(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {depth: 3}\noptim: {matrix_lr: 0.5}\n")
    c = load_config(
        tmp_path / "c.yaml",
        ["model.depth=5", "sample.prompts=[a, 'b=c']", "eval.every=null", "model.smear=false"],
    )
    assert (c.model.depth, c.model.smear, c.eval.every) == (5, False, None)
    assert c.sample.prompts == ("a", "b=c")
    assert c.optim.matrix_lr == 0.5 and c.optim.name == "muon"


def test_another_variant_starts_its_section_afresh(tmp_path):
    (tmp_path / "c.yaml").write_text("optim: {name: muon, matrix_lr: 0.5}\n")
    c = load_config(tmp_path / "c.yaml", ["optim.name=adamw", "optim.learning_rate=0.1"])
    assert (c.optim.name, c.optim.learning_rate) == ("adamw", 0.1)
    kept = load_config(tmp_path / "c.yaml", ["optim.name=muon"])
    assert kept.optim.matrix_lr == 0.5
    assert load_config(None, ["run.name=x"]).run.directory == "runs"


def test_a_config_is_found_by_path_and_by_bare_name(tmp_path, monkeypatch):
    shipped = find_config("quickstart")
    assert shipped.parent.name == "configs" and find_config("quickstart.yaml") == shipped
    assert find_config(str(shipped)) == shipped
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("{}")
    assert find_config("quickstart.yaml") == Path("quickstart.yaml")
    assert find_config("gpt_d12").is_file()


def test_a_resolved_config_takes_overrides_too():
    resolved = resolve(load_config(find_config("quickstart")), 512)
    changed = override(resolved, ["train.precision=float32", "mesh.data=1"])
    assert changed.train.precision == "float32" and changed.train.steps == resolved.train.steps
    with pytest.raises(UserError, match="train.step: no such field; did you mean train.steps"):
        override(resolved, ["train.step=3"])


# ---- messages --------------------------------------------------------------------------------


def tags(model, field):
    return ", ".join(repr(tag_of(variant)) for variant in variants_of(model.model_fields[field]))


BAD = {
    "model.dept=3": "model.dept: no such field; did you mean model.depth?",
    "matrix_lr=3": "matrix_lr: no such field; did you mean optim.matrix_lr?",
    "nonsense.y=3": "nonsense: no such field; there are run, data, optim, finetune, objective, "
    "mesh, eval, sample, checkpoint, metrics, processes, model, train",
    "optim.matrix_lrr=1": "optim.matrix_lrr: no such field; did you mean optim.matrix_lr?",
    "optim.b1=0.9": "optim.b1: no such field; it belongs to optim.name=adamw",
    "optim.name=adm": f"optim.name: got 'adm', allowed are {tags(Config, 'optim')}",
    "optim.schedule.name=cosin": "optim.schedule.name: got 'cosin', allowed are "
    f"{tags(MuonConfig, 'schedule')}",
    "sample.prompts=[a, 1]": "sample.prompts.1: got 1: input should be a valid string",
    "optim.schedule.warmup=3": "optim.schedule.warmup: jaxtrain calls it "
    "optim.schedule.warmup_steps",
    "data.tokenizer.name=bpe": "data.tokenizer.name: got 'bpe', allowed are 'sentencepiece', "
    "'huggingface', 'nanochat', 'bytes'",
    "data.train.name=jsonl": "data.train.path: field required",
    "model.depth=0": "model.depth: got 0: input should be greater than or equal to 1",
    "model.heads=0": "model.heads: got 0: input should be greater than or equal to 1",
    "model.depth=deep": "model.depth: got 'deep': input should be a valid integer, unable to "
    "parse string as an integer",
    "train.precision=fp8": "train.precision: got 'fp8': input should be 'auto', 'bfloat16', "
    "'float16' or 'float32'",
    "mesh.data=0": "mesh.data: got 0: input should be greater than or equal to 1",
    "mesh.data=3": "mesh.data=3 does not divide the number of devices, 8; these would: 1, 2, 4, 8",
    "mesh.data=4": "mesh.data=4: 4 of 8 devices; give mesh.data=8, or auto",
    "mesh.data=1": "mesh.data=1: 1 of 8 devices; give mesh.data=8, or auto",
    "mesh.pipeline_repeats=2": "mesh.pipeline_repeats=2 does not go with mesh.pipeline=1: there "
    "are no stages to interleave; set mesh.pipeline_repeats=1",
    "mesh.tensor=4 model.heads=6": "mesh.tensor=4 does not divide model.heads 6; these would: 1, "
    "2, 3, 6",
    "mesh.expert=2 mesh.data=4": "mesh.expert=2 does not go with model.moe.experts=null: there are "
    "no experts to divide; set mesh.expert=1",
    "mesh.expert=8 mesh.data=1 model.moe.experts=6": "mesh.expert=8 does not divide "
    "model.moe.experts 6; these would: 1, 2, 3, 6",
    "model.moe.remat=all": "model.moe.remat: got 'all': input should be 'none', 'attention', "
    "'ffn', 'dots', 'dots_fp8', 'block', 'int8', 'int4', 'int2', 'actnn8', 'actnn4', 'actnn2' or "
    "'offload'",
    "model.moe.top_k=9": "model.moe: top_k 9 is more than the 8 experts",
    "train.local_sgd.name=easgd": "train.local_sgd.name: got 'easgd', allowed are 'diloco', "
    "'gossip'",
    "mesh.fsdp=auto": "mesh: only one axis can be auto, but data and fsdp are",
    "model=3": "model: got 3, but it is a section: set its fields, model.KEY=value",
    "optim=adamw": "optim: got 'adamw', but it is a section: set its fields, optim.KEY=value",
    "model.width=100": "model: width 100 is not a multiple of head_dim 128; set model.head_dim",
    "model.attention=flash": "model: attention has no backend flash; "
    "it has cudnn, mosaic, xla, triton, fa4, reference",
    "train.batch_size=12": "train.batch_size 12 does not divide over 8 devices "
    "(mesh data x fsdp x expert); use 8",
    "train.batch_size=16 train.device_batch_size=3": "train.batch_size 16 is not a multiple of 8 "
    "devices x train.device_batch_size 3; use 2",
    "eval.batch_size=12": "eval.batch_size 12 does not divide over 8 devices "
    "(mesh data x fsdp x expert); use 8",
    "train.steps=": "'train.steps=': there is no value; write null for none, '\"\"' for no text",
    "train.steps=true": "train.steps: got True: it must be a number, not true or false",
    'optim.multipliers={"matrices":false}': "optim.multipliers: it must be a number, not true or "
    "false",
    "train.steps=5 eval.every=3 train.steps=6": "train.steps is given twice, by 'train.steps=5' "
    "and by 'train.steps=6'; keep one (and quote {a..b}, of which a shell makes several)",
    'model={"depth":3} model.depth=4': "model.depth is given twice, by 'model={\"depth\":3}' and "
    "by 'model.depth=4'; keep one (and quote {a..b}, of which a shell makes several)",
    'model.depth=4 model={"width":8}': "model.depth is given twice, by 'model.depth=4' and by "
    "'model={\"width\":8}'; keep one (and quote {a..b}, of which a shell makes several)",
    'model={"depth":3, "depth":4}': '\'model={"depth":3, "depth":4}\': not readable as YAML: depth '
    "is given twice (line 1, column 13)",
    "sample.temperature=.inf": "sample.temperature: got inf: input should be a finite number",
    "optim.matrix_lr=nan": "optim.matrix_lr: got 'nan': input should be a finite number",
    "run.name=../../escape": "run.name: got '../../escape': it must be a folder inside "
    "run.directory; set run.directory to use another folder",
    'run.name="a\\0b"': "run.name: got 'a\\x00b': it has a NUL character, or is not UTF-8",
    f"run.name={'x' * 300}": f"run.name: got '{'x' * 59} ... {'x' * 19}': a folder's name has at "
    "most 255 bytes",
    "model.depth=100000000": "model.depth: got 100000000: input should be less than or equal to "
    "10000",
    "model.hidden=1000000000000": "model: it has 1.84e+16 parameters (depth 12, width 768, hidden "
    "1000000000000); more than 1e+14 fit nowhere",
    "train.steps=12345678901234567890": "train.steps: got 12345678901234567890: the number is "
    "beyond 64 bits",
    f"train.steps={'9' * 5000}": f"'train.steps={'9' * 47} ... {'9' * 19}': not readable as YAML: "
    "a whole number is beyond 64 bits (line 1, column 1)",
    "train.batch_size=100000000": "train.batch_size 100000000 x train.sequence_length 2048 are "
    "2.05e+11 tokens a step, and at most 268,435,456 can be: lower one",
    "model.depth": "'model.depth': an override is key.path=value, as in optim.matrix_lr=0.01",
    "model.width=256 model.kv_heads=3": "model: heads 2 is not a multiple of kv_heads 3",
    "sample.prompts=a": "sample.prompts: got 'a', but it is a list: sample.prompts='[..., ...]'",
    "optim.matrix_lr=1 optim.name=adamw": "optim.matrix_lr: no such field; it belongs to "
    "optim.name=muon",
    'data.train.filters=[{"term":3}]': "data.train.filters.0.name: field required, it says which "
    "variant this is; see --help",
    "data.train.path=a.jsonl.xz": "data.train: a.jsonl.xz is not plain text: set name=jsonl, and "
    "perhaps its field",
    "model.depth=[1": "'model.depth=[1': not readable as YAML: while parsing a flow sequence, "
    "expected ',' or ']', but got '<stream end>' (line 1, column 3)",
}


@pytest.mark.parametrize("overrides", BAD)
def test_bad_input_is_one_line_and_exit_code_2(overrides, capsys):
    assert main(["--print-config", *re.split(r"(?<!,) ", overrides)]) == 2
    out, err = capsys.readouterr()
    assert err == f"error: {BAD[overrides]}\n"
    assert out == ""


def test_a_wrong_key_in_a_list_names_the_fields_of_its_variant(capsys):
    assert main(["--print-config", "data.train.filters=[{name: c4, foo: 1}]"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: data.train.filters.0.foo: no such field; there are name, term")


def test_numbers_mean_what_they_look_like():
    c = load_config(None, ["train.steps=010", "run.name=2024-01-01", "optim.matrix_lr=1e-3"])
    assert (c.train.steps, c.run.name, c.optim.matrix_lr) == (10, "2024-01-01", 1e-3)
    with pytest.raises(UserError, match="train.steps: got '1:30': input should be a valid integer"):
        load_config(None, ["train.steps=1:30"])


def test_overrides_that_yaml_would_take_for_comments_or_aliases_are_text():
    assert load_config(None, ["data.train.path=*.txt"]).data.train.path == "*.txt"
    code = ["data.train.path=src", "data.train.header=# {path}", "data.train.name=code"]
    assert load_config(None, code).data.train.header == "# {path}"


def test_no_device_is_an_error_not_a_run(capsys):
    for flags in (["--fit", "0"], ["--dry-run", "--devices", "0"]):
        assert main(["--config", "quickstart", *flags]) == 2
        assert capsys.readouterr().err == "error: --dry-run on 0 devices: there has to be one\n"


@pytest.mark.parametrize("stray", ["--devices 8", "--device T4", "--memory"])
def test_options_of_the_dry_run_alone_are_no_run(stray, capsys, monkeypatch):
    monkeypatch.setattr("jaxtrain.train.loop.train", lambda *_: pytest.fail("a run begins"))
    value = ["16"] * (stray == "--memory")
    assert main(["--config", "quickstart", *stray.split(), *value]) == 2
    assert capsys.readouterr().err == f"error: {stray} is for --dry-run (or --fit N)\n"
    if stray == "--devices 8":
        assert main(["--config", "quickstart", "--fit", "6", *stray.split()]) == 2
        assert "--devices 8: --fit 6 says how many; give one" in capsys.readouterr().err


def test_a_path_that_cannot_be_used_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("x")

    @command
    def make(folder: Path) -> int:
        folder.mkdir(parents=True)
        return 0

    assert make(tmp_path / "file" / "run") == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file' / 'run'}: Not a directory\n"
    assert make(Path("/proc/run")) == 2
    assert capsys.readouterr().err == "error: /proc/run: No such file or directory\n"


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_gone_is_no_error(lines):
    """As in `data show | head`."""
    program = "import sys; from jaxtrain.settings import command; "
    program += f"sys.exit(command(lambda: print('x\\n' * {lines}) or 0)())"
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (found.returncode, found.stderr) == (0, b"")


def test_all_that_is_wrong_is_said_a_line_each(capsys):
    assert main(["--print-config", "model.dept=3", "eval.every=0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: {depth: 2", "not readable as YAML: while parsing a flow mapping"),
        (b"\xff", "not readable as YAML: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"just text", "expected `section: {field: value}`, got 'just text'"),
        (b"!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        (b"model:\n  depth: 2\n  depth: 3\n", "depth is given twice (line 3, column 3)"),
        (b"train:\n  steps:\n", "steps has no value: null is none"),
        (b"sample:\n  prompts:\n  - a\n  -\n", "an entry of a list has no value"),
        pytest.param(b"a: " + b"[" * 5000, "it is nested too deep", marks=pytest.mark.slow),
        (b"a: " + b"[" * 200 + b"]" * 200, "more than 100,000 values, or 100 levels"),
        (
            b"a0: &a0 [x, x]\n"
            + b"".join(
                b"a%d: &a%d [%s]\n" % (i + 1, i + 1, b", ".join([b"*a%d" % i] * 9))
                for i in range(9)
            ),
            "more than 100,000 values, or 100 levels",
        ),
        (b"a: &a [*a]", "an alias stands for what it is part of"),
        (b"a: 'x\0y'", "special characters are not allowed"),
    ],
    ids=[
        "torn",
        "not utf-8",
        "text",
        "code",
        "twice",
        "empty",
        "empty entry",
        "deep",
        "levels",
        "laughs",
        "itself",
        "nul",
    ],
)
def test_a_bad_file_is_named(tmp_path, capsys, content, message):
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    assert main(["--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file}: ") and message in line


@pytest.mark.parametrize(
    ("name", "hint"),
    [("quickstrt", "did you mean quickstart?"), ("zzz", f"shipped: {', '.join(SHIPPED)}")],
)
def test_a_missing_config_names_the_nearest(name, hint, capsys):
    assert main(["--config", name]) == 2
    assert capsys.readouterr().err == f"error: config {name}: no such file; {hint}\n"


# ---- what can be read ------------------------------------------------------------------------


def test_print_config_shows_the_resolved_tree(capsys):
    assert main(["--config", "quickstart", "--print-config", "train.batch_size=24"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    resolved = Resolved.model_validate(tree)
    assert resolved.train.batch_size == 24 and resolved.train.device_batch_size == 3
    open_still = {key for key, value in tree["train"].items() if value is None}
    assert open_still == {"init_from", "local_sgd", "loss_spike", "autofreeze"}
    assert tree["model"]["heads"] * tree["model"]["head_dim"] == tree["model"]["width"]


def test_every_field_has_a_description():
    for path, field, _ in fields(Config):
        if not path.endswith(".name") or path == "run.name":  # the others select a variant
            assert field.description, path


def test_the_shipped_schema_is_current_and_accepts_what_is_shipped():
    file = ROOT / "configs" / "schema.json"
    assert file.read_text() == json_schema(), "python -m jaxtrain.config > configs/schema.json"
    schema = json.loads(file.read_text())
    assert set(schema["properties"]) == set(Config.model_fields)
    depth = schema["$defs"]["ModelConfig"]["properties"]["depth"]
    assert depth["minimum"] == 1 and depth["description"]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_schema_is_written_by_the_module(capsys):
    runpy.run_module("jaxtrain.config", run_name="__main__")
    assert capsys.readouterr().out == json_schema()


def test_a_part_of_what_was_given_whole_is_an_error():
    with pytest.raises(UserError, match="model.kernels is 'xla' as a whole already"):
        load_config(None, ["model.kernels=xla", "model.kernels.ffn=mosaic"])
    c = load_config(None, ["model.kernels={norm: xla}", "model.kernels.rope=xla"])
    assert (c.model.kernels.norm, c.model.kernels.rope) == ("xla", "xla")
