"""Drop-in for transformers: `model.generate(**inputs, custom_generate=longgraft.hf.generate, max_new_tokens=...)`."""

from longgraft.hf.dropin import Generate

__all__ = ["Generate", "generate"]

# An object, so that what is learnt of a model (checks, measured costs) outlives a call. It holds models weakly;
# make another `Generate()` to share nothing.
generate = Generate()
