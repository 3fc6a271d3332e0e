"""The places at which lending adds to the core; `libra.config.rooms` reads them."""

OFFERS = {
    "lends": "libra.lend.loan_terms:LoanSection",
    "loan terms": "libra.lend.loan_terms:LoanTerms",
    "lender": "libra.lend.lender:Lender",
    "rehearsal tenancy": "libra.cli.lenders:described_tenancy",
}
