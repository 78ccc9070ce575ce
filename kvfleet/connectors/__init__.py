"""One module an engine: translation between its KV and kvfleet, nothing more."""
