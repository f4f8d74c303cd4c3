"""What is measured: entries in several sizes, the cost of calls, of compiling, of large graphs, and whole models."""
