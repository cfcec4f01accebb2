"""Convert a saved model to the structure of a Hugging Face family, for export."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxtrain.config.resolve import Resolved
from jaxtrain.interop.companions import FOLDER, read_json
from jaxtrain.interop.configs import Json, family_of, fitting_family
from jaxtrain.interop.families import Family
from jaxtrain.interop.keys import text_part
from jaxtrain.model import Params, ResolvedModel, Transformer, split
from jaxtrain.runs.saved import Saved, apply_weight_form, load_saved, without_mtp
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Specs


class ExportModel(NamedTuple):
    """A saved model in a family's structure. source_config: the config.json of its import, or {}.

    config: the config.json to write.
    """

    saved: Saved
    source_config: Json
    model: ResolvedModel
    specs: Specs
    params: Params
    family: Family
    config: Json


def prepare_export(run: Path, family: str | None) -> ExportModel:
    """A run's model in a family's structure (default: the import's, or the first that fits).

    Raises UserError for a model that no Hugging Face family can represent.
    """
    saved = apply_weight_form(load_saved(run))
    saved = without_mtp(saved, "checkpoints of the families that can be written have no place")
    check_exportable(saved.config, run)
    source_config = text_part(read_json(saved.tokenizer_dir / FOLDER / "config.json"))
    rows = source_config.get("vocab_size", saved.tokenizer.vocab_size)
    wanted = family or (family_of(source_config).model_type if source_config else None)
    model, params, specs = saved.config.model, saved.params, saved.specs
    if model.share_layers:  # no family shares layers: each copy is written out
        params, copies = {**params}, model.layers_per_set
        repeat = lambda w: np.repeat(np.asarray(w), copies, axis=0)
        params["blocks"] = jax.tree.map(repeat, params["blocks"])
        model = model.model_copy(update={"share_layers": None})
        specs = split(Transformer(model, saved.tokenizer.vocab_size))[1]
    row, config = fitting_family(model, rows, wanted)
    return ExportModel(saved, source_config, model, specs, params, row, config)


def token_ids(saved: Saved, source_config: Json) -> Json:
    """Special token ids for config.json."""
    ids = {"bos_token_id": saved.tokenizer.bos_id, "eos_token_id": saved.tokenizer.bos_id}
    return {k: source_config.get(k, ids[k]) for k in ids} | {
        "pad_token_id": source_config.get("pad_token_id")
    }


def check_exportable(c: Resolved, run: Path) -> None:
    """Raise UserError for a model with parts that no Hugging Face checkpoint can hold."""
    for name in ("prompt", "prefix"):
        if tokens := getattr(c.model, name):
            folders = (run / "adapter", run / "model" / "adapter")
            adapter = next((f"{p}, which" for p in folders if p.is_dir()), "the adapter that")
            raise UserError(
                f"{run} has a {name} of {tokens} virtual tokens, which Hugging Face checkpoints "
                f"cannot hold: export its base (train.init_from {c.train.init_from}); the {name} "
                f"is {adapter} peft loads with it"
            )
    if c.model.adapter:
        raise UserError(
            f"{run} has adapters of {c.model.adapter} channels in its layers "
            "(finetune.name=adapter), which Hugging Face checkpoints cannot hold; models tuned "
            "with lora, ia3, bitfit or freeze can be exported"
        )
    if c.model.moe:
        raise UserError(
            f"{run} has model.moe, {c.model.moe.experts} experts; none of the families that export "
            "writes supports mixture of experts"
        )
