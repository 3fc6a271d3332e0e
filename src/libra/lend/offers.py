"""The places at which lending adds to the core; `libra.config.rooms` reads them."""

OFFERS = {
    "lender": "libra.lend.lender:Lender",
    "rehearsal tenancy": "libra.cli.lenders:described_tenancy",
}
