"""LoRA adapters in peft's format: adapter_config.json and adapter_model.safetensors.

A model that fits no Hugging Face family has the same files, with our own module names.
"""

import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.interop.configs import Json, fitting_family, without_added_modules
from jaxtrain.interop.families import Row
from jaxtrain.interop.layouts import swap_rotary_halves
from jaxtrain.interop.tensors import read, read_header, write
from jaxtrain.model import Params, ResolvedModel, path_name
from jaxtrain.settings import UserError, read_object
from jaxtrain.storage.disk import write_json
from jaxtrain.weights.contract import flatten

FILE, PREFIX = "adapter_model.safetensors", "base_model.model."
KINDS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def rows_of(c: ResolvedModel, names: set[str]) -> list[Row]:
    """Rows (checkpoint tensors of the base model) that hold the matrices of these names."""
    try:
        rows = fitting_family(without_added_modules(c), c.vocab_multiple, None)[0].rows
    except UserError:
        own = {n: "blocks.{}." + n.removeprefix("blocks/").replace("/", ".") for n in names}
        rows = tuple(Row((name,), f"{theirs}.weight", "linear") for name, theirs in own.items())
    return [row for row in rows if names & set(row.ours)]


def modules(flat: dict[str, Any]) -> set[str]:
    """The matrices that an adapter changes."""
    return {name.rpartition("/")[0] for name in flat}


def columns(c: ResolvedModel, row: Row) -> dict[str, slice]:
    """Column range of each of our matrices in a checkpoint tensor; q, k and v may share one."""
    if len(row.ours) == 1:
        return {row.ours[0]: slice(None)}
    heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
    ends = np.cumsum([0, *(heads[name.rpartition("/")[2]] * c.head_dim for name in row.ours)])
    return {name: slice(*map(int, ends[i : i + 2])) for i, name in enumerate(row.ours)}


def channels(c: ResolvedModel, row: Row, x: np.ndarray) -> np.ndarray:
    """Convert output channels (last dim of x) between our order and the checkpoint's."""
    return swap_rotary_halves(x, c.head_dim) if row.layout == "turned linear" else x


def check_adapter(c: ResolvedModel, params: Params, dora: bool) -> None:
    """Raise UserError, before training, for targets whose adapter peft's format cannot express.

    params: LoRA parameters, or their ParamSpecs.
    """
    names = modules(flatten(params))
    for row in rows_of(c, names) if dora else ():
        if missing := [name for name in row.ours if name not in names]:
            short = lambda some: ", ".join(name.rpartition("/")[2] for name in some)
            raise UserError(
                f"finetune.targets: {short(row.ours)} are one matrix of this family's checkpoints, "
                f"and DoRA's norms are the whole matrix's: add {short(missing)}, or set "
                "finetune.dora=false"
            )


def write_adapter(folder: Path, c: ResolvedModel, params: Params, facts: Json) -> None:
    """Write the parameters of `finetune.lora` in float32.

    facts: rank, alpha, rslora, dora, base and revision of the run. Matrices that a checkpoint fuses
    (QKV) get one adapter: their ranks add up, and untrained ones get zeros.
    """
    flat = {name: np.asarray(x) for name, x in flatten(params).items()}
    names = modules(flat)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    check_adapter(c, params, facts["dora"])
    for row in rows_of(c, names):
        module = row.theirs.removesuffix(".weight")
        for layer in range(c.depth // c.layers_per_set):
            part = lambda name, kind, i=layer: flat[f"{name}/{kind}"][i]
            where = PREFIX + module.format(layer)
            some = [name for name in row.ours if name in names]
            down = np.concatenate([part(name, "a") for name in some], axis=1)
            up = block_diagonal([part(name, "b") for name in some])
            if len(some) < len(row.ours):
                places = columns(c, row)
                tuned = np.concatenate([np.r_[places[name]] for name in some])
                whole = np.zeros((len(up), places[row.ours[-1]].stop), np.float32)
                whole[:, tuned] = up
                up = whole
            tensors[f"{where}.{KINDS['a']}"] = down.T
            tensors[f"{where}.{KINDS['b']}"] = channels(c, row, up).T
            if facts["dora"]:
                m = np.concatenate([part(name, "magnitude") for name in some])
                tensors[f"{where}.{KINDS['magnitude']}"] = channels(c, row, m)
        ranks[module.rpartition("{}.")[2]] = down.shape[1]
    folder.mkdir(parents=True, exist_ok=True)
    table = {name: (np.dtype(np.float32), x.shape) for name, x in tensors.items()}
    pieces = (x.astype(np.float32) for x in tensors.values())
    write(folder / FILE, table, pieces, {"format": "pt"})
    write_json(folder / "adapter_config.json", config_of(c, ranks, facts))


def config_of(c: ResolvedModel, ranks: dict[str, int], facts: Json) -> Json:
    """The adapter_config.json of modules with these ranks."""
    rank, alpha = facts["rank"], facts["alpha"]
    wide = {name: r for name, r in ranks.items() if r != rank}
    grown = lambda r: math.sqrt(r / rank) if facts["rslora"] else r / rank
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
        "base_model_name_or_path": facts["base"], "revision": facts.get("revision"),
        "r": rank, "lora_alpha": alpha,
        "use_rslora": facts["rslora"], "use_dora": facts["dora"], "lora_dropout": 0.0,
        "fan_in_fan_out": c.position_embedding == "learned",  # GPT-2 stores [in, out]
        "target_modules": sorted(ranks), "modules_to_save": None,
        "rank_pattern": wide, "alpha_pattern": {n: alpha * grown(r) for n, r in wide.items()},
    }  # fmt: skip


def block_diagonal(parts: list[np.ndarray]) -> np.ndarray:
    """Block-diagonal matrix [sum of r, sum of out] of the parts [r, out]."""
    out = np.zeros([sum(p.shape[i] for p in parts) for i in (0, 1)], np.float32)
    row = column = 0
    for p in parts:
        out[row : row + p.shape[0], column : column + p.shape[1]] = p
        row, column = row + p.shape[0], column + p.shape[1]
    return out


def apply_rank_pattern(facts: Json, name: str, kind: str, x: np.ndarray) -> np.ndarray:
    """Convert `a` or `b` of a module with its own rank or alpha to the common rank and alpha.

    It is padded with zeros to the highest rank, and its remaining factor goes into `b`.
    """
    module = name.rpartition(".lora_")[0]

    def own(key: str, default: Any) -> Any:
        rules = (facts.get(key) or {}).items()
        return next((v for k, v in rules if re.fullmatch(rf"(.*\.)?({k})", module)), default)

    most = max(facts["r"], *(facts.get("rank_pattern") or {"": 0}).values())
    rank, has = own("rank_pattern", facts["r"]), x.shape[kind == "a"]
    if has != rank:
        raise UserError(f"adapter_config.json has rank {rank} for {module}, its tensor has {has}")
    missing = most - rank
    if kind == "a":
        return np.pad(x, ((0, 0), (0, missing)))
    root = 0.5 if facts.get("use_rslora") else 1.0
    alpha = own("alpha_pattern", facts["lora_alpha"]) / facts["lora_alpha"]
    factor = alpha * (facts["r"] / rank) ** root
    return np.pad(x, ((0, missing), (0, 0))) * np.float32(factor)


def read_adapter(folder: Path, c: ResolvedModel, like: Params) -> Params:
    """Read an adapter as LoRA parameters with the shapes of `like`.

    Raises UserError for a tensor that is missing, misshapen or unexpected.
    """
    stored, wanted = read_header(folder / FILE), flatten(like)
    names, found, used = modules(wanted), {}, set[str]()
    facts = read_object(folder / "adapter_config.json")

    def tensor(row: Row, layer: int, kind: str) -> np.ndarray:
        name = f"{PREFIX}{row.theirs.removesuffix('.weight').format(layer)}.{KINDS[kind]}"
        if name not in stored:
            raise UserError(f"{folder} has no tensor {name}; finetune.targets asks for it")
        used.add(name)
        x = np.asarray(read(name, stored[name]), np.float32)
        if kind != "magnitude":
            x = apply_rank_pattern(facts, name.removeprefix(PREFIX), kind, x.T)
        return x if kind == "a" else channels(c, row, x)

    for row in rows_of(c, names):
        for kind in sorted({name.rpartition("/")[2] for name in wanted}):
            stack = np.stack(
                [tensor(row, layer, kind) for layer in range(c.depth // c.layers_per_set)]
            )
            for name, columns_of in columns(c, row).items():
                x = stack if kind == "a" else stack[..., columns_of]
                if name not in names:
                    if kind == "b" and x.any():
                        raise UserError(
                            f"{folder} changes {name} too, which finetune.targets leaves out"
                        )
                    continue
                if x.shape != wanted[f"{name}/{kind}"].shape:
                    raise UserError(
                        f"{folder}: {row.theirs} has {x.shape[1:]} for {name}/{kind}, "
                        f"the run needs {wanted[f'{name}/{kind}'].shape[1:]}; see finetune.rank"
                    )
                found[f"{name}/{kind}"] = x
    if extra := sorted(set(stored) - used):
        raise UserError(f"{folder} holds {extra[0]}, which finetune.targets leaves out")
    return jax.tree_util.tree_map_with_path(lambda path, x: found[path_name(path)], like)
