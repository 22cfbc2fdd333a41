"""Where helper programs are that tests run in processes of their own."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
SGLANG = SUPPORT / "sglang"
