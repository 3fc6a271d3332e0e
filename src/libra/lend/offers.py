"""The places at which lending adds to the core; `libra.config.rooms` reads them."""

OFFERS = {
    "lends": "libra.lend.loan_terms:LoanSection",
    "loan terms": "libra.lend.loan_terms:LoanTerms",
    "lender": "libra.lend.lender:Lender",
    "lending": "libra.lend.lending_config:LendingConfig",
    "borrowing": "libra.loop.borrowing:Borrowing.of",
    "command group": "libra.cli.lend:GROUP",
    "device loan": "libra.backends.lend.borrowing_engine:BorrowingEngine",
    "lenders": "libra.cli.lenders:load_lenders",
    "preflight": "libra.loop.borrowing:check_lending",
    "traced server": "libra.backends.lend.traced_server:serve_traced",
    "run page": "libra.report.run_lending:run_lending",
    "timeline": "libra.records.loan_trace:draw_run_loans",
    "training run page": "libra.report.training_run_lending:lending_chapter",
    "training run trace": "libra.report.training_run_lending:draw_lenders",
    "rehearsal tables": "libra.cli.lenders_table:show_lenders",
    "rehearsal tenancy": "libra.cli.lenders:described_tenancy",
}
