"""Who does what: workers, their roles, and the moves that change them."""
