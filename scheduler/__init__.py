"""Placement by interconnect topology, launch and supervision of ranks, watchdogs."""
