"""Plans in the words of other training frameworks."""
