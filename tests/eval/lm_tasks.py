"""Small tasks for lm-evaluation-harness, as its YAML; `name` and `file` (JSON lines) are filled in. And a model."""

from pathlib import Path

from tests.saved_model import byte_level, save

GENERATE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""
CHOOSE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def save_ending(folder: Path) -> str:
    """Save a tiny model whose tokenizer names an end of text, which the harness needs."""
    save(folder)
    tokenizer = byte_level()
    tokenizer.eos_token = "<|start|>"
    tokenizer.save_pretrained(folder)
    return str(folder)
