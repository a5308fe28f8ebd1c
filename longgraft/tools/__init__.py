"""Tools for daily work, made of the engine: `ask` documents, `edit` a file, `complete` code."""
