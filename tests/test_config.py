"""Every bad value is one `GraftError` at the door that names it."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from longgraft.config import EngineConfig, GraftError, SamplingParams

NOT_FINITE = (math.nan, math.inf, -math.inf)
BAD_PARAMS: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", -1.0),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("max_new_tokens", -1),
    ("min_new_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("seed", -1),
    ("seed", 2**64),
    ("sample_index", -1),
    ("stop", "end"),
    ("stop", ("end", "")),
    ("stop", (5,)),
    ("stop", None),
    ("temperature", "0"),
    ("presence_penalty", None),
    ("max_new_tokens", None),
    ("max_new_tokens", 2.5),
    ("min_new_tokens", "1"),
    ("top_k", 1.5),
    ("seed", 1.0),
    ("sample_index", None),
    ("logprobs", True),
    *(
        (name, value)
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
        )
        for value in NOT_FINITE
    ),
]  # fmt: skip
GOOD_PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 0.01},
    {"temperature": 100.0, "min_p": 1.0, "top_p": 1e-9},
    {"max_new_tokens": 0, "min_new_tokens": 5, "logprobs": 0, "seed": 0},
    {"logprobs": 20, "seed": 2**64 - 1, "sample_index": 2**63, "stop": ("a", "bc")},
    {"presence_penalty": -2.0, "frequency_penalty": 7.5, "temperature": 1, "stop": ["a"]},
    {"max_new_tokens": np.int64(7), "temperature": np.float32(0.5), "top_k": np.int32(3)},
]
BAD_SETTINGS: list[tuple[str, Any]] = [
    ("max_nodes", -1),
    ("max_nodes", 1024),
    ("prefill_rows", 0),
    ("prefill_rows", -3),
    ("max_context", 0),
    ("max_context", -1),
    ("max_nodes", None),
    ("max_nodes", 3.0),
    ("prefill_rows", "512"),
    ("kv_bytes", 1e9),
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_a_bad_sampling_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(GraftError, match=name) as error:
        SamplingParams(**{name: value})
    assert "expected" in str(error.value)


@pytest.mark.parametrize("values", GOOD_PARAMS)
def test_values_at_the_edge_are_fine(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_a_bad_engine_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(GraftError, match=re.escape(f"{name} is {value!r}: expected")):
        EngineConfig(**{name: value})


def test_engine_settings_at_the_edge_are_fine() -> None:
    EngineConfig(max_nodes=0, prefill_rows=1, max_context=1)
    EngineConfig(max_nodes=1023)


def test_nothing_can_be_changed_afterwards() -> None:
    """A checked value stays checked; `dataclasses.replace` checks again."""
    for made in (SamplingParams(), EngineConfig()):
        name = dataclasses.fields(made)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, -1)
    with pytest.raises(GraftError, match="top_p"):
        dataclasses.replace(SamplingParams(), top_p=2.0)


def test_an_error_can_be_caught_as_value_error() -> None:
    assert issubclass(GraftError, ValueError)
