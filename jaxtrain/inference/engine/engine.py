"""Continuous batching: requests join and leave at any step.

    while engine.busy:
        for update in engine.step(): ...

A step computes a chunk of some prompts and the next tokens of every running request. It returns the
tokens of the step before, so the device works while the host reads. Requests run in the order of
their arrival. When pages run out, the youngest request is preempted: its pages are freed, and it is
recomputed later, with the same output.
"""

import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxtrain.data import Tokenizer
from jaxtrain.inference.engine import device
from jaxtrain.inference.engine.compiler import EngineCompiler
from jaxtrain.inference.engine.device import GAVE_UP, WRONG, Sampled
from jaxtrain.inference.engine.grammars import Grammars, allowed_bits
from jaxtrain.inference.engine.one_kernel import packed_layers
from jaxtrain.inference.engine.pace import Pace
from jaxtrain.inference.engine.pages import PagePool, affordable_pages
from jaxtrain.inference.engine.programs import (
    Drafter,
    ProgramKey,
    Programs,
    begins_apart,
    draft_modules,
    fewest,
    last_states,
    reads_in_place,
    table_sizes,
)
from jaxtrain.inference.engine.requests import (
    DEFAULT,
    EngineOptions,
    EngineStats,
    Request,
    Update,
)
from jaxtrain.inference.engine.rows import SlotTable
from jaxtrain.inference.engine.sequence import (
    Pending,
    Sequence,
    check_request,
    read_logprobs,
)
from jaxtrain.model import ResolvedModel
from jaxtrain.model.kv_cache import page_shapes
from jaxtrain.settings import UserError
from jaxtrain.weights.multi_lora import choose_adapters
from jaxtrain.weights.params import Params


class Engine:
    """Serves requests with one model. Only one thread may use it."""

    def __init__(
        self,
        config: ResolvedModel,
        graphdef: nnx.GraphDef,
        params: Params,
        tokenizer: Tokenizer,
        stops: tuple[int, ...] = (),
        options: EngineOptions = DEFAULT,
        mesh: Mesh | None = None,
        drafter: Drafter | None = None,
        adapters: Collection[str] = (),
    ):
        """params: on the device, in the compute dtype. stops: tokens that end every text. mesh: the
        devices of params, if there are several. drafter: the model of options.draft_run. adapters:
        names of the LoRA adapters in params, in their order (`with_adapters`)."""
        self.context = options.context or config.context_length
        both = [Drafter(config, graphdef, params), *([drafter] if drafter else [])]
        for one, name in zip(both, ("this model", "the model that guesses")):
            if why := device.check_servable(one.config, self.context):
                raise UserError(f"the engine: {name} {why}")
        size = device.usable_page_size(config.virtual, options.page_size)
        options = options._replace(page_size=size)
        self.options, self.tokenizer, self.stops = options, tokenizer, stops
        self.graphdef, self.params, self.mesh = graphdef, params, mesh
        self.adapters = {name: i for i, name in enumerate(adapters, 1)}  # indices by name
        parts = [*both, *draft_modules(both[0], options)]  # each has its own KV pages
        self.window = max(device.longest_window(one.config) for one in parts)
        fit = lambda x: device.for_context(x.config, x.graphdef, tokenizer.vocab_size, self.context)
        self.models = device.GraphDefs(map(fit, both)), tuple(one.params for one in both)
        shape = options.page_size, options.cache_dtype
        page = tuple(page_shapes(x.config, x.params["embed"].dtype, *shape) for x in parts)
        self.width = -(-self.context // options.page_size)  # pages of the longest sequence
        most, share = options.slots * self.width, options.memory_share
        self.pool = PagePool(options.pages or affordable_pages(page, most, params, share))
        self.virtual = config.virtual // options.page_size  # pages at the start of every row
        pages, places = self.pool.total + self.virtual, self.context + options.drafts + 1
        packed = packed_layers(options, self.models[0], both, page[0], pages, mesh)
        with self.on_mesh():
            how = last_states(both[0], options), bool(packed)
            self.state = device.init_device_state(page, pages, options.slots, places, *how)
        in_place = all(reads_in_place(x, one, pages) for x, one in zip(parts, page))
        sizes = table_sizes(options, self.width, in_place)
        begins = begins_apart(options, [one.config for one in both], mesh)
        self.programs = Programs(
            self.models, options, self.virtual, sizes, config.width, packed, begins
        )
        self.compiler, self.pace = EngineCompiler(self.on_mesh), Pace(options.decode_steps)
        self.table_SW = np.zeros((options.slots, self.virtual + self.width), np.int32)
        self.table_SW[:, : self.virtual] = self.pool.total + np.arange(self.virtual)
        self.fresh, self.arrivals = True, 0  # no request has joined yet
        self.more_prompts = False  # prompts wait for which the current prefill has no row
        self.rows = SlotTable(options.slots, tokenizer.vocab_size)
        self.slots: list[Sequence | None] = [None] * options.slots
        self.waiting: deque[Sequence] = deque()
        self.by_id: dict[str, Sequence] = {}
        self.pending: deque[Pending] = deque()
        self.ready: list[Update] = []
        self.counts = EngineStats(0, 0, 0, self.pool.total, 0, 0, 0, 0, 0, 0, 0)
        self.grammars: Grammars | None = None  # made when the first request asks for one

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do or updates to return."""
        return bool(self.by_id or self.ready)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it can never be served, or the queue is full."""
        room = self.pool.total * self.options.page_size
        check_request(request, self.context, room, self.tokenizer.vocab_size, self.adapters)
        if request.id in self.by_id:
            raise UserError(f"request {request.id}: there is one of this id already")
        if (waiting := len(self.waiting)) >= self.options.max_queue:
            raise UserError(f"the queue is full: {waiting} requests wait; try again later")
        stops = {*self.stops, *request.sampling.stop_tokens}
        sequence = Sequence(request, self.arrivals, self.tokenizer, stops)
        if (grammar := request.sampling.grammar) is not None:
            self.grammars = self.grammars or Grammars(self.tokenizer, self.stops)
            sequence.matcher = self.grammars.matcher(grammar, request.id)
        self.arrivals += 1
        self.by_id[request.id] = sequence
        self.waiting.append(sequence)

    def cancel(self, id: str) -> None:
        """End a request; its last update comes with the next step. Ignores an unknown id."""
        sequence = self.by_id.get(id)
        if sequence is None:
            return
        if sequence.slot is None:
            self.waiting.remove(sequence)
        self.finish(sequence)
        self.ready.append(Update(id, "", (), (), "cancelled"))

    def stats(self) -> EngineStats:
        """Current statistics."""
        running = sum(one is not None for one in self.slots)
        now = {"running": running, "waiting": len(self.waiting), "pages_used": self.pool.used}
        return self.counts._replace(**now)

    def step(self) -> list[Update]:
        """Start a step on the device, and return the updates of the one before; [] when idle.

        The first tokens after prompts are read at once, while the device decodes.
        """
        if self.by_id:
            self.count(steps=1)
            with self.on_mesh():
                self.admit()
                self.prefill()
                self.decode()
            while (p := self.pending) and (p[0].first or p[0].step < self.counts.steps):
                self.read(p.popleft())
        ready, self.ready = self.ready, []
        return ready

    def on_mesh(self) -> AbstractContextManager[object]:
        """Context in which programs are traced and run."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def params_for(self, adapter: str | None) -> Params:
        """Parameters for one row, with an adapter or without."""
        if not self.adapters:
            return self.params
        number = self.adapters[adapter] if adapter else 0
        return choose_adapters(self.params, jnp.array([number], jnp.int32))

    def count(self, **more: int) -> None:
        """Add to the counts."""
        self.counts = self.counts._replace(
            **{name: getattr(self.counts, name) + n for name, n in more.items()}
        )

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, in the order of their arrival."""
        return sorted((one for one in self.slots if one is not None), key=lambda s: s.arrival)

    # ---- joining and leaving --------------------------------------------------------------------

    def admit(self) -> None:
        """Assign slots and pages to waiting requests, in their order, while there are free ones.

        As many join as the next prefill takes. The others join while the device computes it.
        """
        if self.fresh and self.virtual:
            graphdef, pages = self.models[0][0], np.arange(self.virtual) + self.pool.total
            self.state = device.put_virtual_tokens(
                graphdef, self.params, self.state, jax.device_put(pages.astype(np.int32))
            )
        self.fresh = False
        new: list[tuple[int, list[int]]] = []
        room = self.options.prefill_rows - sum(not one.decoding for one in self.running)
        free = lambda: bool(self.waiting) and None in self.slots
        while free() and len(new) < room and self.take_pages(self.waiting[0]):
            sequence, slot = self.waiting.popleft(), self.slots.index(None)
            self.slots[slot], sequence.slot = sequence, slot
            asked = sequence.request
            number = self.adapters[asked.adapter] if asked.adapter else 0
            self.rows.put(slot, asked.sampling, len(asked.prompt), number)
            self.write_table(sequence)
            self.constrain(sequence)
            new.append((slot, sequence.tokens))
        if new:
            self.compiler.pick(ProgramKey("put_texts"))
            self.state = self.programs.put_texts(self.state, new)
        self.more_prompts = free() and len(new) == room

    def constrain(self, sequence: Sequence) -> None:
        """Mask the tokens of a running request to those that its grammar allows next."""
        if sequence.matcher is not None and sequence.slot is not None:
            self.rows.allow(sequence.slot, allowed_bits(sequence.matcher))

    def take_pages(self, sequence: Sequence) -> bool:
        """Allocate pages for a waiting request, reusing cached ones. False if too few are free.

        One page stays free for each running request that may still grow, so that no request is
        started only to be preempted at once.
        """
        size, length = self.options.page_size, len(sequence.tokens)
        known: list[int] = []
        if self.options.prefix_cache:
            sequence.hash_pages(size, length)
            # The last token is computed in any case: the next one is sampled from its state.
            known = self.pool.find(sequence.digests[: (length - 1) // size])
        need = -(-(length + 1) // size) - len(known)
        spare = sum(one.limit > len(one.pages) * size for one in self.running)
        new = (
            self.pool.take(need)
            if self.pool.available >= need + spare or not self.running
            else None
        )
        if new is None:
            self.pool.give_back(known)
            return False
        sequence.pages, sequence.computed = known + new, len(known) * size
        self.count(prefix_hits=sequence.computed, prompt_tokens=length)
        return True

    def write_table(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        begin = self.virtual + sequence.dropped
        self.table_SW[sequence.slot, begin : begin + len(sequence.pages)] = sequence.pages

    def remember(self, sequence: Sequence) -> None:
        """Add the full pages of a running request to the prefix cache."""
        if self.options.prefix_cache:
            size = self.options.page_size
            if sequence.decoding:
                sequence.hash_pages(size, sequence.held)
            known = sequence.digests[sequence.dropped : sequence.held // size]
            self.pool.remember(sequence.pages, known)

    def drop_pages(self, sequence: Sequence) -> None:
        """Free the pages that no layer attends to any more; full pages stay cached."""
        if count := sequence.unseen(self.window, self.options.page_size):
            self.remember(sequence)
            self.pool.give_back(sequence.pages[:count])
            sequence.pages = sequence.pages[count:]
            sequence.dropped += count

    def leave_slot(self, sequence: Sequence) -> None:
        """Free a request's slot and pages; full pages stay cached."""
        if sequence.slot is None:
            return
        self.slots[sequence.slot] = None
        self.rows.clear(sequence.slot)
        self.remember(sequence)
        self.pool.give_back(sequence.pages)
        sequence.pages, sequence.slot, sequence.decoding = [], None, False
        sequence.computed = sequence.ahead = sequence.dropped = 0

    def finish(self, sequence: Sequence) -> None:
        sequence.done = True
        self.leave_slot(sequence)
        del self.by_id[sequence.request.id]

    def preempt(self, sequence: Sequence) -> None:
        """Move a request back to the head of the queue. It was the youngest running one, and all
        waiting ones are younger."""
        self.leave_slot(sequence)
        self.waiting.appendleft(sequence)
        self.count(preemptions=1)

    # ---- work of the device ---------------------------------------------------------------------

    def prefill(self) -> None:
        """Compute a chunk of some prompts. First chunks and later ones run in separate calls, so
        that a sequence's values do not depend on the other sequences."""
        todo = [one for one in self.running if not one.decoding]
        begins = lambda one: self.programs.begins and not one.computed
        parts = {which: [one for one in todo if begins(one) == which] for which in (True, False)}
        for which, some in parts.items():
            if some:
                self.pace.reset()
                self.prefill_part(some[: self.programs.at_once(len(some), which)], which)

    def prefill_part(self, todo: list[Sequence], begins: bool) -> None:
        """Compute a chunk of these sequences, and sample the first token of those it completes."""
        o = self.options
        longest = max(one.computed + min(one.left, o.chunk) for one in todo)
        key = self.compiler.pick(self.programs.prefilling(len(todo), longest, begins))
        parts = [(one.place, one.computed, min(one.left, o.chunk)) for one in todo]
        self.state, states_BD = self.programs.prefill(
            key, self.state, self.rows.on_device(), self.table_SW, parts
        )
        for one, (_, _, count) in zip(todo, parts):
            one.computed += count
            self.remember(one)
            self.drop_pages(one)
        if rows := [(i, one) for i, one in enumerate(todo) if not one.left]:
            sampler = max(one.sampler for _, one in rows)
            key = self.compiler.pick(ProgramKey("sample_first", sampler=sampler))
            whole = [(i, one.place, len(one.tokens)) for i, one in rows]
            self.state, sampled = self.programs.sample_first(
                key, self.state, self.rows.on_device(), states_BD, whole
            )
            for _, one in rows:
                one.decoding, one.ahead = True, 1
            self.started(sampled, rows, 1, first=True)

    def decode(self) -> None:
        """Decode the next tokens of all requests whose prefill is complete."""
        for one in self.running:
            self.drop_pages(one)
        if not (todo := [one for one in self.running if one.can_go_on]):
            return
        key = self.compiler.pick(self.decode_key())
        most = self.options.most(key.steps)
        for one in todo:
            self.make_room(one, most)
        # Program and pages leave out those that can go on only since `make_room` read their tokens.
        if not (todo := [one for one in todo if one.can_go_on]):
            return
        self.state, sampled = self.programs.decode(
            key, self.state, self.rows.on_device(), self.table_SW, [one.place for one in todo]
        )
        self.pace.called(key.steps)
        for one in todo:
            one.ahead += most
        self.started(sampled, list(enumerate(todo)), most)

    def decode_key(self) -> ProgramKey:
        """The program that fits the running requests best."""
        todo = [one for one in self.running if one.can_go_on]
        longest, sampler = max(one.length for one in todo), max(one.sampler for one in todo)
        return self.programs.decoding(len(todo), self.steps_at_once(), longest, sampler)

    def steps_at_once(self) -> int:
        """Decode steps of the next call. One if a prompt waits for prefill, a grammar needs the
        host between steps, every request needs at most one more token, or pages are short."""
        o, running = self.options, self.running
        steps = self.pace.steps if o.adapt_steps else o.decode_steps
        todo = [one for one in running if one.can_go_on]
        waits = lambda one: one.matcher is not None or not one.decoding
        if self.more_prompts or any(map(waits, running)):
            return 1
        if all(one.limit - one.length < 2 for one in todo):
            return 1
        most = self.options.most(steps)
        need = sum(max(0, one.pages_missing(most, self.options.page_size)) for one in todo)
        return steps if need <= self.pool.available else 1

    def make_room(self, sequence: Sequence, most: int) -> None:
        """Allocate pages for a request's next tokens, or else preempt the youngest request."""
        while sequence.can_go_on:
            need = sequence.pages_missing(most, self.options.page_size)
            if need <= 0:
                return
            if (new := self.pool.take(need)) is not None:
                sequence.pages += new
                self.write_table(sequence)
            elif self.pending:  # some may have ended, and a victim may have no step in flight
                while self.pending:
                    self.read(self.pending.popleft())
            else:
                self.preempt(self.running[-1])

    def started(
        self, sampled: Sampled, rows: list[tuple[int, Sequence]], most: int, first: bool = False
    ) -> None:
        """Queue a step whose tokens are to be read, and start copying them to the host."""
        if rows:
            asked = any(one.request.sampling.logprobs is not None for _, one in rows)
            for x in jax.tree.leaves(sampled if asked else sampled.tokens_KBT):
                x.copy_to_host_async()
            self.pending.append(Pending(sampled, tuple(rows), most, self.counts.steps, first))

    def warm_up(self, asked: Collection[Request] = (), beside: bool = False) -> int:
        """Compile all programs that requests may need, several at a time. Returns their number.

        Without it a program is compiled when a request first needs it. asked: the only requests
        that will come, all at once. beside: wait only for programs that together serve any request.
        """
        keys = self.programs.needed(asked, self.context)
        now = fewest(keys) if beside else keys
        with self.on_mesh():
            state, rows = self.state, self.rows.on_device()
        lower = lambda key: self.programs.lower(key, state, rows)
        self.compiler.start(now, [key for key in keys if key not in now], lower)
        self.compiler.wait(now)
        return len(keys)

    def lower(self, asked: Collection[Request] = ()) -> Iterator[jax.stages.Lowered]:
        """Yield the lowered programs that `warm_up` compiles."""
        with self.on_mesh():
            rows = self.rows.on_device()
            for key in self.programs.needed(asked, self.context):
                yield self.programs.lower(key, self.state, rows)

    def decode_program(self) -> jax.stages.Lowered:
        """Lowered program of the next decode call for the running requests."""
        with self.on_mesh():
            return self.programs.lower(self.decode_key(), self.state, self.rows.on_device())

    # ---- tokens -------------------------------------------------------------------------------

    def read(self, step: Pending) -> None:
        """Read the tokens of a step, and pass them to their sequences."""
        with self.pace.waiting():
            tokens_KBT = np.asarray(step.sampled.tokens_KBT)
        if (tokens_KBT == GAVE_UP).any():
            raise RuntimeError(
                "the kernel of all layers gave up, or the model's states are not finite; "
                "megakernel=False (serve: --no-megakernel) leaves it out"
            )
        right_B, wrong_B = (x.sum((0, 2)) for x in (tokens_KBT[:, :, 1:] >= 0, tokens_KBT == WRONG))
        tokens_Bk = tokens_KBT.swapaxes(0, 1).reshape(len(right_B), -1).tolist()
        new = tried = accepted = 0
        for row, one in step.rows:
            if one.done:
                continue
            one.ahead -= step.most
            tokens = [token for token in tokens_Bk[row] if token >= 0]
            update = one.read(tokens, read_logprobs(step.sampled, row, one.request))
            new, accepted = new + len(update.tokens), accepted + int(right_B[row])
            tried += int(right_B[row] + wrong_B[row])
            self.ready.append(update)
            if update.finish_reason:
                self.finish(one)
            else:
                self.constrain(one)
        self.count(new_tokens=new, drafts=tried, accepted_drafts=accepted)
