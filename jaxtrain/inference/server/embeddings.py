"""/v1/embeddings: the final states of a text, pooled to one vector with L2 norm 1."""

import asyncio
import base64
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.inference.server.bodies import EmbeddingBody
from jaxtrain.inference.server.errors import refuse
from jaxtrain.inference.server.service import Service
from jaxtrain.inference.server.whole_texts import embed


async def embeddings(service: Service, body: EmbeddingBody) -> dict[str, Any]:
    """A vector for each text or list of token ids."""
    if body.dimensions is not None:
        refuse("dimensions is not supported: vectors have the model's width", "dimensions")
    served = service.model_of(body)
    texts = await asyncio.to_thread(service.prompts_of, body.input, "input", served)
    context = served.context
    if (longest := max(map(len, texts))) > context:
        refuse(f"this model's context is {context} tokens; a text has {longest}", "input",
               "context_length_exceeded")  # fmt: skip
    service.check_load(len(texts))
    data = []
    for i, text in enumerate(texts):  # one at a time: answers in flight go on between them
        job = partial(embed, texts=[text], pooling=served.pooling)
        (vector,) = await service.run(job, served.adapter_name)
        data.append({"object": "embedding", "index": i, "embedding": encode_vector(vector, body)})
    total = sum(map(len, texts))
    service.count_tokens({"prompt_tokens": total, "completion_tokens": 0})
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def encode_vector(vector: np.ndarray, body: EmbeddingBody) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
