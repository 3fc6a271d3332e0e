"""The places at which the serving search adds to the core; `libra.config.rooms` reads them."""

OFFERS = {"search command": "libra.serving.command:search"}
