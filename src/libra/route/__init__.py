"""Policies that route requests and admit groups; they do no I/O."""
