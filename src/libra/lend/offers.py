"""The places at which lending adds to the core; `libra.config.rooms` reads them."""

OFFERS = {
    "lends": "libra.lend.loan_terms:LoanSection",
    "loan terms": "libra.lend.loan_terms:LoanTerms",
    "lender": "libra.lend.lender:Lender",
    "lending": "libra.lend.lending_config:LendingConfig",
    "borrowing": "libra.lend.backend.borrowing:Borrowing.of",
    "command group": "libra.lend.cli.commands:GROUP",
    "device loan": "libra.lend.backend.borrowing_engine:BorrowingEngine",
    "lenders": "libra.lend.cli.lenders:load_lenders",
    "preflight": "libra.lend.backend.borrowing:check_lending",
    "traced server": "libra.lend.backend.traced_server:serve_traced",
    "run page": "libra.lend.pages.run_lending:run_lending",
    "explained lenders": "libra.lend.explained:lender_views",
    "explanation": "libra.lend.pages.lender_worth:lender_sentences",
    "explanation page": "libra.lend.pages.lender_chapter:lender_chapter",
    "timeline": "libra.lend.records.loan_trace:draw_run_loans",
    "training run page": "libra.lend.pages.training_run_lending:run_chapter",
    "training run trace": "libra.lend.pages.training_run_lending:draw_lenders",
    "rehearsal tables": "libra.lend.cli.lenders_table:show_lenders",
    "rehearsal tenancy": "libra.lend.cli.lenders:described_tenancy",
}
