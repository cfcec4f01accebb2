"""Export of our parameters to one GGUF file for llama.cpp, written tensor by tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from jaxtrain.interop.configs import Json
from jaxtrain.interop.export import quantized_matrices, unpadded
from jaxtrain.interop.families import Family, Row
from jaxtrain.interop.gguf_metadata import (
    Architecture,
    add_model_facts,
    architecture_of,
    context_length,
    rope_divisors,
)
from jaxtrain.interop.gguf_tokenizer import Vocabulary, add_vocabulary
from jaxtrain.interop.load import is_stacked, places
from jaxtrain.interop.q4_k import quantize_q4_k
from jaxtrain.interop.tensors import transposed
from jaxtrain.model import Params, ResolvedModel
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Specs

FileType = gguf.LlamaFileType
# Values of `--outtype`: the type of matrices, and `general.file_type`. llama.cpp's Q4_K_S is the
# nearest to a file of plain Q4_K: it has the head in Q6_K, and some matrices in Q5_K.
OUTTYPES = {
    "f32": (Type.F32, FileType.ALL_F32),
    "f16": (Type.F16, FileType.MOSTLY_F16),
    "bf16": (Type.BF16, FileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, FileType.MOSTLY_Q8_0),
    "q4_k": (Type.Q4_K, FileType.MOSTLY_Q4_K_S),
}
# Types for rows that are no multiple of a type's block size, as in llama-quantize.
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_0: Type.F16, Type.Q8_0: Type.F16}
ROWS = 1 << 22  # weights encoded at a time
MOST_F16 = 65504.0


class FileTensor(NamedTuple):
    """A tensor of the file: its shape, its type, and a function that computes it in float32."""

    shape: tuple[int, ...]
    type: Type
    make: Callable[[], np.ndarray]


class Loss(NamedTuple):
    """Quantization loss of all tensors of a type: counts, sum of squares, sum of squared errors."""

    tensors: int = 0
    weights: int = 0
    square: float = 0.0
    error: float = 0.0

    def plus(self, b: "Loss") -> "Loss":
        return Loss(
            self.tensors + b.tensors, self.weights + b.weights,
            self.square + b.square, self.error + b.error,
        )  # fmt: skip

    @property
    def relative(self) -> float:
        """Mean squared error over mean squared weight."""
        return self.error / self.square if self.square else 0.0


class Written(NamedTuple):
    """Summary of a written file: bytes, weights, and quantization loss by type.

    shortened: the context is cut to the sliding window, which the architecture does not support.
    """

    architecture: str
    bytes: int
    context_length: int
    shortened: bool
    losses: dict[str, Loss]

    @property
    def weights(self) -> int:
        return sum(loss.weights for loss in self.losses.values())


class FamilyModel(NamedTuple):
    """A model, its family and its config.json as returned by `configs.fitting_family`."""

    family: Family
    config: Json
    model: ResolvedModel
    specs: Specs
    params: Params


def write_gguf(
    path: Path,
    source: FamilyModel,
    vocabulary: Vocabulary,
    outtype: str,
    facts: Mapping[str, object],
) -> Written:
    """Write a GGUF file atomically. outtype: one of OUTTYPES.

    facts: name, bos, eos, eot, pad (token ids), add_bos, chat_template; all are optional.
    Raises UserError, before anything is written, for a model that llama.cpp computes differently.
    """
    arch = architecture_of(source.family.model_type, source.model)
    kind, file_type = OUTTYPES[outtype]
    pieces = pieces_of(arch, source, kind)
    writer = gguf.GGUFWriter(None, arch.name)
    add_facts(writer, facts)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_model_facts(writer, arch, source.model, source.config["vocab_size"])
    add_vocabulary(writer, vocabulary)
    for name, piece in pieces.items():
        size = int(np.prod(piece.shape))
        block, each = gguf.GGML_QUANT_SIZES[piece.type]
        like = np.dtype(np.float32)  # not uint8: the shape counts weights, not bytes
        writer.add_tensor_info(name, piece.shape, like, size // block * each, piece.type)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        losses = write_pieces(writer, part, pieces)
        part.replace(path)
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise
    context = context_length(arch, source.model)
    shortened = context < source.model.context_length
    return Written(arch.name, path.stat().st_size, context, shortened, losses)


def write_pieces(
    writer: gguf.GGUFWriter, part: Path, pieces: Mapping[str, FileTensor]
) -> dict[str, Loss]:
    """Write the file; returns the quantization loss by type. Raises OSError if the disk is full."""
    writer.write_header_to_file(part)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    losses: dict[str, Loss] = {}
    for name, piece in pieces.items():
        x = np.ascontiguousarray(piece.make(), np.float32)
        assert x.shape == piece.shape, (name, x.shape, piece.shape)
        check_range(name, x, piece.type)
        bits, loss = encoded(x, piece.type)
        writer.write_tensor_data(bits)
        old = losses.get(piece.type.name, Loss())
        losses[piece.type.name] = old.plus(loss)
    writer.flush()
    writer.close()
    return losses


def add_facts(writer: gguf.GGUFWriter, facts: Mapping[str, object]) -> None:
    """Write the metadata that does not depend on the model's shape, each by a GGUFWriter method."""
    adders: dict[str, Callable] = {
        "name": writer.add_name, "bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id, "pad": writer.add_pad_token_id,
        "add_bos": writer.add_add_bos_token, "chat_template": writer.add_chat_template,
    }  # fmt: skip
    writer.add_type("model")
    for name, value in facts.items():
        if value is not None:
            adders[name](value)
    writer.add_add_eos_token(False)


# ---- tensors ---------------------------------------------------------------------------------


def pieces_of(arch: Architecture, source: FamilyModel, kind: Type) -> dict[str, FileTensor]:
    """The tensors in file order, by llama.cpp's names. Raises UserError for one without a name."""
    family, params = source.family, source.params
    flat, arrays = unpadded(source.specs, source.config), flatten(params)
    if packed := quantized_matrices(params):
        raise UserError(
            f"the matrix {next(iter(packed))} is quantized already, and GGUF has formats of its "
            "own: export the unquantized model, with --outtype q4_k or q8_0"
        )
    if lost := sorted(flat.keys() - places(family, flat).keys()):
        raise UserError(f"the family {family.model_type} has no tensor for {', '.join(lost)}")
    names = gguf.get_tensor_name_map(arch.key, source.model.depth)
    found: dict[str, FileTensor] = {}
    for row in family.rows:
        if row.ours[0] not in flat:
            continue
        stacked = is_stacked(flat[row.ours[0]])
        for layer in range(flat[row.ours[0]].shape[0] if stacked else 1):
            theirs = row.theirs.format(layer)
            name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            if name is None or not known_bias(arch, name):
                raise UserError(f"llama.cpp's architecture {arch.name} has no tensor for {theirs}")
            parts = [
                (arrays[o], layer if stacked else tuple(map(slice, flat[o].shape)))
                for o in row.ours
            ]
            make = maker(arch, row, name, parts, source.model)
            shape = file_shape(row, [flat[o].shape[int(stacked) :] for o in row.ours], family)
            found[name] = FileTensor(shape, stored_type(name, shape, kind), make)
    divisors = rope_divisors(source.model)
    if divisors is not None:
        found["rope_freqs.weight"] = FileTensor(divisors.shape, Type.F32, lambda: divisors)
    return found


def known_bias(arch: Architecture, name: str) -> bool:
    """Whether llama.cpp reads a tensor. It reads all but the biases that an architecture lacks."""
    middle = name.removesuffix(".bias").split(".")[-1]
    return not name.endswith(".bias") or middle in arch.biases


def is_turned(row: Row, dims: int) -> bool:
    """Whether our matrix [in, out] is stored as [out, in]; embeddings are not transposed."""
    return dims == 2 and "embed" not in row.ours[0]


def file_shape(row: Row, shapes: list[tuple[int, ...]], family: Family) -> tuple[int, ...]:
    """The shape of a tensor in the file, from the shapes of the parameters it concatenates."""
    whole = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    return whole[::-1] if is_turned(row, len(whole)) else whole


def maker(
    arch: Architecture, row: Row, name: str, parts: list, model: ResolvedModel
) -> Callable[[], np.ndarray]:
    """A function that computes a tensor in float32, in llama.cpp's layout.

    Norm gains are written as ours: 1 + w where Gemma's checkpoints hold w.
    """
    paired = arch.paired and name.split(".")[-2] in ("attn_q", "attn_k")

    def make() -> np.ndarray:
        found = [np.asarray(x)[at].astype(np.float32) for x, at in parts]
        x = np.concatenate(found, axis=-1) if found[1:] else found[0]
        if paired:
            x = interleaved(x, model.head_dim)
        return transposed(x) if is_turned(row, x.ndim) else x

    return make


def interleaved(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder each head's channels (last dim) so that RoPE rotates adjacent pairs, not halves."""
    halves = x.reshape(*x.shape[:-1], -1, 2, head_dim // 2)
    return halves.swapaxes(-1, -2).reshape(x.shape)


def stored_type(name: str, shape: tuple[int, ...], kind: Type) -> Type:
    """The type a tensor is stored in. Vectors and learned positions stay float32. Rows that are no
    multiple of the block size use a fallback type."""
    if len(shape) == 1 or name == "position_embd.weight":
        return Type.F32
    while shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = FALLBACK[kind]
    return kind


def check_range(name: str, x: np.ndarray, kind: Type) -> None:
    if kind not in (Type.F32, Type.BF16) and np.abs(x).max(initial=0) > MOST_F16:
        raise UserError(
            f"{name} has values beyond the range of float16 ({MOST_F16:.0f}): --outtype bf16 or f32"
        )


def encoded(x: np.ndarray, kind: Type) -> tuple[np.ndarray, Loss]:
    """Encode a tensor some rows at a time; returns its bytes and its quantization loss."""
    rows = x.reshape(-1, x.shape[-1])
    step, parts, square, error = max(1, ROWS // rows.shape[1]), [], 0.0, 0.0
    for i in range(0, len(rows), step):
        part = rows[i : i + step]
        bits = quantize_q4_k(part) if kind is Type.Q4_K else gguf.quantize(part, kind)
        back = gguf.dequantize(bits, kind).reshape(part.shape)
        square += float(np.sum(np.square(part, dtype=np.float64)))
        error += float(np.sum(np.square(back - part, dtype=np.float64)))
        parts.append(bits)
    return np.concatenate(parts), Loss(1, x.size, square, error)
