"""Where requests go, and when groups may start: pure policies."""
