"""What users of other speculative decoders complain about, one test a symptom.

Some symptoms are covered in full elsewhere; the table says where, and the first test that it is true.

 1 greedy output differs                   -> test_lossless.py::test_adversarial_proposals_change_nothing
 1 greedy output differs                   -> test_lossless.py::test_retrieval_changes_nothing
 4 scores computed in two dtypes           -> test_sampler.py::test_low_precision_logits_draw_as_their_fp32_values
 5 goes on after an EOS inside a block     -> test_lossless.py::test_eos_at_every_position_of_a_block
 5 crashes without an EOS                  -> test_stop.py::test_no_eos_at_all
 6 stop string over several tokens         -> test_engine_output.py::test_text_ends_before_a_stop_string
 6 stop string inside an accepted block    -> test_sequence.py::test_a_clipped_path_ends_with_its_last_committed_token
 7 too many new tokens                     -> test_lossless.py::test_the_number_of_new_tokens_is_exact
 7 crash at the context limit              -> test_lossless.py::test_generation_stops_at_the_context_limit
11 dense masks eat the memory              -> test_target.py::test_no_tensor_grows_with_the_square_of_the_prompt
12 chunked prefill changes the output      -> test_lossless.py::test_prefill_chunking_changes_nothing
14 sliding windows, past the window        -> test_lossless.py::test_other_attention_kinds
14 layers that cannot be rolled back        -> test_target.py::test_what_cannot_be_right_is_refused_by_name
15 penalties see the wrong tokens           -> test_lossless.py::test_each_mutation_is_noticed
15 processors run on rejected tokens       -> test_accept.py::test_stateful_processors_run_once_per_committed_position
16 wrong or missing logprobs               -> test_lossless.py::test_logprobs_equal_teacher_forcing
18 batches differ from their members       -> test_lossless.py::test_a_ragged_batch_equals_its_members_alone
20 streams split characters                -> test_engine_output.py::test_a_stream_never_splits_a_character
21 a seed does not repeat                  -> test_lossless.py::test_same_seed_same_output_another_seed_another
24 a request leaks into the next           -> test_lossless.py::test_a_request_leaves_no_trace_in_the_next
25 token id 0 taken for padding            -> test_prune.py::test_token_zero_is_a_token
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longgraft.audit import audit
from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.index.context_index import ContextIndex
from longgraft.index.suffix_automaton import SuffixAutomaton
from longgraft.tree import Source
from tests import engines
from tests.cases import plain_generate
from tests.engines import all_nodes, engine_for, model_of, prompt_of
from tests.models import VOCAB

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def test_the_tests_of_the_table_exist() -> None:
    rows = [line.split(" -> ")[1] for line in str(__doc__).splitlines() if " -> " in line]
    assert len(rows) > 20
    for row in rows:
        file, name = row.split("::")
        tree = ast.parse((HERE / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row


# 2: near ties in low precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss"])
def test_2_in_bf16_every_difference_is_a_proven_tie(arch: str, temperature: float) -> None:
    engine = engine_for(arch, model=model_of(arch, torch.bfloat16))
    params = SamplingParams(max_new_tokens=48, temperature=temperature, top_k=0, seed=1)
    result = audit(engine, prompt_of(120, 1, arch), params, keep_going=True)
    assert {d.verdict for d in result.differences} <= {"proven_tie", "router_tie"}, result.summary()
    assert result.grafted.stats["accepted"] > 0, "nothing was grafted, so nothing was tested"


# 3: the distribution at temperature > 0 ---------------------------------------------------------------------------

TOY_VOCAB = 5
TOY_PROMPT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 0, 1, 2]


def toy_model() -> Any:
    """A model over five tokens, sure enough of itself that proposals are often right."""
    config = AutoConfig.for_model(
        "llama", vocab_size=TOY_VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        with torch.no_grad():
            model.lm_head.weight.normal_(std=0.4)
    return model


@torch.no_grad()
def conditionals(model: Any, settings: dict[str, Any]) -> dict[tuple[int, ...], Any]:
    """Return the exact next-token probabilities after every text of up to two tokens, by definition."""
    texts = [t for n in range(3) for t in itertools.product(range(TOY_VOCAB), repeat=n)]
    found = {}
    for text in texts:
        ids = torch.tensor([[*TOY_PROMPT, *text]])
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].numpy() / settings["temperature"]
        weights = np.exp(logits - logits.max())
        if settings.get("top_k"):
            weights[weights < np.sort(weights)[-settings["top_k"]]] = 0
        weights /= weights.sum()
        order = np.argsort(-weights)
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= settings.get("top_p", 1.0)]] = 0
        found[text] = weights / weights.sum()
    return found


def chi_square(observed: Any, expected: Any) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom, rare classes pooled."""
    rare = expected < 5
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return float(((observed - expected) ** 2 / np.maximum(expected, 1e-12))[kept].sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 0.8, "top_k": 4},
        {"temperature": 2.0, "top_k": 0, "top_p": 0.8},
    ],
)
def test_3_sequences_follow_the_exact_distribution(settings: dict[str, Any]) -> None:
    model = toy_model()
    after = conditionals(model, settings)
    sequences = list(itertools.product(range(TOY_VOCAB), repeat=3))
    exact = np.array([after[()][a] * after[(a,)][b] * after[(a, b)][c] for a, b, c in sequences])
    assert exact.sum() == pytest.approx(1.0)
    engine, trials = Engine(model, None, EngineConfig(max_nodes=8, kv_bytes=2**23), cost=all_nodes()), 500
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for first in range(0, trials, 100):
        batch = [
            engine.open(TOY_PROMPT, SamplingParams(max_new_tokens=3, seed=seed, **settings))
            for seed in range(first, first + 100)
        ]
        for _ in engine.run(batch):
            pass
        counts.update(tuple(seq.new_token_ids) for seq in batch)
        accepted += sum(seq.stats.summary()["accepted"] for seq in batch)
    assert accepted > trials / 3, "too little was accepted to test anything"
    observed = np.array([counts[sequence] for sequence in sequences], np.float64)
    assert observed[exact == 0].sum() == 0, "a filtered sequence was drawn"
    statistic, freedom = chi_square(observed, exact * trials)
    # The 0.1 % point, by Wilson and Hilferty.
    assert freedom >= 8 and statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


# 9: the cost of a long context ------------------------------------------------------------------------------------


class Lines:
    """Counts the lines of Python that longgraft executes: work, whatever the machine does meanwhile."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if "longgraft" in frame.f_code.co_filename or "/index/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self._line


def test_9_looking_up_costs_the_same_in_a_long_text() -> None:
    """The plain twin of the native index takes the same steps, and they can be counted."""
    piece = np.random.default_rng(0).integers(0, 60, 500).astype(np.int32)
    work = {}
    for repeats in (2, 16):
        index = SuffixAutomaton(60, native=False)
        index.extend(np.tile(piece, repeats), False, None)
        with Lines() as lines:
            for token in piece[:30]:
                index.extend(np.array([token], np.int32), True, None)
                index.draft(16)
        work[repeats] = lines.count
    assert 0 < work[16] < 1.3 * work[2]


def test_9_a_round_costs_the_same_in_a_long_text() -> None:
    """All that the engine itself does between two forwards."""
    work = {}
    for length in (300, 1500):
        prompt = prompt_of(1500)[:length]
        engine = engine_for(source="wrong", truth=[*prompt, *[1] * 40], max_nodes=12)
        seq = engine.open(prompt, SamplingParams(max_new_tokens=30, temperature=0.8, top_k=0, seed=1, logprobs=1))
        running = engine.run([seq])
        next(running)
        with Lines() as lines:
            for _ in range(5):
                next(running)
        running.close()
        work[length] = lines.count / seq.stats.summary()["rounds"]
    assert 0 < work[1500] < 1.1 * work[300]


# 21, 24: nothing leaks --------------------------------------------------------------------------------------------


class Recording(ContextIndex):
    """Writes down every draft."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.drafts: list[Any] = []

    def draft(self, *args: Any, **options: Any) -> Any:
        found = super().draft(*args, **options)
        self.drafts.append(None if found is None else (found.token_ids.tolist(), found.scores.tolist()))
        return found


def recording() -> tuple[Engine, list[Recording]]:
    """An engine that verifies all its index proposes, and the indexes it has made."""
    made: list[Recording] = []

    def make(vocab_size: int) -> Recording:
        made.append(Recording(vocab_size))
        return made[-1]

    return Engine(model_of(), cost=all_nodes(), index=make), made


SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.7, top_k=0, seed=4)


def test_21_drafts_do_not_depend_on_earlier_requests() -> None:
    fresh, alone = recording()
    fresh.generate(prompt_of(100), SAMPLED)
    engine, indexes = recording()
    for seed in (7, 8, 0):
        engine.generate(prompt_of(100, seed), SAMPLED)
    assert indexes[-1].drafts == alone[0].drafts and len(alone[0].drafts) > 3


def test_24_drafts_do_not_depend_on_neighbours_in_a_batch() -> None:
    """The neighbour's text goes on where this one ends; it is never proposed all the same."""
    secret = prompt_of(200, 3)
    prompt = secret[90:100]
    fresh, alone = recording()
    expected = fresh.generate(prompt, SAMPLED)
    engine, indexes = recording()
    outputs = engine.generate([secret, prompt, secret], SAMPLED)
    assert indexes[1].drafts == alone[0].drafts and len(alone[0].drafts) > 3
    assert outputs[1].token_ids == expected.token_ids
    assert outputs[1].stats["accepted_by_round"] == expected.stats["accepted_by_round"]


# 23: nothing to gain ----------------------------------------------------------------------------------------------


def test_23_without_repetition_nearly_all_rounds_are_plain() -> None:
    """Rows are dear and the text is new: the engine decodes plainly, whatever the index could say."""
    prompt = np.random.default_rng(1).permutation(VOCAB).tolist()
    params = SamplingParams(max_new_tokens=120, temperature=3.0, top_k=0, seed=2)
    output = engine_for(rise=0.3).generate(prompt, params)
    assert output.stats["rounds"] > 110
    assert output.stats["nodes"] <= 0.05 * output.stats["rounds"]
    free = engine_for(rise=0.0).generate(prompt, params)
    assert free.token_ids == output.token_ids and free.stats["nodes"] > 10 * output.stats["rounds"]


def test_23_a_repetitive_text_still_pays_at_that_price() -> None:
    prompt = prompt_of(300)
    output = engine_for(rise=0.3).generate([*prompt, *prompt[:40]], SamplingParams(max_new_tokens=60, temperature=0.0))
    assert output.stats["nodes"] > 0 and output.stats["acceptance_length"] > 1.1


# 25: token id 0 ---------------------------------------------------------------------------------------------------


def test_25_token_zero_is_proposed_and_accepted() -> None:
    """A text of zeros, and one in which every other token is 0."""
    engine = engine_for()
    only = engine.generate([0] * 40, SamplingParams(max_new_tokens=20, temperature=0.0, logit_bias={0: 99.0}))
    assert only.token_ids == (0,) * 20
    assert only.stats["rounds"] < 20 and Source.PROMPT in only.sources
    prompt = [token for pair in zip(prompt_of(60), [0] * 60) for token in pair]
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    assert list(engine.generate(prompt, params).token_ids) == plain_generate(model_of(), prompt, n=24)


def test_25_zero_may_end_a_text_or_be_forbidden() -> None:
    engine, prompt = engine_for(), [0] * 30
    ended = engine.generate(prompt, SamplingParams(temperature=0.0, logit_bias={0: 99.0}, eos_token_ids=(0,)))
    assert (ended.token_ids, ended.finish_reason) == ((0,), "eos")
    without = engine.generate(prompt, SamplingParams(max_new_tokens=20, temperature=0.0, bad_words_ids=[[0]]))
    assert 0 not in without.token_ids and len(without.token_ids) == 20
