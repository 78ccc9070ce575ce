"""What a node runs: arena, tiers, transport, manager."""
