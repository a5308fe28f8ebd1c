"""The engine: what is made once for a model, and requests made from prompts.

Rounds are run by the scheduler, for one request as for many. Reading the prompt stops one token short of its end: the
last prompt token is the root of the first round, so there is no special first token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import numpy as np

from longgraft.admission import pool_chunks, require_room, token_ids_of
from longgraft.cache import ChunkPool, SequenceCache
from longgraft.check import costs_of, probe_exact, self_check
from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
from longgraft.cost import CostTable
from longgraft.device_rounds import require_round
from longgraft.draft.base import Drafter, NullDrafter, freeze_costs
from longgraft.features import Features
from longgraft.matcher import Grammars
from longgraft.policy import Policies
from longgraft.prefill import PromptReader
from longgraft.prefix import PrefixCache, save_prompt, side_columns
from longgraft.prompt_scores import prompt_scores
from longgraft.references import References
from longgraft.request import raise_first
from longgraft.resolve import resolve
from longgraft.retrieval import Retrieval
from longgraft.sampler import Sampler
from longgraft.scheduler import Scheduler
from longgraft.sequence import Index, Sequence
from longgraft.stats import Stats
from longgraft.stop import StopRules
from longgraft.target import Progress, Target
from longgraft.trace import Trace

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
        require_round(self.config, self.target)
        self.drafter = drafter or NullDrafter()
        self.grammars = Grammars(tokenizer, self.target.vocab_size)
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
        limits = (self.target.context_limit, self.config.max_context)
        return min((limit for limit in limits if limit), default=self.pool.num_chunks * self.pool.chunk_rows)

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
        for _ in self.run(waiting, progress):
            pass
        outputs = [self.output(seq) for seq in waiting]
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
        room, ends, count = self.max_context - len(prompt_ids), params.eos_token_ids or (), params.prompt_logprobs
        matcher = self.grammars.open(params.grammar, len(prompt_ids), ends)
        stop = StopRules(ends, params.stop, params.max_new_tokens, room, self.tokenizer, prompt_ids=prompt_ids)
        return Sequence(
            token_ids=list(prompt_ids),
            prompt_len=len(prompt_ids),
            cache=SequenceCache(self.pool),
            index=self.retrieval.open(references, self.encode, chosen.retrieves),
            sampler=Sampler(params, prompt_ids, self.target.vocab_size, matcher),
            stop=stop,
            stats=Stats(len(prompt_ids), not (chosen.retrieves or chosen.drafts), is_priced=self._is_frozen),
            policy=chosen,
            long_rope=threshold is not None and total > threshold,
            tenant=references.tenant if references else None,
            prompt_scores=prompt_scores(len(prompt_ids), count, self.target.vocab_size, params.prompt_logprobs_from),
            matcher=matcher,
            trace=Trace() if params.trace else None,
        )

    def run(self, batch: Seq[Sequence], progress: Progress | None = None) -> Rounds:
        """Run sequences to their ends; yields, after every round in which any did, the tokens each committed.

        The first error ends all of them. Caches are released on every exit; leaving early keeps what was committed.
        """
        with closing(Scheduler(self)) as scheduler:
            requests = [scheduler.add(seq, progress=progress) for seq in batch]
            while scheduler.has_work:
                lengths = [len(seq.token_ids) for seq in batch]
                scheduler.advance()
                raise_first(requests)
                new = [seq.token_ids[length:] for seq, length in zip(batch, lengths)]
                if any(new):
                    yield new
                scheduler.sweep()
            raise_first(requests)

    def prefill(self, seq: Sequence, progress: Progress | None = None) -> None:
        """Compute K/V of a prompt but its last token, and index it, outside any run."""
        if not seq.is_finished:
            PromptReader(self).read(seq, progress)

    def output(self, seq: Sequence) -> Output:
        """Return what a sequence holds; one that was left early says `cancelled`."""
        documents, lines = self.retrieval.origins(seq)
        return Output(
            token_ids=tuple(seq.new_token_ids),
            text=seq.stop.text if self.tokenizer is not None else "",
            finish_reason=seq.stop.finish_reason or seq.ended or "cancelled",
            seed=seq.sampler.seed,
            prompt_len=seq.prompt_len,
            sources=tuple(seq.sources),
            origins=tuple(seq.origins),
            logprobs=tuple(seq.logprobs),
            prompt_logprobs=seq.prompt_scores.logprobs if seq.prompt_scores else (),
            documents=documents,
            lines=lines,
            stats=seq.stats.summary(),
            trace=seq.trace,
        )

    def save_prefix(self, path: str, prompt: Prompt, tenant: str | None = None, new_tokens: int = 1) -> int:
        """Read `prompt`, as far as it is not cached, and write its K/V to a file; see `prefix.save_prompt`."""
        return save_prompt(self, path, prompt, tenant, new_tokens)

    def load_prefix(self, path: str, tenant: str | None = None) -> int:
        """Bring back what `save_prefix` wrote, for requests of this tenant; return the number of rows (tokens)."""
        return self.prefixes.load(path, tenant)

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise GraftError("this engine has no tokenizer: give token ids, or pass tokenizer= when making it")
        return self.tokenizer
