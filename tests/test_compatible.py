"""The table of what goes with what: each fix helps, each supported cell compiles."""

from functools import reduce
from math import prod
from pathlib import Path

import jax
import pytest

from jaxtrain.config import Config, fields, load_config, tag_of, variants_of
from jaxtrain.config.check_compatible import refusals
from jaxtrain.config.compatible import EVERYWHERE, REFUSALS
from jaxtrain.config.features import AXES, FEATURES
from jaxtrain.config.resolve import resolve
from jaxtrain.config.support_matrix import cell, overrides_of, page, rows, split_example
from jaxtrain.estimate.dry_run import facts_of, lower_step, trace_step, with_replicas
from jaxtrain.estimate.workload import load_workload
from jaxtrain.objectives import PREFERENCES
from jaxtrain.settings import UserError

TINY = [
    "data.tokenizer.name=bytes", "model.depth=2", "model.width=32", "model.head_dim=8",
    "model.hidden=64", "model.window_pattern=L", "model.value_embeddings=false",
    "train.sequence_length=32", "train.batch_size=8", "train.device_batch_size=2",
    "train.steps=2", "optim.schedule.warmup_steps=0",
]  # fmt: skip
CELLS = [(name, axis) for name in rows() for axis in AXES]
FOUND = {one: bool(cell(*one)) for one in CELLS}
SUPPORTED = [one for one, refused in FOUND.items() if not refused]
REFUSED = [one for one, refused in FOUND.items() if refused]
COMPILED = ("lion", "data"), ("ia3", "context")
OPTIMIZER = "optim.name=", "optim.qk_heads=", "optim.soap="  # the last two are Muon's


def devices_of(overrides):
    """As many as the mesh asks for."""
    mesh = load_config(None, overrides).mesh.model_dump(include=set(AXES))
    return jax.devices()[: prod(size for size in mesh.values() if size != "auto")]


def tried(features, axes, work=facts_of):
    """The step of a tiny model, as far as `work` takes it; what resolving refuses is an error."""
    first, *others = features
    overrides = [*TINY, *overrides_of(first, *axes)]
    for name in others:
        overrides += split_example(FEATURES[name].example)
    if not any(one.startswith(OPTIMIZER) for one in overrides):
        overrides.insert(0, "optim.name=adamw")  # half as long to trace; Muon has a row of its own
    devices = devices_of(overrides)
    if "CPU" not in FEATURES[first].devices or first in PREFERENCES:
        # Not on this machine; and tests/finetune/test_preference.py has the batches of preferences.
        resolve(load_config(None, overrides), 257, devices)
        return
    work(with_replicas(load_workload(None, overrides, devices, accumulated=True)))


# Features that go together are built together, by their names, which the same axes support: what a
# step takes to trace is mostly what it takes without any of them. Other features are by themselves.
STEPS = """
muon, zero 1, document_mask, multi_token
qk_heads, qk_norm_gain, masks
soap_muon, moe
adamw, zero 2, swiglu, prefix_token
adamw8bit, norm_gain, sampled_softmax
schedule_free, tied_head, selective
lion, mup, scan_layers
soap, qk_head_dim
galore, fake_quant, phases
adafactor, mla
sgd, remat, float16
lamb, z_loss, file offload
lars, learned positions, batch sizes
sr_ste, ffn_tiles
ffn_bias, int8_activations
dora, qlora
prompt, distill
encoder, masked_lm
batch_overlap, share_kv, compressed
local_sgd, mtp
stochastic_depth, share_layers
frozen_layers, autofreeze
"""
GROUPS = [tuple(line.split(", ")) for line in STEPS.strip().splitlines()]
GROUPS += [(name,) for name in rows() if not any(name in group for group in GROUPS)]
# The supported cells of a row are built together, three axes to a mesh of up to eight devices.
TOGETHER = ("data", "fsdp", "tensor"), ("context", "pipeline", "expert")
MESHES = [
    (group, axes)
    for group in GROUPS
    for all_axes in TOGETHER
    if (axes := [axis for axis in all_axes if all((name, axis) in SUPPORTED for name in group)])
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "axes"), MESHES, ids=["-".join([*group, *axes]) for group, axes in MESHES]
)
def test_every_supported_cell_is_built(group, axes):
    """All are traced, where shapes and placements meet; one in eight is lowered as well, and two
    are compiled, which takes four times as long."""
    lowered = lower_step if MESHES.index((group, axes)) % 8 == 0 else trace_step
    tried(group, axes, work=facts_of if (group[0], axes[0]) in COMPILED else lowered)


def test_the_meshes_hold_every_supported_cell():
    assert all(any((g[0], a[0]) == one for g, a in MESHES) for one in COMPILED)
    refused = {(name, axis) for group, axes in MESHES for name in group for axis in axes}
    assert refused == set(SUPPORTED)
    apart = lambda name: "CPU" not in FEATURES[name].devices or name in PREFERENCES
    assert not any(apart(name) for group in GROUPS if len(group) > 1 for name in group)
    sizes = load_config(None, overrides_of("lora", "data", "fsdp", "tensor")).mesh
    assert (sizes.data, sizes.fsdp, sizes.tensor) == (2, 2, 2)


def test_no_feature_of_a_step_takes_anothers_setting_away():
    for group in GROUPS:
        given = {one for name in group for one in split_example(FEATURES[name].example)}
        assert len({one.partition("=")[0] for one in given}) == len(given), group


@pytest.mark.parametrize(("feature", "axis"), REFUSED)
@pytest.mark.quick(
    "ffn_bias-expert", "share_layers-pipeline", "prompt-context", "dpo-pipeline", "lora-expert"
)
def test_every_refused_cell_is_accepted_once_its_fixes_are_applied(feature, axis):
    overrides = [*TINY, *overrides_of(feature, axis)]
    with pytest.raises(UserError) as stop:
        resolve(load_config(None, overrides), 257, devices_of(overrides))
    lines, fixes = str(stop.value).splitlines(), [r.fix for r in cell(feature, axis)]
    assert [line.rpartition("; set ")[2] for line in lines] == fixes
    fixed = [*overrides, *fixes]
    resolve(load_config(None, fixed), 257, devices_of(fixed))


def broken(overrides):
    c = load_config(None, overrides)
    shape = {axis: 1 if (n := getattr(c.mesh, axis)) == "auto" else n for axis in AXES}
    return refusals(c, shape)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: f"{r.feature}-{r.other}")
def test_each_refusal_is_met_and_its_fix_helps(refusal):
    both = split_example(FEATURES[refusal.feature].example)
    both += split_example(FEATURES[refusal.other].example)
    found = broken(both)
    assert refusal in found
    assert refusal not in broken([*both, refusal.fix])
    assert not broken(reduce(lambda given, r: [*given, r.fix], found, both))


def test_no_pair_is_refused_twice():
    pairs = [frozenset(refusal[:2]) for refusal in REFUSALS]
    assert len(set(pairs)) == len(pairs)


# ---- fail-closed ------------------------------------------------------------------------------

SECTIONS = ("model", "train", "mesh")  # the rows of variants cover the others' fields


def test_every_field_says_what_it_goes_with():
    """A new field is a key of FEATURES, or goes with everything: then EVERYWHERE has its name."""
    everywhere = [f"{section}.{name}" for section, t in EVERYWHERE.items() for name in t.split()]
    keys = {feature.key for feature in FEATURES.values()}
    all_paths = {path for path, *_ in fields(Config)}
    paths = {path for path in all_paths if path.split(".")[0] in SECTIONS}
    assert paths - keys == set(everywhere)
    assert len(set(everywhere)) == len(everywhere)
    lists = {"train.phases", "data.stages", "optim.wrappers"}
    assert keys - all_paths == {"finetune", "optim.offload", *lists}


@pytest.mark.parametrize("section", ["optim", "finetune", "objective"])
def test_every_variant_has_a_row(section):
    """A new optimizer, fine-tuning method or objective states its mesh axes."""
    tags = {tag_of(variant) for variant in variants_of(Config.model_fields[section])}
    examples = [split_example(FEATURES[name].example) for name in rows()]
    for tag in tags - {"full", "next_token"}:
        assert any(f"{section}.name={tag}" in example for example in examples), tag


def test_the_page_of_the_manual_is_current():
    path = Path(__file__).parents[1] / "docs" / "reference" / "support-matrix.md"
    assert path.read_text() == page(), f"python -m jaxtrain.config.support_matrix > {path}"
