"""Independent answers with which tests and benchmarks compare Libra's answers."""
