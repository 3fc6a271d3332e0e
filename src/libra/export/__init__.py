"""Plans as configurations of other training frameworks."""
