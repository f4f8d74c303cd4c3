"""The suites: entries in several sizes, the cost of calls, of compiling, of large graphs, and whole models."""
