"""The command `libra lend`, and options of other commands on loans."""
