"""For tests of kvfleet and of what plugs into it: contract suites and a clock that is set by hand."""
