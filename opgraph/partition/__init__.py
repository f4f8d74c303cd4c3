"""Partitions: what runs as one kernel, by which rules, and why."""
