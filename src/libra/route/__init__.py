"""Pure policies that route requests and admit groups."""
