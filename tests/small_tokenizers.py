"""Small real tokenizers, trained in memory: byte-level, sentencepiece-like with byte fallback, and word pieces
whose `decode` cleans up spaces. Each has the special tokens `<|start|>` (0) and `<|end|>` (1).
"""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|start|>", "<|end|>"]
LINES = [
    "def scale(values, factor):\n    return [value * factor for value in values]\n",
    "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps.",
    "Grüße aus Köln: naïve façade, déjà vu — “quoted” text…",
    "日本語のテキストと中文文本。ありがとう、世界。",
    "emoji: 😀 😃 👩‍👩‍👧‍👦 🇩🇪 ❤️ and more",
]
SAMPLES = [
    *LINES,
    "  two leading spaces, a tab\tand  inner   runs\n\n\n  indented ",
    "unseen: Ωmega Привет שלום नमस्ते ⊕ 🦖🏽 x",
    "replacement \ufffd inside \ufffd\ufffd and at the end \ufffd",
    "",
]


def byte_level(vocab_size: int = 330) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE like GPT's or Qwen's, small enough to split most characters outside ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return _wrap(tokenizer)


def sentencepiece() -> PreTrainedTokenizerFast:
    """Return a BPE like Llama 2's: spaces as U+2581, bytes of unknown characters as tokens, first space stripped."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(LINES[:3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer.model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer)


def cleaning() -> PreTrainedTokenizerFast:
    """Return a word tokenizer that joins with spaces and cleans them up before punctuation when it decodes."""
    words = "Hello , world . It ' s n't do ca 've we said ! ? a b fine thing 'm 're 's I you".split()
    vocab = {word: i for i, word in enumerate([*SPECIAL, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(tokenizer, clean_up_tokenization_spaces=True)


def _wrap(tokenizer: Tokenizer, **options: bool) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], **options)
