"""Named shapes, shared by the tests (small) and the benchmarks."""

from typing import NamedTuple

import numpy as np


class AttentionShape(NamedTuple):
    """`documents`: lengths in each sequence, which is then padded to T; () = no segment ids."""

    name: str
    B: int
    T: int
    N: int
    K: int
    H: int
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    documents: tuple[int, ...] = ()

    def segment_ids_BT(self) -> np.ndarray | None:
        """int32 [B, T]: 1, 2, ... for the documents, 0 for padding; None without documents.

        The documents are rotated by one from row to row, so that rows differ.
        """
        if not self.documents:
            return None
        rows = []
        for b in range(self.B):
            at = b % len(self.documents)
            lengths = self.documents[at:] + self.documents[:at]
            ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            rows.append(np.pad(ids, (0, self.T - len(ids))))
        return np.stack(rows).astype(np.int32)


class DecodeShape(NamedTuple):
    name: str
    B: int
    S: int
    N: int
    K: int
    H: int


class LossShape(NamedTuple):
    name: str
    N: int
    D: int
    V: int
    softcap: float | None = None
    z_loss: float = 0.0
    valid_vocab: int | None = None


def documents(total: int, mean: int, seed: int) -> tuple[int, ...]:
    """Lengths of documents that fill `total` tokens, cut at random positions, so most are short."""
    cuts = np.random.default_rng(seed).choice(total - 1, total // mean - 1, replace=False) + 1
    return tuple(np.diff([0, *sorted(cuts.tolist()), total]).tolist())


ATTENTION_SMALL = (
    AttentionShape("causal", 2, 64, 2, 2, 16),
    AttentionShape("full", 2, 64, 2, 2, 16, causal=False),
    AttentionShape("window", 2, 130, 2, 2, 16, window=33),
    AttentionShape("window_itself", 1, 64, 2, 2, 16, window=0),
    AttentionShape("gqa2", 2, 64, 4, 2, 16),
    AttentionShape("mqa", 1, 64, 4, 1, 8),
    AttentionShape("packed", 2, 130, 2, 1, 16, documents=(40, 1, 60, 20)),
    AttentionShape("packed_window", 2, 70, 2, 2, 16, window=7, documents=(40, 20)),
    AttentionShape("packed_full", 2, 70, 2, 2, 16, causal=False, documents=(40, 20)),
    AttentionShape("softcap", 2, 64, 2, 2, 16, softcap=2.0),
    AttentionShape("all", 2, 130, 4, 2, 16, window=50, softcap=2.0, documents=(100, 17)),
    AttentionShape("ragged_1", 2, 1, 2, 2, 16),
    AttentionShape("ragged_7", 2, 7, 2, 2, 16),
    AttentionShape("ragged_257", 1, 257, 2, 1, 8),
    AttentionShape("ragged_513", 1, 513, 1, 1, 8, window=100),
    AttentionShape("ragged_full", 1, 67, 2, 2, 8, causal=False),
    AttentionShape("softcap_gqa", 1, 70, 4, 2, 16, softcap=2.0),
    AttentionShape("packed_window_ragged", 1, 77, 2, 1, 16, window=20, documents=(33, 3, 37)),
    AttentionShape("d96", 1, 65, 2, 1, 96),
    AttentionShape("d256", 1, 33, 1, 1, 256, window=9),
)

# GPU test shapes: common head dims, lengths from 1 to 8192, few of them multiples of a block.
ATTENTION_GPU = (
    AttentionShape("d64", 2, 1000, 4, 4, 64),
    AttentionShape("d96", 2, 520, 4, 2, 96),
    AttentionShape("d128", 2, 2048, 4, 4, 128),
    AttentionShape("d256", 2, 777, 4, 2, 256),
    AttentionShape("full", 2, 514, 4, 4, 128, causal=False),
    AttentionShape("full_d64_gqa", 1, 1025, 8, 2, 64, causal=False),
    AttentionShape("full_softcap", 1, 300, 4, 4, 128, causal=False, softcap=5.0),
    AttentionShape("full_packed", 2, 700, 4, 4, 128, causal=False, documents=(300, 1, 350)),
    AttentionShape("window", 2, 1500, 4, 4, 128, window=300),
    AttentionShape("window_itself", 1, 260, 2, 2, 64, window=0),
    AttentionShape("window_gqa_d64", 2, 1031, 8, 2, 64, window=127),
    AttentionShape("window_packed", 2, 1200, 4, 4, 128, window=128, documents=(640, 64, 400)),
    AttentionShape("window_softcap_gqa", 2, 900, 8, 4, 128, window=200, softcap=5.0),
    AttentionShape("window_d256", 1, 500, 2, 2, 256, window=77),
    AttentionShape("mqa", 2, 640, 8, 1, 128),
    AttentionShape("packed", 2, 2000, 4, 4, 128, documents=documents(1990, 199, 0)),
    AttentionShape("packed_gqa_d64", 2, 1300, 8, 2, 64, documents=(130, 1, 600, 500)),
    AttentionShape("packed_d256", 1, 400, 2, 1, 256, documents=(129, 256)),
    AttentionShape("packed_softcap", 2, 600, 4, 4, 128, softcap=5.0, documents=(300, 255)),
    AttentionShape("softcap_d64", 2, 450, 4, 4, 64, softcap=5.0),
    AttentionShape("softcap_d256", 1, 333, 4, 2, 256, softcap=5.0),
    AttentionShape("all", 2, 1111, 8, 2, 128, window=333, softcap=5.0, documents=(700, 33, 300)),
    AttentionShape("ragged_1", 2, 1, 2, 2, 128),
    AttentionShape("ragged_2", 2, 2, 2, 2, 64),
    AttentionShape("ragged_63", 2, 63, 2, 1, 128),
    AttentionShape("ragged_129", 2, 129, 2, 2, 64),
    AttentionShape("ragged_4099", 1, 4099, 2, 2, 128),
    AttentionShape("t8192", 1, 8192, 2, 1, 128),
    AttentionShape("t8191_packed", 1, 8191, 2, 1, 64, documents=documents(8191, 512, 2)),
)

ATTENTION_BENCH = (
    AttentionShape("b16_t2048_d128", 16, 2048, 12, 12, 128),
    AttentionShape("b16_t2048_d128_window768", 16, 2048, 12, 12, 128, window=768),
    AttentionShape("b4_t8192_d128", 4, 8192, 12, 12, 128),
    AttentionShape("b32_t2048_h6_d128", 32, 2048, 6, 6, 128),
    AttentionShape("b16_t2048_gqa_d64", 16, 2048, 16, 4, 64),
    AttentionShape("b1_t8192_gqa_d128", 1, 8192, 32, 8, 128),
    AttentionShape("b4_t8192_d128_packed", 4, 8192, 12, 12, 128, documents=documents(8192, 512, 0)),
)

# All shapes measured for the table of attention backends (`attention/table.json`).
ATTENTION_TUNE = (
    *ATTENTION_BENCH,
    AttentionShape("b16_t2048_d64", 16, 2048, 12, 12, 64),
    AttentionShape("b16_t2048_d96", 16, 2048, 12, 12, 96),
    AttentionShape("b8_t2048_d256", 8, 2048, 8, 4, 256),
    AttentionShape("b16_t2048_d128_full", 16, 2048, 12, 12, 128, causal=False),
    AttentionShape("b16_t2048_d128_softcap", 16, 2048, 12, 12, 128, softcap=50.0),
    AttentionShape("b8_t2048_d256_softcap", 8, 2048, 8, 4, 256, softcap=50.0),
    AttentionShape("b16_t2048_d64_packed", 16, 2048, 16, 4, 64, documents=documents(2048, 512, 1)),
    AttentionShape("b64_t512_d128", 64, 512, 12, 12, 128),
)

DECODE_BENCH = (
    DecodeShape("b64_s4096_gqa_d128", 64, 4096, 32, 8, 128),
    DecodeShape("b2_s16384_gqa_d128", 2, 16384, 32, 8, 128),
)

LOSS_SMALL = (
    LossShape("plain", 64, 16, 40),
    LossShape("softcap", 64, 16, 40, softcap=3.0),
    LossShape("large_softcap", 64, 16, 40, softcap=50.0),
    LossShape("z_loss", 64, 16, 40, z_loss=0.1),
    LossShape("padded_vocab", 64, 16, 48, valid_vocab=41),
    LossShape("all", 130, 16, 48, softcap=3.0, z_loss=0.1, valid_vocab=41),
    LossShape("one_token", 1, 16, 40),
)

LOSS_BENCH = (
    LossShape("n64k_d1536_v32k", 65536, 1536, 32768, softcap=15.0),
    LossShape("n64k_d768_v32k", 65536, 768, 32768, softcap=15.0),
)
