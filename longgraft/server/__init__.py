"""An OpenAI-compatible server on a `longgraft.Service`; `run` starts it, `app` is all of it but sockets and signals."""
