"""Measuring this machine: opgraph beside what a user would pick instead, in one process and in turns."""
