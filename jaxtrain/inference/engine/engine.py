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
from jaxtrain.inference.engine.device import NONFINITE, REJECTED, TIMED_OUT, Sampled
from jaxtrain.inference.engine.grammars import Grammars, allowed_bits
from jaxtrain.inference.engine.one_kernel import packed_layers
from jaxtrain.inference.engine.pace import Pace
from jaxtrain.inference.engine.pages import PagePool, affordable_pages
from jaxtrain.inference.engine.programs import (
    EngineModel,
    ProgramKey,
    Programs,
    draft_modules,
    last_states,
    minimal_programs,
    reads_in_place,
    supports_first_chunks,
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
from jaxtrain.inference.engine.scheduler import Scheduler
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
        drafter: EngineModel | None = None,
        adapters: Collection[str] = (),
    ):
        """params: on the device, in the compute dtype. stops: tokens that end every text. mesh: the
        devices of params, if there are several. drafter: the model of options.draft_run. adapters:
        names of the LoRA adapters in params, in their order (`with_adapters`)."""
        self.context = options.context or config.context_length
        both = [EngineModel(config, graphdef, params), *([drafter] if drafter else [])]
        for one, name in zip(both, ("this model", "the draft model")):
            if why := device.check_servable(one.config, self.context):
                raise UserError(f"the engine: {name} {why}")
        size = device.usable_page_size(config.virtual, options.page_size)
        options = options._replace(page_size=size)
        self.options, self.tokenizer, self.stops = options, tokenizer, stops
        self.graphdef, self.params, self.mesh = graphdef, params, mesh
        self.adapters = {name: i for i, name in enumerate(adapters, 1)}  # indices by name
        parts = [*both, *draft_modules(both[0], options)]  # each has its own KV pages
        window = max(device.longest_window(one.config) for one in parts)
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
        first_chunks = supports_first_chunks(options, [one.config for one in both], mesh)
        self.programs = Programs(
            self.models, options, self.virtual, sizes, config.width, packed, first_chunks
        )
        self.compiler, self.pace = EngineCompiler(self.on_mesh), Pace(options.decode_steps)
        self.scheduler = Scheduler(options, self.pool, self.virtual, self.width, window)
        self.fresh, self.arrivals = True, 0  # no request has joined yet
        self.more_prompts = False  # prompts wait for which the current prefill has no row
        self.rows = SlotTable(options.slots, tokenizer.vocab_size)
        self.by_id: dict[str, Sequence] = {}
        self.pending: deque[Pending] = deque()
        self.ready: list[Update] = []
        self.new_tokens = self.drafts = self.accepted_drafts = self.steps = 0  # since the start
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
            raise UserError(
                f"request {request.id}: its id is in use by another request; choose another"
            )
        if (waiting := len(self.scheduler.waiting)) >= self.options.max_queue:
            raise UserError(f"the queue is full: {waiting} requests wait; try again later")
        stops = {*self.stops, *request.sampling.stop_tokens}
        sequence = Sequence(request, self.arrivals, self.tokenizer, stops)
        if (grammar := request.sampling.grammar) is not None:
            self.grammars = self.grammars or Grammars(self.tokenizer, self.stops)
            sequence.matcher = self.grammars.matcher(grammar, request.id)
        self.arrivals += 1
        self.by_id[request.id] = sequence
        self.scheduler.waiting.append(sequence)

    def cancel(self, id: str) -> None:
        """End a request; its last update comes with the next step. Ignores an unknown id."""
        sequence = self.by_id.get(id)
        if sequence is None:
            return
        self.finish(sequence)
        self.ready.append(Update(id, "", (), (), "cancelled"))

    def stats(self) -> EngineStats:
        """Current statistics."""
        scheduler, pool = self.scheduler, self.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=pool.used,
            pages_total=pool.total,
            preemptions=scheduler.preemptions,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=scheduler.prompt_tokens,
            new_tokens=self.new_tokens,
            drafts=self.drafts,
            accepted_drafts=self.accepted_drafts,
            steps=self.steps,
        )

    def step(self) -> list[Update]:
        """Start a step on the device, and return the updates of the one before; [] when idle.

        The first tokens after prompts are read at once, while the device decodes. If more prompts
        wait, their prefill starts before, so that the device never waits for the host.
        """
        if self.by_id:
            self.steps += 1
            with self.on_mesh():
                self.admit()
                self.prefill()
                # If more prompts wait, the first of a burst decode together with the next ones.
                if not (self.more_prompts and [p.first for p in self.pending] == [True]):
                    self.decode()
            self.scheduler.prepare(self.options.prefill_rows)
            self.read_finished()
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

    # ---- requests that start and end ------------------------------------------------------------

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
        computing = sum(not one.decoding for one in self.scheduler.running)
        room = self.options.prefill_rows - computing
        new = self.scheduler.admit(room)
        for one in new:
            asked = one.request
            adapter = self.adapters[asked.adapter] if asked.adapter else 0
            self.rows.put(one.in_slot, asked.sampling, len(asked.prompt), adapter)
            self.constrain(one)
        if new:
            self.compiler.pick(ProgramKey("put_texts"))
            texts = [(one.in_slot, one.tokens) for one in new]
            self.state = self.programs.put_texts(self.state, texts)
        self.more_prompts = self.scheduler.can_admit and len(new) == room

    def constrain(self, sequence: Sequence) -> None:
        """Mask the tokens of a running request to those that its grammar allows next."""
        if sequence.matcher is not None and sequence.slot is not None:
            self.rows.allow(sequence.slot, allowed_bits(sequence.matcher))

    def finish(self, sequence: Sequence) -> None:
        """End a request, and free its slot and pages."""
        sequence.done = True
        if sequence.slot is not None:
            self.rows.clear(sequence.slot)
        self.scheduler.remove(sequence)
        del self.by_id[sequence.request.id]

    # ---- device calls ---------------------------------------------------------------------------

    def prefill(self) -> None:
        """Compute a chunk of some prompts. First chunks and later ones run in separate calls, so
        that a sequence's values do not depend on the other sequences."""
        todo = [one for one in self.scheduler.running if not one.decoding]
        is_first = lambda one: self.programs.first_chunks and not one.computed
        parts = {first: [one for one in todo if is_first(one) == first] for first in (True, False)}
        for first, some in parts.items():
            if some:
                self.pace.reset()
                self.prefill_chunk(some[: self.programs.prefill_batch(len(some), first)], first)

    def prefill_chunk(self, todo: list[Sequence], first: bool) -> None:
        """Compute a chunk of these sequences, and sample the first token of those it completes."""
        o = self.options
        longest = max(one.computed + min(one.left, o.chunk) for one in todo)
        key = self.compiler.pick(self.programs.prefilling(len(todo), longest, first))
        parts = [(one.in_slot, one.computed, min(one.left, o.chunk)) for one in todo]
        self.state, states_BD = self.programs.prefill(
            key, self.state, self.rows.inputs(), self.scheduler.table_SW, parts
        )
        for one, (_, _, count) in zip(todo, parts):
            one.computed += count
            self.scheduler.cache_pages(one)
            self.scheduler.free_unseen(one)
        if rows := [(i, one) for i, one in enumerate(todo) if not one.left]:
            sampler = max(one.sampler for _, one in rows)
            key = self.compiler.pick(ProgramKey("sample_first", sampler=sampler))
            whole = [(i, one.in_slot, len(one.tokens)) for i, one in rows]
            self.state, sampled = self.programs.sample_first(
                key, self.state, self.rows.inputs(), states_BD, whole
            )
            for _, one in rows:
                one.decoding, one.ahead = True, 1
            self.read_later(sampled, rows, 1, first=True)

    def decode(self) -> None:
        """Decode the next tokens of all requests whose prefill is complete."""
        for one in self.scheduler.running:
            self.scheduler.free_unseen(one)
        if not (todo := self.decodable):
            return
        key = self.compiler.pick(self.decode_key(todo))
        most = self.options.most(key.steps)
        for one in todo:
            self.allocate_or_preempt(one, most)
        # Reading tokens may have made more requests decodable; program and pages do not fit them.
        if not (todo := [one for one in todo if one.can_go_on]):
            return
        self.state, sampled = self.programs.decode(
            key,
            self.state,
            self.rows.inputs(),
            self.scheduler.table_SW,
            [one.in_slot for one in todo],
        )
        self.pace.called(key.steps)
        for one in todo:
            one.ahead += most
        self.read_later(sampled, list(enumerate(todo)), most)

    @property
    def decodable(self) -> list[Sequence]:
        """Running requests whose next token can be sampled now."""
        return [one for one in self.scheduler.running if one.can_go_on]

    def decode_key(self, todo: list[Sequence]) -> ProgramKey:
        """The program that fits these requests best."""
        longest, sampler = max(one.length for one in todo), max(one.sampler for one in todo)
        return self.programs.decoding(len(todo), self.steps_at_once(todo), longest, sampler)

    def steps_at_once(self, todo: list[Sequence]) -> int:
        """Decode steps of the next call. One if a prompt waits for prefill, a grammar needs the
        host between steps, every request needs at most one more token, or pages are short."""
        o = self.options
        steps = self.pace.steps if o.adapt_steps else o.decode_steps
        if len(todo) == 1 and steps > 1:  # no one else's prompt joins often: fewer programs
            steps = o.decode_steps
        waits = lambda one: one.matcher is not None or not one.decoding
        if self.more_prompts or any(map(waits, self.scheduler.running)):
            return 1
        if all(one.limit - one.length < 2 for one in todo):
            return 1
        return steps if self.scheduler.can_grow(todo, o.most(steps)) else 1

    def allocate_or_preempt(self, sequence: Sequence, tokens: int) -> None:
        """Allocate pages for the next tokens. If too few are free, read the steps in flight,
        which may end requests; then preempt the youngest request."""
        while sequence.can_go_on and not self.scheduler.grow(sequence, tokens):
            if self.pending:
                while self.pending:
                    self.read(self.pending.popleft())
            else:  # no step of the preempted request is in flight
                self.rows.clear(self.scheduler.preempt_youngest())

    def read_later(
        self, sampled: Sampled, rows: list[tuple[int, Sequence]], most: int, first: bool = False
    ) -> None:
        """Queue a step whose tokens are to be read, and start copying them to the host."""
        if rows:
            asked = any(one.request.sampling.logprobs is not None for _, one in rows)
            for x in jax.tree.leaves(sampled if asked else sampled.tokens_KBT):
                x.copy_to_host_async()
            self.pending.append(Pending(sampled, tuple(rows), most, self.steps, first))

    def warm_up(self, asked: Collection[Request] = (), background: bool = False) -> int:
        """Compile all programs that requests may need, several at a time. Returns their number.

        Without it a program is compiled when a request first needs it. asked: the only requests
        that will come, all at once. background: wait only for programs that together serve any
        request; the others are compiled in the background.
        """
        keys = self.programs.needed(asked, self.context)
        now = minimal_programs(keys) if background else keys
        with self.on_mesh():
            state, rows = self.state, self.rows.inputs()
        lower = lambda key: self.programs.lower(key, state, rows)
        self.compiler.start(now, [key for key in keys if key not in now], lower)
        self.compiler.wait(now)
        return len(keys)

    def lower(self, asked: Collection[Request] = ()) -> Iterator[jax.stages.Lowered]:
        """Yield the lowered programs that `warm_up` compiles."""
        with self.on_mesh():
            rows = self.rows.inputs()
            for key in self.programs.needed(asked, self.context):
                yield self.programs.lower(key, self.state, rows)

    def decode_program(self) -> jax.stages.Lowered:
        """Lowered program of the next decode call for the running requests."""
        with self.on_mesh():
            key = self.decode_key(self.decodable)
            return self.programs.lower(key, self.state, self.rows.inputs())

    # ---- tokens -------------------------------------------------------------------------------

    def read_finished(self) -> None:
        """Read first tokens, unless that would delay the next prompts' prefill; else the steps
        before this one.

        First tokens are returned before other requests' tokens of the step before are read, which
        are read after the next call's at the latest: no request waits for others' texts.
        """
        oldest = self.steps
        for i, step in enumerate(self.pending):
            if step.first and (step.step < self.steps or not self.more_prompts):
                del self.pending[i]
                self.read(step)
                oldest -= 1
                break
        while self.pending and self.pending[0].step < oldest:
            self.read(self.pending.popleft())

    def read(self, step: Pending) -> None:
        """Read the tokens of a step, and pass them to their sequences."""
        with self.pace.waiting():
            tokens_KBT = np.asarray(step.sampled.tokens_KBT)
        if (tokens_KBT == TIMED_OUT).any():
            raise RuntimeError(
                "the megakernel timed out: its thread blocks did not all run at once; end other "
                "programs on this GPU, or set megakernel=False (serve: --no-megakernel)"
            )
        if (tokens_KBT == NONFINITE).any():
            raise RuntimeError(
                "the model's hidden states are not finite: its weights are damaged or its training "
                "diverged; load an earlier checkpoint (--step N)"
            )
        right_B, wrong_B = (
            x.sum((0, 2)) for x in (tokens_KBT[:, :, 1:] >= 0, tokens_KBT == REJECTED)
        )
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
        self.new_tokens += new
        self.drafts += tried
        self.accepted_drafts += accepted
