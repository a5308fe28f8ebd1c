"""Which part of an answer is the file, and which answers are not trusted."""

import pytest

from longgraft.tools.fences import Unusable, fence_for, file_in, is_done

FILE = """import os


def first(x):
    return os.path.join(x, "one")


def second(x):
    return first(x) + "two"
"""
EDITED = FILE.replace("first", "begin")
MARKDOWN = "# Use\n\n```python\nfirst(1)\n```\n\nThen:\n\n```\nmake\n```\n\nThat is all of it.\n"
SNIPPET = "\nUse it so:\n```python\nbegin(3)\n```\nBye.\n"
EMBEDDED = FILE.replace("import os\n", 'import os\n\nHELP = """\n```python\nfirst(1)\n```\n"""\n')


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{EDITED}```\n",
        f"```python\n{EDITED}```",
        f"Sure, here it is:\n\n```python\n{EDITED}```\n\nI renamed it everywhere.",
        f"~~~\n{EDITED}~~~\n",
        f"````python\n{EDITED}````\n{SNIPPET}",
        f"```python\n{EDITED}```\n{SNIPPET}",
        f"First a call:\n```python\nbegin(1)\n```\nNow the file:\n```python\n{EDITED}```\n",
        f"````python\n{EDITED}```",
        f"````python\n{EDITED}```\n\nI renamed it everywhere.\n",
        EDITED,
    ],
    ids=range(10),
)
def test_the_file_is_found(answer: str) -> None:
    assert file_in(answer, FILE) == EDITED


@pytest.mark.parametrize("fence", ["```", "````"])
def test_blocks_with_a_language_lie_within(fence: str) -> None:
    assert file_in(f"{fence}python\n{EMBEDDED}{fence}\nDone.", FILE) == EMBEDDED


def test_a_file_with_fences_needs_a_longer_one() -> None:
    assert (fence_for(FILE), fence_for(MARKDOWN), fence_for("`````\n")) == ("```", "````", "``````")
    edited = MARKDOWN.replace("first", "begin")
    assert file_in(f"````markdown\n{edited}````\n", MARKDOWN) == edited
    assert file_in(f"````markdown\n{edited}```\nDone.\n", MARKDOWN) == edited  # closed by a shorter one


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("I cannot do that.", "holds no code block"),
        ("", "holds no code block"),
        (f"```python\n{EDITED}", "never closed"),
        (f"```python\n{EMBEDDED}", "never closed"),
        (f"```python\n{EDITED.replace('import os', 'import os ```json')}", "never closed"),
        ("```python\n```\n", "is empty"),
        (f"```python\n{FILE.split('def second')[0]}# ... rest of the file\n```\n", "leaves parts of the file out"),
        ("```python\nimport os\n\n# existing code unchanged …\n```\n", "leaves parts of the file out"),
        (f"```markdown\n{MARKDOWN}```\n", "outside the answer's code block"),
        (f"```python\n{EMBEDDED.replace('```python', '```')}```\n", "outside the answer's code block"),
    ],
    ids=range(10),
)
def test_doubtful_answers_are_refused(answer: str, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        file_in(answer, MARKDOWN if "markdown" in answer else FILE)


def test_a_remark_of_the_file_itself_is_no_gap() -> None:
    text = FILE + "# ... and the rest of it is elsewhere\n"
    assert file_in(f"```\n{text}```", text) == text


def test_an_answer_is_done_where_the_file_ends() -> None:
    answer = f"```python\n{EDITED}```\n"
    edited_tail = EDITED.rsplit("\n", 2)[0] + "\n    return 3\n"
    for length in range(len(answer)):
        assert not is_done(answer[:length], EDITED)
    assert is_done(answer, EDITED) and is_done(answer + "Now", EDITED)
    assert not is_done(f"```python\n{edited_tail}```\n", EDITED)
    assert not is_done(EDITED, EDITED)
