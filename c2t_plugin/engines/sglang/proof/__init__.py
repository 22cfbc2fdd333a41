"""`--speculative-c2t-self-check`: what a server computes, proved once at start on the machine at hand.

Imported when it runs and by nothing else. `made_up.py` is the batch, `packed.py` compares packed verification of the
real target with the uniform window, `report.py` says what came of it and switches what failed.
"""
