"""`--speculative-c2t-self-check`: what a server computes, proved once at start on the machine at hand.

Imported when it runs and by nothing else. `made_up.py` is the batch, `linear.py` its states where a model has linear
layers, `packed.py` compares packed verification of the real target with the uniform window, `drafted.py` the graph of
a draft with eager passes, `report.py` says what came of it and switches what failed.
"""
