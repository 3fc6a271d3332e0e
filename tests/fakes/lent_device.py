"""A server's device, and the order to an agent that lends it to a tiny model."""

from __future__ import annotations

from pathlib import Path

from libra.backends.tiny_model import write_tiny_model
from libra.backends.transport.engine_messages import StartEngine
from libra.config.run import ModelConfig
from libra.lend.backend.device_page import EngineFacts
from libra.lend.backend.lender_file import LoanOrder
from libra.lend.backend.serving_token import ServingToken
from libra.lend.backend.terms import device_loan
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingTerms
from libra.lend.traffic.envelope import Envelope

TERMS = LendingTerms("chat", "policy", 0.08, 0.03, 0.002, Envelope(2.0, 900, 6, 4000, 5.0), RecallPolicy(1.0, 8.0))
CHAT = EngineFacts("chat", 2048, 64, 128)


def lent_device(directory: Path) -> tuple[LoanOrder, ServingToken]:
    """The files are in the directory, which gets a folder of logs; the token is the server's, and to be closed."""
    device, policy = directory / "device", directory / "policy"
    write_tiny_model(policy, ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1), "0123", 512)
    (directory / "logs").mkdir()
    loan = device_loan("", TERMS, None)
    start = StartEngine(str(policy), 512, 8, "float32", 1 << 20, (), 1, 0, 1.0, (0,), False, loan=loan)
    return LoanOrder(device, directory / "agent", "chat", 1000.0, start), ServingToken(device, CHAT)
