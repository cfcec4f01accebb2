"""Virtual tokens in peft's format (PROMPT_TUNING, PREFIX_TUNING): one tensor, prompt_embeddings.

Prompt tuning: [tokens, D], as the layers read it, so Gemma's embedding scale is included.
Prefix tuning: [tokens, layers x 2 x kv_heads x head_dim], a layer's keys before its values.
"""

from pathlib import Path

import jax
import numpy as np

from jaxtrain.interop.configs import Json
from jaxtrain.interop.peft import FILE, channels, rows_of
from jaxtrain.interop.tensors import read, read_header, write
from jaxtrain.model import Params, ResolvedModel
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json

TENSOR, KEYS = "prompt_embeddings", "blocks/attention/k"


def write_prompt_adapter(
    folder: Path, c: ResolvedModel, params: Params, base: str | None, revision: str | None = None
) -> None:
    """Write the parameters of `finetune.prompt` or `finetune.prefix` in float32."""
    sizes = {"num_layers": c.depth, "num_transformer_submodules": 1}
    if "prompt" in params:
        table = np.asarray(params["prompt"], np.float32) * c.embed_scale
        special = {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}
        sizes |= {"token_dim": c.width, "num_attention_heads": c.heads}
    else:
        k, v = (np.asarray(params["prefix"][name], np.float32) for name in "kv")
        both = np.stack([channels(c, rows_of(c, {KEYS})[0], k), v], axis=1)  # [L, 2, P, KH]
        table = both.transpose(2, 0, 1, 3).reshape(k.shape[1], -1)
        special = {"peft_type": "PREFIX_TUNING", "prefix_projection": False}
        special |= {"encoder_hidden_size": c.kv_heads * c.head_dim}  # unused here
        sizes |= {"token_dim": c.kv_heads * c.head_dim, "num_attention_heads": c.kv_heads}
    config = {"task_type": "CAUSAL_LM", "inference_mode": True, "base_model_name_or_path": base}
    config |= {"revision": revision}
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / FILE, {TENSOR: (table.dtype, table.shape)}, [table], {"format": "pt"})
    sizes |= {"num_virtual_tokens": len(table)}
    write_json(folder / "adapter_config.json", special | config | sizes)


def read_prompt_adapter(folder: Path, c: ResolvedModel, like: Params) -> Params:
    """Read an adapter of virtual tokens as parameters with the shapes of `like`.

    Raises UserError for another tensor or shape.
    """
    stored = read_header(folder / FILE)
    P = c.virtual
    wide = c.width if c.prompt else c.depth * 2 * c.kv_heads * c.head_dim
    got = {name: tensor.shape for name, tensor in stored.items()}
    if got != {TENSOR: (P, wide)}:
        raise UserError(f"{folder} holds {got}, the run needs {TENSOR} of shape {(P, wide)}")
    table = np.asarray(read(TENSOR, stored[TENSOR]), np.float32)
    if c.prompt:
        found: Json = {"prompt": table / c.embed_scale}
    else:
        k, v = table.reshape(P, c.depth, 2, -1).transpose(2, 1, 0, 3)
        found = {"prefix": {"k": channels(c, rows_of(c, {KEYS})[0], k), "v": v}}
    return jax.tree.map(lambda x, y: y.reshape(x.shape), like, found)
