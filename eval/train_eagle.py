"""Train an EAGLE-3 head for a small model on one core: `python -m longgraft.eval.train_eagle MODEL OUT --text FILES`.

Knows the head and the training text. The one idea (EAGLE-3's "training-time test"): the head is trained the way it
is used. Step 1 reads the target's features; steps 2, 3, ... read the head's own output one token further on, and
see step 1's keys and values up to their place and their own ancestors behind it, as a tree's rows do.

Everything can be interrupted: portions of text lie in `--data`, the training state in OUT beside the head. OUT is a
SafeAILab checkpoint: config.json and model.safetensors (`midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from longgraft.draft.head import Eagle3Head, HeadShape, attend
from longgraft.eval.eagle_data import Text, all_given, feature_layers, portions

STEP_WEIGHT = 0.8  # each further step counts so much of the one before (EAGLE-3's training code)
SAVE_EVERY = 120.0  # seconds of processor time, as all of --minutes: a busy machine makes it longer, not worse
WARM_UP = 50  # steps
CHECKED_TEXTS = 24


@dataclass(frozen=True, slots=True)
class Target:
    """What of the target the training needs: `embed [V, H]` and its rows of the output layer `out [draft_vocab, H]`."""

    embed: Tensor
    out: Tensor


def main(argv: Sequence[str] | None = None) -> None:
    """Make the text, train, check, save; a second call goes on where the first one stopped."""
    args = _arguments(argv)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = load_texts(model, tokenizer, args)
    train, held = [t for t in texts if not t.held_out], [t for t in texts if t.held_out]
    state = Path(args.out) / "training.pt"
    saved = torch.load(state, weights_only=True) if state.exists() else {}
    vocab = model.get_output_embeddings().weight.shape[0]
    if saved:
        kept = saved["kept"]
    else:
        kept = draft_vocabulary(train, all_given(tokenizer, files_of(args)), vocab, args.draft_vocab)
    head = new_head(model, len(kept), args.length)
    start_from_target(head, model, kept)
    target = Target(model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()[kept])
    print(f"{sum(len(t.token_ids) for t in train)} tokens, {len(held)} texts held out", flush=True)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for progress in fit(head, target, train, saved, args):
        torch.save({**progress, "kept": kept}, state)
        save(head, kept, model, Path(args.out))
        print(json.dumps(agreement(head, target, held[:CHECKED_TEXTS], kept, args.steps)), flush=True)
    print("all held-out texts:", json.dumps(agreement(head, target, held, kept, args.steps)), flush=True)


def load_texts(model: Any, tokenizer: Any, args: argparse.Namespace) -> list[Text]:
    """Return the first `--portions` portions of text, made now where they are not in `--data` yet."""
    folder, texts, makers = Path(args.data), list[Text](), list[Callable[[], list[Text]]]()
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(args.portions):
        path = folder / f"portion-{number:04d}.pt"
        if not path.exists():
            makers = makers or portions(model, tokenizer, files_of(args), args.length)
            if number >= len(makers):
                break
            torch.save([asdict(text) for text in makers[number]()], path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            print(f"{path.name} {time.strftime('%H:%M:%S')}", flush=True)
        texts += [Text(**fields) for fields in torch.load(path, weights_only=True)]
    return texts


def draft_vocabulary(texts: Sequence[Text], given: Sequence[Sequence[int]], vocab: int, size: int) -> Tensor:
    """Return the `size` target ids seen most often, ascending: in `given` token ids, and in texts and their labels.

    The latter count ten times: they say what the target itself prefers.
    """
    seen = [ids for text in texts for ids in (text.token_ids, text.likeliest)]
    counts = 10 * torch.bincount(torch.cat(seen), minlength=vocab)
    for ids in given:
        counts += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab)
    return counts.topk(min(size, vocab)).indices.sort().values


def new_head(model: Any, draft_vocab: int, length: int) -> Eagle3Head:
    """Return a head of the target's own layer sizes."""
    config = model.config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    shape = HeadShape(
        hidden=hidden,
        target_hidden=hidden,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab=model.get_output_embeddings().weight.shape[0],
        draft_vocab=draft_vocab,
        layers=feature_layers(config.num_hidden_layers),
        max_positions=length,
        eps=config.rms_norm_eps,
        rope=config.rope_parameters,
    )
    return Eagle3Head(shape)


@torch.no_grad()
def start_from_target(head: Eagle3Head, model: Any, kept: Tensor) -> None:
    """Begin as the target's last layer on the deepest feature: it already speaks the output layer's language."""
    last, mid, hidden = model.base_model.layers[-1], head.midlayer, head.shape.hidden
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(mid.self_attn, name).weight
        weight[:, :hidden].mul_(0.3)
        weight[:, hidden:] = getattr(last.self_attn, name).weight
    mid.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mid.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
    mid.hidden_norm.weight.copy_(last.input_layernorm.weight)
    mid.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(model.base_model.norm.weight)
    head.lm_head.weight.copy_(model.get_output_embeddings().weight[kept])


def unrolled(head: Eagle3Head, embed: Tensor, text: Text, steps: int) -> list[Tensor]:
    """Return each step's logits over the draft vocabulary; row t of step s (from 0) is about token t + s + 2.

    Step s has T - 1 - s rows, T being the text's length.
    """
    n = len(text.token_ids) - 1
    embeds = embed[text.token_ids]
    fed = head.combine(text.features[:n].to(head.fc.weight.dtype))
    causal, diagonal = torch.ones(n, n, dtype=torch.bool).tril(), torch.eye(n, dtype=torch.bool)
    keys, values, out = list[Tensor](), list[Tensor](), list[Tensor]()
    for step in range(min(steps, n)):
        m = n - step
        rows = head.project(embeds[step + 1 :], fed[:m], torch.arange(step, n))
        keys.append(rows.key)
        values.append(rows.value)
        mask = torch.cat([causal[:m]] + [diagonal[:m, : len(key)] for key in keys[1:]], dim=1)
        hidden = head.finish(attend(rows.query, torch.cat(keys), torch.cat(values), mask), rows.residual)
        out.append(head.logits(hidden))
        fed = head.feedback(hidden)
    return out


def loss_of(head: Eagle3Head, target: Target, text: Text, steps: int) -> Tensor:
    """Return the mean cross-entropy with the target's own distribution, over the draft vocabulary and all steps."""
    with torch.no_grad():
        wanted = (text.last.float() @ target.out.T - text.log_sum[:, None]).exp()
    total = torch.zeros(())
    for step, logits in enumerate(unrolled(head, target.embed, text, steps)):
        total = total - STEP_WEIGHT**step * (wanted[step + 1 :] * logits.log_softmax(-1)).sum() / len(logits)
    return total


def fit(
    head: Eagle3Head, target: Target, train: list[Text], saved: dict[str, Any], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Train for `--minutes` in all, one text a step; yield what it takes to go on from here when it is time to save.

    AdamW, cosine from `--rate` to zero over the minutes; the output layer, which starts as the target's, learns slower.
    """
    outer = list(head.lm_head.parameters())
    inner = [p for name, p in head.named_parameters() if not name.startswith("lm_head")]
    groups = [{"params": inner, "scale": 1.0}, {"params": outer, "scale": 0.3}]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    step, spent, running = 0, 0.0, 0.0
    if saved:
        head.load_state_dict(saved["head"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent, running = saved["step"], saved["spent"], saved["running"]
    begin, total = time.process_time() - spent, 60.0 * args.minutes
    while spent < total:
        saved_at = spent
        while spent < min(saved_at + SAVE_EVERY, total):
            scale = args.rate * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * spent / total))
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * scale
            loss = loss_of(head, target, nth(train, step), args.steps)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            value = float(loss.detach())
            running = value if step == 0 else 0.98 * running + 0.02 * value
            step, spent = step + 1, time.process_time() - begin
        print(f"step {step}, {spent / 60:.1f} minutes, loss {running:.3f}", flush=True)
        numbers = {"step": step, "spent": spent, "running": running}
        yield {"head": head.state_dict(), "optimizer": optimizer.state_dict(), **numbers}


def nth(texts: list[Text], step: int) -> Text:
    """Return the text of a step: a new order every epoch, the same in every call."""
    epoch, place = divmod(step, len(texts))
    return texts[random.Random(epoch).sample(range(len(texts)), len(texts))[place]]


@torch.no_grad()
def agreement(head: Eagle3Head, target: Target, texts: Sequence[Text], kept: Tensor, steps: int) -> dict[str, Any]:
    """Return how often the head's first choice is the target's, by step, on the given and on the model's own texts."""
    table: dict[str, Any] = {}
    for own in (False, True):
        hits, rows = [0] * steps, [0] * steps
        for text in [text for text in texts if text.own == own]:
            for step, logits in enumerate(unrolled(head, target.embed, text, steps)):
                right = kept[logits.argmax(-1)] == text.likeliest[step + 1 :]
                hits[step] += int(right.sum())
                rows[step] += len(right)
        table["own" if own else "given"] = [round(h / max(n, 1), 4) for h, n in zip(hits, rows)]
    return table


def save(head: Eagle3Head, kept: Tensor, model: Any, out: Path) -> None:
    """Write config.json and model.safetensors in the SafeAILab layout, weights in bfloat16."""
    shape, vocab = head.shape, head.shape.vocab
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "rms_norm_eps": shape.eps,
        "rope_parameters": dict(shape.rope),
        "max_position_embeddings": shape.max_positions,
        "vocab_size": vocab,
        "draft_vocab_size": shape.draft_vocab,
        "target_model_type": model.config.model_type,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    tensors = {name: weight.bfloat16().contiguous() for name, weight in head.state_dict().items()}
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, out / "model.part")
    (out / "model.part").rename(out / "model.safetensors")


def files_of(args: argparse.Namespace) -> list[Path]:
    """Return the files of given text."""
    return [Path(file) for file in args.text]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head.")
    parser.add_argument("model", help="folder of the target")
    parser.add_argument("out", help="folder for the head")
    parser.add_argument("--text", nargs="*", default=[], help="JSON-lines files with `prompt` and `output`")
    parser.add_argument(
        "--data", required=True, help="folder for portions of text (about 3 * hidden * 2 bytes a token)"
    )
    parser.add_argument("--portions", type=int, default=12, help="portions of text: 32 written and up to 48 given ones")
    parser.add_argument("--minutes", type=float, default=30.0, help="processor time of the training in all")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text, and the head's positions")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e-3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
