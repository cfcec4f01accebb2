"""What follows from the depth: nanochat's tables of sizes, horizons, batches, rates and decays."""

import jax
import numpy as np
import pytest
import yaml

from jaxtrain.config import Config, find_config, load_config
from jaxtrain.config.resolve import Resolved, decay_line, resolve, resolved_text
from jaxtrain.main import main
from jaxtrain.model import Transformer, flops_per_token, resolve_model, sizes, split
from jaxtrain.settings import UserError

VOCAB = 32768
ONE = jax.devices()[:1]

# depth: width, heads, full layers; parameters in millions of matrices, head, embedding, value
# embeddings, in all; FLOPs per token, and attention's share of them
SIZES = {
    12: (768, 6, 3, 84.9, 25.2, 25.2, 151.0, 286.3, 7.60e8, 0.130),
    16: (1024, 8, 4, 201.3, 33.6, 33.6, 268.4, 536.9, 1.585e9, 0.111),
    20: (1280, 10, 5, 393.2, 41.9, 41.9, 419.4, 896.5, 2.886e9, 0.095),
    24: (1536, 12, 6, 679.5, 50.3, 50.3, 604.0, 1384.1, 4.775e9, 0.083),
    26: (1664, 13, 7, 863.9, 54.5, 54.5, 708.8, 1681.8, 5.991e9, 0.080),
}
# (depth, ratio): scaling parameters in millions, tokens in billions, batch, steps, decay
RUNS = {
    (12, 12): (110.1, 1.32, 2**19, 2520, 0.280),
    (16, 12): (234.9, 2.82, 2**19, 5376, 0.131),
    (20, 12): (435.2, 5.22, 2**20, 4980, 0.100),
    (24, 12): (729.8, 8.76, 2**20, 8352, 0.0597),
    (24, 8): (729.8, 5.84, 2**20, 5568, 0.0597),
    (26, 12): (918.4, 11.02, 2**20, 10510, 0.0475),
}


def resolved(overrides=(), vocab=VOCAB):
    return resolve(load_config(None, overrides), vocab, ONE)


@pytest.mark.parametrize("depth", SIZES)
def test_sizes_and_flops_follow_from_the_depth(depth):
    c = resolve_model(Config.model_validate({"model": {"depth": depth}}).model, 2048)
    _, specs = split(Transformer(c, VOCAB))
    table = sizes(specs)
    millions = [
        round(table[group] / 1e6, 1)
        for group in ("matrix", "head", "embedding", "value_embedding", "total")
    ]
    flops = flops_per_token(c, specs, 2048)
    attention = flops - 6 * (table["matrix"] + table["head"])
    full = sum(spec.window is None for spec in Transformer(c, VOCAB).plan)
    expected = SIZES[depth]
    assert (c.width, c.heads, full, *millions) == expected[:-2]
    assert flops == pytest.approx(expected[-2], rel=5e-4)
    assert round(attention / flops, 3) == expected[-1]


@pytest.mark.parametrize(("depth", "ratio"), RUNS)
def test_horizon_batch_steps_and_decay_follow_from_depth_and_ratio(depth, ratio):
    c = resolved([f"model.depth={depth}", f"train.tokens_per_parameter={ratio}"])
    batch = c.train.batch_size * c.train.sequence_length
    scaling, tokens, *expected, decay = RUNS[depth, ratio]
    assert [batch, c.train.steps] == expected
    assert round(batch * c.train.steps / 1e9, 2) == tokens
    assert round(batch * c.train.steps / ratio / 1e6, 1) == pytest.approx(scaling, abs=0.1)
    assert c.optim.weight_decay == pytest.approx(decay, abs=5e-5 if decay < 0.1 else 5e-4)


def test_batches_of_other_depths():
    depths = {8: 18, 10: 19, 16: 19, 18: 20, 26: 20, 32: 21, 50: 21}
    for depth, power in depths.items():
        c = resolved([f"model.depth={depth}"])
        assert c.train.batch_size * c.train.sequence_length == 2**power, depth


def test_rates_of_the_d12_are_nanochats():
    assert resolved().optim.model_dump(include=RATES.keys()) == pytest.approx(RATES)


RATES = {
    "matrix_lr": 0.02, "weight_decay": 0.28, "embedding_lr": 0.3, "value_embedding_lr": 0.15,
    "head_lr": 0.008, "residual_scale_lr": 0.005, "x0_scale_lr": 0.5, "scalar_lr": 0.2,
}  # fmt: skip


def test_rates_grow_with_the_root_of_the_batch_and_some_fall_with_the_width():
    optim = resolved(["model.depth=48", "train.batch_size=1024"]).optim  # 2^21 tokens, width 3072
    factors = {name: getattr(optim, name) / RATES[name] for name in RATES if name.endswith("_lr")}
    wide = {"embedding_lr", "value_embedding_lr", "head_lr"}
    expected = {name: 1.0 if name in wide else 2.0 for name in factors} | {"scalar_lr": 1.0}
    assert factors == pytest.approx(expected)


def test_mup_takes_the_rates_of_its_base_width():
    """Both rules at once would scale the head's rate twice."""
    steps = ["train.batch_size=16", "train.steps=8"]
    given = [*steps, "model.init=mup", "model.base_width=768"]
    plain, wide = (resolved([*given, f"model.depth={d}"]).optim for d in (12, 24))
    assert wide.head_lr == plain.head_lr and wide.embedding_lr == plain.embedding_lr
    other = resolved([*steps, "model.depth=24"]).optim
    assert other.head_lr < wide.head_lr


# overrides: nanochat's decay with `--depth` and `--num-iterations` so, of its base_train.py
SHORTENED = {
    ("train.steps=500",): 0.28,
    ("train.steps=1260",): 0.28,
    ("model.depth=4", "train.steps=100"): 1.8904,
    ("model.depth=24", "train.steps=100"): 0.0597,
}


@pytest.mark.parametrize("overrides", SHORTENED, ids=" ".join)
def test_a_shortened_run_keeps_the_decay(overrides):
    """The decay follows the horizon that the depth asks for, not the steps that are taken of it."""
    optim = resolved(overrides).optim
    assert optim.weight_decay == pytest.approx(SHORTENED[overrides], rel=1e-3)
    whole = [x for x in overrides if not x.startswith("train.steps")]
    assert optim == resolved(whole).optim


def test_decay_follows_the_batch():
    # a quarter of the batch in as many tokens: half of the decay, and half of the rate
    usual, small = resolved().optim.weight_decay, resolved(["train.batch_size=64"])
    assert small.train.steps == 4 * 2520
    assert small.optim.weight_decay == pytest.approx(usual / 2, rel=1e-4)
    assert small.optim.matrix_lr == pytest.approx(0.01)


def test_a_step_decays_a_tenth_of_a_weight_at_most():
    """Of a model much smaller than any of nanochat's; at its depths the bound changes nothing."""
    tiny = ["model.depth=1", "model.width=32", "model.head_dim=8"]
    optim = resolve(load_config(None, tiny), 64, ONE).optim
    assert optim.weight_decay * optim.matrix_lr == pytest.approx(0.1)
    for depth in (1, 2, 4, 50):
        optim = resolved([f"model.depth={depth}"]).optim
        assert optim.weight_decay * optim.matrix_lr < 0.09, depth


def test_a_decay_that_moves_is_said():
    assert decay_line(load_config(None, []), resolved()) is None
    given = ["model.depth=4", "train.steps=100"]
    assert decay_line(load_config(None, given), resolved(given)) == (
        "decay    optim.weight_decay 1.89 (0.28 for depth 12 with 524,288 tokens a step)"
    )
    by_hand = [*given, "optim.weight_decay=0.5"]
    assert decay_line(load_config(None, by_hand), resolved(by_hand)) is None
    adamw = [*given, "optim.name=adamw"]
    assert decay_line(load_config(None, adamw), resolved(adamw)) is None


def test_what_is_set_by_hand_wins():
    by_hand = {
        "model.width": 1024, "train.batch_size": 48, "train.steps": 77, "optim.matrix_lr": 0.5,
        "optim.weight_decay": 0.0, "optim.head_lr": 0.25,
    }  # fmt: skip
    c = resolved([f"{key}={value}" for key, value in by_hand.items()])
    for key, value in by_hand.items():
        section, field = key.split(".")
        assert getattr(getattr(c, section), field) == value


def test_a_resolved_configuration_is_resolved_to_itself():
    c = resolved(["model.depth=20"])
    again = resolve(Config.model_validate(c.model_dump()), VOCAB, ONE)
    assert again == c


def test_accumulation_follows_from_the_device_batch():
    c = resolved(["train.device_batch_size=32"])
    assert (c.train.batch_size, c.train.device_batch_size) == (256, 32)
    with pytest.raises(UserError, match="256 is not a multiple of 1 devices x .*_size 48"):
        resolved(["train.device_batch_size=48"])


# ---- --print-config --------------------------------------------------------------------------

TOKENIZER = f"data.tokenizer={{name: sentencepiece, vocab_size: {VOCAB}}}"


def test_print_config_shows_each_derived_value_with_its_rule(capsys):
    arguments = ["model.depth=24", TOKENIZER, "optim.head_lr=0.01"]
    arguments += ["train.device_batch_size=16"]
    assert main(["--print-config", *arguments]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "matrix_lr: 0.028284271 # 0.02 x sqrt(batch tokens / 2^19)" in lines
    assert "width: 1536 # 64 x depth, rounded up to a multiple of head_dim" in lines
    assert "head_lr: 0.01" in lines and "device_batch_size: 16" in lines
    assert lines[0].startswith("# 729,810,624 parameters in matrices and head; 8,757,")
    assert lines[0].endswith("1,048,576 a step: 4 microbatches x 16 rows x 8 devices")
    tree = yaml.safe_load(text)
    c = load_config(None, arguments)
    assert Resolved.model_validate(tree) == resolve(c, VOCAB)
    # every value that was open has its rule beside it
    given = c.model_dump(mode="json")
    derived = [
        field
        for section, fields in given.items()
        for field, value in fields.items()
        if value is None and tree[section][field] is not None
    ]
    assert len(derived) == 6 + 3 + 6
    for field in derived:
        assert any(line.startswith(f"{field}: ") and " # " in line for line in lines), field


@pytest.mark.parametrize("name", ["quickstart", "llama_tiny", "gpt_d12", "gpt_d24"])
def test_shipped_configurations_are_resolved(name):
    text = resolved_text(load_config(find_config(name)))
    c = Resolved.model_validate(yaml.safe_load(text))
    assert c.optim.name == "adamw" or np.isfinite(c.optim.matrix_lr)
