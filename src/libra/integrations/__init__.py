"""Bridges to packages that Libra can use and does not need.

Invariant: an import from here needs only what Libra depends on; a call may need more, and then says what to install.
"""
