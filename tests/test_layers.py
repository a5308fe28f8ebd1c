"""The import rules: imports go down only, and one file owns each outside dependency."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"kernels"},
    {
        "tree",
        "config",
        "sampler",
        "noise",
        "device_draw",
        "device_tree",
        "resolve",
        "processors",
        "prompt_scores",
        "stats",
        "wording",
        "grammar",
        "matcher",
        "tool_calls",
        "trace",
        "tool_grammar",
        "fim",
        "template",
    },
    {"index"},
    {
        "target",
        "attention",
        "cache",
        "device_cache",
        "device_round",
        "device_graph",
        "pool",
        "prefix_entry",
        "prefix_file",
        "prefix_identity",
        "prefix_spill",
        "prefix_store",
        "sequence",
        "stop",
        "cost",
        "load",
        "load_gguf",
        "load_packed",
        "load_lazily",
        "gguf_header",
        "memory",
        "linear",
        "exchange",
        "norms",
        "quantize",
        "quantized_linear",
        "history",
        "references",
        "retrieval",
        "features",
        "measure",
    },
    {"draft", "prune", "graft", "block_graft", "merge", "verify", "accept", "constrain"},
    {
        "engine",
        "admission",
        "check",
        "stream",
        "hf",
        "policy",
        "policies",
        "adaptive",
        "block_round",
        "guided",
        "prefill",
        "request",
        "rounds",
        "device_rounds",
        "scheduler",
        "service",
        "ticket",
        "prefix",
    },
    {
        "cli",
        "render",
        "show",
        "prompts",
        "routes",
        "audit",
        "demo",
        "bench",
        "evaluate",
        "corpora",
        "corpora_show",
        "options",
        "report",
        "tools",
        "serve",
        "server",
        "__main__",
        "eval",
        "data",
    },
]
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
STAGES = LAYERS[4] - {"draft"}
OWNERS = {
    "pysuffixarray": {"index/reference.py", "eval/bench_index.py"},
    "arctic_inference": {"eval/baseline_peers.py"},
    "cuda": {"index/nvrtc.py"},
    "llama_cpp": {"eval/peers.py"},
    "matplotlib": {"eval/policy_plots.py"},
    "llguidance": {"longgraft/matcher.py"},
    "datasets": {"eval/suite_files.py"},
    "lm_eval": {"eval/harness.py"},
    "gguf": {"longgraft/load_gguf.py", "longgraft/gguf_header.py"},
    "faiss": {"index/nearest.py"},
    "triton": {"kernels/triton.py", "kernels/triton_kernels.py"},
    "flash_attn": {"kernels/flash_calls.py"},
    "pathspec": {"index/corpus_files.py"},
    "bs4": {"index/corpus_text.py"},
    "pypdf": {"index/corpus_text.py"},
    "watchfiles": {"index/corpus_watch.py"},
    "jinja2": {
        "longgraft/report/page.py",
        "longgraft/template.py",
        "eval/policy_html.py",
    },
    "rich": {"longgraft/render.py", "longgraft/cli.py", "longgraft/demo.py", "longgraft/corpora_show.py"},
    "typer": {
        "longgraft/cli.py",
        "longgraft/options.py",
        "longgraft/corpora.py",
        "longgraft/bench.py",
        "longgraft/evaluate.py",
        "longgraft/serve.py",
        "longgraft/tools/commands.py",
        "longgraft/tools/complete_command.py",
    },
    "fastapi": {"longgraft/server/"},
    "starlette": {"longgraft/server/"},
    "pydantic": {"longgraft/server/fields.py", "longgraft/server/bodies.py", "longgraft/server/answers.py"},
    "uvicorn": {"longgraft/server/run.py"},
    "prometheus_client": {"longgraft/server/metrics.py"},
    "httpx": {"eval/bench_server.py"},
    "transformers": {
        "longgraft/attention.py",
        "longgraft/draft/block_",
        "longgraft/draft/head.py",
        "longgraft/load",
        "longgraft/memory.py",
        "longgraft/processors.py",
        "longgraft/resolve.py",
        "longgraft/hf/",
        "longgraft/cli.py",
        "longgraft/options.py",
        "longgraft/corpora.py",
        "longgraft/demo.py",
        "eval/",
    },
}


def sources() -> list[Path]:
    folders = [ROOT / "longgraft", ROOT / "index", ROOT / "kernels", ROOT / "eval"]
    inside_links = {"index", "kernels", "eval"}
    return [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not (folder.name == "longgraft" and path.relative_to(folder).parts[0] in inside_links)
    ]


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return Path(parts[1]).stem if parts[0] == "longgraft" else parts[0]


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
            assert node.module is not None
    return names


FILES = sources()
IDS = [str(path.relative_to(ROOT)) for path in FILES]


def test_every_room_has_a_layer() -> None:
    rooms = {room(path) for path in FILES} - {"__init__"}
    assert rooms <= set(LAYER_OF), f"say in tests/test_layers.py where {sorted(rooms - set(LAYER_OF))} belong"
    assert len(FILES) > 25


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_go_down(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ("index", "kernels", "eval"):
            raise AssertionError(f"{path}: import longgraft.{parts[0]}, not {parts[0]}")
        if parts[0] != "longgraft" or len(parts) < 2 or parts[1] in ("__version__", own):
            continue
        assert LAYER_OF[parts[1]] <= LAYER_OF[own], f"{own} imports {parts[1]} from a higher layer"
        if own in STAGES:
            assert parts[1] not in STAGES, f"stage {own} imports stage {parts[1]}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_one_owner_for_each_dependency(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    for name in imports(path):
        owners = OWNERS.get(name.split(".")[0])
        if owners is not None:
            assert any(relative.startswith(owner) for owner in owners), f"{relative} imports {name}"


def test_no_package_files_where_names_would_shadow_others() -> None:
    for folder in ("index", "kernels", "eval"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_an_editable_install_adds_the_checkout_to_the_path_and_nothing_else() -> None:
    """The folder above was there once: a neighbour of the checkout called "triton" was imported for the library."""
    here = [Path(folder) / "_editable_skbc_longgraft.pth" for folder in sys.path]
    found = [path for path in here if path.exists()]
    if not found:
        pytest.skip("not an editable install")
    added = [line for line in found[0].read_text().splitlines() if line and not line.startswith("import ")]
    assert set(added) <= {str(ROOT)}


def later_imports(path: Path) -> set[str]:
    """What a file imports, inside functions too; what only type checkers read does not count."""
    tree = ast.parse(path.read_text())
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    unread = {id(node) for guard in guarded for child in guard.body for node in ast.walk(child)}
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in unread:
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_file_imports_itself_by_a_detour() -> None:
    """Not even inside a function, where a cycle hides."""
    modules = {}
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name if name.startswith("longgraft") else f"longgraft.{name}"] = path
    graph = {name: later_imports(path) & modules.keys() - {name, "longgraft"} for name, path in modules.items()}
    while free := [name for name, needed in graph.items() if not needed]:
        for name in free:
            del graph[name]
        for needed in graph.values():
            needed.difference_update(free)
    assert not graph, f"cycles among {sorted(graph)}, or what leads to them"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= 45, f"{path.name}: {node.name} has {lines} lines"
