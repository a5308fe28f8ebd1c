"""Peers: transformers' decodings say what `generate` says, read once; what is missing is one sentence."""

import sys
from typing import Any

import pytest
import torch

from longgraft.config import GraftError
from longgraft.eval import peers
from longgraft.eval.peers import PEERS, LlamaPeer, Rivals, TransformersPeer, open_peers
from tests.engines import model_of, one_thread, prompt_of

NEW = 24


@pytest.fixture(autouse=True)
def quick() -> Any:
    with one_thread():
        yield


def wanted(model: Any, ids: list[int]) -> tuple[int, ...]:
    given = torch.tensor([ids])
    out = model.generate(given, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(given))
    return tuple(out[0, len(ids) :].tolist())


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_each_decodes_what_generate_does_as_often_as_asked(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(arch)
    ids = prompt_of(90, arch=arch)
    monkeypatch.setattr("longgraft.load.load", lambda name, dtype, device: (model_of(arch), None))
    found = open_peers(["transformers", "lookup", "assistant"], Rivals(model, draft="small"))
    assert [peer.name for peer in found] == [row for name in list(PEERS)[:3] for row in PEERS[name]]
    for peer in found:
        peer.read(ids, NEW)
    for peer in found:
        runs = [peer.decode(NEW), peer.decode(NEW)]
        assert [run.token_ids for run in runs] == [wanted(model, ids)] * 2, peer.name
        assert all(run.seconds > 0 and run.cpu_seconds >= 0 for run in runs)
    for peer in found:
        peer.close()


def test_only_what_follows_the_first_round_is_timed() -> None:
    plain, lookup = open_peers(["transformers", "lookup"], Rivals(model_of()))
    plain.read(prompt_of(40), NEW)
    lookup.read(prompt_of(40), NEW)
    assert plain.decode(NEW).timed == NEW
    assert 0 < lookup.decode(NEW).timed < NEW
    assert lookup.decode(1).timed == 0


class Llama:
    """Stands in for llama_cpp.Llama: counts on from the prompt."""

    def __init__(self, path: str, **options: Any) -> None:
        self.options, self.read, self.closed = options, [], False
        if path.endswith("bad.gguf"):
            raise ValueError("no model")

    def n_vocab(self) -> int:
        return 320

    def eval(self, ids: list[int]) -> None:
        self.read += ids

    def generate(self, ids: list[int], **options: Any) -> Any:
        assert options["temp"] == 0.0 and ids[:-1] == self.read
        number = ids[-1]
        while True:
            number += 1
            yield number

    def close(self) -> None:
        self.closed = True


def test_llama_reads_stops_and_frees(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    module = type(sys)("llama_cpp")
    speculative = type(sys)("llama_cpp.llama_speculative")
    module.Llama = Llama  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: num_pred_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    plain, lookup = open_peers(["llama"], Rivals(model_of(), gguf=str(file), eos=(9,)))
    assert (plain.name, lookup.name) == PEERS["llama"]
    plain.read([5, 4, 3], 4)
    assert plain.decode(4).token_ids == (4, 5, 6, 7) and plain.decode(0).token_ids == ()
    assert plain.decode(50).token_ids == (4, 5, 6, 7, 8, 9)
    assert isinstance(plain, LlamaPeer) and plain._llama.options["n_ctx"] >= 7
    held = plain._llama
    plain.close()
    assert held.closed
    lookup.read([5, 4, 3], 4)
    assert isinstance(lookup, LlamaPeer) and lookup._llama.options["draft_model"] == 10
    with pytest.raises(GraftError, match="lacks token 400"):
        plain.read([400, 1], 4)
    monkeypatch.setattr(peers, "available_bytes", lambda device: 1000)
    with pytest.raises(GraftError, match="keeps the logits of all"):
        lookup.read([5, 4, 3], 4)
    bad = LlamaPeer("llama.cpp", Rivals(model_of(), gguf=str(tmp_path / "bad.gguf")))
    with pytest.raises(GraftError, match="cannot load it"):
        bad.read([1, 2], 4)


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    rivals = Rivals(model_of())
    with pytest.raises(GraftError, match="peer 'vllm': expected one of transformers"):
        open_peers(["vllm"], rivals)
    with pytest.raises(GraftError, match="give --draft"):
        open_peers(["assistant"], rivals)
    with pytest.raises(GraftError, match="give --gguf"):
        open_peers(["llama"], rivals)
    with pytest.raises(GraftError, match="expected --draft to be an ordinary language model"):
        open_peers(["assistant"], Rivals(model_of(), draft=str(tmp_path / "nothing")))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(GraftError, match="pip install llama-cpp-python"):
        open_peers(["llama"], Rivals(model_of(), gguf="m.gguf"))
    monkeypatch.setitem(sys.modules, "llama_cpp", type(sys)("llama_cpp"))
    with pytest.raises(GraftError, match="no such file"):
        open_peers(["llama"], Rivals(model_of(), gguf=str(tmp_path / "m.gguf")))


def test_an_unknown_cache_keyword_follows_the_model() -> None:
    peer = open_peers(["transformers"], Rivals(model_of()))[0]
    assert isinstance(peer, TransformersPeer) and peer._argument in ("cache", "past_key_values")
