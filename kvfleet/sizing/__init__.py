"""What a fleet's cache needs and brings, by arithmetic and by replay: see `advice`."""
