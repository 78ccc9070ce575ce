"""Pure, deterministic parts: no Ray, threads, files or clock of their own."""
