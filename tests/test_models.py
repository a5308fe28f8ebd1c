"""The tiny models do what the losslessness tests rely on: varied text, in which copying pays now and then."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.cases import SOURCES, TOKEN_STRINGS, TREES, greedy, plain_generate, token_tree
from tests.models import ARCHS, LONGROPE_FROM, VOCAB, WINDOW, prompt_for, tiny_model

DEPTH = 8
SAMPLED = ["llama", "qwen3_moe", "gemma3"]
REACHES_FAR = [arch for arch in ARCHS if arch != "mistral"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def plain_model(arch: str) -> PreTrainedModel:
    return tiny_model(arch)


@dataclass(frozen=True)
class Text:
    prompt: list[int]
    new: list[int]
    top: Tensor  # probability of the likeliest token, one per new token


@cache
def prompts_of(arch: str) -> list[list[int]]:
    return [prompt_for(plain_model(arch), 160, seed) for seed in range(2)]


@cache
def texts(arch: str, temperature: float = 0.0) -> list[Text]:
    """Two continuations by transformers' own generate. 200 tokens greedy, 100 sampled."""
    model, prompts = plain_model(arch), prompts_of(arch)
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    ids = torch.tensor(prompts)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(3)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=100 if temperature else 200,
            return_dict_in_generate=True,
            output_logits=True,
            **choice,
        )
    top = torch.stack(out.logits, 1).softmax(-1).max(-1).values
    new = out.sequences[:, ids.shape[1] :].tolist()
    return [Text(*row) for row in zip(prompts, new, top)]


def places(text: list[int]) -> list[int]:
    """Return the positions after the longest earlier occurrences of the text's end, the latest first."""
    best, found = 0, []
    for end in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(end, 32) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, found = length, [end]
        elif length == best > 0:
            found.append(end)
    return found


@dataclass
class Tally:
    """What a chain of `DEPTH` tokens after the longest match meets, round by round."""

    full: int = 0
    partial: int = 0
    zero: int = 0
    deep: int = 0  # 4 tokens or more
    sibling: int = 0  # the latest occurrence is wrong at once, an earlier one is right

    def add(self, text: Text) -> None:
        done = 0
        while done < len(text.new):
            known, rest = text.prompt + text.new[:done], text.new[done:]
            found = places(known)
            accepted = 0
            if found:
                draft = known[found[0] : found[0] + DEPTH]
                agrees = [a == b for a, b in zip(draft, rest)]
                accepted = agrees.index(False) if False in agrees else len(agrees)
                self._count(accepted, len(draft))
                self.sibling += accepted == 0 and any(known[place] == rest[0] for place in found[1:])
            done += accepted + 1

    def _count(self, accepted: int, proposed: int) -> None:
        self.full += accepted == proposed
        self.partial += 0 < accepted < proposed
        self.zero += accepted == 0
        self.deep += accepted >= 4


def tally(found: list[Text]) -> Tally:
    result = Tally()
    for text in found:
        result.add(text)
    return result


def cycle(token_ids: list[int], longest: int = 16) -> int | None:
    """Return the period of the first stretch that repeats three times (12 tokens at least), if there is one."""
    for period in range(1, longest + 1):
        run = 0
        for i in range(period, len(token_ids)):
            run = run + 1 if token_ids[i] == token_ids[i - period] else 0
            if run >= max(2 * period, 12):
                return period
    return None


def test_the_checks_themselves() -> None:
    assert places([1, 2, 3, 1, 2]) == [2] and places([1, 1, 1]) == [2] and places([5, 6]) == []
    assert places([9, 1, 4, 9, 1, 5, 9, 1]) == [5, 2]
    known = tally([Text([1, 2, 3, 1], [2, 3, 9, 8], torch.ones(4))])
    assert known == Tally(full=0, partial=1, zero=0, deep=0, sibling=0)
    assert cycle([1, 2, 3] * 5) == 3 and cycle(list(range(40))) is None and cycle([7] * 13) == 1


@pytest.mark.parametrize("arch", ARCHS)
def test_text_is_worth_speculating_on(arch: str) -> None:
    for text in texts(arch):
        assert 0.3 <= float(text.top.median()) <= 0.8
        assert cycle(text.new) is None
        assert len(set(text.new)) >= 40
    met = tally(texts(arch))
    assert met.partial >= 20 and met.zero >= 10 and met.deep >= 5 and met.sibling >= 2


def test_whole_chains_are_accepted_too() -> None:
    met = [tally(texts(arch)) for arch in ARCHS]
    assert sum(m.full for m in met) >= 20 and sum(m.full > 0 for m in met) >= len(ARCHS) * 2 // 3


@pytest.mark.parametrize("arch", SAMPLED)
def test_sampled_text_is_too(arch: str) -> None:
    met = tally(texts(arch, 0.7))
    assert met.partial >= 15 and met.zero >= 10 and met.deep >= 1 and met.sibling >= 1


@pytest.mark.parametrize("arch", ARCHS)
def test_plain_decoding_agrees_with_transformers(arch: str) -> None:
    text = texts(arch)[0]
    assert plain_generate(plain_model(arch), text.prompt, greedy, 16) == text.new[:16]


def test_plain_decoding_asks_choose_for_every_token() -> None:
    seen: list[int] = []

    def second(logits: Tensor, token_ids: list[int]) -> int:
        seen.append(len(token_ids))
        return int(logits.topk(2).indices[1])

    new = plain_generate(plain_model("llama"), [5, 0, 7], second, 4)
    assert seen == [3, 4, 5, 6] and len(new) == 4
    assert new != plain_generate(plain_model("llama"), [5, 0, 7], greedy, 4)


@pytest.mark.parametrize("arch", REACHES_FAR)
def test_a_far_token_matters(arch: str) -> None:
    model, prompt = plain_model(arch), texts(arch)[0].prompt
    changed = list(prompt)
    changed[20] = (changed[20] + 7) % VOCAB
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([p]), logits_to_keep=1).logits[0, 0] for p in (prompt, changed)]
    assert float((rows[0] - rows[1]).abs().max()) > 1e-3


def test_windows_hide_what_is_further_away() -> None:
    model, prompt = plain_model("mistral"), texts("mistral")[0].prompt
    reach = 2 * (WINDOW - 1)
    far, near = list(prompt), list(prompt)
    far[-2 - reach] = (far[-2 - reach] + 7) % VOCAB
    near[-1 - reach] = (near[-1 - reach] + 7) % VOCAB
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([p]), logits_to_keep=1).logits[0, 0] for p in (prompt, far, near)]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_longrope_has_two_regimes() -> None:
    model = plain_model("phi3_longrope")
    prompt = prompt_for(model, LONGROPE_FROM + 8)
    short = prompt[:160]
    assert plain_generate(model, prompt, greedy, 8) == plain_generate(model, prompt, greedy, 8, long_rope=True)
    assert plain_generate(model, short, greedy, 16) != plain_generate(model, short, greedy, 16, long_rope=True)


def test_models_and_prompts_depend_on_their_seeds_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, again, other = tiny_model("qwen3"), tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    assert prompt_for(first, 90, 4) == prompt_for(again, 90, 4) != prompt_for(first, 90, 5)
    assert torch.equal(torch.get_rng_state(), state)
    weights = zip(first.parameters(), again.parameters(), other.parameters())
    triples = [(torch.equal(a, b), torch.equal(a, c)) for a, b, c in weights]
    assert all(same for same, _ in triples) and not all(same for _, same in triples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert len(prompt_for(model, 50)) == 50 and len(plain_generate(model, [1, 2], greedy, 2)) == 2


def test_tables_hold_what_they_promise() -> None:
    assert all(min(s) >= 0 and max(s) < VOCAB for s in TOKEN_STRINGS.values())
    for name in TREES:
        tree = token_tree(name)
        assert tree.is_chain == (name in ("root", "chain"))
        assert all(tree.scores[1:] < tree.scores[tree.parents[1:]])


@pytest.mark.parametrize("name", SOURCES)
def test_sources_keep_to_the_interface(name: str) -> None:
    truth = TOKEN_STRINGS["random"]
    source = SOURCES[name](truth)
    source.extend(truth[:50], learn=False)
    source.begin(50)
    for step in range(12):
        found = source.draft(16)
        if found is not None:
            parents = found.parents
            above = [float(found.scores[p]) if p >= 0 else 0.0 for p in parents]
            assert all(s <= a for s, a in zip(found.scores.tolist(), above))
            assert len(found.token_ids) <= 16 or name == "very_long"
            assert found.at == 0 and (len(set(found.scores.tolist())) == 1) == ("flat" in name or len(parents) == 1)
        source.extend(truth[50 + step : 51 + step], learn=True)
        source.observe([1], [[2, 3]])
    source.truncate(50)
    right = SOURCES["right"](truth)
    right.extend(truth[:50])
    first = right.draft(8, path=truth[50:52], at=2)
    assert first is not None and first.token_ids.tolist() == truth[52:60] and first.at == 2
    source.reset()
    assert source.length == 0 and source.check_integrity() == ""
