"""The `kvfleet` command."""
