"""Partitions: the groups of ops that run as one kernel, the rules that form them, and the reasons."""
