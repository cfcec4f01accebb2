"""Named shapes, shared by the tests (small) and the benchmarks."""

from typing import NamedTuple

import numpy as np


class AttentionShape(NamedTuple):
    """`documents`: their lengths in every row, then padding up to T; () = no segment ids."""

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

        Each row has them rotated, so that no two rows are alike.
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


class LossShape(NamedTuple):
    name: str
    N: int
    D: int
    V: int
    softcap: float | None = None
    z_loss: float = 0.0
    valid_vocab: int | None = None


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
    AttentionShape("ragged_full", 1, 67, 2, 2, 8, causal=False),
)

ATTENTION_BENCH = (
    AttentionShape("b16_t2048_d128", 16, 2048, 12, 12, 128),
    AttentionShape("b16_t2048_d128_window768", 16, 2048, 12, 12, 128, window=768),
    AttentionShape("b4_t8192_d128", 4, 8192, 12, 12, 128),
    AttentionShape("b32_t2048_h6_d128", 32, 2048, 6, 6, 128),
    AttentionShape("b16_t2048_gqa_d64", 16, 2048, 16, 4, 64),
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
