"""What a fleet would do with a trace of requests, by the code that serves: no Ray, no bytes, no clock of its own."""
