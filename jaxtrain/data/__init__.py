"""Data: text sources -> tokenizer -> token store -> packed batches. Host code only, no jax."""

from jaxtrain.data.config import DataConfig
from jaxtrain.data.loader import Loader, train_batches, validation_batches
from jaxtrain.data.packing import PACKINGS, Batch
from jaxtrain.data.prepare import Prepared, prepare
from jaxtrain.data.sources import SOURCES, documents
from jaxtrain.data.store import TokenStore, open_store, write_store
from jaxtrain.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

__all__ = [
    "PACKINGS",
    "SOURCES",
    "TOKENIZERS",
    "Batch",
    "DataConfig",
    "Loader",
    "Prepared",
    "TokenStore",
    "Tokenizer",
    "documents",
    "load_tokenizer",
    "open_store",
    "prepare",
    "train_batches",
    "validation_batches",
    "write_store",
]
