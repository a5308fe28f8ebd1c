"""The command line: every option arrives, and help is quick."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import longgraft
import longgraft.audit
import longgraft.demo
import longgraft.engine
import longgraft.show
from longgraft import Engine, EngineConfig, SamplingParams
from longgraft.kernels.tree_attention import BACKENDS
from tests.saved_model import PROMPT, calm, cheap_rows, invoke, last_json


@pytest.fixture(autouse=True)
def calmly() -> Iterator[None]:
    with calm():
        yield


def generate(folder: str, *arguments: str) -> dict[str, Any]:
    result = invoke("generate", "-m", folder, "-p", PROMPT, "-n", "24", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return last_json(result.stdout)


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
    grafted, plain = generate(folder, *arguments), generate(folder, *arguments, "--policy", "plain")
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
    table = cheap_rows(tmp_path / "costs.json")
    arguments = ("--max-nodes", "5", "--prefill-rows", "9", "--max-context", "300", "--cost-table", table)
    values = generate(folder, *arguments, "--dtype", "float32", "--device", "cpu")
    assert seen == [EngineConfig(max_nodes=5, prefill_rows=9, max_context=300, cost_table=table)]
    assert max(values["stats"]["nodes_by_depth"].values()) <= 5 * values["stats"]["rounds"]
    assert generate(folder, "--max-nodes", "0")["stats"]["nodes"] == 0


@pytest.mark.skipif("native" not in BACKENDS, reason="exact mode needs the native attention kernel")
def test_exact_mode_reports_its_cost(folder: str) -> None:
    arguments = ("--exact", "--dtype", "bfloat16", "--seed", "1")
    values = generate(folder, *arguments)
    assert values["exact"]["cost"] > 0
    assert values["token_ids"] == generate(folder, *arguments, "--policy", "plain")["token_ids"]


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


def test_colour_marks_sources_and_explains_them(folder: str, tmp_path: Path) -> None:
    table = cheap_rows(tmp_path / "costs.json")
    arguments = ("generate", "-m", folder, "-p", PROMPT * 3, "-n", "60", "--cost-table", table, "--color")
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "int3"], "quantize 'int3': expected int8 or int4, or nothing"),
        (["--corpus", "none-such"], "none-such"),
    ],
)
def test_mistakes_are_told_before_the_model_is_looked_for(arguments: list[str], message: str) -> None:
    result = invoke("generate", "-m", "/no/such/model", "-p", PROMPT, *arguments)
    assert result.exit_code == 2 and message in result.stderr and "/no/such/model" not in result.stderr


FLOOD = """
from longgraft.cli import app
from longgraft.options import mendable

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
