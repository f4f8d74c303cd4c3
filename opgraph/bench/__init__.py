"""The benchmark: opgraph next to what a user would choose instead, on this machine, in one process and in turns."""
