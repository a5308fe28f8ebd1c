"""The report of one generation: a page that needs no network, with every token's source, round and tree."""
