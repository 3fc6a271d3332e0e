"""Explanations of a plan: the reasons for it, and changes that would improve it."""
