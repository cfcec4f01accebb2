"""The sizes of a model that are not set, derived from its depth and the length of its rows."""

from pydantic import ValidationError

from jaxtrain.model.config import ModelConfig, ResolvedModel, round_up
from jaxtrain.settings import UserError


def resolve_model(c: ModelConfig, sequence_length: int) -> ResolvedModel:
    """Fill in the sizes derived from depth and sequence length; fields that are set stay."""
    length = sequence_length + (c.prompt or c.prefix or 0)
    if c.position_embedding == "learned" and (c.context_length or length) < length:
        behind = f" behind {length - sequence_length} virtual tokens"
        raise UserError(
            f"model.context_length: positions are learned up to {c.context_length}, but "
            f"train.sequence_length is {sequence_length}"
            f"{behind if length > sequence_length else ''}"
        )
    width = c.width or round_up(64 * c.depth, c.head_dim)
    heads = c.heads or width // c.head_dim
    hidden, moe = c.hidden or 4 * width, c.moe
    if moe is not None:
        moe = moe.model_copy(update={"hidden": moe.hidden or max(1, hidden // moe.top_k)})
    derived = {
        "width": width,
        "heads": heads,
        "kv_heads": c.kv_heads or heads,
        "hidden": hidden,
        "moe": moe,
        "short_window": c.short_window or round_up(-(-sequence_length // 4), 128),
        "context_length": c.context_length
        or (length if c.position_embedding == "learned" else sequence_length),
    }
    try:
        return ResolvedModel.model_validate({**c.model_dump(), **derived})
    except ValidationError as error:  # from a derived value: given values were validated before
        raise UserError(
            f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None
