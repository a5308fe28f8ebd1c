"""Answers under a grammar: always what it allows, and token for token those of plain decoding, whatever is proposed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import longgraft.rounds as rounds
from longgraft.audit import judge
from longgraft.config import GraftError, Output, SamplingParams
from longgraft.draft.lm import ModelDrafter
from longgraft.engine import Engine
from longgraft.grammar import Grammar
from longgraft.matcher import Matcher
from longgraft.references import References
from longgraft.scheduler import Scheduler
from longgraft.service import Service
from longgraft.tree import Source, TreeBuilder
from tests import engines
from tests.cases import SOURCES
from tests.engines import cost_of, engine_for, model_of, prompt_of
from tests.grammars import EOS, PERSON, fits, patched, plain, text_of, tokenizer
from tests.models import VOCAB, tiny_model

pytest.importorskip("llguidance")
DENSE = Grammar.json_schema(PERSON, whitespace=False)
FREE = Grammar.json_schema(PERSON)
THOUGHT = Grammar.json_schema(PERSON, whitespace=False, lead="</think>")
WORDS = Grammar.regex(r"(ab|cd|[e-h]{2}){3,9}")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.0, "seed": 5, "top_k": 0},
    "filters": {"temperature": 1.3, "seed": 6, "top_k": 20, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "seed": 7, "top_k": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
}
PROMPT = prompt_of(120)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def params_of(grammar: Grammar | None, setting: str = "hot", **more: Any) -> SamplingParams:
    values = {"max_new_tokens": 70, "eos_token_ids": (EOS,), "grammar": grammar, **SETTINGS[setting], **more}
    return SamplingParams(**values)


@lru_cache(maxsize=16)
def engine_of(policy: str = "adaptive", **settings: Any) -> Engine:
    return engine_for("llama", tokenizer(), policy=policy, **settings)


@lru_cache(maxsize=64)
def expected(grammar: Grammar, setting: str) -> tuple[int, ...]:
    return plain(model_of(), PROMPT, params_of(grammar, setting))


def person(output: Output) -> Any:
    """The answer as JSON, checked against the schema."""
    assert output.finish_reason == "eos", text_of(output.token_ids)
    value = json.loads(text_of(output.token_ids))
    assert fits(value, PERSON)
    return value


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("grammar", [DENSE, FREE, WORDS], ids=["dense", "free", "words"])
def test_grafted_and_plain_decoding_write_what_a_loop_writes(grammar: Grammar, setting: str) -> None:
    want = expected(grammar, setting)
    for policy in ("plain", "adaptive"):
        output = engine_of(policy).generate(PROMPT, params_of(grammar, setting))
        assert output.token_ids == want, policy
    assert want[-1] == EOS or len(want) == 70
    if grammar is DENSE:
        person(output)
    if grammar is WORDS:
        assert re.fullmatch(grammar.source, text_of(want))


@pytest.mark.parametrize("source", SOURCES)
def test_no_source_of_proposals_changes_it(source: str) -> None:
    for setting in ("greedy", "hot"):
        want = expected(DENSE, setting)
        engine = engine_for("llama", tokenizer(), source=source, truth=(*PROMPT, *want))
        assert engine.generate(PROMPT, params_of(DENSE, setting)).token_ids == want


def test_forced_tokens_need_no_pass_and_are_counted_by_name() -> None:
    output = engine_of().generate(PROMPT, params_of(DENSE))
    stats = output.stats
    assert stats["accepted_by_source"]["grammar"] >= 12 and stats["acceptance_length"] > 2
    forced = [token for token, source in zip(output.token_ids, output.sources) if source == Source.GRAMMAR]
    assert text_of(forced[:9]) == '"name": "'
    assert "grammar" not in engine_of("plain").generate(PROMPT, params_of(DENSE)).stats["nodes_by_source"]


@pytest.mark.parametrize("policy", ["dense", "pruned", "paper", "adaptive"])
def test_with_a_drafter(policy: str) -> None:
    for setting in ("greedy", "hot"):
        engine = Engine(model_of(), tokenizer(), cost=cost_of(0.01), drafter=ModelDrafter(tiny_model("llama"), VOCAB))
        output = engine.generate(PROMPT, params_of(DENSE, setting), policy=policy)
        assert output.token_ids == expected(DENSE, setting)
        assert policy == "adaptive" or "grammar" not in output.stats["nodes_by_source"], "not the published tree"


def test_forbidden_nodes_are_not_verified() -> None:
    seen = list[int]()
    build = TreeBuilder.build

    def watched(self: TreeBuilder, num_nodes: int | None = None) -> Any:
        made = build(self, num_nodes)
        seen.extend(made.token_ids[1:].tolist())
        return made

    digits = Grammar.regex("[0-9]{40}")
    allowed = set(tokenizer()("0123456789")["input_ids"])
    with patched(TreeBuilder, "build", watched):
        output = engine_of().generate(PROMPT, params_of(digits))
    assert seen and set(seen) <= allowed
    assert output.finish_reason == "eos" and re.fullmatch("[0-9]{40}", text_of(output.token_ids))


def test_what_follows_forced_tokens_is_copied_in_the_same_pass() -> None:
    text = '{"name": "qwxz", "age": 1, "tags": []}'
    grammar = Grammar.json_schema({**PERSON, "properties": {**PERSON["properties"], "name": {"enum": ["qwxz", "zzz"]}}})
    prompt = tokenizer()("the answer is " + text)["input_ids"]
    bias = dict.fromkeys(tokenizer()(text)["input_ids"], 30.0)
    dense = Grammar("json_schema", grammar.source, whitespace=False)
    params = params_of(dense, "greedy", logit_bias=bias)
    output = engine_for("llama", tokenizer(), policy="retrieval").generate(prompt, params)
    assert output.token_ids == plain(model_of(), prompt, params)
    value = json.loads(text_of(output.token_ids))
    assert value["name"] in ("qwxz", "zzz")
    first = [Source(source).name for source in output.sources[: output.stats["new_tokens_by_round"][0]]]
    assert "GRAMMAR" in first or "PROMPT" in first


def test_thinking_comes_first_and_the_answer_is_right() -> None:
    end = tokenizer().get_vocab()["</think>"]
    for setting in ("greedy", "hot"):
        # The tiny model never ends a thought by itself; a bias makes it likely everywhere.
        params = params_of(THOUGHT, setting, logit_bias={end: 9.0}, max_new_tokens=120)
        output = engine_of().generate(PROMPT, params)
        assert output.token_ids == plain(model_of(), PROMPT, params)
        assert output.token_ids.count(end) == 1
        assert fits(json.loads(text_of(output.token_ids).split("</think>")[1]), PERSON)


def test_eos_only_where_the_grammar_allows_it() -> None:
    eager = {EOS: 60.0}
    for grammar, shape in ((DENSE, None), (Grammar.regex("a{3,9}"), "a{3}"), (Grammar.regex("[xy]{5}z?"), "[xy]{5}")):
        output = engine_of().generate(PROMPT, params_of(grammar, "greedy", logit_bias=eager))
        assert output.finish_reason == "eos" and output.token_ids.count(EOS) == 1
        assert shape is None or re.fullmatch(shape, text_of(output.token_ids)), "it did not end as soon as it could"
        assert grammar is not DENSE or person(output)


def test_stop_strings_still_stop() -> None:
    output = engine_of().generate(PROMPT, params_of(DENSE, stop=('"age"',)))
    assert output.finish_reason == "stop" and '"age"' in text_of(output.token_ids)
    want = expected(DENSE, "hot")
    assert output.token_ids == want[: len(output.token_ids)]


def test_lengths_cut_and_what_was_written_is_the_beginning() -> None:
    for count in (0, 1, 2, 7, 19):
        output = engine_of().generate(PROMPT, params_of(DENSE, max_new_tokens=count))
        assert output.token_ids == expected(DENSE, "hot")[:count] and output.finish_reason == "length"


def test_a_batch_of_answers_with_and_without() -> None:
    prompts = [prompt_of(100, seed) for seed in range(3)]
    together = engine_of().generate(prompts, params_of(DENSE))
    for prompt, output in zip(prompts, together):
        assert person(output)
        assert output.token_ids == engine_of("plain").generate(prompt, params_of(DENSE)).token_ids
    engine, asked = engine_of(), [DENSE, None, WORDS, FREE]
    with Service(engine) as service:
        tickets = [service.submit(PROMPT, params_of(grammar)) for grammar in asked]
        outputs = [ticket.result(60) for ticket in tickets]
        with pytest.raises(GraftError, match="strnig"):
            service.submit(PROMPT, params_of(Grammar.json_schema({"type": "strnig"})))
        late = service.submit(PROMPT, params_of(DENSE, ignore_eos=True))
        with pytest.raises(GraftError, match="ends with an EOS token"):
            late.result(60)
    for grammar, output in zip(asked, outputs):
        want = engine_of("plain").generate(PROMPT, params_of(grammar))
        assert output.token_ids == want.token_ids


def test_after_being_put_back_it_goes_on_where_it_was() -> None:
    engine = engine_of()
    with closing(Scheduler(engine)) as scheduler:
        requests = [scheduler.add(engine.open(list(PROMPT), params_of(DENSE, s))) for s in ("greedy", "hot")]
        rounds_done = 0
        while scheduler.has_work:
            scheduler.step()
            rounds_done += 1
            if rounds_done in (2, 4, 7) and requests[1] in scheduler.running:
                scheduler._put_back(requests[1])
    assert requests[1].seq.stats.put_back > 1
    assert [tuple(r.seq.new_token_ids) for r in requests] == [expected(DENSE, s) for s in ("greedy", "hot")]


def test_a_prompt_that_is_scored_and_log_probabilities_are_of_the_raw_logits() -> None:
    output = engine_of().generate(PROMPT, params_of(DENSE, logprobs=2, prompt_logprobs=1))
    text = torch.tensor([[*PROMPT, *output.token_ids]])
    with torch.no_grad():
        rows = torch.log_softmax(model_of()(input_ids=text, use_cache=False).logits[0], -1)
    for position, one in enumerate(output.logprobs, len(PROMPT)):
        assert one.logprob == pytest.approx(float(rows[position - 1, one.token_id]), abs=1e-9)
    assert output.token_ids == expected(DENSE, "hot") and len(output.prompt_logprobs) == len(PROMPT)


def test_the_audit_knows_the_grammar() -> None:
    twin = engine_of("plain")
    seq = twin.open(list(PROMPT), params_of(DENSE, "greedy"))
    with closing(twin.run([seq])) as running:
        for _ in range(12):
            next(running)
        forbidden = tokenizer()("~")["input_ids"][0]
        verdict = judge(twin, seq, forbidden, (4,))
    assert verdict.verdict == "MISMATCH", "a forbidden token passes for a tie"


def test_references_serve_an_answer_with_a_grammar() -> None:
    want = expected(DENSE, "hot")
    given = References(prediction=text_of(want))
    output = engine_for("llama", tokenizer()).generate(PROMPT, params_of(DENSE), references=given)
    assert output.token_ids == want


KEYS = st.sampled_from(["a", "b", "id", 'q"'])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "integer", "minimum": -3, "maximum": 40}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 3)),
    st.builds(
        lambda v: {"enum": v}, st.lists(st.sampled_from(["x", "xy", 1, None]), min_size=1, max_size=3, unique=True)
    ),
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(KEYS, inner, max_size=3)),
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)),
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS, st.integers(0, 1000), st.booleans())
def test_small_schemas_always_give_valid_json(schema: Any, seed: int, is_greedy: bool) -> None:
    grammar = Grammar.json_schema(schema, whitespace=False)
    params = params_of(grammar, "greedy" if is_greedy else "hot", seed=seed, max_new_tokens=160)
    output = engine_of().generate(PROMPT[:40], params)
    assert output.token_ids == engine_of("plain").generate(PROMPT[:40], params).token_ids
    if output.finish_reason == "eos":
        assert fits(json.loads(text_of(output.token_ids)), schema)
    else:
        assert len(output.token_ids) == 160


# Mutations: each breaks one thing, and is seen ----------------------------------------------------------------------


def test_without_masks_the_answer_is_no_json() -> None:
    with patched(Matcher, "mask", lambda self, token_ids, scores: scores):
        output = engine_of("plain").generate(PROMPT, params_of(DENSE, logit_bias={EOS: -50.0}))
    with pytest.raises(ValueError, match=r"."):
        json.loads(text_of(output.token_ids))


def test_without_walking_back_it_is_seen() -> None:
    with patched(Matcher, "back", lambda self: self._taken.pop()), pytest.raises(Exception, match=r"."):
        output = engine_of().generate(PROMPT, params_of(DENSE))
        assert output.token_ids == expected(DENSE, "hot")


def test_proposals_that_ignore_the_grammar_change_nothing_but_the_time() -> None:
    with patched(rounds, "guided", lambda seq, *_: seq.policy.propose(seq)):
        output = engine_of().generate(PROMPT, params_of(DENSE))
    assert output.token_ids == expected(DENSE, "hot")
    assert output.stats["rounds"] > engine_of().generate(PROMPT, params_of(DENSE)).stats["rounds"]


def test_lying_about_what_is_forced_changes_nothing_but_the_time() -> None:
    with patched(Matcher, "forced", lambda self: [token for token in range(40, 44) if self.allows(token)]):
        assert engine_of().generate(PROMPT, params_of(DENSE)).token_ids == expected(DENSE, "hot")
