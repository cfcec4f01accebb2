"""Data: text sources -> tokenizer -> token store -> packed batches. Host code only, no jax."""

from jaxtrain.data.config import DataConfig
from jaxtrain.data.corpus import describe, prepare
from jaxtrain.data.loader import Loader, stores_of, train_batches, validation_batches
from jaxtrain.data.mixture import check_lengths
from jaxtrain.data.packing import PACKINGS, Batch
from jaxtrain.data.prepare import Prepared
from jaxtrain.data.prompts import Scored, questions
from jaxtrain.data.reading import SOURCES, documents
from jaxtrain.data.store import TokenStore, open_store, write_store
from jaxtrain.data.tasks import open_bundle
from jaxtrain.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

__all__ = [
    "PACKINGS",
    "SOURCES",
    "TOKENIZERS",
    "Batch",
    "DataConfig",
    "Loader",
    "Prepared",
    "Scored",
    "TokenStore",
    "Tokenizer",
    "check_lengths",
    "describe",
    "documents",
    "load_tokenizer",
    "open_bundle",
    "open_store",
    "prepare",
    "questions",
    "stores_of",
    "train_batches",
    "validation_batches",
    "write_store",
]
