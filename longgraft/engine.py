"""The engine: one round after another until every request has stopped.

A round proposes a tree a sequence (retrieve, draft, prune, graft), verifies all of them in one target pass,
accepts what the ordinary sampler agrees with, and commits it. Reading the prompt stops one token short of
its end: the last prompt token is the root of the first round, so there is no special first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import numpy as np

from longgraft.accept import accept
from longgraft.admission import CHUNK_ROWS, admit, pool_chunks, require_room, token_ids_of
from longgraft.cache import ChunkPool, SequenceCache
from longgraft.check import costs_of, probe_exact, self_check
from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
from longgraft.cost import CostTable
from longgraft.draft.base import Drafter, NullDrafter, freeze_costs
from longgraft.features import Features
from longgraft.policy import Policies, rows_for
from longgraft.prefix import PrefixCache, save_prompt, side_columns, watched
from longgraft.references import References
from longgraft.resolve import resolve
from longgraft.retrieval import Retrieval
from longgraft.sampler import Sampler
from longgraft.sequence import Index, Sequence
from longgraft.stats import Stats, shared_stage
from longgraft.stop import StopRules
from longgraft.target import Progress, Target
from longgraft.tree import TokenTree
from longgraft.verify import verify

Prompt = str | Seq[int]
# What `Engine.run` yields: after every round, the tokens each sequence of the batch committed.
Rounds = Generator[list[list[int]], None, None]


class Engine:
    """Generates with a transformers causal LM, faster and with the same output as plain decoding."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        drafter: Drafter | None = None,
        index: Callable[[int], Index] | None = None,
        cost: CostTable | None = None,
        pool: ChunkPool | None = None,
    ) -> None:
        """Wrap a loaded model; raises `GraftError` if it cannot be right with our attention (checked here).

        `index(vocab_size)` makes the index of one request.
        """
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.target = Target(model, self.config.backend, self.config.exact)
        self.drafter = drafter or NullDrafter()
        self.retrieval = Retrieval(tokenizer, self.target.vocab_size, self.config, index)
        self_check(self.target)
        if self.config.exact:
            probe_exact(self.target)
        side = side_columns(self.target, self.drafter, self.config)
        self.pool = pool or self.target.new_pool(pool_chunks(self.target, self.config, side), side)
        self.prefixes = PrefixCache(self.target, self.pool, self.config, self.drafter)
        self.cost = cost if cost is not None else costs_of(self.target, self.pool, self.config)
        self._is_frozen = freeze_costs(self.drafter, self.cost)
        self.features = Features(self.target.model, layers) if (layers := self.drafter.feature_layers) else None
        self.policies = Policies(self.drafter, self.cost, self.config, self.target.vocab_size)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        config: EngineConfig | None = None,
        *,
        draft: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        quantize: str | None = None,
        **options: Any,
    ) -> Engine:
        """Load a hub id, folder or GGUF file; `draft`: a drafter for it. See `longgraft.load.load`."""
        from longgraft.draft.load import load_drafter
        from longgraft.load import load

        model, tokenizer = load(name, dtype, device, quantize)
        if draft is not None:
            options["drafter"] = load_drafter(draft, model, tokenizer, (config or EngineConfig()).cost_table)
        return cls(model, tokenizer, config, **options)

    @property
    def max_context(self) -> int:
        """Longest prompt + output in tokens: the model's limit, or a smaller one asked for."""
        limits = [limit for limit in (self.target.context_limit, self.config.max_context) if limit]
        return min(limits, default=self.pool.num_chunks * CHUNK_ROWS)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        references: References | None = None,
        policy: str | None = None,
    ) -> Any:
        """Generate one `Output` for one prompt (text or token ids), or a list of them for a list of prompts.

        The prompts of a list run together, as many at a time as the KV pool holds. `references`: what else they may
        copy from. `policy`: where proposals come from, if not as the engine's config says.
        """
        if hasattr(prompts, "tolist"):
            prompts = prompts.tolist()
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        texts: Any = [prompts] if single else prompts
        # All are opened first, so that one that cannot run is refused before any is computed.
        params = params or SamplingParams()
        waiting = [self.open(self.encode(one), params, references=references, policy=policy) for one in texts]
        outputs: list[Output] = []
        while waiting:
            batch = admit(waiting, self.pool.num_free, self.config)
            for _ in self.run(batch, progress):
                pass
            outputs += [self.output(seq) for seq in batch]
        return outputs[0] if single else outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        references: References | None = None,
        policy: str | None = None,
    ) -> Iterator[str]:
        """Yield text as it becomes final; never splits a character or shows part of a stop string."""
        from longgraft.stream import TextStream

        seq = self.open(self.encode(prompt), params or SamplingParams(), references=references, policy=policy)
        text = TextStream(self._tokenizer(), seq.token_ids, seq.sampler.params.stop)
        with closing(self.run([seq])) as rounds:
            for committed in rounds:
                if piece := text.push(committed[0]):
                    yield piece
        if piece := text.finish():
            yield piece

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's token ids; an empty prompt or an id outside the vocabulary is an error."""
        ids = self._tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else token_ids_of(prompt)
        if not ids:
            raise GraftError("the prompt is empty: expected at least one token")
        if wrong := [i for i in ids if not 0 <= i < self.target.vocab_size]:
            raise GraftError(f"prompt token id {wrong[0]}: expected 0 to {self.target.vocab_size - 1}")
        return ids

    def open(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        generation_config: Any = None,
        references: References | None = None,
        policy: str | None = None,
    ) -> Sequence:
        """Admit one request: check lengths and memory, and set up its state. Nothing is computed yet.

        `generation_config` (default: the model's own) fills what `params` leaves open.
        """
        chosen = self.policies.get(policy)
        defaults = generation_config or getattr(self.target.model, "generation_config", None)
        params = resolve(params, defaults, self.target.vocab_size)
        total = min(len(prompt_ids) + params.max_new_tokens, self.max_context)
        if len(prompt_ids) > self.max_context:
            raise GraftError(
                f"the prompt has {len(prompt_ids)} tokens: expected at most {self.max_context} (the context limit)"
            )
        require_room(self.target, self.pool, total, self.config)
        threshold = self.target.long_rope_from
        room, ends = self.max_context - len(prompt_ids), params.eos_token_ids or ()
        stop = StopRules(ends, params.stop, params.max_new_tokens, room, self.tokenizer, prompt_ids=prompt_ids)
        return Sequence(
            token_ids=list(prompt_ids),
            prompt_len=len(prompt_ids),
            cache=SequenceCache(self.pool),
            index=self.retrieval.open(references, self.encode, chosen.retrieves),
            sampler=Sampler(params, prompt_ids, self.target.vocab_size),
            stop=stop,
            stats=Stats(len(prompt_ids), not (chosen.retrieves or chosen.drafts), is_priced=self._is_frozen),
            policy=chosen,
            long_rope=threshold is not None and total > threshold,
            tenant=references.tenant if references else None,
        )

    def run(self, batch: Seq[Sequence], progress: Progress | None = None) -> Rounds:
        """Read the prompts, then yield after every round the tokens each sequence of the batch committed.

        Caches are released on every exit; leaving early keeps what was committed.
        """
        begin = time.perf_counter()
        try:
            with self.target.session(), self.drafter.session():
                for seq in batch:
                    self.prefill(seq, progress)
                while active := [seq for seq in batch if not seq.is_finished]:
                    lengths = {id(seq): len(seq.token_ids) for seq in active}
                    for group in self._groups(active):
                        self.step(group)
                    yield [seq.token_ids[lengths.get(id(seq), len(seq.token_ids)) :] for seq in batch]
        finally:
            for seq in batch:
                seq.stats.seconds["total"] += time.perf_counter() - begin
                seq.cache.release()
            for seq in batch:
                self.drafter.reset(seq)
                self.retrieval.close(seq)

    def prefill(self, seq: Sequence, progress: Progress | None = None) -> None:
        """Compute K/V of the prompt but its last token, and index it."""
        if seq.is_finished:
            return
        with seq.stats.stage("prefill"):
            self.prefixes.begin(seq)
            tokens = np.asarray(seq.token_ids[seq.cache.length : -1], np.int32)
            features, watch = watched(seq, self.features, self.drafter)
            options = {"long_rope": seq.long_rope, "features": features}
            self.target.prefill(seq.cache, tokens, self.config.prefill_rows, progress, watch, **options)
            seq.stats.prefilled_tokens += len(tokens)
            self.prefixes.finish(seq)
        if seq.policy.retrieves:
            with seq.stats.stage("index"):
                seq.index.extend(np.asarray(seq.token_ids, np.int32), learn=False)

    def step(self, batch: Seq[Sequence]) -> None:
        """One round: propose, verify in one target pass, accept, commit."""
        with shared_stage([seq.stats for seq in batch], "plan"):
            trees = self.plan(batch)
        begin = time.perf_counter()
        with shared_stage([seq.stats for seq in batch], "verify"):
            features = self.features if any(seq.policy.drafts for seq in batch) else None
            checked = verify(self.target, batch, trees, features)
        self._learn_cost(batch, trees, time.perf_counter() - begin)
        for seq, result in zip(batch, checked):
            with seq.stats.stage("accept"):
                accepted = accept(result, seq.sampler, seq.token_ids, seq.stop)
                new = seq.stop.clip(accepted.token_ids)
            with seq.stats.stage("extend"):
                seq.policy.learn(seq, accepted)
                seq.extend(new, result, accepted)
                if seq.policy.drafts:
                    self.drafter.extend(seq, new, result, accepted)

    def plan(self, batch: Seq[Sequence]) -> list[TokenTree]:
        """Return the tree of each sequence that is worth verifying now."""
        builders = [seq.policy.propose(seq) for seq in batch]
        counts = rows_for(self.cost, batch, builders, self.config.max_nodes + 1)
        return [builder.build(count) for builder, count in zip(builders, counts)]

    def output(self, seq: Sequence) -> Output:
        """Return what a sequence holds; one that was left early says `cancelled`."""
        documents, lines = self.retrieval.origins(seq)
        return Output(
            token_ids=tuple(seq.new_token_ids),
            text=seq.stop.text if self.tokenizer is not None else "",
            finish_reason=seq.stop.finish_reason or "cancelled",
            seed=seq.sampler.seed,
            prompt_len=seq.prompt_len,
            sources=tuple(seq.sources),
            origins=tuple(seq.origins),
            logprobs=tuple(seq.logprobs),
            documents=documents,
            lines=lines,
            stats=seq.stats.summary(),
        )

    def save_prefix(self, path: str, prompt: Prompt, tenant: str | None = None, new_tokens: int = 1) -> int:
        """Read `prompt`, as far as it is not cached, and write its K/V to a file; see `prefix.save_prompt`."""
        return save_prompt(self, path, prompt, tenant, new_tokens)

    def load_prefix(self, path: str, tenant: str | None = None) -> int:
        """Bring back what `save_prefix` wrote, for requests of this tenant; return the number of rows (tokens)."""
        return self.prefixes.load(path, tenant)

    def _learn_cost(self, batch: Seq[Sequence], trees: Seq[TokenTree], seconds: float) -> None:
        if self.cost is not None:
            context = sum(len(seq.token_ids) for seq in batch) // len(batch)
            self.cost.learn(sum(map(len, trees)), context, seconds)

    def _groups(self, active: Seq[Sequence]) -> list[list[Sequence]]:
        """Return who shares a forward: those in one RoPE regime."""
        regimes = {seq.long_rope: [s for s in active if s.long_rope == seq.long_rope] for seq in active}
        return list(regimes.values())

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise GraftError("this engine has no tokenizer: give token ids, or pass tokenizer= when making it")
        return self.tokenizer
