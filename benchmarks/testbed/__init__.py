"""Two servers on one machine: network namespaces joined by a link of settable rate and delay."""
