"""Drafters: cheap proposers that yield one `Level` of nodes after another."""
