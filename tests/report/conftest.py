from fakes.made_run import example_records, made_run  # noqa: F401 - fixtures
