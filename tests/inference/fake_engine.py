"""An engine that decodes each request alone, by `stream_tokens`; for tests of the server."""

import codecs
from collections import deque

import numpy as np

from jaxtrain.inference.generate import Sampling, stream_tokens
from jaxtrain.inference.server.interface import EngineStats, TokenLogprob, Update
from jaxtrain.settings import UserError


class FakeEngine:
    """Up to `slots` requests in turn, a token of each a step."""

    def __init__(self, saved, params, slots=4, queue=64):
        self.saved, self.params, self.slots, self.queue = saved, params, slots, queue
        self.waiting, self.running = deque(), {}
        self.context = saved.config.model.context_length

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def add(self, request):
        if len(request.prompt) + request.sampling.max_tokens > self.context:
            raise UserError("too long")
        if request.sampling.grammar:
            raise UserError("this engine has no grammar")
        if len(self.waiting) >= self.queue:
            raise UserError("the queue is full")
        self.waiting.append(request)

    def cancel(self, id):
        self.waiting = deque(one for one in self.waiting if one.id != id)
        self.running.pop(id, None)

    def stats(self):
        used = len(self.running)
        return EngineStats(used, len(self.waiting), used, self.slots, 0)

    def step(self):
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.popleft()
            self.running[request.id] = self.updates(request)
        out = []
        for id, updates in list(self.running.items()):
            update = next(updates)
            out.append(update)
            if update.finish_reason is not None:
                del self.running[id]
        return out

    def updates(self, request):
        """The tokens of one request, a step each."""
        how = request.sampling
        sampling = Sampling(how.max_tokens, how.temperature, how.top_k, how.top_p, how.seed)
        prompt = np.array(request.prompt, np.int32)
        stops = () if how.ignore_stop else how.stop_tokens
        ids = stream_tokens(self.saved.graphdef, self.params, prompt, sampling, stops)
        decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
        for made, i in enumerate(ids, 1):
            piece = decoder.decode(self.saved.tokenizer.pieces[i], final=made == how.max_tokens)
            cut = min((x for x in map((text + piece).find, how.stop) if x >= 0), default=None)
            if cut is not None:
                yield Update(request.id, (text + piece)[len(text) : cut], (), (), "stop")
                return
            text += piece
            logprobs = () if how.logprobs is None else (TokenLogprob(i, -1.0, ((i, -1.0),)),)
            finish = "length" if made == how.max_tokens else None
            yield Update(request.id, piece, (i,), logprobs, finish)
            if finish:
                return
        yield Update(request.id, decoder.decode(b"", final=True), (), (), "stop")
