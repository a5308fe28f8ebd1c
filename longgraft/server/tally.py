"""What an answer used and how it was made, in the shapes that clients know.

Knows outputs; no endpoint. `usage` is OpenAI's, `metrics` vLLM's, `timings` llama.cpp's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

from longgraft.config import Output
from longgraft.server.follow import Follower

# So many tokens in a row make a place of the prediction known again after a part of it was left out.
ANCHOR = 4


def usage(followers: Seq[Follower], choices: int) -> dict[str, Any]:
    """Return OpenAI's usage of all answers, `choices` for each prompt; a prompt counts once."""
    outputs = [one.output for one in followers if one.output is not None]
    firsts = outputs[::choices]
    prompt, completion = sum(o.prompt_len for o in firsts), sum(len(o.token_ids) for o in outputs)
    accepted = sum(num_predicted(one.job.predicted, one.output.token_ids) for one in followers if one.output)
    predicted = sum(len(one.job.predicted) for one in followers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.stats["prefix_rows"] for o in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": predicted - accepted,
        },
    }


def num_predicted(predicted: Seq[int], token_ids: Seq[int]) -> int:
    """Return how many tokens of a prediction the answer holds; each counts once.

    A token counts if it goes on where the last one stood, or ends a run of `ANCHOR` tokens that the prediction holds,
    further on if it can be. It depends on the tokens alone, not on how they were drafted.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for end in range(ANCHOR, len(predicted) + 1):
        places.setdefault(tuple(predicted[end - ANCHOR : end]), []).append(end)
    held, at = set[int](), 0
    for i, token_id in enumerate(token_ids, 1):
        if at < len(predicted) and predicted[at] == token_id:
            held.add(at)
            at += 1
            continue
        if ends := places.get(tuple(token_ids[max(0, i - ANCHOR) : i])):
            at = ends[bisect_right(ends, at) % len(ends)]
            held.update(range(at - ANCHOR, at))
    return len(held)


def metrics(follower: Follower, max_nodes: int, detailed: bool) -> dict[str, Any]:
    """Return an answer's times (milliseconds) and drafting in vLLM's shape.

    Queue time is what passed before the first token and was not spent on reading the prompt.
    """
    output, clock = follower.output, follower.clock
    assert output is not None
    first, last = clock.first or clock.asked, clock.last or clock.asked
    tokens, generation = len(output.token_ids), 1000 * (last - first)
    waited = 1000 * (first - clock.asked)
    values = {
        "time_to_first_token_ms": round(waited, 3),
        "generation_time_ms": round(generation, 3),
        "queue_time_ms": round(max(0.0, waited - 1000 * output.stats["prefill_s"]), 3),
        "mean_itl_ms": round(generation / (tokens - 1), 3) if tokens > 1 else None,
        "tokens_per_second": round(1000 * tokens / generation, 3) if generation else None,
    }
    return values | {"speculative_decoding": drafting(output, max_nodes, detailed)}


def drafting(output: Output, max_nodes: int, detailed: bool = False) -> dict[str, Any] | None:
    """Return what became of proposed tokens, None if there were none; rounds without any are left out."""
    steps = [(nodes, accepted) for nodes, accepted in output.stats["accepted_by_round"] if nodes]
    if not steps:
        return None
    drafted, accepted = (sum(numbers) for numbers in zip(*steps))
    histogram = Counter(accepted for _, accepted in steps)
    values: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / len(steps),
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": {str(number): count for number, count in sorted(histogram.items())},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_nodes,
    }
    if detailed:
        values["per_step_drafted"] = [nodes for nodes, _ in steps]
        values["per_step_accepted"] = [accepted for _, accepted in steps]
    return values


def ours(output: Output) -> dict[str, Any]:
    """Return what only this engine knows of an answer: where its tokens came from and why it ended."""
    stats = output.stats
    sources = dict(stats["accepted_by_source"])
    sources["drawn"] = len(output.token_ids) - sum(sources.values())
    return {
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "rounds": stats["rounds"],
        "acceptance_length": stats["acceptance_length"],
        "sources": sources,
        "why": stats["why"],
    }


def timings(follower: Follower) -> dict[str, Any]:
    """Return llama.cpp's timings, in milliseconds; cached prompt tokens are not among those that were read."""
    output, clock = follower.output, follower.clock
    assert output is not None
    stats, first, last = output.stats, clock.first or clock.asked, clock.last or clock.asked
    cached = stats["prefix_rows"]
    read, written = output.prompt_len - cached, len(output.token_ids)
    reading, writing = 1000 * stats["prefill_s"], 1000 * max(last - first, stats["decode_s"])
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": round(reading, 3),
        "prompt_per_token_ms": round(reading / read, 3) if read else 0.0,
        "prompt_per_second": round(1000 * read / reading, 3) if reading else 0.0,
        "predicted_n": written,
        "predicted_ms": round(writing, 3),
        "predicted_per_token_ms": round(writing / written, 3) if written else 0.0,
        "predicted_per_second": round(1000 * written / writing, 3) if writing else 0.0,
        "draft_n": stats["nodes"],
        "draft_n_accepted": stats["accepted"],
    }
